/* Added latency is what the server adds to a step of the simulated worker, whose duration is known:
 * a gap between two chunks minus one step, the time to the first chunk minus one step. Taking a
 * constant away moves every quantile by it, so no second histogram is kept. It may come out below
 * zero: a chunk that follows a late one is early. */
#include "engine/bench/bench_report.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define HISTOGRAM_ROWS  14
#define HISTOGRAM_WIDTH 50

static const struct {
    const char *name;
    double q;
} quantiles[] = {{"p50", 0.5}, {"p90", 0.9}, {"p95", 0.95}, {"p99", 0.99}};

static double per_second(double n, const bench_run *run)
{
    return run->result.duration_us > 0 ? n * 1e6 / (double)run->result.duration_us : 0;
}

static double per_token(double us, const bench_run *run)
{
    return run->result.n_output_tokens > 0 ? us / (double)run->result.n_output_tokens : 0;
}

static double tokens_per_chunk(const bench_result *r)
{
    return r->n_chunks > 0 ? (double)r->n_output_tokens / (double)r->n_chunks : 0;
}

static double added_ms(const latency_hist *h, double q, const bench_run *run)
{
    return (latency_hist_quantile(h, q) - run->sim_step_us) / 1e3;
}

/* --- JSON ------------------------------------------------------------------------------------- */

static void append_hist(strbuf *out, const char *name, const latency_hist *h)
{
    strbuf_appendf(out, ",\"%s\":{\"count\":%" PRIu64 ",\"mean\":%.4f", name, h->count,
                   latency_hist_mean(h) / 1e3);
    for (size_t i = 0; i < PGD_ARRAY_LEN(quantiles); i++)
        strbuf_appendf(out, ",\"%s\":%.4f", quantiles[i].name,
                       latency_hist_quantile(h, quantiles[i].q) / 1e3);
    strbuf_appendf(out, ",\"max\":%.4f}", (double)h->max_us / 1e3);
}

static void append_failures(strbuf *out, const bench_result *r)
{
    const char *comma = "";
    strbuf_append_str(out, ",\"failures\":{");
    for (int i = 0; i < BENCH_N_FAILURES; i++) {
        strbuf_appendf(out, "%s\"%s\":%" PRIu64, comma, bench_failure_name(i), r->n_failed[i]);
        comma = ",";
    }
    strbuf_append_str(out, "},\"failure_examples\":{");
    comma = "";
    for (int i = 0; i < BENCH_N_FAILURES; i++) {
        if (r->n_failed[i] == 0)
            continue;
        strbuf_appendf(out, "%s\"%s\":", comma, bench_failure_name(i));
        strbuf_append_json(out, r->detail[i], strlen(r->detail[i]));
        comma = ",";
    }
    strbuf_append_char(out, '}');
}

static void append_options(strbuf *out, const bench_load_opts *o)
{
    strbuf_append_str(out, ",\"model\":");
    strbuf_append_json(out, o->model, strlen(o->model));
    if (o->request_rate > 0)
        strbuf_appendf(out, ",\"request_rate\":%.6g", o->request_rate);
    else
        strbuf_append_str(out, ",\"request_rate\":\"inf\"");
    strbuf_appendf(out,
                   ",\"max_concurrency\":%" PRId64 ",\"input_len\":%" PRId64
                   ",\"output_len\":%" PRId64 ",\"range_ratio\":%.6g,\"prefix_len\":%" PRId64
                   ",\"num_prefixes\":%" PRId64 ",\"seed\":%" PRId64,
                   o->max_concurrency, o->input_len, o->output_len, o->range_ratio, o->prefix_len,
                   o->num_prefixes, o->seed);
}

