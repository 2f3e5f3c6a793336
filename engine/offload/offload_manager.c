/* Entries are found by key through a table with linear probing; ghosts of the policy are found in
 * the same way, they merely have no medium block.
 *
 *   absent ──prepare_store──► written (ref -1) ──complete──► ready (0) ◄──complete── read (n)
 *      ▲                          │ failed           │ evicted      └──prepare_load──────┘
 *      └──────────────────────────┴──────────────────┘
 *
 * Medium blocks are numbered upwards while they were never used, then the last one freed comes
 * first: what was written last is the likeliest to be in a cache. */
#include "engine/offload/offload_manager.h"

#include <string.h>

#include "common/hash.h"
#include "common/mem.h"

enum { MAX_CAPACITY = 1 << 28 };

struct offload_manager {
    offload_manager_opts opts;
    offload_policy policy;
    int32_t n_entries;      /* room for blocks and ghosts */
    offload_entry *entries; /* [n_entries] */
    int32_t *free_entries;  /* stack */
    int32_t n_free_entries;
    uint32_t table_mask;
    int32_t *table;       /* [table_mask + 1] entry index + 1, 0 = empty */
    int32_t *free_blocks; /* [capacity], stack of medium ids */
    int32_t n_free_blocks;
    int32_t n_fresh_blocks; /* ids from here on were never given out */
    int32_t *entry_of;      /* [capacity] by medium id: entry index + 1, 0 = free */
    int32_t n_blocks;
    int32_t n_evictable;
    uint64_t n_evicted;
    uint64_t n_forgotten;
    uint64_t stamp;
    uint64_t lost; /* answers of this stamp or an older one do not hold */
    uint32_t generation;
    uint32_t protect_id;
    offload_key *stored;     /* [capacity], of the last prepare_store */
    int32_t *stored_ids;     /* [capacity] */
    offload_key *keys;       /* [capacity], evicted or completed ones */
    int32_t *ids;            /* [capacity], where they are or were */
    offload_entry **victims; /* [capacity] */
};

/* --- table ------------------------------------------------------------------------------------ */

static uint32_t home_of(const offload_manager *m, const offload_key *key)
{
    uint64_t bits;
    memcpy(&bits, key->hash.bytes, sizeof bits);
    return (uint32_t)hash_u64(bits + (uint64_t)key->group_id) & m->table_mask;
}

static bool is_equal(const offload_key *a, const offload_key *b)
{
    return a->group_id == b->group_id &&
           memcmp(a->hash.bytes, b->hash.bytes, sizeof a->hash.bytes) == 0;
}

/* Where the key is, or the empty place where it would go. */
static uint32_t find_place(const offload_manager *m, const offload_key *key)
{
    uint32_t at = home_of(m, key);
    while (m->table[at] != 0 && !is_equal(&m->entries[m->table[at] - 1].key, key))
        at = (at + 1) & m->table_mask;
    return at;
}

static offload_entry *find(const offload_manager *m, const offload_key *key)
{
    int32_t i = m->table[find_place(m, key)];
    return i != 0 ? &m->entries[i - 1] : NULL;
}

static offload_entry *find_block(const offload_manager *m, const offload_key *key)
{
    offload_entry *e = find(m, key);
    return e != NULL && e->medium_id >= 0 ? e : NULL;
}

static offload_entry *add_entry(offload_manager *m, const offload_key *key)
{
    uint32_t at = find_place(m, key);
    PGD_ASSERTF(m->table[at] == 0 && m->n_free_entries > 0, "%d of %d entries are free",
                m->n_free_entries, m->n_entries);
    int32_t i = m->free_entries[--m->n_free_entries];
    m->table[at] = i + 1;
    m->entries[i] = (offload_entry){.key = *key, .medium_id = -1, .list_idx = -1};
    return &m->entries[i];
}

/* Entries behind the hole move up when the hole lies between their home and them. */
static void release_entry(offload_manager *m, offload_entry *e)
{
    uint32_t hole = find_place(m, &e->key);
    m->free_entries[m->n_free_entries++] = m->table[hole] - 1;
    m->table[hole] = 0;
    for (uint32_t at = (hole + 1) & m->table_mask; m->table[at] != 0;
         at = (at + 1) & m->table_mask) {
        uint32_t home = home_of(m, &m->entries[m->table[at] - 1].key);
        if (((at - home) & m->table_mask) < ((at - hole) & m->table_mask))
            continue;
        m->table[hole] = m->table[at];
        m->table[at] = 0;
        hole = at;
    }
}

