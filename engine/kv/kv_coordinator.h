/* Makes the KV-cache groups of a model act as one: a prefix hit must hold in every group, an
 * allocation succeeds in all or none.
 *
 * Three kinds (rule CO1), each a kv_coordinator_ops in a file of its own: caching off (any number
 * of groups), one group, several groups with caching. The struct is open for those files.
 * Owns:    its groups; borrows the pool until destroy
 * Thread:  core
 */
#ifndef ENGINE_KV_KV_COORDINATOR_H
#define ENGINE_KV_KV_COORDINATOR_H

#include "engine/kv/kv_group_manager.h"

typedef struct kv_coordinator kv_coordinator;

/* A reusable prefix. In every group blocks[g] covers n_tokens; null blocks where the window skips.
 */
typedef struct kv_hit {
    int32_t n_tokens;
    int32_t n_blocks[PGD_MAX_KV_GROUPS];
    block_id *blocks[PGD_MAX_KV_GROUPS]; /* [max blocks of a row] each */
} kv_hit;

typedef struct kv_coordinator_ops {
    const char *name;
    /* Longest prefix of at most max_tokens tokens that every group can reuse. */
    void (*lookup)(kv_hit *hit, const kv_coordinator *c, const block_hash *hashes, int32_t n_hashes,
                   int32_t max_tokens);
    /* Publishes what is full within the first n_tokens tokens. */
    void (*publish)(kv_coordinator *c, int32_t row, const block_hash *hashes, int32_t n_hashes,
                    int32_t n_tokens);
    /* out: [n_groups], leading blocks of the row that every holder shares. */
    void (*common_prefix)(int32_t *out, const kv_coordinator *c, int32_t row);
} kv_coordinator_ops;

struct kv_coordinator {
    const kv_coordinator_ops *ops;
    block_pool *pool;
    int32_t n_groups;
    kv_group_manager groups[PGD_MAX_KV_GROUPS];
};

typedef struct kv_coordinator_opts {
    block_pool *pool;
    kv_zero_list *zero_list;
    const kv_group_spec *groups; /* [n_groups], copied */
    int32_t n_groups;
    bool enable_caching;
    int32_t hash_block_size; /* tokens per block hash of a request */
    int32_t n_rows;
    int32_t max_model_len;
    int32_t max_batched_tokens;
} kv_coordinator_opts;

/* Errors: PGD_EINVAL, PGD_ENOMEM, PGD_EUNSUPPORTED (prefix caching over several groups) */
PGD_MUST_USE pgd_err kv_coordinator_create(kv_coordinator **out, const kv_coordinator_opts *opts);
void kv_coordinator_destroy(kv_coordinator *c);

/* Blocks that covering n_need tokens takes out of the free queue: fresh ones and free hits (AL5).
 * row -1 = not a holder; hit NULL = none. With is_gate fresh blocks are bounded by what a group
 * ever holds at a time (AL3). */
int32_t kv_coordinator_n_needed(const kv_coordinator *c, int32_t row, const kv_hit *hit,
                                int32_t n_computed_tokens, int32_t n_need_tokens, bool is_gate);
/* All groups take their hits before any group allocates, so that no allocation evicts another
 * group's hit. */
void kv_coordinator_attach(kv_coordinator *c, int32_t row, const kv_hit *hit,
                           int32_t n_computed_tokens);
void kv_coordinator_allocate(kv_coordinator *c, int32_t row, int32_t n_need_tokens);
void kv_coordinator_remove_skipped(kv_coordinator *c, int32_t row, int32_t n_computed_tokens);
/* Un-publishes the row's blocks that hold anything beyond the first n_tokens tokens. */
void kv_coordinator_unpublish(kv_coordinator *c, int32_t row, int32_t n_tokens);
void kv_coordinator_free(kv_coordinator *c, int32_t row);

#endif