void bench_report_json(strbuf *out, const bench_run *run, const bench_load_opts *opts,
                       const char *url)
{
    const bench_result *r = &run->result;
    strbuf_append_str(out, "{\"bench\":\"serve\",\"url\":");
    strbuf_append_json(out, url, strlen(url));
    append_options(out, opts);
    if (run->n_streams > 0)
        strbuf_appendf(out, ",\"streams\":%" PRId64, run->n_streams);
    strbuf_appendf(out, ",\"requests\":%" PRIu64 ",\"succeeded\":%" PRIu64 ",\"failed\":%" PRIu64,
                   r->n_started, r->n_succeeded, bench_result_n_failed(r));
    append_failures(out, r);
    strbuf_appendf(out,
                   ",\"gave_up\":%s,\"without_usage\":%" PRIu64 ",\"shorter_than_asked\":%" PRIu64
                   ",\"connections\":%" PRIu64 ",\"duration_s\":%.6f,\"requests_s\":%.4f"
                   ",\"input_tokens\":%" PRIu64 ",\"cached_tokens\":%" PRIu64
                   ",\"output_tokens\":%" PRIu64 ",\"input_tok_s\":%.2f,\"output_tok_s\":%.2f"
                   ",\"total_tok_s\":%.2f,\"chunks\":%" PRIu64 ",\"tokens_per_chunk\":%.4f",
                   r->gave_up ? "true" : "false", r->n_without_usage, r->n_short, r->n_connects,
                   (double)r->duration_us / 1e6, per_second((double)r->n_succeeded, run),
                   r->n_prompt_tokens, r->n_cached_tokens, r->n_output_tokens,
                   per_second((double)r->n_prompt_tokens, run),
                   per_second((double)r->n_output_tokens, run),
                   per_second((double)(r->n_prompt_tokens + r->n_output_tokens), run), r->n_chunks,
                   tokens_per_chunk(r));
    append_hist(out, "ttft_ms", &r->ttft);
    append_hist(out, "tpot_ms", &r->tpot);
    append_hist(out, "itl_ms", &r->itl);
    append_hist(out, "e2e_ms", &r->e2e);
    append_hist(out, "late_ms", &r->late);
    if (run->sim_step_us >= 0)
        strbuf_appendf(out,
                       ",\"sim_step_us\":%.0f,\"added_itl_ms\":{\"p50\":%.4f,\"p99\":%.4f}"
                       ",\"added_ttft_ms\":{\"p50\":%.4f,\"p99\":%.4f}",
                       run->sim_step_us, added_ms(&r->itl, 0.5, run), added_ms(&r->itl, 0.99, run),
                       added_ms(&r->ttft, 0.5, run), added_ms(&r->ttft, 0.99, run));
    if (run->has_server_cpu)
        strbuf_appendf(out, ",\"engine_cpu_us_per_token\":%.3f,\"worker_cpu_us_per_token\":%.3f",
                       per_token((double)run->engine_cpu_us, run),
                       per_token((double)run->worker_cpu_us, run));
    strbuf_appendf(out, ",\"client_cpu_us_per_token\":%.3f}",
                   per_token((double)run->client_cpu_us, run));
}

/* --- text ------------------------------------------------------------------------------------- */

static void text_hist(strbuf *out, const char *name, const latency_hist *h)
{
    if (h->count == 0)
        return;
    strbuf_appendf(out, "  %-6s %10.2f", name, latency_hist_mean(h) / 1e3);
    for (size_t i = 0; i < PGD_ARRAY_LEN(quantiles); i++)
        strbuf_appendf(out, " %10.2f", latency_hist_quantile(h, quantiles[i].q) / 1e3);
    strbuf_appendf(out, " %10.2f\n", (double)h->max_us / 1e3);
}

static void text_failures(strbuf *out, const bench_result *r)
{
    for (int i = 0; i < BENCH_N_FAILURES; i++) {
        if (r->n_failed[i] > 0)
            strbuf_appendf(out, "    %-12s %8" PRIu64 "   %s\n", bench_failure_name(i),
                           r->n_failed[i], r->detail[i]);
    }
    if (r->gave_up)
        strbuf_append_str(out, "    the server takes no connections: the rest was not sent\n");
}

static void text_notes(strbuf *out, const bench_run *run)
{
    const bench_result *r = &run->result;
    if (r->n_without_usage > 0)
        strbuf_appendf(out,
                       "  no usage in %" PRIu64 " answers: their chunks are counted as tokens\n",
                       r->n_without_usage);
    if (r->n_short > 0)
        strbuf_appendf(out, "  %" PRIu64 " answers were shorter than asked for\n", r->n_short);
    if (run->sim_step_us >= 0)
        strbuf_appendf(out,
                       "  added to a step of %.2f ms: per token p50 %.2f ms, p99 %.2f ms; to the "
                       "first p50 %.2f ms, p99 %.2f ms\n",
                       run->sim_step_us / 1e3, added_ms(&r->itl, 0.5, run),
                       added_ms(&r->itl, 0.99, run), added_ms(&r->ttft, 0.5, run),
                       added_ms(&r->ttft, 0.99, run));
    if (run->has_server_cpu)
        strbuf_appendf(
            out, "  CPU per token: engine %.1f us, worker %.1f us, this client %.1f us\n",
            per_token((double)run->engine_cpu_us, run), per_token((double)run->worker_cpu_us, run),
            per_token((double)run->client_cpu_us, run));
}

