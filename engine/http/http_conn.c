/* A connection is in one of four phases: READING a request, ANSWERING it, LINGERING after the last
 * answer (our side is shut, what the client still sends is read and dropped, since closing with
 * unread input would reset the connection and lose the answer), or CLOSING. llhttp is paused at the
 * end of each message, so that pipelined bytes wait in `pending` until the answer is out; reading
 * goes on meanwhile, because only a read tells that the client has left. Everything a request needs
 * lives in buffers that the next request reuses.
 *
 * One file although long: each part of it moves the phase, or waits for another to do so.
 *
 * Rejected: one uv_timer per connection (a sweep once a second over the list costs less and has the
 * same precision that users can tell). */
#include "engine/http/http_conn.h"

#include <stdio.h>
#include <string.h>

#include <strings.h>
#include <sys/socket.h>

#include <llhttp.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/strbuf.h"
#include "engine/http/access_log.h"
#include "engine/http/http_cors.h"
#include "engine/http/http_errors.h"
#include "engine/http/pool_free.h"

#define MAX_PENDING_BYTES 262144 /* pipelined input that may wait */
#define MAX_KEPT_BYTES    65536  /* of a body buffer, for the next request */
#define MAX_COPIED_BYTES  65536  /* of a body that is given, to go out with its header */
#define LINGER_US         2000000u
#define NEW_US            1000000u /* a first request is on its way; later the client may never ask */

typedef enum conn_phase {
    PHASE_READING,
    PHASE_ANSWERING,
    PHASE_LINGERING,
    PHASE_CLOSING
} conn_phase;

struct http_conn {
    union {
        uv_stream_t stream;
        uv_tcp_t tcp;
        uv_pipe_t pipe;
    } io;
    list_node node;
    http_conn_host *host;
    llhttp_t parser;
    conn_phase phase;
    bool keep_alive;
    bool is_http10;
    bool streaming;
    bool is_head;
    bool message_done;
    bool is_last;      /* the answer is complete once its output is flushed */
    int refuse_status; /* answer with this once the parser has stopped */
    const char *refuse_code;
    const char *refuse_text;
    char id[HTTP_HEAD_ID_BYTES];
    strbuf answer_lines;     /* header lines of every answer to this request */
    int status;              /* of the answer that has begun; 0 = none */
    int64_t n_prompt_tokens; /* for the access log, -1 = no completion */
    int64_t n_output_tokens;
    uint64_t arrived_us;   /* first byte of the request */
    uint64_t since_us;     /* start of the current wait: idle, first byte of the request, or last
                          progress of the unsent output */
    uint64_t answer_bytes; /* of output given before this answer */
    uint64_t taken_bytes;  /* of output, when that was looked at last */
    uint64_t leave_by_us;  /* while draining: when it goes unless a request is here; 0 = no drain */
    bool has_bytes;        /* of the current request */
    bool is_reused;        /* this is not its first request */
    http_head head;
    strbuf body;
    size_t n_counted; /* of body, in the host's n_body_bytes */
    strbuf pending;
    http_output out;
    http_request request;
    void (*disconnect_fn)(void *arg);
    void *disconnect_arg;
    void (*deadline_fn)(void *arg);
    void *deadline_arg;
};

static void process_input(http_conn *c, const char *data, size_t n_bytes);
static void on_flushed(void *arg, int status);

/* --- parser callbacks ------------------------------------------------------------------------- */

static int refuse(http_conn *c, int status, const char *text)
{
    c->refuse_status = status;
    c->refuse_code = NULL;
    c->refuse_text = text;
    return HPE_USER;
}

static int refuse_key(http_conn *c)
{
    bool has_key = http_conn_header(c, "authorization") || http_conn_header(c, "x-api-key");
    (void)refuse(c, 401,
                 has_key ? "the API key is not known to this server"
                         : "this server wants an API key: send `Authorization: Bearer KEY`");
    c->refuse_code = "invalid_api_key";
    return HPE_USER;
}

