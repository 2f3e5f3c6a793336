/* One loop: what is in the ring, then one request, then sleep until poked.
 *
 * The index is by definition what the published batches add up to: events that change nothing are left
 * out, the end of a resync becomes removed events, and a cleared medium becomes AllBlocksCleared only
 * when nothing lies anywhere else, since that word has no medium; else it becomes removed events.
 * So an answer of the index together with the batches from its number on is always the whole truth.
 *
 * PUB drops for a subscriber whose queue is full; its send never waits. A reply that cannot be sent at
 * once is dropped too: REQ asks again. While the thread works, or lingers so that several steps make
 * one batch, nobody pokes it.
 *
 * A batch for which there was no memory keeps its number: subscribers see a gap that no replay fills. */
#include "engine/kv/kv_events_link.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <nng/nng.h>
#include <nng/protocol/pubsub0/pub.h>
#include <nng/protocol/reqrep0/rep.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/thread.h"
#include "engine/kv/kv_event_pack.h"
#include "proto/attach.h"

#define MAX_BATCH_BYTES   (64 * 1024)  /* an event more at most */
#define MAX_REPLY_BYTES   (256 * 1024) /* a batch more at most: below NNG's 1 MiB of a receiver */
#define MAX_REQUEST_BYTES 64
#define SEND_QUEUE        1024 /* frames that a subscriber may lag behind */
#define LINGER_US         1000
#define IDLE_MS           500
#define PUMP_MS           2
#define CLOSE_WAIT_S      2
#define WARN_EVERY_US     10000000
#define SOCKET_MODE       0600

#define END_CURSOR UINT32_MAX

typedef struct kept_batch {
    uint8_t *bytes; /* NULL: lost */
    uint32_t n_bytes;
} kept_batch;

typedef struct link_socket {
    nng_socket sock;
    bool is_open;
    atomic_int n_peers;
    char ipc_path[300]; /* "" = tcp */
} link_socket;

struct kv_events_link {
    kv_events *events;
    void (*want_pump)(void *arg);
    void *arg;
    char topic[KV_EVENTS_LINK_MAX_TOPIC_BYTES + 1];
    link_socket pub;
    link_socket rep;
    nng_aio *aio;            /* a request that is awaited */
    atomic_bool is_received; /* it has come */
    int wake_fd;
    pthread_t thread;
    bool is_started;
    atomic_bool is_asleep;
    atomic_bool is_stopping;
    atomic_uint_fast64_t n_batches;
    atomic_uint_fast64_t n_events;
    atomic_uint_fast64_t n_blocks[KV_N_MEDIA];

    /* the link's thread */
    kv_event_index *index;
    kv_event_pack pack;
    bool is_awaiting_snapshot; /* asked for, its end has not come */
    log_limit warnings;
    uint64_t incarnation;
    uint64_t next_seq;
    kept_batch *kept; /* [max_kept], that of number s at s % max_kept */
    int32_t max_kept;
    int32_t n_kept;
    size_t n_kept_bytes;
    struct {
        const char *attention; /* NULL: not known yet */
        int32_t window;
    } groups[PGD_MAX_KV_GROUPS];
};

static void put_u64(uint8_t *out, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(value >> (56 - 8 * i));
}

static void put_u32(uint8_t *out, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        out[i] = (uint8_t)(value >> (24 - 8 * i));
}

static void wake(const kv_events_link *l)
{
    uint64_t one = 1;
    ssize_t n = write(l->wake_fd, &one, sizeof one);
    (void)n; /* full means that a wake-up is pending already */
}

/* --- publishing ------------------------------------------------------------------------------- */

static void drop_oldest(kv_events_link *l)
{
    kept_batch *k = &l->kept[(l->next_seq - (uint64_t)l->n_kept) % (uint64_t)l->max_kept];
    l->n_kept_bytes -= k->n_bytes;
    mem_free(k->bytes);
    *k = (kept_batch){0};
    l->n_kept--;
}

