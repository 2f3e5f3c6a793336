/* Cache events to subscribers outside the process: an NNG PUB socket for the stream, an NNG REP socket
 * for what somebody missed. proto/README.md specifies both.
 *
 * A thread of its own reads the ring of kv_events, keeps a kv_event_index, and publishes batches with
 * a sequence number each. The last batches are kept for replay; the index answers who comes late.
 * Subscribers that are too slow lose batches and see it by the numbers; nothing waits for them.
 * After the ring was full the thread asks the core for a snapshot and publishes what has changed, so
 * that subscribers need not know of it.
 * Owns:    sockets, thread, index, kept batches
 * Limits:  buffer_batches and KV_EVENTS_LINK_MAX_BUFFER_BYTES of kept batches;
 *          KV_EVENTS_LINK_MAX_PEERS connections of each socket
 * Thread:  open, close: any; poke: core
 */
#ifndef ENGINE_KV_KV_EVENTS_LINK_H
#define ENGINE_KV_KV_EVENTS_LINK_H

#include "engine/kv/kv_events.h"

#define KV_EVENTS_LINK_MAX_TOPIC_BYTES  128
#define KV_EVENTS_LINK_MAX_BUFFER_BYTES ((size_t)64 << 20)
#define KV_EVENTS_LINK_MAX_PEERS        64

/* Bytes of a frame between topic and batch: 0, sequence number, incarnation. */
#define KV_EVENTS_LINK_HEAD_BYTES 17

typedef struct kv_events_link kv_events_link;

typedef struct kv_events_link_opts {
    kv_events *events;      /* borrow until close; this is its one reader */
    const char *url;        /* ipc:///PATH or tcp://HOST:PORT */
    const char *replay_url; /* likewise; "" = none */
    const char *topic;      /* printable, at most KV_EVENTS_LINK_MAX_TOPIC_BYTES */
    int32_t buffer_batches;
    /* Called from the link's thread when kv_events_pump is to be called soon. */
    void (*want_pump)(void *arg);
    void *arg;
} kv_events_link_opts;

typedef struct kv_events_link_stats {
    uint64_t n_batches;
    uint64_t n_events;
    uint64_t n_dropped; /* by the ring, made good by a snapshot */
    uint64_t n_blocks[KV_N_MEDIA];
} kv_events_link_stats;

/* Listens and starts the thread. Errors: PGD_EINVAL, PGD_EIO, PGD_ENOMEM; why names the option. */
PGD_MUST_USE pgd_err kv_events_link_open(kv_events_link **out, const kv_events_link_opts *opts,
                                         pgd_why *why);
/* Publishes what is in the ring, then ends. */
void kv_events_link_close(kv_events_link *l);
/* There may be something in the ring; cheap. */
void kv_events_link_poke(kv_events_link *l);
/* Thread: any */
void kv_events_link_get_stats(const kv_events_link *l, kv_events_link_stats *out);

#endif
