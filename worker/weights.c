/* Loading in two passes over the same walk of the model: the first one adds up what everything
 * needs, then one block is allocated, and the second pass hands out pieces of it and fills them.
 * The walk is written once; `data` is NULL in the first pass. */
#include "worker/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "common/model/model_layout.h"
#include "worker/weights_internal.h"

#define PACK_CHUNK_BYTES (1 << 18) /* of source rows that a thread packs at a time */

typedef weights_loader loader;

typedef struct pack_job {
    const matmul_impl *matmul;
    cpu_pool *pool;
    packed_weight *w;
    const weights_rows *rows;
    size_t row_bytes;
    int32_t first_row; /* of the packed matrix */
    int32_t chunk;     /* rows */
    uint8_t *scratch;  /* [n_threads, scratch_bytes] */
    size_t scratch_bytes;
} pack_job;

void *weights__take(loader *ld, size_t n_bytes)
{
    void *piece = ld->data ? ld->data + ld->n_bytes : NULL;
    ld->n_bytes += PGD_ROUND_UP(n_bytes, 64);
    return piece;
}

void weights__advance(loader *ld, size_t n_bytes)
{
    ld->done_bytes += n_bytes;
    if (ld->progress)
        ld->progress(ld->progress_arg, ld->done_bytes, ld->total_bytes);
}

static pgd_err find(const model_tensor **out, loader *ld, const char *name, int64_t n_rows,
                    int64_t n_cols)
{
    const model_tensor *t = model_file_get_tensor(ld->file, name);
    if (!t)
        return pgd_fail(ld->why, PGD_EFORMAT, "expected tensor \"%s\", got none", name);
    size_t row_bytes = dtype_row_bytes(t->type, n_cols);
    size_t n_bytes;
    int64_t got_rows = t->n_dims == 1 ? 1 : t->dims[0];
    int64_t got_cols = t->n_dims == 1 ? t->dims[0] : t->dims[1];
    if (t->n_dims > 2 || got_rows != n_rows || got_cols != n_cols || row_bytes == 0 ||
        !mem_mul(&n_bytes, row_bytes, (size_t)n_rows) || t->n_bytes < n_bytes)
        return pgd_fail(ld->why, PGD_EFORMAT,
                        "expected shape [%" PRId64 ", %" PRId64 "], got [%" PRId64 ", %" PRId64
                        "] of %s in %zu bytes, at tensor \"%s\"",
                        n_rows, n_cols, got_rows, got_cols, dtype_name(t->type), t->n_bytes, name);
    *out = t;
    return PGD_OK;
}

/* A vector of n values converted to f32, at a place of its own or at `into`. */
static pgd_err load_vector(const float **out, loader *ld, const char *name, int32_t n, float *into)
{
    const model_tensor *t;
    PGD_TRY(find(&t, ld, name, 1, n));
    float *values = into ? into : weights__take(ld, (size_t)n * sizeof(float));
    if (ld->data) {
        dtype_dequantize_row(values, t->data, n, t->type);
        weights__advance(ld, t->n_bytes);
    }
    if (out)
        *out = values;
    return PGD_OK;
}

/* A norm's weights; the file may hold them less one. */
static pgd_err load_norm(const float **out, loader *ld, const char *name, int32_t n)
{
    PGD_TRY(load_vector(out, ld, name, n, NULL));
    if (ld->data && ld->cfg->norm_plus_one) {
        float *values = (float *)*out;
        for (int32_t i = 0; i < n; i++)
            values[i] += 1.0f;
    }
    return PGD_OK;
}

/* --- matrices --------------------------------------------------------------------------------- */

static void pack_chunk(const pack_job *job, uint8_t *scratch, int32_t first, int32_t n)
{
    const uint8_t *rows = scratch;
    if (job->rows->data)
        rows = job->rows->data + (size_t)first * job->row_bytes;
    else
        expert_source_read(scratch, job->rows->source, first, n);
    job->matmul->pack(job->w, rows, job->first_row + first, n);
}

