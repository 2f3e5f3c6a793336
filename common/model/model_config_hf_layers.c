/* What config.json says of single layers: rope, and which of them see a window or a chunk only.
 *
 * "layer_types" has a name for each layer. Older files leave it out, and the class has a rule
 * instead (layer_pattern). Rotary scaling has three spellings: "rope_scaling" beside "rope_theta";
 * the newer "rope_parameters" that holds both; and that with one such object per name in
 * "layer_types". "rope_type" was once "type".
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "common/model/model_config_hf_internal.h"

/* --- layers with rope --- */

/* "no_rope_layers" has 1 for a layer with rope and 0 for one without; else every interval-th layer
 * has none. */
static pgd_err read_layers_with_rope(const hf_reader *r)
{
    model_config *cfg = r->cfg;
    int32_t interval = r->arch->default_no_rope;
    for (int32_t i = 0; i < MODEL_MAX_LAYERS; i++)
        cfg->layer_has_rope[i] = true;
    if (interval == 0)
        return PGD_OK;
    PGD_TRY(model_config_hf__i32(&interval, r, "no_rope_layer_interval", false));
    const cJSON *list = json_get(r->json, "no_rope_layers");
    if (list == NULL || (cJSON_IsArray(list) && list->child == NULL)) {
        for (int32_t i = 0; i < MODEL_MAX_LAYERS && interval > 0; i++)
            cfg->layer_has_rope[i] = (i + 1) % interval != 0;
        return PGD_OK;
    }
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != cfg->n_layers ||
        cfg->n_layers > MODEL_MAX_LAYERS)
        return pgd_fail(r->why, PGD_EFORMAT,
                        "expected \"no_rope_layers\" as an array of %" PRId32
                        " values, one per layer, got another value",
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

/* --- attention of each layer --- */

/* The window, or the chunk, that local layers have; 0 = none. Null means none, absent the class's
 * default. */
static pgd_err read_window(int32_t *out, const hf_reader *r)
{
    const char *name =
        r->arch->layers == LAYERS_CHUNKED_WITH_ROPE ? "attention_chunk_size" : "sliding_window";
    bool is_used = !r->arch->window_needs_flag;
    *out = 0;
    if (r->arch->window_needs_flag)
        PGD_TRY(json_get_bool(&is_used, r->json, "use_sliding_window", r->why));
    if (!is_used)
        return PGD_OK;
    if (!cJSON_HasObjectItem(r->json, name))
        *out = r->arch->default_window;
    return model_config_hf__i32(out, r, name, false);
}

static pgd_err read_kind(uint8_t *out, const hf_reader *r, const cJSON *item)
{
    static const struct {
        const char *name;
        attention_kind kind;
    } kinds[] = {{"full_attention", ATTENTION_FULL},
                 {"sliding_attention", ATTENTION_SLIDING},
                 {"chunked_attention", ATTENTION_CHUNKED}};
    const char *name = json_string(item);
    for (size_t i = 0; name != NULL && i < PGD_ARRAY_LEN(kinds); i++) {
        if (strcmp(name, kinds[i].name) == 0) {
            *out = (uint8_t)kinds[i].kind;
            return PGD_OK;
        }
    }
    return pgd_fail(
        r->why, PGD_EUNSUPPORTED,
        "expected full_attention, sliding_attention or chunked_attention, got \"%.40s\", "
        "at \"layer_types\"",
        name != NULL ? name : "another JSON value");
}

static pgd_err read_layer_types(const hf_reader *r, const cJSON *list)
{
    model_config *cfg = r->cfg;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != cfg->n_layers ||
        cfg->n_layers > MODEL_MAX_LAYERS)
        return pgd_fail(r->why, PGD_EFORMAT,
                        "expected \"layer_types\" as an array of %" PRId32
                        " names, one per layer, got another value",
                        cfg->n_layers);
    int32_t layer = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, list) PGD_TRY(read_kind(&cfg->layer_attention[layer++], r, item));
    return PGD_OK;
}

/* The class's own rule; first and interval as its members say. */
static attention_kind kind_by_rule(const hf_reader *r, int32_t layer, int32_t first,
                                   int32_t interval)
{
    bool has_rope = r->cfg->layer_has_rope[layer];
    switch (r->arch->layers) {
    case LAYERS_SLIDING:
        return ATTENTION_SLIDING;
    case LAYERS_SLIDING_FROM:
        return layer >= first ? ATTENTION_SLIDING : ATTENTION_FULL;
    case LAYERS_SLIDING_BUT_NTH:
        return (layer + 1) % interval != 0 ? ATTENTION_SLIDING : ATTENTION_FULL;
    case LAYERS_SLIDING_NO_ROPE:
        return has_rope ? ATTENTION_FULL : ATTENTION_SLIDING;
    case LAYERS_CHUNKED_WITH_ROPE:
        return has_rope ? ATTENTION_CHUNKED : ATTENTION_FULL;
    case LAYERS_FULL:
        break;
    }
    return ATTENTION_FULL;
}

