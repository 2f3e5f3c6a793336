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
