/* A GGUF file or a Hugging Face directory as one list of tensors plus one model_config.
 *
 * Both sources check their own files; what is added here is the common view: names in GGUF
 * spelling, unique and sorted for look-up, and the comparison of what is there with what the
 * decoder needs (model_layout). Weights are never read here, except 8 KB per tensor by the
 * fingerprint.
 */
#include "common/model/model_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/file.h"
#include "common/hash.h"
#include "common/mem.h"
#include "common/model/model_config_gguf.h"
#include "common/model/model_config_hf.h"
#include "common/model/model_hf_names.h"
#include "common/model/model_layout.h"
#include "common/model/weight_shards.h"

enum { NAME_BYTES = 256, FINGERPRINT_EDGE_BYTES = 4096 };

struct model_file {
    char *dir;       /* NULL for a GGUF */
    gguf_file *gguf; /* NULL for a directory */
    weight_shards *shards;
    model_config cfg;
    bool has_cfg;
    model_tensor *tensors;        /* [n_tensors], order of the source */
    const model_tensor **by_name; /* [n_tensors] */
    char (*names)[NAME_BYTES];    /* [n_tensors] */
    int32_t n_tensors;
};

static pgd_err alloc_tensors(model_file *f, int32_t n, pgd_why *why)
{
    f->tensors = mem_calloc((size_t)n, sizeof(*f->tensors));
    f->by_name = mem_calloc((size_t)n, sizeof(*f->by_name));
    f->names = mem_calloc((size_t)n, sizeof(*f->names));
    if (f->tensors == NULL || f->by_name == NULL || f->names == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for the tensor list of a model");
    f->n_tensors = n;
    return PGD_OK;
}

static pgd_err list_gguf_tensors(model_file *f, pgd_why *why)
{
    PGD_TRY(alloc_tensors(f, gguf_n_tensors(f->gguf), why));
    for (int32_t i = 0; i < f->n_tensors; i++) {
        const gguf_tensor *from = gguf_get_tensor_at(f->gguf, i);
        model_tensor *to = &f->tensors[i];
        PGD_ASSERT(from->name.n_bytes < NAME_BYTES); /* gguf.c's limit */
        memcpy(f->names[i], from->name.data, from->name.n_bytes);
        to->name = f->names[i];
        to->type = (dtype)from->type_id;
        to->type_name = dtype_name(from->type_id);
        to->n_dims = from->n_dims;
        memcpy(to->dims, from->dims, sizeof(to->dims));
        to->data = from->data;
        to->n_bytes = from->n_bytes;
    }
    return PGD_OK;
}

/* False when the name is too long. */
static bool map_name(char out[NAME_BYTES], const model_config *cfg, const char *name)
{
    char text_name[NAME_BYTES];
    if (cfg->is_encoder_decoder)
        return model_hf_names_map_encdec(out, NAME_BYTES, name);
    if (cfg->is_text_part) {
        if (!model_hf_names_unwrap(text_name, sizeof(text_name), name))
            return false;
        name = text_name;
    }
    return model_hf_names_map(out, NAME_BYTES, name, cfg->post_norms);
}

static pgd_err list_shard_tensors(model_file *f, pgd_why *why)
{
    int32_t n_stored = weight_shards_n_tensors(f->shards);
    PGD_TRY(alloc_tensors(f, n_stored, why));
    f->n_tensors = 0;
    for (int32_t i = 0; i < n_stored; i++) {
        const safetensors_tensor *from = weight_shards_get_tensor_at(f->shards, i);
        model_tensor *to = &f->tensors[f->n_tensors];
        char *name = f->names[f->n_tensors];
        if (f->cfg.is_text_part && model_hf_names_is_vision(from->name))
            continue;
        if (!map_name(name, &f->cfg, from->name))
            return pgd_fail(why, PGD_EFORMAT, "expected shorter tensor names, got \"%.100s...\"",
                            from->name);
        f->n_tensors++;
        to->name = name;
        to->type = from->type;
        to->type_name = from->type_name;
        to->n_dims = from->n_dims;
        memcpy(to->dims, from->dims, sizeof(to->dims));
        to->data = from->data;
        to->n_bytes = from->n_bytes;
    }
    return PGD_OK;
}

static int order_names(const void *a, const void *b)
{
    return strcmp((*(const model_tensor *const *)a)->name, (*(const model_tensor *const *)b)->name);
}

static pgd_err index_names(model_file *f, pgd_why *why)
{
    for (int32_t i = 0; i < f->n_tensors; i++)
        f->by_name[i] = &f->tensors[i];
    if (f->n_tensors > 1)
        qsort(f->by_name, (size_t)f->n_tensors, sizeof(*f->by_name), order_names);
    for (int32_t i = 1; i < f->n_tensors; i++) {
        if (strcmp(f->by_name[i - 1]->name, f->by_name[i]->name) == 0)
            return pgd_fail(why, PGD_EFORMAT, "expected unique tensor names, got \"%s\" twice",
                            f->by_name[i]->name);
    }
    return PGD_OK;
}

/* The type that holds most of the bytes; types that this build knows have small ids. */
static dtype find_main_dtype(const model_file *f)
{
    enum { N_IDS = 64 };
    size_t n_bytes[N_IDS] = {0};
    for (int32_t i = 0; i < f->n_tensors; i++) {
        int32_t id = (int32_t)f->tensors[i].type;
        if (id >= 0 && id < N_IDS)
            n_bytes[id] += f->tensors[i].n_bytes;
    }
    int32_t best = 0;
    for (int32_t id = 1; id < N_IDS; id++)
        best = n_bytes[id] > n_bytes[best] ? id : best;
    return n_bytes[best] > 0 ? (dtype)best : DTYPE_NONE;
}

static bool has_ending(const char *path, const char *ending)
{
    size_t n_path = strlen(path);
    size_t n_ending = strlen(ending);
    return n_path >= n_ending && strcmp(path + n_path - n_ending, ending) == 0;
}

/* Files name the norm before the feed-forward part of gpt-oss after the attention that it follows. */
static void rename_norms(model_file *f)
{
    static const char given[] = "post_attention_norm.weight";
    static const char meant[] = "ffn_norm.weight";
    if (strcmp(f->cfg.arch, "gpt-oss") != 0)
        return;
    for (int32_t i = 0; i < f->n_tensors; i++) {
        char *name = f->names[i];
        if (strncmp(name, "blk.", 4) == 0 && has_ending(name, given))
            memcpy(name + strlen(name) - (sizeof(given) - 1), meant, sizeof(meant));
    }
}

static pgd_err open_gguf(model_file *f, const char *path, pgd_err *config_err, pgd_why *config_why,
                         pgd_why *why)
{
    if (has_ending(path, ".safetensors"))
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "expected a .gguf file or a model directory, got a single safetensors "
                        "file, at %s; give "
                        "the directory that holds it with its config.json",
                        path);
    PGD_TRY(gguf_open(&f->gguf, path, why));
    PGD_TRY(list_gguf_tensors(f, why));
    *config_err = model_config_gguf_read(&f->cfg, f->gguf, config_why);
    if (*config_err != PGD_OK)
        (void)pgd_fail_prefix(config_why, *config_err, "%s", path);
    rename_norms(f);
    return PGD_OK;
}

