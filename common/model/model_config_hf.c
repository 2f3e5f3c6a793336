/* Translates config.json into a model_config.
 *
 * One row of traits per architecture holds what its configuration class would fill in for absent
 * members. Members that change the computation and that the decoder lacks (other activations,
 * quantized checkpoints, other rope scalings) are refused by name. What differs between layers, and
 * rope, is read in model_config_hf_layers.c.
 */
#include "common/model/model_config_hf.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/file.h"
#include "common/model/model_config_hf_internal.h"

enum { MAX_CONFIG_BYTES = 4 << 20, MAX_PATH_BYTES = 4096 };

static const hf_expert_traits mixtral_experts = {.default_count = 8, .default_chosen = 2};
static const hf_expert_traits qwen3_experts = {.default_count = 128,
                                               .default_chosen = 8,
                                               .default_ffn = 768,
                                               .some_layers = true,
                                               .may_weigh_by_all = true};
static const hf_expert_traits gpt_oss_experts = {.default_count = 128,
                                                 .default_chosen = 4,
                                                 .is_turned = true,
                                                 .is_interleaved = true,
                                                 .has_biases = true};
static const hf_expert_traits llama4_experts = {
    .default_count = 16, .default_chosen = 1, .is_turned = true, .is_llama4 = true};

/* Of the models that these classes are named after. */
static const hf_sizes gemma3_sizes = {
    .n_layers = 26, .dim = 2304, .ffn_dim = 9216, .vocab_size = 262208, .n_heads = 8};
static const hf_sizes llama4_sizes = {
    .n_layers = 48, .dim = 5120, .ffn_dim = 8192, .vocab_size = 202048, .n_heads = 40};

