/* pair0. What NNG decides for us: framing, dialing again until there is a first connection (never
 * after it: a lost pipe ends the incarnation), its own threads.
 *
 * A send queue of SEND_QUEUE frames is more than two steps and the control frames of a start, so a
 * full queue means that the worker has stopped reading. nng_sendmsg takes the message only on
 * success; that rule is written once, in send.
 *
 * Frames that cannot be used yet are held here, not left in the socket: NNG 1.5.2 can lose a
 * completion when a pipe goes away whose receive queue is full, and nng_close then never returns
 * (measured, about every second time). So the caller receives until there is nothing, and close
 * first takes what is left.
 *
 * Once there is nothing, one asynchronous receive is left armed, whose end writes wake_fd. NNG's
 * own descriptor for that (NNG_OPT_RECVFD) is not used: 1.5.2 never closes its two ends.
 */
#include "engine/core/worker_link.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <sys/random.h>
#include <unistd.h>

#include <nng/nng.h>
#include <nng/protocol/pair0/pair.h>

#include "common/log.h"
#include "common/mem.h"
#include "common/thread.h"

#define SEND_QUEUE    16
#define RECV_QUEUE    16
#define CLOSE_WAIT_S  2
#define MAX_DROPPED   64  /* frames of another life in one call */
#define REDIAL_MS     100 /* at first; doubled up to the next */
#define MAX_REDIAL_MS 1000

struct worker_link {
    nng_socket sock;
    bool sock_is_open;
    bool is_dialer;
    nng_aio *aio;
    bool is_armed;        /* aio has a receive that has not been taken */
    atomic_bool is_ended; /* and it has ended */
    int wake_fd;
    uint32_t worker_epoch;
    nng_msg *last;
    nng_msg *held[WORKER_LINK_MAX_HELD]; /* oldest first */
    int32_t n_held;
    atomic_int pipe_id; /* of the one connection; 0 before it */
    atomic_bool is_up;
    atomic_bool is_lost;
    char url[300];
};

static void wake(const worker_link *l)
{
    uint64_t one = 1;
    ssize_t n = write(l->wake_fd, &one, sizeof one);
    (void)n; /* full means that a wake-up is pending already */
}

static void on_pipe(nng_pipe pipe, nng_pipe_ev ev, void *arg)
{
    worker_link *l = arg;
    int none = 0;
    int id = nng_pipe_id(pipe);
    if (ev == NNG_PIPE_EV_ADD_PRE && !atomic_compare_exchange_strong(&l->pipe_id, &none, id))
        (void)nng_pipe_close(pipe);
    if (ev == NNG_PIPE_EV_ADD_PRE || id != atomic_load(&l->pipe_id))
        return;
    atomic_store(ev == NNG_PIPE_EV_ADD_POST ? &l->is_up : &l->is_lost, true);
    wake(l);
}

static int watch_pipes(worker_link *l, nng_pipe_cb fn)
{
    int rv = nng_pipe_notify(l->sock, NNG_PIPE_EV_ADD_PRE, fn, l);
    if (rv == 0)
        rv = nng_pipe_notify(l->sock, NNG_PIPE_EV_ADD_POST, fn, l);
    return rv != 0 ? rv : nng_pipe_notify(l->sock, NNG_PIPE_EV_REM_POST, fn, l);
}

static void on_receive_ended(void *arg)
{
    worker_link *l = arg;
    atomic_store(&l->is_ended, true);
    wake(l);
}

static void arm(worker_link *l)
{
    atomic_store(&l->is_ended, false);
    l->is_armed = true;
    nng_recv_aio(l->sock, l->aio);
}

static pgd_err fail_nng(pgd_why *why, const char *what, int rv)
{
    return pgd_fail(why, rv == NNG_ENOMEM ? PGD_ENOMEM : PGD_EIO, "worker link: %s: %s", what,
                    nng_strerror(rv));
}

static pgd_err open_socket(worker_link *l, const worker_link_opts *opts, pgd_why *why)
{
    int rv = nng_pair0_open(&l->sock);
    if (rv != 0)
        return fail_nng(why, "open", rv);
    l->sock_is_open = true;
    if ((rv = nng_socket_set_int(l->sock, NNG_OPT_SENDBUF, SEND_QUEUE)) != 0 ||
        (rv = nng_socket_set_int(l->sock, NNG_OPT_RECVBUF, RECV_QUEUE)) != 0 ||
        (rv = nng_socket_set_size(l->sock, NNG_OPT_RECVMAXSZ, opts->max_recv_bytes)) != 0 ||
        (rv = nng_socket_set_ms(l->sock, NNG_OPT_RECONNMINT, REDIAL_MS)) != 0 ||
        (rv = nng_socket_set_ms(l->sock, NNG_OPT_RECONNMAXT, MAX_REDIAL_MS)) != 0 ||
        (rv = watch_pipes(l, on_pipe)) != 0)
        return fail_nng(why, "set options", rv);
    rv = opts->dial != NULL ? nng_dial(l->sock, l->url, NULL, NNG_FLAG_NONBLOCK)
                            : nng_listen(l->sock, l->url, NULL, 0);
    if (rv != 0)
        return fail_nng(why, l->url, rv);
    if ((rv = nng_aio_alloc(&l->aio, on_receive_ended, l)) != 0)
        return fail_nng(why, "receive", rv);
    arm(l);
    return PGD_OK;
}

static void drop_last(worker_link *l)
{
    if (l->last != NULL)
        nng_msg_free(l->last);
    l->last = NULL;
}

