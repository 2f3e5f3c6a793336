/* Full attention: every token attends to all earlier ones (rule SM4). Nothing is ever skipped, so a
 * hit may be cut anywhere and the search runs left to right to the first miss. Blocks need no
 * zeroing: the attention kernels do not read beyond a sequence's length. */
#include "engine/kv/kv_group_ops.h"

static int32_t lookup(block_id *const *blocks, const kv_lookup *q)
{
    int32_t n_wanted = q->max_blocks + q->n_drop;
    int32_t n_found = 0;
    while (n_found < n_wanted && kv_group_ops_find(blocks, q, n_found)) {
        kv_group_ops_prefetch(q, n_found);
        n_found++;
    }
    return kv_group_ops_align(q, n_found - q->n_drop);
}

const kv_group_ops kv_full_attention_ops = {.name = "full", .lookup = lookup};