static const hf_traits archs[] = {
    {.class_name = "LlamaForCausalLM",
     .model_type = "llama",
     .default_context = 2048,
     .default_rope_theta = 10000.0,
     .reads_biases = true,
     .reads_mlp_bias = true},
    {.class_name = "MistralForCausalLM",
     .model_type = "mistral",
     .default_kv_heads = 8,
     .default_context = 131072,
     .default_rope_theta = 10000.0,
     .layers = LAYERS_SLIDING,
     .default_window = 4096},
    {.class_name = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .default_kv_heads = 32,
     .default_context = 32768,
     .default_rope_theta = 10000.0,
     .layers = LAYERS_SLIDING_FROM,
     .default_window = 4096,
     .window_needs_flag = true,
     .has_qkv_bias = true},
    {.class_name = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .default_kv_heads = 32,
     .default_head_dim = 128,
     .default_context = 32768,
     .default_rope_theta = 10000.0,
     .layers = LAYERS_SLIDING_FROM,
     .default_window = 4096,
     .window_needs_flag = true,
     .reads_biases = true,
     .has_qk_norm = true},
    {.class_name = "SmolLM3ForCausalLM",
     .model_type = "smollm3",
     .default_kv_heads = 4,
     .default_context = 32768,
     .default_no_rope = 4,
     .default_rope_theta = 2000000.0,
     .layers = LAYERS_SLIDING_NO_ROPE,
     .window_needs_flag = true,
     .default_tied = true,
     .reads_biases = true,
     .reads_mlp_bias = true},
    {.class_name = "Gemma2ForCausalLM",
     .model_type = "gemma2",
     .default_kv_heads = 4,
     .default_head_dim = 256,
     .default_context = 8192,
     .default_rope_theta = 10000.0,
     .layers = LAYERS_SLIDING_BUT_NTH,
     .default_window = 4096,
     .default_interval = 2,
     .default_tied = true,
     .reads_biases = true,
     .act_member = "hidden_activation",
     .default_act = FFN_ACT_GELU_TANH,
     .is_gemma = true,
     .default_attn_soft_cap = 50,
     .default_final_soft_cap = 30},
    {.class_name = "Gemma3ForCausalLM",
     .model_type = "gemma3_text",
     .default_sizes = &gemma3_sizes,
     .default_eos = 1,
     .default_kv_heads = 4,
     .default_head_dim = 256,
     .default_context = 131072,
     .default_rope_theta = 1000000.0,
     .default_local_theta = 10000.0,
     .layers = LAYERS_SLIDING_BUT_NTH,
     .default_window = 4096,
     .default_interval = 6,
     .default_tied = true,
     .reads_biases = true,
     .has_qk_norm = true,
     .act_member = "hidden_activation",
     .default_act = FFN_ACT_GELU_TANH,
     .is_gemma = true},
    {.class_name = "MixtralForCausalLM",
     .model_type = "mixtral",
     .default_kv_heads = 8,
     .default_context = 131072,
     .default_eps = 1e-5,
     .default_rope_theta = 1000000.0,
     .layers = LAYERS_SLIDING,
     .experts = &mixtral_experts},
    {.class_name = "Qwen3MoeForCausalLM",
     .model_type = "qwen3_moe",
     .default_kv_heads = 4,
     .default_context = 32768,
     .default_rope_theta = 10000.0,
     .layers = LAYERS_SLIDING,
     .default_window = 4096,
     .window_needs_flag = true,
     .reads_biases = true,
     .has_qk_norm = true,
     .experts = &qwen3_experts},
    {.class_name = "GptOssForCausalLM",
     .model_type = "gpt_oss",
     .default_kv_heads = 8,
     .default_head_dim = 64,
     .default_context = 131072,
     .default_eps = 1e-5,
     .default_rope_theta = 150000.0,
     .layers = LAYERS_SLIDING_BUT_NTH,
     .default_window = 128,
     .default_interval = 2,
     .reads_biases = true,
     .default_bias = true,
     .is_gpt_oss = true,
     .experts = &gpt_oss_experts},
    {.class_name = "Llama4ForCausalLM",
     .model_type = "llama4_text",
     .default_sizes = &llama4_sizes,
     .default_eos = 2,
     .default_kv_heads = 8,
     .default_head_dim = 128,
     .default_context = 131072,
     .default_eps = 1e-5,
     .default_rope_theta = 500000.0,
     .default_no_rope = 4,
     .has_adjacent_rope = true,
     .layers = LAYERS_CHUNKED_WITH_ROPE,
     .default_window = 8192,
     .reads_biases = true,
     .is_llama4 = true,
     .experts = &llama4_experts},
    {.class_name = "BartForConditionalGeneration",
     .model_type = "bart",
     .default_context = 1024,
     .is_encdec = true},
    {.class_name = "BartModel", /* the same, stored without a head: it is the embedding anyway */
     .model_type = "bart",
     .default_context = 1024,
     .is_encdec = true},
};

#define SUPPORTED_ARCHS                                                                         \
    "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "                \
    "SmolLM3ForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM, MixtralForCausalLM, "            \
    "Qwen3MoeForCausalLM, GptOssForCausalLM, Llama4ForCausalLM, BartForConditionalGeneration, " \
    "Gemma3ForConditionalGeneration, Llama4ForConditionalGeneration"

typedef hf_reader reader;

pgd_err model_config_hf__i32(int32_t *out, const hf_reader *r, const char *name, bool is_required)
{
    int64_t wide = *out;
    if (is_required && json_get(r->json, name) == NULL)
        return pgd_fail(r->why, PGD_EFORMAT, "expected a member \"%s\", got none", name);
    PGD_TRY(json_get_i64(&wide, r->json, name, 0, INT32_MAX, r->why));
    *out = (int32_t)wide;
    return PGD_OK;
}

static pgd_err read_i32(int32_t *out, const reader *r, const char *name, bool is_required)
{
    return model_config_hf__i32(out, r, name, is_required);
}

static bool text_is(const char *text, const char *wanted)
{
    return text != NULL && strcmp(text, wanted) == 0;
}