/* Under next_seq; bytes NULL: a gap. */
static void keep(kv_events_link *l, const uint8_t *bytes, size_t n_bytes)
{
    kept_batch k = {.bytes = bytes != NULL ? mem_alloc(n_bytes) : NULL};
    if (k.bytes != NULL) {
        memcpy(k.bytes, bytes, n_bytes);
        k.n_bytes = (uint32_t)n_bytes;
    }
    while (l->n_kept == l->max_kept ||
           (l->n_kept > 0 && l->n_kept_bytes + k.n_bytes > KV_EVENTS_LINK_MAX_BUFFER_BYTES))
        drop_oldest(l);
    l->kept[l->next_seq % (uint64_t)l->max_kept] = k;
    l->n_kept_bytes += k.n_bytes;
    l->n_kept++;
}

static double now_s(void)
{
    return (double)clock_wall_us() * 1e-6;
}

/* What the pack holds goes out as one batch. */
static void flush(kv_events_link *l)
{
    if (l->pack.n_events == 0 && l->pack.n_names == 0)
        return;
    size_t topic_len = strlen(l->topic);
    size_t n_head = topic_len + KV_EVENTS_LINK_HEAD_BYTES;
    size_t n_most = kv_event_pack_n_bytes(&l->pack);
    nng_msg *m = NULL;
    uint8_t *body = NULL;
    size_t n = 0;
    if (nng_msg_alloc(&m, n_head + n_most) == 0) {
        body = nng_msg_body(m);
        memcpy(body, l->topic, topic_len);
        body[topic_len] = 0;
        put_u64(body + topic_len + 1, l->next_seq);
        put_u64(body + topic_len + 9, l->incarnation);
        n = kv_event_pack_write(body + n_head, &l->pack, now_s(), 0);
        (void)nng_msg_chop(m, n_most - n);
    }
    bool is_whole = m != NULL && !l->pack.events.failed;
    keep(l, is_whole ? body + n_head : NULL, n);
    l->next_seq++;
    atomic_fetch_add(&l->n_batches, 1);
    atomic_fetch_add(&l->n_events, (uint64_t)l->pack.n_events);
    kv_event_pack_reset(&l->pack);
    if (m != NULL && (!is_whole || nng_sendmsg(l->pub.sock, m, NNG_FLAG_NONBLOCK) != 0))
        nng_msg_free(m);
}

static void flush_if_large(kv_events_link *l)
{
    if (kv_event_pack_n_bytes(&l->pack) > MAX_BATCH_BYTES)
        flush(l);
}

static void take_stored(kv_events_link *l, const kv_cache_event *ev)
{
    int32_t first = -1;
    l->groups[ev->group_id].attention = ev->attention;
    l->groups[ev->group_id].window = ev->window;
    for (int32_t i = 0; i <= ev->n_hashes; i++) {
        bool is_news = i < ev->n_hashes && kv_event_index_store(l->index, ev, i) == KV_INDEX_NEWS;
        if (is_news && first < 0) {
            first = i;
        } else if (!is_news && first >= 0) {
            kv_event_pack_stored(&l->pack, ev, first, i);
            first = -1;
        }
    }
}

static void take_removed(kv_events_link *l, const kv_cache_event *ev)
{
    for (int32_t i = 0; i < ev->n_hashes; i++) {
        uint64_t name = kv_event_index_name(&ev->hashes[i]);
        if (kv_event_index_remove(l->index, ev->medium, ev->group_id, name))
            kv_event_pack_removed(&l->pack, ev->medium, ev->group_id, name);
    }
}

static bool is_elsewhere(const kv_events_link *l, kv_medium medium)
{
    for (int m = 0; m < KV_N_MEDIA; m++) {
        if (m != (int)medium && kv_event_index_n_blocks(l->index, (kv_medium)m) > 0)
            return true;
    }
    return false;
}

static void take_cleared(kv_events_link *l, kv_medium medium)
{
    bool is_all = !is_elsewhere(l, medium);
    for (int32_t i = 0; i < kv_event_index_n_places(l->index); i++) {
        const kv_event_entry *e = kv_event_index_get(l->index, i);
        uint64_t name = e->name;
        int32_t group_id = e->group_id;
        if ((e->media >> medium & 1) == 0)
            continue;
        (void)kv_event_index_remove(l->index, medium, group_id, name);
        if (!is_all)
            kv_event_pack_removed(&l->pack, medium, group_id, name);
        flush_if_large(l);
    }
    if (is_all)
        kv_event_pack_cleared(&l->pack);
}

