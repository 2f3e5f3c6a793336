/* One buffer for all lines, so that a head costs no allocation once a connection has seen one of its
 * size; lines are offsets, since the buffer moves while it grows. */
#include "engine/http/http_head.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <strings.h>

#include "common/hash.h"

#define MAX_METHOD_BYTES 32

static const http_head_fault no_fault = {0, NULL};
static const http_head_fault no_memory = {503, "out of memory"};

void http_head_init(http_head *h, size_t max_bytes)
{
    memset(h, 0, sizeof(*h));
    h->max_bytes = max_bytes;
}

void http_head_deinit(http_head *h)
{
    strbuf_deinit(&h->target);
    strbuf_deinit(&h->text);
}

void http_head_reset(http_head *h)
{
    strbuf_reset(&h->target);
    strbuf_reset(&h->text);
    h->n_lines = 0;
    h->in_value = false;
    h->path = h->query = NULL;
}

bool http_head_is_method(const char *data, size_t n_bytes)
{
    size_t n = 0;
    while (n < n_bytes && n < MAX_METHOD_BYTES && data[n] >= 'A' && data[n] <= 'Z')
        n++;
    return n > 0 && n < n_bytes && data[n] == ' ';
}

static http_head_fault add(http_head *h, strbuf *b, const char *data, size_t n_bytes,
                           const char *too_large)
{
    strbuf_append(b, data, n_bytes);
    if (h->target.n_bytes + h->text.n_bytes > h->max_bytes)
        return (http_head_fault){431, too_large};
    return b->failed ? no_memory : no_fault;
}

static http_head_fault add_text(http_head *h, const char *data, size_t n_bytes)
{
    return add(h, &h->text, data, n_bytes, "the request header is too large (max_header_bytes)");
}

http_head_fault http_head_add_target(http_head *h, const char *data, size_t n_bytes)
{
    return add(h, &h->target, data, n_bytes, "the request line is too long");
}

/* Blanks behind a value are no part of it (RFC 9110); the parser skips only those before it. */
static void end_line(http_head *h)
{
    size_t n = h->text.n_bytes;
    while (h->in_value && n > h->lines[h->n_lines - 1].value_at &&
           (h->text.data[n - 1] == ' ' || h->text.data[n - 1] == '\t'))
        n--;
    strbuf_truncate(&h->text, n);
    strbuf_append(&h->text, "", 1);
}

http_head_fault http_head_add_name(http_head *h, const char *data, size_t n_bytes)
{
    if (h->in_value || h->n_lines == 0) {
        if (h->n_lines == HTTP_HEAD_MAX_LINES)
            return (http_head_fault){431, "too many header lines"};
        end_line(h);
        h->lines[h->n_lines++] = (http_head_line){h->text.n_bytes, 0};
        h->in_value = false;
    }
    return add_text(h, data, n_bytes);
}

http_head_fault http_head_add_value(http_head *h, const char *data, size_t n_bytes)
{
    if (h->n_lines == 0)
        return no_fault; /* the parser gives a name first, always */
    if (!h->in_value) {
        strbuf_append(&h->text, "", 1);
        h->lines[h->n_lines - 1].value_at = h->text.n_bytes;
        h->in_value = true;
    }
    return add_text(h, data, n_bytes);
}

/* The target without "http://host", which clients behind a proxy send. */
static char *origin_form(char *target)
{
    static char root[] = "/";
    if (strncasecmp(target, "http://", 7) != 0)
        return target;
    target += 7 + strcspn(target + 7, "/?");
    return *target == '/' ? target : root;
}

bool http_head_end(http_head *h)
{
    end_line(h);
    strbuf_append(&h->target, "", 0);
    if (h->text.failed || h->target.failed)
        return false;
    char *path = origin_form(h->target.data);
    char *query = strchr(path, '?');
    if (query != NULL)
        *query = '\0';
    h->path = path;
    h->query = query != NULL ? query + 1 : "";
    return true;
}

const char *http_head_get(const http_head *h, const char *name)
{
    for (int i = 0; i < h->n_lines; i++) {
        if (strcasecmp(h->text.data + h->lines[i].name_at, name) == 0)
            return h->lines[i].value_at != 0 ? h->text.data + h->lines[i].value_at : "";
    }
    return NULL;
}

static bool is_usable_id(const char *id)
{
    size_t n = strlen(id);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)id[i];
        if (c <= 0x20 || c >= 0x7F || c == '"' || c == '\\')
            return false;
    }
    return n > 0 && n < HTTP_HEAD_ID_BYTES;
}

void http_head_choose_id(char out[HTTP_HEAD_ID_BYTES], const http_head *h, uint64_t *next)
{
    const char *given = h->path != NULL ? http_head_get(h, "x-request-id") : NULL;
    if (given != NULL && is_usable_id(given))
        snprintf(out, HTTP_HEAD_ID_BYTES, "%s", given);
    else /* hash_u64 maps different numbers to different ones */
        snprintf(out, HTTP_HEAD_ID_BYTES, "%016" PRIx64, hash_u64((*next)++));
}
