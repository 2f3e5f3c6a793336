/* GET /metrics: the Prometheus text page, made from one table.
 *
 * A row is a family: its name without prefix, its type, where its value lies in a scrape (everything
 * is copied or computed into one struct first), or what writes its samples if it has labels of its
 * own. Every family is shown as paged_NAME; those that dashboards and autoscalers know from vLLM are
 * shown a second time as vllm:NAME, with the same unit and labels, and of a histogram's bounds those
 * that they know. */
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "engine/http/http_api.h"
#include "engine/http/http_errors.h"
#include "engine/process_info.h"

typedef struct scrape {
    const http_api *api;
    http_counters http;
    core_stats core;
    engine_metrics requests;
    kv_residency_stats residency;
    process_info process;
    const config *cfg;
    double ready;
    double uptime_s;
    double n_waiting;
    double usage;
    double n_blocks_used;
    double n_blocks_free;
    double n_connections;
    double n_pool_jobs;
    double n_rejections;
    double n_request_bytes;
    double n_answer_bytes;
} scrape;

typedef struct family family;

typedef struct page {
    strbuf b;
    const scrape *s;
    char labels[600];     /* model_name and engine; holds any served_model_name, escaped */
    const family *family; /* being written */
    char name[96];        /* its, with prefix */
    double low, high;     /* histogram bounds to show */
} page;

typedef enum metric_type { GAUGE, COUNTER, HISTOGRAM } metric_type;
typedef enum value_type { U64, I32, F64, SAMPLES } value_type;

struct family {
    const char *name; /* counters end in _total */
    metric_type type;
    value_type value;
    size_t at;                /* in scrape; histograms too */
    void (*samples)(page *p); /* SAMPLES */
    bool is_vllm;             /* shown under both names */
    bool is_tokens;           /* histogram: bounds up to the model's length are enough */
    double vllm_low;          /* histogram: least bound under vllm: */
    const char *help;
};

/* --- samples with labels of their own --------------------------------------------------------- */

static void append_escaped(strbuf *b, const char *text)
{
    for (const char *c = text; *c != '\0'; c++) {
        if (*c == '"' || *c == '\\')
            strbuf_append_char(b, '\\');
        strbuf_append_char(b, (char)((unsigned char)*c < 0x20 ? '?' : *c));
    }
}

static void sample(page *p, const char *label, const char *text, double value)
{
    strbuf_appendf(&p->b, "%s{%s,%s=\"", p->name, p->labels, label);
    append_escaped(&p->b, text);
    strbuf_appendf(&p->b, "\"} %.17g\n", value);
}

static void samples_finished(page *p)
{
    static const char *const reasons[] = {[GENERATION_STOP] = "stop",
                                          [GENERATION_LENGTH] = "length",
                                          [GENERATION_ABORT] = "abort",
                                          [GENERATION_ERROR] = "error"};
    for (int i = GENERATION_STOP; i <= GENERATION_ERROR; i++)
        sample(p, "finished_reason", reasons[i], (double)p->s->requests.n_finished[i]);
}

static void samples_waiting(page *p)
{
    bool has_worker = p->s->core.state == CORE_READY || p->s->core.state == CORE_DRAINING;
    double n_deferred = has_worker ? p->s->core.scheduler.n_loading : p->s->n_waiting;
    sample(p, "reason", "capacity", p->s->n_waiting - n_deferred);
    sample(p, "reason", "deferred", n_deferred);
}

static bool has_tier(const scrape *s)
{
    return s->cfg->kv_offload_memory > 0;
}

static bool has_disk_tier(const scrape *s)
{
    return has_tier(s) && s->cfg->kv_offload_dir[0] != '\0';
}

static void samples_source(page *p)
{
    sample(p, "source", "computed", (double)p->s->core.scheduler.n_prompt_computed_tokens);
    sample(p, "source", "local_cache", (double)p->s->core.scheduler.n_prefix_hit_tokens);
    if (has_tier(p->s))
        sample(p, "source", "external", (double)p->s->core.scheduler.n_external_hit_tokens);
}

static void samples_accepted(page *p)
{
    const scheduler_stats *k = &p->s->core.scheduler;
    for (int32_t i = 0; i < k->num_speculative_tokens; i++) {
        char position[16];
        snprintf(position, sizeof(position), "%d", i);
        sample(p, "position", position, (double)k->n_accepted_per_pos[i]);
    }
}

