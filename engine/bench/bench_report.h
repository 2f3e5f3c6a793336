/* Results as text and as JSON. The same figures in both; JSON has all of them.
 *
 * Thread:  any
 */
#ifndef ENGINE_BENCH_BENCH_REPORT_H
#define ENGINE_BENCH_BENCH_REPORT_H

#include "engine/bench/bench_load.h"

typedef struct bench_run {
    bench_result result;
    int64_t n_streams;  /* of a row of --streams, 0 = not one */
    double sim_step_us; /* what a token takes at least; < 0 = not known */
    bool has_server_cpu;
    uint64_t engine_cpu_us; /* during the run */
    uint64_t worker_cpu_us;
    uint64_t client_cpu_us;
} bench_run;

/* One JSON object without a newline. */
void bench_report_json(strbuf *out, const bench_run *run, const bench_load_opts *opts,
                       const char *url);
/* A page of text. */
void bench_report_text(strbuf *out, const bench_run *run, const bench_load_opts *opts,
                       const char *url, bool with_histograms);
/* The table of several rows: its head, and one line. */
void bench_report_row_head(strbuf *out);
void bench_report_row(strbuf *out, const bench_run *run);

#endif
