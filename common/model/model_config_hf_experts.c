/* What config.json says of a mixture of experts.
 *
 * Which layers have experts: all, or for classes with "decoder_sparse_step" s those with
 * (layer + 1) % s == 0 that "mlp_only_layers" does not list. Llama 4 has "moe_layers", or the same
 * rule with "interleave_moe_layer_step"; there "intermediate_size" is of all experts, the shared one
 * too, and "intermediate_size_mlp" of the layers without. How their weights lie in the file is
 * the class's habit here; model_file.c looks at the tensors themselves.
 */
#include <inttypes.h>
#include <string.h>

#include "common/model/model_config_hf_internal.h"

static pgd_err read_sizes(const hf_reader *r)
{
    const hf_expert_traits *traits = r->arch->experts;
    model_config *cfg = r->cfg;
    cfg->n_experts = traits->default_count;
    PGD_TRY(model_config_hf__i32(&cfg->n_experts, r, "num_local_experts", false));
    PGD_TRY(model_config_hf__i32(&cfg->n_experts, r, "num_experts", false));
    cfg->n_experts_chosen = traits->default_chosen;
    PGD_TRY(model_config_hf__i32(&cfg->n_experts_chosen, r, "num_experts_per_tok", false));
    cfg->expert_ffn_dim = cfg->ffn_dim;
    if (traits->default_ffn == 0)
        return PGD_OK;
    cfg->expert_ffn_dim = traits->default_ffn;
    return model_config_hf__i32(&cfg->expert_ffn_dim, r, "moe_intermediate_size", false);
}

/* Sets what the layers of a list have. */
static pgd_err mark_layers(const hf_reader *r, const cJSON *list, const char *name,
                           bool has_experts)
{
    model_config *cfg = r->cfg;
    const cJSON *item;
    if (!cJSON_IsArray(list))
        return pgd_fail(r->why, PGD_EFORMAT,
                        "expected \"%s\" as an array of layers, got another value", name);
    cJSON_ArrayForEach(item, list)
    {
        double layer = cJSON_IsNumber(item) ? item->valuedouble : -1.0;
        if (!(layer >= 0.0 && layer < (double)PGD_MIN(cfg->n_layers, MODEL_MAX_LAYERS)))
            return pgd_fail(r->why, PGD_EFORMAT,
                            "expected layers of 0 to %" PRId32 ", got another value, at \"%s\"",
                            cfg->n_layers - 1, name);
        cfg->layer_has_experts[(int32_t)layer] = has_experts;
    }
    return PGD_OK;
}

/* Layers of a list that is there. */
static pgd_err read_mixed_layers(const hf_reader *r, const cJSON *list)
{
    model_config *cfg = r->cfg;
    memset(cfg->layer_has_experts, 0, sizeof(cfg->layer_has_experts));
    return mark_layers(r, list, "moe_layers", true);
}

static pgd_err read_layers(const hf_reader *r)
{
    model_config *cfg = r->cfg;
    const hf_expert_traits *traits = r->arch->experts;
    const char *step_name = traits->is_llama4 ? "interleave_moe_layer_step" : "decoder_sparse_step";
    const cJSON *mixed = traits->is_llama4 ? json_get(r->json, "moe_layers") : NULL;
    const cJSON *dense = traits->some_layers ? json_get(r->json, "mlp_only_layers") : NULL;
    int32_t step = 1;
    if (traits->some_layers || traits->is_llama4)
        PGD_TRY(model_config_hf__i32(&step, r, step_name, false));
    if (step < 1)
        return pgd_fail(r->why, PGD_ERANGE, "expected \"%s\" of at least 1, got 0", step_name);
    for (int32_t i = 0; i < PGD_MIN(cfg->n_layers, MODEL_MAX_LAYERS); i++)
        cfg->layer_has_experts[i] = cfg->n_experts > 0 && (i + 1) % step == 0;
    if (mixed != NULL)
        return read_mixed_layers(r, mixed);
    return dense != NULL ? mark_layers(r, dense, "mlp_only_layers", false) : PGD_OK;
}

static pgd_err read_llama4(const hf_reader *r)
{
    model_config *cfg = r->cfg;
    cfg->shared_ffn_dim = cfg->ffn_dim;
    cfg->ffn_dim = 16384;
    cfg->expert_gate = EXPERT_GATE_SIGMOID;
    cfg->expert_scales_input = true;
    return model_config_hf__i32(&cfg->ffn_dim, r, "intermediate_size_mlp", false);
}

static pgd_err read_gpt_oss(const hf_reader *r)
{
    double alpha = 1.702, limit = 7.0;
    PGD_TRY(json_get_f64(&alpha, r->json, "swiglu_alpha", r->why));
    PGD_TRY(json_get_f64(&limit, r->json, "swiglu_limit", r->why));
    r->cfg->act = FFN_ACT_CLAMPED;
    r->cfg->act_alpha = (float)alpha;
    r->cfg->act_limit = (float)limit;
    r->cfg->attn_sinks = true;
    return PGD_OK;
}

pgd_err model_config_hf__experts(const hf_reader *r)
{
    const hf_expert_traits *traits = r->arch->experts;
    model_config *cfg = r->cfg;
    bool norms = !traits->may_weigh_by_all;
    PGD_TRY(read_sizes(r));
    PGD_TRY(read_layers(r));
    if (traits->may_weigh_by_all)
        PGD_TRY(json_get_bool(&norms, r->json, "norm_topk_prob", r->why));
    cfg->expert_gate = norms ? EXPERT_GATE_SOFTMAX_CHOSEN : EXPERT_GATE_SOFTMAX_ALL;
    cfg->expert_form = traits->is_turned ? EXPERT_FORM_TURNED : EXPERT_FORM_FUSED;
    cfg->expert_interleaved = traits->is_interleaved;
    cfg->router_bias = cfg->expert_bias = traits->has_biases;
    if (traits->is_llama4)
        return read_llama4(r);
    return r->arch->is_gpt_oss ? read_gpt_oss(r) : PGD_OK;
}
