/* Open-addressing map from a uint64_t key to a pointer-sized value.
 *
 * Two uses: with max_entries > 0 the table is sized once and never allocates again (step path);
 * with max_entries == 0 it grows. Any key value is allowed.
 * Thread:  one at a time
 */
#ifndef COMMON_HASH_MAP_H
#define COMMON_HASH_MAP_H

#include "common/err.h"

typedef struct hash_map hash_map;

PGD_MUST_USE pgd_err hash_map_create(hash_map **out, size_t max_entries);
void hash_map_destroy(hash_map *m);
/* Inserts or replaces. false when a fixed table is full or memory is out. */
PGD_MUST_USE bool hash_map_put(hash_map *m, uint64_t key, uintptr_t value);
/* false when absent; *value may be NULL. */
bool hash_map_get(const hash_map *m, uint64_t key, uintptr_t *value);
/* false when absent. */
bool hash_map_remove(hash_map *m, uint64_t key);
size_t hash_map_n_entries(const hash_map *m);
void hash_map_reset(hash_map *m);
/* Iterates in table order: *pos starts at 0; false at the end. No changes while iterating. */
bool hash_map_next(const hash_map *m, size_t *pos, uint64_t *key, uintptr_t *value);

#endif
