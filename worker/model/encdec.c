/* Encoder inputs of a step go through the encoder together, each input whole, so that its tokens see
 * each other; what comes out is needed only for keys and values of the decoder's cross attention,
 * which are written at once for all layers and stay in the request's blocks.
 *
 * The encoder's own attention is the paged op too: its keys and values lie in pages of its own that
 * every layer uses anew, input after input in consecutive blocks. Rows never mix outside attention,
 * and attention sums in an order fixed by keys alone, so that an input's bits do not depend on the
 * others.
 *
 *   x [n, dim]  qkv [n, 3 dim]  attn [n, dim]  up [n, ffn], each for the larger of both sides
 */
#include "worker/model/encdec.h"

#include <math.h>

#include "common/mem.h"
#include "worker/model/model_ops.h"

/* Tokens in a page of the encoder's own keys: as short as the kernels take. */
enum { OWN_BLOCK_SIZE = 16 };

struct encdec {
    encdec_opts opts;
    float *x;
    float *qkv;
    float *attn;
    float *up;
    float *logits; /* [max_seqs, vocab_size] */
    float *picked; /* [max_seqs, dim] rows of x whose logits are wanted */
    float *own_pages;
    kv_page_layout own_kv;
    int32_t n_own_blocks;
    int32_t max_own_blocks; /* of one input */
    block_id *own_table;    /* [max_seqs, max_own_blocks] */
    slot_id *own_slots;     /* [max_encoder_rows] */
    int32_t *own_rows;      /* [max_seqs] 0, 1, 2 ... */
    void *data;
    size_t n_bytes;
};

/* One side at work on its rows. */
typedef struct pass {
    encdec *e;
    const model_config *cfg;
    const kernel_ops *ops;
    kernel_ctx *ctx;
    const input_batch *batch;
    const kv_tables *tables;
    const kv_cache *kv;
    int32_t n_rows;
    int32_t ffn_dim;
} pass;

/* --- memory ----------------------------------------------------------------------------------- */

static void lay_out(encdec *e, model_ops_plan *p)
{
    const model_config *cfg = e->opts.cfg;
    int64_t max_rows = PGD_MAX(e->opts.max_rows, e->opts.max_encoder_rows);
    int64_t page_floats = (int64_t)(kv_page_bytes(&e->own_kv) / sizeof(float));
    e->x = model_ops_take(p, max_rows, cfg->dim);
    e->qkv = model_ops_take(p, max_rows, (int64_t)3 * cfg->dim);
    e->attn = model_ops_take(p, max_rows, cfg->dim);
    e->up = model_ops_take(p, max_rows, PGD_MAX(cfg->ffn_dim, cfg->encdec.ffn_dim));
    e->logits = model_ops_take(p, e->opts.max_seqs, cfg->vocab_size);
    e->picked = model_ops_take(p, e->opts.max_seqs, cfg->dim);
    e->own_pages = model_ops_take(p, e->n_own_blocks, page_floats);
}

static pgd_err create_tables(encdec *e)
{
    size_t max_seqs = (size_t)e->opts.max_seqs;
    e->own_table = mem_calloc(max_seqs * (size_t)e->max_own_blocks, sizeof(*e->own_table));
    e->own_slots = mem_calloc((size_t)e->opts.max_encoder_rows, sizeof(*e->own_slots));
    e->own_rows = mem_calloc(max_seqs, sizeof(*e->own_rows));
    if (!e->own_table || !e->own_slots || !e->own_rows)
        return PGD_ENOMEM;
    for (int32_t i = 0; i < e->opts.max_seqs; i++)
        e->own_rows[i] = i;
    return PGD_OK;
}

