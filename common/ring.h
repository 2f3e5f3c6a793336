/* Bounded single-producer single-consumer ring of fixed-size elements, copied by value.
 *
 * The hand-off between the io thread and a core thread; waking the other side is the owner's
 * business.
 * Thread:  push from one thread, pop from one other thread; lock-free
 */
#ifndef COMMON_RING_H
#define COMMON_RING_H

#include "common/err.h"

typedef struct ring ring;

/* capacity is rounded up to a power of two. */
PGD_MUST_USE pgd_err ring_create(ring **out, size_t elem_bytes, size_t capacity);
void ring_destroy(ring *r);
/* false when full; nothing is then copied. */
PGD_MUST_USE bool ring_push(ring *r, const void *elem);
/* false when empty. */
PGD_MUST_USE bool ring_pop(ring *r, void *elem);
size_t ring_n_used(const ring *r);
size_t ring_capacity(const ring *r);

#endif
