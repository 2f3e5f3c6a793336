/* From the KV layers of a model to groups that share one pool of blocks (rules GR).
 *
 * A group's layers use one block table; its blocks stay as long as its kind of attention needs them.
 * Every group takes its blocks from the same pool: a block is a page in each slot (tensor), and one
 * layer of each group at most uses a slot. For 3 full layers (1-3) and 7 with a window (4-10):
 *
 *              group 0   group 1   group 2   group 3
 *   slot 0        1         4         5         6       one tensor of n_blocks pages
 *   slot 1        2         7         8         9
 *   slot 2        3        10         -         -       "-": padding, of a block in group 2 or 3
 *                                                       this page is never used
 * Thread:  any
 */
#ifndef ENGINE_KV_KV_GROUPS_H
#define ENGINE_KV_KV_GROUPS_H

#include "engine/kv/kv_group_ops.h"
#include "proto/kv_layout.h"

typedef struct kv_groups_opts {
    int32_t block_size;         /* tokens, of the layers with the largest pages */
    int32_t max_encoder_tokens; /* of a request; 0 = no cross attention */
    bool is_hybrid;             /* false: layers with a window keep the KV of every token (GR7) */
} kv_groups_opts;

typedef struct kv_groups {
    kv_layout layout;
    int32_t n_layers_of[PGD_MAX_KV_GROUPS];
    int32_t n_padding; /* pairs of group and slot that no layer has */
    int32_t max_encoder_tokens;
} kv_groups;

/* What one request can hold, for the sizes below. */
typedef struct kv_groups_load {
    int32_t max_unfinished_tokens; /* scheduled and not yet known to be done */
    int32_t max_model_len;
} kv_groups_load;

/* GR1-GR4, GR7. Layers of one kind, window and page size form equal groups, strided; without layers
 * there are no groups. Errors: PGD_EPROTO (specs that contradict themselves), PGD_EUNSUPPORTED
 * (pages of unequal size that no block size makes equal; more kinds than there may be groups) */
PGD_MUST_USE pgd_err kv_groups_init(kv_groups *out, const kv_layer_spec *layers, int32_t n_layers,
                                    const kv_groups_opts *opts, pgd_why *why);
/* What the KV manager must know of a group. */
kv_group_spec kv_groups_spec(const kv_groups *k, int32_t group);
/* Most blocks that a request of n tokens holds at a time in this group, and in all together. */
int32_t kv_groups_n_blocks_of(const kv_groups *k, int32_t group, int32_t n_tokens,
                              const kv_groups_load *load);
int64_t kv_groups_n_blocks_for(const kv_groups *k, int32_t n_tokens, const kv_groups_load *load);
/* Longest request, at most load->max_model_len, that a pool of n_blocks (null block included) can
 * hold alone; 0 = none (GR6). */
int32_t kv_groups_max_len(const kv_groups *k, int32_t n_blocks, const kv_groups_load *load);
/* Requests of load->max_model_len tokens that the pool holds at the same time (GR8). */
double kv_groups_concurrency(const kv_groups *k, int32_t n_blocks, const kv_groups_load *load);

#endif