pgd_err encdec_create(encdec **out, const encdec_opts *opts, pgd_why *why)
{
    *out = NULL;
    const encdec_config *c = &opts->cfg->encdec;
    if (opts->max_rows < 1 || opts->max_seqs < 1 || opts->max_encoder_rows < c->max_source)
        return PGD_EINVAL;
    encdec *e = mem_calloc(1, sizeof(*e));
    if (!e)
        return PGD_ENOMEM;
    e->opts = *opts;
    e->own_kv = (kv_page_layout){.type = DTYPE_F32,
                                 .n_kv_heads = c->n_heads,
                                 .head_dim = c->head_dim,
                                 .block_size = OWN_BLOCK_SIZE};
    /* Every input may end in a block that it does not fill. */
    e->n_own_blocks = PGD_CEIL_DIV(opts->max_encoder_rows, OWN_BLOCK_SIZE) + opts->max_seqs;
    e->max_own_blocks = PGD_CEIL_DIV(c->max_source, OWN_BLOCK_SIZE);
    model_ops_plan p = {0};
    lay_out(e, &p);
    pgd_err err = PGD_ENOMEM;
    e->n_bytes = p.n_bytes;
    e->data = p.overflow ? NULL : mem_alloc_aligned(p.n_bytes, 64);
    if (!e->data) {
        err = pgd_fail(why, PGD_ENOMEM,
                       "expected %zu bytes for activations, got none; lower "
                       "--max-num-batched-tokens or --max-num-seqs",
                       p.n_bytes);
        goto fail;
    }
    p = (model_ops_plan){.data = e->data};
    lay_out(e, &p);
    err = create_tables(e);
    if (err != PGD_OK)
        goto fail;
    *out = e;
    return PGD_OK;
fail:
    encdec_destroy(e);
    return err;
}

void encdec_destroy(encdec *e)
{
    if (!e)
        return;
    mem_free(e->own_table);
    mem_free(e->own_slots);
    mem_free(e->own_rows);
    mem_free_aligned(e->data, e->n_bytes);
    mem_free(e);
}

size_t encdec_bytes(const encdec *e)
{
    return e->n_bytes;
}

size_t encdec_workspace_bytes(const encdec *e, const attention_limits *limits)
{
    const model_config *cfg = e->opts.cfg;
    const kernel_ops *ops = e->opts.ops;
    int32_t max_rows = PGD_MAX(e->opts.max_rows, e->opts.max_encoder_rows);
    int32_t max_n_in = PGD_MAX(PGD_MAX(cfg->dim, cfg->ffn_dim), cfg->encdec.ffn_dim);
    attention_limits cross = *limits, own = *limits;
    cross.max_context = cfg->encdec.max_source;
    own.max_context = cfg->encdec.max_source;
    own.max_rows = e->opts.max_encoder_rows;
    own.n_heads = cfg->encdec.n_heads;
    own.kv = e->own_kv;
    size_t n_bytes = ops->matmul->workspace_bytes(max_rows, max_n_in, limits->n_threads);
    n_bytes = PGD_MAX(n_bytes, ops->attention_workspace_bytes(&cross));
    return PGD_MAX(n_bytes, ops->attention_workspace_bytes(&own));
}

/* --- ops -------------------------------------------------------------------------------------- */

static pgd_err linear(const pass *p, float *out, const weights_linear *w, const float *in,
                      bool accumulate)
{
    return model_ops_linear(out, w, in, w->n_in, p->n_rows, accumulate, p->ops, p->ctx);
}

static pgd_err norm(const pass *p, const encdec_norm *w)
{
    layernorm_args args = {.out = p->e->x,
                           .out_stride = p->cfg->dim,
                           .x = p->e->x,
                           .x_stride = p->cfg->dim,
                           .weight = w->weight,
                           .bias = w->bias,
                           .n_rows = p->n_rows,
                           .dim = p->cfg->dim,
                           .eps = p->cfg->norm_eps};
    return p->ops->layernorm(&args, p->ctx);
}

/* Tokens and their positions. */
static pgd_err embed(const pass *p, const encdec_side *side, const token_id *ids,
                     const int32_t *positions)
{
    const weights *w = p->e->opts.w;
    embed_args tokens = {.out = p->e->x,
                         .out_stride = p->cfg->dim,
                         .table = w->embed,
                         .type = w->embed_type,
                         .row_bytes = w->embed_row_bytes,
                         .n_table_rows = p->cfg->vocab_size,
                         .ids = ids,
                         .n_rows = p->n_rows,
                         .dim = p->cfg->dim};
    add_positions_args add = {.x = p->e->x,
                              .x_stride = p->cfg->dim,
                              .scale = p->cfg->encdec.embed_scale,
                              .table = side->positions,
                              .offset = p->cfg->encdec.position_offset,
                              .positions = positions,
                              .n_rows = p->n_rows,
                              .dim = p->cfg->dim};
    PGD_TRY(p->ops->embed(&tokens, p->ctx));
    PGD_TRY(p->ops->add_positions(&add, p->ctx));
    return norm(p, &side->embed_norm);
}