static int check_head(http_conn *c, http_head_fault fault)
{
    return fault.status != 0 ? refuse(c, fault.status, fault.text) : 0;
}

static int on_url(llhttp_t *p, const char *at, size_t n)
{
    http_conn *c = p->data;
    return check_head(c, http_head_add_target(&c->head, at, n));
}

static int on_header_field(llhttp_t *p, const char *at, size_t n)
{
    http_conn *c = p->data;
    return check_head(c, http_head_add_name(&c->head, at, n));
}

static int on_header_value(llhttp_t *p, const char *at, size_t n)
{
    http_conn *c = p->data;
    return check_head(c, http_head_add_value(&c->head, at, n));
}

static void add_cors_lines(http_conn *c)
{
    http_cors_request cors = {
        .origin = http_conn_header(c, "origin"),
        .requested_method = http_conn_header(c, "access-control-request-method"),
        .requested_headers = http_conn_header(c, "access-control-request-headers"),
        .is_options = c->parser.method == HTTP_OPTIONS,
    };
    http_cors_append(&c->answer_lines, c->host->cfg->allowed_origins, &cors);
}

static int on_headers_complete(llhttp_t *p)
{
    http_conn *c = p->data;
    if (!http_head_end(&c->head))
        return refuse(c, 503, "out of memory");
    c->is_http10 = p->http_major == 1 && p->http_minor == 0;
    c->is_head = p->method == HTTP_HEAD;
    c->request = (http_request){
        .method = llhttp_method_name((llhttp_method_t)p->method),
        .path = c->head.path,
        .query = c->head.query,
        .is_head = c->is_head,
    };
    http_head_choose_id(c->id, &c->head, &c->host->next_id);
    add_cors_lines(c);
    if (p->http_major > 1)
        return refuse(c, 505, "only HTTP/1.1 and HTTP/1.0 are spoken here");
    if (!http_auth_allows(c->host->auth, c->request.method, c->request.path,
                          http_conn_header(c, "authorization"), http_conn_header(c, "x-api-key")))
        return refuse_key(c);
    /* An offer to change the protocol (curl --http2) may be ignored; llhttp would take what follows
     * for another protocol. */
    p->upgrade = 0;
    if ((p->flags & F_CONTENT_LENGTH) && p->content_length > (uint64_t)c->host->cfg->max_body_bytes)
        return refuse(c, 413, "the request body is larger than max_body_bytes");
    const char *expect = http_conn_header(c, "expect");
    if (expect != NULL) {
        if (strcasecmp(expect, "100-continue") != 0)
            return refuse(c, 417, "only Expect: 100-continue is understood");
        if (!c->is_http10) {
            strbuf_append_str(&c->out.bytes, "HTTP/1.1 100 Continue\r\n\r\n");
            http_output_commit(&c->out);
        }
    }
    return 0;
}

static int on_body(llhttp_t *p, const char *at, size_t n)
{
    http_conn *c = p->data;
    if (c->body.n_bytes + n > (size_t)c->host->cfg->max_body_bytes)
        return refuse(c, 413, "the request body is larger than max_body_bytes");
    if (*c->host->n_body_bytes + n > (size_t)c->host->cfg->max_body_bytes * HTTP_CONN_MAX_BODIES)
        return refuse(c, 503, "too many large requests at once; try again later");
    *c->host->n_body_bytes += n;
    c->n_counted += n;
    strbuf_append(&c->body, at, n);
    return c->body.failed ? refuse(c, 503, "out of memory") : 0;
}

static int on_message_complete(llhttp_t *p)
{
    http_conn *c = p->data;
    c->message_done = true;
    c->keep_alive = llhttp_should_keep_alive(p) != 0;
    return HPE_PAUSED;
}

static const llhttp_settings_t parser_settings = {
    .on_url = on_url,
    .on_header_field = on_header_field,
    .on_header_value = on_header_value,
    .on_headers_complete = on_headers_complete,
    .on_body = on_body,
    .on_message_complete = on_message_complete,
};

