/* RMS normalisation of groups of values.
 *
 *   y[t, g, i]   = x[t, g, i] / sqrt(mean_i(x[t, g, i]^2) + eps) * weight[i]
 *   out[t, g, i] = y[t, g, i], with accumulate out[t, g, i] + y[t, g, i]
 *
 * One group a row normalises hidden states; n_heads groups of head_dim values normalise Q or K.
 * Accumulating adds a normalised branch to the residual stream.
 *
 * Shapes:  x [n_rows, n_groups, dim] with x_stride elements between rows, groups contiguous; out
 *          likewise with out_stride; weight [dim], NULL: ones
 * Types:   f32; sums in f32 in an order that depends on dim alone (ref: f64)
 * Limits:  n_rows >= 0, n_groups >= 1, dim >= 1, any dim; out may be x (same stride) unless accumulate
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits)
 * Source:  Zhang & Sennrich 2019
 */
#ifndef KERNELS_RMSNORM_H
#define KERNELS_RMSNORM_H

#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

typedef struct rmsnorm_args {
    float *out;
    int64_t out_stride;
    const float *x;
    int64_t x_stride;
    const float *weight;
    int32_t n_rows;
    int32_t n_groups;
    int32_t dim;
    float eps;
    bool accumulate;
} rmsnorm_args;

pgd_err rmsnorm_ref(const rmsnorm_args *args, kernel_ctx *ctx);
/* Bits of a row depend on that row alone; between versions they may differ. */
pgd_err rmsnorm_avx2(const rmsnorm_args *args, kernel_ctx *ctx);
pgd_err rmsnorm_avx512(const rmsnorm_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
