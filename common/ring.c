/* Two free-running indices, each written by one side; the element copy is ordered by
 * release/acquire on them. Each side keeps the other's last seen index, so that the shared cache
 * line is read only when the ring looks full or empty. */
#include "common/ring.h"

#include <stdatomic.h>
#include <string.h>

#include "common/mem.h"

#define CACHE_LINE 64

struct ring {
    uint8_t *elems;
    size_t elem_bytes;
    size_t mask;
    _Alignas(CACHE_LINE) atomic_size_t head; /* next to pop; written by the consumer */
    size_t seen_tail;                        /* consumer's */
    _Alignas(CACHE_LINE) atomic_size_t tail; /* next to push; written by the producer */
    size_t seen_head;                        /* producer's */
};

pgd_err ring_create(ring **out, size_t elem_bytes, size_t capacity)
{
    size_t cap = 1;
    while (cap < capacity) {
        if (!mem_mul(&cap, cap, 2))
            return PGD_EINVAL;
    }
    ring *r = mem_alloc_aligned(sizeof(*r), CACHE_LINE);
    if (r == NULL)
        return PGD_ENOMEM;
    r->elems = mem_calloc(cap, elem_bytes);
    if (r->elems == NULL) {
        mem_free_aligned(r, sizeof(*r));
        return PGD_ENOMEM;
    }
    r->elem_bytes = elem_bytes;
    r->mask = cap - 1;
    *out = r;
    return PGD_OK;
}

void ring_destroy(ring *r)
{
    if (r == NULL)
        return;
    mem_free(r->elems);
    mem_free_aligned(r, sizeof(*r));
}

bool ring_push(ring *r, const void *elem)
{
    size_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
    if (tail - r->seen_head > r->mask) {
        r->seen_head = atomic_load_explicit(&r->head, memory_order_acquire);
        if (tail - r->seen_head > r->mask)
            return false;
    }
    memcpy(r->elems + (tail & r->mask) * r->elem_bytes, elem, r->elem_bytes);
    atomic_store_explicit(&r->tail, tail + 1, memory_order_release);
    return true;
}

bool ring_pop(ring *r, void *elem)
{
    size_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
    if (head == r->seen_tail) {
        r->seen_tail = atomic_load_explicit(&r->tail, memory_order_acquire);
        if (head == r->seen_tail)
            return false;
    }
    memcpy(elem, r->elems + (head & r->mask) * r->elem_bytes, r->elem_bytes);
    atomic_store_explicit(&r->head, head + 1, memory_order_release);
    return true;
}

size_t ring_n_used(const ring *r)
{
    size_t head = atomic_load_explicit(&r->head, memory_order_acquire);
    return atomic_load_explicit(&r->tail, memory_order_acquire) - head;
}

size_t ring_capacity(const ring *r)
{
    return r->mask + 1;
}
