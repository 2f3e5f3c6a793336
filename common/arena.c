/* Blocks in a chain; each new block is at least twice the last, so that a request of any size needs
 * few. */
#include "common/arena.h"

#include <string.h>

#include "common/mem.h"

#define FIRST_BLOCK_BYTES 4096
#define ARENA_ALIGN       16

typedef struct arena_block {
    struct arena_block *next;
    size_t cap_bytes;
    size_t used_bytes;
    _Alignas(ARENA_ALIGN) uint8_t data[];
} arena_block;

struct arena {
    arena_block *head;
    size_t max_bytes;
    size_t total_bytes;
};

pgd_err arena_create(arena **out, size_t max_bytes)
{
    arena *a = mem_calloc(1, sizeof(*a));
    if (a == NULL)
        return PGD_ENOMEM;
    a->max_bytes = max_bytes;
    *out = a;
    return PGD_OK;
}

void arena_destroy(arena *a)
{
    if (a == NULL)
        return;
    for (arena_block *b = a->head; b != NULL;) {
        arena_block *next = b->next;
        mem_free(b);
        b = next;
    }
    mem_free(a);
}

void *arena_alloc(arena *a, size_t n_bytes)
{
    size_t need;
    if (!mem_add(&need, n_bytes, ARENA_ALIGN - 1))
        return NULL;
    need &= ~(size_t)(ARENA_ALIGN - 1);
    if (need > a->max_bytes - a->total_bytes)
        return NULL;
    if (a->head == NULL || need > a->head->cap_bytes - a->head->used_bytes) {
        size_t cap = a->head != NULL ? a->head->cap_bytes * 2 : FIRST_BLOCK_BYTES;
        if (cap < need)
            cap = need;
        arena_block *b = mem_alloc(sizeof(*b) + cap);
        if (b == NULL)
            return NULL;
        b->next = a->head;
        b->cap_bytes = cap;
        b->used_bytes = 0;
        a->head = b;
    }
    void *p = a->head->data + a->head->used_bytes;
    a->head->used_bytes += need;
    a->total_bytes += need;
    return p;
}

void *arena_calloc(arena *a, size_t n_elems, size_t elem_bytes)
{
    size_t n_bytes;
    if (!mem_mul(&n_bytes, n_elems, elem_bytes))
        return NULL;
    void *p = arena_alloc(a, n_bytes);
    if (p != NULL)
        memset(p, 0, n_bytes);
    return p;
}

char *arena_strndup(arena *a, const char *text, size_t n_bytes)
{
    char *copy = n_bytes < SIZE_MAX ? arena_alloc(a, n_bytes + 1) : NULL;
    if (copy != NULL) {
        memcpy(copy, text, n_bytes);
        copy[n_bytes] = '\0';
    }
    return copy;
}

size_t arena_used_bytes(const arena *a)
{
    return a->total_bytes;
}
