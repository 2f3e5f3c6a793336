/* What the implementations of sampling share: adjusted logits, candidates in order, the random
 * choice of one candidate, one row per thread at a time.
 *
 * Whatever a fast version leaves out, the candidates that it does look at go through these, in
 * double, so that its tokens are those of the reference.
 * Thread:  the pool's threads
 */
#ifndef KERNELS_CPU_SAMPLE_INTERNAL_H
#define KERNELS_CPU_SAMPLE_INTERNAL_H

#include <math.h>

#include "kernels/cpu/cpu_split.h"
#include "kernels/sample.h"

/* One thread's part of the workspace. */
typedef struct sample_scratch {
    float *z;        /* [vocab_size] adjusted logits */
    int32_t *counts; /* [vocab_size] only entries of the row's tokens are ever set */
    int32_t *heap;   /* [vocab_size] candidate ids */
} sample_scratch;

typedef void (*sample_one_fn)(sample_scratch *s, sample_row *r, int32_t vocab_size);

/* --- adjusted logits --- */

static inline bool sample__has_penalties(const sample_row *r)
{
    return r->repetition_penalty != 1 || r->presence_penalty != 0 || r->frequency_penalty != 0;
}

static inline void sample__apply_penalties(float *z, int32_t *counts, const sample_row *r)
{
    for (int32_t i = 0; i < r->n_tokens; i++)
        counts[r->tokens[i]] = 0;
    for (int32_t i = r->n_prompt_tokens; i < r->n_tokens; i++)
        counts[r->tokens[i]]++;
    for (int32_t i = 0; i < r->n_tokens; i++) {
        token_id id = r->tokens[i];
        if (counts[id] < 0)
            continue; /* done */
        if (r->repetition_penalty != 1)
            z[id] = z[id] > 0 ? z[id] / r->repetition_penalty : z[id] * r->repetition_penalty;
        if (counts[id] > 0)
            z[id] -= r->frequency_penalty * (float)counts[id] + r->presence_penalty;
        counts[id] = -1;
    }
}

/* The logits to choose from: the row's own, or adjusted ones in s->z. */
static inline const float *sample__adjust(sample_scratch *s, const sample_row *r,
                                          int32_t vocab_size)
{
    if (r->n_bias == 0 && r->n_masked_ids == 0 && !sample__has_penalties(r))
        return r->logits;
    for (int32_t i = 0; i < vocab_size; i++)
        s->z[i] = r->logits[i];
    for (int32_t i = 0; i < r->n_bias; i++)
        s->z[r->bias[i].id] += r->bias[i].bias;
    for (int32_t i = 0; i < r->n_masked_ids; i++)
        s->z[r->masked_ids[i]] = -INFINITY;
    if (sample__has_penalties(r))
        sample__apply_penalties(s->z, s->counts, r);
    return s->z;
}

/* --- candidates in descending order --- */

static inline bool sample__comes_before(const float *z, int32_t a, int32_t b)
{
    return z[a] > z[b] || (z[a] == z[b] && a < b);
}

static inline void sample__sift_down(int32_t *heap, int32_t n, int32_t at, const float *z)
{
    for (int32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && sample__comes_before(z, heap[child + 1], heap[child]))
            child++;
        if (!sample__comes_before(z, heap[child], heap[at]))
            return;
        int32_t swap = heap[at];
        heap[at] = heap[child];
        heap[child] = swap;
    }
}

static inline void sample__make_heap(int32_t *heap, int32_t n, const float *z)
{
    for (int32_t at = n / 2 - 1; at >= 0; at--)
        sample__sift_down(heap, n, at, z);
}

static inline int32_t sample__pop_heap(int32_t *heap, int32_t *n, const float *z)
{
    int32_t top = heap[0];
    heap[0] = heap[--*n];
    sample__sift_down(heap, *n, 0, z);
    /* The freed slot behind the heap keeps what was taken: heap[n ..) holds the taken ids, last
     * taken first. */
    heap[*n] = top;
    return top;
}

/* --- random choice --- */

typedef struct sample_chooser {
    const sample_row *row;
    double z_max;
    double best_key;
    token_id best_id;   /* -1 = none yet */
    uint32_t block_idx; /* id >> 2 of the words at hand */
    bool has_block;
    uint32_t words[4];
} sample_chooser;

static inline double sample__gumbel(sample_chooser *c, token_id id)
{
    uint32_t block = (uint32_t)id >> 2;
    if (!c->has_block || block != c->block_idx) {
        const sample_row *r = c->row;
        uint32_t key[2] = {(uint32_t)r->seed, (uint32_t)(r->seed >> 32)};
        uint32_t counter[4] = {block, (uint32_t)(r->n_tokens - r->n_prompt_tokens),
                               (uint32_t)r->choice_idx, 0};
        sample_philox(c->words, key, counter);
        c->block_idx = block;
        c->has_block = true;
    }
    double u = (c->words[(uint32_t)id & 3] + 0.5) * 0x1p-32;
    return -log(-log1p(-u));
}

static inline double sample__scaled(const sample_chooser *c, float z)
{
    return ((double)z - c->z_max) / c->row->temperature;
}

static inline void sample__offer(sample_chooser *c, token_id id, float z)
{
    double y = sample__scaled(c, z);
    if (c->row->min_p > 0 && !(exp(y) >= c->row->min_p))
        return;
    double key = y + sample__gumbel(c, id);
    if (c->best_id < 0 || key > c->best_key || (key == c->best_key && id < c->best_id)) {
        c->best_id = id;
        c->best_key = key;
    }
}

/* --- op --- */

size_t sample__array_bytes(int32_t vocab_size);
/* Shares the rows between the threads. */
pgd_err sample__run(const sample_args *args, kernel_ctx *ctx, sample_one_fn sample_one);

#endif
