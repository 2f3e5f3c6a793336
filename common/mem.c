/* Allocation goes through here so that sizes are checked and the step path can be proven free of
 * it. */
#include "common/mem.h"

#include <stdlib.h>
#include <string.h>

#include <sys/mman.h>

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define PAGE_BYTES      ((size_t)4096)

static _Thread_local int forbid_depth;
static _Thread_local uint64_t n_allocations;

static void note_allocation(void)
{
    PGD_DASSERT(forbid_depth == 0);
    n_allocations++;
}

void *mem_alloc(size_t n_bytes)
{
    note_allocation();
    return malloc(n_bytes != 0 ? n_bytes : 1);
}

void *mem_calloc(size_t n_elems, size_t elem_bytes)
{
    note_allocation();
    if (n_elems == 0 || elem_bytes == 0)
        return calloc(1, 1);
    return calloc(n_elems, elem_bytes);
}

void *mem_realloc_array(void *ptr, size_t n_elems, size_t elem_bytes)
{
    note_allocation();
    size_t n_bytes;
    if (!mem_mul(&n_bytes, n_elems, elem_bytes))
        return NULL;
    return realloc(ptr, n_bytes != 0 ? n_bytes : 1);
}

void mem_free(void *ptr)
{
    free(ptr);
}

char *mem_strdup(const char *text)
{
    return mem_strndup(text, strlen(text));
}

char *mem_strndup(const char *text, size_t n_bytes)
{
    char *copy = mem_alloc(n_bytes + 1);
    if (copy != NULL) {
        memcpy(copy, text, n_bytes);
        copy[n_bytes] = '\0';
    }
    return copy;
}

/* From mmap, at the start of a huge page; NULL when out of memory. */
static void *map_aligned(size_t n_bytes)
{
    size_t n_mapped;
    if (!mem_add(&n_mapped, n_bytes, HUGE_PAGE_BYTES))
        return NULL;
    char *p = mmap(NULL, n_mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    size_t n_before = -(uintptr_t)p % HUGE_PAGE_BYTES;
    char *end = p + n_before + PGD_ROUND_UP(n_bytes, PAGE_BYTES);
    if (n_before > 0)
        munmap(p, n_before);
    munmap(end, (size_t)(p + n_mapped - end));
    return p + n_before;
}

/* Large blocks come straight from mmap: zeroed by the kernel, touched lazily, and given back whole.
 */
void *mem_alloc_aligned(size_t n_bytes, size_t align)
{
    note_allocation();
    PGD_ASSERT(align >= 16 && (align & (align - 1)) == 0);
    PGD_ASSERT(align <= 4096);
    if (n_bytes >= HUGE_PAGE_BYTES) {
        void *p = map_aligned(n_bytes);
        if (p != NULL)
            madvise(p, n_bytes, MADV_HUGEPAGE);
        return p;
    }
    void *p = NULL;
    if (posix_memalign(&p, align, n_bytes != 0 ? n_bytes : 1) != 0)
        return NULL;
    memset(p, 0, n_bytes);
    return p;
}

void mem_free_aligned(void *ptr, size_t n_bytes)
{
    if (ptr == NULL)
        return;
    /* mmap returns page-aligned blocks; small ones never reach the size limit. */
    if (n_bytes >= HUGE_PAGE_BYTES)
        munmap(ptr, n_bytes);
    else
        free(ptr);
}

bool mem_mul(size_t *out, size_t a, size_t b)
{
    if (__builtin_mul_overflow(a, b, out)) {
        *out = 0;
        return false;
    }
    return true;
}

bool mem_add(size_t *out, size_t a, size_t b)
{
    if (__builtin_add_overflow(a, b, out)) {
        *out = 0;
        return false;
    }
    return true;
}

void mem_forbid(void)
{
    forbid_depth++;
}

void mem_permit(void)
{
    PGD_ASSERT(forbid_depth > 0);
    forbid_depth--;
}

uint64_t mem_n_allocations(void)
{
    return n_allocations;
}