pgd_err worker_link_open(worker_link **out, const worker_link_opts *opts, pgd_why *why)
{
    uint32_t tag;
    worker_link *l = mem_calloc(1, sizeof *l);
    if (l == NULL)
        return pgd_fail(why, PGD_ENOMEM, "worker link: out of memory");
    l->worker_epoch = opts->worker_epoch;
    l->wake_fd = opts->wake_fd;
    l->is_dialer = opts->dial != NULL;
    if (getrandom(&tag, sizeof tag, 0) != (ssize_t)sizeof tag)
        tag = (uint32_t)getpid();
    if (opts->dial != NULL)
        snprintf(l->url, sizeof l->url, "%s", opts->dial);
    else
        snprintf(l->url, sizeof l->url, "ipc://%s/worker-%ld-%u-%08x.sock", opts->dir,
                 (long)getpid(), opts->worker_epoch, tag);
    pgd_err err = open_socket(l, opts, why);
    if (err != PGD_OK) {
        worker_link_close(l);
        return err;
    }
    *out = l;
    return PGD_OK;
}

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

void worker_link_close(worker_link *l)
{
    if (l == NULL)
        return;
    for (int32_t i = 0; i < l->n_held; i++)
        nng_msg_free(l->held[i]);
    drop_last(l);
    if (l->aio != NULL) {
        nng_aio_stop(l->aio);
        if (l->is_armed && nng_aio_result(l->aio) == 0)
            nng_msg_free(nng_aio_get_msg(l->aio));
    }
    if (l->sock_is_open) {
        while (nng_recvmsg(l->sock, &l->last, NNG_FLAG_NONBLOCK) == 0)
            drop_last(l);
        (void)watch_pipes(l, NULL); /* their argument goes away now */
        close_bounded(l->sock);
        if (!l->is_dialer)
            (void)unlink(l->url + strlen("ipc://")); /* NNG does it too, where it still can */
    }
    nng_aio_free(l->aio);
    mem_free(l);
}

const char *worker_link_get_url(const worker_link *l)
{
    return l->url;
}

bool worker_link_is_up(const worker_link *l)
{
    return atomic_load(&l->is_up);
}

bool worker_link_is_lost(const worker_link *l)
{
    return atomic_load(&l->is_lost);
}

pgd_err worker_link_send(worker_link *l, wire_type type, const wire_record *rec, const void *msg)
{
    nng_msg *m;
    size_t n_bytes = wire_frame_bytes(rec, msg);
    if (nng_msg_alloc(&m, n_bytes) != 0)
        return PGD_ENOMEM;
    wire_encode(nng_msg_body(m), n_bytes, type, l->worker_epoch, rec, msg);
    int rv = nng_sendmsg(l->sock, m, NNG_FLAG_NONBLOCK);
    if (rv == 0)
        return PGD_OK;
    nng_msg_free(m);
    return rv == NNG_EAGAIN ? PGD_EAGAIN : PGD_ECLOSED;
}

/* Fills *out from the last message; PGD_EAGAIN when it belongs to another life. */
static pgd_err describe_last(const worker_link *l, worker_frame *out, pgd_why *why)
{
    wire_header h;
    out->data = nng_msg_body(l->last);
    out->n_bytes = nng_msg_len(l->last);
    PGD_TRY(wire_decode_header(&h, out->data, out->n_bytes, why));
    out->type = h.type;
    bool is_before_attach =
        h.worker_epoch == 0 && (h.type == WIRE_CHALLENGE || h.type == WIRE_ERROR);
    return h.worker_epoch == l->worker_epoch || is_before_attach ? PGD_OK : PGD_EAGAIN;
}

/* The next message into last, or an NNG error; NNG_EAGAIN leaves a receive armed. */
static int receive(worker_link *l)
{
    if (l->is_armed && !atomic_load(&l->is_ended))
        return NNG_EAGAIN;
    if (l->is_armed) {
        l->is_armed = false;
        int rv = nng_aio_result(l->aio);
        l->last = rv == 0 ? nng_aio_get_msg(l->aio) : NULL;
        return rv;
    }
    int rv = nng_recvmsg(l->sock, &l->last, NNG_FLAG_NONBLOCK);
    if (rv != 0)
        l->last = NULL;
    if (rv == NNG_EAGAIN)
        arm(l);
    return rv;
}

pgd_err worker_link_recv(worker_link *l, worker_frame *out, pgd_why *why)
{
    for (int i = 0; i < MAX_DROPPED; i++) {
        drop_last(l);
        int rv = receive(l);
        if (rv == NNG_EAGAIN)
            return PGD_EAGAIN;
        if (rv != 0)
            return pgd_fail(why, PGD_ECLOSED, "worker link: %s", nng_strerror(rv));
        pgd_err err = describe_last(l, out, why);
        if (err != PGD_EAGAIN)
            return err;
    }
    wake(l); /* a flood of them must not hold the caller here */
    return PGD_EAGAIN;
}

bool worker_link_hold(worker_link *l)
{
    PGD_ASSERT(l->last != NULL);
    if (l->n_held == WORKER_LINK_MAX_HELD)
        return false;
    l->held[l->n_held++] = l->last;
    l->last = NULL;
    return true;
}

bool worker_link_take_held(worker_link *l, worker_frame *out)
{
    if (l->n_held == 0)
        return false;
    drop_last(l);
    l->last = l->held[0];
    l->n_held--;
    memmove(&l->held[0], &l->held[1], (size_t)l->n_held * sizeof(l->held[0]));
    return describe_last(l, out, NULL) == PGD_OK; /* it was looked at when it came */
}

int32_t worker_link_n_held(const worker_link *l)
{
    return l->n_held;
}
