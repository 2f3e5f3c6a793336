/* Layer normalisation of rows.
 *
 *   mean = mean_i(x[t, i])      var = mean_i((x[t, i] - mean)^2)
 *   out[t, i] = (x[t, i] - mean) / sqrt(var + eps) * weight[i] + bias[i]
 *
 * Shapes:  x [n_rows, dim] with x_stride elements between rows; out likewise with out_stride;
 *          weight, bias [dim]
 * Types:   f32; sums in f32 in an order that depends on dim alone (ref: f64)
 * Limits:  n_rows >= 0, dim >= 1, any dim; out may be x (same stride)
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits)
 * Source:  Ba, Kiros & Hinton 2016
 */
#ifndef KERNELS_LAYERNORM_H
#define KERNELS_LAYERNORM_H

#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

typedef struct layernorm_args {
    float *out;
    int64_t out_stride;
    const float *x;
    int64_t x_stride;
    const float *weight;
    const float *bias;
    int32_t n_rows;
    int32_t dim;
    float eps;
} layernorm_args;

pgd_err layernorm_ref(const layernorm_args *args, kernel_ctx *ctx);
/* Bits of a row depend on that row alone; between versions they may differ. */
pgd_err layernorm_avx2(const layernorm_args *args, kernel_ctx *ctx);
pgd_err layernorm_avx512(const layernorm_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