/* --- life ------------------------------------------------------------------------------------- */

/* A small buffer stays for the next request. */
static void drop_body(http_conn *c)
{
    *c->host->n_body_bytes -= c->n_counted;
    c->n_counted = 0;
    if (c->body.cap_bytes > MAX_KEPT_BYTES)
        strbuf_deinit(&c->body);
    else
        strbuf_reset(&c->body);
}

void http_conn_take_body(http_body *out, http_conn *c)
{
    *out = (http_body){c->body, c->n_counted, c->host->n_body_bytes};
    strbuf_init(&c->body);
    c->n_counted = 0;
}

void http_body_release(http_body *b)
{
    *b->n_total -= b->n_counted;
    b->n_counted = 0;
    strbuf_deinit(&b->bytes);
}

static void reset_request(http_conn *c)
{
    http_head_reset(&c->head);
    drop_body(c);
    c->message_done = false;
    c->is_last = false;
    c->streaming = false;
    c->has_bytes = false;
    c->refuse_status = 0;
    c->request = (http_request){0};
    c->is_head = false;
    c->id[0] = '\0';
    strbuf_reset(&c->answer_lines);
    c->status = 0;
    c->n_prompt_tokens = -1;
    c->n_output_tokens = -1;
    c->disconnect_fn = NULL;
    c->deadline_fn = NULL;
    c->since_us = clock_now_us();
}

static void on_closed(uv_handle_t *handle)
{
    http_conn *c = handle->data;
    drop_body(c);
    c->host->on_closed(c->host->arg, c);
    http_head_deinit(&c->head);
    strbuf_deinit(&c->answer_lines);
    strbuf_deinit(&c->body);
    strbuf_deinit(&c->pending);
    http_output_deinit(&c->out);
    mem_free(c);
}

/* Bytes of this answer that the kernel has taken. */
static uint64_t sent_bytes(const http_conn *c)
{
    uint64_t taken = http_output_taken_bytes(&c->out);
    return c->status != 0 && taken > c->answer_bytes ? taken - c->answer_bytes : 0;
}

/* The answer has ended: whole, or because the client left before it was out. */
static void tell_end(http_conn *c, bool left_early)
{
    access_entry entry = {
        .id = c->id[0] != '\0' ? c->id : "-",
        .method = c->request.method != NULL ? c->request.method : "-",
        .path = c->request.path != NULL ? c->request.path : "-",
        .status = c->status != 0 ? c->status : ACCESS_LOG_LEFT,
        .n_body_bytes = c->request.n_body_bytes,
        .n_bytes = sent_bytes(c),
        .duration_us = clock_now_us() - c->arrived_us,
        .n_prompt_tokens = c->n_prompt_tokens,
        .n_output_tokens = c->n_output_tokens,
        .left_early = left_early,
    };
    c->host->on_answered(c->host->arg, &entry);
    if (c->host->cfg->access_log)
        access_log_write(&entry);
}

void http_conn_close(http_conn *c)
{
    if (c->phase == PHASE_CLOSING)
        return;
    bool was_answering = c->phase == PHASE_ANSWERING;
    c->phase = PHASE_CLOSING;
    http_output_close(&c->out);
    uv_close((uv_handle_t *)&c->io.stream, on_closed);
    if (was_answering && c->disconnect_fn != NULL) {
        void (*fn)(void *) = c->disconnect_fn;
        c->disconnect_fn = NULL;
        fn(c->disconnect_arg);
    }
    if (was_answering)
        tell_end(c, true);
}