/* "architectures" decides; without it, "model_type". In a wrapper, the text model's type. */
static pgd_err find_arch(reader *r)
{
    const cJSON *list = json_get(r->json, "architectures");
    const char *class_name = cJSON_IsArray(list) ? json_string(list->child) : NULL;
    const char *model_type = json_string(json_get(r->json, "model_type"));
    PGD_TRY(model_config_hf__unwrap(r, class_name, model_type));
    if (r->wrapper != NULL) {
        class_name = NULL;
        model_type = r->wrapper->text_type;
    }
    for (size_t i = 0; i < PGD_ARRAY_LEN(archs); i++) {
        if (class_name != NULL ? text_is(class_name, archs[i].class_name)
                               : text_is(model_type, archs[i].model_type)) {
            r->arch = &archs[i];
            (void)snprintf(r->cfg->arch, sizeof(r->cfg->arch), "%s", archs[i].model_type);
            return PGD_OK;
        }
    }
    const char *got = class_name != NULL ? class_name : model_type;
    if (got == NULL)
        return pgd_fail(r->why, PGD_EFORMAT, "expected a member \"architectures\", got none");
    char shown[64];
    size_t n = PGD_MIN(strlen(got), sizeof(shown) - 1);
    for (size_t i = 0; i < n; i++)
        shown[i] = got[i] >= 0x20 && got[i] < 0x7f ? got[i] : '?';
    shown[n] = '\0';
    if (json_get(r->json, "text_config") != NULL)
        return pgd_fail(
            r->why, PGD_EUNSUPPORTED,
            "architecture \"%s\" is a language model (\"text_config\") within a larger "
            "one, of which this build runs those in Gemma3ForConditionalGeneration and "
            "Llama4ForConditionalGeneration; use a GGUF file of the language model, or a "
            "directory that holds it alone",
            shown);
    return pgd_fail(
        r->why, PGD_EUNSUPPORTED,
        "architecture \"%s\" is not supported by this build, which runs " SUPPORTED_ARCHS, shown);
}

static pgd_err refuse_options(const reader *r)
{
    bool sees_all = false;
    double rotated = 1.0;
    PGD_TRY(json_get_bool(&sees_all, r->json, "use_bidirectional_attention", r->why));
    if (sees_all)
        return pgd_fail(r->why, PGD_EUNSUPPORTED,
                        "expected causal attention, got \"use_bidirectional_attention\"");
    const cJSON *quantized =
        json_get(model_config_hf__holder(r, "quantization_config"), "quantization_config");
    bool is_known =
        r->arch->is_gpt_oss && text_is(json_string(json_get(quantized, "quant_method")), "mxfp4");
    if (quantized != NULL && !is_known)
        return pgd_fail(r->why, PGD_EUNSUPPORTED,
                        "expected plain F32, F16 or BF16 weights, got a quantized checkpoint "
                        "(\"quantization_config\"); use the original or a GGUF file");
    PGD_TRY(json_get_f64(&rotated, r->json, "partial_rotary_factor", r->why));
    if (rotated != 1.0)
        return pgd_fail(r->why, PGD_EUNSUPPORTED, "expected \"partial_rotary_factor\" 1, got %g",
                        rotated);
    return PGD_OK;
}

