/* pair0. The next step's frame waits in NNG's receive queue while the current one computes, so
 * taking it costs no round trip.
 *
 * A listener of NNG cannot be closed without its connections, so a link that listens keeps its
 * listener: over tcp further engines are accepted and closed at once, over ipc the path goes away.
 */
#include "worker/engine_link.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <nng/nng.h>
#include <nng/protocol/pair0/pair.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/thread.h"
#include "proto/attach.h"

#define QUEUE_FRAMES   16
#define CLOSE_WAIT_S   2
#define LOST_PERIOD_MS 50

/* What NNG lets in, which must be right when the connection is made: up to 1.5 a limit can be raised
 * later, so a listener takes no more than what strangers may send; later releases keep the first one.
 * The exact limit is held by describe_last. A link that dials knows whom it dials. */
#if NNG_MAJOR_VERSION == 1 && NNG_MINOR_VERSION <= 5
#    define LISTEN_NNG_BYTES(max_recv_bytes) (max_recv_bytes)
#    define MAX_ADOPTED_BYTES                ((size_t)INT32_MAX)
#else
#    define LISTEN_NNG_BYTES(max_recv_bytes) MAX_ADOPTED_BYTES
#    define MAX_ADOPTED_BYTES                ((size_t)1 << 30)
#endif
#define DIAL_NNG_BYTES ((size_t)INT32_MAX)

struct engine_link {
    nng_socket sock;
    bool sock_is_open;
    const char *ipc_path; /* of a link that listens; in url */
    bool is_listening;
    bool is_adopted;
    uint32_t worker_epoch;
    size_t max_recv_bytes;
    atomic_int pipe_id; /* of the one connection; 0 before it */
    int up_fd;
    int lost_fd;
    nng_msg *last;
    char url[300];
};

static void on_pipe(nng_pipe pipe, nng_pipe_ev ev, void *arg)
{
    engine_link *l = arg;
    int none = 0;
    int id = nng_pipe_id(pipe);
    uint64_t one = 1;
    if (ev == NNG_PIPE_EV_ADD_PRE && !atomic_compare_exchange_strong(&l->pipe_id, &none, id))
        (void)nng_pipe_close(pipe);
    if (ev == NNG_PIPE_EV_ADD_PRE || id != atomic_load(&l->pipe_id))
        return;
    ssize_t n = write(ev == NNG_PIPE_EV_ADD_POST ? l->up_fd : l->lost_fd, &one, sizeof one);
    (void)n; /* an eventfd of count 0 takes it */
}

static int watch_pipes(engine_link *l, nng_pipe_cb fn)
{
    int rv = nng_pipe_notify(l->sock, NNG_PIPE_EV_ADD_PRE, fn, l);
    if (rv == 0)
        rv = nng_pipe_notify(l->sock, NNG_PIPE_EV_ADD_POST, fn, l);
    return rv != 0 ? rv : nng_pipe_notify(l->sock, NNG_PIPE_EV_REM_POST, fn, l);
}

/* --- open ------------------------------------------------------------------------------------- */

static pgd_err open_socket(engine_link **out, const char *url, size_t max_recv_bytes,
                           size_t nng_bytes, pgd_why *why)
{
    engine_link *l = mem_calloc(1, sizeof *l);
    if (l == NULL)
        return pgd_fail(why, PGD_ENOMEM, "engine link: out of memory");
    *out = l;
    l->max_recv_bytes = max_recv_bytes;
    snprintf(l->url, sizeof l->url, "%s", url);
    l->lost_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    l->up_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (l->lost_fd < 0 || l->up_fd < 0)
        return pgd_fail(why, PGD_EIO, "engine link: no eventfd");
    int rv = nng_pair0_open(&l->sock);
    if (rv != 0)
        return pgd_fail(why, PGD_EIO, "engine link: open: %s", nng_strerror(rv));
    l->sock_is_open = true;
    if ((rv = nng_socket_set_int(l->sock, NNG_OPT_SENDBUF, QUEUE_FRAMES)) != 0 ||
        (rv = nng_socket_set_int(l->sock, NNG_OPT_RECVBUF, QUEUE_FRAMES)) != 0 ||
        (rv = nng_socket_set_size(l->sock, NNG_OPT_RECVMAXSZ, nng_bytes)) != 0 ||
        (rv = watch_pipes(l, on_pipe)) != 0)
        return pgd_fail(why, PGD_EIO, "engine link: set options: %s", nng_strerror(rv));
    return PGD_OK;
}

