/* The core thread of one replica: starts and watches the worker, steps the scheduler, survives the
 * worker's death.
 *
 * The io thread talks to it through two bounded rings (commands in, events out) and a wake
 * callback; there is no other sharing. Two steps are in flight while there is work. When the worker
 * dies or hangs: the replica stops stepping, its requests go back to waiting, the worker is
 * restarted after the restart_policy, requests resume. When that gives up every request fails and
 * the state is CORE_FAILED (the process then exits with status 70).
 * Thread:  each function says; "io" = the one thread that created it
 */
#ifndef ENGINE_CORE_CORE_LOOP_H
#define ENGINE_CORE_CORE_LOOP_H

#include "common/model/model_config.h"
#include "config/config.h"
#include "engine/core/core_state.h"
#include "engine/core/request.h"
#include "engine/core/restart_policy.h"
#include "engine/core/scheduler.h"
#include "engine/histogram.h"
#include "engine/kv/kv_events_link.h"
#include "engine/offload/offload_stats.h"
#include "proto/kv_layout.h"
#include "proto/step_result.h"

typedef struct core_loop core_loop;

typedef enum core_event_kind {
    CORE_EVENT_TOKEN,
    CORE_EVENT_FINISHED,
    CORE_EVENT_STATE,
    CORE_EVENT_CACHE_RESET
} core_event_kind;

typedef enum core_refusal {
    CORE_REFUSAL_NONE,
    CORE_REFUSAL_QUEUE_FULL, /* 429 */
    CORE_REFUSAL_NEVER_FITS, /* 400 */
    CORE_REFUSAL_WORKER,     /* 503: given up on the worker */
    CORE_REFUSAL_POISON,     /* 500: this request kills workers */
    CORE_REFUSAL_DRAINING    /* 503 */
} core_refusal;

/* What became of a prefix-cache reset. */
typedef enum core_reset {
    CORE_RESET_DONE,
    CORE_RESET_HELD,  /* requests hold blocks: nothing was done */
    CORE_RESET_MOVING /* the device's was; blocks are on their way between the tiers */
} core_reset;

typedef struct core_event {
    core_event_kind kind;
    uint64_t request_id;
    token_id token;                               /* TOKEN */
    int32_t n_logprobs;                           /* TOKEN: entries of logprobs */
    token_logprob logprobs[PGD_MAX_LOGPROBS + 1]; /* the sampled token first */
    /* TOKEN: with the first one, the prompt's log probabilities if they were asked for, laid out as
     * in request.h; the receiver's, mem_free. Else NULL. */
    token_logprob *prompt_logprobs;
    request_status status; /* FINISHED */
    request_error error;   /* FINISHED with REQUEST_FINISHED_ERROR */
    core_refusal refusal;  /* FINISHED with REQUEST_FINISHED_ERROR */
    token_id stop_token;   /* FINISHED: stop_token_id that ended it, or -1 */
    int32_t
        num_cached_tokens;   /* TOKEN and FINISHED: prefix hit of the first admission, 0 if none */
    int32_t num_host_tokens; /* of them, those that were loaded from the host tier */
    int32_t num_disk_tokens; /* and those that came up from disk */
    int32_t num_preemptions; /* TOKEN and FINISHED: so far */
    uint64_t
        scheduled_us; /* TOKEN and FINISHED: last admission before the first token, 0 if none */
    uint64_t time_us; /* clock_now_us when the core thread made the event */
    core_state state; /* STATE */
    core_reset reset; /* CACHE_RESET */
} core_event;

typedef struct core_kv_group {
    kv_group_layout layout;
    int32_t n_layers;
} core_kv_group;