/* Nobody writes or reads it any more. */
static void make_ready(offload_manager *m, offload_entry *e)
{
    e->ref_count = 0;
    m->n_evictable++;
    offload_policy_note_ready(&m->policy, e);
}

static void set_block(offload_manager *m, offload_entry *e, int32_t medium_id)
{
    e->medium_id = medium_id;
    m->entry_of[medium_id] = (int32_t)(e - m->entries) + 1;
}

/* --- life ------------------------------------------------------------------------------------- */

static pgd_err create_arrays(offload_manager *m)
{
    size_t capacity = (size_t)m->opts.capacity, n_entries = (size_t)m->n_entries;
    size_t n_places = 1;
    while (n_places < 2 * n_entries)
        n_places *= 2;
    m->table_mask = (uint32_t)(n_places - 1);
    m->table = mem_calloc(n_places, sizeof *m->table);
    m->entries = mem_calloc(n_entries, sizeof *m->entries);
    m->free_entries = mem_calloc(n_entries, sizeof *m->free_entries);
    m->free_blocks = mem_calloc(capacity, sizeof *m->free_blocks);
    m->stored = mem_calloc(capacity, sizeof *m->stored);
    m->stored_ids = mem_calloc(capacity, sizeof *m->stored_ids);
    m->keys = mem_calloc(capacity, sizeof *m->keys);
    m->ids = mem_calloc(capacity, sizeof *m->ids);
    m->entry_of = mem_calloc(capacity, sizeof *m->entry_of);
    m->victims = mem_calloc(capacity, sizeof *m->victims);
    bool is_complete = m->table != NULL && m->entries != NULL && m->free_entries != NULL &&
                       m->free_blocks != NULL && m->stored != NULL && m->stored_ids != NULL &&
                       m->keys != NULL && m->ids != NULL && m->entry_of != NULL &&
                       m->victims != NULL;
    return is_complete ? PGD_OK : PGD_ENOMEM;
}

static void make_empty(offload_manager *m)
{
    memset(m->table, 0, ((size_t)m->table_mask + 1) * sizeof *m->table);
    for (m->n_free_entries = 0; m->n_free_entries < m->n_entries; m->n_free_entries++) {
        m->free_entries[m->n_free_entries] = m->n_entries - 1 - m->n_free_entries;
        m->entries[m->n_free_entries].medium_id = -1;
    }
    memset(m->entry_of, 0, (size_t)m->opts.capacity * sizeof *m->entry_of);
    m->lost = m->stamp;
    m->n_free_blocks = 0;
    m->n_fresh_blocks = 0;
    m->n_blocks = 0;
    m->n_evictable = 0;
    offload_policy_init(&m->policy, m->opts.policy, m->opts.capacity);
}

pgd_err offload_manager_create(offload_manager **out, const offload_manager_opts *opts)
{
    *out = NULL;
    if (opts->capacity < 1 || opts->capacity > MAX_CAPACITY || opts->policy == NULL)
        return PGD_EINVAL;
    offload_manager *m = mem_calloc(1, sizeof *m);
    if (m == NULL)
        return PGD_ENOMEM;
    m->opts = *opts;
    /* A ghost list may be one over its length for a moment. */
    m->n_entries = opts->policy->has_ghosts ? 3 * opts->capacity + 1 : opts->capacity;
    if (create_arrays(m) != PGD_OK) {
        offload_manager_destroy(m);
        return PGD_ENOMEM;
    }
    make_empty(m);
    *out = m;
    return PGD_OK;
}

void offload_manager_destroy(offload_manager *m)
{
    if (m == NULL)
        return;
    mem_free(m->table);
    mem_free(m->entries);
    mem_free(m->free_entries);
    mem_free(m->free_blocks);
    mem_free(m->stored);
    mem_free(m->stored_ids);
    mem_free(m->keys);
    mem_free(m->ids);
    mem_free(m->entry_of);
    mem_free(m->victims);
    mem_free(m);
}

void offload_manager_reset(offload_manager *m)
{
    make_empty(m);
    m->generation++;
    if (m->opts.on_reset != NULL)
        m->opts.on_reset(m->opts.arg);
}

