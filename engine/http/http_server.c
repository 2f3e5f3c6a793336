/* The listeners and their connections. Bound early, so that a busy port is told before a model is
 * loaded (and nothing is loaded twice by mistake). Over max_connections a client gets a short 503
 * and is closed; over MAX_REFUSED of those at once it is closed without a word.
 *
 * The sockets are polled and accepted from here. With uv_listen it is libuv that accepts, and where
 * there is no descriptor for a client, not even its reserve, libuv 1.44 tries again for ever inside
 * one turn of the loop: nobody is served until another process lets go. */
#include "engine/http/http_server.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/list.h"
#include "common/log.h"
#include "common/mem.h"
#include "engine/http/http_cors.h"

#define LISTEN_BACKLOG 4096 /* a burst of clients beyond it waits a second for its second try */
#define SWEEP_MS       1000
#define SWEEP_SOON_MS  100 /* with request_timeout: about as long as a step */
#define LATE_SWEEP_US  3000000u
#define ACCEPTS_A_TURN 64
#define MAX_REFUSED    32
#define MAX_LISTENERS  32
#define FIRST_FD       3 /* of those that systemd passes */

typedef union socket_address {
    struct sockaddr any;
    struct sockaddr_in in;
    struct sockaddr_in6 in6;
    struct sockaddr_un un;
    struct sockaddr_storage storage;
} socket_address;

typedef struct listener {
    union {
        uv_handle_t handle;
        uv_tcp_t tcp;
        uv_pipe_t pipe;
    } io;             /* owns fd */
    uv_poll_t poller; /* of fd */
    int fd;
    http_server *server;
    bool is_pipe;
    bool is_inherited;
    bool is_open;
    bool is_listening;
    bool is_paused; /* until the next sweep: there was no descriptor, or no memory, for a client */
} listener;

