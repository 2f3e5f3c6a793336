/* The usual case, one data line and its empty line in one piece, is handed on where it lies; only
 * what a read has cut, and events of several lines, are copied. */
#include "engine/http/sse_reader.h"

#include <string.h>

void sse_reader_init(sse_reader *r, size_t max_event_bytes)
{
    *r = (sse_reader){.max_event_bytes = max_event_bytes};
    strbuf_init(&r->line);
    strbuf_init(&r->event);
}

void sse_reader_deinit(sse_reader *r)
{
    strbuf_deinit(&r->line);
    strbuf_deinit(&r->event);
}

void sse_reader_reset(sse_reader *r)
{
    strbuf_reset(&r->line);
    strbuf_reset(&r->event);
    r->has_data = false;
    r->is_stopped = false;
}

static bool add_data(sse_reader *r, const char *value, size_t n)
{
    if (n + r->event.n_bytes + 1 > r->max_event_bytes)
        return false;
    if (r->has_data)
        strbuf_append_char(&r->event, '\n');
    strbuf_append(&r->event, value, n);
    r->has_data = true;
    return !r->event.failed;
}

/* The value behind "data:", or NULL for another field. *n: bytes of the line, then of the value. */
static const char *data_value(const char *line, size_t *n)
{
    if (*n < 4 || memcmp(line, "data", 4) != 0 || (*n > 4 && line[4] != ':'))
        return NULL;
    size_t skip = PGD_MIN(*n, 5u);
    if (skip < *n && line[skip] == ' ')
        skip++;
    *n -= skip;
    return line + skip;
}

static bool take_line(sse_reader *r, const char *line, size_t n, bool is_next_empty,
                      sse_event_fn fn, void *arg)
{
    if (n > 0 && line[n - 1] == '\r')
        n--;
    if (n == 0) {
        bool ok = true;
        if (r->has_data)
            ok = fn(arg, r->event.data != NULL ? r->event.data : "", r->event.n_bytes);
        strbuf_reset(&r->event);
        r->has_data = false;
        return ok;
    }
    const char *value = data_value(line, &n);
    if (value == NULL)
        return true;
    if (!r->has_data && is_next_empty)
        return fn(arg, value, n); /* the empty line then finds no data */
    return add_data(r, value, n);
}

bool sse_reader_feed(sse_reader *r, const char *data, size_t n_bytes, sse_event_fn fn, void *arg)
{
    const char *end = data + n_bytes;
    bool ok = !r->is_stopped;
    while (ok && data < end) {
        const char *newline = memchr(data, '\n', (size_t)(end - data));
        size_t n = (size_t)((newline != NULL ? newline : end) - data);
        if (r->line.n_bytes + n > r->max_event_bytes) {
            ok = false;
        } else if (newline == NULL) {
            strbuf_append(&r->line, data, n);
            ok = !r->line.failed;
        } else if (r->line.n_bytes > 0) {
            strbuf_append(&r->line, data, n);
            ok = !r->line.failed && take_line(r, r->line.data, r->line.n_bytes, false, fn, arg);
            strbuf_reset(&r->line);
        } else {
            ok = take_line(r, data, n, newline + 1 < end && newline[1] == '\n', fn, arg);
        }
        data += n + 1;
        if (newline == NULL)
            break;
    }
    r->is_stopped = !ok;
    return ok;
}