/* Backwards, so that of two copies the more recent one is taken; then the taken ones go into the
 * policy's list in their order. */
void offload_manager_restore(offload_manager *m, const offload_key *keys, int32_t *medium_ids,
                             int32_t n_keys)
{
    PGD_ASSERTF(m->n_blocks == 0 && n_keys <= m->opts.capacity, "%d blocks, %d to restore",
                m->n_blocks, n_keys);
    make_empty(m); /* forgets ghosts and used ids */
    memset(m->victims, 0, (size_t)m->opts.capacity * sizeof *m->victims);
    for (int32_t i = n_keys - 1; i >= 0; i--) {
        int32_t id = medium_ids[i];
        PGD_ASSERTF(id >= 0 && id < m->opts.capacity && m->victims[id] == NULL,
                    "medium block %d of %d is restored, or twice", id, m->opts.capacity);
        if (find(m, &keys[i]) != NULL) {
            medium_ids[i] = -1;
            continue;
        }
        offload_entry *e = add_entry(m, &keys[i]);
        set_block(m, e, id);
        m->victims[id] = e;
        m->n_fresh_blocks = PGD_MAX(m->n_fresh_blocks, id + 1);
    }
    for (int32_t i = 0; i < n_keys; i++) {
        if (medium_ids[i] < 0)
            continue;
        m->policy.ops->insert(&m->policy, m->victims[medium_ids[i]]);
        m->n_blocks++;
        m->n_evictable++;
    }
    for (int32_t id = m->n_fresh_blocks - 1; id >= 0; id--)
        if (m->victims[id] == NULL)
            m->free_blocks[m->n_free_blocks++] = id;
}

/* --- lookup and load -------------------------------------------------------------------------- */

offload_lookup offload_manager_lookup(const offload_manager *m, const offload_key *key)
{
    const offload_entry *e = find_block(m, key);
    if (e == NULL || e->is_doomed)
        return OFFLOAD_MISS;
    return e->ref_count < 0 ? OFFLOAD_PENDING : OFFLOAD_HIT;
}

void offload_manager_touch(offload_manager *m, const offload_key *keys, int32_t n_keys)
{
    for (int32_t i = n_keys - 1; i >= 0; i--) {
        offload_entry *e = find(m, &keys[i]);
        if (e == NULL)
            continue;
        m->policy.ops->touch(&m->policy, e);
        if (e->medium_id >= 0 && e->ref_count >= 0 && !e->is_doomed && m->opts.on_touched != NULL)
            m->opts.on_touched(m->opts.arg, e->medium_id);
    }
}

void offload_manager_refresh(offload_manager *m, const offload_key *keys, int32_t n_keys)
{
    for (int32_t i = n_keys - 1; i >= 0; i--) {
        offload_entry *e = find_block(m, &keys[i]);
        if (e != NULL)
            offload_policy_move(&m->policy, e, e->list_idx);
    }
}

uint64_t offload_manager_next_stamp(offload_manager *m)
{
    return ++m->stamp;
}

void offload_manager_watch(offload_manager *m, const offload_key *key, uint64_t stamp)
{
    offload_entry *e = find_block(m, key);
    if (e != NULL)
        e->watch = stamp;
}

static void end_watch(offload_manager *m, const offload_entry *e)
{
    m->lost = PGD_MAX(m->lost, e->watch);
}

void offload_manager_end_watch(offload_manager *m, const offload_key *key)
{
    const offload_entry *e = find_block(m, key);
    if (e != NULL)
        end_watch(m, e);
}

bool offload_manager_is_intact(const offload_manager *m, uint64_t stamp)
{
    return stamp > m->lost;
}

static void give_block(offload_manager *m, offload_entry *e)
{
    m->free_blocks[m->n_free_blocks++] = e->medium_id;
    m->entry_of[e->medium_id] = 0;
    m->n_blocks--;
    e->medium_id = -1;
}

/* Block and entry are gone, and no policy remembers the key. */
static void drop(offload_manager *m, offload_entry *e)
{
    give_block(m, e);
    offload_policy_remove(&m->policy, e);
    release_entry(m, e);
}

