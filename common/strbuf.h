/* Growable byte string, always NUL-terminated after a successful append.
 *
 * A failed append sets `failed` and later appends do nothing, so a writer checks once at the end.
 * Owns:    data; strbuf_deinit frees
 * Thread:  one at a time
 */
#ifndef COMMON_STRBUF_H
#define COMMON_STRBUF_H

#include "common/err.h"

typedef struct strbuf {
    char *data;
    size_t n_bytes;
    size_t cap_bytes;
    bool failed;
} strbuf;

void strbuf_init(strbuf *b);
void strbuf_deinit(strbuf *b);
void strbuf_reset(strbuf *b);
/* Drops what lies beyond n_bytes, which is at most its length. */
void strbuf_truncate(strbuf *b, size_t n_bytes);
void strbuf_append(strbuf *b, const void *data, size_t n_bytes);
void strbuf_append_str(strbuf *b, const char *text);
void strbuf_append_char(strbuf *b, char c);
void strbuf_appendf(strbuf *b, const char *fmt, ...) PGD_PRINTF(2, 3);
void strbuf_append_int(strbuf *b, int64_t value);
/* Appends text as a JSON string with quotes; invalid UTF-8 becomes U+FFFD, one per maximal bad
 * part. */
void strbuf_append_json(strbuf *b, const char *text, size_t n_bytes);

#endif
