/* Stands between the scheduler and a KV connector and notes what they say to each other.
 *
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_WATCH_H
#define TESTS_SIM_SIM_WATCH_H

#include "engine/core/scheduler_internal.h"
#include "tests/sim/sim_trace.h"

typedef struct sim_watch {
    kv_connector inner;
    const scheduler *sched;
    int32_t n_put_off; /* requests that are to be asked for again; the scheduler's user clears it */
    uint64_t load_step[SIM_MAX_REQUESTS]; /* in which the last load began, 0 = none */
    /* Has been put off or loaded: its place in the queue is the tier's doing. */
    bool was_delayed[SIM_MAX_REQUESTS];
    bool has_lost_patience; /* a request waited for others' blocks as often as it may */
    uint64_t n_loads;
    uint64_t n_failed_loads; /* in part */
    uint64_t n_resumed;      /* loads for a request that was preempted */
    uint64_t n_recomputed;   /* admissions of one without a load */
    uint64_t n_delays;
} sim_watch;

/* A connector that asks the inner one. Borrows until the end; sched is to be set before the first
 * step. */
kv_connector sim_watch_connector(sim_watch *w, const kv_connector *inner);

#endif