static void end_resync(kv_events_link *l)
{
    l->is_awaiting_snapshot = false;
    for (int32_t i = 0; i < kv_event_index_n_places(l->index); i++) {
        kv_event_entry e = *kv_event_index_get(l->index, i);
        uint8_t stale = kv_event_index_drop_stale(l->index, i);
        for (int m = 0; m < KV_N_MEDIA; m++) {
            if (stale >> m & 1)
                kv_event_pack_removed(&l->pack, (kv_medium)m, e.group_id, e.name);
        }
        flush_if_large(l);
    }
}

static void take_event(kv_events_link *l, const kv_cache_event *ev)
{
    switch (ev->kind) {
    case KV_CACHE_STORED:
        take_stored(l, ev);
        break;
    case KV_CACHE_REMOVED:
        take_removed(l, ev);
        break;
    case KV_CACHE_CLEARED:
        take_cleared(l, ev->medium);
        break;
    case KV_CACHE_SNAPSHOT_BEGIN:
        l->is_awaiting_snapshot = true;
        kv_event_index_begin_resync(l->index, ev->medium);
        break;
    case KV_CACHE_SNAPSHOT_END:
        end_resync(l);
        break;
    }
    flush_if_large(l);
}

/* Events were dropped: only a snapshot tells what is cached now. */
static void make_good(kv_events_link *l)
{
    if (log_limit_pass(&l->warnings, WARN_EVERY_US, NULL))
        log_warn("kv_events",
                 "the ring of events was full: what is cached is told anew dropped=%llu",
                 (unsigned long long)kv_events_n_dropped(l->events));
    l->is_awaiting_snapshot = true;
    kv_events_request_snapshot(l->events);
}

static void take_events(kv_events_link *l)
{
    kv_cache_event ev;
    for (; kv_events_peek(&ev, l->events); kv_events_pop(l->events))
        take_event(l, &ev);
    flush(l);
    for (int m = 0; m < KV_N_MEDIA; m++)
        atomic_store(&l->n_blocks[m], (uint64_t)kv_event_index_n_blocks(l->index, (kv_medium)m));
    if (kv_events_is_lost(l->events) && !l->is_awaiting_snapshot)
        make_good(l);
}

/* --- requests --------------------------------------------------------------------------------- */

static void answer_error(strbuf *reply, const char *text)
{
    strbuf_append_char(reply, 'E');
    strbuf_append_str(reply, text);
}

static void append_u64(strbuf *b, uint64_t value)
{
    uint8_t bytes[8];
    put_u64(bytes, value);
    strbuf_append(b, bytes, sizeof bytes);
}

static void append_u32(strbuf *b, uint32_t value)
{
    uint8_t bytes[4];
    put_u32(bytes, value);
    strbuf_append(b, bytes, sizeof bytes);
}

static void answer_replay(const kv_events_link *l, strbuf *reply, uint64_t from)
{
    uint64_t seq = PGD_MAX(from, l->next_seq - (uint64_t)l->n_kept);
    strbuf_append_char(reply, 'R');
    append_u64(reply, l->incarnation);
    for (; seq < l->next_seq && reply->n_bytes < MAX_REPLY_BYTES; seq++) {
        const kept_batch *k = &l->kept[seq % (uint64_t)l->max_kept];
        if (k->bytes == NULL)
            continue;
        append_u64(reply, seq);
        append_u32(reply, k->n_bytes);
        strbuf_append(reply, k->bytes, k->n_bytes);
    }
    if (seq >= l->next_seq) {
        append_u64(reply, UINT64_MAX);
        append_u32(reply, 0);
    }
}

