/* The decoder's list of tensors as tables: name, when it is there, type, shape in terms of the config.
 *
 * A name in a layer is what follows "blk.N."; a row whose name has a star stands for one tensor per
 * expert, with its number there.
 */
#include "common/model/model_layout.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/model/encdec_layout.h"

/* A side of a shape. */
typedef enum side {
    NONE,
    DIM,
    Q_DIM,
    KV_DIM,
    N_HEADS,
    HEAD_DIM,
    FFN_DIM,
    SHARED_DIM,
    N_EXPERTS,
    EXPERT_DIM,
    EXPERT_DIM_2,
    DIM_BLOCKS, /* of MXFP4 */
    EXPERT_BLOCKS,
    BLOCK_BYTES,
    VOCAB,
    ROPE_HALF
} side;

/* When a row applies. */
typedef enum need {
    ALWAYS,
    QKV_BIAS,
    O_BIAS,
    QK_NORM,
    SINKS,
    POST_NORMS,
    DENSE,
    DENSE_BIAS,
    EXPERTS,
    ROUTER_BIAS,
    STACKED,
    STACKED_BIAS,
    APART,
    FUSED,
    FUSED_BIAS, /* in every form that joins gate and up */
    EXPERT_BIAS,
    TURNED,
    MXFP4,
    SHARED_EXPERT,
    OWN_HEAD,
    ROPE_FREQS
} need;

typedef struct row {
    const char *name;
    need when;
    model_layout_values values;
    side dims[4]; /* as many as there are */
} row;

#define WEIGHTS MODEL_LAYOUT_WEIGHTS
#define FLOATS  MODEL_LAYOUT_FLOATS
#define BYTES   MODEL_LAYOUT_BYTES

static const row first_rows[] = {
    {"token_embd.weight", ALWAYS, WEIGHTS, {VOCAB, DIM}},
    {"rope_freqs.weight", ROPE_FREQS, MODEL_LAYOUT_F32, {ROPE_HALF}},
};

