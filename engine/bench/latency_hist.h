/* Latencies in microseconds, any number of them in fixed memory.
 *
 * Buckets are exact below 2,048 us and then 1,024 per octave, so a quantile is at most a thousandth
 * off; count, mean, minimum and maximum are exact.
 * Limits:  values above 2^40 us (12 days) count as that
 * Owns:    its buckets
 * Thread:  one at a time
 */
#ifndef ENGINE_BENCH_LATENCY_HIST_H
#define ENGINE_BENCH_LATENCY_HIST_H

#include "common/strbuf.h"

typedef struct latency_hist {
    uint64_t *buckets;
    uint64_t count;
    uint64_t min_us;
    uint64_t max_us;
    double sum_us;
} latency_hist;

PGD_MUST_USE pgd_err latency_hist_init(latency_hist *h);
void latency_hist_deinit(latency_hist *h);
void latency_hist_add(latency_hist *h, uint64_t us);
/* The value at rank ceil(q * count), q in (0, 1]: at least that share of the values is not above
 * it. 0 when empty. */
double latency_hist_quantile(const latency_hist *h, double q);
double latency_hist_mean(const latency_hist *h);
/* Rows of "from - to  count  ####", at most n_rows of them, with bounds that grow evenly on a
 * logarithmic scale between the smallest and the largest value; nothing when empty. */
void latency_hist_draw(const latency_hist *h, strbuf *out, int n_rows, int width);

#endif
