/* Sliding window: a token attends to itself and the window - 1 tokens before it (rule SM5).
 *
 * Only the last ceil((window - 1) / block_size) blocks of a prefix must be cached, so the longest
 * prefix is sought from the right. A candidate of n blocks needs those from `first` on:
 *
 *   0        first              known    n + n_drop
 *   | null    | to be looked at → | cached |
 *
 * A miss at idx rules out every candidate that reaches beyond it, and since those needed are looked
 * at from the left, the next candidate ends as far left as can be: nothing cached costs one look per
 * window, not one per block. What was found before the miss is the end of the next candidate; no
 * block is looked at twice. Candidates shorter than the window need all their blocks. */
#include "engine/kv/kv_group_ops.h"

static int32_t lookup(block_id *const *blocks, const kv_lookup *q)
{
    int32_t n = q->max_blocks;
    int32_t first = kv_group_ops_first_needed(q, n);
    int32_t known = n + q->n_drop;
    int32_t idx = first;
    while (n > 0 && idx < known) {
        if (kv_group_ops_find(blocks, q, idx)) {
            idx++;
            continue;
        }
        n = kv_group_ops_align(q, idx - q->n_drop);
        known = PGD_MIN(first, n + q->n_drop);
        first = kv_group_ops_first_needed(q, n);
        idx = first;
    }
    kv_group_ops_skip(blocks, q, PGD_MIN(first, n));
    return n;
}

static int32_t skipped_tokens(const kv_group_spec *spec, int32_t n_computed_tokens)
{
    return PGD_MAX(n_computed_tokens - spec->window + 1, 0);
}

static int64_t tokens_to_skip(const kv_group_spec *spec, int32_t n_tokens)
{
    return (int64_t)n_tokens + spec->window - 1;
}

/* The blocks of the window and of what is unfinished; the window may begin inside a block. */
static int32_t max_held_blocks(const kv_group_spec *spec, int32_t max_unfinished_tokens,
                               int32_t max_model_len)
{
    int64_t n_tokens = (int64_t)spec->window - 1 + max_unfinished_tokens;
    return PGD_CEIL_DIV((int32_t)PGD_MIN(n_tokens, (int64_t)max_model_len), spec->block_size) + 1;
}

const kv_group_ops kv_sliding_window_ops = {
    .name = "sliding window",
    .lookup = lookup,
    .skipped_tokens = skipped_tokens,
    .tokens_to_skip = tokens_to_skip,
    .max_held_blocks = max_held_blocks,
};
