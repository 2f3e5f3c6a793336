/* What the models' files share: places for activations, linear maps, choosing rows.
 *
 * Thread:  the worker's main thread
 */
#ifndef WORKER_MODEL_MODEL_OPS_H
#define WORKER_MODEL_MODEL_OPS_H

#include "worker/weights.h"

/* Activations are laid out twice: with data NULL to add up what they need, then to hand out places
 * in one block. */
typedef struct model_ops_plan {
    uint8_t *data;
    size_t n_bytes;
    bool overflow;
} model_ops_plan;

/* [n_rows, n_cols] floats, 64-byte aligned; NULL while counting. */
float *model_ops_take(model_ops_plan *plan, int64_t n_rows, int64_t n_cols);

/* out [n_rows, w->n_out], contiguous rows, = or += w(x). */
pgd_err model_ops_linear(float *out, const weights_linear *w, const float *x, int64_t x_stride,
                         int32_t n_rows, bool accumulate, const kernel_ops *ops, kernel_ctx *ctx);

/* The gated activation of the config: gate_up [n_rows, 2 dim] holds gate, then up; the result takes
 * gate's place. */
pgd_err model_ops_gate(float *gate_up, int32_t dim, int32_t n_rows, const model_config *cfg,
                       const kernel_ops *ops, kernel_ctx *ctx);

/* Workspace of the matmuls of a model's layers, for steps of up to max_rows rows. */
size_t model_ops_workspace_bytes(const model_config *cfg, int32_t max_rows, int32_t n_threads,
                                 const kernel_ops *ops);

/* out [n, dim] = rows idx[0 .. n) of source [n_source, dim]; out may not overlap source. */
pgd_err model_ops_gather(float *out, const float *source, int32_t n_source, const int32_t *idx,
                         int32_t n, int32_t dim, const kernel_ops *ops, kernel_ctx *ctx);

#endif
