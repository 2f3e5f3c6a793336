/* What tells about the server, read from one snapshot of the core thread (health, models, version),
 * and the reset of its prefix cache. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <strings.h>

#include "common/bytes.h"
#include "common/clock.h"
#include "common/mem.h"
#include "engine/http/http_api.h"
#include "engine/http/http_errors.h"

/* A core loop that has work but has not finished a turn for this long is not healthy. Long prefill
 * steps are not hangs: the step itself is watched by the core loop (worker_stall_timeout). */
#define CORE_SILENT_US 5000000u

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
                                                             : core_state_name(s.state);
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

/* Undoes percent-encoding; what is no escape stays. Cut at cap - 1 bytes. */
static void decode_percent(char *out, size_t cap, const char *in)
{
    size_t n = 0;
    while (*in != '\0' && n + 1 < cap) {
        int high = in[0] == '%' ? bytes_hex_digit(in[1]) : -1;
        int low = high >= 0 ? bytes_hex_digit(in[2]) : -1;
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

static void on_reset(void *arg, core_reset outcome)
{
    static const char *const reasons[] = {
        [CORE_RESET_HELD] = "running requests hold blocks; try again when none runs",
        [CORE_RESET_MOVING] =
            "the device's cache is reset; the tiers are not, blocks are on their way "
            "between them; try again"};
    reset_wait *wait = arg;
    const char *reason = reasons[outcome];
    if (reason != NULL && wait->api->draining)
        reason = "the server is shutting down";
    if (wait->conn != NULL)
        respond_reset(wait->conn, reason);
    mem_free(wait);
}

/* A flag of the query, false when it is not there. False: it is neither true nor false. */
static bool read_flag(bool *out, const char *query, const char *name)
{
    static const char *const words[2][4] = {{"false", "0", "no", "off"},
                                            {"true", "1", "yes", "on"}};
    size_t n_name = strlen(name);
    char value[16];
    *out = false;
    for (const char *at = query; *at != '\0'; at += strcspn(at, "&"), at += *at == '&') {
        if (strncmp(at, name, n_name) != 0 || at[n_name] != '=')
            continue;
        snprintf(value, sizeof(value), "%.*s", (int)PGD_MIN(strcspn(at + n_name + 1, "&"), 15),
                 at + n_name + 1);
        for (size_t i = 0; i < 8; i++) {
            if (strcasecmp(value, words[i / 4][i % 4]) == 0) {
                *out = i >= 4;
                return true;
            }
        }
        return false;
    }
    return true;
}

/* The flags are vLLM's: its cache of other tiers is external. */
static bool read_reset(bool *with_tiers, const char **fault, const http_request *req)
{
    bool is_forced;
    *fault = NULL;
    if (!read_flag(with_tiers, req->query, "reset_external") ||
        !read_flag(&is_forced, req->query, "reset_running_requests"))
        *fault = "reset_external and reset_running_requests: expected true or false";
    else if (is_forced)
        *fault = "reset_running_requests=true is not supported: reset when no request runs";
    return *fault == NULL;
}

void api_reset_prefix_cache_handle(http_api *api, http_conn *conn, const http_request *req)
{
    bool with_tiers;
    const char *fault;
    if (!read_reset(&with_tiers, &fault, req)) {
        http_error_respond(conn, 400, NULL, "%s", fault);
        return;
    }
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
    if (engine_reset_prefix_cache(api->engine, with_tiers, on_reset, wait)) {
        http_conn_on_disconnect(conn, on_reset_disconnect, wait);
        return;
    }
    mem_free(wait);
    respond_reset(conn,
                  api->draining ? "the server is shutting down" : "another reset is under way");
}

void api_version_handle(http_api *api, http_conn *conn, const http_request *req)
{
    const config *cfg = engine_get_config(api->engine);
    strbuf b;
    (void)req;
    strbuf_init(&b);
    strbuf_append_str(&b, "{\"version\":\"" PGD_VERSION_STRING "\"");
    if (cfg->kv_events_url[0] != '\0') {
        strbuf_append_str(&b, ",\"kv_events\":{\"url\":");
        strbuf_append_json(&b, cfg->kv_events_url, strlen(cfg->kv_events_url));
        strbuf_append_str(&b, ",\"replay_url\":");
        strbuf_append_json(&b, cfg->kv_events_replay_url, strlen(cfg->kv_events_replay_url));
        strbuf_append_str(&b, ",\"topic\":");
        strbuf_append_json(&b, cfg->kv_events_topic, strlen(cfg->kv_events_topic));
        strbuf_append_char(&b, '}');
    }
    strbuf_append_char(&b, '}');
    http_conn_respond(conn, 200, "application/json", NULL, b.data, b.n_bytes);
    strbuf_deinit(&b);
}