static const row layer_rows[] = {
    {"attn_norm.weight", ALWAYS, FLOATS, {DIM}},
    {"attn_q.weight", ALWAYS, WEIGHTS, {Q_DIM, DIM}},
    {"attn_q.bias", QKV_BIAS, FLOATS, {Q_DIM}},
    {"attn_k.weight", ALWAYS, WEIGHTS, {KV_DIM, DIM}},
    {"attn_k.bias", QKV_BIAS, FLOATS, {KV_DIM}},
    {"attn_v.weight", ALWAYS, WEIGHTS, {KV_DIM, DIM}},
    {"attn_v.bias", QKV_BIAS, FLOATS, {KV_DIM}},
    {"attn_q_norm.weight", QK_NORM, FLOATS, {HEAD_DIM}},
    {"attn_k_norm.weight", QK_NORM, FLOATS, {HEAD_DIM}},
    {"attn_sinks.weight", SINKS, FLOATS, {N_HEADS}},
    {"attn_output.weight", ALWAYS, WEIGHTS, {DIM, Q_DIM}},
    {"attn_output.bias", O_BIAS, FLOATS, {DIM}},
    {"post_attention_norm.weight", POST_NORMS, FLOATS, {DIM}},
    {"ffn_norm.weight", ALWAYS, FLOATS, {DIM}},
    {"post_ffw_norm.weight", POST_NORMS, FLOATS, {DIM}},
    {"ffn_gate.weight", DENSE, WEIGHTS, {FFN_DIM, DIM}},
    {"ffn_gate.bias", DENSE_BIAS, FLOATS, {FFN_DIM}},
    {"ffn_up.weight", DENSE, WEIGHTS, {FFN_DIM, DIM}},
    {"ffn_up.bias", DENSE_BIAS, FLOATS, {FFN_DIM}},
    {"ffn_down.weight", DENSE, WEIGHTS, {DIM, FFN_DIM}},
    {"ffn_down.bias", DENSE_BIAS, FLOATS, {DIM}},
    {"ffn_gate_inp.weight", EXPERTS, WEIGHTS, {N_EXPERTS, DIM}},
    {"ffn_gate_inp.bias", ROUTER_BIAS, FLOATS, {N_EXPERTS}},
    {"ffn_gate_exps.weight", STACKED, WEIGHTS, {N_EXPERTS, EXPERT_DIM, DIM}},
    {"ffn_gate_exps.bias", STACKED_BIAS, FLOATS, {N_EXPERTS, EXPERT_DIM}},
    {"ffn_up_exps.weight", STACKED, WEIGHTS, {N_EXPERTS, EXPERT_DIM, DIM}},
    {"ffn_up_exps.bias", STACKED_BIAS, FLOATS, {N_EXPERTS, EXPERT_DIM}},
    {"ffn_down_exps.weight", STACKED, WEIGHTS, {N_EXPERTS, DIM, EXPERT_DIM}},
    {"ffn_gate.*.weight", APART, WEIGHTS, {EXPERT_DIM, DIM}},
    {"ffn_up.*.weight", APART, WEIGHTS, {EXPERT_DIM, DIM}},
    {"ffn_down.*.weight", APART, WEIGHTS, {DIM, EXPERT_DIM}},
    {"ffn_gate_up_exps.weight", FUSED, WEIGHTS, {N_EXPERTS, EXPERT_DIM_2, DIM}},
    {"ffn_down_exps.weight", FUSED, WEIGHTS, {N_EXPERTS, DIM, EXPERT_DIM}},
    {"ffn_gate_up_exps.weight", TURNED, FLOATS, {N_EXPERTS, DIM, EXPERT_DIM_2}},
    {"ffn_down_exps.weight", TURNED, FLOATS, {N_EXPERTS, EXPERT_DIM, DIM}},
    {"ffn_gate_up_exps.blocks", MXFP4, BYTES, {N_EXPERTS, EXPERT_DIM_2, DIM_BLOCKS, BLOCK_BYTES}},
    {"ffn_gate_up_exps.scales", MXFP4, BYTES, {N_EXPERTS, EXPERT_DIM_2, DIM_BLOCKS}},
    {"ffn_down_exps.blocks", MXFP4, BYTES, {N_EXPERTS, DIM, EXPERT_BLOCKS, BLOCK_BYTES}},
    {"ffn_down_exps.scales", MXFP4, BYTES, {N_EXPERTS, DIM, EXPERT_BLOCKS}},
    {"ffn_gate_up_exps.bias", FUSED_BIAS, FLOATS, {N_EXPERTS, EXPERT_DIM_2}},
    {"ffn_down_exps.bias", EXPERT_BIAS, FLOATS, {N_EXPERTS, DIM}},
    {"ffn_gate_shexp.weight", SHARED_EXPERT, WEIGHTS, {SHARED_DIM, DIM}},
    {"ffn_up_shexp.weight", SHARED_EXPERT, WEIGHTS, {SHARED_DIM, DIM}},
    {"ffn_down_shexp.weight", SHARED_EXPERT, WEIGHTS, {DIM, SHARED_DIM}},
};

static const row last_rows[] = {
    {"output_norm.weight", ALWAYS, FLOATS, {DIM}},
    {"output.weight", OWN_HEAD, WEIGHTS, {VOCAB, DIM}},
};

/* In the order of the walk. */
static const struct {
    const row *rows;
    int32_t n_rows;
} tables[] = {{first_rows, PGD_ARRAY_LEN(first_rows)},
              {layer_rows, PGD_ARRAY_LEN(layer_rows)},
              {last_rows, PGD_ARRAY_LEN(last_rows)}};

enum { LAYER_TABLE = 1, N_TABLES = 3 };