static void samples_cache_config(page *p)
{
    strbuf_appendf(&p->b,
                   "%s{%s,block_size=\"%" PRId64
                   "\",num_gpu_blocks=\"%d\",cache_dtype=\"%s\",enable_prefix_caching=\"%s\"} 1\n",
                   p->name, p->labels, p->s->cfg->block_size, p->s->core.n_kv_blocks,
                   p->s->cfg->dtype_kv, p->s->cfg->enable_prefix_caching ? "True" : "False");
}

static void samples_kv_groups(page *p)
{
    for (int32_t i = 0; i < p->s->core.n_kv_groups; i++) {
        const core_kv_group *g = &p->s->core.kv_groups[i];
        strbuf_appendf(&p->b,
                       "%s{%s,group=\"%d\",kind=\"%s\",window=\"%d\",block_size=\"%d\"} %d\n",
                       p->name, p->labels, i, attention_kind_name((attention_kind)g->layout.kind),
                       g->layout.window, g->layout.block_size, g->n_layers);
    }
}

static void samples_worker(page *p)
{
    const core_stats *c = &p->s->core;
    if (c->worker_pid == 0)
        return;
    strbuf_appendf(&p->b, "%s{%s,rank=\"0\",device=\"%s\",pid=\"%" PRIu64 "\",device_name=\"",
                   p->name, p->labels, c->device, c->worker_pid);
    append_escaped(&p->b, c->device_name);
    strbuf_append_str(&p->b, "\"} 1\n");
}

static void samples_restarts(page *p)
{
    for (restart_reason r = 0; r < RESTART_N_REASONS; r++)
        sample(p, "reason", restart_policy_reason_name(r),
               (double)p->s->core.n_restarts_by_reason[r]);
}

static void samples_hits(page *p)
{
    const scheduler_stats *k = &p->s->core.scheduler;
    sample(p, "tier", "device", (double)k->n_prefix_hit_tokens);
    sample(p, "tier", "host", (double)(k->n_external_hit_tokens - k->n_disk_hit_tokens));
    if (has_disk_tier(p->s))
        sample(p, "tier", "disk", (double)k->n_disk_hit_tokens);
}

static uint64_t value_at(const void *stats, size_t at)
{
    return *(const uint64_t *)(const void *)((const char *)stats + at);
}

/* One sample of each tier there is; the family's value lies in its offload_tier_stats. */
static void samples_tiers(page *p)
{
    const offload_stats *o = &p->s->core.offload;
    sample(p, "tier", "host", (double)value_at(&o->host, p->family->at));
    if (has_disk_tier(p->s))
        sample(p, "tier", "disk", (double)value_at(&o->disk, p->family->at));
}

/* One of each direction too; the value lies in the offload_flow. */
static void samples_flows(page *p)
{
    const offload_stats *o = &p->s->core.offload;
    const struct {
        const char *labels;
        const offload_flow *flow;
    } rows[] = {{"tier=\"host\",direction=\"store\"", &o->host.store},
                {"tier=\"host\",direction=\"load\"", &o->host.load},
                {"tier=\"disk\",direction=\"store\"", &o->disk.store},
                {"tier=\"disk\",direction=\"load\"", &o->disk.load}};
    double scale = p->family->at == offsetof(offload_flow, us) ? 1e-6 : 1;
    for (int i = 0; i < (has_disk_tier(p->s) ? 4 : 2); i++)
        strbuf_appendf(&p->b, "%s{%s,%s} %.17g\n", p->name, p->labels, rows[i].labels,
                       (double)value_at(rows[i].flow, p->family->at) * scale);
}

static const char *route_name(int route_idx)
{
    const char *path = http_api_route_path(route_idx);
    return path != NULL ? path : "other";
}

