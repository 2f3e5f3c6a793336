/* A ring of bytes: records of whole 8-byte words behind one another, each with its size in front; a
 * record that does not fit before the end leaves a size of 0 there and starts over at the front.
 * Positions count bytes for ever; the writer owns `written`, the reader `taken`.
 *
 * The snapshot walks the block ids, then what the tiers list, a few in each step, as long as half of the
 * ring is free. Since
 * its pieces and the events share the ring, the order is right by itself: what changes behind the
 * walk is told by events, what changes before it is seen when the walk comes there. Until the end of the
 * walk every copy of a hash is told, not only the first: the first may lie before the walk and go. */
#include "engine/kv/kv_events.h"

#include <stdatomic.h>
#include <string.h>

#include "common/mem.h"
#include "engine/kv/block_pool.h"
#include "engine/kv/kv_group_ops.h"
#include "engine/offload/offload_policy.h"

/* Hashes of one record, and blocks that one piece of a snapshot looks at. */
#define MAX_HASHES  64
#define PUMP_BLOCKS 256
#define NO_SNAPSHOT (-1)

typedef struct record {
    uint32_t n_bytes; /* in all, a multiple of 8; 0: go on at the front */
    uint32_t kind;
    uint64_t seq;
    int32_t group_id;
    int32_t n_hashes; /* the parent not counted */
    int32_t has_parent;
    int32_t n_tokens;
    uint32_t medium;
    uint32_t reserved;
    uint64_t extra_bytes;
    /* then: parent, hashes, tokens, extra */
} record;

typedef struct tier {
    kv_tier_list_fn list; /* NULL: there is none */
    const void *arg;
} tier;

struct kv_events {
    uint8_t *bytes; /* [capacity] */
    uint64_t capacity;
    atomic_uint_fast64_t written;
    atomic_uint_fast64_t taken;
    atomic_uint_fast64_t n_dropped;
    atomic_bool is_lost;
    atomic_bool is_snapshot_wanted;
    /* reader */
    uint64_t n_peeked_bytes;
    /* writer */
    uint64_t next_seq;
    int32_t walked;   /* medium that the snapshot is at, NO_SNAPSHOT */
    int32_t walk_end; /* the one behind its last */
    int32_t cursor;   /* next block or position in it */
    tier tiers[KV_N_MEDIA];
    kv_group_spec groups[PGD_MAX_KV_GROUPS];
};

const char *kv_medium_name(kv_medium medium)
{
    static const char *const names[KV_N_MEDIA] = {"GPU", "CPU", "DISK"};
    return names[medium];
}

pgd_err kv_events_create(kv_events **out, size_t capacity_bytes)
{
    *out = NULL;
    if (capacity_bytes < KV_EVENTS_MIN_BYTES || capacity_bytes > ((size_t)1 << 40))
        return PGD_EINVAL;
    kv_events *e = mem_calloc(1, sizeof *e);
    if (e == NULL)
        return PGD_ENOMEM;
    e->walked = NO_SNAPSHOT;
    e->capacity = KV_EVENTS_MIN_BYTES;
    while (e->capacity < capacity_bytes)
        e->capacity *= 2;
    e->bytes = mem_alloc((size_t)e->capacity);
    if (e->bytes == NULL) {
        kv_events_destroy(e);
        return PGD_ENOMEM;
    }
    *out = e;
    return PGD_OK;
}

void kv_events_destroy(kv_events *e)
{
    if (e == NULL)
        return;
    mem_free(e->bytes);
    mem_free(e);
}

/* --- writing ---------------------------------------------------------------------------------- */

/* A record of one block must fit with room to spare. */
pgd_err kv_events_set_groups(kv_events *e, const kv_group_spec *specs, int32_t n_groups)
{
    PGD_ASSERTF(n_groups >= 1 && n_groups <= PGD_MAX_KV_GROUPS, "%d groups", n_groups);
    memcpy(e->groups, specs, (size_t)n_groups * sizeof *specs);
    for (int32_t g = 0; g < n_groups; g++) {
        if ((uint64_t)specs[g].block_size * sizeof(token_id) > e->capacity / 4)
            return PGD_EINVAL;
    }
    return PGD_OK;
}

static uint64_t n_free_bytes(kv_events *e)
{
    return e->capacity - (atomic_load_explicit(&e->written, memory_order_relaxed) -
                          atomic_load_explicit(&e->taken, memory_order_acquire));
}

