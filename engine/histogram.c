/* Counts are kept per bucket and summed when printed: an add touches one counter. */
#include "engine/histogram.h"

#include <string.h>

void histogram_init(histogram *h, const double *bounds, int32_t n_bounds)
{
    PGD_ASSERT(n_bounds <= HISTOGRAM_MAX_BUCKETS);
    memset(h, 0, sizeof(*h));
    h->bounds = bounds;
    h->n_bounds = n_bounds;
}

void histogram_add(histogram *h, double value)
{
    int32_t i = 0;
    while (i < h->n_bounds && value > h->bounds[i])
        i++;
    h->counts[i]++;
    h->sum += value;
}

uint64_t histogram_count(const histogram *h)
{
    uint64_t n = 0;
    for (int32_t i = 0; i <= h->n_bounds; i++)
        n += h->counts[i];
    return n;
}

double histogram_quantile(const histogram *h, double q)
{
    double rank = q * (double)histogram_count(h);
    double below = 0;
    for (int32_t i = 0; i < h->n_bounds; i++) {
        double n = (double)h->counts[i];
        if (n > 0 && below + n >= rank) {
            double low = i > 0 ? h->bounds[i - 1] : 0;
            return low + (h->bounds[i] - low) * (rank - below) / n;
        }
        below += n;
    }
    return h->n_bounds > 0 && below < rank ? h->bounds[h->n_bounds - 1] : 0;
}

void histogram_append(const histogram *h, strbuf *out, const char *name, const char *labels,
                      double low, double high)
{
    const char *comma = labels[0] != '\0' ? "," : "";
    uint64_t total = 0;
    for (int32_t i = 0; i < h->n_bounds; i++) {
        total += h->counts[i];
        if (h->bounds[i] < low || h->bounds[i] > high)
            continue;
        strbuf_appendf(out, "%s_bucket{%s%sle=\"%g\"} %llu\n", name, labels, comma, h->bounds[i],
                       (unsigned long long)total);
    }
    total += h->counts[h->n_bounds];
    strbuf_appendf(out, "%s_bucket{%s%sle=\"+Inf\"} %llu\n", name, labels, comma,
                   (unsigned long long)total);
    strbuf_appendf(out, "%s_sum{%s} %.9g\n", name, labels, h->sum);
    strbuf_appendf(out, "%s_count{%s} %llu\n", name, labels, (unsigned long long)total);
}
