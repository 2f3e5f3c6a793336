/* What differs between kinds of attention in the KV manager: which blocks stay needed, how a cached
 * prefix is found, how much one request holds (rules SM4-SM7, SM9).
 *
 * A kind is one file that defines a kv_group_ops, and a row in the table below. Everything else
 * follows from one fact: when n tokens are computed, the group still needs the blocks from
 * skipped_tokens(n) / block_size on. So a prefix of n tokens can be reused when all blocks from
 * there to n / block_size are cached, and n_drop more: the draft heads that share the target's
 * hidden states must see the next block matched as well, since their KV of a block's last token
 * depends on the token behind it (CO5).
 * Thread:  core
 */
#ifndef ENGINE_KV_KV_GROUP_OPS_H
#define ENGINE_KV_KV_GROUP_OPS_H

#include "common/model/attention_kind.h"
#include "engine/kv/block_pool.h"

typedef struct kv_group_ops kv_group_ops;

typedef struct kv_group_spec {
    const kv_group_ops *ops;
    int32_t block_size;   /* tokens */
    int32_t window;       /* tokens: of the window or the chunk; encoder tokens at most, 0 = as many
                             as max_model_len */
    bool zero_new_blocks; /* the worker must zero a block before its first use (SM10) */
    bool is_eagle; /* holds layers of a draft head that continues the target's hidden states */
} kv_group_spec;

/* A search in groups of equal spec at once; counts are in blocks of that spec. */
typedef struct kv_lookup {
    const block_pool *pool;
    const kv_group_spec *spec;
    const int32_t *group_ids; /* [n_groups] */
    int32_t n_groups;
    const block_hash *hashes; /* [n_known * hashes_per_block] */
    int32_t hashes_per_block; /* a block is named by its last hash (HS6) */
    int32_t n_known;          /* blocks of the request that have a name and may be looked at */
    int32_t max_blocks; /* longest wanted answer: >= 0, aligned, max_blocks + n_drop <= n_known */
    int32_t alignment_blocks; /* the answer is a multiple of this */
    int32_t n_drop;           /* blocks behind the answer that must be cached too: 0 or 1 */
} kv_lookup;

struct kv_group_ops {
    const char *name;
    bool is_of_encoder; /* blocks hold the encoder's tokens, which are there from the start */
    /* Longest reusable prefix in blocks. Fills blocks[j][0..n) for group_ids[j], null where the
     * window skips; may write up to blocks[j][n_known - 1]. NULL: never cached. */
    int32_t (*lookup)(block_id *const *blocks, const kv_lookup *q);
    /* Leading tokens that no later token attends to once n_computed tokens are computed; never
     * falls as n_computed grows. NULL: none ever, so any shorter prefix of a hit is a hit. */
    int32_t (*skipped_tokens)(const kv_group_spec *spec, int32_t n_computed_tokens);
    /* The least number of computed tokens with which n tokens, at least 1, are skipped. */
    int64_t (*tokens_to_skip)(const kv_group_spec *spec, int32_t n_tokens);
    /* Most blocks that one request holds at a time, for the admission gate alone (SM9), when up to
     * max_unfinished of its tokens are scheduled and not known to be done. NULL: no bound. */
    int32_t (*max_held_blocks)(const kv_group_spec *spec, int32_t max_unfinished_tokens,
                               int32_t max_model_len);
};

#define KV_GROUP_OPS_TABLE(X)                   \
    X(ATTENTION_FULL, kv_full_attention_ops)    \
    X(ATTENTION_SLIDING, kv_sliding_window_ops) \
    X(ATTENTION_CHUNKED, kv_chunked_local_ops)  \
    X(ATTENTION_CROSS, kv_cross_attention_ops)

#define KV_GROUP_OPS_DECLARE(kind, ops) extern const kv_group_ops ops;
KV_GROUP_OPS_TABLE(KV_GROUP_OPS_DECLARE)
#undef KV_GROUP_OPS_DECLARE

/* Static storage; NULL for a kind that is not in the table. */
const kv_group_ops *kv_group_ops_of(attention_kind kind);

/* Blocks behind a hit that group g leaves out, 0 or 1 (CO5): of the groups marked is_eagle, or of all
 * if none is. */
int32_t kv_group_ops_n_drop(const kv_group_spec *groups, int32_t n_groups, int32_t g,
                            bool use_eagle);

/* For a search that goes left to right and is at idx: asks for the memory of what comes next. */
void kv_group_ops_prefetch(const kv_lookup *q, int32_t idx);
/* Whether block idx is cached in every group of the search; then its copies are blocks[j][idx]. */
bool kv_group_ops_find(block_id *const *blocks, const kv_lookup *q, int32_t idx);
/* Makes entries [0, n_blocks) the null block in every group of the search. */
void kv_group_ops_skip(block_id *const *blocks, const kv_lookup *q, int32_t n_blocks);
/* First block that a prefix of n_blocks blocks still needs. */
int32_t kv_group_ops_first_needed(const kv_lookup *q, int32_t n_blocks);

static inline int32_t kv_group_ops_skipped_blocks(const kv_group_spec *spec,
                                                  int32_t n_computed_tokens)
{
    if (spec->ops->skipped_tokens == NULL)
        return 0;
    return spec->ops->skipped_tokens(spec, n_computed_tokens) / spec->block_size;
}

/* The longest aligned number of blocks that is at most n_blocks, which may be negative. */
static inline int32_t kv_group_ops_align(const kv_lookup *q, int32_t n_blocks)
{
    return n_blocks > 0 ? n_blocks - n_blocks % q->alignment_blocks : 0;
}

#endif
