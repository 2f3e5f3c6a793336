/* The block lists of one KV-cache group: what all attention kinds share (rules SM1, SM3, SM9, SM10,
 * AL5-AL10).
 *
 * A group is a set of layers that use the same block table. Each holder of blocks has a row (given
 * by kv_manager); entry i of the row's table covers tokens [i*bs, (i+1)*bs) of the request, or of its
 * encoder; skipped entries are the null block. What differs between kinds of attention is in
 * kv_group_ops. The struct is open for kv_coordinator and kv_manager, which read it; only the
 * functions below write it.
 * Owns:    tables; borrows the pool and the rows until deinit
 * Limits:  n_rows * max_blocks_per_row entries
 * Thread:  core
 */
#ifndef ENGINE_KV_KV_GROUP_MANAGER_H
#define ENGINE_KV_KV_GROUP_MANAGER_H

#include "engine/kv/kv_group_ops.h"
#include "engine/kv/kv_shared_prefix.h"

/* Blocks that the worker zeroes before the next step, each once. */
typedef struct kv_zero_list {
    block_id *ids;      /* [pool blocks] */
    uint8_t *is_listed; /* [pool blocks] */
    int32_t n_ids;
} kv_zero_list;

/* How far a row's counts of tokens may grow before the row changes. */
typedef struct kv_quiet {
    int32_t max_need_tokens; /* to be covered, at most: takes no block */
    int32_t publish_at;      /* known tokens, fewer: nothing to publish */
    int32_t skip_at;         /* computed tokens, fewer: no block leaves the window */
} kv_quiet;

/* What a request has to publish; borrows for the call. */
typedef struct kv_content {
    const block_hash *hashes; /* [n_hashes] */
    int32_t n_hashes;
    const token_id *tokens;
    size_t extra_bytes; /* extra keys of the first block (HS2) */
    const void *extra;
} kv_content;

typedef struct kv_group_row {
    int32_t n_blocks;  /* entries of the table, null ones included */
    int32_t n_skipped; /* leading entries that are null */
    int32_t n_hits;    /* leading entries that the row began with */
    int32_t n_cached;  /* leading entries that are published, hit, skipped or of no use to a hit */
    bool is_holder;
} kv_group_row;

typedef struct kv_group_manager kv_group_manager;

struct kv_group_manager {
    kv_group_spec spec;
    int32_t group_id;
    block_pool *pool;
    kv_zero_list *zero_list;
    kv_events *events;        /* NULL = nobody asked */
    bool is_cached;           /* its blocks are published and looked up */
    int32_t hashes_per_block; /* >= 1 if it is cached, and so the next two */
    int32_t alignment_blocks; /* the length of a hit is a multiple of this */
    int32_t n_drop;           /* as in kv_lookup */
    int32_t n_rows;
    int32_t max_blocks_per_row;
    int32_t max_held_blocks; /* SM9 */
    char *rows;              /* [n_rows], row_bytes apart: a kv_group_row each */
    size_t row_bytes;
    block_id *tables; /* [n_rows, max_blocks_per_row] */
    size_t tables_bytes;
    block_id *scratch; /* [max_blocks_per_row] */
    int32_t n_holders;
    bool has_shared_prefix; /* cached, and skips nothing */
    kv_shared_prefix shared_prefix;
};

typedef struct kv_group_opts {
    kv_group_spec spec;
    int32_t group_id;
    block_pool *pool;        /* borrow until deinit */
    kv_zero_list *zero_list; /* borrow until deinit */
    kv_events *events;       /* borrow until deinit; NULL = none */
    bool is_cached;
    int32_t hash_block_size;  /* divides the block size if the group is cached */
    int32_t alignment_tokens; /* a multiple of the block size if the group is cached */
    int32_t n_drop;
    int32_t n_rows;
    /* [n_rows] kv_group_rows, zeroed, row_bytes apart so that those of all groups lie together; borrow
     * until deinit. */
    void *rows;
    size_t row_bytes;
    int32_t max_model_len;
    int32_t max_unfinished_tokens; /* of one request, scheduled or looked ahead and not yet known to
                                      be done */
} kv_group_opts;

