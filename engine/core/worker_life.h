/* One worker, life after life: start or find it, hello, load, KV configuration, steps, death, again.
 *
 *   STARTING ──hello──► LOADING ──load_done──► PREPARING ──kv_ready──► READY
 *      ▲       any of them: exit, lost pipe, bad message, stall
 *      │                                 │
 *   BACKOFF ◄──reaped── DYING ◄──────────┘
 *                         └──reaped──► FAILED   when restarting cannot help, or when the
 *                                               restart_policy has seen enough
 *
 * Where lives come from is a worker_host's matter: a child process, or a worker at the URL
 * --worker. The latter is waited for in STARTING, without limit, and one that does not come as far
 * as a good hello (it serves another engine, or its token differs) is tried again after 0.5 to 8 s;
 * neither counts as a death. One that said hello and is lost does, as a child does: its host will
 * start it again, but not for ever one that never acknowledges a step.
 * When the level of our log changes the worker is told at the next turn, and every later life of
 * it. Nothing blocks except worker_life_stop. The caller polls the descriptors and calls
 * worker_life_turn. Clocks run on time awake: a turn that comes late (this process was stopped)
 * counts as MAX_TURN, so that our own sleep is not taken for the worker's.
 * Owns:    host, link, decode buffers
 * Thread:  core
 */
#ifndef ENGINE_CORE_WORKER_LIFE_H
#define ENGINE_CORE_WORKER_LIFE_H

#include "engine/core/core_sizes.h"
#include "engine/core/restart_policy.h"
#include "proto/scheduler_output.h"
#include "proto/step_result.h"

#define WORKER_LIFE_MAX_FDS   2
#define WORKER_LIFE_MAX_STEPS 4

typedef struct worker_life worker_life;

typedef enum worker_life_state {
    WORKER_LIFE_NONE,
    WORKER_LIFE_STARTING,
    WORKER_LIFE_LOADING,
    WORKER_LIFE_PREPARING,
    WORKER_LIFE_READY,
    WORKER_LIFE_DYING,
    WORKER_LIFE_BACKOFF,
    WORKER_LIFE_FAILED
} worker_life_state;

/* What is known of the worker; the sizes stay the same over restarts. */
typedef struct worker_facts {
    core_kv kv; /* n_blocks 0 before the first load */
    int32_t vocab_size;
    int32_t max_model_len; /* effective */
    uint64_t kv_bytes;
    uint64_t weight_bytes;
    uint64_t load_done_bytes;
    uint64_t load_total_bytes;
    uint64_t spawn_us; /* from start to hello, of the last life */
    uint64_t load_us;
    uint64_t pid; /* on its host, as it says */
    restart_policy restarts;
    pgd_err fatal_err; /* of a fault that no restart mends; PGD_OK when given up after restarts */
    char device_name[256];
    char numerics[128]; /* load_done_msg, of the last life */
    uint8_t model_fingerprint[32];
} worker_facts;

typedef struct worker_life_opts {
    const config *cfg;                /* borrow until destroy */
    const char *model_path;           /* borrow until destroy */
    const uint8_t *model_fingerprint; /* of our file, borrow until destroy; NULL = any */
    core_sizes sizes;
    int wake_fd; /* borrow until destroy; written when there is something to do in a turn */
    /* Callbacks, all from worker_life_turn. The worker has loaded: fills in what *kv tells of the
     * offload tier. NULL: there is none. PGD_OK or the reason to give up. */
    pgd_err (*on_loaded)(void *arg, kv_config_msg *kv, const worker_facts *facts, pgd_why *why);
    /* The worker is ready for steps; likewise. */
    pgd_err (*on_ready)(void *arg, const worker_facts *facts, pgd_why *why);
    /* Room for what a result makes? Results are held until then. */
    bool (*can_take_result)(void *arg);
    /* Valid and within the vocabulary. An error ends the worker. */
    pgd_err (*on_result)(void *arg, const step_result *result, pgd_why *why);
    /* Transfers of rank `rank` that have ended; done: [n], a borrow for the call. NULL: there is no
     * tier, and such a message is out of turn. An error ends the worker. */
    pgd_err (*on_transfers)(void *arg, int32_t rank, const kv_transfer_done *done, int32_t n_done,
                            pgd_why *why);
    /* The worker is dead and reaped; its steps are lost. Returns what that tells of requests. */
    poison_verdict (*on_lost)(void *arg, const char *why);
    /* Given up. */
    void (*on_failed)(void *arg, const char *why);
    void *arg;
} worker_life_opts;

PGD_MUST_USE pgd_err worker_life_create(worker_life **out, const worker_life_opts *opts,
                                        pgd_why *why);
/* worker_life_stop first. */
void worker_life_destroy(worker_life *w);
/* Does what is due; the first turn starts the worker. */
void worker_life_turn(worker_life *w);
int worker_life_get_fds(const worker_life *w, int fds[WORKER_LIFE_MAX_FDS]);
/* Longest time until the next turn. */
int worker_life_timeout_ms(const worker_life *w);
worker_life_state worker_life_get_state(const worker_life *w);
/* Borrow until destroy. */
const worker_facts *worker_life_get_facts(const worker_life *w);
/* No worker is there yet that knows us, and none was lost: it is for the operator to start it. */
bool worker_life_is_waiting(const worker_life *w);
/* What a request would have to wait for now: such a worker, or the end of one that is DYING and why
 * it is given up; else "". */
void worker_life_describe_wait(const worker_life *w, char *out, size_t cap);
/* 0 when there is no process. */
int64_t worker_life_get_pid(const worker_life *w);
/* False when the worker turned out to be stalled or gone: the step is lost, on_lost will follow.
 * READY only, at most WORKER_LIFE_MAX_STEPS unanswered. */
bool worker_life_send_step(worker_life *w, const scheduler_output *out);
/* Asks the worker to exit, kills it after 2 s, waits for its end. */
void worker_life_stop(worker_life *w);

#endif
