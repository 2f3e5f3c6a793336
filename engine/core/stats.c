/* The value is held as atomic words, so that a torn read is a retry and never undefined. The words'
 * own release and acquire order them against the sequence number; no fences, which ThreadSanitizer
 * does not follow.
 *
 *   writer  seq = odd, words (release), seq = even (release)
 *   reader  s = seq (acquire), words (acquire), seq again: equal and even, or once more
 */
#include "engine/core/stats.h"

#include <stdatomic.h>
#include <string.h>

#include <sched.h>

#include "common/mem.h"

struct stats_cell {
    size_t n_bytes;
    size_t n_words;
    atomic_uint_fast64_t seq;
    atomic_uint_fast64_t words[];
};

pgd_err stats_cell_create(stats_cell **out, size_t n_bytes)
{
    size_t n_words = (n_bytes + 7) / 8;
    stats_cell *c = mem_calloc(1, sizeof *c + n_words * sizeof c->words[0]);
    if (c == NULL)
        return PGD_ENOMEM;
    c->n_bytes = n_bytes;
    c->n_words = n_words;
    *out = c;
    return PGD_OK;
}

void stats_cell_destroy(stats_cell *c)
{
    mem_free(c);
}

void stats_publish(stats_cell *c, const void *value)
{
    uint64_t seq = atomic_load_explicit(&c->seq, memory_order_relaxed);
    atomic_store_explicit(&c->seq, seq + 1, memory_order_relaxed);
    for (size_t i = 0; i < c->n_words; i++) {
        uint64_t word = 0;
        memcpy(&word, (const uint8_t *)value + 8 * i, PGD_MIN(c->n_bytes - 8 * i, 8));
        atomic_store_explicit(&c->words[i], word, memory_order_release);
    }
    atomic_store_explicit(&c->seq, seq + 2, memory_order_release);
}

void stats_read(const stats_cell *cell, void *value)
{
    stats_cell *c = (stats_cell *)cell; /* C17 atomics cannot be loaded through const */
    for (;;) {
        uint64_t before = atomic_load_explicit(&c->seq, memory_order_acquire);
        for (size_t i = 0; i < c->n_words; i++) {
            uint64_t word = atomic_load_explicit(&c->words[i], memory_order_acquire);
            memcpy((uint8_t *)value + 8 * i, &word, PGD_MIN(c->n_bytes - 8 * i, 8));
        }
        if (before % 2 == 0 && atomic_load_explicit(&c->seq, memory_order_relaxed) == before)
            return;
        sched_yield();
    }
}