struct http_server {
    http_conn_host host;
    http_handler_fn handler;
    http_answered_fn answered;
    void *handler_arg;
    http_auth *auth;
    listener listeners[MAX_LISTENERS];
    int n_listeners;
    uv_timer_t sweep;
    uint64_t swept_us;
    bool is_reachable; /* from other machines */
    bool has_accepted_inherited;
    int n_open_handles;
    list_node conns;
    http_output_queue outputs;
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

static void on_conn_answered(void *arg, const access_entry *entry)
{
    http_server *s = arg;
    s->answered(s->handler_arg, entry);
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

static void take_connection(listener *l, int fd)
{
    http_server *s = l->server;
    http_conn *conn;
    if (http_conn_accept(&conn, fd, l->is_pipe, &s->host) != PGD_OK) {
        close(fd);
        log_warn("http", "out of memory for a connection");
        return;
    }
    list_append(&s->conns, http_conn_node(conn));
    s->host.counters.n_accepted++;
    int64_t n_over = ++s->n_conns - s->host.cfg->max_connections;
    if (n_over > 0) {
        s->host.counters.n_refused++;
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

static void pause_accepting(listener *l, int error)
{
    uint64_t n;
    uv_poll_stop(&l->poller);
    l->is_paused = true;
    if (log_limit_pass(&l->server->refusals, 5000000, &n))
        log_warn("http", "accept failed: %s (%llu more since the last line)", strerror(error),
                 (unsigned long long)n);
}

/* At most so many of those that wait. 0, or why there can be no more of them now. */
static int accept_waiting(listener *l, int n_most)
{
    for (int i = 0; i < n_most; i++) {
        int fd = accept4(l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0)
            take_connection(l, fd);
        else if (errno == EAGAIN)
            return 0;
        else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
            return errno;
        /* else: that client is gone, or the network does not let it through */
    }
    return 0;
}

static void on_acceptable(uv_poll_t *poller, int status, int events)
{
    listener *l = poller->data;
    (void)status;
    (void)events;
    int error = accept_waiting(l, ACCEPTS_A_TURN);
    if (error != 0)
        pause_accepting(l, error);
}

/* Of a bound socket, or to go on after a pause. */
static int start_accepting(listener *l)
{
    l->is_paused = false;
    if (!l->is_listening) {
        int rc = uv_fileno(&l->io.handle, &l->fd);
        if (rc == 0 && listen(l->fd, LISTEN_BACKLOG) != 0)
            rc = uv_translate_sys_error(errno);
        if (rc == 0)
            rc = uv_poll_init(l->server->host.loop, &l->poller, l->fd);
        if (rc != 0)
            return rc;
        l->poller.data = l;
        l->is_listening = true;
        l->server->n_open_handles++;
    }
    return uv_poll_start(&l->poller, UV_READABLE, on_acceptable);
}

static void on_sweep(uv_timer_t *timer)
{
    http_server *s = timer->data;
    uint64_t now = clock_now_us();
    /* A sweep that comes late (this process was stopped) finds clients that were given no chance:
     * they have until the next one. */
    bool is_late = s->swept_us != 0 && now - s->swept_us > LATE_SWEEP_US;
    s->swept_us = now;
    for (int i = 0; i < s->n_listeners; i++) {
        listener *l = &s->listeners[i];
        if (l->is_paused && l->is_open)
            (void)start_accepting(l);
    }
    for (list_node *n = s->conns.next; n != &s->conns && !is_late;) {
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

static listener *add_listener(http_server *s, bool is_pipe, bool is_inherited)
{
    listener *l = &s->listeners[s->n_listeners++];
    if (is_pipe)
        uv_pipe_init(s->host.loop, &l->io.pipe, 0);
    else
        uv_tcp_init(s->host.loop, &l->io.tcp);
    l->io.handle.data = l;
    l->server = s;
    l->is_pipe = is_pipe;
    l->is_inherited = is_inherited;
    l->is_open = true;
    s->n_open_handles++;
    return l;
}

static bool is_loopback(const socket_address *addr)
{
    if (addr->any.sa_family == AF_INET)
        return (ntohl(addr->in.sin_addr.s_addr) >> 24) == 127;
    return IN6_IS_ADDR_LOOPBACK(&addr->in6.sin6_addr);
}

/* Of a bound TCP socket. */
static void note_address(http_server *s, const socket_address *addr)
{
    char name[INET6_ADDRSTRLEN] = "?";
    bool is_ip6 = addr->any.sa_family == AF_INET6;
    int port = ntohs(is_ip6 ? addr->in6.sin6_port : addr->in.sin_port);
    if (is_ip6)
        uv_ip6_name(&addr->in6, name, sizeof(name));
    else
        uv_ip4_name(&addr->in, name, sizeof(name));
    s->is_reachable = s->is_reachable || !is_loopback(addr);
    if (s->address[0] == '\0')
        snprintf(s->address, sizeof(s->address), is_ip6 ? "http://[%s]:%d" : "http://%s:%d", name,
                 port);
}

static pgd_err bind_pipe(http_server *s, const char *path, pgd_why *why)
{
    PGD_TRY(remove_stale_socket(path, why));
    listener *l = add_listener(s, true, false);
    int rc = uv_pipe_bind(&l->io.pipe, path);
    if (rc == 0)
        rc = start_accepting(l);
    if (rc != 0)
        return pgd_fail(why, PGD_EIO, "cannot listen on unix socket %s: %s", path, uv_strerror(rc));
    snprintf(s->address, sizeof(s->address), "unix:%s", path);
    return PGD_OK;
}

static pgd_err bind_tcp(http_server *s, const char *host, int port, pgd_why *why)
{
    socket_address addr;
    const char *name = strcmp(host, "localhost") == 0 ? "127.0.0.1" : host;
    if (uv_ip4_addr(name, port, &addr.in) != 0 && uv_ip6_addr(name, port, &addr.in6) != 0)
        return pgd_fail(why, PGD_EINVAL,
                        "host: expected an IPv4 or IPv6 address or localhost, got \"%s\"", host);
    listener *l = add_listener(s, false, false);
    int rc = uv_tcp_bind(&l->io.tcp, &addr.any, 0);
    int len = sizeof(addr);
    if (rc == 0)
        rc = uv_tcp_getsockname(&l->io.tcp, &addr.any, &len); /* tells EADDRINUSE, too */
    /* Nothing is accepted before the loop runs. */
    if (rc == 0)
        rc = start_accepting(l);
    if (rc != 0)
        return pgd_fail(why, rc == UV_EADDRINUSE ? PGD_EBUSY : PGD_EIO,
                        "cannot listen on %s port %d: %s%s", host, port, uv_strerror(rc),
                        rc == UV_EADDRINUSE ? "; stop the other process or choose another --port"
                                            : "");
    note_address(s, &addr);
    return PGD_OK;
}

/* How many sockets systemd has passed to this very process: 0 without, -1 more than there is room
 * for. */
static int n_passed_sockets(void)
{
    const char *pid = getenv("LISTEN_PID");
    const char *n_fds = getenv("LISTEN_FDS");
    if (pid == NULL || n_fds == NULL || strtoll(pid, NULL, 10) != (long long)getpid())
        return 0;
    long long n = strtoll(n_fds, NULL, 10);
    return n < 0 || n > MAX_LISTENERS ? -1 : (int)n;
}

static pgd_err inherit(http_server *s, int fd, pgd_why *why)
{
    socket_address addr = {.any.sa_family = AF_UNSPEC};
    socklen_t addr_len = sizeof(addr);
    int type = 0;
    int is_listening = 0;
    socklen_t len = sizeof(int);
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) != 0 || type != SOCK_STREAM ||
        getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &len) != 0 || !is_listening ||
        getsockname(fd, &addr.any, &addr_len) != 0)
        return pgd_fail(why, PGD_EINVAL,
                        "LISTEN_FDS: expected a listening stream socket, got something else, at "
                        "descriptor %d (ListenStream= and Accept=no in the socket unit?)",
                        fd);
    int family = addr.any.sa_family;
    if (family != AF_UNIX && family != AF_INET && family != AF_INET6)
        return pgd_fail(why, PGD_EINVAL,
                        "LISTEN_FDS: expected an address of TCP or a unix socket, got family %d, "
                        "at descriptor %d",
                        family, fd);
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    listener *l = add_listener(s, family == AF_UNIX, true);
    int rc = l->is_pipe ? uv_pipe_open(&l->io.pipe, fd) : uv_tcp_open(&l->io.tcp, fd);
    if (rc != 0)
        return pgd_fail(why, PGD_EIO, "LISTEN_FDS: cannot use descriptor %d: %s", fd,
                        uv_strerror(rc));
    if (!l->is_pipe)
        note_address(s, &addr);
    else if (s->address[0] == '\0')
        snprintf(s->address, sizeof(s->address), "unix:%s",
                 addr.un.sun_path[0] != '\0' ? addr.un.sun_path : "(abstract)");
    return PGD_OK;
}

static pgd_err open_listeners(http_server *s, const config *cfg, pgd_why *why)
{
    int n_passed = n_passed_sockets();
    if (n_passed < 0)
        return pgd_fail(why, PGD_EINVAL, "LISTEN_FDS: expected 1 to %d sockets, got %s",
                        MAX_LISTENERS, getenv("LISTEN_FDS"));
    for (int i = 0; i < n_passed; i++)
        PGD_TRY(inherit(s, FIRST_FD + i, why));
    if (n_passed > 0) {
        log_info("http",
                 "listening on %d socket(s) of systemd, the first is %s; host, port and "
                 "uds are not used",
                 n_passed, s->address);
        return PGD_OK;
    }
    return cfg->uds[0] != '\0' ? bind_pipe(s, cfg->uds, why)
                               : bind_tcp(s, cfg->host, (int)cfg->port, why);
}

pgd_err http_server_create(http_server **out, uv_loop_t *loop, const config *cfg,
                           http_handler_fn handler, http_answered_fn answered, void *arg,
                           pgd_why *why)
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
                               .outputs = &s->outputs,
                               .n_body_bytes = &s->n_body_bytes,
                               .on_request = on_conn_request,
                               .on_closed = on_conn_closed,
                               .on_answered = on_conn_answered,
                               .arg = s};
    s->handler = handler;
    s->answered = answered;
    s->handler_arg = arg;
    list_init(&s->conns);
    http_output_queue_init(&s->outputs, loop, s);
    s->n_open_handles++;
    *out = s; /* on failure the caller closes and destroys, so that open handles leave through the
                 loop */
    PGD_TRY(http_auth_create(&s->auth));
    s->host.auth = s->auth;
    if (getrandom(&s->host.next_id, sizeof(s->host.next_id), 0) < 0)
        return pgd_fail(why, PGD_EIO, "no random numbers from the system");
    PGD_TRY(http_auth_load(s->auth, cfg->api_key_file, why));
    PGD_TRY(http_cors_check(cfg->allowed_origins, why));
    PGD_TRY(open_listeners(s, cfg, why));
    if (s->is_reachable && http_auth_n_keys(s->auth) == 0)
        log_warn("http",
                 "listening beyond loopback without API keys: whoever reaches %s can use this "
                 "server; set api_key_file, or host = 127.0.0.1",
                 s->address);
    return PGD_OK;
}

pgd_err http_server_start(http_server *s, pgd_why *why)
{
    int rc = uv_timer_init(s->host.loop, &s->sweep);
    if (rc != 0)
        return pgd_fail(why, PGD_EIO, "cannot start a timer: %s", uv_strerror(rc));
    s->sweep.data = s;
    s->n_open_handles++;
    uint64_t period_ms = s->host.cfg->request_timeout_s > 0 ? SWEEP_SOON_MS : SWEEP_MS;
    uv_timer_start(&s->sweep, on_sweep, period_ms, period_ms);
    return PGD_OK;
}

void http_server_accept_inherited(http_server *s)
{
    if (s->has_accepted_inherited || s->host.draining)
        return;
    s->has_accepted_inherited = true;
    for (int i = 0; i < s->n_listeners; i++) {
        listener *l = &s->listeners[i];
        int rc = l->is_inherited ? start_accepting(l) : 0;
        if (rc != 0)
            log_error("http", "cannot listen on descriptor %d of systemd: %s", FIRST_FD + i,
                      uv_strerror(rc));
    }
}

pgd_err http_server_load_keys(http_server *s, const config *cfg, int32_t *n_keys, pgd_why *why)
{
    pgd_err err = http_auth_load(s->auth, cfg->api_key_file, why);
    *n_keys = http_auth_n_keys(s->auth);
    return err;
}

const char *http_server_address(const http_server *s)
{
    return s->address;
}

static void on_own_closed(uv_handle_t *handle)
{
    http_server *s = handle->data;
    s->n_open_handles--;
    check_all_closed(s);
}

static void on_listener_closed(uv_handle_t *handle)
{
    listener *l = handle->data;
    l->server->n_open_handles--;
    check_all_closed(l->server);
}

static void close_listener(listener *l)
{
    if (!l->is_open)
        return;
    l->is_open = false;
    if (l->is_listening) {
        uv_close((uv_handle_t *)&l->poller, on_listener_closed);
        /* Whoever waits when the socket closes is reset. One of systemd stays open there, and who
         * waits there is for the next daemon. */
        if (!l->is_inherited)
            (void)accept_waiting(l, LISTEN_BACKLOG);
    }
    uv_close(&l->io.handle, on_listener_closed); /* a unix socket bound here loses its file */
}

void http_server_drain(http_server *s, uint64_t grace_us)
{
    s->host.draining = true;
    for (int i = 0; i < s->n_listeners; i++)
        close_listener(&s->listeners[i]);
    uint64_t now = clock_now_us(); /* not before the last of them has come */
    for (list_node *n = s->conns.next; n != &s->conns; n = n->next)
        http_conn_drain(http_conn_from_node(n), now, now + grace_us);
    if (s->sweep.data != NULL && !uv_is_closing((uv_handle_t *)&s->sweep))
        uv_timer_start(&s->sweep, on_sweep, SWEEP_SOON_MS, SWEEP_SOON_MS);
}

void http_server_close(http_server *s, void (*on_closed)(void *arg), void *arg)
{
    s->on_closed = on_closed;
    s->on_closed_arg = arg;
    http_server_drain(s, 0);
    http_output_queue_flush(&s->outputs); /* answers made in this turn */
    for (list_node *n = s->conns.next; n != &s->conns; n = n->next)
        http_conn_close(http_conn_from_node(n));
    http_output_queue_close(&s->outputs, on_own_closed);
    if (s->sweep.data != NULL && !uv_is_closing((uv_handle_t *)&s->sweep))
        uv_close((uv_handle_t *)&s->sweep, on_own_closed);
    check_all_closed(s);
}

void http_server_destroy(http_server *s)
{
    if (s == NULL)
        return;
    PGD_ASSERT(s->n_conns == 0 && s->n_open_handles == 0);
    http_auth_destroy(s->auth);
    mem_free(s->host.read_buf);
    mem_free(s);
}

const http_counters *http_server_get_counters(const http_server *s)
{
    return &s->host.counters;
}

int32_t http_server_n_keys(const http_server *s)
{
    return http_auth_n_keys(s->auth);
}

bool http_server_is_busy(const http_server *s)
{
    for (const list_node *n = s->conns.next; n != &s->conns; n = n->next) {
        if (http_conn_is_busy(http_conn_from_node((list_node *)n)))
            return true;
    }
    return false;
}

int32_t http_server_n_connections(const http_server *s)
{
    return s->n_conns;
}
