/* What makes a model_config sound, whatever file it came from.
 *
 * The bounds are far beyond any model that a CPU or one GPU can run. They exist so that every
 * product that the engine and the worker form of these fields fits its type: two of them multiply
 * within 32 bits as heads times head size, all sizes of tensors within 63.
 */
#include "common/model/model_config.h"

#include <inttypes.h>
#include <math.h>

enum {
    MAX_DIM = 1 << 20,
    MAX_FFN_DIM = 1 << 22,
    MAX_HEADS = 4096,
    MAX_HEAD_DIM = 4096,
    MAX_VOCAB = 1 << 24,
    MAX_CONTEXT = 1 << 30,
    MAX_SOURCE = 1 << 20, /* learned positions: each is a row of a table */
};

static pgd_err check_range(const char *what, int64_t got, int64_t min, int64_t max, pgd_why *why)
{
    if (got >= min && got <= max)
        return PGD_OK;
    return pgd_fail(why, PGD_ERANGE,
                    "expected %" PRId64 " to %" PRId64 ", got %" PRId64 ", at the model's %s", min,
                    max, got, what);
}

static pgd_err check_real(const char *what, double got, double min, double max, pgd_why *why)
{
    if (isfinite(got) && got >= min && got <= max)
        return PGD_OK;
    return pgd_fail(why, PGD_ERANGE, "expected %g to %g, got %g, at the model's %s", min, max, got,
                    what);
}

static pgd_err check_sizes(const model_config *cfg, pgd_why *why)
{
    PGD_TRY(check_range("number of layers", cfg->n_layers, 1, MODEL_MAX_LAYERS, why));
    PGD_TRY(check_range("hidden size", cfg->dim, 1, MAX_DIM, why));
    PGD_TRY(check_range("number of heads", cfg->n_heads, 1, MAX_HEADS, why));
    PGD_TRY(check_range("number of KV heads", cfg->n_kv_heads, 1, cfg->n_heads, why));
    PGD_TRY(check_range("head size", cfg->head_dim, 2, MAX_HEAD_DIM, why));
    PGD_TRY(check_range("feed-forward size", cfg->ffn_dim, 1, MAX_FFN_DIM, why));
    PGD_TRY(check_range("vocabulary size", cfg->vocab_size, 1, MAX_VOCAB, why));
    PGD_TRY(check_range("context length", cfg->max_context, 1, MAX_CONTEXT, why));
    PGD_TRY(check_real("norm epsilon", (double)cfg->norm_eps, 0.0, 1.0, why));
    if (cfg->n_heads % cfg->n_kv_heads != 0)
        return pgd_fail(
            why, PGD_EFORMAT,
            "expected a number of heads that is a multiple of the KV heads, got %" PRId32
            " heads and %" PRId32 " KV heads",
            cfg->n_heads, cfg->n_kv_heads);
    if (cfg->head_dim % 2 != 0)
        return pgd_fail(why, PGD_EFORMAT, "expected an even head size, got %" PRId32,
                        cfg->head_dim);
    return PGD_OK;
}

/* SLIDING and CHUNKED layers have a window or chunk; none is given that no layer has. */
static pgd_err check_attention(const model_config *cfg, pgd_why *why)
{
    bool has[ATTENTION_KIND_LAST + 1] = {false};
    for (int32_t i = 0; i < cfg->n_layers; i++) {
        if (cfg->layer_attention[i] > ATTENTION_CHUNKED)
            return pgd_fail(why, PGD_EFORMAT,
                            "expected full, sliding or chunked attention, got kind %d, at layer "
                            "%" PRId32,
                            cfg->layer_attention[i], i);
        has[cfg->layer_attention[i]] = true;
    }
    PGD_TRY(check_range("sliding window", cfg->sliding_window, has[ATTENTION_SLIDING],
                        has[ATTENTION_SLIDING] ? MAX_CONTEXT : 0, why));
    PGD_TRY(check_range("attention chunk", cfg->attention_chunk, has[ATTENTION_CHUNKED],
                        has[ATTENTION_CHUNKED] ? MAX_CONTEXT : 0, why));
    PGD_TRY(check_real("attention scale", cfg->attn_scale, 1e-6, 1e6, why));
    PGD_TRY(check_real("soft cap of attention", (double)cfg->attn_soft_cap, 0.0, 1e6, why));
    PGD_TRY(check_real("soft cap of logits", (double)cfg->final_soft_cap, 0.0, 1e6, why));
    PGD_TRY(
        check_range("attention temperature's floor", cfg->temperature_floor, 0, MAX_CONTEXT, why));
    return check_real("attention temperature's scale", cfg->temperature_scale, 0.0, 1e3, why);
}

