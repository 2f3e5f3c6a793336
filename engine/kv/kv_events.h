/* What happens to the prefix cache, told to one consumer inside the process (rules EV1-EV3).
 *
 * The core thread writes records into a ring that is sized at create; one other thread, or the same,
 * reads them. State changes only: a hash is told as stored when its first copy in a group is
 * published and as removed when the last one goes, so the consumer keeps a set of (medium, group,
 * hash). On the device hashes are published before the block is written.
 * When the ring is full, events are dropped and counted until the consumer asks for a snapshot and
 * its beginning is written. A snapshot comes in pieces between further events: SNAPSHOT_BEGIN
 * (forget everything), STORED without tokens and parent for what is cached, SNAPSHOT_END. A tier
 * that changes by others' hands is told by snapshots of it alone. Stored twice is stored, removed but
 * unknown is nothing.
 * Owns:    its ring
 * Thread:  writing: core; reading: one thread; each function says which
 */
#ifndef ENGINE_KV_KV_EVENTS_H
#define ENGINE_KV_KV_EVENTS_H

#include "engine/kv/block_hash.h"

struct block_pool;
struct kv_group_spec;
struct offload_key;

#define KV_EVENTS_MIN_BYTES (64 * 1024)

/* Where cached blocks lie. */
typedef enum kv_medium { KV_MEDIUM_DEVICE, KV_MEDIUM_HOST, KV_MEDIUM_DISK, KV_N_MEDIA } kv_medium;

typedef enum kv_cache_event_kind {
    KV_CACHE_STORED,
    KV_CACHE_REMOVED,
    KV_CACHE_CLEARED, /* the medium holds nothing any more, in no group */
    KV_CACHE_SNAPSHOT_BEGIN,
    KV_CACHE_SNAPSHOT_END
} kv_cache_event_kind;

/* Borrows end with kv_events_pop. */
typedef struct kv_cache_event {
    uint64_t seq; /* counts from 0; what is missing before it was dropped */
    kv_cache_event_kind kind;
    kv_medium medium; /* STORED, REMOVED and CLEARED; SNAPSHOT_BEGIN: what is to be forgotten,
                         KV_N_MEDIA = all */
    /* STORED and REMOVED */
    int32_t group_id;
    int32_t n_hashes; /* consecutive blocks of one request when there are tokens */
    const block_hash *hashes;
    /* STORED */
    const char *attention;    /* name of the group's kind, static */
    int32_t window;           /* tokens, 0 = all */
    int32_t block_size;       /* tokens */
    const block_hash *parent; /* of the first hash in the request's chain; NULL: the chain starts
                                 here, or there are no tokens */
    int32_t n_tokens;         /* n_hashes * block_size, or 0 */
    const token_id *tokens;
    size_t extra_bytes; /* of the first block, in the form of block_hash_write_extra; 0 = none */
    const void *extra;
} kv_cache_event;

/* What one request stores: blocks [first, end) of the group. */
typedef struct kv_stored {
    int32_t group_id;
    int32_t first, end;
    const block_hash *hashes; /* of the request */
    int32_t hashes_per_block;
    const token_id *tokens; /* of the request */
    size_t extra_bytes;     /* of the request's first block */
    const void *extra;
} kv_stored;

typedef struct kv_events kv_events;

/* As clients know it: "GPU", "CPU", "DISK". Static storage. */
const char *kv_medium_name(kv_medium medium);

/* capacity_bytes >= KV_EVENTS_MIN_BYTES, rounded up to a power of two; about 100 bytes a block.
 * Errors: PGD_EINVAL, PGD_ENOMEM. Thread: any */
PGD_MUST_USE pgd_err kv_events_create(kv_events **out, size_t capacity_bytes);
void kv_events_destroy(kv_events *e);

/* Reading. False: nothing there. */
bool kv_events_peek(kv_cache_event *out, kv_events *e);
/* Ends the event of the last peek. */
void kv_events_pop(kv_events *e);
/* Events are being dropped: only a snapshot makes the stream whole again. */
bool kv_events_is_lost(const kv_events *e);
void kv_events_request_snapshot(kv_events *e);
/* Thread: any */
bool kv_events_is_empty(const kv_events *e);
uint64_t kv_events_n_dropped(const kv_events *e);

/* Writing. Before the first event: the groups, copied. Errors: PGD_EINVAL (a block's tokens take more
 * than a quarter of the ring) */
PGD_MUST_USE pgd_err kv_events_set_groups(kv_events *e, const struct kv_group_spec *specs,
                                          int32_t n_groups);
void kv_events_stored(kv_events *e, const kv_stored *what);
void kv_events_removed(kv_events *e, int32_t group_id, const block_hash *hash);
void kv_events_cleared(kv_events *e, kv_medium medium);
/* Blocks that a tier behind the device can load from now on, and blocks that it no longer has. */
void kv_events_tier_stored(kv_events *e, kv_medium medium, const struct offload_key *keys,
                           int32_t n_keys);
void kv_events_tier_removed(kv_events *e, kv_medium medium, const struct offload_key *keys,
                            int32_t n_keys);
/* How a snapshot finds what a tier holds: list writes up to max_keys loadable keys from position
 * *cursor (0 at first) on, moves *cursor behind them, to -1 at the end, and returns their number, in
 * bounded work. A key must not move to a position before the cursor without being told. NULL = the
 * tier is gone. */
typedef int32_t (*kv_tier_list_fn)(struct offload_key *out, const void *arg, int32_t max_keys,
                                   int32_t *cursor);
void kv_events_set_tier(kv_events *e, kv_medium medium, kv_tier_list_fn list, const void *arg);
/* A snapshot of that tier alone, with the next pumps. False: one is under way; ask again. */
bool kv_events_walk_tier(kv_events *e, kv_medium medium);
/* A snapshot is under way: further copies of a hash must be told as well, since the one that made it
 * known before may go before the walk comes to it. */
bool kv_events_is_in_snapshot(const kv_events *e);
/* A piece of the snapshot that was asked for, if any; bounded work. */
void kv_events_pump(kv_events *e, const struct block_pool *pool);

#endif