static pgd_err dial(engine_link *l, pgd_why *why)
{
    int rv = nng_dial(l->sock, l->url, NULL, 0);
    if (rv != 0)
        return pgd_fail(why, PGD_EIO, "engine link: cannot reach the engine at %s: %s", l->url,
                        nng_strerror(rv));
    return PGD_OK;
}

static pgd_err listen_at(engine_link *l, pgd_why *why)
{
    const char *path = attach_ipc_path(l->url);
    if (path != NULL)
        PGD_TRY(attach_check_ipc_place(path, why));
    int rv = nng_listen(l->sock, l->url, NULL, 0);
    if (rv != 0)
        return pgd_fail(why, PGD_EIO, "cannot listen at %s: %s%s", l->url, nng_strerror(rv),
                        rv == NNG_EADDRINUSE ? "; another worker is there" : "");
    l->ipc_path = path;
    l->is_listening = true;
    return PGD_OK;
}

static pgd_err finish_open(engine_link **out, engine_link *l, pgd_err err)
{
    *out = err == PGD_OK ? l : NULL;
    if (err != PGD_OK)
        engine_link_close(l);
    return err;
}

pgd_err engine_link_dial(engine_link **out, const char *url, size_t max_recv_bytes, pgd_why *why)
{
    engine_link *l = NULL;
    pgd_err err = open_socket(&l, url, max_recv_bytes, DIAL_NNG_BYTES, why);
    return finish_open(out, l, err == PGD_OK ? dial(l, why) : err);
}

pgd_err engine_link_listen(engine_link **out, const char *url, size_t max_recv_bytes, pgd_why *why)
{
    engine_link *l = NULL;
    pgd_err err = open_socket(&l, url, max_recv_bytes, LISTEN_NNG_BYTES(max_recv_bytes), why);
    return finish_open(out, l, err == PGD_OK ? listen_at(l, why) : err);
}

bool engine_link_wait(engine_link *l, int timeout_ms)
{
    uint64_t end_us = clock_now_us() + (uint64_t)timeout_ms * 1000;
    int n;
    /* One that goes away while it connects is only lost, never up. */
    struct pollfd p[2] = {{.fd = l->up_fd, .events = POLLIN}, {.fd = l->lost_fd, .events = POLLIN}};
    do
        n = poll(p, PGD_ARRAY_LEN(p), timeout_ms);
    while (n < 0 && errno == EINTR && clock_now_us() < end_us);
    return n > 0;
}

pgd_err engine_link_adopt(engine_link *l, uint32_t worker_epoch, size_t max_recv_bytes)
{
    if (l->is_listening) {
        if (max_recv_bytes > MAX_ADOPTED_BYTES)
            return PGD_ERANGE;
        if (nng_socket_set_size(l->sock, NNG_OPT_RECVMAXSZ, LISTEN_NNG_BYTES(max_recv_bytes)) != 0)
            return PGD_EIO;
    }
    l->max_recv_bytes = max_recv_bytes;
    l->worker_epoch = worker_epoch;
    l->is_adopted = true;
    if (l->ipc_path != NULL)
        (void)unlink(l->ipc_path);
    return PGD_OK;
}

/* --- close ------------------------------------------------------------------------------------ */

static void close_socket(void *arg)
{
    (void)nng_close(*(nng_socket *)arg);
}

/* nng_close of NNG 1.5.2 now and then never returns when frames arrive at the same time: its reaper
 * waits for an operation that is never completed. Past the limit the socket is left behind. */
static void close_bounded(nng_socket sock)
{
    if (!thread_run_bounded("link-close", close_socket, &sock, sizeof sock, CLOSE_WAIT_S))
        log_warn("link", "NNG did not close a socket within %d s; it is left behind", CLOSE_WAIT_S);
}

