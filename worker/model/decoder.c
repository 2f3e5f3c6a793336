/* A step runs layer by layer over all rows of the batch: K and V of every row are in the pages
 * before any row attends, since one request may read a block that another one fills in the same
 * step.
 *
 * Rows never mix outside attention, so that after the last attention only the rows whose logits are
 * wanted go on; a step without such rows ends there. They are the rows that sample, whose logits
 * are computed at once, and prompt rows to be scored, whose logits are computed in slices on
 * demand. The residual stream x is summed into by the two output projections of each layer, or by
 * norms of what these give (post_norms).
 *
 *   x [n, dim]  h [n, dim]  qkv [n, (n_heads + 2 n_kv_heads) head_dim]
 *   attn [n, n_heads head_dim]  gate_up [n, 2 ffn]
 */
#include "worker/model/decoder.h"

#include <math.h>

#include "common/mem.h"
#include "worker/model/expert_ffn.h"
#include "worker/model/model_ops.h"
#include "worker/model/rope_table.h"

struct decoder {
    decoder_opts opts;
    float *x;
    float *h;
    float *qkv;
    float *attn;
    float *gate_up;
    expert_ffn experts;
    float *logits;       /* [max_seqs, vocab_size] */
    float *slice;        /* [DECODER_MAX_SLICE, vocab_size], logits of prompt rows */
    float *rope_table;   /* [max_positions, rope_dim] */
    float *local_rope;   /* likewise, of sliding layers with a base of their own; else NULL */
    float *temperatures; /* [max_positions], factors of queries without rope; NULL = none */
    float embed_scale;
    void *data;
    size_t n_bytes;
};

/* What the steps of one forward share. */
typedef struct pass {
    decoder *d;
    const model_config *cfg;
    const kernel_ops *ops;
    kernel_ctx *ctx;
    const input_batch *batch;
    const kv_tables *tables;
    const kv_cache *kv;
    int32_t n_rows; /* of x: the batch's, then those with logits */
} pass;

/* --- memory ----------------------------------------------------------------------------------- */

static void lay_out(decoder *d, model_ops_plan *p)
{
    const model_config *cfg = d->opts.cfg;
    int64_t max_rows = PGD_MAX(d->opts.max_rows, d->opts.max_seqs);
    d->x = model_ops_take(p, max_rows, cfg->dim);
    d->h = model_ops_take(p, max_rows, cfg->dim);
    d->qkv =
        model_ops_take(p, max_rows, (int64_t)(cfg->n_heads + 2 * cfg->n_kv_heads) * cfg->head_dim);
    d->attn = model_ops_take(p, max_rows, (int64_t)cfg->n_heads * cfg->head_dim);
    d->gate_up =
        model_ops_take(p, max_rows, 2 * (int64_t)PGD_MAX(cfg->ffn_dim, cfg->shared_ffn_dim));
    expert_ffn_lay_out(&d->experts, p, cfg, max_rows);
    d->logits = model_ops_take(p, d->opts.max_seqs, cfg->vocab_size);
    d->slice = model_ops_take(p, PGD_MIN(DECODER_MAX_SLICE, d->opts.max_rows), cfg->vocab_size);
    d->rope_table = model_ops_take(p, d->opts.max_positions, cfg->rope_dim);
    if (cfg->rope_local_theta != 0.0)
        d->local_rope = model_ops_take(p, d->opts.max_positions, cfg->rope_dim);
    if (cfg->temperature_floor > 0)
        d->temperatures = model_ops_take(p, d->opts.max_positions, 1);
}

/* sqrt(dim) as the model was trained with it: rounded to the type of the embeddings. */
static float find_embed_scale(const model_config *cfg, dtype type)
{
    float scale = (float)sqrt((double)cfg->dim);
    if (type == DTYPE_BF16)
        return dtype_bf16_to_f32(dtype_f32_to_bf16(scale));
    return type == DTYPE_F16 ? dtype_f16_to_f32(dtype_f32_to_f16(scale)) : scale;
}

