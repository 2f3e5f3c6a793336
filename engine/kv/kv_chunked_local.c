/* Chunked local attention: a token attends to the earlier tokens of its own chunk of `window`
 * tokens (rule SM6).
 *
 * The blocks of earlier chunks are not needed, so a prefix that ends with a chunk is a hit without
 * any lookup; within the candidate's last chunk the search runs left to right to the first miss.
 * When a chunk does not begin with a block, or a block behind the answer is asked for, even the
 * start of the last chunk may be out of reach: the search goes on in the chunk before. */
#include "engine/kv/kv_group_ops.h"

static int32_t lookup(block_id *const *blocks, const kv_lookup *q)
{
    int32_t n = q->max_blocks;
    int32_t first = kv_group_ops_first_needed(q, n);
    while (n > 0) {
        int32_t n_found = first;
        while (n_found < n + q->n_drop && kv_group_ops_find(blocks, q, n_found))
            n_found++;
        int32_t n_reached = kv_group_ops_align(q, n_found - q->n_drop);
        bool is_in_chunk = kv_group_ops_first_needed(q, n_reached) == first;
        n = n_reached;
        if (is_in_chunk)
            break;
        first = kv_group_ops_first_needed(q, n);
    }
    kv_group_ops_skip(blocks, q, PGD_MIN(first, n));
    return n;
}

static int32_t skipped_tokens(const kv_group_spec *spec, int32_t n_computed_tokens)
{
    return n_computed_tokens - n_computed_tokens % spec->window;
}

static int64_t tokens_to_skip(const kv_group_spec *spec, int32_t n_tokens)
{
    return PGD_ROUND_UP((int64_t)n_tokens, spec->window);
}

static int32_t max_held_blocks(const kv_group_spec *spec, int32_t max_unfinished_tokens,
                               int32_t max_model_len)
{
    int64_t n_tokens = (int64_t)spec->window + max_unfinished_tokens;
    bool may_begin_inside = spec->window % spec->block_size != 0;
    return PGD_CEIL_DIV((int32_t)PGD_MIN(n_tokens, (int64_t)max_model_len), spec->block_size) +
           may_begin_inside;
}

const kv_group_ops kv_chunked_local_ops = {
    .name = "chunked local",
    .lookup = lookup,
    .skipped_tokens = skipped_tokens,
    .tokens_to_skip = tokens_to_skip,
    .max_held_blocks = max_held_blocks,
};
