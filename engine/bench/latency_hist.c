/* Log-linear buckets. A value v of n significant bits goes, from 2^10 up, to octave n - 10, place
 * (v >> (n - 10)) - 2^10 in it:
 *
 *   index   0 ... 1023 | 1024 ... 2047   | 2048 ... 3071   | ...
 *   value   0 ... 1023 | 1024 ... 2047   | 2048 ... 4095   | ...
 *   step    1          | 1               | 2               | 4
 *
 * Rejected: keeping every value and sorting (a long run of a thousand streams holds hundreds of
 * millions of gaps). */
#include "engine/bench/latency_hist.h"

#include <inttypes.h>
#include <math.h>

#include "common/mem.h"

#define PLACE_BITS 10
#define MAX_BITS   40
#define MAX_VALUE  ((UINT64_C(1) << MAX_BITS) - 1)
#define N_BUCKETS  ((size_t)(MAX_BITS - PLACE_BITS + 1) << PLACE_BITS)
#define MAX_ROWS   64

static size_t bucket_of(uint64_t v)
{
    int n_bits = 64 - __builtin_clzll(v | 1);
    int shift = n_bits > PLACE_BITS + 1 ? n_bits - PLACE_BITS - 1 : 0;
    return ((size_t)shift << PLACE_BITS) + (size_t)(v >> shift);
}

/* Smallest value of a bucket; of one behind the last, the smallest value too large. */
static uint64_t bucket_begin(size_t idx)
{
    if (idx < (2u << PLACE_BITS))
        return idx;
    size_t shift = (idx >> PLACE_BITS) - 1;
    return (uint64_t)(idx - (shift << PLACE_BITS)) << shift;
}

pgd_err latency_hist_init(latency_hist *h)
{
    *h = (latency_hist){.min_us = UINT64_MAX};
    h->buckets = mem_calloc(N_BUCKETS, sizeof(*h->buckets));
    return h->buckets != NULL ? PGD_OK : PGD_ENOMEM;
}

void latency_hist_deinit(latency_hist *h)
{
    mem_free(h->buckets);
    h->buckets = NULL;
}

void latency_hist_add(latency_hist *h, uint64_t us)
{
    us = PGD_MIN(us, MAX_VALUE);
    h->buckets[bucket_of(us)]++;
    h->count++;
    h->sum_us += (double)us;
    h->min_us = PGD_MIN(h->min_us, us);
    h->max_us = PGD_MAX(h->max_us, us);
}

double latency_hist_quantile(const latency_hist *h, double q)
{
    if (h->count == 0)
        return 0;
    uint64_t rank = (uint64_t)ceil(q * (double)h->count);
    rank = PGD_MIN(PGD_MAX(rank, 1u), h->count);
    if (rank == h->count)
        return (double)h->max_us;
    uint64_t seen = 0;
    size_t i = 0;
    for (; i < N_BUCKETS && seen + h->buckets[i] < rank; i++)
        seen += h->buckets[i];
    /* The middle of the bucket, which for steps of 1 is the value. */
    double middle = ((double)bucket_begin(i) + (double)bucket_begin(i + 1) - 1) / 2;
    return fmin(fmax(middle, (double)h->min_us), (double)h->max_us);
}

double latency_hist_mean(const latency_hist *h)
{
    return h->count > 0 ? h->sum_us / (double)h->count : 0;
}

static void draw_row(strbuf *out, double from_us, double to_us, uint64_t n, uint64_t most,
                     int width)
{
    strbuf_appendf(out, "  %10.2f - %-10.2f ms %10" PRIu64 "  ", from_us / 1e3, to_us / 1e3, n);
    int n_marks = n == 0 ? 0 : (int)ceil((double)n * width / (double)most);
    for (int i = 0; i < n_marks; i++)
        strbuf_append_char(out, '#');
    strbuf_append_char(out, '\n');
}

void latency_hist_draw(const latency_hist *h, strbuf *out, int n_rows, int width)
{
    uint64_t counts[MAX_ROWS] = {0};
    if (h->count == 0)
        return;
    double low = fmax((double)h->min_us, 1);
    double high = (double)h->max_us + 1;
    n_rows = PGD_MAX(PGD_MIN(n_rows, MAX_ROWS), 1);
    if (h->max_us - h->min_us < (uint64_t)n_rows)
        n_rows = 1;
    double step = log(high / low) / n_rows;
    uint64_t most = 0;
    for (size_t i = 0; i < N_BUCKETS; i++) {
        if (h->buckets[i] == 0)
            continue;
        double v = fmax((double)bucket_begin(i), low);
        int row = step > 0 ? (int)(log(v / low) / step) : 0;
        row = PGD_MIN(row, n_rows - 1);
        counts[row] += h->buckets[i];
        most = PGD_MAX(most, counts[row]);
    }
    for (int r = 0; r < n_rows; r++)
        draw_row(out, r == 0 ? (double)h->min_us : low * exp(step * r), low * exp(step * (r + 1)),
                 counts[r], most, width);
}
