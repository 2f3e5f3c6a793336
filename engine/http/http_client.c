/* One connection carries one call at a time; llhttp is paused at the end of each answer, so that
 * bytes behind it are seen (a server that sends more than it was asked for loses the connection).
 * All connections share one read buffer: what was read is used up before the next read.
 *
 * A call is told of its end outside the parser and after its connection has been put away, so that
 * on_end may start the next call, cancel others or nothing at all. An answer that is whole before
 * the request was (an early 413) closes the connection: its unsent rest has no meaning.
 *
 * Rejected: pipelining (one late answer would hold up the others, and what is measured would not be
 * the server's). */
#include "engine/http/http_client.h"

#include <stdio.h>
#include <string.h>

#include <netdb.h>

#include <llhttp.h>

#include "common/clock.h"
#include "common/mem.h"

#define READ_BYTES       65536
#define MAX_HEADER_BYTES 65536
#define MAX_ADDRESSES    4
#define MAX_IDLE         4096
#define FETCH_TIMEOUTS   2 /* for a whole fetch, which may trickle in */

struct http_client_conn {
    union {
        uv_stream_t stream;
        uv_tcp_t tcp;
        uv_pipe_t pipe;
    } io;
    list_node node; /* in open or idle */
    http_client *client;
    http_call *call; /* NULL = idle or closing */
    uv_connect_t connect;
    uv_write_t write;
    strbuf head; /* of the request */
    llhttp_t parser;
    size_t n_header_bytes;
    int address; /* index into addresses */
    bool is_writing;
    bool is_reused;
    bool has_bytes; /* of the answer */
    bool is_message_done;
    bool is_closing;
};

struct http_client {
    uv_loop_t *loop;
    http_target target;
    uint64_t timeout_us;
    struct sockaddr_storage addresses[MAX_ADDRESSES]; /* [n_addresses] */
    int n_addresses;
    int address; /* the one to use: the first that has answered */
    bool has_connected;
    bool is_closing;
    list_node open; /* connections with a call */
    list_node idle;
    list_node calls;
    int n_conns; /* closing ones too */
    int n_idle;
    uint64_t n_connects;
    uv_timer_t sweep;
    bool is_sweep_closed;
    char read_buf[READ_BYTES];
};

static llhttp_settings_t parser_settings;

static void start_call(http_client *c, http_call *call);

/* --- life of a connection --------------------------------------------------------------------- */

static void on_conn_closed(uv_handle_t *handle)
{
    http_client_conn *n = handle->data;
    n->client->n_conns--;
    strbuf_deinit(&n->head);
    mem_free(n);
}

static void close_conn(http_client_conn *n)
{
    if (n->is_closing)
        return;
    n->is_closing = true;
    if (n->call == NULL && list_is_linked(&n->node))
        n->client->n_idle--;
    if (list_is_linked(&n->node))
        list_remove(&n->node);
    n->call = NULL;
    uv_close((uv_handle_t *)&n->io.stream, on_conn_closed);
}

/* Takes the call off its connection, which is kept when it can be used again. */
static void detach(http_call *call, bool keep)
{
    http_client_conn *n = call->conn;
    call->conn = NULL;
    list_remove(&call->node);
    if (n == NULL)
        return;
    http_client *c = n->client;
    if (!keep || n->is_closing || n->is_writing || c->n_idle >= MAX_IDLE) {
        close_conn(n);
        return;
    }
    n->call = NULL;
    list_remove(&n->node);
    list_prepend(&c->idle, &n->node);
    c->n_idle++;
}

static void end_call(http_call *call, http_call_end end, const char *detail, bool keep)
{
    detach(call, keep);
    call->on_end(call, end, detail);
}

/* The connection is gone under its call. */
static void lose_call(http_client_conn *n, http_call_end end, const char *detail)
{
    http_call *call = n->call;
    if (call == NULL) {
        close_conn(n);
        return;
    }
    bool retry = end == HTTP_CALL_CLOSED && n->is_reused && !n->has_bytes && !call->is_second_try;
    if (!retry) {
        end_call(call, end, detail, false);
        return;
    }
    http_client *c = n->client;
    detach(call, false);
    call->is_second_try = true;
    start_call(c, call);
}