static void fill_tables(decoder *d)
{
    const model_config *cfg = d->opts.cfg;
    int32_t n = d->opts.max_positions;
    if (d->local_rope)
        rope_table_fill_local(d->local_rope, n, cfg);
    for (int32_t p = 0; d->temperatures && p < n; p++)
        d->temperatures[p] =
            (float)(1 + cfg->temperature_scale * log1p((p + 1) / cfg->temperature_floor));
    d->embed_scale = find_embed_scale(cfg, d->opts.w->embed_type);
    rope_table_fill(d->rope_table, n, cfg, d->opts.w->rope_freqs);
}

pgd_err decoder_create(decoder **out, const decoder_opts *opts, pgd_why *why)
{
    *out = NULL;
    if (opts->max_rows < 1 || opts->max_seqs < 1 || opts->max_positions < 1)
        return PGD_EINVAL;
    if (PGD_MAX(opts->max_rows, opts->max_seqs) >
        INT32_MAX / PGD_MAX(opts->cfg->n_experts_chosen, 1))
        return pgd_fail(why, PGD_ERANGE,
                        "expected fewer tokens of a step with %d experts each, got %d; lower "
                        "--max-num-batched-tokens",
                        opts->cfg->n_experts_chosen, opts->max_rows);
    decoder *d = mem_calloc(1, sizeof(*d));
    if (!d)
        return PGD_ENOMEM;
    d->opts = *opts;
    model_ops_plan p = {0};
    lay_out(d, &p);
    pgd_err err = PGD_ENOMEM;
    d->n_bytes = p.n_bytes;
    d->data = p.overflow ? NULL : mem_alloc_aligned(p.n_bytes, 64);
    if (!d->data) {
        err = pgd_fail(
            why, PGD_ENOMEM,
            "expected %zu bytes for activations, got none; lower --max-num-batched-tokens or "
            "--max-num-seqs",
            p.n_bytes);
        goto fail;
    }
    p = (model_ops_plan){.data = d->data};
    lay_out(d, &p);
    fill_tables(d);
    *out = d;
    return PGD_OK;
fail:
    decoder_destroy(d);
    return err;
}

void decoder_destroy(decoder *d)
{
    if (!d)
        return;
    mem_free_aligned(d->data, d->n_bytes);
    mem_free(d);
}

size_t decoder_bytes(const decoder *d)
{
    return d->n_bytes;
}

/* --- ops -------------------------------------------------------------------------------------- */

static pgd_err linear(const pass *p, float *out, const weights_linear *w, const float *x,
                      int64_t x_stride, bool accumulate)
{
    return model_ops_linear(out, w, x, x_stride, p->n_rows, accumulate, p->ops, p->ctx);
}

static pgd_err norm_hidden(const pass *p, const float *weight)
{
    rmsnorm_args args = {.out = p->d->h,
                         .out_stride = p->cfg->dim,
                         .x = p->d->x,
                         .x_stride = p->cfg->dim,
                         .weight = weight,
                         .n_rows = p->n_rows,
                         .n_groups = 1,
                         .dim = p->cfg->dim,
                         .eps = p->cfg->norm_eps};
    return p->ops->rmsnorm(&args, p->ctx);
}

/* x += w in, or the norm of it. */
static pgd_err add_branch(const pass *p, const weights_linear *w, const float *in,
                          int64_t in_stride, const float *post_norm)
{
    if (!post_norm)
        return linear(p, p->d->x, w, in, in_stride, true);
    PGD_TRY(linear(p, p->d->h, w, in, in_stride, false));
    rmsnorm_args args = {.out = p->d->x,
                         .out_stride = p->cfg->dim,
                         .x = p->d->h,
                         .x_stride = p->cfg->dim,
                         .weight = post_norm,
                         .n_rows = p->n_rows,
                         .n_groups = 1,
                         .dim = p->cfg->dim,
                         .eps = p->cfg->norm_eps,
                         .accumulate = true};
    return p->ops->rmsnorm(&args, p->ctx);
}

