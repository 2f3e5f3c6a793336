/* The block lists of one KV-cache group: what all attention kinds share (rules SM1, SM3, SM9, SM10,
 * AL5-AL10).
 *
 * A group is a set of layers that use the same block table. Each holder of blocks has a row (given
 * by kv_manager); entry i of the row's table covers tokens [i*bs, (i+1)*bs); skipped entries are
 * the null block. What differs between kinds of attention is in kv_group_ops, one file per kind.
 * The struct is open for the ops files, which read it; only the functions below write it.
 * Owns:    tables and rows; borrows the pool until deinit
 * Limits:  n_rows * max_blocks_per_row entries
 * Thread:  core
 */
#ifndef ENGINE_KV_KV_GROUP_MANAGER_H
#define ENGINE_KV_KV_GROUP_MANAGER_H

#include "engine/kv/block_pool.h"

typedef struct kv_group_manager kv_group_manager;

typedef struct kv_group_ops {
    const char *name;
    /* Longest reusable prefix of at most max_tokens tokens whose length is a multiple of
     * alignment_tokens: fills blocks (null block = not needed by the window) and returns their
     * number. */
    int32_t (*lookup)(block_id *blocks, const kv_group_manager *g, const block_hash *hashes,
                      int32_t n_hashes, int32_t max_tokens, int32_t alignment_tokens);
    /* Leading tokens that no later token will attend to once n_computed tokens are computed. */
    int32_t (*skipped_tokens)(const kv_group_manager *g, int32_t n_computed_tokens);
    /* Most blocks that one request holds at a time, for the admission gate alone (SM9); INT32_MAX =
     * no bound. */
    int32_t (*max_held_blocks)(const kv_group_manager *g);
    /* Leading blocks of the row that every holder shares (CPX1). */
    int32_t (*common_prefix)(const kv_group_manager *g, int32_t row);
} kv_group_ops;

typedef struct kv_group_spec {
    const kv_group_ops *ops;
    int32_t block_size;   /* tokens */
    int32_t window;       /* attention window in tokens, 0 = all */
    bool zero_new_blocks; /* the worker must zero a block before its first use (SM10) */
} kv_group_spec;

/* Blocks that the worker zeroes before the next step, each once. */
typedef struct kv_zero_list {
    block_id *ids;      /* [pool blocks] */
    uint8_t *is_listed; /* [pool blocks] */
    int32_t n_ids;
} kv_zero_list;

typedef struct kv_group_row {
    int32_t n_blocks; /* entries of the table, null ones included */
    int32_t n_cached; /* leading entries that are published, hit or skipped */
    bool is_holder;
} kv_group_row;

struct kv_group_manager {
    kv_group_spec spec;
    int32_t group_id;
    block_pool *pool;
    kv_zero_list *zero_list;
    int32_t n_rows;
    int32_t max_blocks_per_row;
    int32_t max_batched_tokens;
    int32_t max_model_len;
    kv_group_row *rows; /* [n_rows] */
    block_id *tables;   /* [n_rows, max_blocks_per_row] */
    size_t tables_bytes;
    block_id *scratch; /* [max_blocks_per_row] */
    int32_t n_holders;
};

typedef struct kv_group_opts {
    kv_group_spec spec;
    int32_t group_id;
    block_pool *pool;        /* borrow until deinit */
    kv_zero_list *zero_list; /* borrow until deinit */
    int32_t n_rows;
    int32_t max_model_len;
    int32_t max_batched_tokens;
} kv_group_opts;

PGD_MUST_USE pgd_err kv_group_manager_init(kv_group_manager *g, const kv_group_opts *opts);
void kv_group_manager_deinit(kv_group_manager *g);

static inline block_id *kv_group_manager_get_table(const kv_group_manager *g, int32_t row)
{
    return g->tables + (size_t)row * (size_t)g->max_blocks_per_row;
}

/* New blocks that n_need_tokens tokens take beyond what the row holds; row -1 = a request without
 * blocks that brings n_hits hit blocks and has n_computed tokens computed by them. The hit blocks
 * themselves are not counted. */
int32_t kv_group_manager_n_fresh(const kv_group_manager *g, int32_t row, int32_t n_hits,
                                 int32_t n_computed_tokens, int32_t n_need_tokens);
/* Hit blocks that attaching takes out of the free queue. */
int32_t kv_group_manager_n_free_hits(const kv_group_manager *g, const block_id *hits,
                                     int32_t n_hits, int32_t n_computed_tokens);
/* Starts a row: touches the hits that are not skipped and puts them in its table, null blocks in
 * front. */
void kv_group_manager_attach(kv_group_manager *g, int32_t row, const block_id *hits, int32_t n_hits,
                             int32_t n_computed_tokens);
/* Grows the table to cover n_need_tokens; the pool must have the blocks. */
void kv_group_manager_allocate(kv_group_manager *g, int32_t row, int32_t n_need_tokens);
/* Publishes the full blocks of the first n_tokens tokens that are not yet published. */
void kv_group_manager_publish(kv_group_manager *g, int32_t row, const block_hash *hashes,
                              int32_t n_hashes, int32_t n_tokens);
/* Un-publishes the row's blocks from block index first_idx on. */
void kv_group_manager_unpublish(kv_group_manager *g, int32_t row, int32_t first_idx);
/* SM3: frees blocks wholly before what n_computed tokens leave in the window, highest index first.
 */
void kv_group_manager_remove_skipped(kv_group_manager *g, int32_t row, int32_t n_computed_tokens);
/* Ends the row: frees its blocks, last first. */
void kv_group_manager_free(kv_group_manager *g, int32_t row);

#endif