/* --- the answer ------------------------------------------------------------------------------- */

static int count_header(llhttp_t *p, const char *at, size_t n_bytes)
{
    http_client_conn *n = p->data;
    (void)at;
    n->n_header_bytes += n_bytes;
    if (n->n_header_bytes <= MAX_HEADER_BYTES)
        return 0;
    llhttp_set_error_reason(p, "header over 65536 bytes");
    return HPE_USER;
}

static int on_headers_complete(llhttp_t *p)
{
    http_client_conn *n = p->data;
    p->upgrade = 0;
    if (p->status_code >= 200 && n->call != NULL)
        n->call->status = p->status_code;
    return n->call != NULL && strcmp(n->call->method, "HEAD") == 0 ? 1 : 0;
}

static int on_body(llhttp_t *p, const char *at, size_t n_bytes)
{
    http_client_conn *n = p->data;
    if (n->call != NULL && n->call->on_body != NULL)
        n->call->on_body(n->call, at, n_bytes);
    return n->call != NULL ? 0 : HPE_USER; /* cancelled */
}

static int on_message_complete(llhttp_t *p)
{
    http_client_conn *n = p->data;
    if (p->status_code < 200)
        return 0; /* 100 Continue: the answer comes behind it */
    n->is_message_done = true;
    return HPE_PAUSED;
}

static void finish_message(http_client_conn *n, bool keep)
{
    http_call *call = n->call;
    if (call != NULL)
        end_call(call, HTTP_CALL_DONE, "", keep);
}

static void on_answer(http_client_conn *n, const char *data, size_t n_bytes)
{
    n->has_bytes = true;
    n->call->moved_us = clock_now_us();
    llhttp_errno_t rc = llhttp_execute(&n->parser, data, n_bytes);
    if (rc == HPE_OK || n->call == NULL)
        return;
    if (rc == HPE_PAUSED && n->is_message_done) {
        bool is_all_used = llhttp_get_error_pos(&n->parser) == data + n_bytes;
        bool keep = is_all_used && llhttp_should_keep_alive(&n->parser) != 0;
        finish_message(n, keep);
        return;
    }
    const char *reason = llhttp_get_error_reason(&n->parser);
    lose_call(n, HTTP_CALL_MALFORMED, reason != NULL ? reason : "not HTTP");
}

static void on_end_of_file(http_client_conn *n, ssize_t error)
{
    /* Without a length the end of the connection is the end of the body. */
    if (error == UV_EOF && n->has_bytes && llhttp_message_needs_eof(&n->parser) &&
        n->call->status != 0) {
        finish_message(n, false);
        return;
    }
    lose_call(n, HTTP_CALL_CLOSED, error == UV_EOF ? "closed" : uv_strerror((int)error));
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buf)
{
    http_client_conn *n = handle->data;
    (void)suggested;
    *buf = uv_buf_init(n->client->read_buf, READ_BYTES);
}

static void on_read(uv_stream_t *stream, ssize_t n_read, const uv_buf_t *buf)
{
    http_client_conn *n = stream->data;
    if (n_read == 0 || n->is_closing)
        return;
    if (n->call == NULL)
        close_conn(n); /* idle: closed by the server, or bytes nobody asked for */
    else if (n_read < 0)
        on_end_of_file(n, n_read);
    else
        on_answer(n, buf->base, (size_t)n_read);
}

/* --- the request ------------------------------------------------------------------------------ */

static void on_written(uv_write_t *req, int status)
{
    http_client_conn *n = req->data;
    n->is_writing = false;
    if (n->is_closing || n->call == NULL)
        return;
    /* A server that refuses a body closes its side after it has answered: read that first. */
    if (status == 0)
        n->call->moved_us = clock_now_us();
}

