/* Between the driver of the fast attention (attention.c) and its instruction-set levels.
 *
 * A tile is up to ATTENTION_MAX_PAIRS (row, head) pairs that share keys and values: some
 * consecutive rows of one sequence times the heads of one unit. A unit is a KV head's group of
 * heads, or an equal part of a group that is too large. An item is one unit of one tile over some
 * consecutive splits of its keys.
 *
 * A partial result is a slot of floats: the weighted values, padded to whole vectors, then at
 * slot_floats - 16 the maximum and the sum (-1: no key).
 * Thread:  the pool's threads
 */
#ifndef KERNELS_CPU_ATTENTION_INTERNAL_H
#define KERNELS_CPU_ATTENTION_INTERNAL_H

#include "kernels/attention.h"

#define ATTENTION_MAX_PAIRS 48
#define ATTENTION_KEY_GROUP 16 /* keys that always lie in one page, side by side */
#define ATTENTION_GROUPS    (ATTENTION_SPLIT / ATTENTION_KEY_GROUP)
#define ATTENTION_CHUNK     64 /* keys converted at a time */

typedef struct attention_tile {
    int32_t seq;
    int32_t first_row; /* in the batch */
    int32_t n_rows;
    int32_t first_split; /* of all that its rows need */
    int32_t n_splits;
    int32_t n_pieces;   /* of its splits; 1 = whole */
    int32_t first_item; /* item = first_item + piece * n_units + unit */
    int32_t *counters;  /* [n_units] finished pieces; NULL when whole */
    int64_t first_slot; /* [n_units][n_rows * heads_per_unit][n_splits] when cut */
} attention_tile;

struct attention_isa;

typedef struct attention_job {
    const attention_args *args;
    cpu_pool *pool;
    const struct attention_isa *isa;
    int32_t slot_floats;
    int32_t units_per_kv_head;
    int32_t heads_per_unit; /* the last unit of a KV head may have fewer */
    int32_t n_units;
    int32_t n_tiles;
    int32_t n_items;
    attention_tile *tiles;
    int32_t *counters;
    float *slots;
    float *scratch;
    size_t scratch_floats; /* of one thread */
} attention_job;

/* One thread's memory; all parts 64-byte aligned. */
typedef struct attention_scratch {
    float *scores; /* [ATTENTION_MAX_PAIRS][ATTENTION_SPLIT] */
    float *q;      /* [ATTENTION_MAX_PAIRS * head_dim] interleaved */
    float *chunk;  /* [ATTENTION_CHUNK * padded head_dim] converted keys or values */
    float *part;   /* [ATTENTION_MAX_PAIRS][slot_floats] of one split */
    float *total;  /* likewise, folded */
} attention_scratch;

typedef struct attention_isa {
    /* Splits first_split + [first, last) of one unit of a tile; whoever finishes the last piece of
     * a unit writes its output. */
    void (*run)(const attention_job *job, const attention_tile *tile, int32_t unit, int32_t first,
                int32_t last, const attention_scratch *scratch);
} attention_isa;

pgd_err attention__run(const attention_args *args, kernel_ctx *ctx, const attention_isa *isa);

/* The last key that a row attends to: of a causal one, its position. */
static inline int32_t attention__last_key(const attention_args *a, int32_t seq, int32_t row)
{
    return a->n_keys ? a->n_keys[seq] - 1 : a->n_context[seq] - (a->query_start[seq + 1] - row);
}

/* First key that a row at pos attends to. */
static inline int32_t attention__first_key(const attention_args *a, int32_t pos)
{
    int32_t first = a->window > 0 && pos >= a->window ? pos - a->window + 1 : 0;
    return a->chunk > 0 ? PGD_MAX(first, pos / a->chunk * a->chunk) : first;
}

#endif