/* Where a record of n bytes goes, NULL when the ring is full. */
static record *reserve(kv_events *e, uint64_t n_bytes)
{
    uint64_t written = atomic_load_explicit(&e->written, memory_order_relaxed);
    uint64_t offset = written & (e->capacity - 1);
    uint64_t n_skipped = offset + n_bytes > e->capacity ? e->capacity - offset : 0;
    if (n_bytes > e->capacity / 2 || n_bytes + n_skipped > n_free_bytes(e))
        return NULL;
    if (n_skipped > 0) {
        ((record *)(void *)(e->bytes + offset))->n_bytes = 0;
        atomic_store_explicit(&e->written, written + n_skipped, memory_order_release);
        offset = 0;
    }
    return (record *)(void *)(e->bytes + offset);
}

static void *append(void *to, const void *from, size_t n_bytes)
{
    if (n_bytes > 0)
        memcpy(to, from, n_bytes);
    return (uint8_t *)to + n_bytes;
}

/* Writes the record, whose hashes are every `stride`th of those given. False: there is no room. */
static bool write_record(kv_events *e, record head, const block_hash *parent,
                         const block_hash *hashes, int32_t stride, const token_id *tokens,
                         const void *extra)
{
    uint64_t n_bytes = sizeof head + (uint64_t)head.extra_bytes +
                       (uint64_t)(head.n_hashes + head.has_parent) * sizeof *hashes +
                       (uint64_t)head.n_tokens * sizeof *tokens;
    n_bytes = (n_bytes + 7) / 8 * 8;
    record *r = reserve(e, n_bytes);
    if (r == NULL)
        return false;
    head.n_bytes = (uint32_t)n_bytes;
    head.seq = e->next_seq;
    void *end = append(r, &head, sizeof head);
    if (head.has_parent)
        end = append(end, parent, sizeof *parent);
    for (int32_t i = 0; i < head.n_hashes; i++)
        end = append(end, &hashes[(size_t)i * (size_t)stride], sizeof *hashes);
    end = append(end, tokens, (size_t)head.n_tokens * sizeof *tokens);
    append(end, extra, (size_t)head.extra_bytes);
    atomic_store_explicit(&e->written,
                          atomic_load_explicit(&e->written, memory_order_relaxed) + n_bytes,
                          memory_order_release);
    return true;
}

/* An event of the stream: dropped when there is no room, and from then on. */
static void write_event(kv_events *e, record head, const block_hash *parent,
                        const block_hash *hashes, int32_t stride, const token_id *tokens,
                        const void *extra)
{
    bool is_lost = atomic_load_explicit(&e->is_lost, memory_order_relaxed);
    if (is_lost || !write_record(e, head, parent, hashes, stride, tokens, extra)) {
        atomic_fetch_add_explicit(&e->n_dropped, 1, memory_order_relaxed);
        atomic_store_explicit(&e->is_lost, true, memory_order_release);
        e->walked = NO_SNAPSHOT;
    }
    e->next_seq++;
}

/* Blocks that go into one record. */
static int32_t n_hashes_per_record(const kv_events *e, int32_t block_size)
{
    uint64_t n_block_bytes = sizeof(block_hash) + (uint64_t)block_size * sizeof(token_id);
    uint64_t n = e->capacity / 8 / n_block_bytes;
    return (int32_t)PGD_MAX(PGD_MIN(n, (uint64_t)MAX_HASHES), (uint64_t)1);
}

void kv_events_stored(kv_events *e, const kv_stored *what)
{
    int32_t bs = e->groups[what->group_id].block_size;
    int32_t stride = what->hashes_per_block;
    int32_t n_most = n_hashes_per_record(e, bs);
    for (int32_t i = what->first; i < what->end; i += n_most) {
        int32_t n = PGD_MIN(n_most, what->end - i);
        const block_hash *last = &what->hashes[(size_t)(i + 1) * (size_t)stride - 1];
        record head = {.kind = KV_CACHE_STORED,
                       .group_id = what->group_id,
                       .n_hashes = n,
                       .has_parent = i > 0,
                       .n_tokens = n * bs,
                       .extra_bytes = i == 0 ? what->extra_bytes : 0};
        write_event(e, head, i > 0 ? last - stride : NULL, last, stride,
                    what->tokens + (size_t)i * (size_t)bs, what->extra);
    }
}

