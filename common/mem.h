/* The project's allocator: checked sizes, and a guard that forbids allocation on the step path.
 *
 * Thread:  any; the guard is per thread
 */
#ifndef COMMON_MEM_H
#define COMMON_MEM_H

#include "common/err.h"

PGD_BEGIN_C

/* NULL when out of memory or n_bytes == 0 is rounded up to 1. */
void *mem_alloc(size_t n_bytes);
void *mem_calloc(size_t n_elems, size_t elem_bytes);
/* n_elems * elem_bytes with overflow check; NULL on failure, the old block is then untouched. */
void *mem_realloc_array(void *ptr, size_t n_elems, size_t elem_bytes);
void mem_free(void *ptr);
char *mem_strdup(const char *text);
char *mem_strndup(const char *text, size_t n_bytes);

/* Aligned to align (a power of two, 16 to 4096), zeroed; huge pages are asked for from 2 MB up.
 * Freed with mem_free_aligned and the same n_bytes. */
void *mem_alloc_aligned(size_t n_bytes, size_t align);
void mem_free_aligned(void *ptr, size_t n_bytes);

/* Checked size arithmetic: false on overflow, *out is then 0. */
PGD_MUST_USE bool mem_mul(size_t *out, size_t a, size_t b);
PGD_MUST_USE bool mem_add(size_t *out, size_t a, size_t b);

/* Debug builds (PGD_DEBUG) abort when this thread allocates between forbid and permit; nests. */
void mem_forbid(void);
void mem_permit(void);
/* Blocks that this thread has asked for since its start. */
uint64_t mem_n_allocations(void);

PGD_END_C
#endif
