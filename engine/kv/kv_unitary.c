/* The group's block is the hash block, so a request's i-th hash names its i-th block and the
 * group's own search decides. */
#include "engine/kv/kv_unitary.h"

static void lookup(kv_hit *hit, const kv_coordinator *c, const block_hash *hashes, int32_t n_hashes,
                   int32_t max_tokens)
{
    const kv_group_manager *g = &c->groups[0];
    int32_t bs = g->spec.block_size;
    hit->n_blocks[0] = g->spec.ops->lookup(hit->blocks[0], g, hashes, n_hashes, max_tokens, bs);
    hit->n_tokens = hit->n_blocks[0] * bs;
}

static void publish(kv_coordinator *c, int32_t row, const block_hash *hashes, int32_t n_hashes,
                    int32_t n_tokens)
{
    kv_group_manager_publish(&c->groups[0], row, hashes, n_hashes, n_tokens);
}

static void common_prefix(int32_t *out, const kv_coordinator *c, int32_t row)
{
    out[0] = c->groups[0].spec.ops->common_prefix(&c->groups[0], row);
}

const kv_coordinator_ops *kv_unitary_get_ops(void)
{
    static const kv_coordinator_ops ops = {
        .name = "unitary",
        .lookup = lookup,
        .publish = publish,
        .common_prefix = common_prefix,
    };
    return &ops;
}
