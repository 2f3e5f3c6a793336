/* Names are told in full in JSON, as texts since they exceed what a double holds; people get the first
 * few. */
#include "engine/status/event_report.h"

#include <inttypes.h>
#include <math.h>
#include <time.h>

#define SHOWN_NAMES 4

static const char *const words[] = {"stored", "removed", "cleared", "other"};

static void append_time(strbuf *out, double ts)
{
    char text[32];
    struct tm tm;
    ts = isfinite(ts) ? ts : 0;
    double whole = floor(ts);
    time_t s = whole >= 0 && whole < 1e11 ? (time_t)whole : 0;
    localtime_r(&s, &tm);
    strftime(text, sizeof text, "%H:%M:%S", &tm);
    strbuf_appendf(out, "%s.%03d", text, (int)((ts - whole) * 1000) % 1000);
}

/* A text from outside, for a terminal. */
static void append_plain(strbuf *out, kv_event_text t)
{
    for (uint32_t i = 0; i < t.n_bytes; i++)
        strbuf_append_char(out, t.text[i] > 0x20 && t.text[i] < 0x7f ? t.text[i] : '?');
}

static void append_line(strbuf *out, const kv_unpacked_event *ev, uint64_t seq, double ts)
{
    kv_event_numbers names = ev->names;
    uint64_t name;
    append_time(out, ts);
    strbuf_appendf(out, " #%" PRIu64 " %-7s", seq, words[ev->tag]);
    if (ev->tag == KV_EVENT_TAG_STORED || ev->tag == KV_EVENT_TAG_REMOVED) {
        strbuf_append_char(out, ' ');
        append_plain(out, ev->medium);
        strbuf_appendf(out, " group %" PRIu64 ": %u block%s", ev->group, names.n,
                       names.n == 1 ? "" : "s");
        if (ev->tokens.n > 0)
            strbuf_appendf(out, ", %u tokens", ev->tokens.n);
        if (ev->has_parent)
            strbuf_appendf(out, ", behind %016" PRIx64, ev->parent);
        for (int i = 0; i < SHOWN_NAMES && kv_event_unpack_next_number(&name, &names); i++)
            strbuf_appendf(out, "%s%016" PRIx64, i == 0 ? ": " : " ", name);
        strbuf_append_str(out, names.n > 0 ? " ..." : "");
    }
    strbuf_append_char(out, '\n');
}

static void append_json_text(strbuf *out, const char *key, kv_event_text t)
{
    strbuf_appendf(out, ",\"%s\":", key);
    if (t.text != NULL)
        strbuf_append_json(out, t.text, t.n_bytes);
    else
        strbuf_append_str(out, "null");
}

static void append_json_numbers(strbuf *out, const char *key, kv_event_numbers n, const char *quote)
{
    uint64_t number;
    const char *comma = "";
    strbuf_appendf(out, ",\"%s\":[", key);
    for (; kv_event_unpack_next_number(&number, &n); comma = ",")
        strbuf_appendf(out, "%s%s%" PRIu64 "%s", comma, quote, number, quote);
    strbuf_append_char(out, ']');
}

static void append_object(strbuf *out, const kv_unpacked_event *ev, uint64_t seq, double ts)
{
    strbuf_appendf(out, "{\"seq\":%" PRIu64 ",\"ts\":%.6f,\"event\":\"%s\"", seq,
                   isfinite(ts) ? ts : 0.0, words[ev->tag]);
    if (ev->tag == KV_EVENT_TAG_STORED || ev->tag == KV_EVENT_TAG_REMOVED) {
        append_json_text(out, "medium", ev->medium);
        strbuf_appendf(out, ",\"group\":%" PRIu64, ev->group);
        append_json_numbers(out, "blocks", ev->names, "\"");
    }
    if (ev->tag == KV_EVENT_TAG_STORED) {
        if (ev->has_parent)
            strbuf_appendf(out, ",\"parent\":\"%" PRIu64 "\"", ev->parent);
        else
            strbuf_append_str(out, ",\"parent\":null");
        strbuf_appendf(out, ",\"block_size\":%" PRIu64, ev->block_size);
        append_json_numbers(out, "tokens", ev->tokens, "");
        append_json_text(out, "attention", ev->attention);
        if (ev->window > 0)
            strbuf_appendf(out, ",\"window\":%" PRIu64, ev->window);
        else
            strbuf_append_str(out, ",\"window\":null");
    }
    strbuf_append_str(out, "}\n");
}

pgd_err event_report_batch(strbuf *out, bool is_json, uint64_t seq, const void *batch,
                           size_t n_bytes, pgd_why *why)
{
    kv_event_unpack u;
    PGD_TRY(kv_event_unpack_begin(&u, batch, n_bytes, why));
    while (u.n_left > 0) {
        kv_unpacked_event ev;
        PGD_TRY(kv_event_unpack_next(&ev, &u, why));
        if (is_json)
            append_object(out, &ev, seq, u.ts);
        else
            append_line(out, &ev, seq, u.ts);
    }
    return PGD_OK;
}

void event_report_gap(strbuf *out, bool is_json, uint64_t first, uint64_t end)
{
    if (is_json)
        strbuf_appendf(out, "{\"seq\":%" PRIu64 ",\"event\":\"missed\",\"batches\":%" PRIu64 "}\n",
                       first, end - first);
    else
        strbuf_appendf(out, "missed %" PRIu64 " batches from #%" PRIu64 " on\n", end - first,
                       first);
}
