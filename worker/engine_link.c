/* pair0 over ipc, the dialing side. The next step's frame waits in NNG's receive queue while the
 * current one computes, so taking it costs no round trip.
 */
#include "worker/engine_link.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <nng/nng.h>
#include <nng/protocol/pair0/pair.h>

#include "common/log.h"
#include "common/mem.h"
#include "common/thread.h"

#define QUEUE_FRAMES 16
#define CLOSE_WAIT_S 2

struct engine_link {
    nng_socket sock;
    bool sock_is_open;
    uint32_t worker_epoch;
    int lost_fd;
    nng_msg *last;
};

static void on_pipe_gone(nng_pipe pipe, nng_pipe_ev ev, void *arg)
{
    engine_link *l = arg;
    uint64_t one = 1;
    (void)pipe;
    (void)ev;
    ssize_t n = write(l->lost_fd, &one, sizeof one);
    (void)n; /* an eventfd of count 0 takes it */
}

static pgd_err dial(engine_link *l, const char *url, size_t max_recv_bytes, pgd_why *why)
{
    int rv = nng_pair0_open(&l->sock);
    if (rv != 0)
        return pgd_fail(why, PGD_EIO, "engine link: open: %s", nng_strerror(rv));
    l->sock_is_open = true;
    if ((rv = nng_socket_set_int(l->sock, NNG_OPT_SENDBUF, QUEUE_FRAMES)) != 0 ||
        (rv = nng_socket_set_int(l->sock, NNG_OPT_RECVBUF, QUEUE_FRAMES)) != 0 ||
        (rv = nng_socket_set_size(l->sock, NNG_OPT_RECVMAXSZ, max_recv_bytes)) != 0 ||
        (rv = nng_pipe_notify(l->sock, NNG_PIPE_EV_REM_POST, on_pipe_gone, l)) != 0)
        return pgd_fail(why, PGD_EIO, "engine link: set options: %s", nng_strerror(rv));
    if ((rv = nng_dial(l->sock, url, NULL, 0)) != 0)
        return pgd_fail(why, PGD_EIO, "engine link: cannot reach the engine at %s: %s", url,
                        nng_strerror(rv));
    return PGD_OK;
}

pgd_err engine_link_open(engine_link **out, const char *url, uint32_t worker_epoch,
                         size_t max_recv_bytes, pgd_why *why)
{
    engine_link *l = mem_calloc(1, sizeof *l);
    if (l == NULL)
        return pgd_fail(why, PGD_ENOMEM, "engine link: out of memory");
    l->worker_epoch = worker_epoch;
    l->lost_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pgd_err err = l->lost_fd < 0 ? pgd_fail(why, PGD_EIO, "engine link: no eventfd")
                                 : dial(l, url, max_recv_bytes, why);
    if (err != PGD_OK) {
        engine_link_close(l);
        return err;
    }
    *out = l;
    return PGD_OK;
}

static void close_socket(void *arg)
{
    (void)nng_close(*(nng_socket *)arg);
    mem_free(arg);
}

/* nng_close of NNG 1.5.2 now and then never returns when frames arrive at the same time: its reaper
 * waits for an operation that is never completed. Past the limit the socket is left behind. */
static void close_bounded(nng_socket sock)
{
    nng_socket *arg = mem_alloc(sizeof *arg);
    (void)nng_pipe_notify(sock, NNG_PIPE_EV_REM_POST, NULL, NULL); /* its argument goes away now */
    if (arg == NULL)
        return;
    *arg = sock;
    if (!thread_run_bounded("link-close", close_socket, arg, CLOSE_WAIT_S))
        log_warn("link", "NNG did not close a socket within %d s; it is left behind", CLOSE_WAIT_S);
}

void engine_link_close(engine_link *l)
{
    if (l == NULL)
        return;
    if (l->last != NULL)
        nng_msg_free(l->last);
    if (l->sock_is_open)
        close_bounded(l->sock);
    if (l->lost_fd >= 0)
        close(l->lost_fd);
    mem_free(l);
}

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

pgd_err engine_link_recv(engine_link *l, engine_frame *out, pgd_why *why)
{
    for (;;) {
        wire_header h;
        if (l->last != NULL)
            nng_msg_free(l->last);
        l->last = NULL;
        int rv = nng_recvmsg(l->sock, &l->last, 0);
        if (rv != 0)
            return pgd_fail(why, PGD_ECLOSED, "engine link: %s", nng_strerror(rv));
        out->data = nng_msg_body(l->last);
        out->n_bytes = nng_msg_len(l->last);
        PGD_TRY(wire_decode_header(&h, out->data, out->n_bytes, why));
        out->type = h.type;
        if (h.worker_epoch == l->worker_epoch)
            return PGD_OK;
    }
}

int engine_link_get_lost_fd(const engine_link *l)
{
    return l->lost_fd;
}
