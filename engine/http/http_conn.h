/* One HTTP/1.1 connection: parse, hand a complete request to the handler, write the answer with
 * back-pressure.
 *
 * Who may ask is decided when the header of a request is there, before its body is read. Every
 * answer carries X-Request-Id (the client's own, if it is 1 to 128 visible ASCII bytes without
 * quotes or backslashes; else one made here) and the CORS lines that its Origin calls for; with
 * access_log each request is one log line when its answer ends.
 *
 * Requests on one connection are answered one after the other (pipelined bytes wait, bounded). The
 * client's going away while its request is being answered is told to the answerer at once through
 * the disconnect callback; after that, and after http_conn_respond or http_conn_stream_end, the
 * answerer must not touch the connection again.
 * Limits:  config max_header_bytes, max_body_bytes, max_output_buffer_bytes, idle_timeout_s (no
 *          request begun, or a client that takes nothing of its answer), header_timeout_s
 * Thread:  io
 */
#ifndef ENGINE_HTTP_HTTP_CONN_H
#define ENGINE_HTTP_HTTP_CONN_H

#include <uv.h>

#include "common/err.h"
#include "common/list.h"
#include "common/strbuf.h"
#include "config/config.h"
#include "engine/http/access_log.h"
#include "engine/http/http_auth.h"
#include "engine/http/http_head.h"
#include "engine/http/http_output.h"

typedef struct http_conn http_conn;

typedef struct http_request {
    const char *method; /* "GET" */
    const char *path;   /* without scheme, host and query; no route needs percent-decoding */
    const char *query;  /* after '?', or "" */
    const char *body;   /* NUL-terminated behind n_body_bytes */
    size_t n_body_bytes;
    bool is_head;
} http_request;

/* Counted since the start. */
typedef struct http_counters {
    uint64_t n_accepted;
    uint64_t n_refused;         /* over max_connections */
    uint64_t n_slow_dropped;    /* over max_output_buffer_bytes */
    uint64_t n_stalled_dropped; /* took nothing for idle_timeout */
    uint64_t n_header_timeouts;
    uint64_t n_request_timeouts;
} http_counters;

/* What a connection needs of its server. */
typedef struct http_conn_host {
    const config *cfg;
    uv_loop_t *loop;
    void (*on_request)(void *arg, http_conn *conn, const http_request *req);
    void (*on_closed)(
        void *arg,
        http_conn *conn); /* the connection is gone; its memory is freed after this call */
    /* An answer has ended, whole or because the client left; borrow for the call. */
    void (*on_answered)(void *arg, const access_entry *entry);
    void *arg;
    const http_auth *auth;
    http_counters counters;
    uint64_t next_id; /* request ids are made of this; starts at random */
    bool draining;    /* set by the server: answers say Connection: close */
    char *read_buf;   /* [HTTP_CONN_READ_BYTES], shared: a read is used up before the next one */
    http_output_queue *outputs;
    size_t *n_body_bytes; /* of all bodies that are arriving or being looked at, now */
} http_conn_host;

/* Bodies of full size that may be held at once: one more byte is answered 503. */
#define HTTP_CONN_MAX_BODIES 32

#define HTTP_CONN_READ_BYTES 65536

/* Takes fd, an accepted socket, unless it fails. host: borrow until on_closed. */
PGD_MUST_USE pgd_err http_conn_accept(http_conn **out, int fd, bool is_pipe, http_conn_host *host);
/* Answers 503 without reading a request, then closes: for a connection over the limit. */
void http_conn_refuse(http_conn *c);
/* Closes now; a request being answered gets its disconnect callback. */
void http_conn_close(http_conn *c);
/* For a server that ends, after it has set draining; a later call can only bring the end nearer. One
 * that is kept for a next request is closed. One that is new, or on which a request has begun to
 * arrive, has until leave_by_us for it; then a part of a request is answered 503. */
void http_conn_drain(http_conn *c, uint64_t now_us, uint64_t leave_by_us);
/* A request is being answered and the answer is not out, or a drain still waits for one. */
bool http_conn_is_busy(const http_conn *c);
/* Enforces the time-outs; called about once a second. */
void http_conn_check_time(http_conn *c, uint64_t now_us);
list_node *http_conn_node(http_conn *c);
http_conn *http_conn_from_node(list_node *node);

/* The body of a request, taken from its connection. */
typedef struct http_body {
    strbuf bytes;
    size_t n_counted;
    size_t *n_total; /* what the host's n_body_bytes points to */
} http_body;

/* For a handler that looks at the body after it has returned, or on another thread. It goes on
 * counting against the bound on bodies until it is released. The server must outlive it. */
void http_conn_take_body(http_body *out, http_conn *c);
/* Thread: io */
void http_body_release(http_body *b);

/* Value of a request header (case-insensitive name), or NULL. Borrow until the answer is complete.
 */
const char *http_conn_header(const http_conn *c, const char *name);

/* fn is called at most once, when the client goes away before the answer is complete. */
void http_conn_on_disconnect(http_conn *c, void (*fn)(void *arg), void *arg);

/* fn is called at most once, when the request has been here for request_timeout and its answer is
 * not complete; it must end the answer. */
void http_conn_on_deadline(http_conn *c, void (*fn)(void *arg), void *arg);

/* Borrow until the answer is complete. */
const char *http_conn_request_id(const http_conn *c);
/* For the access log. */
void http_conn_note_tokens(http_conn *c, int64_t n_prompt_tokens, int64_t n_output_tokens);

/* The whole answer. extra: further header lines, each ending in \r\n, or NULL. body may be NULL
 * with 0 bytes. */
void http_conn_respond(http_conn *c, int status, const char *content_type, const char *extra,
                       const void *body, size_t n_bytes);
/* The same; takes body, which is not copied if it is large. */
void http_conn_respond_given(http_conn *c, int status, const char *content_type, strbuf *body);
/* A streamed answer: begin, any number of writes, end. A slow client's unsent output is bounded:
 * beyond max_output_buffer_bytes the connection is closed (the disconnect callback tells) and write
 * answers false. */
void http_conn_stream_begin(http_conn *c, int status, const char *content_type, const char *extra);
bool http_conn_stream_write(http_conn *c, const void *data, size_t n_bytes);
void http_conn_stream_end(http_conn *c);
bool http_conn_is_streaming(const http_conn *c);

#endif