static pgd_err read_attention(const hf_reader *r)
{
    enum { DEFAULT_MAX_WINDOW_LAYERS = 28 };
    model_config *cfg = r->cfg;
    int32_t window = 0, first = DEFAULT_MAX_WINDOW_LAYERS, interval = r->arch->default_interval;
    if (r->arch->layers == LAYERS_FULL)
        return PGD_OK;
    PGD_TRY(read_window(&window, r));
    const cJSON *types =
        r->arch->layers == LAYERS_SLIDING ? NULL : json_get(r->json, "layer_types");
    if (types != NULL) {
        PGD_TRY(read_layer_types(r, types));
    } else if (window > 0) {
        if (r->arch->layers == LAYERS_SLIDING_FROM)
            PGD_TRY(model_config_hf__i32(&first, r, "max_window_layers", false));
        if (r->arch->layers == LAYERS_SLIDING_BUT_NTH)
            PGD_TRY(model_config_hf__i32(&interval, r, "sliding_window_pattern", false));
        for (int32_t i = 0; i < MODEL_MAX_LAYERS; i++)
            cfg->layer_attention[i] = (uint8_t)kind_by_rule(r, i, first, PGD_MAX(interval, 1));
    }
    for (int32_t i = 0; i < PGD_MIN(cfg->n_layers, MODEL_MAX_LAYERS); i++) {
        if (cfg->layer_attention[i] == ATTENTION_SLIDING)
            cfg->sliding_window = window;
        else if (cfg->layer_attention[i] == ATTENTION_CHUNKED)
            cfg->attention_chunk = window;
    }
    return PGD_OK;
}

/* --- rope --- */

static pgd_err require_f64(double *out, const hf_reader *r, const cJSON *object, const char *name)
{
    if (json_get(object, name) == NULL)
        return pgd_fail(r->why, PGD_EFORMAT,
                        "expected a member \"%s\" in the rope scaling, got none", name);
    return json_get_f64(out, object, name, r->why);
}

static pgd_err read_llama3_scaling(const hf_reader *r, const cJSON *scaling)
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