static bool expert_row_is_needed(need when, const model_config *cfg)
{
    expert_form form = cfg->expert_form;
    switch (when) {
    case ROUTER_BIAS:
        return cfg->router_bias;
    case STACKED:
        return form == EXPERT_FORM_STACKED;
    case STACKED_BIAS:
        return cfg->expert_bias && (form == EXPERT_FORM_STACKED || form == EXPERT_FORM_APART);
    case APART:
        return form == EXPERT_FORM_APART;
    case FUSED:
        return form == EXPERT_FORM_FUSED;
    case TURNED:
        return form == EXPERT_FORM_TURNED;
    case MXFP4:
        return form == EXPERT_FORM_MXFP4;
    case FUSED_BIAS:
        return cfg->expert_bias && form != EXPERT_FORM_STACKED && form != EXPERT_FORM_APART;
    case EXPERT_BIAS:
        return cfg->expert_bias;
    case SHARED_EXPERT:
        return cfg->shared_ffn_dim > 0;
    default:
        return true;
    }
}

/* layer: any outside layers. */
static bool is_needed(need when, const model_config *cfg, int32_t layer)
{
    switch (when) {
    case ALWAYS:
        return true;
    case QKV_BIAS:
        return cfg->qkv_bias;
    case O_BIAS:
        return cfg->o_bias;
    case QK_NORM:
        return cfg->qk_norm;
    case SINKS:
        return cfg->attn_sinks;
    case POST_NORMS:
        return cfg->post_norms;
    case OWN_HEAD:
        return !cfg->tied_head;
    case ROPE_FREQS:
        return cfg->has_rope_freqs;
    case DENSE:
        return !cfg->layer_has_experts[layer];
    case DENSE_BIAS:
        return !cfg->layer_has_experts[layer] && cfg->mlp_bias;
    default:
        return cfg->layer_has_experts[layer] && expert_row_is_needed(when, cfg);
    }
}

static int64_t side_elems(side s, const model_config *cfg)
{
    enum { MXFP4_BLOCK = 32, MXFP4_BLOCK_BYTES = 16 };
    switch (s) {
    case DIM:
        return cfg->dim;
    case Q_DIM:
        return (int64_t)cfg->n_heads * cfg->head_dim;
    case KV_DIM:
        return (int64_t)cfg->n_kv_heads * cfg->head_dim;
    case N_HEADS:
        return cfg->n_heads;
    case HEAD_DIM:
        return cfg->head_dim;
    case FFN_DIM:
        return cfg->ffn_dim;
    case SHARED_DIM:
        return cfg->shared_ffn_dim;
    case N_EXPERTS:
        return cfg->n_experts;
    case EXPERT_DIM:
        return cfg->expert_ffn_dim;
    case EXPERT_DIM_2:
        return 2 * (int64_t)cfg->expert_ffn_dim;
    case DIM_BLOCKS:
        return PGD_CEIL_DIV((int64_t)cfg->dim, MXFP4_BLOCK);
    case EXPERT_BLOCKS:
        return PGD_CEIL_DIV((int64_t)cfg->expert_ffn_dim, MXFP4_BLOCK);
    case BLOCK_BYTES:
        return MXFP4_BLOCK_BYTES;
    case VOCAB:
        return cfg->vocab_size;
    case ROPE_HALF:
        return cfg->rope_dim / 2;
    case NONE:
        break;
    }
    return 1;
}

static bool is_per_expert(const row *r)
{
    return strchr(r->name, '*') != NULL;
}

/* Room for the longest name with any layer and expert. */
static void print_name(char out[MODEL_LAYOUT_MAX_NAME], const row *r, bool in_layer, int32_t layer,
                       int32_t expert)
{
    const char *star = strchr(r->name, '*');
    size_t n = 0;
    if (in_layer)
        n = (size_t)snprintf(out, MODEL_LAYOUT_MAX_NAME, "blk.%" PRId32 ".", layer);
    if (star == NULL)
        (void)snprintf(out + n, MODEL_LAYOUT_MAX_NAME - n, "%s", r->name);
    else
        (void)snprintf(out + n, MODEL_LAYOUT_MAX_NAME - n, "%.*s%" PRId32 "%s",
                       (int)(star - r->name), r->name, expert, star + 1);
}

static void describe(model_layout_tensor *out, const row *r, const model_config *cfg)
{
    out->values = r->values;
    out->n_dims = 0;
    for (int32_t i = 0; i < 4; i++) {
        out->dims[i] = side_elems(r->dims[i], cfg);
        out->n_dims += r->dims[i] != NONE;
    }
}