void kv_events_removed(kv_events *e, int32_t group_id, const block_hash *hash)
{
    record head = {.kind = KV_CACHE_REMOVED, .group_id = group_id, .n_hashes = 1};
    write_event(e, head, NULL, hash, 1, NULL, NULL);
}

void kv_events_cleared(kv_events *e, kv_medium medium)
{
    record head = {.kind = KV_CACHE_CLEARED, .group_id = -1, .medium = medium};
    write_event(e, head, NULL, NULL, 0, NULL, NULL);
}

/* Hashes that are told together: of one group, without tokens. */
typedef struct piece {
    record head;
    block_hash hashes[MAX_HASHES];
} piece;

static void write_piece(kv_events *e, piece *p)
{
    if (p->head.n_hashes > 0)
        write_event(e, p->head, NULL, p->hashes, 1, NULL, NULL);
    p->head.n_hashes = 0;
}

static void add_to_piece(kv_events *e, piece *p, int32_t group_id, const block_hash *hash)
{
    if (group_id != p->head.group_id || p->head.n_hashes == MAX_HASHES)
        write_piece(e, p);
    p->head.group_id = group_id;
    p->hashes[p->head.n_hashes++] = *hash;
}

static void tell_keys(kv_events *e, kv_cache_event_kind kind, kv_medium medium,
                      const offload_key *keys, int32_t n_keys)
{
    piece p;
    p.head = (record){.kind = kind, .medium = medium};
    for (int32_t i = 0; i < n_keys; i++)
        add_to_piece(e, &p, keys[i].group_id, &keys[i].hash);
    write_piece(e, &p);
}

void kv_events_tier_stored(kv_events *e, kv_medium medium, const offload_key *keys, int32_t n_keys)
{
    tell_keys(e, KV_CACHE_STORED, medium, keys, n_keys);
}

void kv_events_tier_removed(kv_events *e, kv_medium medium, const offload_key *keys, int32_t n_keys)
{
    tell_keys(e, KV_CACHE_REMOVED, medium, keys, n_keys);
}

void kv_events_set_tier(kv_events *e, kv_medium medium, kv_tier_list_fn list, const void *arg)
{
    PGD_ASSERTF(medium > KV_MEDIUM_DEVICE && medium < KV_N_MEDIA, "medium %d is no tier", medium);
    e->tiers[medium] = (tier){list, arg};
}

bool kv_events_is_in_snapshot(const kv_events *e)
{
    return e->walked != NO_SNAPSHOT;
}

static void begin_walk(kv_events *e, int32_t first, int32_t end, kv_medium forgotten)
{
    record head = {.kind = KV_CACHE_SNAPSHOT_BEGIN, .group_id = -1, .medium = forgotten};
    e->walked = first;
    e->walk_end = end;
    e->cursor = 0;
    write_event(e, head, NULL, NULL, 0, NULL, NULL);
}

bool kv_events_walk_tier(kv_events *e, kv_medium medium)
{
    if (e->walked != NO_SNAPSHOT)
        return false;
    begin_walk(e, (int32_t)medium, (int32_t)medium + 1, medium);
    return true;
}

static void begin_snapshot(kv_events *e)
{
    atomic_store_explicit(&e->is_snapshot_wanted, false, memory_order_relaxed);
    atomic_store_explicit(&e->is_lost, false, memory_order_release);
    begin_walk(e, KV_MEDIUM_DEVICE, KV_N_MEDIA, KV_N_MEDIA);
}

/* Blocks of the pool from the cursor on. False: that was the last one. */
static bool walk_pool(kv_events *e, const block_pool *pool, piece *p)
{
    int32_t end = PGD_MIN(e->cursor + PUMP_BLOCKS, block_pool_n_blocks(pool));
    for (block_id id = e->cursor; id < end; id++) {
        const block_hash *hash = block_pool_get_hash(pool, id);
        if (hash != NULL)
            add_to_piece(e, p, block_pool_get_group(pool, id), hash);
    }
    e->cursor = end;
    return end < block_pool_n_blocks(pool);
}

static bool walk_tier(kv_events *e, const tier *t, piece *p)
{
    offload_key keys[PUMP_BLOCKS];
    if (t->list == NULL)
        return false;
    int32_t n_keys = t->list(keys, t->arg, PUMP_BLOCKS, &e->cursor);
    for (int32_t i = 0; i < n_keys; i++)
        add_to_piece(e, p, keys[i].group_id, &keys[i].hash);
    return e->cursor >= 0;
}