static void answer_snapshot(const kv_events_link *l, strbuf *reply, uint32_t cursor)
{
    kv_event_pack pack;
    uint32_t n_places = (uint32_t)kv_event_index_n_places(l->index);
    uint32_t end = PGD_MIN(cursor, n_places);
    kv_event_pack_init(&pack);
    for (; end < n_places && kv_event_pack_n_bytes(&pack) < MAX_REPLY_BYTES; end++) {
        const kv_event_entry *e = kv_event_index_get(l->index, (int32_t)end);
        for (int m = 0; m < KV_N_MEDIA; m++) {
            if (e->media >> m & 1)
                kv_event_pack_entry(&pack, e, (kv_medium)m, l->groups[e->group_id].attention,
                                    l->groups[e->group_id].window);
        }
    }
    strbuf_append_char(reply, 'S');
    append_u64(reply, l->incarnation);
    append_u64(reply, l->next_seq);
    append_u32(reply, end < n_places ? end : END_CURSOR);
    uint8_t *batch = mem_alloc(kv_event_pack_n_bytes(&pack));
    reply->failed = reply->failed || batch == NULL || pack.events.failed;
    if (batch != NULL)
        strbuf_append(reply, batch, kv_event_pack_write(batch, &pack, now_s(), 0));
    mem_free(batch);
    kv_event_pack_deinit(&pack);
}

static uint64_t get_big(const uint8_t *bytes, size_t n_bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < n_bytes; i++)
        value = value << 8 | bytes[i];
    return value;
}

static void answer(const kv_events_link *l, strbuf *reply, const uint8_t *request, size_t n_bytes)
{
    if (n_bytes == 9 && request[0] == 'R' && request[1] < 0x80)
        answer_replay(l, reply, get_big(request + 1, 8));
    else if (n_bytes == 5 && request[0] == 'S')
        answer_snapshot(l, reply, (uint32_t)get_big(request + 1, 4));
    else
        answer_error(reply,
                     "expected R and a sequence number of 8 bytes that is not negative, or S "
                     "and a cursor of 4 bytes, big-endian");
    if (reply->failed) {
        strbuf_reset(reply);
        answer_error(reply, "out of memory");
    }
}

static void await_request(kv_events_link *l)
{
    atomic_store(&l->is_received, false);
    nng_recv_aio(l->rep.sock, l->aio);
}

/* Answers the request that has come, if any. */
static void serve(kv_events_link *l)
{
    if (l->aio == NULL || !atomic_load(&l->is_received))
        return;
    nng_msg *request = nng_aio_result(l->aio) == 0 ? nng_aio_get_msg(l->aio) : NULL;
    if (request != NULL) {
        strbuf reply;
        nng_msg *m = NULL;
        strbuf_init(&reply);
        answer(l, &reply, nng_msg_body(request), nng_msg_len(request));
        nng_msg_free(request);
        if (!reply.failed && nng_msg_alloc(&m, 0) == 0 &&
            (nng_msg_append(m, reply.data, reply.n_bytes) != 0 ||
             nng_sendmsg(l->rep.sock, m, NNG_FLAG_NONBLOCK) != 0))
            nng_msg_free(m);
        strbuf_deinit(&reply);
    }
    await_request(l);
}

/* --- thread ----------------------------------------------------------------------------------- */

static void sleep_until_poked(kv_events_link *l)
{
    struct pollfd p = {.fd = l->wake_fd, .events = POLLIN};
    uint64_t count;
    atomic_store(&l->is_asleep, true);
    if (kv_events_is_empty(l->events) && !atomic_load(&l->is_stopping) &&
        !atomic_load(&l->is_received))
        (void)poll(&p, 1, l->is_awaiting_snapshot ? PUMP_MS : IDLE_MS);
    atomic_store(&l->is_asleep, false);
    (void)!read(l->wake_fd, &count, sizeof count);
}

static void run(void *arg)
{
    kv_events_link *l = arg;
    while (!atomic_load(&l->is_stopping)) {
        take_events(l);
        serve(l);
        if (l->is_awaiting_snapshot)
            l->want_pump(l->arg);
        sleep_until_poked(l);
        usleep(LINGER_US);
    }
    take_events(l);
}

void kv_events_link_poke(kv_events_link *l)
{
    if (!kv_events_is_empty(l->events) && atomic_exchange(&l->is_asleep, false))
        wake(l);
}

