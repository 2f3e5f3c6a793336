/* Bump allocator: many allocations, one free. For what lives as long as one HTTP request.
 *
 * Owns:    every block it hands out, until arena_destroy
 * Limits:  max_bytes in total; beyond it arena_alloc returns NULL
 * Thread:  one at a time
 */
#ifndef COMMON_ARENA_H
#define COMMON_ARENA_H

#include "common/err.h"

typedef struct arena arena;

PGD_MUST_USE pgd_err arena_create(arena **out, size_t max_bytes);
void arena_destroy(arena *a);
/* 16-byte aligned, uninitialised; NULL when out of memory or over the limit. */
void *arena_alloc(arena *a, size_t n_bytes);
void *arena_calloc(arena *a, size_t n_elems, size_t elem_bytes);
char *arena_strndup(arena *a, const char *text, size_t n_bytes);
size_t arena_used_bytes(const arena *a);

#endif