static void init_parser(http_client_conn *n)
{
    if (parser_settings.on_body == NULL) {
        llhttp_settings_init(&parser_settings);
        parser_settings.on_status = count_header;
        parser_settings.on_header_field = count_header;
        parser_settings.on_header_value = count_header;
        parser_settings.on_headers_complete = on_headers_complete;
        parser_settings.on_body = on_body;
        parser_settings.on_message_complete = on_message_complete;
    }
    llhttp_init(&n->parser, HTTP_RESPONSE, &parser_settings);
    n->parser.data = n;
    n->n_header_bytes = 0;
    n->has_bytes = false;
    n->is_message_done = false;
}

static void send_request(http_client_conn *n)
{
    http_call *call = n->call;
    const http_target *t = &n->client->target;
    bool is_v6 = strchr(t->host, ':') != NULL;
    strbuf_reset(&n->head);
    strbuf_appendf(&n->head, "%s %s%s HTTP/1.1\r\nHost: %s%s%s", call->method, t->base_path,
                   call->path, is_v6 ? "[" : "", t->host, is_v6 ? "]" : "");
    if (t->uds[0] == '\0')
        strbuf_appendf(&n->head, ":%d", t->port);
    strbuf_append_str(&n->head, "\r\nUser-Agent: paged/" PGD_VERSION_STRING "\r\n");
    if (call->headers != NULL)
        strbuf_append_str(&n->head, call->headers);
    if (call->n_body_bytes > 0)
        strbuf_appendf(&n->head, "Content-Type: application/json\r\nContent-Length: %zu\r\n",
                       call->n_body_bytes);
    strbuf_append_str(&n->head, "\r\n");
    if (n->head.failed) {
        end_call(call, HTTP_CALL_NO_RESOURCE, "out of memory", false);
        return;
    }
    init_parser(n);
    uv_buf_t bufs[2] = {
        uv_buf_init(n->head.data, (unsigned)n->head.n_bytes),
        uv_buf_init((char *)(uintptr_t)call->body, (unsigned)call->n_body_bytes),
    };
    n->write.data = n;
    n->is_writing = true;
    int rc = uv_write(&n->write, &n->io.stream, bufs, call->n_body_bytes > 0 ? 2 : 1, on_written);
    if (rc != 0) {
        n->is_writing = false;
        lose_call(n, HTTP_CALL_CLOSED, uv_strerror(rc));
    }
}

static void on_connected(uv_connect_t *req, int status)
{
    http_client_conn *n = req->data;
    http_client *c = n->client;
    if (n->is_closing || n->call == NULL)
        return;
    http_call *call = n->call;
    if (status == 0)
        status = uv_read_start(&n->io.stream, on_alloc, on_read);
    if (status != 0) {
        /* localhost may be two addresses, of which the server has one. */
        if (!c->has_connected && n->address + 1 < c->n_addresses) {
            c->address = PGD_MAX(c->address, n->address + 1);
            detach(call, false);
            start_call(c, call);
        } else {
            end_call(call, HTTP_CALL_UNREACHED, uv_strerror(status), false);
        }
        return;
    }
    c->has_connected = true;
    c->n_connects++;
    call->moved_us = clock_now_us();
    if (c->target.uds[0] == '\0')
        uv_tcp_nodelay(&n->io.tcp, 1);
    send_request(n);
}

static void connect_call(http_client *c, http_call *call)
{
    http_client_conn *n = mem_calloc(1, sizeof(*n));
    bool is_pipe = c->target.uds[0] != '\0';
    int rc = UV_ENOMEM;
    if (n != NULL)
        rc = is_pipe ? uv_pipe_init(c->loop, &n->io.pipe, 0) : uv_tcp_init(c->loop, &n->io.tcp);
    if (rc != 0) {
        mem_free(n);
        end_call(call, HTTP_CALL_NO_RESOURCE, uv_strerror(rc), false);
        return;
    }
    c->n_conns++;
    n->client = c;
    n->io.stream.data = n;
    n->connect.data = n;
    n->address = c->address;
    strbuf_init(&n->head);
    list_append(&c->open, &n->node);
    n->call = call;
    call->conn = n;
    if (is_pipe) {
        uv_pipe_connect(&n->connect, &n->io.pipe, c->target.uds, on_connected);
        return;
    }
    rc = uv_tcp_connect(&n->connect, &n->io.tcp,
                        (const struct sockaddr *)(const void *)&c->addresses[n->address],
                        on_connected);
    if (rc != 0)
        end_call(call,
                 rc == UV_EMFILE || rc == UV_ENFILE ? HTTP_CALL_NO_RESOURCE : HTTP_CALL_UNREACHED,
                 uv_strerror(rc), false);
}

