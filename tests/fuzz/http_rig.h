/* A client of one HTTP connection, for fuzz targets: a socket pair instead of a listener, and a
 * response parser that holds whatever comes back against the grammar.
 *
 * Thread:  one
 */
#ifndef TESTS_FUZZ_HTTP_RIG_H
#define TESTS_FUZZ_HTTP_RIG_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/socket.h>
#include <unistd.h>

#include <llhttp.h>
#include <uv.h>

#include "common/strbuf.h"
#include "engine/http/http_conn.h"

#define HTTP_RIG_MAX_TURNS 64
#define HTTP_RIG_MAX_HEADS 64

typedef struct http_rig {
    uv_loop_t loop;
    config cfg;
    http_conn_host host;
    char read_buf[HTTP_CONN_READ_BYTES];
    size_t n_body_bytes;
    http_output_queue outputs;
    http_conn *conn; /* NULL once it is closed */
    int client_fd;   /* -1 once the client has left */
    int server_fd;
    void (*on_request)(void *arg, http_conn *conn, const http_request *req);
    void *arg;
    int n_answered;                   /* ends of answers that were told */
    int n_requests;                   /* that reached the handler */
    bool is_head[HTTP_RIG_MAX_HEADS]; /* of request i, modulo */
    llhttp_settings_t settings;
    llhttp_t parser; /* of what the client receives */
    int n_responses; /* complete, 1xx not counted */
    int status;      /* of the last one */
    strbuf body;     /* of the response at hand or the last one */
    bool is_at_end;  /* the server has said its last */
} http_rig;

static inline int http_rig_on_begin(llhttp_t *p)
{
    http_rig *rig = p->data;
    strbuf_reset(&rig->body);
    return 0;
}

static inline int http_rig_on_head(llhttp_t *p)
{
    http_rig *rig = p->data;
    rig->status = p->status_code;
    bool is_refusal = rig->n_responses >= rig->n_requests; /* of bytes that were no request */
    return !is_refusal && rig->is_head[rig->n_responses % HTTP_RIG_MAX_HEADS] ? 1 : 0;
}

static inline int http_rig_on_body(llhttp_t *p, const char *at, size_t n)
{
    http_rig *rig = p->data;
    strbuf_append(&rig->body, at, n);
    return 0;
}

static inline int http_rig_on_end(llhttp_t *p)
{
    http_rig *rig = p->data;
    if (rig->status >= 200)
        rig->n_responses++;
    return 0;
}

static inline void http_rig_on_request(void *arg, http_conn *conn, const http_request *req)
{
    http_rig *rig = arg;
    PGD_ASSERT(req->path[0] != '\0');
    PGD_ASSERT(req->body[req->n_body_bytes] == '\0');
    PGD_ASSERT(req->n_body_bytes <= (size_t)rig->cfg.max_body_bytes);
    rig->is_head[rig->n_requests % HTTP_RIG_MAX_HEADS] = req->is_head;
    rig->n_requests++;
    rig->on_request(rig->arg, conn, req);
}

static inline void http_rig_on_closed(void *arg, http_conn *conn)
{
    http_rig *rig = arg;
    PGD_ASSERT(rig->conn == conn);
    rig->conn = NULL;
}

static inline void http_rig_on_answered(void *arg, const access_entry *entry)
{
    http_rig *rig = arg;
    PGD_ASSERT(entry->id[0] != '\0' && entry->method[0] != '\0');
    PGD_ASSERTF(entry->status >= 200 && entry->status < 600, "status %d", entry->status);
    rig->n_answered++;
}

static inline void http_rig_run(http_rig *rig)
{
    (void)uv_run(&rig->loop, UV_RUN_NOWAIT);
    http_output_queue_flush(&rig->outputs);
}

