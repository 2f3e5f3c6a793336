/* Groups still share one pool and allocate together; none of them is cached. */
#include "engine/kv/kv_no_prefix_cache.h"

static void lookup(kv_hit *hit, const kv_coordinator *c, const block_hash *hashes, int32_t n_hashes,
                   int32_t max_tokens)
{
    (void)hashes;
    (void)n_hashes;
    (void)max_tokens;
    hit->n_tokens = 0;
    hit->n_longest_tokens = 0;
    for (int32_t g = 0; g < c->n_groups; g++)
        hit->n_blocks[g] = 0;
}

const kv_coordinator_ops *kv_no_prefix_cache_get_ops(void)
{
    static const kv_coordinator_ops ops = {.name = "no prefix cache", .lookup = lookup};
    return &ops;
}
