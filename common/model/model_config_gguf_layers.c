/* What GGUF metadata says of single layers: what they attend to, with which scale, and rope.
 *
 * Much of it is no key but a habit of the architecture: which layers slide, chunks, temperatures.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "common/model/model_config_gguf_internal.h"

/* "attention.sliding_window_pattern": a flag for each layer, or every how manieth layer sees all. */
static pgd_err read_window_pattern(const gguf_reader *r, int32_t *interval)
{
    static const char suffix[] = "attention.sliding_window_pattern";
    model_config *cfg = r->cfg;
    char key[GGUF_MAX_KEY];
    model_config_gguf__key(key, r, suffix);
    const gguf_value *v = gguf_get_value(r->file, key);
    if (v == NULL || v->type != GGUF_ARRAY)
        return model_config_gguf__i32(interval, r, suffix, false);
    if (v->n_elems != (uint64_t)cfg->n_layers || cfg->n_layers > MODEL_MAX_LAYERS)
        return model_config_gguf__fail_type(r, key, "one value per layer");
    *interval = 0;
    for (int32_t i = 0; i < cfg->n_layers; i++) {
        bool is_sliding = false;
        if (!gguf_array_bool(v, (uint64_t)i, &is_sliding))
            return model_config_gguf__fail_type(r, key, "an array of flags");
        cfg->layer_attention[i] = is_sliding ? ATTENTION_SLIDING : ATTENTION_FULL;
    }
    return PGD_OK;
}

/* No key says what all these models share: chunks of 8,192 tokens, unless it is the window's, in
 * layers with rope, and temperatures in those without. A window of 0: no chunks, rope everywhere. */
static pgd_err read_llama4(const gguf_reader *r)
{
    model_config *cfg = r->cfg;
    int32_t chunk = 8192, n_experts = 0;
    cfg->temperature_floor = 8192;
    cfg->temperature_scale = 0.1;
    PGD_TRY(model_config_gguf__i32(&chunk, r, "attention.sliding_window", false));
    PGD_TRY(
        model_config_gguf__i32(&cfg->temperature_floor, r, "attention.temperature_length", false));
    PGD_TRY(
        model_config_gguf__f64(&cfg->temperature_scale, r, "attention.temperature_scale", false));
    PGD_TRY(model_config_gguf__i32(&n_experts, r, "expert_count", false));
    cfg->qk_l2_norm = n_experts != 128; /* the model with so many was made without */
    for (int32_t i = 0; i < PGD_MIN(cfg->n_layers, MODEL_MAX_LAYERS) && chunk > 0; i++) {
        if ((i + 1) % r->arch->no_rope_interval != 0) {
            cfg->layer_attention[i] = ATTENTION_CHUNKED;
            cfg->attention_chunk = chunk;
        }
    }
    return PGD_OK;
}

/* Which layers see a window only. */
static pgd_err read_windows(const gguf_reader *r)
{
    model_config *cfg = r->cfg;
    int32_t window = r->arch->default_window, interval = r->arch->full_interval;
    if (r->arch->is_llama4)
        return read_llama4(r);
    PGD_TRY(model_config_gguf__i32(&window, r, "attention.sliding_window", false));
    if (window == 0)
        return PGD_OK;
    for (int32_t i = 0; i < MODEL_MAX_LAYERS; i++)
        cfg->layer_attention[i] = ATTENTION_SLIDING;
    PGD_TRY(read_window_pattern(r, &interval));
    for (int32_t i = interval; i >= 1 && i <= MODEL_MAX_LAYERS; i += interval)
        cfg->layer_attention[i - 1] = ATTENTION_FULL;
    for (int32_t i = 0; i < PGD_MIN(cfg->n_layers, MODEL_MAX_LAYERS); i++) {
        if (cfg->layer_attention[i] == ATTENTION_SLIDING)
            cfg->sliding_window = window;
    }
    return PGD_OK;
}

/* Scale and caps of attention, and what else no key says. */
static pgd_err read_scale(const gguf_reader *r)
{
    model_config *cfg = r->cfg;
    double scale = 0, attn_cap = (double)r->arch->attn_soft_cap;
    double final_cap = (double)r->arch->final_soft_cap;
    cfg->scales_embed = cfg->post_norms = r->arch->is_gemma;
    cfg->act = r->arch->is_gemma ? FFN_ACT_GELU_TANH : FFN_ACT_SILU;
    cfg->attn_scale = 1.0 / sqrt((double)cfg->head_dim);
    if (!r->arch->is_gemma)
        return PGD_OK;
    if (cfg->n_layers == r->arch->wide_scale_layers && cfg->n_heads > 0)
        cfg->attn_scale = 1.0 / sqrt((double)cfg->dim / cfg->n_heads);
    PGD_TRY(model_config_gguf__f64(&scale, r, "attention.scale", false));
    PGD_TRY(model_config_gguf__f64(&attn_cap, r, "attn_logit_softcapping", false));
    PGD_TRY(model_config_gguf__f64(&final_cap, r, "final_logit_softcapping", false));
    if (scale != 0)
        cfg->attn_scale = scale;
    cfg->attn_soft_cap = (float)attn_cap;
    cfg->final_soft_cap = (float)final_cap;
    return PGD_OK;
}

