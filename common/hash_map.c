/* Linear probing in a power-of-two table kept at most half full; removal shifts the following run
 * back, so there are no tombstones and a long-lived table never degrades. */
#include "common/hash_map.h"

#include <string.h>

#include "common/hash.h"
#include "common/mem.h"

typedef struct map_entry {
    uint64_t key;
    uintptr_t value;
    bool used;
} map_entry;

struct hash_map {
    map_entry *entries;
    size_t mask;
    size_t n_entries;
    bool is_fixed;
};

static bool alloc_entries(hash_map *m, size_t n_slots)
{
    m->entries = mem_calloc(n_slots, sizeof(map_entry));
    m->mask = n_slots - 1;
    return m->entries != NULL;
}

pgd_err hash_map_create(hash_map **out, size_t max_entries)
{
    hash_map *m = mem_calloc(1, sizeof(*m));
    if (m == NULL)
        return PGD_ENOMEM;
    size_t n_slots = 16;
    while (n_slots / 2 < max_entries) {
        if (!mem_mul(&n_slots, n_slots, 2)) {
            mem_free(m);
            return PGD_EINVAL;
        }
    }
    m->is_fixed = max_entries > 0;
    if (!alloc_entries(m, n_slots)) {
        mem_free(m);
        return PGD_ENOMEM;
    }
    *out = m;
    return PGD_OK;
}

void hash_map_destroy(hash_map *m)
{
    if (m == NULL)
        return;
    mem_free(m->entries);
    mem_free(m);
}

/* Slot of key, or the free slot where it would go. */
static size_t find_slot(const hash_map *m, uint64_t key)
{
    size_t i = hash_u64(key) & m->mask;
    while (m->entries[i].used && m->entries[i].key != key)
        i = (i + 1) & m->mask;
    return i;
}

static bool grow(hash_map *m)
{
    map_entry *old = m->entries;
    size_t n_old = m->mask + 1;
    size_t n_slots;
    if (!mem_mul(&n_slots, n_old, 2))
        return false;
    if (!alloc_entries(m, n_slots)) {
        m->entries = old;
        m->mask = n_old - 1;
        return false;
    }
    for (size_t i = 0; i < n_old; i++) {
        if (old[i].used)
            m->entries[find_slot(m, old[i].key)] = old[i];
    }
    mem_free(old);
    return true;
}

bool hash_map_put(hash_map *m, uint64_t key, uintptr_t value)
{
    size_t i = find_slot(m, key);
    if (!m->entries[i].used) {
        if (m->n_entries + 1 > (m->mask + 1) / 2) {
            if (m->is_fixed || !grow(m))
                return false;
            i = find_slot(m, key);
        }
        m->n_entries++;
    }
    m->entries[i] = (map_entry){.key = key, .value = value, .used = true};
    return true;
}

bool hash_map_get(const hash_map *m, uint64_t key, uintptr_t *value)
{
    size_t i = find_slot(m, key);
    if (!m->entries[i].used)
        return false;
    if (value != NULL)
        *value = m->entries[i].value;
    return true;
}

bool hash_map_remove(hash_map *m, uint64_t key)
{
    size_t hole = find_slot(m, key);
    if (!m->entries[hole].used)
        return false;
    for (size_t i = (hole + 1) & m->mask; m->entries[i].used; i = (i + 1) & m->mask) {
        size_t home = hash_u64(m->entries[i].key) & m->mask;
        /* The entry may move into the hole unless its home lies cyclically in (hole, i]. */
        if (((i - home) & m->mask) >= ((i - hole) & m->mask)) {
            m->entries[hole] = m->entries[i];
            hole = i;
        }
    }
    m->entries[hole].used = false;
    m->n_entries--;
    return true;
}

size_t hash_map_n_entries(const hash_map *m)
{
    return m->n_entries;
}

void hash_map_reset(hash_map *m)
{
    memset(m->entries, 0, (m->mask + 1) * sizeof(map_entry));
    m->n_entries = 0;
}

bool hash_map_next(const hash_map *m, size_t *pos, uint64_t *key, uintptr_t *value)
{
    for (size_t i = *pos; i <= m->mask; i++) {
        if (m->entries[i].used) {
            *pos = i + 1;
            *key = m->entries[i].key;
            if (value != NULL)
                *value = m->entries[i].value;
            return true;
        }
    }
    *pos = m->mask + 1;
    return false;
}