void kv_events_link_get_stats(const kv_events_link *link, kv_events_link_stats *out)
{
    kv_events_link *l = (kv_events_link *)link;
    out->n_batches = atomic_load(&l->n_batches);
    out->n_events = atomic_load(&l->n_events);
    out->n_dropped = kv_events_n_dropped(l->events);
    for (int m = 0; m < KV_N_MEDIA; m++)
        out->n_blocks[m] = atomic_load(&l->n_blocks[m]);
}

/* --- life ------------------------------------------------------------------------------------- */

/* Connections beyond the limit are refused. */
static void on_pipe(nng_pipe pipe, nng_pipe_ev ev, void *arg)
{
    link_socket *s = arg;
    if (ev == NNG_PIPE_EV_ADD_PRE) {
        if (atomic_fetch_add(&s->n_peers, 1) >= KV_EVENTS_LINK_MAX_PEERS)
            (void)nng_pipe_close(pipe);
    } else {
        atomic_fetch_sub(&s->n_peers, 1);
    }
}

static void on_request(void *arg)
{
    kv_events_link *l = arg;
    atomic_store(&l->is_received, true);
    wake(l);
}

static pgd_err listen_at(link_socket *s, const char *option, const char *url, pgd_why *why)
{
    nng_listener listener;
    pgd_why bad = {0};
    const char *path = attach_ipc_path(url);
    pgd_err err = attach_check_url(url, true, &bad);
    if (err == PGD_OK && path != NULL)
        err = attach_check_ipc_place(path, &bad);
    if (err != PGD_OK)
        return pgd_fail(why, err, "%s: %s", option, pgd_why_text(&bad, err));
    if (attach_check_url(url, false, NULL) != PGD_OK)
        log_warn("kv_events",
                 "listening beyond loopback: whoever reaches %s can read what this server is "
                 "asked; %s = tcp://127.0.0.1:PORT or ipc:///PATH keeps it on this machine",
                 url, option);
    int rv = nng_pipe_notify(s->sock, NNG_PIPE_EV_ADD_PRE, on_pipe, s);
    if (rv == 0)
        rv = nng_pipe_notify(s->sock, NNG_PIPE_EV_REM_POST, on_pipe, s);
    if (rv == 0)
        rv = nng_listener_create(&listener, s->sock, url);
    if (rv == 0 && path != NULL)
        rv = nng_listener_set_int(listener, NNG_OPT_IPC_PERMISSIONS, SOCKET_MODE);
    if (rv == 0)
        rv = nng_listener_start(listener, 0);
    if (rv != 0)
        return pgd_fail(why, rv == NNG_ENOMEM ? PGD_ENOMEM : PGD_EIO, "%s: cannot listen at %s: %s",
                        option, url, nng_strerror(rv));
    if (path != NULL)
        snprintf(s->ipc_path, sizeof s->ipc_path, "%s", path);
    return PGD_OK;
}

static pgd_err open_sockets(kv_events_link *l, const kv_events_link_opts *opts, pgd_why *why)
{
    if (nng_pub0_open(&l->pub.sock) != 0)
        return pgd_fail(why, PGD_ENOMEM, "kv_events_url: cannot open a socket");
    l->pub.is_open = true;
    (void)nng_socket_set_int(l->pub.sock, NNG_OPT_SENDBUF, SEND_QUEUE);
    PGD_TRY(listen_at(&l->pub, "kv_events_url", opts->url, why));
    if (opts->replay_url[0] == 0)
        return PGD_OK;
    if (nng_rep0_open(&l->rep.sock) != 0)
        return pgd_fail(why, PGD_ENOMEM, "kv_events_replay_url: cannot open a socket");
    l->rep.is_open = true;
    if (nng_aio_alloc(&l->aio, on_request, l) != 0 ||
        nng_socket_set_size(l->rep.sock, NNG_OPT_RECVMAXSZ, MAX_REQUEST_BYTES) != 0)
        return pgd_fail(why, PGD_ENOMEM, "kv_events_replay_url: cannot open a socket");
    PGD_TRY(listen_at(&l->rep, "kv_events_replay_url", opts->replay_url, why));
    await_request(l);
    return PGD_OK;
}

