/* Whether loading a prefix is quicker than computing it, by what was measured.
 *
 *   load    = n_blocks * us_per_load + n_disk_blocks * us_per_read
 *   compute = n_tokens * us_per_token
 *   worth it: load <= compute, or a rate that it takes is not known yet
 *
 * n_blocks: those to be loaded and those that loads under way have still to bring. Each rate is a
 * moving average, new = old + (us / n - old) * w, the first measurement taken as it is; w is 1/8, and
 * 1/2 for a better one than the average: a busy machine makes single moves look slow, never fast.
 *
 * What is refused is not measured either, so after some refusals one is tried all the same: after 4,
 * then 8, 16 .. 256 as long as it does not help. One bad moment costs a few loads that way, a disk
 * that really is slow next to nothing.
 * Thread:  any
 */
#ifndef ENGINE_OFFLOAD_OFFLOAD_COST_H
#define ENGINE_OFFLOAD_OFFLOAD_COST_H

#include "common/err.h"

/* Microseconds; 0 = not known. */
typedef struct offload_rates {
    double us_per_load; /* block from host to device */
    double us_per_read; /* block from disk to host */
    double us_per_token;
    struct {
        int32_t n_refused; /* since the last that was tried */
        int32_t n_most;    /* before the next is; 0 = as at first */
    } refusals[2];         /* of work without and with reads from disk */
} offload_rates;

typedef struct offload_work {
    int32_t n_tokens;
    int64_t n_blocks;
    int32_t n_disk_blocks;
} offload_work;

/* n of them took so long; nothing is learnt of n 0 or time 0. */
void offload_rate_note(double *rate, uint64_t us, uint64_t n);
bool offload_is_worth(const offload_rates *rates, const offload_work *work);
/* Whether to load: it is worth it, or it is time to measure again. */
bool offload_should_load(offload_rates *rates, const offload_work *work);

#endif
