/* Each page is read on its own and none is needed but /health: a server without /metrics still has
 * its state and model told. Names are looked up with paged's prefix first, then with vLLM's. */
#include "engine/status/server_status.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/json.h"
#include "engine/status/metrics_text.h"

#define MAX_PAGE_BYTES ((size_t)16 << 20)

/* --- pages ------------------------------------------------------------------------------------ */

/* Cut to cap; control bytes become spaces: these texts go to a terminal. */
static void copy_text(char *out, size_t cap, const char *text)
{
    size_t n = 0;
    for (; text != NULL && text[n] != '\0' && n + 1 < cap; n++)
        out[n] = (unsigned char)text[n] < ' ' || text[n] == 0x7F ? ' ' : text[n];
    out[n] = '\0';
}

/* The page as JSON, or NULL. */
static cJSON *parse_page(const strbuf *page)
{
    cJSON *root = NULL;
    if (page->n_bytes == 0 || json_parse_bounded(&root, page->data, page->n_bytes, JSON_MAX_DEPTH,
                                                 100000, NULL) != PGD_OK)
        return NULL;
    return root;
}

static void read_health(server_status *s, http_client *client, const char *headers, strbuf *page)
{
    pgd_why why = {0};
    int status = 0;
    double progress = NAN;
    pgd_err err =
        http_fetch(client, "GET", "/health", headers, page, MAX_PAGE_BYTES, &status, &why);
    if (err != PGD_OK) {
        snprintf(s->state, sizeof(s->state), "unreachable");
        copy_text(s->reason, sizeof(s->reason), pgd_why_text(&why, err));
        return;
    }
    s->is_reached = true;
    s->is_healthy = status == 200;
    cJSON *root = parse_page(page);
    const char *state = json_string(json_get(root, "status"));
    const char *reason = json_string(json_get(root, "reason"));
    if (state != NULL)
        copy_text(s->state, sizeof(s->state), state);
    else
        snprintf(s->state, sizeof(s->state), s->is_healthy ? "ok" : "status %d", status);
    if (reason != NULL)
        copy_text(s->reason, sizeof(s->reason), reason);
    if (root != NULL && json_get_f64(&progress, root, "progress", NULL) == PGD_OK)
        s->progress = progress;
    cJSON_Delete(root);
}

static void read_version(server_status *s, http_client *client, const char *headers, strbuf *page)
{
    int status = 0;
    if (http_fetch(client, "GET", "/version", headers, page, MAX_PAGE_BYTES, &status, NULL) !=
            PGD_OK ||
        status != 200)
        return;
    cJSON *root = parse_page(page);
    const cJSON *events = json_get(root, "kv_events");
    s->is_reached = true;
    copy_text(s->version, sizeof(s->version), json_string(json_get(root, "version")));
    copy_text(s->kv_events_url, sizeof(s->kv_events_url), json_string(json_get(events, "url")));
    copy_text(s->kv_events_topic, sizeof(s->kv_events_topic),
              json_string(json_get(events, "topic")));
    cJSON_Delete(root);
}

static void read_model(server_status *s, http_client *client, const char *headers, strbuf *page)
{
    int status = 0;
    double len = NAN;
    if (http_fetch(client, "GET", "/v1/models", headers, page, MAX_PAGE_BYTES, &status, NULL) !=
            PGD_OK ||
        status != 200)
        return;
    cJSON *root = parse_page(page);
    const cJSON *first = cJSON_GetArrayItem(json_get(root, "data"), 0);
    copy_text(s->model, sizeof(s->model), json_string(json_get(first, "id")));
    if (first != NULL && json_get_f64(&len, first, "max_model_len", NULL) == PGD_OK)
        s->max_model_len = len;
    cJSON_Delete(root);
}

/* --- metrics ---------------------------------------------------------------------------------- */

static double look_up(const metrics_text *m, const char *name, const char *suffix)
{
    static const char *const prefixes[] = {"paged_", "vllm:"};
    double value = NAN;
    for (size_t i = 0; i < PGD_ARRAY_LEN(prefixes); i++) {
        char full[128];
        snprintf(full, sizeof(full), "%s%s%s", prefixes[i], name, suffix);
        if (metrics_text_sum(m, full, &value))
            break;
    }
    return value;
}

static status_mean look_up_mean(const metrics_text *m, const char *name)
{
    return (status_mean){look_up(m, name, "_sum"), look_up(m, name, "_count")};
}

static void read_workers(server_status *s, const metrics_text *m)
{
    static const char name[] = "paged_worker_info";
    for (const metrics_sample *at = metrics_text_next(m, NULL, name);
         at != NULL && s->n_workers < SERVER_STATUS_MAX_WORKERS;
         at = metrics_text_next(m, at, name)) {
        worker_status *w = &s->workers[s->n_workers++];
        char text[128];
        (void)metrics_text_label(at, "rank", text, sizeof(text));
        w->rank = strtoll(text, NULL, 10);
        (void)metrics_text_label(at, "pid", text, sizeof(text));
        w->pid = strtoll(text, NULL, 10);
        (void)metrics_text_label(at, "device", text, sizeof(text));
        copy_text(w->device, sizeof(w->device), text);
        (void)metrics_text_label(at, "device_name", text, sizeof(text));
        copy_text(w->device_name, sizeof(w->device_name), text);
    }
}

