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

struct weights_loader {
    const model_file *file;
    const model_config *cfg;
    const matmul_impl *matmul;
    cpu_pool *pool;
    weights_progress_fn progress;
    void *progress_arg;
    pgd_why *why;
    uint8_t *data;  /* NULL: only count */
    size_t n_bytes; /* handed out so far */
    uint64_t done_bytes;
    uint64_t total_bytes;
};

typedef weights_loader loader;

typedef struct pack_job {
    const matmul_impl *matmul;
    cpu_pool *pool;
    packed_weight *w;
    const uint8_t *rows;
    size_t row_bytes;
    int32_t first_row; /* of the packed matrix */
    int32_t n_rows;
    int32_t chunk; /* rows */
} pack_job;

static void *take(loader *ld, size_t n_bytes)
{
    void *piece = ld->data ? ld->data + ld->n_bytes : NULL;
    ld->n_bytes += PGD_ROUND_UP(n_bytes, 64);
    return piece;
}

static void advance(loader *ld, size_t n_bytes)
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
    float *values = into ? into : take(ld, (size_t)n * sizeof(float));
    if (ld->data) {
        dtype_dequantize_row(values, t->data, n, t->type);
        advance(ld, t->n_bytes);
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

static void pack_rows(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const pack_job *job = arg;
    (void)thread_idx;
    int64_t first = 0, last = job->n_rows;
    while (n_threads == 1 || cpu_pool_next(job->pool, job->n_rows, job->chunk, &first, &last)) {
        job->matmul->pack(job->w, job->rows + (size_t)first * job->row_bytes,
                          job->first_row + (int32_t)first, (int32_t)(last - first));
        if (n_threads == 1)
            break;
    }
}

static void pack_part(loader *ld, packed_weight *w, const model_tensor *t, int32_t first_row)
{
    pack_job job = {.matmul = ld->matmul,
                    .pool = ld->pool,
                    .w = w,
                    .rows = t->data,
                    .row_bytes = dtype_row_bytes(t->type, w->n_in),
                    .first_row = first_row,
                    .n_rows = (int32_t)t->dims[0]};
    int32_t n = (int32_t)PGD_MIN(PACK_CHUNK_BYTES / job.row_bytes, (size_t)job.n_rows);
    job.chunk = PGD_ROUND_UP(PGD_MAX(n, 1), ld->matmul->pack_rows);
    if (ld->pool)
        cpu_pool_run(ld->pool, pack_rows, &job);
    else
        pack_rows(&job, 0, 1);
    advance(ld, t->n_bytes);
}

static pgd_err add_part(weights_linear *out, loader *ld, const model_tensor *t, int32_t n_out,
                        const char *name)
{
    packed_weight *w = &out->parts[out->n_parts++];
    *w = (packed_weight){.type = t->type, .n_out = n_out, .n_in = out->n_in};
    w->n_bytes = ld->matmul->packed_bytes(t->type, n_out, out->n_in);
    if (w->n_bytes == 0)
        return pgd_fail(ld->why, PGD_EUNSUPPORTED,
                        "expected a type and shape that this build computes with, got %s [%" PRId32
                        ", %" PRId32 "], at tensor \"%s\"",
                        dtype_name(t->type), n_out, out->n_in, name);
    w->data = take(ld, w->n_bytes);
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
        PGD_TRY(add_part(out, ld, tensors[0], out->n_out, names[0]));
    } else {
        for (int32_t i = 0; i < n_names; i++)
            PGD_TRY(add_part(out, ld, tensors[i], n_outs[i], names[i]));
    }
    int32_t first_row = 0;
    for (int32_t i = 0; ld->data && i < n_names; i++) {
        pack_part(ld, fuse ? &out->parts[0] : &out->parts[i], tensors[i], fuse ? first_row : 0);
        first_row += n_outs[i];
    }
    return PGD_OK;
}

static pgd_err load_bias(weights_linear *out, loader *ld, int32_t n_names,
                         const char names[][MODEL_LAYOUT_MAX_NAME], const int32_t *n_outs)
{
    float *bias = take(ld, (size_t)out->n_out * sizeof(float));
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
    float *values = take(ld, n_bytes);
    *out = values;
    if (!ld->data)
        return PGD_OK;
    for (int64_t i = 0; i < n_rows; i++)
        dtype_dequantize_row(values + i * n_cols,
                             (const uint8_t *)t->data +
                                 (size_t)i * dtype_row_bytes(t->type, n_cols),
                             n_cols, t->type);
    advance(ld, t->n_bytes);
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

static pgd_err load_layer(weights_layer *out, loader *ld, int32_t layer)
{
    static const char *const qkv[] = {"attn_q", "attn_k", "attn_v"};
    static const char *const attn_out[] = {"attn_output"};
    static const char *const gate_up[] = {"ffn_gate", "ffn_up"};
    static const char *const down[] = {"ffn_down"};
    const model_config *cfg = ld->cfg;
    int32_t q_dim = cfg->n_heads * cfg->head_dim, kv_dim = cfg->n_kv_heads * cfg->head_dim;
    const int32_t qkv_outs[] = {q_dim, kv_dim, kv_dim};
    const int32_t gate_up_outs[] = {cfg->ffn_dim, cfg->ffn_dim};
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
    PGD_TRY(load_layer_linear(&out->gate_up, ld, layer, cfg->dim, 2, gate_up, gate_up_outs,
                              cfg->mlp_bias));
    return load_layer_linear(&out->down, ld, layer, cfg->ffn_dim, 1, down, &cfg->dim,
                             cfg->mlp_bias);
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
    if (!w->layers ||
        (cfg->is_encoder_decoder && weights__create_encdec(&w->encdec, cfg) != PGD_OK))
        goto fail;
    loader ld = {.file = file,
                 .cfg = cfg,
                 .matmul = matmul,
                 .pool = pool,
                 .progress = progress,
                 .progress_arg = arg,
                 .why = why,
                 .total_bytes = model_file_weight_bytes(file)};
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
    ld.data = w->data;
    ld.n_bytes = 0;
    err = walk(w, &ld);
    if (err != PGD_OK)
        goto fail;
    PGD_ASSERT(ld.n_bytes == w->n_bytes);
    ld.done_bytes = ld.total_bytes; /* what is used in place needs no work */
    advance(&ld, 0);
    *out = w;
    return PGD_OK;
fail:
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
