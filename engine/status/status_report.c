/* Counters that went back belong to another life of the server: no rate is made of those. */
#include "engine/status/status_report.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Per second, or NAN. */
static double rate(double now, double before, const server_status *a, const server_status *b)
{
    double s = ((double)a->time_us - (double)b->time_us) * 1e-6;
    return s > 0 && now >= before ? (now - before) / s : NAN;
}

/* Milliseconds between two states, or of all time when nothing was added; NAN without entries. */
static double mean_ms(const status_mean *now, const status_mean *before)
{
    double n = now->count - before->count;
    if (n > 0 && before->count > 0)
        return (now->sum - before->sum) / n * 1e3;
    return now->count > 0 ? now->sum / now->count * 1e3 : NAN;
}

static double share(double part, double whole)
{
    return whole > 0 ? part / whole : NAN;
}

static double recent_share(const server_status *now, const server_status *before)
{
    return share(now->n_prefix_hits - before->n_prefix_hits,
                 now->n_prefix_queries - before->n_prefix_queries);
}

/* --- text ------------------------------------------------------------------------------------- */

/* " 12 running": nothing when it is not known. */
static void add_count(strbuf *out, const char **comma, double value, const char *what)
{
    if (isnan(value))
        return;
    strbuf_appendf(out, "%s%.0f %s", *comma, value, what);
    *comma = ", ";
}

static void add_real(strbuf *out, const char **comma, const char *before, double value,
                     const char *behind)
{
    if (isnan(value))
        return;
    strbuf_appendf(out, "%s%s%.1f%s", *comma, before, value, behind);
    *comma = ", ";
}

/* Begins a line; end_line takes it back when nothing was added. */
static size_t begin_line(strbuf *out, const char *head, const char **comma)
{
    size_t at = out->n_bytes;
    strbuf_appendf(out, "  %-10s ", head);
    *comma = "";
    return at;
}

static void end_line(strbuf *out, size_t at, const char *comma)
{
    if (comma[0] != '\0')
        strbuf_append_char(out, '\n');
    else
        strbuf_truncate(out, at);
}

static void add_uptime(strbuf *out, double s)
{
    int64_t t = isnan(s) ? -1 : (int64_t)s;
    if (t < 0)
        return;
    strbuf_append_str(out, ", up ");
    if (t >= 86400)
        strbuf_appendf(out, "%lld d ", (long long)(t / 86400));
    if (t >= 3600)
        strbuf_appendf(out, "%lld h ", (long long)(t / 3600 % 24));
    if (t >= 60)
        strbuf_appendf(out, "%lld min", (long long)(t / 60 % 60));
    else
        strbuf_appendf(out, "%lld s", (long long)t);
}

static void add_head(strbuf *out, const server_status *s, const char *url)
{
    strbuf_appendf(out, "%s%s%s at %s: %s", s->model[0] != '\0' ? s->model : "server",
                   s->version[0] != '\0' ? ", version " : "", s->version, url, s->state);
    if (!isnan(s->progress))
        strbuf_appendf(out, " %.0f %%", s->progress * 100);
    if (s->reason[0] != '\0')
        strbuf_appendf(out, " (%s)", s->reason);
    add_uptime(out, s->uptime_s);
    strbuf_append_char(out, '\n');
    if (s->metrics_note[0] != '\0')
        strbuf_appendf(out, "  no figures: %s\n", s->metrics_note);
}

/* The same tier of the state before: figures of a server that had none are no base for rates. */
static tier_status tier_before(const server_status *before, const tier_status *now)
{
    for (int i = 0; i < before->n_tiers; i++) {
        if (strcmp(before->tiers[i].name, now->name) == 0)
            return before->tiers[i];
    }
    return (tier_status){now->name, NAN, NAN, NAN, NAN, NAN, NAN};
}

static double recent_tier_share(const server_status *now, const server_status *before,
                                const tier_status *tier, const tier_status *was)
{
    return share(tier->n_hit_tokens - was->n_hit_tokens,
                 now->n_prefix_queries - before->n_prefix_queries);
}

