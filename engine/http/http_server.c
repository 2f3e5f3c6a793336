/* The listener and its connections. Bound early, so that a busy port is told before a model is
 * loaded (and nothing is loaded twice by mistake). Over max_connections a client gets a short 503
 * and is closed; over MAX_REFUSED of those at once it is closed without a word. */
#include "engine/http/http_server.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/list.h"
#include "common/log.h"
#include "common/mem.h"

#define LISTEN_BACKLOG 511
#define SWEEP_MS       1000
#define MAX_REFUSED    32

struct http_server {
    http_conn_host host;
    http_handler_fn handler;
    void *handler_arg;
    union {
        uv_stream_t stream;
        uv_tcp_t tcp;
        uv_pipe_t pipe;
    } listener;
    uv_timer_t sweep;
    bool is_pipe;
    bool listener_open;
    bool accept_waits; /* a client that there was no memory for */
    int n_open_handles;
    list_node conns;
    size_t n_body_bytes;
    int32_t n_conns;
    log_limit refusals;
    char address[320];
    void (*on_closed)(void *arg);
    void *on_closed_arg;
};

static void on_conn_request(void *arg, http_conn *conn, const http_request *req)
{
    http_server *s = arg;
    s->handler(s->handler_arg, conn, req);
}

static void check_all_closed(http_server *s)
{
    if (s->n_open_handles == 0 && s->n_conns == 0 && s->on_closed != NULL) {
        void (*fn)(void *) = s->on_closed;
        s->on_closed = NULL;
        fn(s->on_closed_arg);
    }
}

static void on_conn_closed(void *arg, http_conn *conn)
{
    http_server *s = arg;
    list_remove(http_conn_node(conn));
    s->n_conns--;
    check_all_closed(s);
}

static void on_connection(uv_stream_t *listener, int status)
{
    http_server *s = listener->data;
    http_conn *conn;
    if (status != 0) {
        uint64_t n;
        if (log_limit_pass(&s->refusals, 5000000, &n))
            log_warn("http", "accept failed: %s (%llu more since the last line)",
                     uv_strerror(status), (unsigned long long)n);
        return;
    }
    if (http_conn_accept(&conn, listener, s->is_pipe, &s->host) != PGD_OK) {
        /* libuv listens no more until this one is accepted: the sweep tries again. */
        s->accept_waits = true;
        log_warn("http", "out of memory for a connection");
        return;
    }
    list_append(&s->conns, http_conn_node(conn));
    int64_t n_over = ++s->n_conns - s->host.cfg->max_connections;
    if (n_over > 0) {
        uint64_t n;
        if (log_limit_pass(&s->refusals, 5000000, &n))
            log_warn(
                "http",
                "over max_connections=%lld: connection refused (%llu more since the last line)",
                (long long)s->host.cfg->max_connections, (unsigned long long)n);
        if (n_over <= MAX_REFUSED)
            http_conn_refuse(conn);
        else
            http_conn_close(conn);
    }
}

static void on_sweep(uv_timer_t *timer)
{
    http_server *s = timer->data;
    uint64_t now = clock_now_us();
    if (s->accept_waits && s->listener_open) {
        s->accept_waits = false;
        on_connection(&s->listener.stream, 0);
    }
    for (list_node *n = s->conns.next; n != &s->conns;) {
        list_node *next = n->next; /* closing is asynchronous: n stays linked */
        http_conn_check_time(http_conn_from_node(n), now);
        n = next;
    }
}

/* A socket file that nobody listens on is left over from a killed daemon; anything else is not ours
 * to take. */
static pgd_err remove_stale_socket(const char *path, pgd_why *why)
{
    struct stat st;
    if (lstat(path, &st) != 0)
        return PGD_OK;
    if (!S_ISSOCK(st.st_mode))
        return pgd_fail(why, PGD_EEXIST, "uds: %s exists and is not a socket", path);
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool is_stale = fd >= 0 && connect(fd, (struct sockaddr *)&addr, sizeof(addr)) != 0 &&
                    errno == ECONNREFUSED;
    if (fd >= 0)
        close(fd);
    if (!is_stale)
        return pgd_fail(why, PGD_EBUSY,
                        "uds: another process listens on %s; stop it or choose another --uds",
                        path);
    unlink(path);
    return PGD_OK;
}

static pgd_err bind_pipe(http_server *s, const char *path, pgd_why *why)
{
    PGD_TRY(remove_stale_socket(path, why));
    uv_pipe_init(s->host.loop, &s->listener.pipe, 0);
    s->listener_open = true;
    s->n_open_handles++;
    int rc = uv_pipe_bind(&s->listener.pipe, path);
    if (rc == 0)
        rc = uv_listen(&s->listener.stream, LISTEN_BACKLOG, on_connection);
    if (rc != 0)
        return pgd_fail(why, PGD_EIO, "cannot listen on unix socket %s: %s", path, uv_strerror(rc));
    snprintf(s->address, sizeof(s->address), "unix:%s", path);
    return PGD_OK;
}