static pgd_err check_yarn(const model_config *cfg, pgd_why *why)
{
    PGD_TRY(
        check_range("original context length", cfg->rope_original_context, 1, MAX_CONTEXT, why));
    PGD_TRY(check_real("rope beta_slow", cfg->rope_beta_slow, 1e-6, 1e6, why));
    PGD_TRY(check_real("rope beta_fast", cfg->rope_beta_fast, cfg->rope_beta_slow, 1e6, why));
    /* Its logarithm divides. */
    PGD_TRY(check_real("rope base frequency", cfg->rope_theta, 1.0 + 1e-6, 1e15, why));
    return check_real("rope attention factor", cfg->rope_attention_factor, 1e-3, 1e3, why);
}

static pgd_err check_rope(const model_config *cfg, pgd_why *why)
{
    PGD_TRY(check_range("rotated size of a head", cfg->rope_dim, 2, cfg->head_dim, why));
    if (cfg->rope_dim % 2 != 0)
        return pgd_fail(why, PGD_EFORMAT, "expected an even number of rotated values, got %" PRId32,
                        cfg->rope_dim);
    PGD_TRY(check_real("rope base frequency", cfg->rope_theta, 1.0, 1e15, why));
    if (cfg->rope_local_theta != 0.0)
        PGD_TRY(check_real("rope base frequency of sliding layers", cfg->rope_local_theta, 1.0,
                           1e15, why));
    if (cfg->rope_scaling != ROPE_SCALING_NONE)
        PGD_TRY(check_real("rope scaling factor", cfg->rope_factor, 1e-3, 1e6, why));
    if (cfg->rope_scaling == ROPE_SCALING_YARN)
        return check_yarn(cfg, why);
    if (cfg->rope_scaling != ROPE_SCALING_LLAMA3)
        return PGD_OK;
    PGD_TRY(check_real("rope low frequency factor", cfg->rope_low_freq_factor, 1e-6, 1e6, why));
    PGD_TRY(check_real("rope high frequency factor", cfg->rope_high_freq_factor, 1e-6, 1e6, why));
    PGD_TRY(
        check_range("original context length", cfg->rope_original_context, 1, MAX_CONTEXT, why));
    if (!(cfg->rope_high_freq_factor >= cfg->rope_low_freq_factor))
        return pgd_fail(
            why, PGD_EFORMAT,
            "expected a rope high frequency factor of at least the low one, got %g and %g",
            cfg->rope_high_freq_factor, cfg->rope_low_freq_factor);
    return PGD_OK;
}

static pgd_err check_encdec(const model_config *cfg, pgd_why *why)
{
    const encdec_config *e = &cfg->encdec;
    int64_t last = (int64_t)cfg->vocab_size - 1;
    /* Cross attention doubles the number of layers with keys and values. */
    PGD_TRY(check_range("number of decoder layers", cfg->n_layers, 1, MODEL_MAX_LAYERS / 2, why));
    PGD_TRY(check_range("number of encoder layers", e->n_layers, 1, MODEL_MAX_LAYERS, why));
    PGD_TRY(check_range("number of encoder heads", e->n_heads, 1, MAX_HEADS, why));
    PGD_TRY(check_range("encoder head size", e->head_dim, 2, MAX_HEAD_DIM, why));
    PGD_TRY(check_range("encoder feed-forward size", e->ffn_dim, 1, MAX_FFN_DIM, why));
    PGD_TRY(check_range("encoder positions", e->max_source, 1, MAX_SOURCE, why));
    PGD_TRY(check_range("decoder positions", cfg->max_context, 1, MAX_SOURCE, why));
    PGD_TRY(check_range("offset of positions", e->position_offset, 0, 16, why));
    PGD_TRY(check_real("embedding scale", (double)e->embed_scale, 1e-6, 1e6, why));
    PGD_TRY(check_range("decoder_start_token_id", e->start_id, 0, last, why));
    PGD_TRY(check_range("forced_bos_token_id", e->forced_bos_id, -1, last, why));
    PGD_TRY(check_range("forced_eos_token_id", e->forced_eos_id, -1, last, why));
    if (e->head_dim % 2 != 0)
        return pgd_fail(why, PGD_EFORMAT, "expected an even encoder head size, got %" PRId32,
                        e->head_dim);
    return PGD_OK;
}

