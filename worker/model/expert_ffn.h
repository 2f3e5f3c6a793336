/* The mixture of experts of a layer: router, choice, the chosen experts' maps, their weighted sum.
 *
 * What moves for n rows: the router; of every expert that some row chose its two packed matrices,
 * once; and for each of the n * n_experts_chosen copies of rows its activations: dim in, 2 ffn
 * between, dim out. For one row that is n_experts_chosen experts' weights, and activations are
 * nothing beside them. Copies are sorted by expert, so that an expert's rows lie together; each copy
 * is computed as it would be alone, and a row's copies are summed in the order of their logits.
 * Owns:    nothing; buffers belong to the decoder
 * Thread:  the worker's main thread
 */
#ifndef WORKER_MODEL_EXPERT_FFN_H
#define WORKER_MODEL_EXPERT_FFN_H

#include "worker/model/model_ops.h"

typedef struct expert_ffn {
    float *logits;        /* [max_rows, n_experts] */
    float *weights;       /* [max_rows, n_experts_chosen] */
    int32_t *places;      /* likewise */
    int32_t *group_start; /* [n_experts + 1] */
    float *copies;        /* [max_rows * n_experts_chosen, dim]: what experts get, then give */
    float *gate_up;       /* [max_rows * n_experts_chosen, 2 expert_ffn_dim] */
} expert_ffn;

/* Takes the places of the buffers; nothing for a model without experts. */
void expert_ffn_lay_out(expert_ffn *out, model_ops_plan *plan, const model_config *cfg,
                        int64_t max_rows);
/* x [n_rows, dim] += experts(h [n_rows, dim]), of a layer that has experts. */
PGD_MUST_USE pgd_err expert_ffn_run(const expert_ffn *f, float *x, const float *h,
                                    const weights_layer *w, const model_config *cfg, int32_t n_rows,
                                    const kernel_ops *ops, kernel_ctx *ctx);

#endif
