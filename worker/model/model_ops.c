/* Thin covers over ops whose argument lists are long and the same everywhere in the models. */
#include "worker/model/model_ops.h"

#include "common/mem.h"

float *model_ops_take(model_ops_plan *plan, int64_t n_rows, int64_t n_cols)
{
    size_t n_elems, n_bytes;
    if (!mem_mul(&n_elems, (size_t)n_rows, (size_t)n_cols) ||
        !mem_mul(&n_bytes, n_elems, sizeof(float)) || !mem_add(&n_bytes, n_bytes, 63)) {
        plan->overflow = true;
        return NULL;
    }
    float *piece = plan->data ? (float *)(void *)(plan->data + plan->n_bytes) : NULL;
    if (!mem_add(&plan->n_bytes, plan->n_bytes, n_bytes / 64 * 64))
        plan->overflow = true;
    return piece;
}

pgd_err model_ops_linear(float *out, const weights_linear *w, const float *x, int64_t x_stride,
                         int32_t n_rows, bool accumulate, const kernel_ops *ops, kernel_ctx *ctx)
{
    matmul_args args = {.x = x,
                        .x_stride = x_stride,
                        .n_rows = n_rows,
                        .n_in = w->n_in,
                        .n_weights = w->n_parts,
                        .accumulate = accumulate};
    int32_t at = 0;
    for (int32_t i = 0; i < w->n_parts; i++) {
        args.weights[i] = &w->parts[i];
        args.out[i] = out + at;
        args.out_stride[i] = w->n_out;
        args.bias[i] = w->bias ? w->bias + at : NULL;
        at += w->parts[i].n_out;
    }
    return ops->matmul->run(&args, ctx);
}

static gated_act_kind kind_of(ffn_act act)
{
    switch (act) {
    case FFN_ACT_GELU_TANH:
        return GATED_ACT_GELU_TANH;
    case FFN_ACT_CLAMPED:
        return GATED_ACT_CLAMPED;
    default: /* the others have no gate */
        break;
    }
    return GATED_ACT_SILU;
}

pgd_err model_ops_gate(float *gate_up, int32_t dim, int32_t n_rows, const model_config *cfg,
                       const kernel_ops *ops, kernel_ctx *ctx)
{
    gated_act_args args = {.out = gate_up,
                           .out_stride = 2 * (int64_t)dim,
                           .gate = gate_up,
                           .up = gate_up + dim,
                           .in_stride = 2 * (int64_t)dim,
                           .n_rows = n_rows,
                           .dim = dim,
                           .kind = kind_of(cfg->act),
                           .alpha = cfg->act_alpha,
                           .limit = cfg->act_limit};
    return ops->gated_act(&args, ctx);
}

size_t model_ops_workspace_bytes(const model_config *cfg, int32_t max_rows, int32_t n_threads,
                                 const kernel_ops *ops)
{
    int32_t max_n_in = PGD_MAX(PGD_MAX(cfg->dim, cfg->n_heads * cfg->head_dim),
                               PGD_MAX(cfg->ffn_dim, cfg->shared_ffn_dim));
    size_t n_bytes = ops->matmul->workspace_bytes(max_rows, max_n_in, n_threads);
    if (cfg->n_experts == 0)
        return n_bytes;
    size_t of_experts = ops->matmul->workspace_bytes(
        max_rows * cfg->n_experts_chosen, PGD_MAX(cfg->dim, cfg->expert_ffn_dim), n_threads);
    return PGD_MAX(n_bytes, of_experts);
}

pgd_err model_ops_gather(float *out, const float *source, int32_t n_source, const int32_t *idx,
                         int32_t n, int32_t dim, const kernel_ops *ops, kernel_ctx *ctx)
{
    embed_args args = {.out = out,
                       .out_stride = dim,
                       .table = source,
                       .type = DTYPE_F32,
                       .row_bytes = (int64_t)dim * (int64_t)sizeof(float),
                       .n_table_rows = n_source,
                       .ids = idx,
                       .n_rows = n,
                       .dim = dim};
    return ops->embed(&args, ctx);
}
