/* A scheduler with both ends of its messages and no model, for `paged bench sched`.
 *
 * One step is what core thread and worker do around a forward pass: schedule, encode and decode the
 * step, encode and decode its result, update; two steps are out at a time, as in the core loop. The
 * tokens are made up. Sized at create for max_running requests; requests and their hashes are made
 * outside of what is timed, as the pool threads do.
 * Thread:  one at a time
 */
#ifndef ENGINE_BENCH_SCHED_RIG_H
#define ENGINE_BENCH_SCHED_RIG_H

#include "common/err.h"

#define SCHED_RIG_BLOCK_SIZE  16
#define SCHED_RIG_LONG_PROMPT 32768 /* tokens */
#define SCHED_RIG_MAX_STEPS   4096

typedef struct sched_rig sched_rig;

typedef struct sched_rig_opts {
    int32_t max_running;
    int32_t n_blocks; /* null block included; at least sched_rig_n_blocks_for */
    int32_t n_groups; /* full attention, then sliding windows; at most PGD_MAX_KV_GROUPS */
} sched_rig_opts;

/* Microseconds of one step, by part. */
typedef struct sched_rig_step {
    double schedule_us;
    double encode_us; /* of the step, on the core thread */
    double decode_us; /* on the worker */
    double result_us; /* encode on the worker and decode on the core thread */
    double update_us;
    double total_us; /* without result_us: what the goal is about */
} sched_rig_step;

typedef struct sched_rig_run {
    /* [max_samples], caller's. Each is one step; with fewer requests than a block has tokens the
     * mean of as many steps, so that every sample has its share of blocks that become full. */
    sched_rig_step *samples;
    int32_t max_samples;
    int32_t n_samples;
    double allocations_per_step; /* of all heap functions of common/mem, all six parts */
    double hit_rate;             /* of the prompts, as the scheduler counted it */
} sched_rig_run;

/* Blocks, null block included, that n_running requests of n_steps steps take, or one of
 * SCHED_RIG_LONG_PROMPT. */
int32_t sched_rig_n_blocks_for(int32_t n_running, int32_t n_steps, int32_t n_groups);
/* Errors: PGD_EINVAL, PGD_ENOMEM, PGD_EUNSUPPORTED */
PGD_MUST_USE pgd_err sched_rig_create(sched_rig **out, const sched_rig_opts *opts);
void sched_rig_destroy(sched_rig *g);
/* Leaves the pool as a long life does: every block cached, those that are handed out one after the
 * other far apart in memory. */
PGD_MUST_USE pgd_err sched_rig_age(sched_rig *g);
/* n_running requests decode for n_steps steps; the first hit_rate of each prompt is in the cache
 * when it comes. */
PGD_MUST_USE pgd_err sched_rig_decode(sched_rig_run *run, sched_rig *g, int32_t n_running,
                                      double hit_rate, int32_t n_steps);
/* us: [n] times of admitting a cached prompt of SCHED_RIG_LONG_PROMPT tokens on the core thread, from
 * the moment it is handed over until its step is encoded; nothing of it is in the CPU's caches. */
PGD_MUST_USE pgd_err sched_rig_admit(double *us, sched_rig *g, int32_t n);

#endif