static bool has_unread_bytes(const http_conn *c)
{
    char byte;
    int fd;
    return uv_fileno((const uv_handle_t *)&c->io.stream, &fd) == 0 &&
           recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

void http_conn_drain(http_conn *c, uint64_t now_us, uint64_t leave_by_us)
{
    if (c->phase != PHASE_READING)
        return;
    bool is_new = !c->is_reused && now_us - c->since_us < NEW_US;
    if (c->leave_by_us != 0)
        c->leave_by_us = PGD_MIN(c->leave_by_us, leave_by_us);
    else if (is_new || c->has_bytes || has_unread_bytes(c))
        c->leave_by_us = leave_by_us;
    else
        http_conn_close(c);
    http_conn_check_time(c, now_us);
}

bool http_conn_is_busy(const http_conn *c)
{
    return c->phase == PHASE_ANSWERING || (c->phase == PHASE_READING && c->leave_by_us != 0);
}

/* A client that takes nothing of its answer would hold its connection for good. */
static void check_output(http_conn *c, uint64_t now_us)
{
    size_t unsent = http_output_unsent_bytes(&c->out);
    uint64_t taken = http_output_taken_bytes(&c->out);
    if (unsent == 0 || taken != c->taken_bytes)
        c->since_us = now_us;
    c->taken_bytes = taken;
    if (now_us - c->since_us < (uint64_t)c->host->cfg->idle_timeout_s * 1000000u)
        return;
    log_info("http", "client took nothing of its answer for %lld s: dropped with %zu unsent bytes",
             (long long)c->host->cfg->idle_timeout_s, unsent);
    c->host->counters.n_stalled_dropped++;
    http_conn_close(c);
}

static void check_deadline(http_conn *c, uint64_t now_us)
{
    uint64_t limit_us = (uint64_t)c->host->cfg->request_timeout_s * 1000000u;
    if (limit_us == 0 || c->deadline_fn == NULL || now_us - c->arrived_us < limit_us)
        return;
    void (*fn)(void *) = c->deadline_fn;
    c->deadline_fn = NULL;
    c->host->counters.n_request_timeouts++;
    fn(c->deadline_arg);
}

void http_conn_check_time(http_conn *c, uint64_t now_us)
{
    uint64_t waited_us = now_us - c->since_us;
    if (c->phase == PHASE_LINGERING && waited_us > LINGER_US)
        http_conn_close(c);
    if (c->phase == PHASE_ANSWERING)
        check_deadline(c, now_us);
    if (c->phase == PHASE_ANSWERING)
        check_output(c, now_us);
    if (c->phase != PHASE_READING)
        return;
    uint64_t limit_s =
        (uint64_t)(c->has_bytes ? c->host->cfg->header_timeout_s : c->host->cfg->idle_timeout_s);
    bool must_leave = c->leave_by_us != 0 && now_us >= c->leave_by_us;
    if (waited_us < limit_s * 1000000u && !must_leave)
        return;
    if (c->has_bytes) {
        c->phase = PHASE_ANSWERING;
        c->keep_alive = false;
    }
    if (c->has_bytes && must_leave) {
        http_error_respond(c, 503, NULL, "the server is shutting down");
    } else if (c->has_bytes) {
        c->host->counters.n_header_timeouts++;
        http_error_respond(c, 408, NULL,
                           "the request did not arrive within %llu s (header_timeout_s)",
                           (unsigned long long)limit_s);
    } else {
        http_conn_close(c);
    }
}

list_node *http_conn_node(http_conn *c)
{
    return &c->node;
}

http_conn *http_conn_from_node(list_node *node)
{
    return LIST_ENTRY(node, http_conn, node);
}

/* --- input ------------------------------------------------------------------------------------ */

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buf)
{
    http_conn *c = handle->data;
    (void)suggested;
    *buf = uv_buf_init(c->host->read_buf, HTTP_CONN_READ_BYTES);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    http_conn *c = stream->data;
    if (n == 0 || c->phase == PHASE_CLOSING || (n > 0 && c->phase == PHASE_LINGERING))
        return;
    if (n < 0) {
        http_conn_close(c);
        return;
    }
    if (c->phase == PHASE_ANSWERING) {
        if (c->pending.n_bytes + (size_t)n > MAX_PENDING_BYTES) {
            log_debug("http", "pipelined input over %d bytes; connection closed",
                      MAX_PENDING_BYTES);
            http_conn_close(c);
            return;
        }
        strbuf_append(&c->pending, buf->base, (size_t)n);
        if (c->pending.failed)
            http_conn_close(c);
        return;
    }
    process_input(c, buf->base, (size_t)n);
}