/* The call is in no list. */
static void start_call(http_client *c, http_call *call)
{
    call->moved_us = clock_now_us();
    call->conn = NULL;
    call->status = 0;
    list_append(&c->calls, &call->node);
    if (list_is_empty(&c->idle)) {
        connect_call(c, call);
        return;
    }
    http_client_conn *n = LIST_ENTRY(c->idle.next, http_client_conn, node);
    list_remove(&n->node);
    c->n_idle--;
    list_append(&c->open, &n->node);
    n->is_reused = true;
    n->call = call;
    call->conn = n;
    send_request(n);
}

/* --- client ----------------------------------------------------------------------------------- */

static void on_sweep(uv_timer_t *timer)
{
    http_client *c = timer->data;
    uint64_t now = clock_now_us();
    list_node late;
    /* on_end may cancel or start calls: collect first. */
    list_init(&late);
    for (list_node *at = c->calls.next, *next; at != &c->calls; at = next) {
        http_call *call = LIST_ENTRY(at, http_call, node);
        next = at->next;
        if (now - PGD_MIN(now, call->moved_us) >= c->timeout_us) {
            list_remove(at);
            list_append(&late, at);
        }
    }
    while (!list_is_empty(&late)) {
        http_call *call = LIST_ENTRY(late.next, http_call, node);
        end_call(call, HTTP_CALL_TIMEOUT, "no progress within the time-out", false);
    }
}

static pgd_err resolve(http_client *c, pgd_why *why)
{
    char port[8];
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL;
    snprintf(port, sizeof(port), "%d", c->target.port);
    int rc = getaddrinfo(c->target.host, port, &hints, &list);
    if (rc != 0)
        return pgd_fail(why, PGD_EIO, "cannot resolve %s: %s", c->target.host, gai_strerror(rc));
    for (struct addrinfo *a = list; a != NULL && c->n_addresses < MAX_ADDRESSES; a = a->ai_next) {
        if (a->ai_addrlen <= sizeof(c->addresses[0]))
            memcpy(&c->addresses[c->n_addresses++], a->ai_addr, a->ai_addrlen);
    }
    freeaddrinfo(list);
    if (c->n_addresses == 0)
        return pgd_fail(why, PGD_EIO, "cannot resolve %s: no address", c->target.host);
    return PGD_OK;
}

