/* Translates config.json into a model_config.
 *
 * One row of traits per architecture holds what its configuration class would fill in for absent
 * members. Members that change the computation and that the decoder lacks (other activations,
 * quantized checkpoints, other rope scalings) are refused by name. Rotary scaling has two
 * spellings: "rope_scaling" beside "rope_theta", and the newer "rope_parameters" that holds both;
 * "rope_type" was once "type".
 */
#include "common/model/model_config_hf.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/file.h"
#include "common/json.h"

enum { MAX_CONFIG_BYTES = 4 << 20, MAX_PATH_BYTES = 4096 };

typedef struct arch_traits {
    const char *class_name; /* config.json "architectures" */
    const char *model_type;
    int32_t default_kv_heads; /* 0 = as many as heads */
    int32_t default_head_dim; /* 0 = hidden size / heads */
    int32_t default_context;
    int32_t default_window;  /* of an absent "sliding_window" */
    int32_t default_no_rope; /* of an absent "no_rope_layer_interval"; 0 = the member is not read */
    double default_rope_theta;
    bool default_tied;
    bool reads_biases; /* "attention_bias"; "mlp_bias" too if reads_mlp_bias */
    bool reads_mlp_bias;
    bool has_qkv_bias; /* always, without a member */
    bool has_qk_norm;
    bool window_needs_flag; /* "sliding_window" counts only with "use_sliding_window" */
    bool window_is_read;
} arch_traits;

static const arch_traits archs[] = {
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
     .default_window = 4096,
     .default_rope_theta = 10000.0,
     .window_is_read = true},
    {.class_name = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .default_kv_heads = 32,
     .default_context = 32768,
     .default_window = 4096,
     .default_rope_theta = 10000.0,
     .has_qkv_bias = true,
     .window_is_read = true,
     .window_needs_flag = true},
    {.class_name = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .default_kv_heads = 32,
     .default_head_dim = 128,
     .default_context = 32768,
     .default_window = 4096,
     .default_rope_theta = 10000.0,
     .reads_biases = true,
     .has_qk_norm = true,
     .window_is_read = true,
     .window_needs_flag = true},
    {.class_name = "SmolLM3ForCausalLM",
     .model_type = "smollm3",
     .default_kv_heads = 4,
     .default_context = 32768,
     .default_no_rope = 4,
     .default_rope_theta = 2000000.0,
     .default_tied = true,
     .reads_biases = true,
     .reads_mlp_bias = true,
     .window_is_read = true,
     .window_needs_flag = true},
};

#define SUPPORTED_ARCHS \
    "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, SmolLM3ForCausalLM"

typedef struct reader {
    model_config *cfg;
    const cJSON *json;
    const arch_traits *arch;
    pgd_why *why;
} reader;

static pgd_err read_i32(int32_t *out, const reader *r, const char *name, bool is_required)
{
    int64_t wide = *out;
    if (is_required && json_get(r->json, name) == NULL)
        return pgd_fail(r->why, PGD_EFORMAT, "expected a member \"%s\", got none", name);
    PGD_TRY(json_get_i64(&wide, r->json, name, 0, INT32_MAX, r->why));
    *out = (int32_t)wide;
    return PGD_OK;
}

static bool text_is(const char *text, const char *wanted)
{
    return text != NULL && strcmp(text, wanted) == 0;
}

/* "architectures" decides; without it, "model_type". */
static pgd_err find_arch(reader *r)
{
    const cJSON *list = json_get(r->json, "architectures");
    const char *class_name = cJSON_IsArray(list) ? json_string(list->child) : NULL;
    const char *model_type = json_string(json_get(r->json, "model_type"));
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
    return pgd_fail(
        r->why, PGD_EUNSUPPORTED,
        "architecture \"%s\" is not supported by this build, which runs " SUPPORTED_ARCHS, shown);
}

