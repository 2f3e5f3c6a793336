/* The head of a request as it arrives: target and header lines, kept until the next request.
 *
 * Limits:  HTTP_HEAD_MAX_LINES lines; max_bytes for target and lines together
 * Thread:  io
 */
#ifndef ENGINE_HTTP_HTTP_HEAD_H
#define ENGINE_HTTP_HTTP_HEAD_H

#include "common/strbuf.h"

#define HTTP_HEAD_MAX_LINES 128
#define HTTP_HEAD_ID_BYTES  129 /* of a request id, with its NUL */

typedef struct http_head_line {
    size_t name_at; /* offsets into text, NUL-terminated */
    size_t value_at;
} http_head_line;

typedef struct http_head {
    strbuf target; /* after http_head_end cut at '?' */
    strbuf text;
    http_head_line lines[HTTP_HEAD_MAX_LINES];
    int n_lines;
    bool in_value;
    size_t max_bytes;  /* of all pieces together */
    const char *path;  /* set by http_head_end: without scheme, host and query */
    const char *query; /* behind '?', or "" */
} http_head;

/* What is wrong with a piece: status 0 = nothing; text is static storage. */
typedef struct http_head_fault {
    int status;
    const char *text;
} http_head_fault;

void http_head_init(http_head *h, size_t max_bytes);
void http_head_deinit(http_head *h);
/* Empty, capacity kept. */
void http_head_reset(http_head *h);

/* Whether bytes begin with what could be a method, if one that no parser knows; else they are of
 * another protocol. */
bool http_head_is_method(const char *data, size_t n_bytes);

/* Pieces in the order of arrival, each in any number of parts. */
PGD_MUST_USE http_head_fault http_head_add_target(http_head *h, const char *data, size_t n_bytes);
PGD_MUST_USE http_head_fault http_head_add_name(http_head *h, const char *data, size_t n_bytes);
PGD_MUST_USE http_head_fault http_head_add_value(http_head *h, const char *data, size_t n_bytes);
/* All is there: path, query and http_head_get are good from here on. False when out of memory. */
PGD_MUST_USE bool http_head_end(http_head *h);

/* Value of a line (name in any case), or NULL; the first of several. Borrow until the next add or
 * reset. */
const char *http_head_get(const http_head *h, const char *name);
/* The client's X-Request-Id when it is usable (1 to 128 visible ASCII bytes, no quote or backslash,
 * since ids go into log lines and JSON as they are); else one made of the number, which is then
 * counted up. Works on an unfinished head too. */
void http_head_choose_id(char out[HTTP_HEAD_ID_BYTES], const http_head *h, uint64_t *next);

#endif