PGD_MUST_USE pgd_err kv_group_manager_init(kv_group_manager *g, const kv_group_opts *opts);
void kv_group_manager_deinit(kv_group_manager *g);

static inline kv_group_row *kv_group_manager_get_row(const kv_group_manager *g, int32_t row)
{
    return (kv_group_row *)(void *)(g->rows + (size_t)row * g->row_bytes);
}

static inline block_id *kv_group_manager_get_table(const kv_group_manager *g, int32_t row)
{
    return g->tables + (size_t)row * (size_t)g->max_blocks_per_row;
}

/* New blocks that n_need_tokens tokens take beyond what the row holds; row -1 = a request without
 * blocks that brings n_hits hit blocks and has n_computed tokens computed by them. The hit blocks
 * themselves are not counted. */
int32_t kv_group_manager_n_fresh(const kv_group_manager *g, int32_t row, int32_t n_hits,
                                 int32_t n_computed_tokens, int32_t n_need_tokens);
/* Hit blocks that attaching takes out of the free queue, once each block has n_given[id] references
 * less than now (NULL = none). */
int32_t kv_group_manager_n_free_hits(const kv_group_manager *g, const block_id *hits,
                                     int32_t n_hits, int32_t n_computed_tokens,
                                     const int32_t *n_given);
/* For the gate alone (SM9): blocks that the row may still hold beyond those it took itself; row
 * -1 = a newcomer. */
int32_t kv_group_manager_n_allowed(const kv_group_manager *g, int32_t row);
/* Starts a row: touches the hits that are not skipped and puts them in its table, null blocks in
 * front. */
void kv_group_manager_attach(kv_group_manager *g, int32_t row, const block_id *hits, int32_t n_hits,
                             int32_t n_computed_tokens);
/* Grows the table to cover n_need_tokens; the pool must have the blocks. */
void kv_group_manager_allocate(kv_group_manager *g, int32_t row, int32_t n_need_tokens);
/* Publishes the full blocks of the first n_tokens tokens that are not yet published and that a hit
 * can need (CO6). */
void kv_group_manager_publish(kv_group_manager *g, int32_t row, const kv_content *content,
                              int32_t n_tokens);
/* Un-publishes the row's blocks from block index first_idx on. */
void kv_group_manager_unpublish(kv_group_manager *g, int32_t row, int32_t first_idx);
/* SM3: frees blocks wholly before what n_computed tokens leave in the window, highest index first.
 */
void kv_group_manager_remove_skipped(kv_group_manager *g, int32_t row, int32_t n_computed_tokens);
/* Leading blocks that every holder shares (CPX1); 0 in groups that skip or are not cached. O(1). */
int32_t kv_group_manager_common_prefix(const kv_group_manager *g);
/* Integrity, O(n); aborts on a fault. */
void kv_group_manager_check(const kv_group_manager *g);
/* Hints for a row that is about to change, in this order, each some time after the one before: its
 * tables where a block is added for token n_tokens or leaves; the block that is published next and, if
 * it leaves, that at the end of the window; the place of the hash that is published next, and once it
 * has arrived the block that stands there. */
void kv_group_manager_prefetch_row(const kv_group_manager *g, int32_t row, int32_t n_tokens,
                                   int32_t n_computed_tokens);
void kv_group_manager_prefetch_blocks(const kv_group_manager *g, int32_t row, bool is_skipping);
void kv_group_manager_prefetch_key(const kv_group_manager *g, int32_t row, const block_hash *hashes,
                                   int32_t n_hashes, bool has_arrived);
/* Lowers the bounds to the row's. */
void kv_group_manager_bound_growth(kv_quiet *quiet, const kv_group_manager *g, int32_t row);
/* The same for skip_at. */
void kv_group_manager_bound_skips(kv_quiet *quiet, const kv_group_manager *g, int32_t row);
/* Ends the row: frees its blocks, last first. */
void kv_group_manager_free(kv_group_manager *g, int32_t row);

#endif