/* Of the many combinations only those that happened. */
static void samples_http(page *p)
{
    const http_metrics *m = &p->s->api->metrics;
    for (int r = 0; r < HTTP_METRICS_MAX_ROUTES; r++) {
        for (int i = 0; i < HTTP_METRICS_MAX_METHODS * HTTP_METRICS_MAX_STATUSES; i++) {
            int method = i / HTTP_METRICS_MAX_STATUSES;
            int status = i % HTTP_METRICS_MAX_STATUSES;
            uint64_t n = m->n_answers[r][method][status];
            if (n > 0)
                strbuf_appendf(&p->b,
                               "%s{%s,handler=\"%s\",method=\"%s\",status=\"%d\"} %" PRIu64 "\n",
                               p->name, p->labels, route_name(r), http_metrics_method(method),
                               http_status_at(status), n);
        }
    }
}

static void samples_durations(page *p)
{
    char labels[sizeof(p->labels) + 64];
    for (int r = 0; r < HTTP_METRICS_MAX_ROUTES; r++) {
        const histogram *h = &p->s->api->metrics.duration_s[r];
        snprintf(labels, sizeof(labels), "%s,handler=\"%s\"", p->labels, route_name(r));
        if (histogram_count(h) > 0)
            histogram_append(h, &p->b, p->name, labels, p->low, p->high);
    }
}

static void samples_dropped(page *p)
{
    sample(p, "reason", "slow", (double)p->s->http.n_slow_dropped);
    sample(p, "reason", "stalled", (double)p->s->http.n_stalled_dropped);
}

static void samples_timeouts(page *p)
{
    sample(p, "timeout", "header", (double)p->s->http.n_header_timeouts);
    sample(p, "timeout", "request", (double)p->s->http.n_request_timeouts);
}

static void samples_build(page *p)
{
    sample(p, "version", PGD_VERSION_STRING, 1);
}

static void samples_limits(page *p)
{
    const config *cfg = p->s->cfg;
    sample(p, "limit", "max_queued_requests", (double)cfg->max_queued_requests);
    sample(p, "limit", "max_connections", (double)cfg->max_connections);
    sample(p, "limit", "max_body_bytes", (double)cfg->max_body_bytes);
    sample(p, "limit", "max_header_bytes", (double)cfg->max_header_bytes);
    sample(p, "limit", "max_output_buffer_bytes", (double)cfg->max_output_buffer_bytes);
    sample(p, "limit", "max_model_len", p->s->core.max_model_len);
}

/* --- the table -------------------------------------------------------------------------------- */

#define AT(field)      offsetof(scrape, field)
#define SCHED(field)   U64, AT(core.scheduler.field), NULL
#define REQ(field)     F64, AT(requests.field), NULL
#define OWN(field)     F64, AT(field), NULL
#define EACH(function) SAMPLES, 0, function
#define TIER(field)    SAMPLES, offsetof(offload_tier_stats, field), samples_tiers
#define FLOW(field)    SAMPLES, offsetof(offload_flow, field), samples_flows
#define PAGED          false, false, 0
#define BOTH           true, false, 0
#define BOTH_FROM(low) true, false, low
#define PAGED_TOKENS   false, true, 0
#define BOTH_TOKENS    true, true, 0

