/* Activation of a feed-forward part without a gate, value by value.
 *
 *   GELU       out = x * Phi(x) = x / 2 * erfc(-x / sqrt 2)
 *   GELU_TANH  out = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
 *   RELU       out = max(x, 0)
 *   SILU       out = x / (1 + exp(-x))
 *
 * Shapes:  x [n_rows, dim] with x_stride elements between rows; out [n_rows, dim] with out_stride
 * Types:   f32
 * Limits:  n_rows >= 0, dim >= 1, any dim; out may be x (same stride); a NaN stays a NaN
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits, kind)
 * Source:  Hendrycks & Gimpel 2016 (both GELUs); Ramachandran, Zoph & Le 2017 (SiLU as Swish)
 */
#ifndef KERNELS_ACTIVATION_H
#define KERNELS_ACTIVATION_H

#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

typedef enum activation_kind {
    ACTIVATION_GELU,
    ACTIVATION_GELU_TANH,
    ACTIVATION_RELU,
    ACTIVATION_SILU
} activation_kind;

typedef struct activation_args {
    float *out;
    int64_t out_stride;
    const float *x;
    int64_t x_stride;
    int32_t n_rows;
    int32_t dim;
    activation_kind kind;
} activation_args;

pgd_err activation_ref(const activation_args *args, kernel_ctx *ctx);
/* A value's bits depend on that value alone; between versions they may differ. */
pgd_err activation_avx2(const activation_args *args, kernel_ctx *ctx);
pgd_err activation_avx512(const activation_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
