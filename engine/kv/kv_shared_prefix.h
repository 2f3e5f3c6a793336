/* How many leading blocks all holders of a group share (rule CPX1), kept up to date instead of
 * counted.
 *
 *   n_common = the least n_agreed[r] over the holders r,
 *   n_agreed[r] = leading entries in which r's table equals the reference's, itself any holder
 *
 * Tables are append-only and a new block has one holder, so n_agreed is settled when a row joins.
 * Cost: get O(1); join: comparing the hits it brings, which it has just touched; leave: O(1), and a
 * scan of counts when the last row leaves that agreed the least; O(rows) when the reference leaves,
 * which is the newest holder at the time it was chosen, so that this is rare.
 * Owns:    its arrays
 * Thread:  core
 */
#ifndef ENGINE_KV_KV_SHARED_PREFIX_H
#define ENGINE_KV_KV_SHARED_PREFIX_H

#include "common/err.h"

struct kv_group_manager;

typedef struct kv_shared_prefix {
    int32_t reference; /* row, -1 = no holders */
    int32_t n_others;  /* holders beside the reference */
    int32_t n_common;  /* of the reference and the others, if there are any */
    int32_t *n_agreed; /* [n_rows] */
    uint64_t *joined;  /* [n_rows], when the row joined, 0 = it is no holder */
    uint64_t n_joins;
    int32_t *counts; /* [max_blocks_per_row + 1], others by what they agree in */
} kv_shared_prefix;

/* Errors: PGD_ENOMEM; deinit takes what init left. */
PGD_MUST_USE pgd_err kv_shared_prefix_init(kv_shared_prefix *s, int32_t n_rows,
                                           int32_t max_blocks_per_row);
void kv_shared_prefix_deinit(kv_shared_prefix *s);
/* The row holds its hits and nothing else yet. */
void kv_shared_prefix_join(kv_shared_prefix *s, const struct kv_group_manager *g, int32_t row);
void kv_shared_prefix_leave(kv_shared_prefix *s, const struct kv_group_manager *g, int32_t row);
int32_t kv_shared_prefix_get(const kv_shared_prefix *s, const struct kv_group_manager *g);

#endif
