/* An HTTP/1.1 client for one server: many requests at once, kept-alive connections, answers as they
 * arrive.
 *
 * A request is an http_call in the caller's storage. Each runs on a connection of its own, an idle
 * one when there is one; a kept-alive connection that turns out to be closed before any byte of the
 * answer is replaced once. Every started call ends in exactly one on_end unless it is cancelled.
 * Limits:  64 KiB of answer header per call; bodies are handed on, not kept; http_fetch keeps up to
 *          its max_body_bytes; a call without progress for timeout_us ends as HTTP_CALL_TIMEOUT
 *          SIGPIPE must be ignored
 * Owns:    its connections; http_call and request body are the caller's, unmoved until on_end or
 *          cancel
 * Thread:  the loop's
 */
#ifndef ENGINE_HTTP_HTTP_CLIENT_H
#define ENGINE_HTTP_HTTP_CLIENT_H

#include <uv.h>

#include "common/err.h"
#include "common/list.h"
#include "common/strbuf.h"

typedef struct http_client http_client;
typedef struct http_client_conn http_client_conn;

typedef struct http_target {
    char host[256]; /* "localhost" with a Unix socket */
    int port;
    char uds[108];       /* "" = TCP */
    char base_path[256]; /* before each call's path: "" or "/prefix" */
} http_target;

/* http://host[:port][/prefix[/v1]], host:port, or unix:/path. A trailing /v1 is dropped: calls name
 * it. Errors: PGD_EINVAL, PGD_EUNSUPPORTED (https) */
PGD_MUST_USE pgd_err http_target_parse(http_target *out, const char *url, pgd_why *why);

typedef enum http_call_end {
    HTTP_CALL_DONE,       /* a whole answer of any status */
    HTTP_CALL_UNREACHED,  /* no connection */
    HTTP_CALL_CLOSED,     /* closed before the answer was whole */
    HTTP_CALL_MALFORMED,  /* not HTTP, or a header over the limit */
    HTTP_CALL_TIMEOUT,    /* nothing moved for timeout_us */
    HTTP_CALL_NO_RESOURCE /* out of memory or descriptors here */
} http_call_end;

typedef struct http_call http_call;
struct http_call {
    const char *method;
    const char *path;    /* "/v1/completions" */
    const char *headers; /* further lines, each ending in \r\n, or NULL */
    const char *body;    /* NULL with 0 bytes */
    size_t n_body_bytes;
    /* A piece of the body; a borrow for the call. May cancel the call. NULL = dropped. */
    void (*on_body)(http_call *call, const char *data, size_t n_bytes);
    /* The call is free to be started again. detail: "" or a reason; borrow. */
    void (*on_end)(http_call *call, http_call_end end, const char *detail);
    void *arg;

    int status; /* of the answer, 0 = none yet */
    /* the client's */
    http_client_conn *conn;
    list_node node;
    uint64_t moved_us; /* last progress */
    bool is_second_try;
};

/* Resolves the host, waiting for the resolver. timeout_us: 0 = none. */
PGD_MUST_USE pgd_err http_client_create(http_client **out, uv_loop_t *loop,
                                        const http_target *target, uint64_t timeout_us,
                                        pgd_why *why);
/* Closes every connection, then runs the loop until they are gone; calls in progress end without
 * on_end. Takes NULL. */
void http_client_destroy(http_client *c);
/* Begins; on_end may be called before this returns only for want of memory or descriptors. */
void http_client_start(http_client *c, http_call *call);
/* Ends without on_end; the connection is closed. A call that is not running is left alone. */
void http_client_cancel(http_call *call);
/* TCP or Unix connections made so far. */
uint64_t http_client_n_connects(const http_client *c);

/* One whole answer: starts the call and runs the loop until it ends, which is within twice the
 * client's time-out, whatever comes meanwhile. *status: 0 when there is none.
 * body: appended to, at most max_body_bytes. Errors: PGD_EIO, PGD_ECLOSED, PGD_EPROTO,
 * PGD_ETIMEDOUT, PGD_ENOMEM, PGD_ERANGE (body too large) */
PGD_MUST_USE pgd_err http_fetch(http_client *c, const char *method, const char *path,
                                const char *headers, strbuf *body, size_t max_body_bytes,
                                int *status, pgd_why *why);

#endif
