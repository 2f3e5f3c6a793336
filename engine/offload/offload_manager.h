/* What an offload tier holds: which KV blocks, where in its medium, and which of them transfers are
 * at work on (rules OF).
 *
 * Only metadata: the medium's blocks are numbered 0 .. capacity-1, workers move the bytes. A store
 * or load is prepared, carried out by the workers, and completed; between the two its blocks are
 * neither evicted nor, for a store, found. Pending is not a miss: who asks waits and asks again.
 * Owns:    everything, sized at create; the hot functions never allocate
 * Limits:  capacity 1 .. 2^28 blocks; the keys of one call are distinct
 * Thread:  core
 */
#ifndef ENGINE_OFFLOAD_OFFLOAD_MANAGER_H
#define ENGINE_OFFLOAD_OFFLOAD_MANAGER_H

#include "engine/offload/offload_policy.h"

typedef struct offload_manager offload_manager;

typedef enum offload_lookup {
    OFFLOAD_MISS,
    OFFLOAD_HIT,
    OFFLOAD_PENDING /* a store of it is under way */
} offload_lookup;

typedef struct offload_manager_opts {
    int32_t capacity; /* blocks of the medium */
    const offload_policy_ops *policy;
    /* All may be NULL. Blocks that have become loadable, blocks that are gone (told before their
     * medium blocks are given out again), a loadable one that somebody wants, and all are gone.
     * keys, medium_ids: [n], borrowed for the call. They must not call back. */
    void (*on_stored)(void *arg, const offload_key *keys, const int32_t *medium_ids,
                      int32_t n_keys);
    void (*on_removed)(void *arg, const offload_key *keys, const int32_t *medium_ids,
                       int32_t n_keys);
    void (*on_touched)(void *arg, int32_t medium_id);
    void (*on_reset)(void *arg);
    void *arg;
} offload_manager_opts;

/* Errors: PGD_EINVAL, PGD_ENOMEM */
PGD_MUST_USE pgd_err offload_manager_create(offload_manager **out,
                                            const offload_manager_opts *opts);
void offload_manager_destroy(offload_manager *m);
/* Takes up what the medium holds already, the least recent first; m must be empty. keys, medium_ids:
 * [n_keys]; the ids are distinct. Of a key that is there twice only the later one is taken: the id
 * of the other is set to -1. Nothing is told of it. */
void offload_manager_restore(offload_manager *m, const offload_key *keys, int32_t *medium_ids,
                             int32_t n_keys);

/* No effect on recency (OF3). */
offload_lookup offload_manager_lookup(const offload_manager *m, const offload_key *key);
/* Somebody wants these, wherever they lie now, the device included. The first key ends up as the
 * most recent, so that tails of a prefix are evicted before its head (OF5). */
void offload_manager_touch(offload_manager *m, const offload_key *keys, int32_t n_keys);

/* They belong together in this order: the first becomes the most recent of its kind. Nobody wants
 * them. */
void offload_manager_refresh(offload_manager *m, const offload_key *keys, int32_t n_keys);
/* Their content is not right: found no more from now on; blocks that transfers are at work on are
 * given back when these complete. */
void offload_manager_forget(offload_manager *m, const offload_key *keys, int32_t n_keys);

/* An answer that counts on blocks: one stamp for all of them, and a mark on each. It holds until one
 * of the blocks is gone, or shared with a load that has begun. Others may end it too. */
uint64_t offload_manager_next_stamp(offload_manager *m);
void offload_manager_watch(offload_manager *m, const offload_key *key, uint64_t stamp);
void offload_manager_end_watch(offload_manager *m, const offload_key *key);
bool offload_manager_is_intact(const offload_manager *m, uint64_t stamp);

/* medium_ids: [n_keys], in key order; the blocks stay until complete_load. False and no change
 * unless all are loadable (OF4). */
PGD_MUST_USE bool offload_manager_prepare_load(int32_t *medium_ids, offload_manager *m,
                                               const offload_key *keys, int32_t n_keys);
/* generation: offload_manager_generation when it was prepared; of an older one it is ignored
 * (OF12). The keys must be those of one prepare_load. */
void offload_manager_complete_load(offload_manager *m, const offload_key *keys, int32_t n_keys,
                                   uint32_t generation);

/* Borrow until the next call that prepares. */
typedef struct offload_store {
    int32_t n_stored;
    const offload_key *stored; /* those that were absent, in key order */
    const int32_t *medium_ids; /* [n_stored] */
    int32_t n_evicted;
    const offload_key *evicted; /* lost their place to these */
} offload_store;

/* Makes room for the keys that are absent; never at the cost of keys of this call. False and no
 * change when there is not enough that can be evicted: later perhaps (OF6). */
PGD_MUST_USE bool offload_manager_prepare_store(offload_store *out, offload_manager *m,
                                                const offload_key *keys, int32_t n_keys);
/* Those of the keys that are being written become loadable, or (ok false) vanish; others are left
 * alone, so a superset does no harm (OF7). generation as above. */
void offload_manager_complete_store(offload_manager *m, const offload_key *keys, int32_t n_keys,
                                    bool ok, uint32_t generation);

/* Forgets everything; what is still under way completes into the void. Medium blocks are given out
 * again at once: the caller flushes transfers before the next store is carried out (OF12). */
void offload_manager_reset(offload_manager *m);
uint32_t offload_manager_generation(const offload_manager *m);

/* Up to max_keys loadable keys, in no order: a kv_tier_list_fn for kv_events_set_tier. */
int32_t offload_manager_list(offload_key *out, const void *m, int32_t max_keys, int32_t *cursor);

int32_t offload_manager_capacity(const offload_manager *m);
int32_t offload_manager_n_blocks(const offload_manager *m);    /* in use, being written included */
int32_t offload_manager_n_evictable(const offload_manager *m); /* ready and not being read */
uint64_t offload_manager_n_evicted(const offload_manager *m);
uint64_t offload_manager_n_forgotten(const offload_manager *m);
/* Where the key's block is or is to be; -1 = nowhere. */
int32_t offload_manager_get_id(const offload_manager *m, const offload_key *key);
/* What the medium block holds, or is to hold; NULL if it is free. Borrow until the next call. */
const offload_key *offload_manager_get_key(const offload_manager *m, int32_t medium_id);
const offload_policy *offload_manager_get_policy(const offload_manager *m);
/* Integrity of map, lists and numbers, O(capacity); aborts with the values on a fault. */
void offload_manager_check(const offload_manager *m);

#endif