/* The K and V of n_rows rows, side by side at kv with that stride. */
static pgd_err store_kv(const pass *p, void *pages, const kv_page_layout *layout,
                        const slot_id *slots, const float *kv, int64_t stride)
{
    kv_write_args args = {.pages = pages,
                          .kv = *layout,
                          .k = kv,
                          .k_stride = stride,
                          .v = kv + p->cfg->dim,
                          .v_stride = stride,
                          .slots = slots,
                          .n_rows = p->n_rows};
    return p->ops->kv_write(&args, p->ctx);
}

static pgd_err attend_over(const pass *p, attention_args *args, int64_t q_stride)
{
    args->out = p->e->attn;
    args->out_stride = p->cfg->dim;
    args->q = p->e->qkv;
    args->q_stride = q_stride;
    args->scale = (float)(1 / sqrt((double)args->kv.head_dim));
    return p->ops->attention(args, p->ctx);
}

/* x = norm(x + w in) */
static pgd_err add_branch(const pass *p, const weights_linear *w, const float *in,
                          const encdec_norm *behind)
{
    PGD_TRY(linear(p, p->e->x, w, in, true));
    return norm(p, behind);
}

static pgd_err feed_forward(const pass *p, const encdec_layer *w)
{
    static const activation_kind kinds[] = {[FFN_ACT_SILU] = ACTIVATION_SILU,
                                            [FFN_ACT_GELU_TANH] = ACTIVATION_GELU_TANH,
                                            [FFN_ACT_GELU] = ACTIVATION_GELU,
                                            [FFN_ACT_RELU] = ACTIVATION_RELU};
    activation_args args = {.out = p->e->up,
                            .out_stride = p->ffn_dim,
                            .x = p->e->up,
                            .x_stride = p->ffn_dim,
                            .n_rows = p->n_rows,
                            .dim = p->ffn_dim,
                            .kind = kinds[p->cfg->act]};
    PGD_TRY(linear(p, p->e->up, &w->up, p->e->x, false));
    PGD_TRY(p->ops->activation(&args, p->ctx));
    return add_branch(p, &w->down, p->e->up, &w->layer_norm);
}

/* --- encoder ---------------------------------------------------------------------------------- */

/* Blocks of the encoder's own pages, input after input. */
static void place_inputs(encdec *e, const encoder_batch *b)
{
    block_id next = 0;
    for (int32_t s = 0; s < b->n_seqs; s++) {
        block_id *row = e->own_table + (int64_t)s * e->max_own_blocks;
        slot_id *slots = e->own_slots + b->start[s];
        int32_t n_blocks = PGD_CEIL_DIV(b->n_keys[s], OWN_BLOCK_SIZE);
        PGD_ASSERT(n_blocks <= e->max_own_blocks && next + n_blocks <= e->n_own_blocks);
        for (int32_t i = 0; i < b->n_keys[s]; i++)
            slots[i] = next * OWN_BLOCK_SIZE + i;
        for (int32_t i = 0; i < n_blocks; i++)
            row[i] = next++;
    }
}

static pgd_err encoder_layer(const pass *p, const encdec_layer *w)
{
    encdec *e = p->e;
    const encoder_batch *b = &p->batch->encoder;
    int64_t stride = (int64_t)3 * p->cfg->dim;
    attention_args args = {.n_heads = p->cfg->encdec.n_heads,
                           .pages = e->own_pages,
                           .kv = e->own_kv,
                           .n_seqs = b->n_seqs,
                           .query_start = b->start,
                           .n_keys = b->n_keys,
                           .seq_row = e->own_rows,
                           .block_table = e->own_table,
                           .block_table_stride = e->max_own_blocks};
    PGD_TRY(linear(p, e->qkv, &w->qkv, e->x, false));
    PGD_TRY(store_kv(p, e->own_pages, &e->own_kv, e->own_slots, e->qkv + p->cfg->dim, stride));
    PGD_TRY(attend_over(p, &args, stride));
    PGD_TRY(add_branch(p, &w->attn_out, e->attn, &w->attn_norm));
    return feed_forward(p, w);
}

/* K and V of every cross attention, from the encoder's output. */
static pgd_err store_cross_kv(const pass *p)
{
    const encdec_side *decoder = &p->e->opts.w->encdec->decoder;
    for (int32_t i = 0; i < decoder->n_layers; i++) {
        int32_t layer = decoder->n_layers + i;
        PGD_TRY(linear(p, p->e->qkv, &decoder->layers[i].cross_kv, p->e->x, false));
        PGD_TRY(store_kv(p, kv_cache_get_pages(p->kv, layer),
                         kv_cache_get_page_layout(p->kv, layer),
                         p->batch->encoder.slots[kv_cache_group_of(p->kv, layer)], p->e->qkv,
                         (int64_t)2 * p->cfg->dim));
    }
    return PGD_OK;
}

