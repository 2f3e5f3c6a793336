/* Doubling buffer. Errors are sticky, so a page of appends is checked once. */
#include "common/strbuf.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "common/utf8.h"

void strbuf_init(strbuf *b)
{
    memset(b, 0, sizeof(*b));
}

void strbuf_deinit(strbuf *b)
{
    mem_free(b->data);
    strbuf_init(b);
}

void strbuf_reset(strbuf *b)
{
    b->n_bytes = 0;
    b->failed = false;
    if (b->data != NULL)
        b->data[0] = '\0';
}

void strbuf_truncate(strbuf *b, size_t n_bytes)
{
    PGD_ASSERT(n_bytes <= b->n_bytes);
    b->n_bytes = n_bytes;
    if (b->data != NULL)
        b->data[n_bytes] = '\0';
}

/* Room for n_more bytes and the NUL. */
static bool reserve(strbuf *b, size_t n_more)
{
    size_t need;
    if (b->failed || !mem_add(&need, b->n_bytes, n_more) || !mem_add(&need, need, 1)) {
        b->failed = true;
        return false;
    }
    if (need <= b->cap_bytes)
        return true;
    size_t cap = b->cap_bytes != 0 ? b->cap_bytes : 64;
    while (cap < need) {
        if (!mem_mul(&cap, cap, 2)) {
            cap = need;
            break;
        }
    }
    char *data = mem_realloc_array(b->data, cap, 1);
    if (data == NULL) {
        b->failed = true;
        return false;
    }
    b->data = data;
    b->cap_bytes = cap;
    return true;
}

void strbuf_append(strbuf *b, const void *data, size_t n_bytes)
{
    if (!reserve(b, n_bytes))
        return;
    if (n_bytes > 0)
        memcpy(b->data + b->n_bytes, data, n_bytes);
    b->n_bytes += n_bytes;
    b->data[b->n_bytes] = '\0';
}

void strbuf_append_str(strbuf *b, const char *text)
{
    strbuf_append(b, text, strlen(text));
}

void strbuf_append_char(strbuf *b, char c)
{
    strbuf_append(b, &c, 1);
}

void strbuf_appendf(strbuf *b, const char *fmt, ...)
{
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    size_t n_free = b->failed || b->data == NULL ? 0 : b->cap_bytes - b->n_bytes;
    int n = vsnprintf(n_free > 0 ? b->data + b->n_bytes : NULL, n_free, fmt, args);
    va_end(args);
    if (n < 0) {
        b->failed = true;
    } else if ((size_t)n < n_free) {
        b->n_bytes += (size_t)n;
    } else if (reserve(b, (size_t)n)) {
        vsnprintf(b->data + b->n_bytes, (size_t)n + 1, fmt, again);
        b->n_bytes += (size_t)n;
    }
    va_end(again);
}

void strbuf_append_int(strbuf *b, int64_t value)
{
    char text[24];
    size_t at = sizeof(text);
    uint64_t rest = value < 0 ? -(uint64_t)value : (uint64_t)value;
    do
        text[--at] = (char)('0' + rest % 10);
    while ((rest /= 10) > 0);
    if (value < 0)
        text[--at] = '-';
    strbuf_append(b, text + at, sizeof(text) - at);
}

void strbuf_append_json(strbuf *b, const char *text, size_t n_bytes)
{
    strbuf_append_char(b, '"');
    size_t clean = 0; /* start of the run that needs no escape */
    for (size_t i = 0; i < n_bytes;) {
        unsigned char c = (unsigned char)text[i];
        size_t len = 1;
        const char *escape = NULL;
        char code[8];
        if (c == '"') {
            escape = "\\\"";
        } else if (c == '\\') {
            escape = "\\\\";
        } else if (c == '\n') {
            escape = "\\n";
        } else if (c == '\r') {
            escape = "\\r";
        } else if (c == '\t') {
            escape = "\\t";
        } else if (c < 0x20 || c == 0x7F) {
            snprintf(code, sizeof(code), "\\u%04x", c);
            escape = code;
        } else if (c >= 0x80 && utf8_decode(NULL, &len, text + i, n_bytes - i) != UTF8_OK) {
            escape = UTF8_REPLACEMENT;
        }
        if (escape != NULL) {
            strbuf_append(b, text + clean, i - clean);
            strbuf_append_str(b, escape);
            clean = i + len;
        }
        i += len;
    }
    strbuf_append(b, text + clean, n_bytes - clean);
    strbuf_append_char(b, '"');
}
