/* Any bytes as what a server sends to the clients of ours: a stream of events, however it is cut, gives
 * the same events; what is strict JSON is read; a metrics page and an address are taken or refused.
 * The first byte says how the stream is cut. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/json.h"
#include "engine/bench/stream_event.h"
#include "engine/http/http_client.h"
#include "engine/http/sse_reader.h"
#include "engine/status/metrics_text.h"

#define MAX_EVENT_BYTES 4096

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static bool on_event(void *arg, const char *data, size_t n_bytes)
{
    strbuf *all = arg;
    stream_event e;
    cJSON *root = NULL;
    bool ok = stream_event_read(&e, data, n_bytes);
    if (ok && e.error != NULL)
        PGD_ASSERT(e.n_error_bytes == 0 ||
                   (e.error >= data && e.error + e.n_error_bytes <= data + n_bytes));
    PGD_ASSERT(e.n_prompt_tokens >= 0 && e.n_completion_tokens >= 0 && e.n_cached_tokens >= 0);
    if (json_parse(&root, data, n_bytes, JSON_MAX_DEPTH, NULL) == PGD_OK) {
        PGD_ASSERT(ok == cJSON_IsObject(root));
        cJSON_Delete(root);
    }
    strbuf_append(all, data, n_bytes);
    strbuf_append(all, "\n\n", 2);
    return true;
}

/* All events, in pieces of `step` bytes that lie on the heap. False when one was too large. */
static bool read_stream(strbuf *all, const uint8_t *data, size_t n_bytes, size_t step)
{
    sse_reader r;
    bool ok = true;
    sse_reader_init(&r, MAX_EVENT_BYTES);
    for (size_t at = 0; at < n_bytes && ok; at += step) {
        size_t n = PGD_MIN(step, n_bytes - at);
        char *piece = malloc(n);
        if (piece == NULL)
            abort();
        memcpy(piece, data + at, n);
        ok = sse_reader_feed(&r, piece, n, on_event, all);
        free(piece);
    }
    sse_reader_deinit(&r);
    return ok;
}

static void try_stream(const uint8_t *data, size_t n_bytes, size_t step)
{
    strbuf whole;
    strbuf cut;
    strbuf_init(&whole);
    strbuf_init(&cut);
    bool is_whole = read_stream(&whole, data, n_bytes, PGD_MAX(n_bytes, 1u));
    bool is_cut = read_stream(&cut, data, n_bytes, step);
    PGD_ASSERT(is_whole == is_cut && whole.n_bytes == cut.n_bytes);
    PGD_ASSERT(whole.n_bytes == 0 || memcmp(whole.data, cut.data, whole.n_bytes) == 0);
    strbuf_deinit(&whole);
    strbuf_deinit(&cut);
}

static void try_metrics(const char *text, size_t n_bytes)
{
    metrics_text m;
    pgd_why why;
    if (metrics_text_parse(&m, text, n_bytes, &why) != PGD_OK)
        return;
    for (size_t i = 0; i < m.n_samples; i++) {
        const metrics_sample *s = &m.samples[i];
        char name[64];
        char label[8];
        double sum;
        PGD_ASSERT(s->n_name > 0 && s->name >= text && s->name + s->n_name <= text + n_bytes);
        (void)metrics_text_label(s, "le", label, sizeof(label));
        if (s->n_name >= sizeof(name) || i > 100)
            continue;
        memcpy(name, s->name, s->n_name);
        name[s->n_name] = '\0';
        PGD_ASSERT(metrics_text_sum(&m, name, &sum));
    }
    metrics_text_deinit(&m);
}

static void try_target(const char *text)
{
    http_target t;
    pgd_why why = {0};
    if (http_target_parse(&t, text, &why) == PGD_OK)
        PGD_ASSERT(t.host[0] != '\0' && t.port >= 1 && t.port <= 65535);
    else
        PGD_ASSERT(why.text[0] != '\0');
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes == 0)
        return 0;
    size_t n = n_bytes - 1;
    char *text = malloc(n + 1);
    if (text == NULL)
        abort();
    memcpy(text, data + 1, n);
    try_stream(data + 1, n, (size_t)data[0] % 61 + 1);
    text[n] = '\0';
    try_target(text);
    text = realloc(text, n > 0 ? n : 1); /* no NUL behind it: reads beyond show */
    try_metrics(text, n);
    free(text);
    return 0;
}