static pgd_err read_sizes(const reader *r)
{
    model_config *cfg = r->cfg;
    double eps = r->arch->default_eps != 0.0 ? r->arch->default_eps : 1e-6;
    const hf_sizes *sizes = r->arch->default_sizes;
    if (sizes != NULL) {
        cfg->n_layers = sizes->n_layers;
        cfg->dim = sizes->dim;
        cfg->ffn_dim = sizes->ffn_dim;
        cfg->vocab_size = sizes->vocab_size;
        cfg->n_heads = sizes->n_heads;
    }
    PGD_TRY(read_i32(&cfg->n_layers, r, "num_hidden_layers", sizes == NULL));
    PGD_TRY(read_i32(&cfg->dim, r, "hidden_size", sizes == NULL));
    PGD_TRY(read_i32(&cfg->ffn_dim, r, "intermediate_size", sizes == NULL));
    PGD_TRY(read_i32(&cfg->vocab_size, r, "vocab_size", sizes == NULL));
    PGD_TRY(read_i32(&cfg->n_heads, r, "num_attention_heads", sizes == NULL));
    cfg->max_context = r->arch->default_context;
    PGD_TRY(read_i32(&cfg->max_context, r, "max_position_embeddings", false));
    cfg->n_kv_heads = r->arch->default_kv_heads != 0 ? r->arch->default_kv_heads : cfg->n_heads;
    PGD_TRY(read_i32(&cfg->n_kv_heads, r, "num_key_value_heads", false));
    cfg->head_dim = r->arch->default_head_dim;
    PGD_TRY(read_i32(&cfg->head_dim, r, "head_dim", false));
    if (cfg->head_dim == 0) {
        if (cfg->n_heads <= 0 || cfg->dim % cfg->n_heads != 0)
            return pgd_fail(
                r->why, PGD_EFORMAT,
                "expected \"hidden_size\" to be a multiple of \"num_attention_heads\", got "
                "%" PRId32 " and %" PRId32,
                cfg->dim, cfg->n_heads);
        cfg->head_dim = cfg->dim / cfg->n_heads;
    }
    PGD_TRY(json_get_f64(&eps, r->json, "rms_norm_eps", r->why));
    cfg->norm_eps = (float)eps;
    return PGD_OK;
}

static pgd_err read_act(const reader *r)
{
    const char *member = r->arch->act_member != NULL ? r->arch->act_member : "hidden_act";
    const char *act = json_string(json_get(r->json, member));
    r->cfg->act = r->arch->default_act;
    if (act == NULL)
        return PGD_OK;
    if (strcmp(act, "silu") != 0 && strcmp(act, "gelu_pytorch_tanh") != 0)
        return pgd_fail(r->why, PGD_EUNSUPPORTED,
                        "expected \"%s\" silu or gelu_pytorch_tanh, got \"%.40s\"", member, act);
    r->cfg->act = strcmp(act, "silu") == 0 ? FFN_ACT_SILU : FFN_ACT_GELU_TANH;
    return PGD_OK;
}

/* Null means none, absent the class's default. */
static pgd_err read_soft_cap(float *out, const reader *r, const char *name, float by_default)
{
    double cap = cJSON_HasObjectItem(r->json, name) ? 0.0 : (double)by_default;
    PGD_TRY(json_get_f64(&cap, r->json, name, r->why));
    *out = (float)cap;
    return PGD_OK;
}

/* Scale and caps of attention. */
static pgd_err read_scale(const reader *r)
{
    model_config *cfg = r->cfg;
    double scalar = cfg->head_dim;
    if (r->arch->is_gemma) {
        scalar = 256.0;
        PGD_TRY(json_get_f64(&scalar, r->json, "query_pre_attn_scalar", r->why));
        PGD_TRY(read_soft_cap(&cfg->attn_soft_cap, r, "attn_logit_softcapping",
                              r->arch->default_attn_soft_cap));
        PGD_TRY(read_soft_cap(&cfg->final_soft_cap, r, "final_logit_softcapping",
                              r->arch->default_final_soft_cap));
    }
    cfg->attn_scale = 1.0 / sqrt(scalar);
    return PGD_OK;
}

static pgd_err read_flags(const reader *r)
{
    model_config *cfg = r->cfg;
    bool attention_bias = r->arch->default_bias;
    cfg->tied_head = r->arch->default_tied;
    const cJSON *head_owner = r->wrapper != NULL && r->wrapper->has_head ? r->outer : r->json;
    PGD_TRY(json_get_bool(&cfg->tied_head, head_owner, "tie_word_embeddings", r->why));
    if (r->arch->reads_biases)
        PGD_TRY(json_get_bool(&attention_bias, r->json, "attention_bias", r->why));
    if (r->arch->reads_mlp_bias)
        PGD_TRY(json_get_bool(&cfg->mlp_bias, r->json, "mlp_bias", r->why));
    cfg->qkv_bias = r->arch->has_qkv_bias || attention_bias;
    cfg->o_bias = attention_bias;
    cfg->qk_norm = r->arch->has_qk_norm;
    cfg->scales_embed = cfg->norm_plus_one = cfg->post_norms = r->arch->is_gemma;
    PGD_TRY(read_act(r));
    if (r->arch->experts != NULL)
        PGD_TRY(model_config_hf__experts(r));
    return read_scale(r);
}

