/* Matrix product of activations with packed weights.
 *
 *   out_j[t, n] (+)= sum_k x[t, k] * W_j[n, k] (+ bias_j[n])        j < n_weights
 *
 * Weights are packed once at load into a layout that the chosen instruction set streams; one output
 * element is always summed in the same order for 1 row or 512 (I1). Quantized types: each row of x
 * is quantized to int8 per block of 32 values (scale = max|x| / 127, round to nearest even; a block
 * below 2^-100 is zero), products are summed exactly in int32 per block, then scaled and added in
 * f32 in block order. F32, F16, BF16: products and sums in f32, K order fixed. NaN and infinity in x
 * reach the output. The levels other than ref agree bit for bit.
 *
 * Grouped (mixture of experts): with group_start, rows [group_start[g], group_start[g + 1]) take the
 * weight W_j of group g, and a row's bits are those of a call of its own. Groups without rows cost
 * nothing: what moves is each weight that has rows, once, and x and out once.
 *
 * Shapes:  x [n_rows, n_in] with x_stride elements between rows; W_j [n_out_j, n_in];
 *          out_j [n_rows, n_out_j] with out_stride_j; bias_j [n_out_j] or NULL. All weights of one
 *          call share x and n_in. Grouped: weights[j] and bias[j] are arrays over the groups, the
 *          biases bias_stride elements apart; the weights of one j share type and n_out
 * Types:   x, out f32; weights of any dtype with is_weight, one call may mix them
 * Limits:  n_in % 32 == 0 for 32-blocks, % 256 for K types; n_out, n_rows >= 0, ragged allowed; out
 *          may not alias x; ctx->workspace 64-byte aligned, of at least workspace_bytes
 * Owns:    nothing; packed_weight.data belongs to whoever allocated it
 * Thread:  the worker's main thread (splits over ctx's pool)
 * Errors:  PGD_EINVAL (limits)
 */
#ifndef KERNELS_MATMUL_H
#define KERNELS_MATMUL_H

#include "common/model/dtype.h"
#include "kernels/cpu_features.h"
#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

#define MATMUL_MAX_WEIGHTS 3

typedef struct packed_weight {
    dtype type;     /* of the source */
    int32_t layout; /* private to the implementation that packed it */
    int32_t n_out;
    int32_t n_in;
    void *data; /* 64-byte aligned */
    size_t n_bytes;
} packed_weight;

typedef struct matmul_args {
    const float *x;
    int64_t x_stride;
    int32_t n_rows;
    int32_t n_in;
    int32_t n_weights;
    const packed_weight *weights[MATMUL_MAX_WEIGHTS]; /* [n_groups] each */
    float *out[MATMUL_MAX_WEIGHTS];
    int64_t out_stride[MATMUL_MAX_WEIGHTS];
    const float *bias[MATMUL_MAX_WEIGHTS];
    bool accumulate;            /* out += (residual): the old value is added last */
    const int32_t *group_start; /* [n_groups + 1], ascending from 0 to n_rows; NULL = one group */
    int32_t n_groups;
    int64_t bias_stride;
} matmul_args;

/* One implementation (instruction-set level). */
typedef struct matmul_impl {
    /* Bytes that pack needs in dst; 0 when the type or shape is not supported. */
    size_t (*packed_bytes)(dtype type, int32_t n_out, int32_t n_in);
    /* Packs rows [first_row, first_row + n_rows) of a [n_out, n_in] matrix and sets w->layout; rows:
     * the source rows, contiguous, maybe unaligned. first_row must be a multiple of pack_rows, n_rows
     * too unless it reaches n_out; several calls fill one weight, so that Q, K and V of one type
     * become one matrix and several threads can pack. */
    void (*pack)(packed_weight *w, const void *rows, int32_t first_row, int32_t n_rows);
    int32_t pack_rows;
    pgd_err (*run)(const matmul_args *args, kernel_ctx *ctx);
    /* Workspace that run needs in ctx for up to max_rows rows of max_n_in values. */
    size_t (*workspace_bytes)(int32_t max_rows, int32_t max_n_in, int32_t n_threads);
} matmul_impl;

/* NULL when this build or machine lacks the level. The ref implementation sums in double and
 * quantizes nothing: the oracle for F32, F16 and BF16, and, with matmul_ref_quantized, for the int8
 * path. */
const matmul_impl *matmul_get_impl(cpu_isa isa);

/* Quantizes rows of x as the int8 path does and computes in double with the dequantized weights:
 * the oracle for quantized types. w is the unpacked source [n_out, n_in]. Single-threaded. */
void matmul_ref_quantized(float *out, const float *x, const void *w, dtype type, int32_t n_rows,
                          int32_t n_out, int32_t n_in);

PGD_END_C
#endif