static const family families[] = {
    /* requests and tokens */
    {"num_requests_running", GAUGE, I32, AT(core.scheduler.n_running), NULL, BOTH,
     "Requests in the batch."},
    {"num_requests_waiting", GAUGE, OWN(n_waiting), BOTH, "Requests that wait to be scheduled."},
    {"num_requests_waiting_by_reason", GAUGE, EACH(samples_waiting), PAGED,
     "Waiting requests: for a place in the batch or in the cache, or until a worker is ready or "
     "their keys and values are loaded."},
    {"request_success_total", COUNTER, EACH(samples_finished), BOTH,
     "Finished requests by reason; a stop string counts as stop."},
    {"admission_rejections_total", COUNTER, OWN(n_rejections), PAGED,
     "Requests answered 429: the queue was full (max_queued_requests)."},
    {"corrupted_requests_total", COUNTER, U64, AT(requests.n_nan_logits), NULL, PAGED,
     "Requests ended because the model's values were not numbers."},
    {"prompt_tokens_total", COUNTER, SCHED(n_prompt_tokens), BOTH,
     "Prompt tokens of admitted requests."},
    {"prompt_tokens_by_source_total", COUNTER, EACH(samples_source), PAGED,
     "Prompt tokens by where their keys and values first came from."},
    {"prompt_tokens_cached_total", COUNTER, SCHED(n_prefix_hit_tokens), PAGED,
     "Prompt tokens of admitted requests that were found in the prefix cache."},
    {"prompt_tokens_recomputed_total", COUNTER, SCHED(n_prompt_recomputed_tokens), PAGED,
     "Prompt tokens computed again after a preemption or the loss of a worker."},
    {"generation_tokens_total", COUNTER, SCHED(n_generated_tokens), BOTH, "Generated tokens."},
    {"num_preemptions_total", COUNTER, SCHED(n_preemptions), BOTH,
     "Times a running request was put back to waiting for want of blocks."},
    /* KV cache */
    {"kv_cache_usage_perc", GAUGE, OWN(usage), BOTH,
     "Share of the KV blocks held by requests, 0 to 1; cached blocks that nobody holds are free."},
    {"kv_blocks", GAUGE, I32, AT(core.scheduler.n_blocks_total), NULL, PAGED,
     "KV blocks of the pool: used, cached and free."},
    {"kv_blocks_used", GAUGE, OWN(n_blocks_used), PAGED, "KV blocks held by requests."},
    {"kv_blocks_cached", GAUGE, I32, AT(core.scheduler.n_blocks_cached), NULL, PAGED,
     "KV blocks that nobody holds and that hold a reusable prefix."},
    {"kv_blocks_free", GAUGE, OWN(n_blocks_free), PAGED, "KV blocks that hold nothing."},
    {"kv_cache_bytes", GAUGE, U64, AT(core.kv_bytes), NULL, PAGED, "Memory of the KV cache."},
    {"kv_group_layers", GAUGE, EACH(samples_kv_groups), PAGED,
     "Layers of each group, which share block tables, by how long their KV is kept."},
    {"kv_max_request_tokens", GAUGE, I32, AT(core.max_pool_len), NULL, PAGED,
     "Longest request that the KV cache can hold alone, at most max_model_len."},
    {"kv_full_length_requests", GAUGE, F64, AT(core.n_full_length), NULL, PAGED,
     "Requests of max_model_len tokens that the KV cache holds at the same time."},
    {"kv_events_total", COUNTER, U64, AT(core.kv_events.n_events), NULL, PAGED,
     "KV events published at kv_events_url."},
    {"kv_events_batches_total", COUNTER, U64, AT(core.kv_events.n_batches), NULL, PAGED,
     "Batches in which KV events were published."},
    {"kv_events_dropped_total", COUNTER, U64, AT(core.kv_events.n_dropped), NULL, PAGED,
     "KV events that found the ring full and were made good by a comparison."},
    {"prefix_cache_queries_total", COUNTER, SCHED(n_prefix_queries_tokens), BOTH,
     "Prompt tokens looked up in the prefix cache."},
    {"prefix_cache_hits_total", COUNTER, SCHED(n_prefix_hit_tokens), BOTH,
     "Prompt tokens found in the prefix cache."},
    {"cache_config_info", GAUGE, EACH(samples_cache_config), BOTH, "The KV cache's settings."},
    /* latencies */
    {"time_to_first_token_seconds", HISTOGRAM, REQ(time_to_first_token_s), BOTH,
     "From arrival to the first token."},
    {"inter_token_latency_seconds", HISTOGRAM, REQ(inter_token_s), BOTH_FROM(0.01),
     "Between two tokens of a request."},
    {"request_time_per_output_token_seconds", HISTOGRAM, REQ(per_output_token_s), PAGED,
     "Mean time between the tokens of a request."},
    {"e2e_request_latency_seconds", HISTOGRAM, REQ(e2e_s), BOTH_FROM(0.3),
     "From arrival to the last token."},
    {"request_queue_time_seconds", HISTOGRAM, REQ(queue_s), BOTH_FROM(0.3),
     "From arrival to the last admission before the first token."},
    {"request_prefill_time_seconds", HISTOGRAM, REQ(prefill_s), BOTH_FROM(0.3),
     "From that admission to the first token."},
    {"request_decode_time_seconds", HISTOGRAM, REQ(decode_s), BOTH_FROM(0.3),
     "From the first token to the last."},
    {"request_inference_time_seconds", HISTOGRAM, REQ(inference_s), BOTH_FROM(0.3),
     "From the last admission before the first token to the last token."},
    /* sizes */
    {"request_prompt_tokens", HISTOGRAM, REQ(prompt_tokens), BOTH_TOKENS,
     "Prompt tokens per request."},
    {"request_generation_tokens", HISTOGRAM, REQ(output_tokens), BOTH_TOKENS,
     "Output tokens per request."},
    {"request_max_num_generation_tokens", HISTOGRAM, REQ(max_output_tokens), BOTH_TOKENS,
     "Output tokens of the longest choice of a prompt."},
    {"request_params_n", HISTOGRAM, REQ(params_n), PAGED, "Choices asked for per prompt."},
    {"request_params_max_tokens", HISTOGRAM, REQ(params_max_tokens), PAGED_TOKENS,
     "Output limit of a request, its default included."},
    {"request_prefill_kv_computed_tokens", HISTOGRAM, REQ(computed_prompt_tokens), PAGED_TOKENS,
     "Prompt tokens per request that were not found in the prefix cache."},
    {"request_num_preemptions", HISTOGRAM, REQ(preemptions), PAGED, "Preemptions per request."},
    {"iteration_tokens", HISTOGRAM, F64, AT(core.step_tokens), NULL, PAGED,
     "Tokens of one step, prompts and decodes together."},
    /* the server */
    {"ready", GAUGE, OWN(ready), PAGED, "1 when a worker is ready."},
    {"uptime_seconds", GAUGE, OWN(uptime_s), PAGED, "Since the start of the daemon."},
    {"build_info", GAUGE, EACH(samples_build), PAGED, "The version that runs."},
    {"worker_info", GAUGE, EACH(samples_worker), PAGED, "The worker processes that live now."},
    {"worker_restarts_total", COUNTER, EACH(samples_restarts), PAGED,
     "Times a worker was started again, by why the one before was given up."},
    {"steps_total", COUNTER, U64, AT(core.n_steps), NULL, PAGED,
     "Steps the worker has acknowledged."},
    {"limit", GAUGE, EACH(samples_limits), PAGED, "Bounds that this server keeps, by option."},
    {"http_requests_total", COUNTER, EACH(samples_http), PAGED,
     "HTTP requests by path, method and status; 499: the client left before the answer began."},
    {"http_request_duration_seconds", HISTOGRAM, EACH(samples_durations), PAGED,
     "From the first byte of a request to the end of its answer."},
    {"http_request_size_bytes_total", COUNTER, OWN(n_request_bytes), PAGED,
     "Bytes of request bodies."},
    {"http_response_size_bytes_total", COUNTER, OWN(n_answer_bytes), PAGED,
     "Bytes of answers, as far as they were sent."},
    {"http_connections", GAUGE, OWN(n_connections), PAGED, "Open client connections."},
    {"http_connections_total", COUNTER, U64, AT(http.n_accepted), NULL, PAGED,
     "Client connections accepted, refused ones included."},
    {"http_connections_refused_total", COUNTER, U64, AT(http.n_refused), NULL, PAGED,
     "Client connections refused (max_connections)."},
    {"http_clients_dropped_total", COUNTER, EACH(samples_dropped), PAGED,
     "Clients that took their answer too slowly (max_output_buffer_bytes) or not at all "
     "(idle_timeout_s)."},
    {"http_timeouts_total", COUNTER, EACH(samples_timeouts), PAGED,
     "Requests that did not arrive in time (header_timeout_s) or were not answered in time "
     "(request_timeout_s)."},
    {"pool_jobs", GAUGE, OWN(n_pool_jobs), PAGED,
     "Bodies and answers that wait for the thread pool or are read, translated or rendered there."},
};

