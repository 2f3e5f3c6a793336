/* Entries in one growing array, found through a map from a mix of name and group; two blocks that fall
 * onto one key of 64 bits would be one block to subscribers too. An entry stays at its place, so
 * that a walk over the places in pieces misses nothing but what the stream tells meanwhile. Free
 * places form a list. */
#include "engine/kv/kv_event_index.h"

#include <string.h>

#include "common/hash_map.h"
#include "common/mem.h"

#define MIN_PLACES 256

struct kv_event_index {
    hash_map *places; /* key → place */
    kv_event_entry *entries;
    int32_t n_places;
    int32_t max_places;
    int32_t first_free; /* -1 = none */
    int64_t n_blocks[KV_N_MEDIA];
};

pgd_err kv_event_index_create(kv_event_index **out)
{
    *out = NULL;
    kv_event_index *x = mem_calloc(1, sizeof *x);
    if (x == NULL)
        return PGD_ENOMEM;
    x->first_free = -1;
    if (hash_map_create(&x->places, 0) != PGD_OK) {
        kv_event_index_destroy(x);
        return PGD_ENOMEM;
    }
    *out = x;
    return PGD_OK;
}

void kv_event_index_destroy(kv_event_index *x)
{
    if (x == NULL)
        return;
    for (int32_t i = 0; i < x->n_places; i++)
        mem_free((void *)x->entries[i].tokens);
    mem_free(x->entries);
    hash_map_destroy(x->places);
    mem_free(x);
}

uint64_t kv_event_index_name(const block_hash *hash)
{
    uint64_t name = 0;
    for (size_t i = sizeof hash->bytes - 8; i < sizeof hash->bytes; i++)
        name = name << 8 | hash->bytes[i];
    return name;
}

static uint64_t key_of(uint64_t name, int32_t group_id)
{
    return name + hash_u64((uint64_t)group_id + 1);
}

static kv_event_entry *find(const kv_event_index *x, uint64_t name, int32_t group_id)
{
    uintptr_t place;
    return hash_map_get(x->places, key_of(name, group_id), &place) ? &x->entries[place] : NULL;
}

static bool make_room(kv_event_index *x)
{
    if (x->first_free >= 0 || x->n_places < x->max_places)
        return true;
    if (x->max_places > INT32_MAX / 2)
        return false;
    int32_t n = PGD_MAX(2 * x->max_places, MIN_PLACES);
    kv_event_entry *entries = mem_realloc_array(x->entries, (size_t)n, sizeof *entries);
    if (entries == NULL)
        return false;
    x->entries = entries;
    x->max_places = n;
    return true;
}

static kv_event_entry *add(kv_event_index *x, uint64_t name, int32_t group_id)
{
    if (!make_room(x))
        return NULL;
    int32_t place = x->first_free >= 0 ? x->first_free : x->n_places;
    if (!hash_map_put(x->places, key_of(name, group_id), (uintptr_t)place))
        return NULL;
    if (place == x->n_places)
        x->n_places++;
    else
        x->first_free = x->entries[place].next_free;
    x->entries[place] = (kv_event_entry){.name = name, .group_id = group_id};
    return &x->entries[place];
}

static void release(kv_event_index *x, kv_event_entry *e)
{
    (void)hash_map_remove(x->places, key_of(e->name, e->group_id));
    mem_free((void *)e->tokens);
    *e = (kv_event_entry){.next_free = x->first_free};
    x->first_free = (int32_t)(e - x->entries);
}

/* What the event says of block i beyond its name. Without memory it stays unknown: the block is
 * known all the same. */
static void learn(kv_event_entry *e, const kv_cache_event *ev, int32_t i)
{
    e->block_size = ev->block_size;
    if (ev->n_tokens == 0 || e->tokens != NULL)
        return;
    size_t extra_bytes = i == 0 ? ev->extra_bytes : 0;
    size_t n_bytes = (size_t)ev->block_size * sizeof *ev->tokens;
    uint8_t *content = mem_alloc(n_bytes + extra_bytes);
    if (content == NULL)
        return;
    memcpy(content, ev->tokens + (size_t)i * (size_t)ev->block_size, n_bytes);
    if (extra_bytes > 0)
        memcpy(content + n_bytes, ev->extra, extra_bytes);
    e->tokens = (const token_id *)(const void *)content;
    e->n_tokens = ev->block_size;
    e->extra_bytes = (uint32_t)extra_bytes;
    e->has_parent = i > 0 || ev->parent != NULL;
    if (e->has_parent)
        e->parent = kv_event_index_name(i > 0 ? &ev->hashes[i - 1] : ev->parent);
}

kv_index_news kv_event_index_store(kv_event_index *x, const kv_cache_event *ev, int32_t i)
{
    uint64_t name = kv_event_index_name(&ev->hashes[i]);
    uint8_t bit = (uint8_t)(1u << ev->medium);
    kv_event_entry *e = find(x, name, ev->group_id);
    if (e == NULL)
        e = add(x, name, ev->group_id);
    if (e == NULL)
        return KV_INDEX_NO_MEMORY;
    learn(e, ev, i);
    e->stale &= (uint8_t)~bit;
    if ((e->media & bit) != 0)
        return KV_INDEX_KNOWN;
    e->media |= bit;
    x->n_blocks[ev->medium]++;
    return KV_INDEX_NEWS;
}

static void drop(kv_event_index *x, kv_event_entry *e, uint8_t media)
{
    for (int m = 0; m < KV_N_MEDIA; m++)
        x->n_blocks[m] -= (media >> m) & 1;
    e->media &= (uint8_t)~media;
    e->stale &= e->media;
    if (e->media == 0)
        release(x, e);
}

bool kv_event_index_remove(kv_event_index *x, kv_medium medium, int32_t group_id, uint64_t name)
{
    kv_event_entry *e = find(x, name, group_id);
    if (e == NULL || (e->media >> medium & 1) == 0)
        return false;
    drop(x, e, (uint8_t)(1u << medium));
    return true;
}

void kv_event_index_begin_resync(kv_event_index *x, kv_medium medium)
{
    uint8_t media = medium == KV_N_MEDIA ? UINT8_MAX : (uint8_t)(1u << medium);
    for (int32_t i = 0; i < x->n_places; i++)
        x->entries[i].stale = x->entries[i].media & media;
}

uint8_t kv_event_index_drop_stale(kv_event_index *x, int32_t place)
{
    uint8_t stale = x->entries[place].stale;
    if (stale != 0)
        drop(x, &x->entries[place], stale);
    return stale;
}

int64_t kv_event_index_n_blocks(const kv_event_index *x, kv_medium medium)
{
    return x->n_blocks[medium];
}

int32_t kv_event_index_n_places(const kv_event_index *x)
{
    return x->n_places;
}

const kv_event_entry *kv_event_index_get(const kv_event_index *x, int32_t place)
{
    PGD_ASSERTF(place >= 0 && place < x->n_places, "place %d of %d", place, x->n_places);
    return &x->entries[place];
}