static pgd_err open_dir(model_file *f, const char *path, pgd_err *config_err, pgd_why *config_why,
                        pgd_why *why)
{
    char config_path[4096];
    if (!file_join(config_path, sizeof(config_path), path, "config.json") ||
        !file_exists(config_path))
        return pgd_fail(
            why, PGD_ENOENT,
            "expected a model directory with config.json, got none, in %s; give a .gguf file or "
            "a Hugging Face model directory",
            path);
    f->dir = mem_strdup(path);
    if (f->dir == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for the path of a model");
    PGD_TRY(weight_shards_open(&f->shards, path, why));
    *config_err = model_config_hf_read(&f->cfg, path, config_why);
    return list_shard_tensors(f, why);
}

/* What the tensors of the first layer with experts say; a config may have said TURNED. */
static expert_form find_expert_form(const model_file *f)
{
    const model_config *cfg = &f->cfg;
    char name[64];
    int32_t layer = 0;
    while (layer < cfg->n_layers && !cfg->layer_has_experts[layer])
        layer++;
    (void)snprintf(name, sizeof(name), "blk.%" PRId32 ".ffn_gate.0.weight", layer);
    if (model_file_get_tensor(f, name) != NULL)
        return EXPERT_FORM_APART;
    (void)snprintf(name, sizeof(name), "blk.%" PRId32 ".ffn_gate_up_exps.blocks", layer);
    if (model_file_get_tensor(f, name) != NULL)
        return EXPERT_FORM_MXFP4;
    (void)snprintf(name, sizeof(name), "blk.%" PRId32 ".ffn_gate_up_exps.weight", layer);
    if (model_file_get_tensor(f, name) != NULL)
        return cfg->expert_form == EXPERT_FORM_TURNED ? EXPERT_FORM_TURNED : EXPERT_FORM_FUSED;
    return EXPERT_FORM_STACKED;
}

pgd_err model_file_open_listing(model_file **out, const char *path, pgd_err *config_err,
                                pgd_why *config_why, pgd_why *why)
{
    *out = NULL;
    *config_err = PGD_OK;
    model_file *f = mem_calloc(1, sizeof(*f));
    if (f == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for a model file");
    pgd_err err = file_is_dir(path) ? open_dir(f, path, config_err, config_why, why)
                                    : open_gguf(f, path, config_err, config_why, why);
    if (err == PGD_OK)
        err = index_names(f, why);
    if (err != PGD_OK) {
        model_file_close(f);
        return err;
    }
    f->has_cfg = *config_err == PGD_OK;
    if (f->has_cfg && f->cfg.n_experts > 0)
        f->cfg.expert_form = find_expert_form(f);
    f->cfg.main_dtype = find_main_dtype(f);
    if (f->cfg.is_encoder_decoder)
        f->cfg.encdec.has_logits_bias = model_file_get_tensor(f, "output.bias") != NULL;
    *out = f;
    return PGD_OK;
}

pgd_err model_file_open(model_file **out, const char *path, pgd_why *why)
{
    pgd_err config_err;
    PGD_TRY(model_file_open_listing(out, path, &config_err, why, why));
    if (config_err != PGD_OK) {
        model_file_close(*out);
        *out = NULL;
    }
    return config_err;
}

void model_file_close(model_file *file)
{
    if (file == NULL)
        return;
    mem_free(file->tensors);
    mem_free(file->by_name);
    mem_free(file->names);
    gguf_close(file->gguf);
    weight_shards_close(file->shards);
    mem_free(file->dir);
    mem_free(file);
}

const model_config *model_file_get_config(const model_file *file)
{
    return file->has_cfg ? &file->cfg : NULL;
}

const model_tensor *model_file_get_tensor(const model_file *file, const char *name)
{
    int32_t lo = 0;
    int32_t hi = file->n_tensors;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        int order = strcmp(name, file->by_name[mid]->name);
        if (order == 0)
            return file->by_name[mid];
        if (order < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

int32_t model_file_n_tensors(const model_file *file)
{
    return file->n_tensors;
}

const model_tensor *model_file_get_tensor_at(const model_file *file, int32_t idx)
{
    return &file->tensors[idx];
}

const gguf_file *model_file_get_gguf(const model_file *file)
{
    return file->gguf;
}

const char *model_file_get_dir(const model_file *file)
{
    return file->dir;
}

size_t model_file_weight_bytes(const model_file *file)
{
    size_t n_bytes = 0;
    for (int32_t i = 0; i < file->n_tensors; i++)
        n_bytes += file->tensors[i].n_bytes;
    return n_bytes;
}

/* "[576, 1536]" */
static void print_shape(char out[96], int32_t n_dims, const int64_t *dims)
{
    size_t used = 1;
    out[0] = '[';
    for (int32_t i = 0; i < PGD_MIN(n_dims, 4); i++)
        used += (size_t)snprintf(out + used, 96 - used, "%s%" PRId64, i > 0 ? ", " : "", dims[i]);
    (void)snprintf(out + used, 96 - used, "%s]", n_dims > 4 ? ", ..." : "");
}

static pgd_err check_type(const model_tensor *t, const model_layout_tensor *wanted, pgd_why *why)
{
    const dtype_info *info = dtype_get_info((int32_t)t->type);
    bool is_float = t->type == DTYPE_F32 || t->type == DTYPE_F16 || t->type == DTYPE_BF16;
    const char *expected = NULL;
    switch (wanted->values) {
    case MODEL_LAYOUT_BYTES:
        expected = strcmp(t->type_name, "U8") == 0 ? NULL : "U8";
        break;
    case MODEL_LAYOUT_F32:
        expected = t->type == DTYPE_F32 ? NULL : "F32";
        break;
    case MODEL_LAYOUT_FLOATS:
        expected = is_float ? NULL : "F32, F16 or BF16";
        break;
    case MODEL_LAYOUT_WEIGHTS:
        if (info == NULL || !info->is_weight)
            return pgd_fail(why, PGD_EUNSUPPORTED,
                            "expected a type that this build computes with (F32, F16, BF16, Q8_0, "
                            "Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4), got %s, at tensor "
                            "\"%s\"",
                            t->type_name, wanted->name);
        break;
    }
    if (expected != NULL)
        return pgd_fail(why, PGD_EUNSUPPORTED, "expected type %s, got %s, at tensor \"%s\"",
                        expected, t->type_name, wanted->name);
    return PGD_OK;
}

static pgd_err check_tensor(const model_file *f, const model_layout_tensor *wanted, pgd_why *why)
{
    const model_tensor *t = model_file_get_tensor(f, wanted->name);
    if (t == NULL)
        return pgd_fail(why, PGD_EFORMAT,
                        "expected a tensor \"%s\", got none; the model is incomplete",
                        wanted->name);
    bool has_shape = t->n_dims == wanted->n_dims;
    for (int32_t i = 0; i < wanted->n_dims && has_shape; i++)
        has_shape = t->dims[i] == wanted->dims[i];
    if (!has_shape) {
        char want_text[96];
        char got_text[96];
        print_shape(want_text, wanted->n_dims, wanted->dims);
        print_shape(got_text, t->n_dims, t->dims);
        return pgd_fail(why, PGD_EFORMAT,
                        "expected shape %s by the model's config, got %s, at tensor \"%s\"",
                        want_text, got_text, wanted->name);
    }
    return check_type(t, wanted, why);
}

pgd_err model_file_check_runnable(const model_file *file, pgd_why *why)
{
    const model_config *cfg = &file->cfg;
    if (!file->has_cfg)
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "expected a config that this build understands, got none");
    if (cfg->n_experts > 0 && cfg->expert_form == EXPERT_FORM_MXFP4 &&
        (cfg->dim % 32 != 0 || cfg->expert_ffn_dim % 32 != 0))
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "expected sizes of MXFP4 experts that are multiples of 32, got %" PRId32
                        " and %" PRId32,
                        cfg->dim, cfg->expert_ffn_dim);
    model_layout_iter iter = {0};
    model_layout_tensor wanted;
    while (model_layout_next(&wanted, &iter, cfg))
        PGD_TRY(check_tensor(file, &wanted, why));
    for (int32_t i = 0; i < file->n_tensors; i++) {
        const char *name = file->tensors[i].name;
        if (!model_layout_has_tensor(cfg, name) && !model_layout_may_ignore(cfg, name))
            return pgd_fail(why, PGD_EUNSUPPORTED,
                            "expected only tensors of a %s model, got \"%s\", which this build "
                            "would ignore",
                            cfg->arch, name);
    }
    return PGD_OK;
}

static void hash_tensor(hash_sha256_ctx *ctx, const model_tensor *t)
{
    const uint8_t *data = t->data;
    uint64_t n_bytes = t->n_bytes;
    size_t edge = PGD_MIN(t->n_bytes, (size_t)FINGERPRINT_EDGE_BYTES);
    hash_sha256_update(ctx, t->name, strlen(t->name) + 1);
    hash_sha256_update(ctx, t->type_name, strlen(t->type_name) + 1);
    hash_sha256_update(ctx, &t->n_dims, sizeof(t->n_dims));
    hash_sha256_update(ctx, t->dims, sizeof(t->dims));
    hash_sha256_update(ctx, &n_bytes, sizeof(n_bytes));
    if (edge == 0)
        return;
    hash_sha256_update(ctx, data, edge);
    hash_sha256_update(ctx, data + t->n_bytes - edge, edge);
}

pgd_err model_file_fingerprint(const model_file *file, uint8_t out[32])
{
    static_assert(HASH_SHA256_BYTES == 32, "out is a SHA-256");
    hash_sha256_ctx *ctx;
    PGD_TRY(hash_sha256_create(&ctx));
    hash_sha256_begin(ctx);
    for (int32_t i = 0; i < file->n_tensors; i++)
        hash_tensor(ctx, file->by_name[i]);
    hash_sha256_end(ctx, out);
    hash_sha256_destroy(ctx);
    return PGD_OK;
}
