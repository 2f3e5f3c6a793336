/* Everything that tells about the server: health, models, version, metrics. All of it is read from
 * one snapshot of the core thread. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "engine/http/http_api.h"
#include "engine/http/http_errors.h"

/* A core loop that has work but has not finished a turn for this long is not healthy. Long prefill
 * steps are not hangs: the step itself is watched by the core loop (worker_stall_timeout). */
#define CORE_SILENT_US 5000000u

static const char *state_name(core_state state)
{
    switch (state) {
    case CORE_STARTING:
        return "starting";
    case CORE_LOADING:
        return "loading";
    case CORE_READY:
        return "ready";
    case CORE_RECOVERING:
        return "recovering";
    case CORE_DRAINING:
        return "draining";
    case CORE_FAILED:
        return "failed";
    case CORE_STOPPED:
        return "stopped";
    }
    return "unknown";
}

static bool is_silent(const core_stats *s)
{
    uint64_t now = clock_now_us();
    return now > s->last_progress_us && now - s->last_progress_us > CORE_SILENT_US;
}

void api_health_handle(http_api *api, http_conn *conn, const http_request *req)
{
    core_stats s;
    strbuf b;
    (void)req;
    engine_get_stats(api->engine, &s);
    strbuf_init(&b);
    bool healthy = s.state == CORE_READY && !api->draining && !is_silent(&s);
    const char *status = api->draining                       ? "draining"
                         : s.state == CORE_READY && !healthy ? "stalled"
                                                             : state_name(s.state);
    strbuf_appendf(&b, "{\"status\":\"%s\"", healthy ? "ok" : status);
    if (s.state == CORE_LOADING && s.load_total_bytes > 0)
        strbuf_appendf(&b, ",\"progress\":%.3f",
                       (double)s.load_done_bytes / (double)s.load_total_bytes);
    if (!healthy && s.why[0] != '\0') {
        strbuf_append_str(&b, ",\"reason\":");
        strbuf_append_json(&b, s.why, strlen(s.why));
    }
    strbuf_append_str(&b, "}\n");
    http_conn_respond(conn, healthy ? 200 : 503, "application/json",
                      healthy ? NULL : "Retry-After: 1\r\n", b.data, b.n_bytes);
    strbuf_deinit(&b);
}

static void append_card(strbuf *b, const http_api *api)
{
    core_stats s;
    const char *name = engine_model_name(api->engine);
    const model_config *m = engine_get_model(api->engine);
    engine_get_stats(api->engine, &s);
    strbuf_append_str(b, "{\"id\":");
    strbuf_append_json(b, name, strlen(name));
    strbuf_appendf(b,
                   ",\"object\":\"model\",\"created\":%" PRId64 ",\"owned_by\":\"paged\",\"root\":",
                   api->started_s);
    strbuf_append_json(b, name, strlen(name));
    strbuf_appendf(b,
                   ",\"parent\":null,\"max_model_len\":%d,\"meta\":{\"n_ctx_train\":%d,\"n_vocab\":"
                   "%d,\"n_embd\":%d}}",
                   s.max_model_len > 0 ? s.max_model_len : m->max_context, m->max_context,
                   m->vocab_size, m->dim);
}