/* The loop, once per program. cfg may be changed until connect. */
static inline void
http_rig_init(http_rig *rig,
              void (*on_request)(void *arg, http_conn *conn, const http_request *req), void *arg)
{
    http_auth *auth;
    memset(rig, 0, sizeof(*rig));
    (void)signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    if (uv_loop_init(&rig->loop) != 0 || http_auth_create(&auth) != PGD_OK)
        abort();
    http_output_queue_init(&rig->outputs, &rig->loop, rig);
    rig->client_fd = -1;
    rig->on_request = on_request;
    rig->arg = arg;
    rig->host = (http_conn_host){.cfg = &rig->cfg,
                                 .loop = &rig->loop,
                                 .on_request = http_rig_on_request,
                                 .on_closed = http_rig_on_closed,
                                 .on_answered = http_rig_on_answered,
                                 .auth = auth,
                                 .outputs = &rig->outputs,
                                 .arg = rig,
                                 .read_buf = rig->read_buf,
                                 .n_body_bytes = &rig->n_body_bytes};
    llhttp_settings_init(&rig->settings);
    rig->settings.on_message_begin = http_rig_on_begin;
    rig->settings.on_headers_complete = http_rig_on_head;
    rig->settings.on_body = http_rig_on_body;
    rig->settings.on_message_complete = http_rig_on_end;
}

static inline void http_rig_connect(http_rig *rig)
{
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0)
        abort();
    rig->client_fd = fds[0];
    rig->server_fd = fds[1];
    rig->host.draining = false;
    rig->host.next_id = 1;
    rig->n_answered = 0;
    rig->n_requests = 0;
    rig->n_responses = 0;
    rig->status = 0;
    rig->is_at_end = false;
    strbuf_init(&rig->body);
    llhttp_init(&rig->parser, HTTP_RESPONSE, &rig->settings);
    rig->parser.data = rig;
    if (http_conn_accept(&rig->conn, rig->server_fd, true, &rig->host) != PGD_OK)
        abort();
}

/* Takes what has come for the client; false when nothing had. */
static inline bool http_rig_read(http_rig *rig)
{
    char buf[16384];
    ssize_t n = rig->client_fd >= 0 ? recv(rig->client_fd, buf, sizeof(buf), 0) : -1;
    if (n == 0 && !rig->is_at_end) {
        rig->is_at_end = true;
        (void)llhttp_finish(&rig->parser); /* may end an answer, or cut it */
    }
    if (n <= 0)
        return false;
    llhttp_errno_t rc = llhttp_execute(&rig->parser, buf, (size_t)n);
    PGD_ASSERTF(rc == HPE_OK, "the answer is no HTTP: %s: %.*s",
                llhttp_get_error_reason(&rig->parser), (int)n, buf);
    return true;
}

/* Turns the loop until nothing happens any more. reads: the client takes what comes. */
static inline void http_rig_turn(http_rig *rig, bool reads)
{
    int n_quiet = 0;
    for (int i = 0; i < HTTP_RIG_MAX_TURNS && n_quiet < 2; i++) {
        int n_requests = rig->n_requests;
        bool was_open = rig->conn != NULL;
        http_rig_run(rig);
        bool got = reads && http_rig_read(rig);
        bool is_quiet = !got && n_requests == rig->n_requests && was_open == (rig->conn != NULL);
        n_quiet = is_quiet ? n_quiet + 1 : 0;
    }
}

/* Bytes that the socket does not take are lost, with all that would follow: false. */
static inline bool http_rig_send(http_rig *rig, const void *data, size_t n_bytes)
{
    return rig->client_fd >= 0 && n_bytes > 0 &&
           send(rig->client_fd, data, n_bytes, MSG_NOSIGNAL) == (ssize_t)n_bytes;
}

/* The client goes away; then the connection must end by itself. */
static inline void http_rig_leave(http_rig *rig)
{
    while (http_rig_read(rig)) {
    }
    if (rig->client_fd >= 0)
        (void)close(rig->client_fd);
    rig->client_fd = -1;
    for (int i = 0; i < HTTP_RIG_MAX_TURNS && rig->conn != NULL; i++)
        http_rig_run(rig);
    PGD_ASSERT(rig->conn == NULL);
    http_rig_run(rig);
    PGD_ASSERT(rig->n_body_bytes == 0);
    strbuf_deinit(&rig->body);
}

#endif