static void add_tiers(strbuf *out, const server_status *now, const server_status *before)
{
    for (int i = 0; i < now->n_tiers; i++) {
        const tier_status *t = &now->tiers[i], was = tier_before(before, t);
        const char *comma;
        char head[16];
        snprintf(head, sizeof(head), "%s tier", t->name);
        size_t at = begin_line(out, head, &comma);
        add_real(out, &comma, "", share(t->used_bytes, t->size_bytes) * 100, " % used");
        add_real(out, &comma, "", t->size_bytes / 1e6, " MB");
        add_real(out, &comma, "", share(t->n_hit_tokens, now->n_prefix_queries) * 100,
                 " % of the prompt tokens found");
        add_real(out, &comma, "lately ", recent_tier_share(now, before, t, &was) * 100, " %");
        add_real(out, &comma, "stores ",
                 rate(t->n_stored_bytes, was.n_stored_bytes, now, before) / 1e6, " MB/s");
        add_real(out, &comma, "loads ",
                 rate(t->n_loaded_bytes, was.n_loaded_bytes, now, before) / 1e6, " MB/s");
        if (t->n_failed > 0)
            add_count(out, &comma, t->n_failed, "blocks failed");
        end_line(out, at, comma);
    }
}

static void add_workers(strbuf *out, const server_status *s)
{
    const char *comma;
    for (int i = 0; i < s->n_workers; i++) {
        const worker_status *w = &s->workers[i];
        strbuf_appendf(out, "  worker %-3lld pid %lld on %s (%s)\n", (long long)w->rank,
                       (long long)w->pid, w->device, w->device_name);
    }
    size_t at = begin_line(out, "restarts", &comma);
    add_count(out, &comma, s->n_restarts, "of a worker");
    end_line(out, at, comma);
}

void status_report_text(strbuf *out, const server_status *now, const server_status *before,
                        const char *url)
{
    const char *comma;
    add_head(out, now, url);
    size_t at = begin_line(out, "requests", &comma);
    add_count(out, &comma, now->n_running, "running");
    add_count(out, &comma, now->n_waiting, "waiting");
    add_count(out, &comma, now->n_finished, "finished");
    add_count(out, &comma, now->n_rejected, "refused");
    add_count(out, &comma, now->n_preemptions, "preemptions");
    add_count(out, &comma, now->n_connections, "connections");
    end_line(out, at, comma);
    at = begin_line(out, "tokens/s", &comma);
    add_real(out, &comma, "output ",
             rate(now->n_output_tokens, before->n_output_tokens, now, before), "");
    add_real(out, &comma, "prompt ",
             rate(now->n_prompt_tokens, before->n_prompt_tokens, now, before), "");
    end_line(out, at, comma);
    at = begin_line(out, "KV cache", &comma);
    add_real(out, &comma, "", now->kv_usage * 100, " % used");
    add_count(out, &comma, now->n_blocks, "blocks");
    add_count(out, &comma, now->n_blocks_cached, "hold a prefix for reuse");
    add_real(out, &comma, "", now->kv_bytes / 1e6, " MB");
    end_line(out, at, comma);
    at = begin_line(out, "prefix", &comma);
    add_real(out, &comma, "", share(now->n_prefix_hits, now->n_prefix_queries) * 100,
             " % of the prompt tokens found");
    add_real(out, &comma, "lately ", recent_share(now, before) * 100, " %");
    end_line(out, at, comma);
    add_tiers(out, now, before);
    at = begin_line(out, "latency", &comma);
    add_real(out, &comma, "first token ", mean_ms(&now->ttft, &before->ttft), " ms");
    add_real(out, &comma, "between tokens ", mean_ms(&now->itl, &before->itl), " ms");
    end_line(out, at, comma);
    add_workers(out, now);
}

/* --- JSON ------------------------------------------------------------------------------------- */

static void json_number(strbuf *out, const char *name, double value)
{
    if (isfinite(value))
        strbuf_appendf(out, "%s\"%s\":%.10g", out->data[out->n_bytes - 1] == '{' ? "" : ",", name,
                       value);
    else
        strbuf_appendf(out, "%s\"%s\":null", out->data[out->n_bytes - 1] == '{' ? "" : ",", name);
}

