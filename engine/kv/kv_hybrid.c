/* One prefix length that every set of groups can reuse.
 *
 * Each search gives the longest length at most the candidate that its set can reuse. The candidate
 * falls to it, and the sets are asked in turn until all of them have confirmed the same candidate:
 * the greatest length that holds in every set, since no search passes over one. Closed sets (full
 * attention) are asked once, for what they reuse they also reuse when it is cut; a single other set
 * confirms its own answer, so full attention and one more kind take one round.
 *
 * Draft heads (CO5): a set that drops asks that the block behind its answer be cached too, with the
 * candidate as the bound of the answer and the request's tokens as that of the block. So a length
 * that was confirmed once is confirmed again, however many sets drop, and the candidate cannot
 * spiral down by a block per round. */
#include "engine/kv/kv_hybrid.h"

static void lookup(kv_hit *hit, const kv_coordinator *c, const block_hash *hashes, int32_t n_hashes,
                   int32_t max_tokens)
{
    int32_t n_known = (int32_t)PGD_MIN((int64_t)n_hashes * c->hash_block_size, (int64_t)max_tokens);
    int32_t n_open = c->n_sets - c->n_closed_sets;
    int32_t n_tokens = n_known;
    int32_t n_longest = 0;
    for (int32_t s = 0; s < c->n_closed_sets; s++) {
        n_tokens = kv_coordinator_search(hit, c, &c->sets[s], hashes, n_known, n_tokens,
                                         c->alignment_tokens);
        n_longest = PGD_MAX(n_longest, n_tokens);
    }
    int32_t n_confirmed = 0;
    for (int32_t s = 0; n_confirmed < n_open; s = (s + 1) % n_open) {
        int32_t n_found = kv_coordinator_search(hit, c, &c->sets[c->n_closed_sets + s], hashes,
                                                n_known, n_tokens, c->alignment_tokens);
        n_confirmed = n_found == n_tokens ? n_confirmed + 1 : 1;
        n_tokens = n_found;
        n_longest = PGD_MAX(n_longest, n_found);
    }
    hit->n_tokens = n_tokens;
    hit->n_longest_tokens = n_longest;
    for (int32_t g = 0; g < c->n_groups; g++)
        hit->n_blocks[g] = c->groups[g].is_cached ? n_tokens / c->groups[g].spec.block_size : 0;
}

const kv_coordinator_ops *kv_hybrid_get_ops(void)
{
    static const kv_coordinator_ops ops = {.name = "hybrid", .lookup = lookup};
    return &ops;
}