static pgd_err check_topic(const char *topic, pgd_why *why)
{
    size_t n = strlen(topic);
    for (size_t i = 0; i < n; i++) {
        if ((unsigned char)topic[i] < 0x20 || topic[i] == 0x7f)
            return pgd_fail(why, PGD_EINVAL, "kv_events_topic: expected printable characters");
    }
    if (n > KV_EVENTS_LINK_MAX_TOPIC_BYTES)
        return pgd_fail(why, PGD_EINVAL, "kv_events_topic: expected at most %d bytes, got %zu",
                        KV_EVENTS_LINK_MAX_TOPIC_BYTES, n);
    return PGD_OK;
}

static pgd_err make_parts(kv_events_link *l, const kv_events_link_opts *opts, pgd_why *why)
{
    PGD_TRY(check_topic(opts->topic, why));
    snprintf(l->topic, sizeof l->topic, "%s", opts->topic);
    if (getrandom(&l->incarnation, sizeof l->incarnation, 0) != (ssize_t)sizeof l->incarnation)
        return pgd_fail(why, PGD_EIO, "no random numbers from the system");
    l->max_kept = opts->buffer_batches;
    l->kept = mem_calloc((size_t)l->max_kept, sizeof *l->kept);
    l->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (l->kept == NULL || l->wake_fd < 0 || kv_event_index_create(&l->index) != PGD_OK)
        return pgd_fail(why, PGD_ENOMEM, "no memory for kv_events_buffer_batches = %d",
                        l->max_kept);
    PGD_TRY(open_sockets(l, opts, why));
    pgd_err err = thread_start(&l->thread, "kv_events", run, l);
    if (err != PGD_OK)
        return pgd_fail(why, err, "cannot start the thread of KV events: %s", pgd_err_text(err));
    l->is_started = true;
    return PGD_OK;
}

pgd_err kv_events_link_open(kv_events_link **out, const kv_events_link_opts *opts, pgd_why *why)
{
    *out = NULL;
    PGD_ASSERTF(opts->buffer_batches > 0, "%d batches", opts->buffer_batches);
    kv_events_link *l = mem_calloc(1, sizeof *l);
    if (l == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    l->events = opts->events;
    l->want_pump = opts->want_pump;
    l->arg = opts->arg;
    l->wake_fd = -1;
    kv_event_pack_init(&l->pack);
    pgd_err err = make_parts(l, opts, why);
    if (err != PGD_OK) {
        kv_events_link_close(l);
        return err;
    }
    *out = l;
    return PGD_OK;
}

static void close_nng(void *arg)
{
    (void)nng_close(*(nng_socket *)arg);
}

static void close_socket(link_socket *s)
{
    if (!s->is_open)
        return;
    (void)nng_pipe_notify(s->sock, NNG_PIPE_EV_ADD_PRE, NULL, NULL);
    (void)nng_pipe_notify(s->sock, NNG_PIPE_EV_REM_POST, NULL, NULL);
    if (!thread_run_bounded("events-close", close_nng, &s->sock, sizeof s->sock, CLOSE_WAIT_S))
        log_warn("kv_events", "NNG did not close a socket within %d s; it is left behind",
                 CLOSE_WAIT_S);
    if (s->ipc_path[0] != 0)
        (void)unlink(s->ipc_path);
}

void kv_events_link_close(kv_events_link *l)
{
    if (l == NULL)
        return;
    if (l->is_started) {
        atomic_store(&l->is_stopping, true);
        wake(l);
        thread_join(l->thread);
    }
    if (l->aio != NULL) {
        nng_aio_stop(l->aio);
        if (atomic_load(&l->is_received) && nng_aio_result(l->aio) == 0)
            nng_msg_free(nng_aio_get_msg(l->aio));
    }
    close_socket(&l->rep);
    close_socket(&l->pub);
    nng_aio_free(l->aio);
    while (l->n_kept > 0)
        drop_oldest(l);
    mem_free(l->kept);
    kv_event_index_destroy(l->index);
    kv_event_pack_deinit(&l->pack);
    if (l->wake_fd >= 0)
        close(l->wake_fd);
    mem_free(l);
}