static pgd_err check_ids(const model_config *cfg, pgd_why *why)
{
    int64_t last = (int64_t)cfg->vocab_size - 1;
    PGD_TRY(check_range("beginning-of-sequence id (bos_token_id)", cfg->bos_id, -1, last, why));
    PGD_TRY(check_range("padding id (pad_token_id)", cfg->pad_id, -1, last, why));
    PGD_TRY(
        check_range("number of end-of-sequence ids", cfg->n_eos_ids, 0, MODEL_MAX_EOS_IDS, why));
    for (int32_t i = 0; i < cfg->n_eos_ids; i++)
        PGD_TRY(check_range("end-of-sequence id (eos_token_id)", cfg->eos_ids[i], 0, last, why));
    return PGD_OK;
}

static pgd_err check_generation(const model_config *cfg, pgd_why *why)
{
    if (cfg->has_temperature)
        PGD_TRY(check_real("default temperature", (double)cfg->gen_temperature, 0.0, 100.0, why));
    if (cfg->has_top_p)
        PGD_TRY(check_real("default top_p", (double)cfg->gen_top_p, 0.0, 1.0, why));
    if (cfg->has_top_k)
        PGD_TRY(check_range("default top_k", cfg->gen_top_k, -1, INT32_MAX, why));
    if (cfg->has_min_p)
        PGD_TRY(check_real("default min_p", (double)cfg->gen_min_p, 0.0, 1.0, why));
    if (cfg->has_repetition_penalty)
        PGD_TRY(check_real("default repetition_penalty", (double)cfg->gen_repetition_penalty, 1e-3,
                           1e3, why));
    return PGD_OK;
}

static pgd_err check_experts(const model_config *cfg, pgd_why *why)
{
    bool has_experts = false;
    for (int32_t i = 0; i < cfg->n_layers; i++)
        has_experts = has_experts || cfg->layer_has_experts[i];
    PGD_TRY(check_range("number of experts", cfg->n_experts, has_experts, MODEL_MAX_EXPERTS, why));
    if (!has_experts)
        return PGD_OK;
    PGD_TRY(check_range("number of experts for each token", cfg->n_experts_chosen, 1,
                        cfg->n_experts, why));
    PGD_TRY(
        check_range("feed-forward size of an expert", cfg->expert_ffn_dim, 1, MAX_FFN_DIM, why));
    return check_range("feed-forward size of the shared expert", cfg->shared_ffn_dim, 0,
                       MAX_FFN_DIM, why);
}

pgd_err model_config_check(const model_config *cfg, pgd_why *why)
{
    if (cfg->arch[0] == '\0')
        return pgd_fail(why, PGD_EFORMAT, "expected an architecture name, got none");
    PGD_TRY(check_sizes(cfg, why));
    PGD_TRY(check_attention(cfg, why));
    PGD_TRY(cfg->is_encoder_decoder ? check_encdec(cfg, why) : check_rope(cfg, why));
    PGD_TRY(check_experts(cfg, why));
    if (cfg->act == FFN_ACT_CLAMPED) {
        PGD_TRY(check_real("swiglu_alpha", (double)cfg->act_alpha, 1e-3, 1e3, why));
        PGD_TRY(check_real("swiglu_limit", (double)cfg->act_limit, 1e-3, 1e6, why));
    }
    PGD_TRY(check_ids(cfg, why));
    return check_generation(cfg, why);
}