static pgd_err encode(pass *p, uint64_t *progress)
{
    const encdec_side *encoder = &p->e->opts.w->encdec->encoder;
    const encoder_batch *b = &p->batch->encoder;
    p->n_rows = b->n_rows;
    p->ffn_dim = p->cfg->encdec.ffn_dim;
    place_inputs(p->e, b);
    PGD_TRY(embed(p, encoder, b->ids, b->positions));
    for (int32_t i = 0; i < encoder->n_layers; i++) {
        PGD_TRY(encoder_layer(p, &encoder->layers[i]));
        __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
    }
    return store_cross_kv(p);
}

/* --- decoder ---------------------------------------------------------------------------------- */

/* What both attentions of a decoder layer share; layer: the KV layer. */
static attention_args decoder_args(const pass *p, int32_t layer)
{
    attention_args args = {.n_heads = p->cfg->n_heads,
                           .pages = kv_cache_get_pages(p->kv, layer),
                           .kv = *kv_cache_get_page_layout(p->kv, layer),
                           .n_seqs = p->batch->n_seqs,
                           .query_start = p->batch->query_start,
                           .seq_row = p->batch->seq_row};
    args.block_table = block_table_get_ids(p->tables->groups[kv_cache_group_of(p->kv, layer)],
                                           &args.block_table_stride);
    return args;
}

static pgd_err decoder_layer(const pass *p, const encdec_layer *w, int32_t layer)
{
    encdec *e = p->e;
    int64_t stride = (int64_t)3 * p->cfg->dim;
    attention_args self = decoder_args(p, layer);
    attention_args cross = decoder_args(p, p->cfg->n_layers + layer);
    self.n_context = p->batch->n_context;
    cross.n_keys = p->batch->n_encoder_tokens;
    PGD_TRY(linear(p, e->qkv, &w->qkv, e->x, false));
    PGD_TRY(store_kv(p, (void *)self.pages, &self.kv,
                     p->batch->slots[kv_cache_group_of(p->kv, layer)], e->qkv + p->cfg->dim,
                     stride));
    PGD_TRY(attend_over(p, &self, stride));
    PGD_TRY(add_branch(p, &w->attn_out, e->attn, &w->attn_norm));
    PGD_TRY(linear(p, e->qkv, &w->cross_q, e->x, false));
    PGD_TRY(attend_over(p, &cross, p->cfg->dim));
    PGD_TRY(add_branch(p, &w->cross_out, e->attn, &w->cross_norm));
    return feed_forward(p, w);
}

pgd_err encdec_forward(encdec *e, float **logits, const input_batch *batch, const kv_tables *tables,
                       const kv_cache *kv, kernel_ctx *ctx, uint64_t *progress)
{
    const encdec_side *decoder = &e->opts.w->encdec->decoder;
    pass p = {.e = e,
              .cfg = e->opts.cfg,
              .ops = e->opts.ops,
              .ctx = ctx,
              .batch = batch,
              .tables = tables,
              .kv = kv};
    PGD_ASSERT(batch->n_rows <= e->opts.max_rows && batch->n_logit_rows <= e->opts.max_seqs &&
               batch->encoder.n_rows <= e->opts.max_encoder_rows &&
               batch->encoder.n_seqs <= e->opts.max_seqs && batch->n_prompt_rows == 0);
    *logits = e->logits;
    if (batch->encoder.n_rows > 0)
        PGD_TRY(encode(&p, progress));
    p.n_rows = batch->n_rows;
    p.ffn_dim = p.cfg->ffn_dim;
    if (p.n_rows == 0)
        return PGD_OK;
    PGD_TRY(embed(&p, decoder, batch->ids, batch->positions));
    for (int32_t i = 0; i < decoder->n_layers; i++) {
        PGD_TRY(decoder_layer(&p, &decoder->layers[i], i));
        __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
    }
    PGD_TRY(model_ops_gather(e->picked, e->x, batch->n_rows, batch->logit_rows, batch->n_logit_rows,
                             p.cfg->dim, p.ops, ctx));
    p.n_rows = batch->n_logit_rows;
    if (p.n_rows == 0)
        return PGD_OK;
    return linear(&p, e->logits, &e->opts.w->head, e->picked, false);
}
