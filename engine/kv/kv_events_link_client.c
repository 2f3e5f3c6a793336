/* NNG would dial again and again; this one is told when the server goes, so that somebody who watches
 * is told too. */
#include "engine/kv/kv_events_link_client.h"

#include <stdatomic.h>
#include <string.h>

#include <nng/nng.h>
#include <nng/protocol/pubsub0/sub.h>

#include "common/mem.h"
#include "engine/kv/kv_events_link.h"

#define RECV_QUEUE      4096
#define MAX_FRAME_BYTES ((size_t)16 << 20)

struct kv_events_link_client {
    nng_socket sock;
    bool is_open;
    atomic_bool is_lost;
    nng_msg *last;
};

static void on_gone(nng_pipe pipe, nng_pipe_ev ev, void *arg)
{
    kv_events_link_client *c = arg;
    (void)pipe;
    (void)ev;
    atomic_store(&c->is_lost, true);
}

static int open_socket(kv_events_link_client *c, const char *url, const char *topic)
{
    size_t n = topic != NULL ? strlen(topic) + 1 : 0;
    int rv = nng_sub0_open(&c->sock);
    if (rv != 0)
        return rv;
    c->is_open = true;
    if ((rv = nng_socket_set(c->sock, NNG_OPT_SUB_SUBSCRIBE, topic != NULL ? topic : "", n)) != 0 ||
        (rv = nng_socket_set_int(c->sock, NNG_OPT_RECVBUF, RECV_QUEUE)) != 0 ||
        (rv = nng_socket_set_size(c->sock, NNG_OPT_RECVMAXSZ, MAX_FRAME_BYTES)) != 0 ||
        (rv = nng_pipe_notify(c->sock, NNG_PIPE_EV_REM_POST, on_gone, c)) != 0)
        return rv;
    return nng_dial(c->sock, url, NULL, 0);
}

pgd_err kv_events_link_client_open(kv_events_link_client **out, const char *url, const char *topic,
                                   pgd_why *why)
{
    *out = NULL;
    kv_events_link_client *c = mem_calloc(1, sizeof *c);
    if (c == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    int rv = open_socket(c, url, topic);
    if (rv != 0) {
        kv_events_link_client_close(c);
        return pgd_fail(why, rv == NNG_ENOMEM ? PGD_ENOMEM : PGD_EIO, "%s: %s", url,
                        nng_strerror(rv));
    }
    *out = c;
    return PGD_OK;
}

static void drop_last(kv_events_link_client *c)
{
    if (c->last != NULL)
        nng_msg_free(c->last);
    c->last = NULL;
}

void kv_events_link_client_close(kv_events_link_client *c)
{
    if (c == NULL)
        return;
    drop_last(c);
    if (c->is_open) {
        (void)nng_pipe_notify(c->sock, NNG_PIPE_EV_REM_POST, NULL, NULL);
        (void)nng_close(c->sock);
    }
    mem_free(c);
}

static uint64_t get_u64(const uint8_t *bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value = value << 8 | bytes[i];
    return value;
}

pgd_err kv_events_link_client_recv(kv_events_frame *out, kv_events_link_client *c, int timeout_ms,
                                   pgd_why *why)
{
    drop_last(c);
    int rv = nng_socket_set_ms(c->sock, NNG_OPT_RECVTIMEO, timeout_ms);
    if (rv == 0)
        rv = nng_recvmsg(c->sock, &c->last, 0);
    if (rv != 0) {
        c->last = NULL;
        if (atomic_load(&c->is_lost))
            return pgd_fail(why, PGD_ECLOSED, "the server is gone");
        return rv == NNG_ETIMEDOUT ? PGD_EAGAIN : pgd_fail(why, PGD_EIO, "%s", nng_strerror(rv));
    }
    const uint8_t *body = nng_msg_body(c->last);
    size_t n_bytes = nng_msg_len(c->last);
    const uint8_t *zero =
        memchr(body, 0, PGD_MIN(n_bytes, (size_t)KV_EVENTS_LINK_MAX_TOPIC_BYTES + 1));
    if (zero == NULL || n_bytes - (size_t)(zero - body) < KV_EVENTS_LINK_HEAD_BYTES)
        return pgd_fail(why, PGD_EPROTO, "expected a frame of KV events, got %zu other bytes",
                        n_bytes);
    out->seq = get_u64(zero + 1);
    out->incarnation = get_u64(zero + 9);
    out->batch = zero + KV_EVENTS_LINK_HEAD_BYTES;
    out->n_bytes = n_bytes - (size_t)(out->batch - body);
    return PGD_OK;
}