/* Shown only when speculation is on. */
static const family spec_families[] = {
    {"spec_decode_num_drafts_total", COUNTER, SCHED(n_drafts), BOTH,
     "Times that draft tokens of a request were verified."},
    {"spec_decode_num_draft_tokens_total", COUNTER, SCHED(n_draft_tokens), BOTH,
     "Draft tokens verified."},
    {"spec_decode_num_accepted_tokens_total", COUNTER, SCHED(n_accepted_tokens), BOTH,
     "Draft tokens that were right."},
    {"spec_decode_num_accepted_tokens_per_pos_total", COUNTER, EACH(samples_accepted), BOTH,
     "Draft tokens that were right, by place in the draft."},
};

/* Shown only with kv_offload_memory. */
static const family offload_families[] = {
    {"external_prefix_cache_queries_total", COUNTER, SCHED(n_external_queries_tokens), BOTH,
     "Prompt tokens behind what the prefix cache had, looked up in the tiers behind it."},
    {"external_prefix_cache_hits_total", COUNTER, SCHED(n_external_hit_tokens), BOTH,
     "Prompt tokens whose keys and values were loaded from a tier."},
    {"kv_hit_tokens_total", COUNTER, EACH(samples_hits), PAGED,
     "Prompt tokens that needed no computing, by where they were when their request came: in the "
     "KV "
     "cache of the device, in host memory, or on disk."},
    {"kv_offload_bytes_total", COUNTER, FLOW(n_bytes), PAGED,
     "Bytes moved into a tier and out of it; the host tier exchanges with the device, the disk "
     "tier "
     "with the host tier."},
    {"kv_offload_seconds_total", COUNTER, FLOW(us), PAGED, "Time that moving those bytes took."},
    {"kv_offload_failures_total", COUNTER, FLOW(n_failed), PAGED,
     "Blocks that could not be moved, or were not what they should be; they are computed again."},
    {"kv_offload_queued_blocks", GAUGE, FLOW(n_queued), PAGED,
     "Blocks that wait to be moved or are on their way."},
    {"kv_offload_evictions_total", COUNTER, TIER(n_evicted), PAGED,
     "Blocks that a tier gave up for room."},
    {"kv_offload_distrusted_total", COUNTER, TIER(n_distrusted), PAGED,
     "Blocks removed from a tier because a request that they belong to gave no numbers."},
    {"kv_offload_size_bytes", GAUGE, TIER(size_bytes), PAGED, "Most that a tier holds."},
    {"kv_offload_used_bytes", GAUGE, TIER(used_bytes), PAGED, "What a tier holds."},
};

