/* What sim_run.c and sim_oracle.c share: the state of the one simulation that runs.
 *
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_STATE_H
#define TESTS_SIM_SIM_STATE_H

#include "engine/core/scheduler_internal.h"
#include "tests/sim/sim_offload.h"
#include "tests/sim/sim_run.h"
#include "tests/sim/sim_watch.h"
#include "tests/sim/sim_worker.h"

#define SIM_N_PAST 8

/* A request from its client's point of view. */
typedef struct sim_life {
    const sim_request *request;
    bool is_aborted;
    int32_t limit;  /* tokens in all */
    uint64_t chain; /* of all tokens so far */
    int32_t n_tokens;
    token_id last;
    uint64_t admitted_in; /* id of the step that did it last */
    uint64_t hit_in;      /* that step, or the one in which the load before it began */
    int32_t n_finished;
    int32_t n_released;
    int32_t n_known; /* block hashes whose contents the medium knows */
} sim_life;

/* The block hashes of a request that has finished: its blocks may still be found. */
typedef struct sim_past {
    int32_t n_hashes;
    block_hash hashes[SIM_MAX_LEN];
} sim_past;

/* A step in flight is its frame. */
typedef struct sim_frame {
    void *data;
    size_t n_bytes;
    size_t cap_bytes;
    uint64_t seen_step_id; /* last step whose result was there when it was made */
} sim_frame;

typedef struct sim_state {
    const sim_trace *trace;
    const sim_config *config;
    scheduler *sched;
    block_hasher *hasher;
    sim_medium medium;
    sim_watch watch; /* of the tiers' connector */
    sim_offload offload;
    sim_worker workers[SIM_MAX_RANKS];
    wire_limits limits;
    wire_scratch scratch;
    const sim_request *requests[SIM_MAX_REQUESTS]; /* those that were accepted, by id */
    sim_life lives[SIM_MAX_REQUESTS];
    sim_frame frames[SCHEDULER_MAX_STEPS_IN_FLIGHT]; /* a ring */
    int32_t first_frame;
    int32_t n_frames;
    uint64_t seen_step_id;  /* last one whose result has been applied */
    int32_t n_new_errors;   /* of the result that is being applied */
    uint64_t error_step_id; /* first step that was made after the last result with an error */
    int32_t op_idx;
    sim_past past[SIM_N_PAST];
    int32_t next_past;
    bool is_ending;  /* the scheduler lets go of what it has */
    bool has_errors; /* some request fails on the worker, which un-publishes in the middle */
    sim_totals *total;
} sim_state;

PGD_NORETURN void sim_fail(const sim_state *s, const char *file, int line, const char *fmt, ...)
    PGD_PRINTF(4, 5);

#define SIM_CHECK(s, cond, ...)                             \
    do {                                                    \
        if (PGD_UNLIKELY(!(cond)))                          \
            sim_fail((s), __FILE__, __LINE__, __VA_ARGS__); \
    } while (0)

#endif