/* Heads [first_head, first_head + n_heads) of the fused projection, in place. */
static pgd_err norm_heads(const pass *p, const float *weight, int32_t first_head, int32_t n_heads)
{
    const model_config *cfg = p->cfg;
    int64_t stride = (int64_t)(cfg->n_heads + 2 * cfg->n_kv_heads) * cfg->head_dim;
    float *x = p->d->qkv + (int64_t)first_head * cfg->head_dim;
    rmsnorm_args args = {.out = x,
                         .out_stride = stride,
                         .x = x,
                         .x_stride = stride,
                         .weight = weight,
                         .n_rows = p->n_rows,
                         .n_groups = n_heads,
                         .dim = cfg->head_dim,
                         .eps = cfg->norm_eps};
    return p->ops->rmsnorm(&args, p->ctx);
}

/* Q and K of a layer with rope. */
static pgd_err rotate(const pass *p, int32_t layer)
{
    const model_config *cfg = p->cfg;
    bool is_local = p->d->local_rope && cfg->layer_attention[layer] == ATTENTION_SLIDING;
    rope_args args = {.x = p->d->qkv,
                      .x_stride = (int64_t)(cfg->n_heads + 2 * cfg->n_kv_heads) * cfg->head_dim,
                      .table = is_local ? p->d->local_rope : p->d->rope_table,
                      .n_positions = p->d->opts.max_positions,
                      .positions = p->batch->positions,
                      .n_rows = p->n_rows,
                      .n_heads = cfg->n_heads + cfg->n_kv_heads,
                      .head_dim = cfg->head_dim,
                      .rope_dim = cfg->rope_dim,
                      .pairs =
                          cfg->rope == ROPE_ADJACENT ? ROPE_PAIRS_ADJACENT : ROPE_PAIRS_HALVES};
    return p->ops->rope(&args, p->ctx);
}

/* Queries of a layer without rope, by their positions. */
static pgd_err set_temperature(const pass *p)
{
    const model_config *cfg = p->cfg;
    row_scale_args args = {.x = p->d->qkv,
                           .x_stride =
                               (int64_t)(cfg->n_heads + 2 * cfg->n_kv_heads) * cfg->head_dim,
                           .n_rows = p->n_rows,
                           .dim = cfg->n_heads * cfg->head_dim,
                           .factors = p->d->temperatures,
                           .positions = p->batch->positions};
    return p->ops->row_scale(&args, p->ctx);
}

static pgd_err store_kv(const pass *p, int32_t layer)
{
    const model_config *cfg = p->cfg;
    int64_t stride = (int64_t)(cfg->n_heads + 2 * cfg->n_kv_heads) * cfg->head_dim;
    float *k = p->d->qkv + (int64_t)cfg->n_heads * cfg->head_dim;
    kv_write_args args = {.pages = kv_cache_get_pages(p->kv, layer),
                          .kv = *kv_cache_get_page_layout(p->kv, layer),
                          .k = k,
                          .k_stride = stride,
                          .v = k + (int64_t)cfg->n_kv_heads * cfg->head_dim,
                          .v_stride = stride,
                          .slots = p->batch->slots[kv_cache_group_of(p->kv, layer)],
                          .n_rows = p->n_rows};
    return p->ops->kv_write(&args, p->ctx);
}

static pgd_err attend(const pass *p, int32_t layer)
{
    const model_config *cfg = p->cfg;
    attention_args args = {.out = p->d->attn,
                           .out_stride = (int64_t)cfg->n_heads * cfg->head_dim,
                           .q = p->d->qkv,
                           .q_stride =
                               (int64_t)(cfg->n_heads + 2 * cfg->n_kv_heads) * cfg->head_dim,
                           .n_heads = cfg->n_heads,
                           .pages = kv_cache_get_pages(p->kv, layer),
                           .kv = *kv_cache_get_page_layout(p->kv, layer),
                           .n_seqs = p->batch->n_seqs,
                           .query_start = p->batch->query_start,
                           .n_context = p->batch->n_context,
                           .seq_row = p->batch->seq_row,
                           .scale = (float)cfg->attn_scale,
                           .soft_cap = cfg->attn_soft_cap,
                           .sinks = p->d->opts.w->layers[layer].sinks};
    if (cfg->layer_attention[layer] == ATTENTION_SLIDING)
        args.window = cfg->sliding_window;
    else if (cfg->layer_attention[layer] == ATTENTION_CHUNKED)
        args.chunk = cfg->attention_chunk;
    args.block_table = block_table_get_ids(p->tables->groups[kv_cache_group_of(p->kv, layer)],
                                           &args.block_table_stride);
    return p->ops->attention(&args, p->ctx);
}