void engine_link_close(engine_link *l)
{
    if (l == NULL)
        return;
    if (l->sock_is_open)
        (void)watch_pipes(l, NULL); /* their argument goes away now */
    if (l->last != NULL)
        nng_msg_free(l->last);
    if (l->sock_is_open && (l->ipc_path == NULL || !l->is_adopted))
        close_bounded(l->sock);
    if (l->lost_fd >= 0)
        close(l->lost_fd);
    if (l->up_fd >= 0)
        close(l->up_fd);
    mem_free(l);
}

/* --- frames ----------------------------------------------------------------------------------- */

pgd_err engine_link_send(engine_link *l, wire_type type, const wire_record *rec, const void *msg,
                         bool wait)
{
    nng_msg *m;
    size_t n_bytes = wire_frame_bytes(rec, msg);
    if (nng_msg_alloc(&m, n_bytes) != 0)
        return PGD_ENOMEM;
    wire_encode(nng_msg_body(m), n_bytes, type, l->worker_epoch, rec, msg);
    int rv = nng_sendmsg(l->sock, m, wait ? 0 : NNG_FLAG_NONBLOCK);
    if (rv == 0)
        return PGD_OK;
    nng_msg_free(m);
    return rv == NNG_EAGAIN ? PGD_EAGAIN : PGD_ECLOSED;
}

/* The next frame of any epoch into last, or an NNG error. */
static int receive(engine_link *l)
{
    if (l->last != NULL)
        nng_msg_free(l->last);
    l->last = NULL;
    return nng_recvmsg(l->sock, &l->last, 0);
}

static pgd_err describe_last(const engine_link *l, engine_frame *out, pgd_why *why)
{
    wire_header h;
    out->data = nng_msg_body(l->last);
    out->n_bytes = nng_msg_len(l->last);
    if (out->n_bytes > l->max_recv_bytes)
        return pgd_fail(why, PGD_EPROTO, "expected a frame of at most %zu bytes, got %zu",
                        l->max_recv_bytes, out->n_bytes);
    PGD_TRY(wire_decode_header(&h, out->data, out->n_bytes, why));
    out->type = h.type;
    out->worker_epoch = h.worker_epoch;
    return PGD_OK;
}

pgd_err engine_link_recv(engine_link *l, engine_frame *out, pgd_why *why)
{
    for (;;) {
        int rv = receive(l);
        if (rv != 0)
            return pgd_fail(why, PGD_ECLOSED, "engine link: %s", nng_strerror(rv));
        PGD_TRY(describe_last(l, out, why));
        if (out->worker_epoch == l->worker_epoch || !l->is_adopted)
            return PGD_OK;
    }
}

/* A lost connection does not end a receive of NNG, so it is looked for between short ones. */
pgd_err engine_link_recv_within(engine_link *l, engine_frame *out, int timeout_ms, pgd_why *why)
{
    struct pollfd lost = {.fd = l->lost_fd, .events = POLLIN};
    uint64_t end_us = clock_now_us() + (uint64_t)timeout_ms * 1000;
    bool is_lost = false;
    int rv = nng_socket_set_ms(l->sock, NNG_OPT_RECVTIMEO, LOST_PERIOD_MS);
    while (rv == 0 && (rv = receive(l)) == NNG_ETIMEDOUT && !is_lost && clock_now_us() < end_us) {
        is_lost = poll(&lost, 1, 0) == 1; /* what came before is received once more */
        rv = 0;
    }
    (void)nng_socket_set_ms(l->sock, NNG_OPT_RECVTIMEO, NNG_DURATION_INFINITE);
    if (rv == 0)
        return describe_last(l, out, why);
    return is_lost || rv != NNG_ETIMEDOUT
               ? pgd_fail(why, PGD_ECLOSED, "the engine closed the connection")
               : pgd_fail(why, PGD_ETIMEDOUT, "expected a message within %d ms, got none",
                          timeout_ms);
}

int engine_link_get_lost_fd(const engine_link *l)
{
    return l->lost_fd;
}