/* Shown only with kv_cache_metrics. */
static const family residency_families[] = {
    {"kv_block_lifetime_seconds", HISTOGRAM, OWN(residency.lifetime_s), BOTH,
     "From handing a KV block out to its eviction from the prefix cache; of sampled blocks."},
    {"kv_block_idle_before_evict_seconds", HISTOGRAM, OWN(residency.idle_s), BOTH,
     "From the last use of a KV block, handing out or prefix hit, to its eviction; of sampled "
     "blocks."},
    {"kv_block_reuse_gap_seconds", HISTOGRAM, OWN(residency.reuse_gap_s), BOTH,
     "Between two uses of a KV block; of sampled blocks."},
};

/* Names that every Prometheus client library gives, without prefix and labels. */
static const struct {
    const char *name;
    const char *type;
    size_t at;
    const char *help;
} process_rows[] = {
    {"process_cpu_seconds_total", "counter", AT(process.cpu_s), "CPU time, user and system."},
    {"process_resident_memory_bytes", "gauge", AT(process.resident_bytes), "Resident memory."},
    {"process_virtual_memory_bytes", "gauge", AT(process.virtual_bytes), "Virtual memory."},
    {"process_open_fds", "gauge", AT(process.open_fds), "Open file descriptors."},
    {"process_max_fds", "gauge", AT(process.max_fds), "File descriptors that may be open."},
    {"process_start_time_seconds", "gauge", AT(process.start_s), "Start, in seconds since 1970."},
};

/* --- the page --------------------------------------------------------------------------------- */

static double read_value(const scrape *s, const family *f)
{
    const char *at = (const char *)s + f->at;
    switch (f->value) {
    case U64:
        return (double)*(const uint64_t *)(const void *)at;
    case I32:
        return *(const int32_t *)(const void *)at;
    default:
        return *(const double *)(const void *)at;
    }
}

