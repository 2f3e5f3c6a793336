/* The KV blocks of one replica: reference counts, the free queue, and the map from content hash to
 * block.
 *
 * A block is referenced, or it is in the free queue; a free block may still carry a hash (cached,
 * reusable by a prefix hit until it is handed out again). Block 0 is the null block: a placeholder
 * in tables that is never freed, cached or counted. Blocks with equal hashes are not merged (tables
 * are append-only); a lookup returns the newest copy. Blocks are published before the device has
 * written them: steps run in order, so whoever hits a block reads it after the step that writes it.
 * Owns:    its records; the only writer of reference counts
 * Limits:  2 <= n_blocks < 2^30; group ids 0 .. PGD_MAX_KV_GROUPS-1
 * Thread:  core
 * Source:  rules BP of the engine-core reference
 */
#ifndef ENGINE_KV_BLOCK_POOL_H
#define ENGINE_KV_BLOCK_POOL_H

#include "engine/kv/kv_events.h"
#include "engine/kv/kv_residency.h"

#define BLOCK_POOL_NULL 0

typedef struct block_pool block_pool;

/* Hears what becomes of blocks; must not call back. */
typedef struct block_listener {
    void *arg;
    void (*published)(void *arg, block_id id, const block_hash *hash, int32_t group_id);
    /* It can no longer be found, and its content is not to be kept. */
    void (*unpublished)(void *arg, block_id id);
    /* It was handed out, so what it held, published or not, will be overwritten from the step on that
     * is made now. */
    void (*reused)(void *arg, block_id id);
} block_listener;

/* n_blocks counts the null block. Errors: PGD_EINVAL, PGD_ENOMEM */
PGD_MUST_USE pgd_err block_pool_create(block_pool **out, int32_t n_blocks, bool enable_caching);
void block_pool_destroy(block_pool *p);
/* From now on tells when the last copy of a hash goes, and when all go. Borrow until destroy; NULL =
 * nobody. */
void block_pool_set_events(block_pool *p, kv_events *events);
/* From now on notes what comes of blocks. Borrow until destroy; NULL = nobody. */
void block_pool_set_residency(block_pool *p, kv_residency *residency);
/* From now on tells of blocks. Borrow until destroy; NULL = nobody. */
void block_pool_set_listener(block_pool *p, const block_listener *listener);

/* Takes n blocks from the front of the free queue, reference count 1, without hash. Refusal (false,
 * no change) when fewer are free. */
PGD_MUST_USE bool block_pool_get_new(block_id *out, block_pool *p, int32_t n_blocks);
/* One more reference each; free ones leave the free queue. The null block is skipped. */
void block_pool_touch(block_pool *p, const block_id *ids, int32_t n_ids);
/* One reference less each, first = evicted first. Those that reach 0 return to the queue: hashed
 * ones at the back, others (all, with caching off) at the front, order kept. The null block is
 * skipped. */
void block_pool_free(block_pool *p, const block_id *ids, int32_t n_ids);

/* Makes the referenced block findable. A block that already has a hash must have this one. Caching
 * must be on. */
void block_pool_publish(block_pool *p, block_id id, const block_hash *hash, int32_t group_id);
/* Makes the blocks unfindable; their references stay. Blocks without a hash are skipped. */
void block_pool_unpublish(block_pool *p, const block_id *ids, int32_t n_ids);
/* The newest block with that content; -1 when there is none. */
block_id block_pool_lookup(const block_pool *p, const block_hash *hash, int32_t group_id);
/* Hints for what comes soon: the block's record; the place of a key, and, once that has arrived, the
 * block that stands there. */
void block_pool_prefetch(const block_pool *p, block_id id);
void block_pool_prefetch_key(const block_pool *p, const block_hash *hash, int32_t group_id);
void block_pool_prefetch_found(const block_pool *p, const block_hash *hash, int32_t group_id);
/* One block per group: false (out undefined) unless every group has the content. out: [n_groups] */
bool block_pool_lookup_groups(block_id *out, const block_pool *p, const block_hash *hash,
                              const int32_t *group_ids, int32_t n_groups);
/* Forgets every hash; references stay. Told as one event. */
void block_pool_forget_cache(block_pool *p);

int32_t block_pool_n_blocks(const block_pool *p); /* null block included */
int32_t block_pool_n_free(const block_pool *p);
int32_t block_pool_n_free_cached(const block_pool *p); /* of the free ones, those with a hash */
int32_t block_pool_n_published(const block_pool *p);   /* blocks with a hash, free or not */
int32_t block_pool_n_copies(const block_pool *p, const block_hash *hash, int32_t group_id);
int32_t block_pool_ref_count(const block_pool *p, block_id id);
/* Borrow until the block loses its hash; NULL when it has none. */
const block_hash *block_pool_get_hash(const block_pool *p, block_id id);
/* Group of the block's hash; -1 when it has none. */
int32_t block_pool_get_group(const block_pool *p, block_id id);
/* Eviction order: id = -1 gives the front, -1 is returned at the end. */
block_id block_pool_next_free(const block_pool *p, block_id id);
/* Integrity of queue, counts and map, O(n); aborts with the values on a fault. */
void block_pool_check(const block_pool *p);

#endif
