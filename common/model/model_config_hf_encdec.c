/* Translates config.json of an encoder-decoder model (BART) into a model_config.
 *
 * The decoder's sizes go where those of other models are, the encoder's into `encdec`. Key and value
 * heads are as many as heads, positions are learned, every map has a bias; nothing in the file says
 * so. Which tokens are forced is read from generation_config.json alone when that file is there, as
 * its members replace those of config.json as a whole.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/model/model_config_hf_internal.h"

static pgd_err find_head_dim(int32_t *out, const hf_reader *r, int32_t n_heads, const char *name)
{
    if (n_heads <= 0 || r->cfg->dim % n_heads != 0)
        return pgd_fail(r->why, PGD_EFORMAT,
                        "expected \"d_model\" to be a multiple of \"%s\", got %" PRId32
                        " and %" PRId32,
                        name, r->cfg->dim, n_heads);
    *out = r->cfg->dim / n_heads;
    return PGD_OK;
}

static pgd_err read_activation(const hf_reader *r)
{
    static const struct {
        const char *name;
        ffn_act act;
    } known[] = {{"gelu", FFN_ACT_GELU},
                 {"gelu_new", FFN_ACT_GELU_TANH},
                 {"gelu_pytorch_tanh", FFN_ACT_GELU_TANH},
                 {"relu", FFN_ACT_RELU},
                 {"silu", FFN_ACT_SILU},
                 {"swish", FFN_ACT_SILU}};
    const char *name = json_string(json_get(r->json, "activation_function"));
    r->cfg->act = FFN_ACT_GELU;
    if (name == NULL)
        return PGD_OK;
    for (size_t i = 0; i < PGD_ARRAY_LEN(known); i++) {
        if (strcmp(name, known[i].name) == 0) {
            r->cfg->act = known[i].act;
            return PGD_OK;
        }
    }
    return pgd_fail(r->why, PGD_EUNSUPPORTED,
                    "expected \"activation_function\" gelu, gelu_new, relu or silu, got \"%.40s\"",
                    name);
}

pgd_err model_config_hf__encdec(const hf_reader *r)
{
    model_config *cfg = r->cfg;
    encdec_config *e = &cfg->encdec;
    bool is_scaled = false;
    cfg->is_encoder_decoder = true;
    PGD_TRY(model_config_hf__i32(&cfg->dim, r, "d_model", true));
    PGD_TRY(model_config_hf__i32(&cfg->vocab_size, r, "vocab_size", true));
    PGD_TRY(model_config_hf__i32(&cfg->n_layers, r, "decoder_layers", true));
    PGD_TRY(model_config_hf__i32(&cfg->n_heads, r, "decoder_attention_heads", true));
    PGD_TRY(model_config_hf__i32(&cfg->ffn_dim, r, "decoder_ffn_dim", true));
    PGD_TRY(model_config_hf__i32(&e->n_layers, r, "encoder_layers", true));
    PGD_TRY(model_config_hf__i32(&e->n_heads, r, "encoder_attention_heads", true));
    PGD_TRY(model_config_hf__i32(&e->ffn_dim, r, "encoder_ffn_dim", true));
    cfg->max_context = r->arch->default_context;
    PGD_TRY(model_config_hf__i32(&cfg->max_context, r, "max_position_embeddings", false));
    e->max_source = cfg->max_context;
    e->position_offset = 2;
    cfg->n_kv_heads = cfg->n_heads;
    PGD_TRY(find_head_dim(&cfg->head_dim, r, cfg->n_heads, "decoder_attention_heads"));
    PGD_TRY(find_head_dim(&e->head_dim, r, e->n_heads, "encoder_attention_heads"));
    cfg->norm_eps = 1e-5f;
    cfg->attn_scale = 1.0 / sqrt((double)cfg->head_dim);
    cfg->qkv_bias = cfg->o_bias = cfg->mlp_bias = true;
    PGD_TRY(json_get_bool(&is_scaled, r->json, "scale_embedding", r->why));
    e->embed_scale = is_scaled ? (float)sqrt((double)cfg->dim) : 1.0f;
    cfg->tied_head = true;
    PGD_TRY(json_get_bool(&cfg->tied_head, r->json, "tie_word_embeddings", r->why));
    if (!cfg->tied_head)
        return pgd_fail(r->why, PGD_EUNSUPPORTED,
                        "expected \"tie_word_embeddings\" true in an encoder-decoder model");
    PGD_TRY(read_activation(r));
    return model_config_hf__encdec_ids(r, r->json);
}

pgd_err model_config_hf__encdec_ids(const hf_reader *r, const cJSON *json)
{
    encdec_config *e = &r->cfg->encdec;
    bool is_main = json == r->json;
    token_id start = -1;
    e->forced_bos_id = e->forced_eos_id = -1;
    PGD_TRY(model_config_hf__id(&e->forced_bos_id, r, json, "forced_bos_token_id"));
    PGD_TRY(model_config_hf__id(&e->forced_eos_id, r, json, "forced_eos_token_id"));
    PGD_TRY(model_config_hf__id(&start, r, json, "decoder_start_token_id"));
    if (start < 0)
        PGD_TRY(model_config_hf__id(&start, r, json, "bos_token_id"));
    if (start >= 0)
        e->start_id = start;
    else if (is_main)
        return pgd_fail(r->why, PGD_EFORMAT,
                        "expected a member \"decoder_start_token_id\", got none");
    return PGD_OK;
}

void model_config_hf__encdec_ignored(const hf_reader *r, const cJSON *json)
{
    static const struct {
        const char *name;
        double neutral; /* a value that changes nothing */
    } members[] = {{"num_beams", 1},      {"no_repeat_ngram_size", 0}, {"length_penalty", 1},
                   {"min_length", 0},     {"max_length", -1},          {"early_stopping", 0},
                   {"num_beam_groups", 1}};
    char *out = r->cfg->encdec.ignored;
    size_t used = strlen(out), cap = sizeof(r->cfg->encdec.ignored);
    for (size_t i = 0; i < PGD_ARRAY_LEN(members); i++) {
        const cJSON *item = json_get(json, members[i].name);
        bool is_set = cJSON_IsNumber(item) ? item->valuedouble != members[i].neutral
                                           : (bool)cJSON_IsTrue(item);
        if (!is_set || strstr(out, members[i].name) != NULL)
            continue;
        int n = snprintf(out + used, cap - used, "%s%s", used > 0 ? ", " : "", members[i].name);
        used = PGD_MIN(used + (size_t)n, cap - 1);
    }
}