/* 0.1 mscale ln(factor) + 1, the YaRN paper's temperature. */
static double attention_factor_of(double factor, double mscale)
{
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

static pgd_err read_yarn_scaling(const hf_reader *r, const cJSON *scaling)
{
    model_config *cfg = r->cfg;
    int64_t original = cfg->max_context;
    double mscale = 0.0, mscale_all_dim = 0.0;
    cfg->rope_scaling = ROPE_SCALING_YARN;
    cfg->rope_beta_fast = 32.0;
    cfg->rope_beta_slow = 1.0;
    cfg->rope_truncates = true;
    PGD_TRY(json_get_f64(&cfg->rope_beta_fast, scaling, "beta_fast", r->why));
    PGD_TRY(json_get_f64(&cfg->rope_beta_slow, scaling, "beta_slow", r->why));
    PGD_TRY(json_get_bool(&cfg->rope_truncates, scaling, "truncate", r->why));
    PGD_TRY(json_get_f64(&mscale, scaling, "mscale", r->why));
    PGD_TRY(json_get_f64(&mscale_all_dim, scaling, "mscale_all_dim", r->why));
    PGD_TRY(
        json_get_i64(&original, scaling, "original_max_position_embeddings", 1, INT32_MAX, r->why));
    cfg->rope_original_context = (int32_t)original;
    cfg->rope_attention_factor = attention_factor_of(cfg->rope_factor, 1.0);
    if (mscale != 0.0 && mscale_all_dim != 0.0)
        cfg->rope_attention_factor = attention_factor_of(cfg->rope_factor, mscale) /
                                     attention_factor_of(cfg->rope_factor, mscale_all_dim);
    return json_get_f64(&cfg->rope_attention_factor, scaling, "attention_factor", r->why);
}

/* What gpt-oss was made with, for a file that says nothing. */
static void set_gpt_oss_scaling(model_config *cfg)
{
    cfg->rope_scaling = ROPE_SCALING_YARN;
    cfg->rope_factor = 32.0;
    cfg->rope_beta_fast = 32.0;
    cfg->rope_beta_slow = 1.0;
    cfg->rope_truncates = false;
    cfg->rope_original_context = 4096;
    cfg->rope_attention_factor = attention_factor_of(cfg->rope_factor, 1.0);
}

static const char *scaling_type(const cJSON *scaling)
{
    const char *type = json_string(json_get(scaling, "rope_type"));
    if (type == NULL)
        type = json_string(json_get(scaling, "type"));
    return type != NULL ? type : "default";
}

static pgd_err read_rope_scaling(const hf_reader *r, const cJSON *scaling)
{
    model_config *cfg = r->cfg;
    const char *type = scaling_type(scaling);
    if (strcmp(type, "default") == 0)
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
        return read_yarn_scaling(r, scaling);
    else
        return pgd_fail(r->why, PGD_EUNSUPPORTED,
                        "expected rope scaling default, linear, llama3 or yarn, got \"%.40s\"",
                        type);
    return PGD_OK;
}

/* One object: base and scaling. */
static pgd_err read_rope_object(const hf_reader *r, const cJSON *rope)
{
    double rotated = 1.0;
    if (!cJSON_IsObject(rope))
        return pgd_fail(r->why, PGD_EFORMAT, "expected an object \"%s\", got another JSON value",
                        rope->string);
    PGD_TRY(json_get_f64(&r->cfg->rope_theta, rope, "rope_theta", r->why));
    PGD_TRY(json_get_f64(&rotated, rope, "partial_rotary_factor", r->why));
    if (rotated != 1.0)
        return pgd_fail(r->why, PGD_EUNSUPPORTED, "expected \"partial_rotary_factor\" 1, got %g",
                        rotated);
    return read_rope_scaling(r, rope);
}

/* One object per name in "layer_types"; sliding layers may have a base of their own. */
static pgd_err read_rope_of_kinds(const hf_reader *r, const cJSON *kinds)
{
    static const char full[] = "full_attention", sliding[] = "sliding_attention";
    model_config *cfg = r->cfg;
    const double global_theta = cfg->rope_theta;
    const cJSON *kind;
    if (r->arch->default_local_theta == 0.0)
        return pgd_fail(
            r->why, PGD_EUNSUPPORTED,
            "expected one \"rope_parameters\" for all layers, got one per kind of layer");
    cJSON_ArrayForEach(kind, kinds)
    {
        if (strcmp(kind->string, full) != 0 && strcmp(kind->string, sliding) != 0)
            return pgd_fail(r->why, PGD_EUNSUPPORTED,
                            "expected \"full_attention\" and \"sliding_attention\", got \"%.40s\", "
                            "in \"rope_parameters\"",
                            kind->string);
    }
    const cJSON *local = json_get(kinds, sliding), *global = json_get(kinds, full);
    if (local != NULL) {
        cfg->rope_theta = cfg->rope_local_theta;
        PGD_TRY(read_rope_object(r, local));
        if (cfg->rope_scaling != ROPE_SCALING_NONE)
            return pgd_fail(r->why, PGD_EUNSUPPORTED,
                            "expected no rope scaling of sliding layers, got \"%.40s\"",
                            scaling_type(local));
        cfg->rope_local_theta = cfg->rope_theta;
        cfg->rope_theta = global_theta;
    }
    return global != NULL ? read_rope_object(r, global) : PGD_OK;
}

static pgd_err read_rope(const hf_reader *r)
{
    model_config *cfg = r->cfg;
    const cJSON *newer = json_get(r->json, "rope_parameters");
    const cJSON *rope = newer != NULL ? newer : json_get(r->json, "rope_scaling");
    cfg->rope = r->arch->has_adjacent_rope ? ROPE_ADJACENT : ROPE_HALVES;
    cfg->rope_dim = cfg->head_dim;
    cfg->rope_theta = r->arch->default_rope_theta;
    PGD_TRY(json_get_f64(&cfg->rope_theta, r->json, "rope_theta", r->why));
    if (r->arch->default_local_theta != 0.0) {
        cfg->rope_local_theta = r->arch->default_local_theta;
        PGD_TRY(json_get_f64(&cfg->rope_local_theta, r->json, "rope_local_base_freq", r->why));
    }
    if (rope == NULL) {
        if (r->arch->is_gpt_oss)
            set_gpt_oss_scaling(cfg);
        return PGD_OK;
    }
    if (!cJSON_IsObject(rope))
        return pgd_fail(r->why, PGD_EFORMAT, "expected an object \"%s\", got another JSON value",
                        rope->string);
    const cJSON *member;
    cJSON_ArrayForEach(member, rope)
    {
        if (cJSON_IsObject(member))
            return read_rope_of_kinds(r, rope);
    }
    return read_rope_object(r, rope);
}

/* --- Llama 4 --- */

/* A flag that older files write as a number. */
static pgd_err read_flag(bool *out, const hf_reader *r, const char *name)
{
    const cJSON *item = json_get(r->json, name);
    if (!cJSON_IsNumber(item))
        return json_get_bool(out, r->json, name, r->why);
    *out = item->valuedouble != 0.0;
    return PGD_OK;
}

static pgd_err read_llama4(const hf_reader *r)
{
    model_config *cfg = r->cfg;
    bool is_tuned = true;
    int32_t floor = 8192;
    double scale = 0.1;
    cfg->qk_l2_norm = true;
    PGD_TRY(read_flag(&cfg->qk_l2_norm, r, "use_qk_norm"));
    PGD_TRY(read_flag(&is_tuned, r, "attn_temperature_tuning"));
    PGD_TRY(model_config_hf__i32(&floor, r, "floor_scale", false));
    PGD_TRY(json_get_f64(&scale, r->json, "attn_scale", r->why));
    if (!is_tuned)
        return PGD_OK;
    if (floor < 1)
        return pgd_fail(r->why, PGD_ERANGE, "expected \"floor_scale\" of at least 1, got 0");
    cfg->temperature_floor = floor;
    cfg->temperature_scale = scale;
    return PGD_OK;
}

pgd_err model_config_hf__layers(const hf_reader *r)
{
    if (r->arch->is_llama4)
        PGD_TRY(read_llama4(r));
    PGD_TRY(read_layers_with_rope(r));
    PGD_TRY(read_attention(r));
    return read_rope(r);
}
