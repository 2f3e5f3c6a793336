/* Rotary position embedding, in place, from a table of cosines and sines.
 *
 *   (a, b) -> (a cos - b sin, a sin + b cos)   for each pair i < rope_dim / 2
 *
 *   cos = table[p, i], sin = table[p, rope_dim / 2 + i]   at position p = positions[t]
 *   ROPE_PAIRS_ADJACENT:  a = x[t, h, 2i],  b = x[t, h, 2i + 1]
 *   ROPE_PAIRS_HALVES:    a = x[t, h, i],   b = x[t, h, i + rope_dim / 2]
 *
 * Values from rope_dim on are left alone.
 *
 * Shapes:  x [n_rows, n_heads, head_dim] with x_stride elements between rows, heads contiguous (Q
 *          and K of a fused projection in one call); positions [n_rows]; table [n_positions,
 *          rope_dim]
 * Types:   f32; positions int32
 * Limits:  rope_dim even, 2 <= rope_dim <= head_dim; 0 <= positions[t] < n_positions (the caller
 *          has checked)
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits other than positions)
 * Source:  Su et al. 2021 (RoFormer)
 */
#ifndef KERNELS_ROPE_H
#define KERNELS_ROPE_H

#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

typedef enum rope_pairs { ROPE_PAIRS_ADJACENT, ROPE_PAIRS_HALVES } rope_pairs;

typedef struct rope_args {
    float *x;
    int64_t x_stride;
    const float *table;
    int32_t n_positions;
    const int32_t *positions;
    int32_t n_rows;
    int32_t n_heads;
    int32_t head_dim;
    int32_t rope_dim;
    rope_pairs pairs;
} rope_args;

pgd_err rope_ref(const rope_args *args, kernel_ctx *ctx);
/* Bits of a row depend on that row alone; between versions they may differ. */
pgd_err rope_avx2(const rope_args *args, kernel_ctx *ctx);
pgd_err rope_avx512(const rope_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