/* The truncation of the bounds is no key: files of gpt-oss were made for exact ones. */
static pgd_err read_yarn(const gguf_reader *r)
{
    model_config *cfg = r->cfg;
    double factor = 1.0, yarn_factor = 1.0;
    cfg->rope_scaling = ROPE_SCALING_YARN;
    cfg->rope_beta_fast = 32.0;
    cfg->rope_beta_slow = 1.0;
    cfg->rope_truncates = !r->arch->is_gpt_oss;
    if (cfg->rope_original_context == 0)
        cfg->rope_original_context = cfg->max_context;
    PGD_TRY(model_config_gguf__f64(&cfg->rope_beta_fast, r, "rope.scaling.yarn_beta_fast", false));
    PGD_TRY(model_config_gguf__f64(&cfg->rope_beta_slow, r, "rope.scaling.yarn_beta_slow", false));
    PGD_TRY(model_config_gguf__f64(&factor, r, "rope.scaling.attn_factor", false));
    PGD_TRY(model_config_gguf__f64(&yarn_factor, r, "rope.scaling.yarn_attn_factor", false));
    cfg->rope_attention_factor = factor * yarn_factor;
    if (cfg->rope_factor > 1.0)
        cfg->rope_attention_factor *= 0.1 * log(cfg->rope_factor) + 1.0;
    return PGD_OK;
}

static pgd_err read_rope_scaling(const gguf_reader *r)
{
    model_config *cfg = r->cfg;
    char key[GGUF_MAX_KEY];
    gguf_string type = {"linear", 6};
    double factor = 0;
    model_config_gguf__key(key, r, "rope.scaling.type");
    if (gguf_get_value(r->file, key) != NULL && !gguf_get_string(r->file, key, &type))
        return model_config_gguf__fail_type(r, key, "a string");
    PGD_TRY(model_config_gguf__f64(&factor, r, "rope.scale_linear", false)); /* the old name */
    PGD_TRY(model_config_gguf__f64(&factor, r, "rope.scaling.factor", false));
    PGD_TRY(model_config_gguf__i32(&cfg->rope_original_context, r,
                                   "rope.scaling.original_context_length", false));
    if (model_config_gguf__is(&type, "none") || factor == 0.0 || factor == 1.0)
        return PGD_OK;
    cfg->rope_factor = factor;
    if (model_config_gguf__is(&type, "linear"))
        cfg->rope_scaling = ROPE_SCALING_LINEAR;
    else if (model_config_gguf__is(&type, "yarn"))
        return read_yarn(r);
    else
        return pgd_fail(
            r->why, PGD_EUNSUPPORTED,
            "expected rope scaling none, linear or yarn, got another kind, at metadata key %s",
            key);
    return PGD_OK;
}

static pgd_err read_rope(const gguf_reader *r)
{
    model_config *cfg = r->cfg;
    cfg->rope = r->arch->rope;
    cfg->rope_dim = cfg->head_dim;
    PGD_TRY(model_config_gguf__i32(&cfg->rope_dim, r, "rope.dimension_count", false));
    cfg->rope_theta = 10000.0;
    PGD_TRY(model_config_gguf__f64(&cfg->rope_theta, r, "rope.freq_base", false));
    if (r->arch->local_theta != 0.0) {
        cfg->rope_local_theta = r->arch->local_theta;
        PGD_TRY(model_config_gguf__f64(&cfg->rope_local_theta, r, "rope.freq_base_swa", false));
    }
    cfg->has_rope_freqs = gguf_get_tensor(r->file, "rope_freqs.weight") != NULL;
    for (int32_t i = 0; i < MODEL_MAX_LAYERS; i++)
        cfg->layer_has_rope[i] = r->arch->no_rope_interval == 0 ||
                                 (i + 1) % r->arch->no_rope_interval != 0 ||
                                 (r->arch->is_llama4 && cfg->attention_chunk == 0);
    return read_rope_scaling(r);
}

pgd_err model_config_gguf__layers(const gguf_reader *r)
{
    PGD_TRY(read_windows(r));
    PGD_TRY(read_scale(r));
    return read_rope(r);
}
