/* Model weights ready for computing: matrices packed for the chosen instruction set, small vectors
 * in f32. Norm weights are whole here, whatever the file leaves out.
 *
 * Q, K and V become one matrix when their types agree, gate and up likewise; otherwise the parts
 * stay apart and still go through one matmul call. The same holds for each expert of a mixture. The embedding is read from the mapped file in
 * place.
 * Owns:    packed matrices and vectors; borrows the model file until destroy
 * Thread:  the worker's main thread
 */
#ifndef WORKER_WEIGHTS_H
#define WORKER_WEIGHTS_H

#include "common/model/model_file.h"
#include "kernels/ops.h"

/* A linear map n_in -> n_out whose outputs lie side by side: parts[0]'s first, then parts[1]'s. */
typedef struct weights_linear {
    int32_t n_parts;
    packed_weight parts[MATMUL_MAX_WEIGHTS];
    int32_t n_in;
    int32_t n_out;
    const float *bias; /* [n_out] or NULL */
} weights_linear;

#define WEIGHTS_MAX_EXPERT_PARTS 2

/* The maps n_in -> n_out of all experts of a layer, for grouped matmuls; parts as above. */
typedef struct weights_experts {
    int32_t n_experts;
    int32_t n_parts;
    packed_weight *parts[WEIGHTS_MAX_EXPERT_PARTS]; /* [n_experts] each */
    int32_t n_in;
    int32_t n_out;
    const float *bias; /* [n_experts, n_out] or NULL */
} weights_experts;

typedef struct weights_layer {
    const float *attn_norm;      /* [dim] */
    const float *ffn_norm;       /* [dim] */
    const float *attn_post_norm; /* [dim] or NULL */
    const float *ffn_post_norm;
    const float *q_norm; /* [head_dim] or NULL */
    const float *k_norm;
    const float *sinks; /* [n_heads] or NULL */
    weights_linear qkv; /* dim -> (n_heads + 2 n_kv_heads) * head_dim */
    weights_linear attn_out;
    /* Of ffn_dim; in layers with experts of the shared one, or nothing (no parts). */
    weights_linear gate_up; /* dim -> 2 ffn_dim */
    weights_linear down;
    weights_linear router; /* dim -> n_experts; the rest likewise only in layers with experts */
    weights_experts expert_gate_up;
    weights_experts expert_down;
} weights_layer;

typedef struct encdec_norm {
    const float *weight; /* [dim] */
    const float *bias;   /* [dim] */
} encdec_norm;

/* A layer of an encoder or decoder: each norm is behind the part it is named after. */
typedef struct encdec_layer {
    weights_linear qkv; /* dim -> 3 dim */
    weights_linear attn_out;
    encdec_norm attn_norm;
    weights_linear cross_q;  /* decoder only, as the next three */
    weights_linear cross_kv; /* dim -> 2 dim, of the encoder's output */
    weights_linear cross_out;
    encdec_norm cross_norm;
    weights_linear up;
    weights_linear down;
    encdec_norm layer_norm;
} encdec_layer;

typedef struct encdec_side {
    const float *positions; /* [position_offset + positions, dim] */
    encdec_norm embed_norm;
    int32_t n_layers;
    encdec_layer *layers; /* [n_layers] */
} encdec_side;

typedef struct encdec_weights {
    encdec_side encoder;
    encdec_side decoder;
} encdec_weights;

typedef struct weights {
    const void *embed; /* [vocab_size, dim] of embed_type, in the file */
    dtype embed_type;
    int64_t embed_row_bytes;
    const float *out_norm;   /* [dim] */
    weights_linear head;     /* dim -> vocab_size */
    const float *rope_freqs; /* [rope_dim / 2] or NULL */
    int32_t n_layers;
    weights_layer *layers;  /* [n_layers] */
    encdec_weights *encdec; /* instead of out_norm, rope_freqs and layers; else NULL */
    void *data;             /* everything packed, one block */
    size_t n_bytes;
} weights;

typedef void (*weights_progress_fn)(void *arg, uint64_t done_bytes, uint64_t total_bytes);

/* Packs on all threads of the pool (NULL = here); progress (may be NULL) counts bytes of the file.
 * PGD_EFORMAT and PGD_EUNSUPPORTED name the tensor. */
PGD_MUST_USE pgd_err weights_load(weights **out, const model_file *file, const matmul_impl *matmul,
                                  cpu_pool *pool, weights_progress_fn progress, void *arg,
                                  pgd_why *why);
void weights_destroy(weights *w);

#endif
