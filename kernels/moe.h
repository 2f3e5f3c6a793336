/* Mixture of experts around the grouped matmul (matmul.h): which experts a row goes to, its copies
 * sorted by expert, and the sum of what the experts make of them.
 *
 *   route    chosen(t) = the n_chosen experts with the largest logits[t, e], largest first, of equal
 *            ones the lower id first; a NaN counts as larger than all
 *            weights[t, r], for the r-th chosen one:
 *              SOFTMAX_CHOSEN  softmax of the chosen logits (softmax over all, made to sum to 1)
 *              SOFTMAX_ALL     softmax of all logits
 *              SIGMOID         1 / (1 + exp(-logit))
 *            places[t, r]      the place of that copy of row t in the order by expert, then by row
 *            group_start[e]    the first place of expert e; group_start[n_experts] = n_rows * n_chosen
 *   gather   out[places[t, r], i] = x[t, i] * (weights ? weights[t, r] : 1)
 *   combine  out[t, i] += sum_r (weights ? weights[t, r] : 1) * y[places[t, r], i], r ascending
 *
 * A row's results depend on that row alone: places change where its copies lie, never a sum.
 *
 * Shapes:  logits [n_rows, n_experts]; weights, places [n_rows, n_chosen]; group_start
 *          [n_experts + 1]; x, out of combine [n_rows, dim], y, out of gather
 *          [n_rows * n_chosen, dim], all with strides
 * Types:   f32, int32; route in double
 * Limits:  n_rows >= 0, dim >= 1, any dim; 1 <= n_chosen <= n_experts; n_rows * n_chosen within
 *          31 bits; out may not alias x or y; places as route wrote them
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits other than places)
 * Source:  Shazeer et al. 2017 (sparsely gated mixture of experts); Jiang et al. 2024 (Mixtral)
 */
#ifndef KERNELS_MOE_H
#define KERNELS_MOE_H

#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

typedef enum moe_gate { MOE_GATE_SOFTMAX_CHOSEN, MOE_GATE_SOFTMAX_ALL, MOE_GATE_SIGMOID } moe_gate;

typedef struct moe_route_args {
    float *weights;
    int32_t *places;
    int32_t *group_start;
    const float *logits;
    int64_t logits_stride;
    int32_t n_rows;
    int32_t n_experts;
    int32_t n_chosen;
    moe_gate gate;
} moe_route_args;

typedef struct moe_gather_args {
    float *out;
    int64_t out_stride;
    const float *x;
    int64_t x_stride;
    const float *weights; /* or NULL */
    const int32_t *places;
    int32_t n_rows;
    int32_t n_chosen;
    int32_t dim;
} moe_gather_args;

typedef struct moe_combine_args {
    float *out;
    int64_t out_stride;
    const float *y;
    int64_t y_stride;
    const float *weights; /* or NULL */
    const int32_t *places;
    int32_t n_rows;
    int32_t n_chosen;
    int32_t dim;
} moe_combine_args;

/* The only CPU versions: some hundred values for each row beside a row's matmuls, and copies. */
pgd_err moe_route_ref(const moe_route_args *args, kernel_ctx *ctx);
pgd_err moe_gather_ref(const moe_gather_args *args, kernel_ctx *ctx);

pgd_err moe_combine_ref(const moe_combine_args *args, kernel_ctx *ctx);
/* Between versions bits may differ. */
pgd_err moe_combine_avx2(const moe_combine_args *args, kernel_ctx *ctx);
pgd_err moe_combine_avx512(const moe_combine_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
