/* Records in one array, one to a line of the cache: with the links of the free queue and those of a
 * chained hash table inside. What is far apart in memory is asked for before it is needed: the blocks
 * that will be taken next with their places in the table, and the blocks of a prefix.
 *
 * Invariant: every block but the null block is in the free queue exactly when its reference count
 * is 0; a block is in the chain of its key exactly when group_id >= 0. Every copy of a hash is its
 * own node of the chain, newest first, so publishing and un-publishing are O(1) however many
 * duplicates there are. The table is at most half full; the index comes straight from the SHA-256
 * bytes, which nobody outside can steer because the chain starts at a secret seed. */
#include "engine/kv/block_pool.h"

#include <string.h>

#include "common/mem.h"
#include "engine/kv/block_queue.h"

/* One line of the cache: whoever finds, takes or frees a block waits for memory once. */
typedef struct block_record {
    _Alignas(64) block_queue_link link;
    block_hash hash;
    int32_t group_id; /* -1 = no hash */
    int32_t n_refs;
    block_id chain_prev; /* -1 = first of its chain */
    block_id chain_next; /* -1 = last */
} block_record;

static_assert(sizeof(block_record) == 64, "one line of the cache");

/* How many blocks ahead of its work a loop asks for their memory. */
#define PREFETCH 8

struct block_pool {
    block_record *blocks; /* [n_blocks + 1], the last one is the queue's */
    size_t blocks_bytes;
    int32_t n_blocks;
    bool enable_caching;
    block_queue free_queue;
    block_id *buckets; /* [n_buckets], first block of the chain or -1 */
    size_t buckets_bytes;
    uint64_t bucket_mask;
    int32_t n_published;
    int32_t n_free_cached;
    kv_events *events;       /* NULL = nobody asked */
    kv_residency *residency; /* NULL = nobody asked */
    const block_listener *listener;
};

pgd_err block_pool_create(block_pool **out, int32_t n_blocks, bool enable_caching)
{
    *out = NULL;
    if (n_blocks < 2 || n_blocks >= (1 << 30))
        return PGD_EINVAL;
    block_pool *p = mem_calloc(1, sizeof *p);
    if (p == NULL)
        return PGD_ENOMEM;
    p->n_blocks = n_blocks;
    p->enable_caching = enable_caching;
    size_t n_buckets = 1;
    while (enable_caching && n_buckets < 2 * (size_t)n_blocks)
        n_buckets *= 2;
    p->bucket_mask = n_buckets - 1;
    p->blocks_bytes = ((size_t)n_blocks + 1) * sizeof *p->blocks;
    p->buckets_bytes = n_buckets * sizeof *p->buckets;
    p->blocks = mem_alloc_aligned(p->blocks_bytes, _Alignof(block_record));
    p->buckets = mem_alloc_aligned(p->buckets_bytes, 64);
    if (p->blocks == NULL || p->buckets == NULL ||
        block_queue_init(&p->free_queue, &p->blocks[0].link, sizeof *p->blocks, n_blocks) !=
            PGD_OK) {
        block_pool_destroy(p);
        return PGD_ENOMEM;
    }
    for (size_t i = 0; i < n_buckets; i++)
        p->buckets[i] = -1;
    for (int32_t i = 0; i < n_blocks; i++) {
        p->blocks[i].group_id = -1;
        p->blocks[i].chain_prev = -1;
        p->blocks[i].chain_next = -1;
        if (i != BLOCK_POOL_NULL)
            block_queue_append(&p->free_queue, i);
    }
    *out = p;
    return PGD_OK;
}

void block_pool_destroy(block_pool *p)
{
    if (p == NULL)
        return;
    mem_free_aligned(p->blocks, p->blocks_bytes);
    mem_free_aligned(p->buckets, p->buckets_bytes);
    mem_free(p);
}

void block_pool_set_events(block_pool *p, kv_events *events)
{
    p->events = events;
}

void block_pool_set_residency(block_pool *p, kv_residency *residency)
{
    p->residency = residency;
}

