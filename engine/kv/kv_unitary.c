/* The group's block is the hash block, so a request's i-th hash names its i-th block and the
 * group's own search decides. */
#include "engine/kv/kv_unitary.h"

static void lookup(kv_hit *hit, const kv_coordinator *c, const block_hash *hashes, int32_t n_hashes,
                   int32_t max_tokens)
{
    int32_t n_known = (int32_t)PGD_MIN((int64_t)n_hashes * c->hash_block_size, (int64_t)max_tokens);
    hit->n_tokens =
        kv_coordinator_search(hit, c, &c->sets[0], hashes, n_known, n_known, c->alignment_tokens);
    hit->n_longest_tokens = hit->n_tokens;
}

const kv_coordinator_ops *kv_unitary_get_ops(void)
{
    static const kv_coordinator_ops ops = {.name = "unitary", .lookup = lookup};
    return &ops;
}