static pgd_err refuse_options(const reader *r)
{
    const char *act = json_string(json_get(r->json, "hidden_act"));
    double rotated = 1.0;
    if (act != NULL && strcmp(act, "silu") != 0)
        return pgd_fail(r->why, PGD_EUNSUPPORTED, "expected \"hidden_act\" silu, got \"%.40s\"",
                        act);
    if (json_get(r->json, "quantization_config") != NULL)
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
    double eps = 1e-6;
    PGD_TRY(read_i32(&cfg->n_layers, r, "num_hidden_layers", true));
    PGD_TRY(read_i32(&cfg->dim, r, "hidden_size", true));
    PGD_TRY(read_i32(&cfg->ffn_dim, r, "intermediate_size", true));
    PGD_TRY(read_i32(&cfg->vocab_size, r, "vocab_size", true));
    PGD_TRY(read_i32(&cfg->n_heads, r, "num_attention_heads", true));
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

/* A null window means none, an absent one the class's default. */
static pgd_err read_window(const reader *r)
{
    bool is_used = !r->arch->window_needs_flag;
    if (!r->arch->window_is_read)
        return PGD_OK;
    PGD_TRY(json_get_bool(&is_used, r->json, "use_sliding_window", r->why));
    if (!is_used)
        return PGD_OK;
    if (!cJSON_HasObjectItem(r->json, "sliding_window"))
        r->cfg->sliding_window = r->arch->default_window;
    PGD_TRY(read_i32(&r->cfg->sliding_window, r, "sliding_window", false));
    if (r->cfg->sliding_window > 0)
        memset(r->cfg->layer_attention, ATTENTION_SLIDING, sizeof(r->cfg->layer_attention));
    return PGD_OK;
}

static pgd_err read_flags(const reader *r)
{
    model_config *cfg = r->cfg;
    bool attention_bias = false;
    cfg->tied_head = r->arch->default_tied;
    PGD_TRY(json_get_bool(&cfg->tied_head, r->json, "tie_word_embeddings", r->why));
    if (r->arch->reads_biases)
        PGD_TRY(json_get_bool(&attention_bias, r->json, "attention_bias", r->why));
    if (r->arch->reads_mlp_bias)
        PGD_TRY(json_get_bool(&cfg->mlp_bias, r->json, "mlp_bias", r->why));
    cfg->qkv_bias = r->arch->has_qkv_bias || attention_bias;
    cfg->o_bias = attention_bias;
    cfg->qk_norm = r->arch->has_qk_norm;
    return PGD_OK;
}

/* "no_rope_layers" has 1 for a layer with rope and 0 for one without; else every interval-th layer
 * has none. */
static pgd_err read_layers_with_rope(const reader *r)
{
    model_config *cfg = r->cfg;
    int32_t interval = r->arch->default_no_rope;
    for (int32_t i = 0; i < MODEL_MAX_LAYERS; i++)
        cfg->layer_has_rope[i] = true;
    if (interval == 0)
        return PGD_OK;
    PGD_TRY(read_i32(&interval, r, "no_rope_layer_interval", false));
    const cJSON *list = json_get(r->json, "no_rope_layers");
    if (list == NULL) {
        for (int32_t i = 0; i < MODEL_MAX_LAYERS && interval > 0; i++)
            cfg->layer_has_rope[i] = (i + 1) % interval != 0;
        return PGD_OK;
    }
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != cfg->n_layers ||
        cfg->n_layers > MODEL_MAX_LAYERS)
        return pgd_fail(r->why, PGD_EFORMAT,
                        "expected \"no_rope_layers\" as an array of %" PRId32
                        " values, one per layer, got "
                        "another value",
                        cfg->n_layers);
    int32_t layer = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, list)
    {
        if (!cJSON_IsNumber(item) && !cJSON_IsBool(item))
            return pgd_fail(
                r->why, PGD_EFORMAT,
                "expected 0 or 1, got another JSON value, at \"no_rope_layers\" %" PRId32, layer);
        cfg->layer_has_rope[layer++] =
            cJSON_IsNumber(item) ? item->valuedouble != 0.0 : (bool)cJSON_IsTrue(item);
    }
    return PGD_OK;
}

static pgd_err require_f64(double *out, const reader *r, const cJSON *object, const char *name)
{
    if (json_get(object, name) == NULL)
        return pgd_fail(r->why, PGD_EFORMAT,
                        "expected a member \"%s\" in the rope scaling, got none", name);
    return json_get_f64(out, object, name, r->why);
}

