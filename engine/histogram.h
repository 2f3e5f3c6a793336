/* A fixed-bucket histogram of seconds or counts, as Prometheus expects it.
 *
 * Thread:  one at a time
 */
#ifndef ENGINE_HISTOGRAM_H
#define ENGINE_HISTOGRAM_H

#include "common/strbuf.h"

#define HISTOGRAM_MAX_BUCKETS 32

typedef struct histogram {
    const double *bounds; /* [n_bounds], ascending; static storage */
    int32_t n_bounds;
    uint64_t counts[HISTOGRAM_MAX_BUCKETS + 1]; /* per bucket, not cumulative; the last is +Inf */
    double sum;
} histogram;

void histogram_init(histogram *h, const double *bounds, int32_t n_bounds);
void histogram_add(histogram *h, double value);
uint64_t histogram_count(const histogram *h);
/* Value below which the share q in (0, 1] of the entries lie, interpolated inside its bucket; 0
 * when empty. */
double histogram_quantile(const histogram *h, double q);
/* Text form: _bucket, _sum and _count lines; labels without braces ("model_name=\"x\"") or "". Of the
 * bounds only those from low to high are shown: counts are cumulative, so each stays right. */
void histogram_append(const histogram *h, strbuf *out, const char *name, const char *labels,
                      double low, double high);

#endif
