/* A hit is downward-closed here: any shorter prefix of a hit is a hit, so the search runs left to
 * right to the first miss. Nothing is ever skipped. Blocks need no zeroing: the attention kernels
 * do not read beyond a sequence's length. */
#include "engine/kv/kv_full_attention.h"

static int32_t lookup(block_id *blocks, const kv_group_manager *g, const block_hash *hashes,
                      int32_t n_hashes, int32_t max_tokens, int32_t alignment_tokens)
{
    int32_t bs = g->spec.block_size;
    int32_t n_max = PGD_MIN(max_tokens / bs, n_hashes);
    int32_t n_hits = 0;
    while (n_hits < n_max) {
        block_id id = block_pool_lookup(g->pool, &hashes[n_hits], g->group_id);
        if (id < 0)
            break;
        blocks[n_hits++] = id;
    }
    while (n_hits * bs % alignment_tokens != 0)
        n_hits--;
    return n_hits;
}

static int32_t skipped_tokens(const kv_group_manager *g, int32_t n_computed_tokens)
{
    (void)g;
    (void)n_computed_tokens;
    return 0;
}

static int32_t max_held_blocks(const kv_group_manager *g)
{
    (void)g;
    return INT32_MAX;
}

static int32_t common_prefix(const kv_group_manager *g, int32_t row)
{
    const block_id *table = kv_group_manager_get_table(g, row);
    int32_t n = 0;
    while (n < g->rows[row].n_blocks && block_pool_ref_count(g->pool, table[n]) == g->n_holders)
        n++;
    return n;
}

const kv_group_ops *kv_full_attention_get_ops(void)
{
    static const kv_group_ops ops = {
        .name = "full",
        .lookup = lookup,
        .skipped_tokens = skipped_tokens,
        .max_held_blocks = max_held_blocks,
        .common_prefix = common_prefix,
    };
    return &ops;
}