void block_pool_set_listener(block_pool *p, const block_listener *listener)
{
    p->listener = listener;
}

static block_record *record_of(const block_pool *p, block_id id)
{
    PGD_ASSERTF(id >= 0 && id < p->n_blocks, "block id %d outside 0..%d", id, p->n_blocks - 1);
    return &p->blocks[id];
}

static_assert(PGD_MAX_KV_GROUPS <= 8, "the groups of a hash share a line of the cache");

/* Groups publish and look up the same hashes at the same time: theirs lie side by side. */
static size_t bucket_of(const block_pool *p, const block_hash *hash, int32_t group_id)
{
    uint64_t word;
    memcpy(&word, hash->bytes, sizeof word);
    return (size_t)(((word & ~(uint64_t)7) | ((word + (uint64_t)group_id) & 7)) & p->bucket_mask);
}

static bool has_key(const block_record *b, const block_hash *hash, int32_t group_id)
{
    return b->group_id == group_id && memcmp(b->hash.bytes, hash->bytes, sizeof hash->bytes) == 0;
}

static void unlink_hash(block_pool *p, block_id id)
{
    block_record *b = &p->blocks[id];
    if (b->chain_prev >= 0)
        p->blocks[b->chain_prev].chain_next = b->chain_next;
    else
        p->buckets[bucket_of(p, &b->hash, b->group_id)] = b->chain_next;
    if (b->chain_next >= 0)
        p->blocks[b->chain_next].chain_prev = b->chain_prev;
    int32_t group_id = b->group_id;
    b->chain_prev = -1;
    b->chain_next = -1;
    b->group_id = -1;
    p->n_published--;
    if (b->n_refs == 0)
        p->n_free_cached--;
    if (p->events != NULL && block_pool_lookup(p, &b->hash, group_id) < 0)
        kv_events_removed(p->events, group_id, &b->hash);
}

/* After a block was taken: see block_queue_look_ahead. */
static void look_ahead(block_pool *p, block_id taken)
{
    block_id id = block_queue_look_ahead(&p->free_queue, taken);
    const block_record *b = id >= 0 ? &p->blocks[id] : NULL;
    if (b == NULL || b->group_id < 0)
        return;
    if (b->chain_prev >= 0)
        PGD_PREFETCH(&p->blocks[b->chain_prev]);
    else
        PGD_PREFETCH(&p->buckets[bucket_of(p, &b->hash, b->group_id)]);
    if (b->chain_next >= 0)
        PGD_PREFETCH(&p->blocks[b->chain_next]);
}

bool block_pool_get_new(block_id *out, block_pool *p, int32_t n_blocks)
{
    PGD_ASSERTF(n_blocks >= 0, "expected a count >= 0, got %d", n_blocks);
    if (n_blocks > p->free_queue.n_blocks)
        return false;
    for (int32_t i = 0; i < n_blocks; i++) {
        block_id id = block_queue_pop(&p->free_queue);
        out[i] = id;
        look_ahead(p, id);
        block_record *b = &p->blocks[id];
        PGD_ASSERTF(b->n_refs == 0, "free block %d has %d references", id, b->n_refs);
        if (b->group_id >= 0) {
            if (p->residency != NULL)
                kv_residency_note_evicted(p->residency, id);
            unlink_hash(p, id);
        }
        b->n_refs = 1;
    }
    for (int32_t i = 0; p->listener != NULL && i < n_blocks; i++)
        p->listener->reused(p->listener->arg, out[i]);
    if (p->residency != NULL)
        kv_residency_note_given(p->residency, out, n_blocks);
    return true;
}

/* Blocks that loops over ids will touch after the i-th: themselves, then what stands beside them in
 * the free queue. */
