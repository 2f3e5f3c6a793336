/* Makes the KV-cache groups of a model act as one: a prefix hit must hold in every group, an
 * allocation succeeds in all or none.
 *
 * Three kinds (rule CO1), each a kv_coordinator_ops in a file of its own: caching off (any number
 * of groups), one group, several groups with caching. They differ in how they look up a prefix.
 * The struct is open for those files.
 * Groups of equal spec are one set: a prefix must hit in all of them at once (CO3). Groups that are
 * never cached (cross attention) are in no set and do not limit a hit.
 * Owns:    its groups; borrows the pool until destroy
 * Thread:  core
 */
#ifndef ENGINE_KV_KV_COORDINATOR_H
#define ENGINE_KV_KV_COORDINATOR_H

#include "engine/kv/kv_group_manager.h"

typedef struct kv_coordinator kv_coordinator;

/* A reusable prefix. In every cached group blocks[g] covers n_tokens; null blocks where the window
 * skips. */
typedef struct kv_hit {
    int32_t n_tokens;
    int32_t n_longest_tokens; /* >= n_tokens: the longest prefix that one set found within what the
                                 sets before it had left (CO7) */
    int32_t n_blocks[PGD_MAX_KV_GROUPS];
    block_id *blocks[PGD_MAX_KV_GROUPS]; /* [max blocks of a row] each */
} kv_hit;

typedef struct kv_coordinator_ops {
    const char *name;
    /* Longest prefix of at most max_tokens tokens that every cached group can reuse. */
    void (*lookup)(kv_hit *hit, const kv_coordinator *c, const block_hash *hashes, int32_t n_hashes,
                   int32_t max_tokens);
} kv_coordinator_ops;

typedef struct kv_group_set {
    int32_t n_groups;
    int32_t group_ids[PGD_MAX_KV_GROUPS];
} kv_group_set;

struct kv_coordinator {
    const kv_coordinator_ops *ops;
    block_pool *pool;
    int32_t hash_block_size;
    int32_t alignment_tokens; /* S: the length of a hit is a multiple of every cached group's block
                                 size */
    int32_t n_groups;
    kv_group_manager groups[PGD_MAX_KV_GROUPS];
    kv_group_row *rows; /* [n_rows], of all groups side by side, row_bytes apart */
    size_t rows_bytes;
    int32_t n_sets;
    int32_t
        n_closed_sets; /* the first ones: any shorter prefix of a hit is a hit (full attention) */
    kv_group_set sets[PGD_MAX_KV_GROUPS];
};

typedef struct kv_coordinator_opts {
    block_pool *pool;
    kv_zero_list *zero_list;
    kv_events *events;           /* borrow until destroy; NULL = none */
    const kv_group_spec *groups; /* [n_groups], copied */
    int32_t n_groups;
    bool enable_caching;
    bool
        use_eagle; /* hits leave out the block behind them; of the groups marked is_eagle, or of all
                       when none is */
    int32_t hash_block_size; /* tokens per block hash of a request; divides the block size of every
                                cached group, and is that of a single one */
    int32_t n_rows;
    int32_t max_model_len;
    int32_t max_unfinished_tokens; /* as in kv_group_opts */
} kv_coordinator_opts;

/* What a request asks blocks for. */
typedef struct kv_need {
    int32_t n_computed_tokens; /* its hit included */
    int32_t n_tokens;          /* to be covered */
    int32_t n_encoder_tokens;
} kv_need;

/* Errors: PGD_EINVAL, PGD_ENOMEM */
PGD_MUST_USE pgd_err kv_coordinator_create(kv_coordinator **out, const kv_coordinator_opts *opts);
void kv_coordinator_destroy(kv_coordinator *c);

/* Longest hit of a set alone, in tokens: a multiple of alignment_tokens, at most max_tokens; tokens
 * from n_known on are not looked at. Fills the hit's lists of the set's groups. */
int32_t kv_coordinator_search(kv_hit *hit, const kv_coordinator *c, const kv_group_set *set,
                              const block_hash *hashes, int32_t n_known_tokens, int32_t max_tokens,
                              int32_t alignment_tokens);

/* Blocks that covering the need takes out of the free queue: fresh ones and free hits (AL5). row
 * -1 = not a holder; hit NULL = none. */
int32_t kv_coordinator_n_needed(const kv_coordinator *c, int32_t row, const kv_hit *hit,
                                const kv_need *need);
/* The same for the admission gate: each group bounded by what a request ever holds of it at a time
 * (AL3, SM9). Not for an allocation, which may need more at once. n_given: references per block
 * that are to be given back before, or NULL. */
int32_t kv_coordinator_n_at_most(const kv_coordinator *c, int32_t row, const kv_hit *hit,
                                 const kv_need *need, const int32_t *n_given);
/* All groups take their hits before any group allocates, so that no allocation evicts another
 * group's hit. */
void kv_coordinator_attach(kv_coordinator *c, int32_t row, const kv_hit *hit,
                           int32_t n_computed_tokens);
void kv_coordinator_allocate(kv_coordinator *c, int32_t row, const kv_need *need);
void kv_coordinator_remove_skipped(kv_coordinator *c, int32_t row, int32_t n_computed_tokens);
/* Publishes what is full within the first n_tokens tokens. */
void kv_coordinator_publish(kv_coordinator *c, int32_t row, const kv_content *content,
                            int32_t n_tokens);
/* Un-publishes the row's blocks that hold anything beyond the first n_tokens tokens. */
void kv_coordinator_unpublish(kv_coordinator *c, int32_t row, int32_t n_tokens);
/* out: [n_groups], leading blocks that every holder shares. */
void kv_coordinator_common_prefix(int32_t *out, const kv_coordinator *c);
void kv_coordinator_free(kv_coordinator *c, int32_t row);

#endif