void offload_manager_forget(offload_manager *m, const offload_key *keys, int32_t n_keys)
{
    for (int32_t i = 0; i < n_keys; i++) {
        offload_entry *e = find_block(m, &keys[i]);
        if (e == NULL || e->is_doomed)
            continue;
        if (e->ref_count >= 0 && m->opts.on_removed != NULL)
            m->opts.on_removed(m->opts.arg, &keys[i], &e->medium_id, 1);
        end_watch(m, e);
        e->is_doomed = true;
        m->n_forgotten++;
        if (e->ref_count != 0)
            continue;
        m->n_evictable--;
        drop(m, e);
    }
}

bool offload_manager_prepare_load(int32_t *medium_ids, offload_manager *m, const offload_key *keys,
                                  int32_t n_keys)
{
    for (int32_t i = 0; i < n_keys; i++) {
        if (offload_manager_lookup(m, &keys[i]) != OFFLOAD_HIT)
            return false;
    }
    for (int32_t i = 0; i < n_keys; i++) {
        offload_entry *e = find_block(m, &keys[i]);
        m->n_evictable -= e->ref_count == 0;
        e->ref_count++;
        medium_ids[i] = e->medium_id;
    }
    return true;
}

void offload_manager_complete_load(offload_manager *m, const offload_key *keys, int32_t n_keys,
                                   uint32_t generation)
{
    if (generation != m->generation)
        return;
    for (int32_t i = 0; i < n_keys; i++) {
        offload_entry *e = find_block(m, &keys[i]);
        PGD_ASSERTF(e != NULL && e->ref_count > 0, "a load of a block with %d references is done",
                    e != NULL ? e->ref_count : 0);
        if (--e->ref_count > 0)
            continue;
        if (e->is_doomed)
            drop(m, e);
        else
            make_ready(m, e);
    }
}

/* --- store ------------------------------------------------------------------------------------ */

static int32_t take_block(offload_manager *m)
{
    m->n_blocks++;
    if (m->n_fresh_blocks < m->opts.capacity)
        return m->n_fresh_blocks++;
    return m->free_blocks[--m->n_free_blocks];
}

static void evict(offload_manager *m, int32_t n_victims)
{
    for (int32_t i = 0; i < n_victims; i++) {
        offload_entry *e = m->victims[i];
        m->keys[i] = e->key;
        m->ids[i] = e->medium_id;
        m->n_evictable--;
        m->n_evicted++;
        end_watch(m, e);
        give_block(m, e);
        offload_entry *forgotten = m->policy.ops->evict(&m->policy, e);
        if (forgotten != NULL)
            release_entry(m, forgotten);
    }
    if (n_victims > 0 && m->opts.on_removed != NULL)
        m->opts.on_removed(m->opts.arg, m->keys, m->ids, n_victims);
}

bool offload_manager_prepare_store(offload_store *out, offload_manager *m, const offload_key *keys,
                                   int32_t n_keys)
{
    *out = (offload_store){.stored = m->stored, .medium_ids = m->stored_ids, .evicted = m->keys};
    m->protect_id++;
    int32_t n_absent = 0;
    for (int32_t i = 0; i < n_keys; i++) {
        offload_entry *e = find_block(m, &keys[i]);
        if (e == NULL)
            n_absent++;
        else
            e->protect_id = m->protect_id;
    }
    int32_t n_evict = PGD_MAX(n_absent - (m->opts.capacity - m->n_blocks), 0);
    if (n_evict > m->n_evictable ||
        !m->policy.ops->choose(m->victims, &m->policy, n_evict, m->protect_id))
        return false;
    evict(m, n_evict);
    out->n_evicted = n_evict;
    for (int32_t i = 0; i < n_keys; i++) {
        offload_entry *e = find(m, &keys[i]);
        if (e != NULL && e->medium_id >= 0)
            continue;
        if (e == NULL)
            e = add_entry(m, &keys[i]);
        set_block(m, e, take_block(m));
        e->ref_count = -1;
        e->watch = 0;
        m->policy.ops->insert(&m->policy, e);
        m->stored[out->n_stored] = keys[i];
        m->stored_ids[out->n_stored++] = e->medium_id;
    }
    PGD_ASSERTF(out->n_stored == n_absent, "a key came twice: %d absent, %d stored", n_absent,
                out->n_stored);
    return true;
}