static void prefetch_neighbours(const block_pool *p, const block_id *ids, int32_t i, int32_t n_ids)
{
    if (i + 2 * PREFETCH < n_ids)
        PGD_PREFETCH(record_of(p, ids[i + 2 * PREFETCH]));
    if (i + PREFETCH < n_ids) {
        const block_record *b = record_of(p, ids[i + PREFETCH]);
        if (b->link.next >= 0) {
            PGD_PREFETCH(&p->blocks[b->link.prev]);
            PGD_PREFETCH(&p->blocks[b->link.next]);
        }
    }
}

void block_pool_touch(block_pool *p, const block_id *ids, int32_t n_ids)
{
    for (int32_t i = 0; i < n_ids; i++) {
        prefetch_neighbours(p, ids, i, n_ids);
        if (ids[i] == BLOCK_POOL_NULL)
            continue;
        block_record *b = record_of(p, ids[i]);
        if (b->n_refs == 0) {
            block_queue_remove(&p->free_queue, ids[i]);
            if (b->group_id >= 0)
                p->n_free_cached--;
        }
        b->n_refs++;
    }
    if (p->residency != NULL)
        kv_residency_note_used(p->residency, ids, n_ids);
}

void block_pool_free(block_pool *p, const block_id *ids, int32_t n_ids)
{
    block_id last_front = -1;
    for (int32_t i = 0; i < n_ids; i++) {
        if (i + PREFETCH < n_ids)
            PGD_PREFETCH(record_of(p, ids[i + PREFETCH]));
        if (ids[i] == BLOCK_POOL_NULL)
            continue;
        block_record *b = record_of(p, ids[i]);
        PGD_ASSERTF(b->n_refs > 0, "block %d freed with %d references", ids[i], b->n_refs);
        if (--b->n_refs > 0)
            continue;
        if (b->group_id >= 0) {
            block_queue_append(&p->free_queue, ids[i]);
            p->n_free_cached++;
        } else {
            block_queue_insert(&p->free_queue, ids[i], last_front);
            last_front = ids[i];
        }
    }
}

void block_pool_publish(block_pool *p, block_id id, const block_hash *hash, int32_t group_id)
{
    block_record *b = record_of(p, id);
    PGD_ASSERTF(p->enable_caching && id != BLOCK_POOL_NULL && b->n_refs > 0,
                "block %d with %d references cannot be published (caching %d)", id, b->n_refs,
                p->enable_caching);
    PGD_ASSERTF(group_id >= 0 && group_id < PGD_MAX_KV_GROUPS, "group id %d outside 0..%d",
                group_id, PGD_MAX_KV_GROUPS - 1);
    if (b->group_id >= 0) {
        PGD_ASSERTF(has_key(b, hash, group_id), "block %d of group %d already holds other content",
                    id, b->group_id);
        return;
    }
    block_id *first = &p->buckets[bucket_of(p, hash, group_id)];
    b->hash = *hash;
    b->group_id = group_id;
    b->chain_prev = -1;
    b->chain_next = *first;
    if (*first >= 0)
        p->blocks[*first].chain_prev = id;
    *first = id;
    p->n_published++;
    if (p->listener != NULL)
        p->listener->published(p->listener->arg, id, hash, group_id);
}

/* Not for a block that is handed out again: what it held is right. */
static void forget(block_pool *p, block_id id)
{
    unlink_hash(p, id);
    if (p->listener != NULL)
        p->listener->unpublished(p->listener->arg, id);
}

void block_pool_unpublish(block_pool *p, const block_id *ids, int32_t n_ids)
{
    for (int32_t i = 0; i < n_ids; i++) {
        if (record_of(p, ids[i])->group_id >= 0)
            forget(p, ids[i]);
    }
}

block_id block_pool_lookup(const block_pool *p, const block_hash *hash, int32_t group_id)
{
    block_id id = p->buckets[bucket_of(p, hash, group_id)];
    while (id >= 0 && !has_key(&p->blocks[id], hash, group_id))
        id = p->blocks[id].chain_next;
    return id;
}

void block_pool_prefetch(const block_pool *p, block_id id)
{
    PGD_PREFETCH(record_of(p, id));
}