/* Of the samples with these labels; the last may be NULL. NAN without any. */
static double look_up_tier(const metrics_text *m, const char *name, const char *tier,
                           const char *direction)
{
    double sum = NAN;
    char text[32];
    for (const metrics_sample *s = metrics_text_next(m, NULL, name); s != NULL;
         s = metrics_text_next(m, s, name)) {
        if (!metrics_text_label(s, "tier", text, sizeof(text)) || strcmp(text, tier) != 0)
            continue;
        if (direction != NULL && (!metrics_text_label(s, "direction", text, sizeof(text)) ||
                                  strcmp(text, direction) != 0))
            continue;
        sum = (isnan(sum) ? 0 : sum) + s->value;
    }
    return sum;
}

static void read_tiers(server_status *s, const metrics_text *m)
{
    static const char *const names[SERVER_STATUS_MAX_TIERS] = {"host", "disk"};
    for (int i = 0; i < SERVER_STATUS_MAX_TIERS; i++) {
        const char *name = names[i];
        double size_bytes = look_up_tier(m, "paged_kv_offload_size_bytes", name, NULL);
        if (isnan(size_bytes))
            continue;
        s->tiers[s->n_tiers++] = (tier_status){
            .name = name,
            .size_bytes = size_bytes,
            .used_bytes = look_up_tier(m, "paged_kv_offload_used_bytes", name, NULL),
            .n_hit_tokens = look_up_tier(m, "paged_kv_hit_tokens_total", name, NULL),
            .n_stored_bytes = look_up_tier(m, "paged_kv_offload_bytes_total", name, "store"),
            .n_loaded_bytes = look_up_tier(m, "paged_kv_offload_bytes_total", name, "load"),
            .n_failed = look_up_tier(m, "paged_kv_offload_failures_total", name, NULL),
        };
    }
}

static void read_figures(server_status *s, const metrics_text *m)
{
    double n_used = look_up(m, "kv_blocks_used", "");
    s->uptime_s = look_up(m, "uptime_seconds", "");
    s->n_running = look_up(m, "num_requests_running", "");
    s->n_waiting = look_up(m, "num_requests_waiting", "");
    s->n_finished = look_up(m, "request_success_total", "");
    s->n_rejected = look_up(m, "admission_rejections_total", "");
    s->n_preemptions = look_up(m, "num_preemptions_total", "");
    s->n_connections = look_up(m, "http_connections", "");
    s->n_prompt_tokens = look_up(m, "prompt_tokens_total", "");
    s->n_output_tokens = look_up(m, "generation_tokens_total", "");
    s->n_blocks = look_up(m, "kv_blocks", "");
    s->n_blocks_cached = look_up(m, "kv_blocks_cached", "");
    s->kv_bytes = look_up(m, "kv_cache_bytes", "");
    /* A share cannot be added up over replicas, block counts can. */
    s->kv_usage = s->n_blocks > 0 && !isnan(n_used) ? n_used / s->n_blocks
                                                    : look_up(m, "kv_cache_usage_perc", "");
    s->n_prefix_queries = look_up(m, "prefix_cache_queries_total", "");
    s->n_prefix_hits = look_up(m, "prefix_cache_hits_total", "");
    s->ttft = look_up_mean(m, "time_to_first_token_seconds");
    s->itl = look_up_mean(m, "inter_token_latency_seconds");
    s->n_restarts = look_up(m, "worker_restarts_total", "");
    read_workers(s, m);
    read_tiers(s, m);
}

static void read_metrics(server_status *s, http_client *client, const char *headers, strbuf *page)
{
    metrics_text m = {0};
    pgd_why why = {0};
    int status = 0;
    pgd_err err =
        http_fetch(client, "GET", "/metrics", headers, page, MAX_PAGE_BYTES, &status, &why);
    s->time_us = clock_now_us();
    if (err == PGD_OK && status == 401)
        err = pgd_fail(&why, PGD_EINVAL, "the server wants a key: give --api-key-file");
    else if (err == PGD_OK && status != 200)
        err = pgd_fail(&why, PGD_EPROTO, "/metrics: expected status 200, got %d", status);
    if (err == PGD_OK)
        err = metrics_text_parse(&m, page->data != NULL ? page->data : "", page->n_bytes, &why);
    if (err != PGD_OK)
        copy_text(s->metrics_note, sizeof(s->metrics_note), pgd_why_text(&why, err));
    read_figures(s, &m);
    metrics_text_deinit(&m);
}

void server_status_read_version(server_status *out, http_client *client, const char *headers)
{
    strbuf page;
    memset(out, 0, sizeof(*out));
    strbuf_init(&page);
    read_version(out, client, headers, &page);
    strbuf_deinit(&page);
}

void server_status_read(server_status *out, http_client *client, const char *headers)
{
    static void (*const pages[])(server_status *, http_client *, const char *,
                                 strbuf *) = {read_health, read_version, read_model, read_metrics};
    strbuf page;
    static const metrics_text nothing;
    *out = (server_status){.progress = NAN, .max_model_len = NAN};
    read_figures(out, &nothing);
    strbuf_init(&page);
    for (size_t i = 0; i < PGD_ARRAY_LEN(pages); i++) {
        strbuf_reset(&page);
        out->time_us = clock_now_us();
        pages[i](out, client, headers, &page);
        if (!out->is_reached)
            break;
    }
    strbuf_deinit(&page);
}