static void pack_rows(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const pack_job *job = arg;
    uint8_t *scratch = job->scratch ? job->scratch + (size_t)thread_idx * job->scratch_bytes : NULL;
    int64_t n_rows = job->rows->n_rows, first = 0, last = 0;
    if (n_threads == 1) {
        for (; first < n_rows; first += job->chunk)
            pack_chunk(job, scratch, (int32_t)first,
                       (int32_t)PGD_MIN((int64_t)job->chunk, n_rows - first));
        return;
    }
    while (cpu_pool_next(job->pool, n_rows, job->chunk, &first, &last))
        pack_chunk(job, scratch, (int32_t)first, (int32_t)(last - first));
}

void weights__pack(loader *ld, packed_weight *w, const weights_rows *rows, int32_t first_row)
{
    pack_job job = {.matmul = ld->matmul,
                    .pool = ld->pool,
                    .w = w,
                    .rows = rows,
                    .row_bytes = dtype_row_bytes(rows->type, w->n_in),
                    .first_row = first_row,
                    .scratch = ld->scratch,
                    .scratch_bytes = ld->scratch_bytes};
    int32_t n = (int32_t)PGD_MIN(PACK_CHUNK_BYTES / job.row_bytes, (size_t)rows->n_rows);
    job.chunk = PGD_ROUND_UP(PGD_MAX(n, 1), ld->matmul->pack_rows);
    if (!ld->data) {
        if (!rows->data)
            ld->scratch_bytes = PGD_MAX(ld->scratch_bytes, (size_t)job.chunk * job.row_bytes);
        return;
    }
    if (ld->pool)
        cpu_pool_run(ld->pool, pack_rows, &job);
    else
        pack_rows(&job, 0, 1);
    weights__advance(ld, rows->file_bytes);
}

pgd_err weights__add(packed_weight *out, loader *ld, dtype type, int32_t n_out, int32_t n_in,
                     const char *what)
{
    *out = (packed_weight){.type = type, .n_out = n_out, .n_in = n_in};
    out->n_bytes = ld->matmul->packed_bytes(type, n_out, n_in);
    if (out->n_bytes == 0)
        return pgd_fail(ld->why, PGD_EUNSUPPORTED,
                        "expected a type and shape that this build computes with, got %s [%" PRId32
                        ", %" PRId32 "], at tensor \"%s\"",
                        dtype_name(type), n_out, n_in, what);
    out->data = weights__take(ld, out->n_bytes);
    return PGD_OK;
}

/* names[i] with n_outs[i] rows each; parts of one type become one matrix where the packing's row
 * groups allow it. */
static pgd_err load_linear(weights_linear *out, loader *ld, int32_t n_in, int32_t n_names,
                           const char names[][MODEL_LAYOUT_MAX_NAME], const int32_t *n_outs)
{
    const model_tensor *tensors[MATMUL_MAX_WEIGHTS] = {NULL};
    bool fuse = true;
    *out = (weights_linear){.n_in = n_in};
    for (int32_t i = 0; i < n_names; i++) {
        PGD_TRY(find(&tensors[i], ld, names[i], n_outs[i], n_in));
        fuse =
            fuse && tensors[i]->type == tensors[0]->type && out->n_out % ld->matmul->pack_rows == 0;
        out->n_out += n_outs[i];
    }
    if (fuse) {
        PGD_TRY(weights__add(&out->parts[out->n_parts++], ld, tensors[0]->type, out->n_out, n_in,
                             names[0]));
    } else {
        for (int32_t i = 0; i < n_names; i++)
            PGD_TRY(weights__add(&out->parts[out->n_parts++], ld, tensors[i]->type, n_outs[i], n_in,
                                 names[i]));
    }
    int32_t first_row = 0;
    for (int32_t i = 0; ld->data && i < n_names; i++) {
        weights_rows rows = {.data = tensors[i]->data,
                             .type = tensors[i]->type,
                             .n_rows = n_outs[i],
                             .file_bytes = tensors[i]->n_bytes};
        weights__pack(ld, &out->parts[fuse ? 0 : i], &rows, fuse ? first_row : 0);
        first_row += n_outs[i];
    }
    return PGD_OK;
}