void api_models_handle(http_api *api, http_conn *conn, const http_request *req)
{
    strbuf b;
    (void)req;
    strbuf_init(&b);
    strbuf_append_str(&b, "{\"object\":\"list\",\"data\":[");
    append_card(&b, api);
    strbuf_append_str(&b, "]}");
    http_conn_respond(conn, 200, "application/json", NULL, b.data, b.n_bytes);
    strbuf_deinit(&b);
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Undoes percent-encoding; what is no escape stays. Cut at cap - 1 bytes. */
static void decode_percent(char *out, size_t cap, const char *in)
{
    size_t n = 0;
    while (*in != '\0' && n + 1 < cap) {
        int high = in[0] == '%' ? hex_digit(in[1]) : -1;
        int low = high >= 0 ? hex_digit(in[2]) : -1;
        out[n++] = low >= 0 ? (char)(high << 4 | low) : *in;
        in += low >= 0 ? 3 : 1;
    }
    out[n] = '\0';
}

void api_model_handle(http_api *api, http_conn *conn, const http_request *req)
{
    static const char prefix[] = "/v1/models/";
    char id[1024]; /* longer than any served name */
    const char *name = engine_model_name(api->engine);
    decode_percent(id, sizeof(id), req->path + sizeof(prefix) - 1);
    if (strcmp(id, name) != 0) {
        http_error_respond_no_model(conn, id, name);
        return;
    }
    strbuf b;
    strbuf_init(&b);
    append_card(&b, api);
    http_conn_respond(conn, 200, "application/json", NULL, b.data, b.n_bytes);
    strbuf_deinit(&b);
}

/* --- prefix cache ----------------------------------------------------------------------------- */

/* A reset that is under way; the client may leave before it is done. */
typedef struct reset_wait {
    const http_api *api;
    http_conn *conn;
} reset_wait;

static void respond_reset(http_conn *conn, const char *reason)
{
    strbuf b;
    strbuf_init(&b);
    strbuf_appendf(&b, "{\"reset\":%s", reason == NULL ? "true" : "false");
    if (reason != NULL) {
        strbuf_append_str(&b, ",\"reason\":");
        strbuf_append_json(&b, reason, strlen(reason));
    }
    strbuf_append_char(&b, '}');
    http_conn_respond(conn, 200, "application/json", NULL, b.data, b.n_bytes);
    strbuf_deinit(&b);
}

static void on_reset_disconnect(void *arg)
{
    reset_wait *wait = arg;
    wait->conn = NULL;
}

static void on_reset(void *arg, bool was_reset)
{
    reset_wait *wait = arg;
    if (wait->conn != NULL)
        respond_reset(wait->conn, was_reset ? NULL
                                  : wait->api->draining
                                      ? "the server is shutting down"
                                      : "running requests hold blocks; try again when none runs");
    mem_free(wait);
}

void api_reset_prefix_cache_handle(http_api *api, http_conn *conn, const http_request *req)
{
    (void)req;
    if (!engine_get_config(api->engine)->enable_prefix_caching) {
        respond_reset(conn, "prefix caching is off (enable_prefix_caching)");
        return;
    }
    reset_wait *wait = mem_alloc(sizeof(*wait));
    if (wait == NULL) {
        http_error_respond(conn, 503, NULL, "out of memory for this request");
        return;
    }
    *wait = (reset_wait){api, conn};
    if (engine_reset_prefix_cache(api->engine, on_reset, wait)) {
        http_conn_on_disconnect(conn, on_reset_disconnect, wait);
        return;
    }
    mem_free(wait);
    respond_reset(conn,
                  api->draining ? "the server is shutting down" : "another reset is under way");
}

void api_version_handle(http_api *api, http_conn *conn, const http_request *req)
{
    static const char body[] = "{\"version\":\"" PGD_VERSION_STRING "\"}";
    (void)api;
    (void)req;
    http_conn_respond(conn, 200, "application/json", NULL, body, sizeof(body) - 1);
}

/* --- metrics ---------------------------------------------------------------------------------- */

typedef struct page {
    strbuf b;
    char labels[600]; /* holds any served_model_name, escaped */
} page;

/* As the text format wants it: backslash and quote escaped, one line. */
static void set_labels(page *p, const char *model_name)
{
    size_t used = (size_t)snprintf(p->labels, sizeof(p->labels), "model_name=\"");
    for (const char *c = model_name; *c != '\0' && used + 20 < sizeof(p->labels); c++) {
        if (*c == '"' || *c == '\\')
            p->labels[used++] = '\\';
        p->labels[used++] = (char)((unsigned char)*c < 0x20 ? '?' : *c);
    }
    snprintf(p->labels + used, sizeof(p->labels) - used, "\",engine=\"0\"");
}

static void head(page *p, const char *name, const char *type, const char *help)
{
    strbuf_appendf(&p->b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void value(page *p, const char *name, const char *type, const char *help, double v)
{
    head(p, name, type, help);
    strbuf_appendf(&p->b, "%s{%s} %.17g\n", name, p->labels, v);
}

static void series(page *p, const char *name, const char *help, const histogram *h)
{
    head(p, name, "histogram", help);
    histogram_append(h, &p->b, name, p->labels);
}

static void append_core(page *p, const core_stats *s)
{
    const scheduler_stats *k = &s->scheduler;
    int32_t n_used = k->n_blocks_total - k->n_blocks_free;
    double usage = k->n_blocks_total > 0 ? (double)n_used / k->n_blocks_total : 0;
    value(p, "paged_ready", "gauge", "1 when a worker is ready.", s->state == CORE_READY);
    value(p, "paged_kv_blocks_total", "gauge", "KV blocks of the pool.", k->n_blocks_total);
    value(p, "paged_kv_blocks_used", "gauge", "KV blocks held by requests.", n_used);
    value(p, "paged_kv_blocks_cached", "gauge", "Free KV blocks that hold a reusable prefix.",
          k->n_blocks_cached);
    value(p, "paged_kv_blocks_free", "gauge", "Free KV blocks that hold nothing.",
          k->n_blocks_free - k->n_blocks_cached);
    value(p, "paged_steps_total", "counter", "Steps the worker has acknowledged.",
          (double)s->n_steps);
    head(p, "paged_worker_restarts_total", "counter",
         "Times a worker was started again, by why the one before was given up.");
    for (restart_reason r = 0; r < RESTART_N_REASONS; r++)
        strbuf_appendf(&p->b, "paged_worker_restarts_total{%s,reason=\"%s\"} %" PRIu64 "\n",
                       p->labels, restart_policy_reason_name(r), s->n_restarts_by_reason[r]);
    value(p, "vllm:num_requests_running", "gauge", "Requests in the batch.", k->n_running);
    value(p, "vllm:num_requests_waiting", "gauge", "Requests that wait to be scheduled.",
          k->n_waiting + s->n_queued_commands);
    value(p, "vllm:kv_cache_usage_perc", "gauge",
          "Share of the KV blocks held by requests, 0 to 1.", usage);
    value(p, "vllm:prefix_cache_queries_total", "counter",
          "Prompt tokens looked up in the prefix cache.", (double)k->n_prefix_queries_tokens);
    value(p, "vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.",
          (double)k->n_prefix_hit_tokens);
    value(p, "vllm:num_preemptions_total", "counter",
          "Requests put back to waiting for want of blocks.", (double)k->n_preemptions);
    value(p, "vllm:prompt_tokens_total", "counter", "Prompt tokens of admitted requests.",
          (double)k->n_prompt_tokens);
    value(p, "vllm:generation_tokens_total", "counter", "Generated tokens.",
          (double)k->n_generated_tokens);
}

static void append_finished(page *p, const scheduler_stats *k)
{
    static const struct {
        const char *reason;
        request_status status;
    } rows[] = {{"stop", REQUEST_FINISHED_STOPPED},
                {"length", REQUEST_FINISHED_LENGTH_CAPPED},
                {"abort", REQUEST_FINISHED_ABORTED},
                {"error", REQUEST_FINISHED_ERROR}};
    head(p, "vllm:request_success_total", "counter", "Finished requests by reason.");
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++)
        strbuf_appendf(&p->b, "vllm:request_success_total{%s,finished_reason=\"%s\"} %" PRIu64 "\n",
                       p->labels, rows[i].reason, k->n_finished[rows[i].status]);
}

static void append_http(page *p, const http_api *api)
{
    value(p, "paged_http_requests_total", "counter", "HTTP requests on all paths.",
          (double)api->n_requests);
    value(p, "paged_http_connections", "gauge", "Open client connections.", api->n_connections);
    value(p, "paged_admission_rejections_total", "counter",
          "Requests refused because the queue was full.", (double)api->n_refused_queue);
    head(p, "paged_completions_total", "counter", "Answered completion requests by status class.");
    for (int i = 2; i <= 5; i++)
        strbuf_appendf(&p->b, "paged_completions_total{%s,status=\"%dxx\"} %" PRIu64 "\n",
                       p->labels, i, api->n_responses[i]);
}

void api_metrics_handle(http_api *api, http_conn *conn, const http_request *req)
{
    page p;
    core_stats s;
    (void)req;
    engine_get_stats(api->engine, &s);
    strbuf_init(&p.b);
    set_labels(&p, engine_model_name(api->engine));
    append_core(&p, &s);
    append_finished(&p, &s.scheduler);
    append_http(&p, api);
    const engine_latency *l = engine_get_latency(api->engine);
    series(&p, "vllm:time_to_first_token_seconds", "From arrival to the first token.",
           &l->time_to_first_token_s);
    series(&p, "vllm:inter_token_latency_seconds", "Between two tokens of a request.",
           &l->inter_token_s);
    series(&p, "vllm:e2e_request_latency_seconds", "From arrival to the last token.", &l->e2e_s);
    series(&p, "vllm:request_prompt_tokens", "Prompt tokens per request.", &l->prompt_tokens);
    series(&p, "vllm:request_generation_tokens", "Output tokens per request.", &l->output_tokens);
    if (p.b.failed)
        http_error_respond(conn, 503, NULL, "out of memory");
    else
        http_conn_respond(conn, 200, "text/plain; version=0.0.4; charset=utf-8", NULL, p.b.data,
                          p.b.n_bytes);
    strbuf_deinit(&p.b);
}