pgd_err http_client_create(http_client **out, uv_loop_t *loop, const http_target *target,
                           uint64_t timeout_us, pgd_why *why)
{
    http_client *c = mem_calloc(1, sizeof(*c));
    if (c == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    c->loop = loop;
    c->target = *target;
    c->timeout_us = timeout_us;
    list_init(&c->open);
    list_init(&c->idle);
    list_init(&c->calls);
    pgd_err err = target->uds[0] != '\0' ? PGD_OK : resolve(c, why);
    if (err == PGD_OK && uv_timer_init(loop, &c->sweep) != 0)
        err = pgd_fail(why, PGD_EIO, "cannot make a timer");
    if (err != PGD_OK) {
        mem_free(c);
        return err;
    }
    c->sweep.data = c;
    if (timeout_us > 0) {
        /* A tenth of the time-out is all the precision it needs. */
        uint64_t every_ms = PGD_MAX(PGD_MIN(timeout_us / 10000, 1000u), 1u);
        uv_timer_start(&c->sweep, on_sweep, every_ms, every_ms);
        uv_unref((uv_handle_t *)&c->sweep);
    }
    *out = c;
    return PGD_OK;
}

static void on_sweep_closed(uv_handle_t *handle)
{
    http_client *c = handle->data;
    c->is_sweep_closed = true;
}

void http_client_destroy(http_client *c)
{
    if (c == NULL)
        return;
    c->is_closing = true;
    while (!list_is_empty(&c->calls))
        http_client_cancel(LIST_ENTRY(c->calls.next, http_call, node));
    while (!list_is_empty(&c->idle))
        close_conn(LIST_ENTRY(c->idle.next, http_client_conn, node));
    uv_close((uv_handle_t *)&c->sweep, on_sweep_closed);
    while (c->n_conns > 0 || !c->is_sweep_closed)
        uv_run(c->loop, UV_RUN_ONCE);
    mem_free(c);
}

void http_client_start(http_client *c, http_call *call)
{
    PGD_ASSERT(!c->is_closing);
    call->is_second_try = false;
    start_call(c, call);
}

void http_client_cancel(http_call *call)
{
    if (list_is_linked(&call->node))
        detach(call, false);
}

uint64_t http_client_n_connects(const http_client *c)
{
    return c->n_connects;
}

/* --- one answer ------------------------------------------------------------------------------- */

typedef struct fetch {
    http_call call;
    strbuf *body;
    size_t max_body_bytes;
    bool is_too_large;
    bool is_over;
    http_call_end end;
    char detail[160];
} fetch;

static void on_fetch_body(http_call *call, const char *data, size_t n_bytes)
{
    fetch *f = call->arg;
    if (n_bytes > f->max_body_bytes - f->body->n_bytes) {
        f->is_too_large = true;
        f->is_over = true;
        http_client_cancel(call);
        return;
    }
    strbuf_append(f->body, data, n_bytes);
}

static void on_fetch_end(http_call *call, http_call_end end, const char *detail)
{
    fetch *f = call->arg;
    f->is_over = true;
    f->end = end;
    snprintf(f->detail, sizeof(f->detail), "%s", detail);
}

pgd_err http_fetch(http_client *c, const char *method, const char *path, const char *headers,
                   strbuf *body, size_t max_body_bytes, int *status, pgd_why *why)
{
    static const struct {
        pgd_err err;
        const char *text;
    } ends[] = {
        [HTTP_CALL_DONE] = {PGD_OK, ""},
        [HTTP_CALL_UNREACHED] = {PGD_EIO, "cannot connect"},
        [HTTP_CALL_CLOSED] = {PGD_ECLOSED, "the server closed the connection"},
        [HTTP_CALL_MALFORMED] = {PGD_EPROTO, "expected an HTTP answer"},
        [HTTP_CALL_TIMEOUT] = {PGD_ETIMEDOUT, "no answer"},
        [HTTP_CALL_NO_RESOURCE] = {PGD_ENOMEM, "no connection could be made"},
    };
    PGD_ASSERT(body->n_bytes <= max_body_bytes);
    fetch f = {
        .call = {.method = method,
                 .path = path,
                 .headers = headers,
                 .on_body = on_fetch_body,
                 .on_end = on_fetch_end},
        .body = body,
        .max_body_bytes = max_body_bytes,
    };
    f.call.arg = &f;
    *status = 0;
    uint64_t start_us = clock_now_us();
    http_client_start(c, &f.call);
    while (!f.is_over) {
        uv_run(c->loop, UV_RUN_ONCE); /* the sweep ends it now and then */
        if (!f.is_over && c->timeout_us > 0 &&
            clock_now_us() - start_us >= FETCH_TIMEOUTS * c->timeout_us) {
            http_client_cancel(&f.call);
            on_fetch_end(&f.call, HTTP_CALL_TIMEOUT, "it comes too slowly, or never ends");
        }
    }
    *status = f.call.status;
    if (f.is_too_large)
        return pgd_fail(why, PGD_ERANGE, "%s: expected at most %zu bytes, got more", path,
                        max_body_bytes);
    if (body->failed)
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    if (f.end != HTTP_CALL_DONE)
        return pgd_fail(why, ends[f.end].err, "%s: %s", ends[f.end].text, f.detail);
    return PGD_OK;
}