static void json_text(strbuf *out, const char *name, const char *text)
{
    strbuf_appendf(out, "%s\"%s\":", out->data[out->n_bytes - 1] == '{' ? "" : ",", name);
    if (text[0] != '\0')
        strbuf_append_json(out, text, strlen(text));
    else
        strbuf_append_str(out, "null");
}

static void json_tiers(strbuf *out, const server_status *now, const server_status *before)
{
    strbuf_append_str(out, ",\"tiers\":[");
    for (int i = 0; i < now->n_tiers; i++) {
        const tier_status *t = &now->tiers[i], was = tier_before(before, t);
        strbuf_append_str(out, i > 0 ? ",{" : "{");
        json_text(out, "tier", t->name);
        json_number(out, "size_bytes", t->size_bytes);
        json_number(out, "used_bytes", t->used_bytes);
        json_number(out, "hit_rate", share(t->n_hit_tokens, now->n_prefix_queries));
        json_number(out, "hit_rate_lately", recent_tier_share(now, before, t, &was));
        json_number(out, "store_bytes_s", rate(t->n_stored_bytes, was.n_stored_bytes, now, before));
        json_number(out, "load_bytes_s", rate(t->n_loaded_bytes, was.n_loaded_bytes, now, before));
        json_number(out, "failed_blocks", t->n_failed);
        strbuf_append_char(out, '}');
    }
    strbuf_append_char(out, ']');
}

static void json_workers(strbuf *out, const server_status *s)
{
    strbuf_append_str(out, ",\"workers\":[");
    for (int i = 0; i < s->n_workers; i++) {
        const worker_status *w = &s->workers[i];
        strbuf_append_str(out, i > 0 ? ",{" : "{");
        json_number(out, "rank", (double)w->rank);
        json_number(out, "pid", (double)w->pid);
        json_text(out, "device", w->device);
        json_text(out, "device_name", w->device_name);
        strbuf_append_char(out, '}');
    }
    strbuf_append_char(out, ']');
}

void status_report_json(strbuf *out, const server_status *now, const server_status *before,
                        const char *url)
{
    strbuf_append_char(out, '{');
    if (out->failed)
        return;
    json_text(out, "url", url);
    strbuf_appendf(out, ",\"healthy\":%s", now->is_healthy ? "true" : "false");
    json_text(out, "state", now->state);
    json_text(out, "reason", now->reason);
    json_text(out, "metrics_error", now->metrics_note);
    json_text(out, "model", now->model);
    json_text(out, "version", now->version);
    const struct {
        const char *name;
        double value;
    } numbers[] = {
        {"load_progress", now->progress},
        {"max_model_len", now->max_model_len},
        {"uptime_s", now->uptime_s},
        {"requests_running", now->n_running},
        {"requests_waiting", now->n_waiting},
        {"requests_finished", now->n_finished},
        {"requests_refused", now->n_rejected},
        {"preemptions", now->n_preemptions},
        {"connections", now->n_connections},
        {"interval_s", ((double)now->time_us - (double)before->time_us) * 1e-6},
        {"output_tok_s", rate(now->n_output_tokens, before->n_output_tokens, now, before)},
        {"prompt_tok_s", rate(now->n_prompt_tokens, before->n_prompt_tokens, now, before)},
        {"output_tokens", now->n_output_tokens},
        {"prompt_tokens", now->n_prompt_tokens},
        {"kv_usage", now->kv_usage},
        {"kv_blocks", now->n_blocks},
        {"kv_blocks_cached", now->n_blocks_cached},
        {"kv_bytes", now->kv_bytes},
        {"prefix_hit_rate", share(now->n_prefix_hits, now->n_prefix_queries)},
        {"prefix_hit_rate_lately", recent_share(now, before)},
        {"ttft_ms", mean_ms(&now->ttft, &before->ttft)},
        {"itl_ms", mean_ms(&now->itl, &before->itl)},
        {"worker_restarts", now->n_restarts},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(numbers); i++)
        json_number(out, numbers[i].name, numbers[i].value);
    json_tiers(out, now, before);
    json_workers(out, now);
    strbuf_append_char(out, '}');
}