void bench_report_text(strbuf *out, const bench_run *run, const bench_load_opts *opts,
                       const char *url, bool with_histograms)
{
    const bench_result *r = &run->result;
    uint64_t n_failed = bench_result_n_failed(r);
    strbuf_appendf(out, "serve: %s at %s\n", opts->model, url);
    strbuf_appendf(out,
                   "  %" PRIu64 " requests in %.2f s: %" PRIu64 " succeeded, %" PRIu64
                   " failed; %.2f requests/s\n",
                   r->n_started, (double)r->duration_us / 1e6, r->n_succeeded, n_failed,
                   per_second((double)r->n_succeeded, run));
    text_failures(out, r);
    strbuf_appendf(out,
                   "  input  %10" PRIu64 " tokens %10.1f tokens/s, %" PRIu64 " from the cache\n"
                   "  output %10" PRIu64 " tokens %10.1f tokens/s, %.2f per chunk\n",
                   r->n_prompt_tokens, per_second((double)r->n_prompt_tokens, run),
                   r->n_cached_tokens, r->n_output_tokens,
                   per_second((double)r->n_output_tokens, run), tokens_per_chunk(r));
    strbuf_append_str(
        out, "  ms           mean        p50        p90        p95        p99        max\n");
    text_hist(out, "TTFT", &r->ttft);
    text_hist(out, "TPOT", &r->tpot);
    text_hist(out, "ITL", &r->itl);
    text_hist(out, "E2E", &r->e2e);
    text_hist(out, "late", &r->late);
    text_notes(out, run);
    if (!with_histograms)
        return;
    if (r->ttft.count > 0)
        strbuf_append_str(out, "TTFT\n");
    latency_hist_draw(&r->ttft, out, HISTOGRAM_ROWS, HISTOGRAM_WIDTH);
    if (r->itl.count > 0)
        strbuf_append_str(out, "ITL\n");
    latency_hist_draw(&r->itl, out, HISTOGRAM_ROWS, HISTOGRAM_WIDTH);
}

void bench_report_row_head(strbuf *out)
{
    strbuf_append_str(
        out, "                     requests    output tok/s   added ms/token     TTFT ms"
             "           CPU us/token          tokens\n"
             "  streams  step ms    ok  fail    all   /stream    p50     p99    p50     p99"
             "  engine worker client  /chunk\n");
}

void bench_report_row(strbuf *out, const bench_run *run)
{
    const bench_result *r = &run->result;
    double rate = per_second((double)r->n_output_tokens, run);
    strbuf_appendf(out, "  %7" PRId64, run->n_streams);
    if (run->sim_step_us >= 0)
        strbuf_appendf(out, " %8.2f", run->sim_step_us / 1e3);
    else
        strbuf_appendf(out, " %8s", "-");
    strbuf_appendf(out, " %5" PRIu64 " %5" PRIu64 " %7.0f %8.1f", r->n_succeeded,
                   bench_result_n_failed(r), rate, rate / (double)PGD_MAX(run->n_streams, 1));
    if (run->sim_step_us >= 0)
        strbuf_appendf(out, " %7.2f %7.2f", added_ms(&r->itl, 0.5, run),
                       added_ms(&r->itl, 0.99, run));
    else
        strbuf_appendf(out, " %7s %7s", "-", "-");
    strbuf_appendf(out, " %7.1f %7.1f", latency_hist_quantile(&r->ttft, 0.5) / 1e3,
                   latency_hist_quantile(&r->ttft, 0.99) / 1e3);
    if (run->has_server_cpu)
        strbuf_appendf(out, " %7.1f %6.1f", per_token((double)run->engine_cpu_us, run),
                       per_token((double)run->worker_cpu_us, run));
    else
        strbuf_appendf(out, " %7s %6s", "-", "-");
    strbuf_appendf(out, " %6.1f %7.2f\n", per_token((double)run->client_cpu_us, run),
                   tokens_per_chunk(r));
}
