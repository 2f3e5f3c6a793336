/* How the KV cache of a model is laid out: what each KV layer needs (the worker says it, from the
 * model), and which group and tensor it got (the engine decides it, rules GR; engine/kv/kv_groups.h
 * draws an example).
 *
 *   group    layers with one block table: the same blocks hold the KV of all of them
 *   slot     a tensor of the KV cache, [n_blocks] pages; one layer of each group at most uses it, in
 *            blocks of its own, since block ids belong to one group at a time
 *   page     one block of one layer, K and V: token_bytes of the layer * block_size of its group
 *
 * A KV layer is a decoder layer's self attention (index = layer); encoder-decoder models add one
 * cross-attention layer for each behind them (index = n_layers + layer).
 * Thread:  any
 */
#ifndef PROTO_KV_LAYOUT_H
#define PROTO_KV_LAYOUT_H

#include "common/model/attention_kind.h"
#include "proto/wire.h"

#define KV_LAYOUT_MAX_BLOCK_SIZE 65536

typedef struct kv_layer_spec {
    int32_t kind;        /* attention_kind */
    int32_t window;      /* SLIDING: the window, CHUNKED: the chunk, in tokens; else 0 */
    int32_t token_bytes; /* K and V of one token */
} kv_layer_spec;

typedef struct kv_group_layout {
    int32_t kind;   /* attention_kind: what the group's blocks are kept for */
    int32_t window; /* as in kv_layer_spec; of a FULL group the widest among its layers that attend
                       to less than it keeps, 0 = none does */
    int32_t block_size;
} kv_group_layout;

typedef struct kv_layer_place {
    int32_t group;
    int32_t slot;
} kv_layer_place;

typedef struct kv_layout {
    int32_t n_groups;
    kv_group_layout groups[PGD_MAX_KV_GROUPS];
    int32_t n_layers;
    kv_layer_place layers[PGD_MAX_KV_LAYERS];
    int32_t n_slots;
    uint64_t page_bytes[PGD_MAX_KV_LAYERS]; /* of each slot */
} kv_layout;

extern const wire_record kv_layer_spec_record;
extern const wire_record kv_layout_record;

/* What no single number shows: that kinds and windows belong together, and that there is cross
 * attention exactly when there are encoder tokens. PGD_EPROTO */
PGD_MUST_USE pgd_err kv_layout_check_specs(const kv_layer_spec *specs, int32_t n_layers,
                                           int32_t max_encoder_tokens, pgd_why *why);
/* Whether the layout can serve these layers with n_blocks blocks: each layer has a place of its own
 * in a group that keeps what it attends to, its pages are those of its slot, and slot ids fit 32
 * bits. PGD_EPROTO */
PGD_MUST_USE pgd_err kv_layout_check(const kv_layout *layout, const kv_layer_spec *specs,
                                     int32_t n_layers, int32_t n_blocks, pgd_why *why);
/* Bytes of one block: a page in every slot. */
uint64_t kv_layout_block_bytes(const kv_layout *layout);
/* Groups and their block sizes, for decoding steps. */
void kv_layout_fill_limits(wire_limits *limits, const kv_layout *layout);
/* First position that a token at this position attends to. */
int32_t kv_layout_first_position(int32_t kind, int32_t window, int32_t position);

#endif
