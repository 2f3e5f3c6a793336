/* Gated activation of the feed-forward part.
 *
 *   out[t, i] = act(gate[t, i]) * up[t, i]
 *
 *   SILU       act(g) = g / (1 + exp(-g))
 *   GELU_TANH  act(g) = g / 2 (1 + tanh u) = g / (1 + exp(-2 u)),
 *              u = sqrt(2 / pi) (g + 0.044715 g^3)
 *
 *   CLAMPED    out[t, i] = g / (1 + exp(-alpha g)) * (u + 1),
 *              g = min(gate[t, i], limit), u = min(max(up[t, i], -limit), limit)
 *
 * Shapes:  gate, up [n_rows, dim] with in_stride elements between rows (both halves of one fused
 *          projection); out [n_rows, dim] with out_stride
 * Types:   f32
 * Limits:  n_rows >= 0, dim >= 1, any dim; out may be gate or up (same stride);
 *          CLAMPED: limit >= 0; a NaN stays a NaN
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits)
 * Source:  Shazeer 2020 (GLU variants); Hendrycks & Gimpel 2016 (GELU); OpenAI's gpt-oss release (CLAMPED)
 */
#ifndef KERNELS_GATED_ACT_H
#define KERNELS_GATED_ACT_H

#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

typedef enum gated_act_kind {
    GATED_ACT_SILU,
    GATED_ACT_GELU_TANH,
    GATED_ACT_CLAMPED
} gated_act_kind;

typedef struct gated_act_args {
    float *out;
    int64_t out_stride;
    const float *gate;
    const float *up;
    int64_t in_stride;
    int32_t n_rows;
    int32_t dim;
    gated_act_kind kind;
    float alpha; /* CLAMPED */
    float limit;
} gated_act_args;

pgd_err gated_act_ref(const gated_act_args *args, kernel_ctx *ctx);
/* Bits of a row depend on that row alone; between versions they may differ. */
pgd_err gated_act_avx2(const gated_act_args *args, kernel_ctx *ctx);
pgd_err gated_act_avx512(const gated_act_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
