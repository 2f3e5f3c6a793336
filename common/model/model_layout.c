/* The decoder's list of tensors as a table: name, shape in terms of the config, and the flag that
 * asks for it. */
#include "common/model/model_layout.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/model/encdec_layout.h"

/* A side of a shape. */
typedef enum side { ONE, DIM, Q_DIM, KV_DIM, HEAD_DIM, FFN_DIM, VOCAB, ROPE_HALF } side;

/* When a row applies. */
typedef enum need {
    ALWAYS,
    QKV_BIAS,
    O_BIAS,
    MLP_BIAS,
    QK_NORM,
    POST_NORMS,
    OWN_HEAD,
    ROPE_FREQS
} need;

typedef struct row {
    const char *name; /* in a layer: what follows "blk.N." */
    side rows;        /* ONE for vectors */
    side cols;
    need when;
} row;

static const row first_rows[] = {
    {"token_embd.weight", VOCAB, DIM, ALWAYS},
    {"rope_freqs.weight", ONE, ROPE_HALF, ROPE_FREQS},
};

static const row layer_rows[] = {
    {"attn_norm.weight", ONE, DIM, ALWAYS},
    {"attn_q.weight", Q_DIM, DIM, ALWAYS},
    {"attn_q.bias", ONE, Q_DIM, QKV_BIAS},
    {"attn_k.weight", KV_DIM, DIM, ALWAYS},
    {"attn_k.bias", ONE, KV_DIM, QKV_BIAS},
    {"attn_v.weight", KV_DIM, DIM, ALWAYS},
    {"attn_v.bias", ONE, KV_DIM, QKV_BIAS},
    {"attn_q_norm.weight", ONE, HEAD_DIM, QK_NORM},
    {"attn_k_norm.weight", ONE, HEAD_DIM, QK_NORM},
    {"attn_output.weight", DIM, Q_DIM, ALWAYS},
    {"attn_output.bias", ONE, DIM, O_BIAS},
    {"ffn_norm.weight", ONE, DIM, ALWAYS},
    {"ffn_gate.weight", FFN_DIM, DIM, ALWAYS},
    {"ffn_gate.bias", ONE, FFN_DIM, MLP_BIAS},
    {"ffn_up.weight", FFN_DIM, DIM, ALWAYS},
    {"ffn_up.bias", ONE, FFN_DIM, MLP_BIAS},
    {"ffn_down.weight", DIM, FFN_DIM, ALWAYS},
    {"ffn_down.bias", ONE, DIM, MLP_BIAS},
    {"post_attention_norm.weight", ONE, DIM, POST_NORMS},
    {"post_ffw_norm.weight", ONE, DIM, POST_NORMS},
};

static const row last_rows[] = {
    {"output_norm.weight", ONE, DIM, ALWAYS},
    {"output.weight", VOCAB, DIM, OWN_HEAD},
};

static bool is_needed(need when, const model_config *cfg)
{
    switch (when) {
    case QKV_BIAS:
        return cfg->qkv_bias;
    case O_BIAS:
        return cfg->o_bias;
    case MLP_BIAS:
        return cfg->mlp_bias;
    case QK_NORM:
        return cfg->qk_norm;
    case POST_NORMS:
        return cfg->post_norms;
    case OWN_HEAD:
        return !cfg->tied_head;
    case ROPE_FREQS:
        return cfg->has_rope_freqs;
    case ALWAYS:
        break;
    }
    return true;
}

static int64_t side_elems(side s, const model_config *cfg)
{
    switch (s) {
    case DIM:
        return cfg->dim;
    case Q_DIM:
        return (int64_t)cfg->n_heads * cfg->head_dim;
    case KV_DIM:
        return (int64_t)cfg->n_kv_heads * cfg->head_dim;
    case HEAD_DIM:
        return cfg->head_dim;
    case FFN_DIM:
        return cfg->ffn_dim;
    case VOCAB:
        return cfg->vocab_size;
    case ROPE_HALF:
        return cfg->rope_dim / 2;
    case ONE:
        break;
    }
    return 1;
}

static int32_t count_needed(const row *rows, size_t n_rows, const model_config *cfg)
{
    int32_t n = 0;
    for (size_t i = 0; i < n_rows; i++)
        n += is_needed(rows[i].when, cfg);
    return n;
}

