/* A straight list of ops; the copies of rows change their place, never their sums. */
#include "worker/model/expert_ffn.h"

void expert_ffn_lay_out(expert_ffn *out, model_ops_plan *plan, const model_config *cfg,
                        int64_t max_rows)
{
    if (cfg->n_experts == 0)
        return;
    int64_t max_copies = max_rows * cfg->n_experts_chosen;
    static_assert(sizeof(int32_t) == sizeof(float), "places are taken as floats");
    out->logits = model_ops_take(plan, max_rows, cfg->n_experts);
    out->weights = model_ops_take(plan, max_rows, cfg->n_experts_chosen);
    out->places = (int32_t *)(void *)model_ops_take(plan, max_rows, cfg->n_experts_chosen);
    out->group_start = (int32_t *)(void *)model_ops_take(plan, 1, (int64_t)cfg->n_experts + 1);
    out->copies = model_ops_take(plan, max_copies, cfg->dim);
    out->gate_up = model_ops_take(plan, max_copies, 2 * (int64_t)cfg->expert_ffn_dim);
}

/* out [n_copies, w->n_out] = the maps of each copy's expert. */
static pgd_err map_copies(const expert_ffn *f, float *out, const weights_experts *w, const float *x,
                          int64_t x_stride, int32_t n_copies, const kernel_ops *ops,
                          kernel_ctx *ctx)
{
    matmul_args args = {.x = x,
                        .x_stride = x_stride,
                        .n_rows = n_copies,
                        .n_in = w->n_in,
                        .n_weights = w->n_parts,
                        .group_start = f->group_start,
                        .n_groups = w->n_experts,
                        .bias_stride = w->n_out};
    int32_t at = 0;
    for (int32_t i = 0; i < w->n_parts; i++) {
        args.weights[i] = w->parts[i];
        args.out[i] = out + at;
        args.out_stride[i] = w->n_out;
        args.bias[i] = w->bias ? w->bias + at : NULL;
        at += w->parts[i][0].n_out;
    }
    return ops->matmul->run(&args, ctx);
}

static moe_gate gate_of(const model_config *cfg)
{
    switch (cfg->expert_gate) {
    case EXPERT_GATE_SOFTMAX_ALL:
        return MOE_GATE_SOFTMAX_ALL;
    case EXPERT_GATE_SIGMOID:
        return MOE_GATE_SIGMOID;
    case EXPERT_GATE_SOFTMAX_CHOSEN:
        break;
    }
    return MOE_GATE_SOFTMAX_CHOSEN;
}

pgd_err expert_ffn_run(const expert_ffn *f, float *x, const float *h, const weights_layer *w,
                       const model_config *cfg, int32_t n_rows, const kernel_ops *ops,
                       kernel_ctx *ctx)
{
    int32_t k = cfg->n_experts_chosen, n_copies = n_rows * k;
    int64_t ffn_stride = 2 * (int64_t)cfg->expert_ffn_dim;
    moe_route_args route = {.weights = f->weights,
                            .places = f->places,
                            .group_start = f->group_start,
                            .logits = f->logits,
                            .logits_stride = cfg->n_experts,
                            .n_rows = n_rows,
                            .n_experts = cfg->n_experts,
                            .n_chosen = k,
                            .gate = gate_of(cfg)};
    moe_gather_args gather = {.out = f->copies,
                              .out_stride = cfg->dim,
                              .x = h,
                              .x_stride = cfg->dim,
                              .weights = cfg->expert_scales_input ? f->weights : NULL,
                              .places = f->places,
                              .n_rows = n_rows,
                              .n_chosen = k,
                              .dim = cfg->dim};
    moe_combine_args combine = {.out = x,
                                .out_stride = cfg->dim,
                                .y = f->copies,
                                .y_stride = cfg->dim,
                                .weights = cfg->expert_scales_input ? NULL : f->weights,
                                .places = f->places,
                                .n_rows = n_rows,
                                .n_chosen = k,
                                .dim = cfg->dim};
    PGD_TRY(model_ops_linear(f->logits, &w->router, h, cfg->dim, n_rows, false, ops, ctx));
    PGD_TRY(ops->moe_route(&route, ctx));
    PGD_TRY(ops->moe_gather(&gather, ctx));
    PGD_TRY(map_copies(f, f->gate_up, &w->expert_gate_up, f->copies, cfg->dim, n_copies, ops, ctx));
    PGD_TRY(model_ops_gate(f->gate_up, cfg->expert_ffn_dim, n_copies, cfg, ops, ctx));
    PGD_TRY(map_copies(f, f->copies, &w->expert_down, f->gate_up, ffn_stride, n_copies, ops, ctx));
    return ops->moe_combine(&combine, ctx);
}