static pgd_err load_bias(weights_linear *out, loader *ld, int32_t n_names,
                         const char names[][MODEL_LAYOUT_MAX_NAME], const int32_t *n_outs)
{
    float *bias = weights__take(ld, (size_t)out->n_out * sizeof(float));
    out->bias = bias;
    /* In the counting pass there is no place yet, and a vector with a place of its own would be
     * counted twice. */
    for (int32_t i = 0; ld->data && i < n_names; i++) {
        PGD_TRY(load_vector(NULL, ld, names[i], n_outs[i], bias));
        bias += n_outs[i];
    }
    return PGD_OK;
}

/* --- for other models --- */

const model_config *weights__config(const weights_loader *ld)
{
    return ld->cfg;
}

pgd_err weights__table(const float **out, weights_loader *ld, const char *name, int64_t n_rows,
                       int64_t n_cols)
{
    const model_tensor *t;
    size_t n_bytes;
    PGD_TRY(find(&t, ld, name, n_rows, n_cols));
    if (!mem_mul(&n_bytes, (size_t)n_rows * sizeof(float), (size_t)n_cols))
        return PGD_ENOMEM;
    float *values = weights__take(ld, n_bytes);
    *out = values;
    if (!ld->data)
        return PGD_OK;
    for (int64_t i = 0; i < n_rows; i++)
        dtype_dequantize_row(values + i * n_cols,
                             (const uint8_t *)t->data +
                                 (size_t)i * dtype_row_bytes(t->type, n_cols),
                             n_cols, t->type);
    weights__advance(ld, t->n_bytes);
    return PGD_OK;
}

pgd_err weights__linear(weights_linear *out, weights_loader *ld, const char *prefix, int32_t n_in,
                        int32_t n_names, const char *const *what, const int32_t *n_outs)
{
    char names[MATMUL_MAX_WEIGHTS][MODEL_LAYOUT_MAX_NAME];
    for (int32_t i = 0; i < n_names; i++)
        (void)snprintf(names[i], sizeof(names[i]), "%s%s.weight", prefix, what[i]);
    PGD_TRY(load_linear(out, ld, n_in, n_names, names, n_outs));
    for (int32_t i = 0; i < n_names; i++)
        (void)snprintf(names[i], sizeof(names[i]), "%s%s.bias", prefix, what[i]);
    return load_bias(out, ld, n_names, names, n_outs);
}

/* --- the walk --------------------------------------------------------------------------------- */

static void layer_name(char out[MODEL_LAYOUT_MAX_NAME], int32_t layer, const char *what,
                       const char *kind)
{
    (void)snprintf(out, MODEL_LAYOUT_MAX_NAME, "blk.%" PRId32 ".%s.%s", layer, what, kind);
}

/* A linear map of layer `layer` from the tensors `<what>.weight`, with `<what>.bias` when has_bias.
 */
static pgd_err load_layer_linear(weights_linear *out, loader *ld, int32_t layer, int32_t n_in,
                                 int32_t n_names, const char *const *what, const int32_t *n_outs,
                                 bool has_bias)
{
    char names[MATMUL_MAX_WEIGHTS][MODEL_LAYOUT_MAX_NAME];
    for (int32_t i = 0; i < n_names; i++)
        layer_name(names[i], layer, what[i], "weight");
    PGD_TRY(load_linear(out, ld, n_in, n_names, names, n_outs));
    for (int32_t i = 0; i < n_names; i++)
        layer_name(names[i], layer, what[i], "bias");
    return has_bias ? load_bias(out, ld, n_names, names, n_outs) : PGD_OK;
}