static pgd_err read_llama3_scaling(const reader *r, const cJSON *scaling)
{
    model_config *cfg = r->cfg;
    int64_t original = cfg->max_context;
    cfg->rope_scaling = ROPE_SCALING_LLAMA3;
    PGD_TRY(require_f64(&cfg->rope_factor, r, scaling, "factor"));
    PGD_TRY(require_f64(&cfg->rope_low_freq_factor, r, scaling, "low_freq_factor"));
    PGD_TRY(require_f64(&cfg->rope_high_freq_factor, r, scaling, "high_freq_factor"));
    PGD_TRY(
        json_get_i64(&original, scaling, "original_max_position_embeddings", 1, INT32_MAX, r->why));
    cfg->rope_original_context = (int32_t)original;
    return PGD_OK;
}

static pgd_err read_rope_scaling(const reader *r, const cJSON *scaling)
{
    model_config *cfg = r->cfg;
    const char *type = json_string(json_get(scaling, "rope_type"));
    if (type == NULL)
        type = json_string(json_get(scaling, "type"));
    if (type == NULL || strcmp(type, "default") == 0)
        return PGD_OK;
    if (strcmp(type, "llama3") == 0)
        return read_llama3_scaling(r, scaling);
    double factor = 0.0;
    PGD_TRY(require_f64(&factor, r, scaling, "factor"));
    if (factor == 1.0)
        return PGD_OK;
    cfg->rope_factor = factor;
    if (strcmp(type, "linear") == 0)
        cfg->rope_scaling = ROPE_SCALING_LINEAR;
    else if (strcmp(type, "yarn") == 0)
        cfg->rope_scaling = ROPE_SCALING_YARN;
    else
        return pgd_fail(r->why, PGD_EUNSUPPORTED,
                        "expected rope scaling default, linear or llama3, got \"%.40s\"", type);
    return PGD_OK;
}

static pgd_err read_rope(const reader *r)
{
    model_config *cfg = r->cfg;
    const cJSON *newer = json_get(r->json, "rope_parameters");
    const cJSON *scaling = newer != NULL ? newer : json_get(r->json, "rope_scaling");
    double rotated = 1.0;
    cfg->rope = ROPE_HALVES;
    cfg->rope_dim = cfg->head_dim;
    cfg->rope_theta = r->arch->default_rope_theta;
    PGD_TRY(json_get_f64(&cfg->rope_theta, r->json, "rope_theta", r->why));
    PGD_TRY(read_layers_with_rope(r));
    if (scaling == NULL)
        return PGD_OK;
    if (!cJSON_IsObject(scaling))
        return pgd_fail(r->why, PGD_EFORMAT, "expected an object \"%s\", got another JSON value",
                        scaling->string);
    if (cJSON_IsObject(scaling->child))
        return pgd_fail(
            r->why, PGD_EUNSUPPORTED,
            "expected one \"rope_parameters\" for all layers, got one per kind of layer");
    PGD_TRY(json_get_f64(&cfg->rope_theta, scaling, "rope_theta", r->why));
    PGD_TRY(json_get_f64(&rotated, scaling, "partial_rotary_factor", r->why));
    if (rotated != 1.0)
        return pgd_fail(r->why, PGD_EUNSUPPORTED, "expected \"partial_rotary_factor\" 1, got %g",
                        rotated);
    return read_rope_scaling(r, scaling);
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

/* -1 is a usual way to say "none". */
static pgd_err read_optional_id(token_id *out, const reader *r, const char *name)
{
    const cJSON *item = json_get(r->json, name);
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

static pgd_err read_config(reader *r)
{
    if (!cJSON_IsObject(r->json))
        return pgd_fail(r->why, PGD_EFORMAT, "expected a JSON object, got another value");
    PGD_TRY(find_arch(r));
    PGD_TRY(refuse_options(r));
    PGD_TRY(read_sizes(r));
    PGD_TRY(read_window(r));
    PGD_TRY(read_flags(r));
    PGD_TRY(read_rope(r));
    PGD_TRY(read_optional_id(&r->cfg->bos_id, r, "bos_token_id"));
    PGD_TRY(read_optional_id(&r->cfg->pad_id, r, "pad_token_id"));
    PGD_TRY(read_eos(r, r->json));
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
    r->json = json;
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
    return with_json(&r, dir, "generation_config.json", false, read_generation);
}