static pgd_err check_id(token_id *out, const reader *r, const cJSON *item, const char *name)
{
    double v = cJSON_IsNumber(item) ? item->valuedouble : NAN;
    if (!(v >= 0.0) || v >= (double)r->cfg->vocab_size || v != floor(v))
        return pgd_fail(r->why, PGD_ERANGE,
                        "expected token ids of 0 to %" PRId32 ", got %g, at \"%s\"",
                        r->cfg->vocab_size - 1, v, name);
    *out = (token_id)v;
    return PGD_OK;
}

static pgd_err add_eos(const reader *r, const cJSON *item)
{
    model_config *cfg = r->cfg;
    token_id id = -1;
    PGD_TRY(check_id(&id, r, item, "eos_token_id"));
    for (int32_t i = 0; i < cfg->n_eos_ids; i++) {
        if (cfg->eos_ids[i] == id)
            return PGD_OK;
    }
    if (cfg->n_eos_ids == MODEL_MAX_EOS_IDS)
        return pgd_fail(r->why, PGD_ERANGE,
                        "expected at most %d end-of-sequence ids, got more, at "
                        "\"eos_token_id\"",
                        MODEL_MAX_EOS_IDS);
    cfg->eos_ids[cfg->n_eos_ids++] = id;
    return PGD_OK;
}

/* One id or a list of them; both config files may have some. */
static pgd_err read_eos(const reader *r, const cJSON *json)
{
    const cJSON *eos = json_get(json, "eos_token_id");
    if (eos == NULL)
        return PGD_OK;
    if (!cJSON_IsArray(eos))
        return add_eos(r, eos);
    const cJSON *item;
    cJSON_ArrayForEach(item, eos) PGD_TRY(add_eos(r, item));
    return PGD_OK;
}

pgd_err model_config_hf__id(token_id *out, const reader *r, const cJSON *json, const char *name)
{
    const cJSON *item = json_get(json, name);
    if (item == NULL || (cJSON_IsNumber(item) && item->valuedouble == -1.0))
        return PGD_OK;
    return check_id(out, r, item, name);
}

static pgd_err read_default(bool *has, float *out, const reader *r, const cJSON *json,
                            const char *name)
{
    double value = 0;
    *has = json_get(json, name) != NULL;
    PGD_TRY(json_get_f64(&value, json, name, r->why));
    *out = (float)value;
    return PGD_OK;
}

static pgd_err read_generation_config(const reader *r, const cJSON *json)
{
    model_config *cfg = r->cfg;
    int64_t top_k = 0;
    if (!cJSON_IsObject(json))
        return pgd_fail(r->why, PGD_EFORMAT, "expected a JSON object, got another value");
    PGD_TRY(read_eos(r, json));
    if (cfg->is_encoder_decoder) {
        PGD_TRY(model_config_hf__encdec_ids(r, json));
        model_config_hf__encdec_ignored(r, json);
    }
    PGD_TRY(read_default(&cfg->has_temperature, &cfg->gen_temperature, r, json, "temperature"));
    PGD_TRY(read_default(&cfg->has_top_p, &cfg->gen_top_p, r, json, "top_p"));
    PGD_TRY(read_default(&cfg->has_min_p, &cfg->gen_min_p, r, json, "min_p"));
    PGD_TRY(read_default(&cfg->has_repetition_penalty, &cfg->gen_repetition_penalty, r, json,
                         "repetition_penalty"));
    PGD_TRY(json_get_i64(&top_k, json, "top_k", -1, INT32_MAX, r->why));
    cfg->has_top_k = json_get(json, "top_k") != NULL;
    cfg->gen_top_k = (int32_t)top_k;
    return PGD_OK;
}