void offload_manager_complete_store(offload_manager *m, const offload_key *keys, int32_t n_keys,
                                    bool ok, uint32_t generation)
{
    if (generation != m->generation)
        return;
    int32_t n_stored = 0;
    for (int32_t i = 0; i < n_keys; i++) {
        offload_entry *e = find_block(m, &keys[i]);
        if (e == NULL || e->ref_count >= 0)
            continue;
        if (ok && !e->is_doomed) {
            make_ready(m, e);
            m->keys[n_stored] = e->key;
            m->ids[n_stored++] = e->medium_id;
        } else {
            drop(m, e);
        }
    }
    if (n_stored > 0 && m->opts.on_stored != NULL)
        m->opts.on_stored(m->opts.arg, m->keys, m->ids, n_stored);
}

/* --- numbers ---------------------------------------------------------------------------------- */

uint32_t offload_manager_generation(const offload_manager *m)
{
    return m->generation;
}

int32_t offload_manager_list(offload_key *out, const void *arg, int32_t max_keys, int32_t *cursor)
{
    const offload_manager *m = arg;
    int32_t end = PGD_MIN(*cursor + max_keys, m->n_entries);
    int32_t n_keys = 0;
    for (int32_t i = *cursor; i < end; i++) {
        const offload_entry *e = &m->entries[i];
        if (e->medium_id >= 0 && e->ref_count >= 0 && !e->is_doomed)
            out[n_keys++] = m->entries[i].key;
    }
    *cursor = end < m->n_entries ? end : -1;
    return n_keys;
}

int32_t offload_manager_capacity(const offload_manager *m)
{
    return m->opts.capacity;
}

int32_t offload_manager_n_blocks(const offload_manager *m)
{
    return m->n_blocks;
}

int32_t offload_manager_n_evictable(const offload_manager *m)
{
    return m->n_evictable;
}

uint64_t offload_manager_n_evicted(const offload_manager *m)
{
    return m->n_evicted;
}

uint64_t offload_manager_n_forgotten(const offload_manager *m)
{
    return m->n_forgotten;
}

int32_t offload_manager_get_id(const offload_manager *m, const offload_key *key)
{
    const offload_entry *e = find_block(m, key);
    return e != NULL ? e->medium_id : -1;
}

const offload_key *offload_manager_get_key(const offload_manager *m, int32_t medium_id)
{
    int32_t i = m->entry_of[medium_id];
    return i != 0 ? &m->entries[i - 1].key : NULL;
}

const offload_policy *offload_manager_get_policy(const offload_manager *m)
{
    return &m->policy;
}

void offload_manager_check(const offload_manager *m)
{
    int32_t n_found = 0, n_blocks = 0, n_evictable = 0, n_listed = 0;
    for (uint32_t at = 0; at <= m->table_mask; at++) {
        if (m->table[at] == 0)
            continue;
        const offload_entry *e = &m->entries[m->table[at] - 1];
        PGD_ASSERTF(find_place(m, &e->key) == at, "the entry at %u is not found", at);
        PGD_ASSERTF(e->list_idx >= 0 && e->medium_id < m->n_fresh_blocks,
                    "block %d is in list %d, %d ids were given out", e->medium_id, e->list_idx,
                    m->n_fresh_blocks);
        PGD_ASSERTF(e->medium_id < 0 || (m->entry_of[e->medium_id] == m->table[at] &&
                                         !(e->is_doomed && e->ref_count == 0)),
                    "block %d with %d references belongs to another, or is forgotten", e->medium_id,
                    e->ref_count);
        n_found++;
        n_blocks += e->medium_id >= 0;
        n_evictable += e->medium_id >= 0 && e->ref_count == 0;
    }
    offload_policy_check(&m->policy);
    for (int32_t i = 0; i < OFFLOAD_POLICY_MAX_LISTS; i++)
        n_listed += m->policy.n_entries[i];
    PGD_ASSERTF(n_found == n_listed && n_found == m->n_entries - m->n_free_entries &&
                    n_blocks == m->n_blocks && n_blocks == m->n_fresh_blocks - m->n_free_blocks &&
                    n_evictable == m->n_evictable,
                "%d entries, %d listed, %d free of %d; %d blocks, %d counted; %d evictable, %d "
                "counted",
                n_found, n_listed, m->n_free_entries, m->n_entries, n_blocks, m->n_blocks,
                n_evictable, m->n_evictable);
}