/* To the first place that exists, from this one on; false when there is none. */
static bool settle(model_layout_iter *it, const model_config *cfg)
{
    for (; it->table < N_TABLES; it->table++, it->layer = 0) {
        int32_t n_layers = it->table == LAYER_TABLE ? cfg->n_layers : 1;
        for (; it->layer < n_layers; it->layer++, it->row = 0) {
            for (; it->row < tables[it->table].n_rows; it->row++, it->expert = 0) {
                const row *r = &tables[it->table].rows[it->row];
                int32_t n = is_per_expert(r) ? cfg->n_experts : 1;
                if (is_needed(r->when, cfg, it->layer) && it->expert < n)
                    return true;
            }
        }
    }
    return false;
}

bool model_layout_next(model_layout_tensor *out, model_layout_iter *iter, const model_config *cfg)
{
    if (cfg->is_encoder_decoder) {
        if (iter->row >= encdec_layout_n_tensors(cfg))
            return false;
        encdec_layout_get_tensor(out, cfg, iter->row++);
        return true;
    }
    if (!settle(iter, cfg))
        return false;
    const row *r = &tables[iter->table].rows[iter->row];
    print_name(out->name, r, iter->table == LAYER_TABLE, iter->layer, iter->expert);
    describe(out, r, cfg);
    iter->expert++;
    return true;
}

/* A number below limit in plain decimal; NULL when there is none, else what follows. */
static const char *skip_number(int32_t *out, const char *p, int32_t limit)
{
    int32_t number = 0;
    if (*p < '0' || *p > '9' || (p[0] == '0' && p[1] >= '0' && p[1] <= '9'))
        return NULL;
    for (; *p >= '0' && *p <= '9'; p++) {
        number = number * 10 + (*p - '0');
        if (number >= limit)
            return NULL;
    }
    *out = number;
    return p;
}

static bool name_is(const row *r, const model_config *cfg, const char *name)
{
    const char *star = strchr(r->name, '*');
    int32_t expert;
    if (star == NULL)
        return strcmp(r->name, name) == 0;
    size_t n = (size_t)(star - r->name);
    if (strncmp(r->name, name, n) != 0)
        return false;
    const char *rest = skip_number(&expert, name + n, cfg->n_experts);
    return rest != NULL && strcmp(rest, star + 1) == 0;
}

static bool is_in(int32_t table, const model_config *cfg, int32_t layer, const char *name)
{
    for (int32_t i = 0; i < tables[table].n_rows; i++) {
        const row *r = &tables[table].rows[i];
        if (is_needed(r->when, cfg, layer) && name_is(r, cfg, name))
            return true;
    }
    return false;
}

/* What follows "blk.N." with N a layer of the model in plain decimal, else NULL. */
static const char *skip_layer(int32_t *layer, const model_config *cfg, const char *name)
{
    static const char prefix[] = "blk.";
    if (strncmp(name, prefix, sizeof(prefix) - 1) != 0)
        return NULL;
    const char *p = skip_number(layer, name + sizeof(prefix) - 1, cfg->n_layers);
    return p != NULL && *p == '.' ? p + 1 : NULL;
}

bool model_layout_has_tensor(const model_config *cfg, const char *name)
{
    if (cfg->is_encoder_decoder)
        return encdec_layout_has_tensor(cfg, name);
    int32_t layer;
    const char *in_layer = skip_layer(&layer, cfg, name);
    if (in_layer != NULL)
        return is_in(LAYER_TABLE, cfg, layer, in_layer);
    return is_in(0, cfg, 0, name) || is_in(N_TABLES - 1, cfg, 0, name);
}

bool model_layout_may_ignore(const model_config *cfg, const char *name)
{
    if (cfg->is_encoder_decoder)
        return encdec_layout_may_ignore(name);
    int32_t layer;
    const char *in_layer = skip_layer(&layer, cfg, name);
    if (in_layer != NULL)
        return strcmp(in_layer, "attn_rot_embd.weight") == 0;
    return cfg->tied_head && strcmp(name, "output.weight") == 0;
}