/* What goes on after the last attention: the logit rows of source, then the prompt rows. */
static pgd_err gather(const pass *p, float *rows, const float *source, int32_t dim)
{
    const input_batch *b = p->batch;
    PGD_TRY(model_ops_gather(rows, source, b->n_rows, b->logit_rows, b->n_logit_rows, dim, p->ops,
                             p->ctx));
    return model_ops_gather(rows + (int64_t)b->n_logit_rows * dim, source, b->n_rows,
                            b->prompt_rows, b->n_prompt_rows, dim, p->ops, p->ctx);
}

static pgd_err embed_tokens(const pass *p)
{
    const weights *w = p->d->opts.w;
    embed_args args = {.out = p->d->x,
                       .out_stride = p->cfg->dim,
                       .table = w->embed,
                       .type = w->embed_type,
                       .row_bytes = w->embed_row_bytes,
                       .n_table_rows = p->cfg->vocab_size,
                       .ids = p->batch->ids,
                       .n_rows = p->n_rows,
                       .dim = p->cfg->dim};
    PGD_TRY(p->ops->embed(&args, p->ctx));
    if (!p->cfg->scales_embed)
        return PGD_OK;
    row_scale_args scale = {.x = p->d->x,
                            .x_stride = p->cfg->dim,
                            .n_rows = p->n_rows,
                            .dim = p->cfg->dim,
                            .factor = p->d->embed_scale};
    return p->ops->row_scale(&scale, p->ctx);
}

/* Logits [n_rows, vocab_size] of normalised hidden states. */
static pgd_err compute_logits(const pass *p, float *logits, const float *hidden)
{
    const model_config *cfg = p->cfg;
    PGD_TRY(linear(p, logits, &p->d->opts.w->head, hidden, cfg->dim, false));
    if (cfg->final_soft_cap == 0)
        return PGD_OK;
    soft_cap_args args = {
        .x = logits, .n = (int64_t)p->n_rows * cfg->vocab_size, .cap = cfg->final_soft_cap};
    return p->ops->soft_cap(&args, p->ctx);
}

/* --- layers ----------------------------------------------------------------------------------- */

static pgd_err attention_part(const pass *p, int32_t layer)
{
    const model_config *cfg = p->cfg;
    const weights_layer *w = &p->d->opts.w->layers[layer];
    PGD_TRY(norm_hidden(p, w->attn_norm));
    PGD_TRY(linear(p, p->d->qkv, &w->qkv, p->d->h, cfg->dim, false));
    if (cfg->qk_norm) {
        PGD_TRY(norm_heads(p, w->q_norm, 0, cfg->n_heads));
        PGD_TRY(norm_heads(p, w->k_norm, cfg->n_heads, cfg->n_kv_heads));
    }
    if (cfg->layer_has_rope[layer]) {
        PGD_TRY(rotate(p, layer));
        if (cfg->qk_l2_norm)
            PGD_TRY(norm_heads(p, NULL, 0, cfg->n_heads + cfg->n_kv_heads));
    } else if (p->d->temperatures) {
        PGD_TRY(set_temperature(p));
    }
    PGD_TRY(store_kv(p, layer));
    return attend(p, layer);
}

