/* Gated activation of the feed-forward part.
 *
 *   out[t, i] = gate[t, i] / (1 + exp(-gate[t, i])) * up[t, i]
 *
 * Shapes:  gate, up [n_rows, dim] with in_stride elements between rows (both halves of one fused
 *          projection); out [n_rows, dim] with out_stride
 * Types:   f32
 * Limits:  n_rows >= 0, dim >= 1, any dim; out may be gate or up (same stride)
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits)
 * Source:  Shazeer 2020 (GLU variants)
 */
#ifndef KERNELS_SILU_MUL_H
#define KERNELS_SILU_MUL_H

#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

typedef struct silu_mul_args {
    float *out;
    int64_t out_stride;
    const float *gate;
    const float *up;
    int64_t in_stride;
    int32_t n_rows;
    int32_t dim;
} silu_mul_args;

pgd_err silu_mul_ref(const silu_mul_args *args, kernel_ctx *ctx);
/* Bits of a row depend on that row alone; between versions they may differ. */
pgd_err silu_mul_avx2(const silu_mul_args *args, kernel_ctx *ctx);
pgd_err silu_mul_avx512(const silu_mul_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