static pgd_err read_decoder(const reader *r)
{
    PGD_TRY(read_sizes(r));
    PGD_TRY(read_flags(r));
    return model_config_hf__layers(r);
}

/* One of the ids that a wrapper may have, too. */
static pgd_err read_shared_id(token_id *out, const reader *r, const char *name)
{
    return model_config_hf__id(out, r, model_config_hf__holder(r, name), name);
}

static pgd_err read_config(reader *r)
{
    if (!cJSON_IsObject(r->json))
        return pgd_fail(r->why, PGD_EFORMAT, "expected a JSON object, got another value");
    PGD_TRY(find_arch(r));
    PGD_TRY(refuse_options(r));
    if (r->arch->is_encdec) {
        PGD_TRY(model_config_hf__encdec(r));
        model_config_hf__encdec_ignored(r, r->json);
    } else {
        pgd_err err = read_decoder(r);
        if (err != PGD_OK)
            return r->wrapper != NULL ? pgd_fail_prefix(r->why, err, "text_config") : err;
    }
    PGD_TRY(read_shared_id(&r->cfg->bos_id, r, "bos_token_id"));
    PGD_TRY(read_shared_id(&r->cfg->pad_id, r, "pad_token_id"));
    PGD_TRY(read_eos(r, model_config_hf__holder(r, "eos_token_id")));
    return model_config_check(r->cfg, r->why);
}

/* The directory's own name, without trailing slashes. */
static void read_name(model_config *cfg, const char *dir)
{
    size_t end = strlen(dir);
    while (end > 1 && dir[end - 1] == '/')
        end--;
    size_t start = end;
    while (start > 0 && dir[start - 1] != '/')
        start--;
    size_t n = PGD_MIN(end - start, sizeof(cfg->name) - 1);
    memcpy(cfg->name, dir + start, n);
    cfg->name[n] = '\0';
}

/* Applies read to the JSON file dir/name. */
static pgd_err with_json(reader *r, const char *dir, const char *name, bool is_required,
                         pgd_err (*read)(reader *r, const cJSON *json))
{
    char path[MAX_PATH_BYTES];
    cJSON *json = NULL;
    if (!file_join(path, sizeof(path), dir, name))
        return pgd_fail(r->why, PGD_EINVAL,
                        "expected a path of less than %d bytes, got a longer one: %s",
                        MAX_PATH_BYTES, dir);
    if (!is_required && !file_exists(path))
        return PGD_OK;
    PGD_TRY(json_parse_file(&json, path, MAX_CONFIG_BYTES, r->why));
    pgd_err err = read(r, json);
    if (err != PGD_OK)
        (void)pgd_fail_prefix(r->why, err, "%s", path);
    cJSON_Delete(json);
    return err;
}

static pgd_err read_main(reader *r, const cJSON *json)
{
    r->json = r->outer = json;
    return read_config(r);
}

static pgd_err read_generation(reader *r, const cJSON *json)
{
    PGD_TRY(read_generation_config(r, json));
    return model_config_check(r->cfg, r->why);
}

pgd_err model_config_hf_read(model_config *out, const char *dir, pgd_why *why)
{
    *out = (model_config){.main_dtype = DTYPE_NONE, .bos_id = -1, .pad_id = -1};
    reader r = {.cfg = out, .why = why};
    read_name(out, dir);
    PGD_TRY(with_json(&r, dir, "config.json", true, read_main));
    PGD_TRY(with_json(&r, dir, "generation_config.json", false, read_generation));
    if (out->n_eos_ids == 0 && r.arch->default_eos > 0 && r.arch->default_eos < out->vocab_size)
        out->eos_ids[out->n_eos_ids++] = r.arch->default_eos;
    return PGD_OK;
}
