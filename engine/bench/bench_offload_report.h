/* The figures of `paged bench offload`, as text and as JSON.
 *
 * Thread:  any
 */
#ifndef ENGINE_BENCH_BENCH_OFFLOAD_REPORT_H
#define ENGINE_BENCH_BENCH_OFFLOAD_REPORT_H

#include "common/err.h"

#define BENCH_OFFLOAD_MAX_TIERS 3

/* What the conversations took with one choice of tiers. */
typedef struct bench_offload_row {
    const char *tier;
    double ttft_median_ms, ttft_p99_ms; /* of turns behind the first */
    double total_tok_s;                 /* of all turns, prompts and outputs */
    double device, host, disk; /* shares of those turns' prompt tokens that were found there */
} bench_offload_row;

typedef struct bench_offload_report {
    const char *model;
    const char *device;
    int64_t conversations, turns, concurrency, prefix_len, turn_len, output_len;
    int64_t all_tokens;                              /* of all conversations at their end */
    double pool_tokens;                              /* that the device pool holds */
    bench_offload_row rows[BENCH_OFFLOAD_MAX_TIERS]; /* [n_rows]; the first is without a tier */
    int n_rows;
    int64_t pairs; /* runs without hits, 0 = none; then their medians */
    double no_hit_none_tok_s, no_hit_host_tok_s;
    double overhead;     /* time with the host tier / time without, - 1 */
    double cpu_overhead; /* the same of CPU time, which neighbours disturb less */
} bench_offload_report;

/* To stdout. */
void bench_offload_report_text(const bench_offload_report *r);
void bench_offload_report_json(const bench_offload_report *r);

#endif