typedef struct core_stats {
    core_state state;
    scheduler_stats scheduler;
    uint64_t n_steps;
    histogram step_tokens;     /* scheduled tokens of each acknowledged step */
    uint64_t last_progress_us; /* when the core loop last finished a turn while it had work, or was
                                  idle */
    uint64_t load_done_bytes;  /* progress of loading */
    uint64_t load_total_bytes;
    uint64_t n_worker_restarts;
    uint64_t n_restarts_by_reason[RESTART_N_REASONS];
    uint64_t worker_pid;
    int32_t n_kv_blocks;   /* null block not counted; 0 before the first start */
    int32_t max_model_len; /* effective */
    int32_t max_pool_len;  /* of a request that the KV pool can hold alone, at most max_model_len; 0
                              before the first start */
    double n_full_length;  /* requests of max_model_len that the KV pool holds at the same time */
    int32_t n_kv_groups;
    core_kv_group kv_groups[PGD_MAX_KV_GROUPS];
    int32_t n_queued_commands;
    uint64_t kv_bytes;
    kv_events_link_stats kv_events; /* zeros unless kv_events_url */
    offload_stats offload;          /* zeros without a tier */
    uint64_t load_us, spawn_us;
    char device[64]; /* as configured, auto resolved */
    char device_name[256];
    char why[512];    /* reason of RECOVERING or FAILED */
    pgd_err fail_err; /* of FAILED; PGD_OK when the worker could not be kept running */
} core_stats;

typedef struct core_loop_opts {
    const config *cfg;         /* borrow until destroy */
    const model_config *model; /* borrow until destroy; NULL with --device sim */
    const char *model_path;    /* borrow until destroy */
    /* [32], borrow until destroy: the worker must have the same file; NULL = any */
    const uint8_t *model_fingerprint;
    const uint8_t *hash_seed; /* [32], borrow until destroy */
    void (*wake)(void *arg);  /* called on the core thread after events were pushed; must be cheap
                                  and thread-safe */
    void *wake_arg;
    void (*beat)(void); /* called on the core thread at least every beat_us while it turns, idle or
                           not; must not wait. NULL = none */
    uint64_t beat_us;
} core_loop_opts;

PGD_MUST_USE pgd_err core_loop_create(core_loop **out, const core_loop_opts *opts, pgd_why *why);
/* Starts the core thread, which starts the worker. Thread: io */
PGD_MUST_USE pgd_err core_loop_start(core_loop *c, pgd_why *why);
/* Finishes what runs within drain_s (0 = abort now), ends the worker, joins the thread. Thread: io
 */
void core_loop_stop(core_loop *c, uint32_t drain_s);
/* As core_loop_stop without waiting: new submits are refused, a STATE event CORE_STOPPED says when
 * all is done; then call core_loop_stop. Thread: io */
void core_loop_drain(core_loop *c, uint32_t drain_s);
void core_loop_destroy(core_loop *c);

/* Takes the request; its life ends with exactly one FINISHED event. CORE_REFUSAL_QUEUE_FULL or
 * _DRAINING or _WORKER: the caller keeps it. While the worker loads or recovers requests are
 * accepted and wait. Thread: io */
PGD_MUST_USE core_refusal core_loop_submit(core_loop *c, request *r);
/* Ends it within one step; its FINISHED event (ABORTED) still comes. Unknown ids are ignored.
 * Thread: io */
void core_loop_abort(core_loop *c, uint64_t request_id);
/* The same for one whose text has come to a stop string: it counts as STOPPED. */
void core_loop_end_at_stop(core_loop *c, uint64_t request_id);
/* Next event, false when there is none. Thread: io */
bool core_loop_poll(core_loop *c, core_event *out);
/* A consistent snapshot. Thread: any */
void core_loop_get_stats(const core_loop *c, core_stats *out);
/* Borrow until destroy, to be read; NULL unless kv_cache_metrics. Thread: any */
const kv_residency *core_loop_get_residency(const core_loop *c);
/* Asks for a prefix-cache reset, of the tiers behind the device too if so wanted; a CACHE_RESET
 * event says what became of it. False when one is under way already, or the core thread does not run. Thread: io */
PGD_MUST_USE bool core_loop_reset_prefix_cache(core_loop *c, bool with_tiers);

#endif