/* The one feed-forward part of a layer, or its experts and what is beside them. */
static pgd_err load_ffn(weights_layer *out, loader *ld, int32_t layer)
{
    static const char *const gate_up[] = {"ffn_gate", "ffn_up"}, *const down[] = {"ffn_down"};
    static const char *const shared_gate_up[] = {"ffn_gate_shexp", "ffn_up_shexp"};
    static const char *const shared_down[] = {"ffn_down_shexp"}, *const router[] = {"ffn_gate_inp"};
    const model_config *cfg = ld->cfg;
    bool has_experts = cfg->layer_has_experts[layer];
    int32_t ffn_dim = has_experts ? cfg->shared_ffn_dim : cfg->ffn_dim;
    const int32_t outs[] = {ffn_dim, ffn_dim};
    if (has_experts) {
        PGD_TRY(load_layer_linear(&out->router, ld, layer, cfg->dim, 1, router, &cfg->n_experts,
                                  cfg->router_bias));
        PGD_TRY(weights__load_experts(out, ld, layer));
        if (ffn_dim == 0)
            return PGD_OK;
    }
    bool has_bias = cfg->mlp_bias && !has_experts;
    PGD_TRY(load_layer_linear(&out->gate_up, ld, layer, cfg->dim, 2,
                              has_experts ? shared_gate_up : gate_up, outs, has_bias));
    return load_layer_linear(&out->down, ld, layer, ffn_dim, 1, has_experts ? shared_down : down,
                             &cfg->dim, has_bias);
}

static pgd_err load_layer(weights_layer *out, loader *ld, int32_t layer)
{
    static const char *const qkv[] = {"attn_q", "attn_k", "attn_v"};
    static const char *const attn_out[] = {"attn_output"};
    const model_config *cfg = ld->cfg;
    int32_t q_dim = cfg->n_heads * cfg->head_dim, kv_dim = cfg->n_kv_heads * cfg->head_dim;
    const int32_t qkv_outs[] = {q_dim, kv_dim, kv_dim};
    char name[MODEL_LAYOUT_MAX_NAME];

    layer_name(name, layer, "attn_norm", "weight");
    PGD_TRY(load_norm(&out->attn_norm, ld, name, cfg->dim));
    PGD_TRY(load_layer_linear(&out->qkv, ld, layer, cfg->dim, 3, qkv, qkv_outs, cfg->qkv_bias));
    if (cfg->qk_norm) {
        layer_name(name, layer, "attn_q_norm", "weight");
        PGD_TRY(load_norm(&out->q_norm, ld, name, cfg->head_dim));
        layer_name(name, layer, "attn_k_norm", "weight");
        PGD_TRY(load_norm(&out->k_norm, ld, name, cfg->head_dim));
    }
    if (cfg->attn_sinks) {
        layer_name(name, layer, "attn_sinks", "weight");
        PGD_TRY(load_vector(&out->sinks, ld, name, cfg->n_heads, NULL));
    }
    PGD_TRY(
        load_layer_linear(&out->attn_out, ld, layer, q_dim, 1, attn_out, &cfg->dim, cfg->o_bias));
    layer_name(name, layer, "ffn_norm", "weight");
    PGD_TRY(load_norm(&out->ffn_norm, ld, name, cfg->dim));
    if (cfg->post_norms) {
        layer_name(name, layer, "post_attention_norm", "weight");
        PGD_TRY(load_norm(&out->attn_post_norm, ld, name, cfg->dim));
        layer_name(name, layer, "post_ffw_norm", "weight");
        PGD_TRY(load_norm(&out->ffn_post_norm, ld, name, cfg->dim));
    }
    return load_ffn(out, ld, layer);
}