void kv_events_pump(kv_events *e, const block_pool *pool)
{
    bool is_wanted = atomic_load_explicit(&e->is_snapshot_wanted, memory_order_acquire);
    if ((!is_wanted && e->walked == NO_SNAPSHOT) || n_free_bytes(e) < e->capacity / 2)
        return;
    if (is_wanted)
        begin_snapshot(e);
    piece p;
    int32_t medium = e->walked;
    p.head = (record){.kind = KV_CACHE_STORED, .medium = (uint32_t)medium};
    bool is_more =
        medium == KV_MEDIUM_DEVICE ? walk_pool(e, pool, &p) : walk_tier(e, &e->tiers[medium], &p);
    write_piece(e, &p);
    if (is_more || e->walked == NO_SNAPSHOT)
        return; /* the rest comes later, or all was lost again on the way */
    e->walked++;
    e->cursor = 0;
    if (e->walked == e->walk_end) {
        record head = {.kind = KV_CACHE_SNAPSHOT_END, .group_id = -1};
        write_event(e, head, NULL, NULL, 0, NULL, NULL);
        e->walked = NO_SNAPSHOT;
    }
}

/* --- reading ---------------------------------------------------------------------------------- */

bool kv_events_peek(kv_cache_event *out, kv_events *e)
{
    uint64_t taken = atomic_load_explicit(&e->taken, memory_order_relaxed);
    uint64_t written = atomic_load_explicit(&e->written, memory_order_acquire);
    const record *r = (const record *)(const void *)(e->bytes + (taken & (e->capacity - 1)));
    if (taken != written && r->n_bytes == 0) {
        taken = (taken / e->capacity + 1) * e->capacity;
        atomic_store_explicit(&e->taken, taken, memory_order_release);
        r = (const record *)(const void *)e->bytes;
    }
    if (taken == written)
        return false;
    const kv_group_spec *spec = r->group_id >= 0 ? &e->groups[r->group_id] : NULL;
    const block_hash *parent = (const block_hash *)(const void *)(r + 1);
    const block_hash *hashes = parent + r->has_parent;
    const token_id *tokens = (const token_id *)(const void *)(hashes + r->n_hashes);
    *out = (kv_cache_event){.seq = r->seq,
                            .kind = (kv_cache_event_kind)r->kind,
                            .medium = (kv_medium)r->medium,
                            .group_id = r->group_id};
    e->n_peeked_bytes = r->n_bytes;
    if (spec == NULL)
        return true;
    out->n_hashes = r->n_hashes;
    out->hashes = hashes;
    if (out->kind != KV_CACHE_STORED)
        return true;
    out->attention = spec->ops->name;
    out->window = spec->window;
    out->block_size = spec->block_size;
    out->parent = r->has_parent ? parent : NULL;
    out->n_tokens = r->n_tokens;
    out->tokens = r->n_tokens > 0 ? tokens : NULL;
    out->extra_bytes = (size_t)r->extra_bytes;
    out->extra = r->extra_bytes > 0 ? tokens + r->n_tokens : NULL;
    return true;
}

void kv_events_pop(kv_events *e)
{
    PGD_ASSERTF(e->n_peeked_bytes > 0, "no event was looked at");
    uint64_t taken = atomic_load_explicit(&e->taken, memory_order_relaxed);
    atomic_store_explicit(&e->taken, taken + e->n_peeked_bytes, memory_order_release);
    e->n_peeked_bytes = 0;
}

bool kv_events_is_lost(const kv_events *e)
{
    return atomic_load_explicit(&((kv_events *)e)->is_lost, memory_order_acquire);
}

void kv_events_request_snapshot(kv_events *e)
{
    atomic_store_explicit(&e->is_snapshot_wanted, true, memory_order_release);
}

uint64_t kv_events_n_dropped(const kv_events *e)
{
    return atomic_load_explicit(&((kv_events *)e)->n_dropped, memory_order_relaxed);
}

bool kv_events_is_empty(const kv_events *e)
{
    return atomic_load_explicit(&((kv_events *)e)->written, memory_order_acquire) ==
           atomic_load_explicit(&((kv_events *)e)->taken, memory_order_acquire);
}