static void dispatch(http_conn *c)
{
    if (c->body.data == NULL)
        strbuf_append(&c->body, "", 0);
    c->request.body = c->body.data != NULL ? c->body.data : "";
    c->request.n_body_bytes = c->body.n_bytes;
    c->phase = PHASE_ANSWERING;
    c->host->on_request(c->host->arg, c, &c->request);
    /* The handler has taken what it needs; a large body is not kept through a long answer. */
    c->request.body = NULL;
    drop_body(c);
}

/* Feeds bytes until a message is complete; what is behind it goes to pending. */
static void process_input(http_conn *c, const char *data, size_t n_bytes)
{
    if (!c->has_bytes) {
        c->has_bytes = true;
        c->since_us = clock_now_us();
        c->arrived_us = c->since_us;
    }
    llhttp_errno_t rc = llhttp_execute(&c->parser, data, n_bytes);
    if (rc == HPE_OK || c->phase == PHASE_CLOSING)
        return;
    if (rc == HPE_PAUSED && c->message_done) {
        const char *end = llhttp_get_error_pos(&c->parser);
        llhttp_resume(&c->parser);
        size_t used = (size_t)(end - data);
        strbuf_append(&c->pending, data + used, n_bytes - used);
        c->keep_alive = c->keep_alive && !c->pending.failed;
        dispatch(c);
        return;
    }
    /* Malformed, refused, or an upgrade nobody serves: answer and close, the rest of the input has
     * no meaning. */
    c->phase = PHASE_ANSWERING;
    c->keep_alive = false;
    strbuf_reset(&c->pending);
    drop_body(c);
    if (c->refuse_status != 0)
        http_error_respond_code(c, c->refuse_status, NULL, c->refuse_code, c->refuse_text);
    else if (rc == HPE_INVALID_METHOD && http_head_is_method(data, n_bytes))
        http_error_respond_method(c, "Allow: GET, HEAD, POST, OPTIONS\r\n",
                                  "no path of this server knows this method");
    else
        http_error_respond(c, 400, NULL, "malformed HTTP request: %s",
                           llhttp_get_error_reason(&c->parser));
}

/* After an answer: take up pipelined bytes. Runs from the flush, never from inside a handler. */
static void next_request(http_conn *c)
{
    reset_request(c);
    c->is_reused = true;
    c->phase = PHASE_READING;
    if (c->pending.n_bytes > 0) {
        strbuf bytes = c->pending;
        strbuf_init(&c->pending);
        process_input(c, bytes.data, bytes.n_bytes);
        strbuf_deinit(&bytes);
    }
}

pgd_err http_conn_accept(http_conn **out, int fd, bool is_pipe, http_conn_host *host)
{
    http_conn *c = mem_calloc(1, sizeof(*c));
    if (c == NULL)
        return PGD_ENOMEM;
    int rc =
        is_pipe ? uv_pipe_init(host->loop, &c->io.pipe, 0) : uv_tcp_init(host->loop, &c->io.tcp);
    if (rc != 0) {
        mem_free(c);
        return PGD_EIO;
    }
    c->host = host;
    c->io.stream.data = c;
    http_head_init(&c->head, (size_t)host->cfg->max_header_bytes);
    strbuf_init(&c->answer_lines);
    strbuf_init(&c->body);
    strbuf_init(&c->pending);
    http_output_init(&c->out, host->outputs, &c->io.stream, on_flushed, c);
    llhttp_init(&c->parser, HTTP_REQUEST, &parser_settings);
    c->parser.data = c;
    reset_request(c);
    *out = c;
    rc = is_pipe ? uv_pipe_open(&c->io.pipe, fd) : uv_tcp_open(&c->io.tcp, fd);
    if (rc != 0)
        close(fd);
    if (rc != 0 || uv_read_start(&c->io.stream, on_alloc, on_read) != 0) {
        http_conn_close(c);
        return PGD_OK; /* on_closed tells */
    }
    if (!is_pipe)
        uv_tcp_nodelay(&c->io.tcp, 1);
    return PGD_OK;
}