static void append_family(page *p, const family *f, const char *prefix)
{
    static const char *const types[] = {"gauge", "counter", "histogram"};
    p->family = f;
    snprintf(p->name, sizeof(p->name), "%s%s", prefix, f->name);
    strbuf_appendf(&p->b, "# HELP %s %s\n# TYPE %s %s\n", p->name, f->help, p->name,
                   types[f->type]);
    if (f->value == SAMPLES)
        f->samples(p);
    else if (f->type == HISTOGRAM)
        histogram_append((const histogram *)(const void *)((const char *)p->s + f->at), &p->b,
                         p->name, p->labels, p->low, p->high);
    else
        strbuf_appendf(&p->b, "%s{%s} %.17g\n", p->name, p->labels, read_value(p->s, f));
}

static void append_families(page *p, const family *table, size_t n_families)
{
    for (const family *f = table; f < table + n_families; f++) {
        p->low = 0;
        p->high = f->is_tokens ? p->s->core.max_model_len : HUGE_VAL;
        append_family(p, f, "paged_");
        p->low = f->vllm_low;
        if (f->is_vllm)
            append_family(p, f, "vllm:");
    }
}

static void append_process(page *p)
{
    for (size_t i = 0; i < PGD_ARRAY_LEN(process_rows); i++)
        strbuf_appendf(&p->b, "# HELP %s %s\n# TYPE %s %s\n%s %.17g\n", process_rows[i].name,
                       process_rows[i].help, process_rows[i].name, process_rows[i].type,
                       process_rows[i].name,
                       *(const double *)(const void *)((const char *)p->s + process_rows[i].at));
}

static void take_scrape(scrape *s, http_api *api)
{
    scheduler_stats *k = &s->core.scheduler;
    s->api = api;
    s->http = *http_server_get_counters(api->server);
    s->n_connections = http_server_n_connections(api->server);
    s->n_pool_jobs = http_api_n_pool_jobs(api);
    s->n_rejections = (double)api->n_refused_queue;
    s->n_request_bytes = (double)api->metrics.n_request_bytes;
    s->n_answer_bytes = (double)api->metrics.n_answer_bytes;
    s->cfg = engine_get_config(api->engine);
    s->requests = *engine_get_metrics(api->engine);
    engine_get_stats(api->engine, &s->core);
    process_info_read(&s->process);
    s->ready = s->core.state == CORE_READY;
    s->uptime_s = (double)(clock_now_us() - api->started_us) * 1e-6;
    s->n_waiting = k->n_waiting + s->core.n_queued_commands;
    s->n_blocks_used = k->n_blocks_total - k->n_blocks_free;
    s->n_blocks_free = k->n_blocks_free - k->n_blocks_cached;
    s->usage = k->n_blocks_total > 0 ? s->n_blocks_used / k->n_blocks_total : 0;
}

/* As the text format wants it: backslash and quote escaped, one line. */
static void set_labels(page *p, const char *model_name)
{
    strbuf b;
    strbuf_init(&b);
    strbuf_append_str(&b, "model_name=\"");
    append_escaped(&b, model_name);
    strbuf_append_str(&b, "\",engine=\"0\"");
    PGD_ASSERT(b.failed || b.n_bytes < sizeof(p->labels));
    snprintf(p->labels, sizeof(p->labels), "%s", b.failed ? "engine=\"0\"" : b.data);
    strbuf_deinit(&b);
}

void api_metrics_handle(http_api *api, http_conn *conn, const http_request *req)
{
    scrape s;
    page p = {.s = &s};
    (void)req;
    take_scrape(&s, api);
    strbuf_init(&p.b);
    set_labels(&p, engine_model_name(api->engine));
    append_families(&p, families, PGD_ARRAY_LEN(families));
    if (s.core.scheduler.num_speculative_tokens > 0)
        append_families(&p, spec_families, PGD_ARRAY_LEN(spec_families));
    if (has_tier(&s))
        append_families(&p, offload_families, PGD_ARRAY_LEN(offload_families));
    if (engine_get_residency(api->engine) != NULL) {
        kv_residency_read(engine_get_residency(api->engine), &s.residency);
        append_families(&p, residency_families, PGD_ARRAY_LEN(residency_families));
    }
    append_process(&p);
    if (p.b.failed)
        http_error_respond(conn, 503, NULL, "out of memory");
    else
        http_conn_respond(conn, 200, "text/plain; version=0.0.4; charset=utf-8", NULL, p.b.data,
                          p.b.n_bytes);
    strbuf_deinit(&p.b);
}