/* The idx-th row of the table that applies. */
static const row *nth_needed(const row *rows, size_t n_rows, const model_config *cfg, int32_t idx)
{
    for (size_t i = 0; i < n_rows; i++) {
        if (is_needed(rows[i].when, cfg) && idx-- == 0)
            return &rows[i];
    }
    PGD_PANIC("model_layout: no tensor of that index");
}

#define COUNT_NEEDED(rows, cfg)    count_needed(rows, PGD_ARRAY_LEN(rows), cfg)
#define NTH_NEEDED(rows, cfg, idx) nth_needed(rows, PGD_ARRAY_LEN(rows), cfg, idx)

int32_t model_layout_n_tensors(const model_config *cfg)
{
    if (cfg->is_encoder_decoder)
        return encdec_layout_n_tensors(cfg);
    return COUNT_NEEDED(first_rows, cfg) + cfg->n_layers * COUNT_NEEDED(layer_rows, cfg) +
           COUNT_NEEDED(last_rows, cfg);
}

void model_layout_get_tensor(model_layout_tensor *out, const model_config *cfg, int32_t idx)
{
    int32_t n_first = COUNT_NEEDED(first_rows, cfg);
    int32_t n_layer = COUNT_NEEDED(layer_rows, cfg);
    const row *r;
    if (cfg->is_encoder_decoder) {
        encdec_layout_get_tensor(out, cfg, idx);
        return;
    }
    PGD_ASSERT(idx >= 0);
    if (idx < n_first) {
        r = NTH_NEEDED(first_rows, cfg, idx);
        (void)snprintf(out->name, sizeof(out->name), "%s", r->name);
    } else if (idx - n_first < cfg->n_layers * n_layer) {
        idx -= n_first;
        r = NTH_NEEDED(layer_rows, cfg, idx % n_layer);
        (void)snprintf(out->name, sizeof(out->name), "blk.%" PRId32 ".%s", idx / n_layer, r->name);
    } else {
        r = NTH_NEEDED(last_rows, cfg, idx - n_first - cfg->n_layers * n_layer);
        (void)snprintf(out->name, sizeof(out->name), "%s", r->name);
    }
    out->needs_f32 = r->when == ROPE_FREQS;
    if (r->rows == ONE) {
        out->n_dims = 1;
        out->dims[0] = side_elems(r->cols, cfg);
        out->dims[1] = 1;
    } else {
        out->n_dims = 2;
        out->dims[0] = side_elems(r->rows, cfg);
        out->dims[1] = side_elems(r->cols, cfg);
    }
}

static bool is_in(const row *rows, size_t n_rows, const model_config *cfg, const char *name)
{
    for (size_t i = 0; i < n_rows; i++) {
        if (is_needed(rows[i].when, cfg) && strcmp(rows[i].name, name) == 0)
            return true;
    }
    return false;
}

/* What follows "blk.N." with N a layer of the model in plain decimal, else NULL. */
static const char *skip_layer(const model_config *cfg, const char *name)
{
    static const char prefix[] = "blk.";
    if (strncmp(name, prefix, sizeof(prefix) - 1) != 0)
        return NULL;
    const char *p = name + sizeof(prefix) - 1;
    int32_t layer = 0;
    if (*p < '0' || *p > '9' || (p[0] == '0' && p[1] != '.'))
        return NULL;
    for (; *p >= '0' && *p <= '9'; p++) {
        layer = layer * 10 + (*p - '0');
        if (layer >= cfg->n_layers)
            return NULL;
    }
    return *p == '.' ? p + 1 : NULL;
}

bool model_layout_has_tensor(const model_config *cfg, const char *name)
{
    if (cfg->is_encoder_decoder)
        return encdec_layout_has_tensor(cfg, name);
    const char *in_layer = skip_layer(cfg, name);
    if (in_layer != NULL)
        return is_in(layer_rows, PGD_ARRAY_LEN(layer_rows), cfg, in_layer);
    return is_in(first_rows, PGD_ARRAY_LEN(first_rows), cfg, name) ||
           is_in(last_rows, PGD_ARRAY_LEN(last_rows), cfg, name);
}

bool model_layout_may_ignore(const model_config *cfg, const char *name)
{
    if (cfg->is_encoder_decoder)
        return encdec_layout_may_ignore(name);
    const char *in_layer = skip_layer(cfg, name);
    if (in_layer != NULL)
        return strcmp(in_layer, "attn_rot_embd.weight") == 0;
    return cfg->tied_head && strcmp(name, "output.weight") == 0;
}