void http_conn_refuse(http_conn *c)
{
    if (c->phase != PHASE_READING)
        return;
    c->phase = PHASE_ANSWERING;
    c->keep_alive = false;
    c->arrived_us = clock_now_us();
    http_error_respond(c, 503, NULL, "too many connections (max_connections); try again later");
}

const char *http_conn_header(const http_conn *c, const char *name)
{
    return http_head_get(&c->head, name);
}

void http_conn_on_disconnect(http_conn *c, void (*fn)(void *arg), void *arg)
{
    c->disconnect_fn = fn;
    c->disconnect_arg = arg;
}

void http_conn_on_deadline(http_conn *c, void (*fn)(void *arg), void *arg)
{
    c->deadline_fn = fn;
    c->deadline_arg = arg;
}

const char *http_conn_request_id(const http_conn *c)
{
    return c->id;
}

void http_conn_note_tokens(http_conn *c, int64_t n_prompt_tokens, int64_t n_output_tokens)
{
    c->n_prompt_tokens = n_prompt_tokens;
    c->n_output_tokens = n_output_tokens;
}

/* --- output ----------------------------------------------------------------------------------- */

static void on_shut(uv_shutdown_t *req, int status)
{
    (void)status;
    mem_free(req);
}

static void linger(http_conn *c)
{
    uv_shutdown_t *req = mem_alloc(sizeof(*req));
    c->phase = PHASE_LINGERING;
    c->since_us = clock_now_us();
    if (req == NULL || uv_shutdown(req, &c->io.stream, on_shut) != 0) {
        mem_free(req);
        http_conn_close(c);
    }
}

static void on_flushed(void *arg, int status)
{
    http_conn *c = arg;
    if (status != 0) {
        http_conn_close(c);
    } else if (c->is_last) {
        tell_end(c, false);
        if (c->keep_alive && !c->host->draining)
            next_request(c);
        else
            linger(c);
    }
}

/* The answer is complete as far as the answerer is concerned. */
static void end_answer(http_conn *c)
{
    c->is_last = true;
    c->disconnect_fn = c->deadline_fn = NULL;
    http_output_commit(&c->out);
}

static void append_head(strbuf *b, http_conn *c, int status, const char *content_type,
                        const char *extra)
{
    if (c->id[0] == '\0')
        http_head_choose_id(c->id, &c->head,
                            &c->host->next_id); /* refused before its header was complete */
    c->status = status;
    c->answer_bytes = http_output_given_bytes(&c->out);
    strbuf_appendf(b, "HTTP/1.1 %d %s\r\nX-Request-Id: %s\r\n", status, http_status_text(status),
                   c->id);
    if (c->answer_lines.n_bytes > 0)
        strbuf_append(b, c->answer_lines.data, c->answer_lines.n_bytes);
    b->failed = b->failed || c->answer_lines.failed;
    if (content_type != NULL)
        strbuf_appendf(b, "Content-Type: %s\r\n", content_type);
    if (extra != NULL)
        strbuf_append_str(b, extra);
    if (!c->keep_alive || c->host->draining)
        strbuf_append_str(b, "Connection: close\r\n");
    else if (c->is_http10)
        strbuf_append_str(b, "Connection: keep-alive\r\n");
}

static void append_whole_head(strbuf *b, http_conn *c, int status, const char *content_type,
                              const char *extra, size_t n_bytes)
{
    append_head(b, c, status, content_type, extra);
    if (status != 204)
        strbuf_appendf(b, "Content-Length: %zu\r\n", n_bytes);
    strbuf_append_str(b, "\r\n");
}

