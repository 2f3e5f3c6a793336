/* Ratios are to the first row, which had no tier. */
#include "engine/bench/bench_offload_report.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/strbuf.h"

void bench_offload_report_text(const bench_offload_report *r)
{
    const bench_offload_row *none = &r->rows[0];
    printf(
        "offload: %s on %s\n"
        "  %" PRId64 " conversations of %" PRId64 " turns, %" PRId64
        " at a time: prompts of %" PRId64 " tokens and %" PRId64 " more each turn, %" PRId64
        " out\n"
        "  the device pool holds %.0f tokens, all of them have %" PRId64 " (%.1f times as many)\n\n"
        "        first token of later turns, ms          all tokens       prompt tokens found in\n"
        "  tier    median             p99                per second       device   host   disk\n",
        r->model, r->device, r->conversations, r->turns, r->concurrency, r->prefix_len, r->turn_len,
        r->output_len, r->pool_tokens, r->all_tokens, (double)r->all_tokens / r->pool_tokens);
    for (const bench_offload_row *w = r->rows; w < r->rows + r->n_rows; w++)
        printf("  %s  %8.1f (x%5.3f)  %8.1f (x%5.3f)  %9.1f (x%5.2f)  %5.1f %% %5.1f %% %5.1f %%\n",
               w->tier, w->ttft_median_ms, w->ttft_median_ms / none->ttft_median_ms, w->ttft_p99_ms,
               w->ttft_p99_ms / none->ttft_p99_ms, w->total_tok_s,
               w->total_tok_s / none->total_tok_s, 100 * w->device, 100 * w->host, 100 * w->disk);
    if (r->pairs > 0)
        printf(
            "\n  when nothing hits: %.1f tokens/s without a tier, %.1f with host: %+.1f %% time, "
            "%+.1f %% CPU time, median of %" PRId64 " pairs\n",
            r->no_hit_none_tok_s, r->no_hit_host_tok_s, 100 * r->overhead, 100 * r->cpu_overhead,
            r->pairs);
}

static void append_rows(strbuf *out, const bench_offload_report *r)
{
    const bench_offload_row *none = &r->rows[0];
    for (const bench_offload_row *w = r->rows; w < r->rows + r->n_rows; w++)
        strbuf_appendf(out,
                       "%s{\"tier\":\"%s\",\"ttft_ms\":{\"median\":%.3f,\"p99\":%.3f},"
                       "\"total_tok_s\":%.2f,\"ttft_ratio\":%.4f,\"throughput_ratio\":%.4f,"
                       "\"hit_share\":{\"device\":%.4f,\"host\":%.4f,\"disk\":%.4f}}",
                       w != none ? "," : "", w->tier, w->ttft_median_ms, w->ttft_p99_ms,
                       w->total_tok_s, w->ttft_median_ms / none->ttft_median_ms,
                       w->total_tok_s / none->total_tok_s, w->device, w->host, w->disk);
}

void bench_offload_report_json(const bench_offload_report *r)
{
    strbuf out;
    strbuf_init(&out);
    strbuf_append_str(&out, "{\"bench\":\"offload\",\"model\":");
    strbuf_append_json(&out, r->model, strlen(r->model));
    strbuf_append_str(&out, ",\"device\":");
    strbuf_append_json(&out, r->device, strlen(r->device));
    strbuf_appendf(&out,
                   ",\"conversations\":%" PRId64 ",\"turns\":%" PRId64 ",\"concurrency\":%" PRId64
                   ",\"prefix_len\":%" PRId64 ",\"turn_len\":%" PRId64 ",\"output_len\":%" PRId64
                   ",\"pool_tokens\":%.0f,\"all_tokens\":%" PRId64 ",\"tiers\":[",
                   r->conversations, r->turns, r->concurrency, r->prefix_len, r->turn_len,
                   r->output_len, r->pool_tokens, r->all_tokens);
    append_rows(&out, r);
    strbuf_append_char(&out, ']');
    if (r->pairs > 0)
        strbuf_appendf(
            &out,
            ",\"no_hits\":{\"pairs\":%" PRId64 ",\"none_tok_s\":%.2f,\"host_tok_s\":%.2f,"
            "\"overhead\":%.4f,\"cpu_overhead\":%.4f}",
            r->pairs, r->no_hit_none_tok_s, r->no_hit_host_tok_s, r->overhead, r->cpu_overhead);
    strbuf_append_str(&out, "}\n");
    if (out.failed)
        fputs("paged bench: out of memory\n", stderr);
    else
        fwrite(out.data, 1, out.n_bytes, stdout);
    strbuf_deinit(&out);
}