/* x += FFN(norm(x)): experts, one part for all rows, or both */
static pgd_err ffn_part(const pass *p, int32_t layer)
{
    const model_config *cfg = p->cfg;
    const weights_layer *w = &p->d->opts.w->layers[layer];
    float *gate_up = p->d->gate_up;
    PGD_TRY(norm_hidden(p, w->ffn_norm));
    if (cfg->layer_has_experts[layer])
        PGD_TRY(
            expert_ffn_run(&p->d->experts, p->d->x, p->d->h, w, cfg, p->n_rows, p->ops, p->ctx));
    if (w->gate_up.n_parts == 0)
        return PGD_OK;
    PGD_TRY(linear(p, gate_up, &w->gate_up, p->d->h, cfg->dim, false));
    PGD_TRY(model_ops_gate(gate_up, w->down.n_in, p->n_rows, cfg, p->ops, p->ctx));
    return add_branch(p, &w->down, gate_up, w->gate_up.n_out, w->ffn_post_norm);
}

static pgd_err output_part(const pass *p, int32_t layer, const float *attn)
{
    const weights_layer *w = &p->d->opts.w->layers[layer];
    int64_t attn_dim = (int64_t)p->cfg->n_heads * p->cfg->head_dim;
    PGD_TRY(add_branch(p, &w->attn_out, attn, attn_dim, w->attn_post_norm));
    return ffn_part(p, layer);
}

/* Keeps the rows whose logits are wanted: x through h (gathering in place would overwrite what is
 * still to be read), attention into qkv, which is free by now. */
static pgd_err keep_logit_rows(pass *p, const float **attn)
{
    int32_t attn_dim = p->cfg->n_heads * p->cfg->head_dim;
    PGD_TRY(gather(p, p->d->h, p->d->x, p->cfg->dim));
    float *swap = p->d->x;
    p->d->x = p->d->h;
    p->d->h = swap;
    PGD_TRY(gather(p, p->d->qkv, p->d->attn, attn_dim));
    *attn = p->d->qkv;
    p->n_rows = p->batch->n_logit_rows + p->batch->n_prompt_rows;
    return PGD_OK;
}

pgd_err decoder_forward(decoder *d, float **logits, const input_batch *batch,
                        const kv_tables *tables, const kv_cache *kv, kernel_ctx *ctx,
                        uint64_t *progress)
{
    pass p = {.d = d,
              .cfg = d->opts.cfg,
              .ops = d->opts.ops,
              .ctx = ctx,
              .batch = batch,
              .tables = tables,
              .kv = kv,
              .n_rows = batch->n_rows};
    PGD_ASSERT(batch->n_rows <= d->opts.max_rows && batch->n_logit_rows <= d->opts.max_seqs &&
               batch->n_logit_rows + batch->n_prompt_rows <=
                   PGD_MAX(d->opts.max_rows, d->opts.max_seqs));
    *logits = d->logits;
    if (batch->n_rows == 0)
        return PGD_OK;
    PGD_TRY(embed_tokens(&p));
    for (int32_t layer = 0; layer < p.cfg->n_layers; layer++) {
        const float *attn = d->attn;
        PGD_TRY(attention_part(&p, layer));
        if (layer == p.cfg->n_layers - 1)
            PGD_TRY(keep_logit_rows(&p, &attn));
        if (p.n_rows > 0)
            PGD_TRY(output_part(&p, layer, attn));
        __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
    }
    if (p.n_rows == 0)
        return PGD_OK;
    PGD_TRY(norm_hidden(&p, d->opts.w->out_norm));
    p.n_rows = batch->n_logit_rows;
    if (p.n_rows == 0)
        return PGD_OK;
    return compute_logits(&p, d->logits, d->h);
}

pgd_err decoder_prompt_logits(decoder *d, float **logits, const input_batch *batch, int32_t first,
                              int32_t n, kernel_ctx *ctx)
{
    pass p = {
        .d = d, .cfg = d->opts.cfg, .ops = d->opts.ops, .ctx = ctx, .batch = batch, .n_rows = n};
    PGD_ASSERT(n <= DECODER_MAX_SLICE && first >= 0 && n <= batch->n_prompt_rows - first);
    const float *hidden = d->h + (int64_t)(batch->n_logit_rows + first) * p.cfg->dim;
    *logits = d->slice;
    return compute_logits(&p, d->slice, hidden);
}