static pgd_err walk(weights *w, loader *ld)
{
    const model_config *cfg = ld->cfg;
    const model_tensor *embed;
    char head[1][MODEL_LAYOUT_MAX_NAME] = {"output.weight"};
    PGD_TRY(find(&embed, ld, "token_embd.weight", cfg->vocab_size, cfg->dim));
    w->embed = embed->data;
    w->embed_type = embed->type;
    w->embed_row_bytes = (int64_t)dtype_row_bytes(embed->type, cfg->dim);
    if (cfg->tied_head)
        memcpy(head[0], "token_embd.weight", sizeof("token_embd.weight"));
    if (w->encdec) {
        PGD_TRY(load_linear(&w->head, ld, cfg->dim, 1, head, &cfg->vocab_size));
        return weights__walk_encdec(w, ld);
    }
    if (cfg->has_rope_freqs)
        PGD_TRY(load_vector(&w->rope_freqs, ld, "rope_freqs.weight", cfg->rope_dim / 2, NULL));
    for (int32_t i = 0; i < cfg->n_layers; i++)
        PGD_TRY(load_layer(&w->layers[i], ld, i));
    PGD_TRY(load_norm(&w->out_norm, ld, "output_norm.weight", cfg->dim));
    return load_linear(&w->head, ld, cfg->dim, 1, head, &cfg->vocab_size);
}

pgd_err weights_load(weights **out, const model_file *file, const matmul_impl *matmul,
                     cpu_pool *pool, weights_progress_fn progress, void *arg, pgd_why *why)
{
    *out = NULL;
    const model_config *cfg = model_file_get_config(file);
    PGD_TRY(model_file_check_runnable(file, why));
    weights *w = mem_calloc(1, sizeof(*w));
    if (!w)
        return PGD_ENOMEM;
    pgd_err err = PGD_ENOMEM;
    w->n_layers = cfg->n_layers;
    w->layers = mem_calloc((size_t)cfg->n_layers, sizeof(*w->layers));
    int32_t n_threads = pool ? cpu_pool_n_threads(pool) : 1;
    loader ld = {.file = file,
                 .cfg = cfg,
                 .matmul = matmul,
                 .pool = pool,
                 .progress = progress,
                 .progress_arg = arg,
                 .why = why,
                 .total_bytes = model_file_weight_bytes(file)};
    if (!w->layers ||
        (cfg->is_encoder_decoder && weights__create_encdec(&w->encdec, cfg) != PGD_OK))
        goto fail;
    err = walk(w, &ld);
    if (err != PGD_OK)
        goto fail;
    w->n_bytes = ld.n_bytes;
    w->data = mem_alloc_aligned(w->n_bytes, 64);
    if (!w->data) {
        err = pgd_fail(why, PGD_ENOMEM, "expected %zu bytes for the packed weights, got none",
                       w->n_bytes);
        goto fail;
    }
    if (ld.scratch_bytes > 0) {
        ld.scratch_bytes = PGD_ROUND_UP(ld.scratch_bytes, 64);
        ld.scratch = mem_alloc_aligned(ld.scratch_bytes * (size_t)n_threads, 64);
        if (!ld.scratch) {
            err = PGD_ENOMEM;
            goto fail;
        }
    }
    ld.data = w->data;
    ld.n_bytes = 0;
    err = walk(w, &ld);
    if (err != PGD_OK)
        goto fail;
    PGD_ASSERT(ld.n_bytes == w->n_bytes);
    ld.done_bytes = ld.total_bytes; /* what is used in place needs no work */
    weights__advance(&ld, 0);
    mem_free_aligned(ld.scratch, ld.scratch_bytes * (size_t)n_threads);
    *out = w;
    return PGD_OK;
fail:
    mem_free_aligned(ld.scratch, ld.scratch_bytes * (size_t)n_threads);
    weights_destroy(w);
    return err;
}

void weights_destroy(weights *w)
{
    if (!w)
        return;
    mem_free_aligned(w->data, w->n_bytes);
    mem_free(w->layers);
    weights__destroy_encdec(w->encdec);
    mem_free(w);
}