void http_conn_respond(http_conn *c, int status, const char *content_type, const char *extra,
                       const void *body, size_t n_bytes)
{
    PGD_ASSERT(c->phase != PHASE_READING && !c->streaming);
    if (c->phase == PHASE_CLOSING)
        return;
    append_whole_head(&c->out.bytes, c, status, content_type, extra, n_bytes);
    if (!c->is_head && n_bytes > 0)
        strbuf_append(&c->out.bytes, body, n_bytes);
    end_answer(c);
}

void http_conn_respond_given(http_conn *c, int status, const char *content_type, strbuf *body)
{
    PGD_ASSERT(c->phase != PHASE_READING && !c->streaming);
    if (c->phase == PHASE_CLOSING || c->is_head || body->n_bytes <= MAX_COPIED_BYTES) {
        http_conn_respond(c, status, content_type, NULL, body->data, body->n_bytes);
        pool_free_strbuf(c->host->loop, body);
        return;
    }
    append_whole_head(&c->out.bytes, c, status, content_type, NULL, body->n_bytes);
    http_output_give(&c->out, body);
    end_answer(c);
}

void http_conn_stream_begin(http_conn *c, int status, const char *content_type, const char *extra)
{
    PGD_ASSERT(c->phase != PHASE_READING && !c->streaming);
    c->streaming = true;
    if (c->is_http10)
        c->keep_alive = false; /* the end of the stream is the end of the connection */
    if (c->phase == PHASE_CLOSING)
        return;
    strbuf *b = &c->out.bytes;
    append_head(b, c, status, content_type, extra);
    strbuf_append_str(b, c->is_http10 ? "\r\n" : "Transfer-Encoding: chunked\r\n\r\n");
    http_output_commit(&c->out);
}

/* "%zx\r\n", at a tenth of its cost. */
static void append_chunk_head(strbuf *b, size_t n_bytes)
{
    char text[2 * sizeof(n_bytes) + 2];
    size_t at = sizeof(text);
    text[--at] = '\n';
    text[--at] = '\r';
    do
        text[--at] = "0123456789abcdef"[n_bytes % 16];
    while ((n_bytes /= 16) > 0);
    strbuf_append(b, text + at, sizeof(text) - at);
}

bool http_conn_stream_write(http_conn *c, const void *data, size_t n_bytes)
{
    PGD_ASSERT(c->streaming);
    if (c->phase == PHASE_CLOSING)
        return false;
    if (n_bytes == 0 || c->is_head)
        return true;
    size_t max_bytes = (size_t)c->host->cfg->max_output_buffer_bytes;
    if (http_output_unsent_bytes(&c->out) + n_bytes > max_bytes)
        http_output_flush(&c->out); /* much in one turn is no sign of a slow client yet */
    if (c->phase != PHASE_CLOSING && http_output_unsent_bytes(&c->out) + n_bytes > max_bytes) {
        log_info("http",
                 "client reads too slowly: dropped with %zu unsent bytes (max_output_buffer_bytes)",
                 http_output_unsent_bytes(&c->out));
        c->host->counters.n_slow_dropped++;
        http_conn_close(c);
    }
    if (c->phase == PHASE_CLOSING)
        return false;
    strbuf *b = &c->out.bytes;
    if (!c->is_http10)
        append_chunk_head(b, n_bytes);
    strbuf_append(b, data, n_bytes);
    if (!c->is_http10)
        strbuf_append(b, "\r\n", 2);
    http_output_commit(&c->out);
    return true;
}

void http_conn_stream_end(http_conn *c)
{
    PGD_ASSERT(c->streaming);
    c->streaming = false;
    if (!c->is_http10 && !c->is_head)
        strbuf_append_str(&c->out.bytes, "0\r\n\r\n");
    end_answer(c);
}

bool http_conn_is_streaming(const http_conn *c)
{
    return c->streaming;
}