void block_pool_prefetch_key(const block_pool *p, const block_hash *hash, int32_t group_id)
{
    PGD_PREFETCH(&p->buckets[bucket_of(p, hash, group_id)]);
}

void block_pool_prefetch_found(const block_pool *p, const block_hash *hash, int32_t group_id)
{
    block_id id = p->buckets[bucket_of(p, hash, group_id)];
    if (id >= 0)
        PGD_PREFETCH(&p->blocks[id]);
}

bool block_pool_lookup_groups(block_id *out, const block_pool *p, const block_hash *hash,
                              const int32_t *group_ids, int32_t n_groups)
{
    for (int32_t g = 0; g < n_groups; g++) {
        out[g] = block_pool_lookup(p, hash, group_ids[g]);
        if (out[g] < 0)
            return false;
    }
    return true;
}

void block_pool_forget_cache(block_pool *p)
{
    kv_events *events = p->events;
    p->events = NULL; /* told at once, not one by one */
    for (int32_t i = 0; i < p->n_blocks; i++) {
        if (p->blocks[i].group_id >= 0)
            forget(p, i);
    }
    p->events = events;
    if (events != NULL)
        kv_events_cleared(events, KV_MEDIUM_DEVICE);
}

int32_t block_pool_n_blocks(const block_pool *p)
{
    return p->n_blocks;
}

int32_t block_pool_n_free(const block_pool *p)
{
    return p->free_queue.n_blocks;
}

int32_t block_pool_n_free_cached(const block_pool *p)
{
    return p->n_free_cached;
}

int32_t block_pool_n_published(const block_pool *p)
{
    return p->n_published;
}

int32_t block_pool_n_copies(const block_pool *p, const block_hash *hash, int32_t group_id)
{
    int32_t n_copies = 0;
    for (block_id id = p->buckets[bucket_of(p, hash, group_id)]; id >= 0;
         id = p->blocks[id].chain_next)
        n_copies += has_key(&p->blocks[id], hash, group_id);
    return n_copies;
}

int32_t block_pool_ref_count(const block_pool *p, block_id id)
{
    return record_of(p, id)->n_refs;
}

const block_hash *block_pool_get_hash(const block_pool *p, block_id id)
{
    const block_record *b = record_of(p, id);
    return b->group_id >= 0 ? &b->hash : NULL;
}

int32_t block_pool_get_group(const block_pool *p, block_id id)
{
    return record_of(p, id)->group_id;
}

block_id block_pool_next_free(const block_pool *p, block_id id)
{
    return block_queue_next(&p->free_queue, id);
}

void block_pool_check(const block_pool *p)
{
    int32_t n_free = 0;
    int32_t n_free_cached = 0;
    int32_t n_published = 0;
    for (block_id id = 0; id < p->n_blocks; id++) {
        const block_record *b = &p->blocks[id];
        bool is_free = block_queue_contains(&p->free_queue, id);
        PGD_ASSERTF(is_free == (id != BLOCK_POOL_NULL && b->n_refs == 0),
                    "block %d has %d references and is%s in the free queue", id, b->n_refs,
                    is_free ? "" : " not");
        n_free += is_free;
        if (b->group_id < 0)
            continue;
        PGD_ASSERTF(id != BLOCK_POOL_NULL, "the null block is published in group %d", b->group_id);
        n_published++;
        n_free_cached += is_free;
        block_id found = p->buckets[bucket_of(p, &b->hash, b->group_id)];
        while (found >= 0 && found != id)
            found = p->blocks[found].chain_next;
        PGD_ASSERTF(found == id, "published block %d is not in the chain of its hash", id);
    }
    PGD_ASSERTF(n_free == p->free_queue.n_blocks && n_free_cached == p->n_free_cached &&
                    n_published == p->n_published,
                "counted %d free, %d free cached, %d published; kept %d, %d, %d", n_free,
                n_free_cached, n_published, p->free_queue.n_blocks, p->n_free_cached,
                p->n_published);
}