static pgd_err bind_tcp(http_server *s, const char *host, int port, pgd_why *why)
{
    union {
        struct sockaddr any;
        struct sockaddr_in in;
        struct sockaddr_in6 in6;
        struct sockaddr_storage storage;
    } addr;
    const char *name = strcmp(host, "localhost") == 0 ? "127.0.0.1" : host;
    if (uv_ip4_addr(name, port, &addr.in) != 0 && uv_ip6_addr(name, port, &addr.in6) != 0)
        return pgd_fail(why, PGD_EINVAL,
                        "host: expected an IPv4 or IPv6 address or localhost, got \"%s\"", host);
    uv_tcp_init(s->host.loop, &s->listener.tcp);
    s->listener_open = true;
    s->n_open_handles++;
    int rc = uv_tcp_bind(&s->listener.tcp, &addr.any, 0);
    /* libuv keeps EADDRINUSE for listen; listening here tells it now. Nothing is accepted before
     * the loop runs. */
    if (rc == 0)
        rc = uv_listen(&s->listener.stream, LISTEN_BACKLOG, on_connection);
    if (rc != 0)
        return pgd_fail(why, rc == UV_EADDRINUSE ? PGD_EBUSY : PGD_EIO,
                        "cannot listen on %s port %d: %s%s", host, port, uv_strerror(rc),
                        rc == UV_EADDRINUSE ? "; stop the other process or choose another --port"
                                            : "");
    int len = sizeof(addr);
    if (uv_tcp_getsockname(&s->listener.tcp, &addr.any, &len) == 0)
        port = ntohs(addr.any.sa_family == AF_INET6 ? addr.in6.sin6_port : addr.in.sin_port);
    snprintf(s->address, sizeof(s->address),
             strchr(name, ':') != NULL ? "http://[%s]:%d" : "http://%s:%d", name, port);
    return PGD_OK;
}

pgd_err http_server_create(http_server **out, uv_loop_t *loop, const config *cfg,
                           http_handler_fn handler, void *arg, pgd_why *why)
{
    http_server *s = mem_calloc(1, sizeof(*s));
    char *read_buf = mem_alloc(HTTP_CONN_READ_BYTES);
    if (s == NULL || read_buf == NULL) {
        mem_free(s);
        mem_free(read_buf);
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    }
    s->host = (http_conn_host){.cfg = cfg,
                               .loop = loop,
                               .read_buf = read_buf,
                               .n_body_bytes = &s->n_body_bytes,
                               .on_request = on_conn_request,
                               .on_closed = on_conn_closed,
                               .arg = s};
    s->handler = handler;
    s->handler_arg = arg;
    s->is_pipe = cfg->uds[0] != '\0';
    s->listener.stream.data = s;
    list_init(&s->conns);
    *out = s; /* on failure the caller closes and destroys, so that open handles leave through the
                 loop */
    pgd_err err =
        s->is_pipe ? bind_pipe(s, cfg->uds, why) : bind_tcp(s, cfg->host, (int)cfg->port, why);
    s->listener.stream.data = s;
    return err;
}

pgd_err http_server_start(http_server *s, pgd_why *why)
{
    int rc = uv_timer_init(s->host.loop, &s->sweep);
    if (rc != 0)
        return pgd_fail(why, PGD_EIO, "cannot start a timer: %s", uv_strerror(rc));
    s->sweep.data = s;
    s->n_open_handles++;
    uv_timer_start(&s->sweep, on_sweep, SWEEP_MS, SWEEP_MS);
    return PGD_OK;
}

const char *http_server_address(const http_server *s)
{
    return s->address;
}

static void on_handle_closed(uv_handle_t *handle)
{
    http_server *s = handle->data;
    s->n_open_handles--;
    check_all_closed(s);
}

void http_server_drain(http_server *s)
{
    s->host.draining = true;
    if (s->listener_open) {
        s->listener_open = false;
        uv_close((uv_handle_t *)&s->listener.stream, on_handle_closed); /* unlinks its file */
    }
    for (list_node *n = s->conns.next; n != &s->conns; n = n->next)
        http_conn_close_if_idle(http_conn_from_node(n));
}

void http_server_close(http_server *s, void (*on_closed)(void *arg), void *arg)
{
    s->on_closed = on_closed;
    s->on_closed_arg = arg;
    http_server_drain(s);
    for (list_node *n = s->conns.next; n != &s->conns; n = n->next)
        http_conn_close(http_conn_from_node(n));
    if (s->sweep.data != NULL && !uv_is_closing((uv_handle_t *)&s->sweep))
        uv_close((uv_handle_t *)&s->sweep, on_handle_closed);
    check_all_closed(s);
}

void http_server_destroy(http_server *s)
{
    if (s == NULL)
        return;
    PGD_ASSERT(s->n_conns == 0 && s->n_open_handles == 0);
    mem_free(s->host.read_buf);
    mem_free(s);
}

int32_t http_server_n_connections(const http_server *s)
{
    return s->n_conns;
}
