/* Hugging Face tensor names and their GGUF counterparts: two tables, for whole names and for the
 * parts of a layer; experts have a number in the middle of their names. */
#include "common/model/model_hf_names.h"

#include <stdio.h>
#include <string.h>

typedef struct name_pair {
    const char *hf;
    const char *gguf;
} name_pair;

/* Whole names. */
static const name_pair global_names[] = {
    {"model.embed_tokens.weight", "token_embd.weight"},
    {"model.norm.weight", "output_norm.weight"},
    {"lm_head.weight", "output.weight"},
};

/* What stands between "model.layers.N." and ".weight" or ".bias". */
static const name_pair layer_names[] = {
    {"input_layernorm", "attn_norm"},
    {"self_attn.q_proj", "attn_q"},
    {"self_attn.k_proj", "attn_k"},
    {"self_attn.v_proj", "attn_v"},
    {"self_attn.o_proj", "attn_output"},
    {"self_attn.q_norm", "attn_q_norm"},
    {"self_attn.k_norm", "attn_k_norm"},
    {"post_attention_layernorm", "ffn_norm"},
    {"mlp.gate_proj", "ffn_gate"},
    {"mlp.up_proj", "ffn_up"},
    {"mlp.down_proj", "ffn_down"},
    {"mlp.gate", "ffn_gate_inp"},
    {"mlp.router", "ffn_gate_inp"},
    {"block_sparse_moe.gate", "ffn_gate_inp"},
    {"feed_forward.gate_proj", "ffn_gate"},
    {"feed_forward.up_proj", "ffn_up"},
    {"feed_forward.down_proj", "ffn_down"},
    {"feed_forward.router", "ffn_gate_inp"},
    {"feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"},
    {"feed_forward.shared_expert.up_proj", "ffn_up_shexp"},
    {"feed_forward.shared_expert.down_proj", "ffn_down_shexp"},
};

/* What stands there with no ending behind. */
static const name_pair layer_params[] = {
    {"self_attn.rotary_emb.inv_freq", "attn_rot_embd.weight"},
    {"self_attn.sinks", "attn_sinks.weight"},
    {"mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight"},
    {"mlp.experts.gate_up_proj_bias", "ffn_gate_up_exps.bias"},
    {"mlp.experts.gate_up_proj_blocks", "ffn_gate_up_exps.blocks"},
    {"mlp.experts.gate_up_proj_scales", "ffn_gate_up_exps.scales"},
    {"mlp.experts.down_proj", "ffn_down_exps.weight"},
    {"mlp.experts.down_proj_bias", "ffn_down_exps.bias"},
    {"mlp.experts.down_proj_blocks", "ffn_down_exps.blocks"},
    {"mlp.experts.down_proj_scales", "ffn_down_exps.scales"},
    {"feed_forward.experts.gate_up_proj", "ffn_gate_up_exps.weight"},
    {"feed_forward.experts.down_proj", "ffn_down_exps.weight"},
};

/* What stands before the number of an expert, and between it and ".weight". */
static const struct {
    const char *before;
    name_pair module;
} expert_names[] = {
    {"mlp.experts.", {"gate_proj", "ffn_gate"}},
    {"mlp.experts.", {"up_proj", "ffn_up"}},
    {"mlp.experts.", {"down_proj", "ffn_down"}},
    {"block_sparse_moe.experts.", {"w1", "ffn_gate"}},
    {"block_sparse_moe.experts.", {"w3", "ffn_up"}},
    {"block_sparse_moe.experts.", {"w2", "ffn_down"}},
};

/* Instead, in models with post norms. */
static const name_pair post_norm_names[] = {
    {"post_attention_layernorm", "post_attention_norm"},
    {"pre_feedforward_layernorm", "ffn_norm"},
    {"post_feedforward_layernorm", "post_ffw_norm"},
};

static bool print_name(char *out, size_t out_bytes, const char *layer, int layer_len,
                       const char *module, const char *ending)
{
    int n = snprintf(out, out_bytes, "blk.%.*s.%s%s", layer_len, layer, module, ending);
    return n > 0 && (size_t)n < out_bytes;
}

/* name = "model.layers." digits "." rest */
static const char *split_layer(const char *name, const char **layer, int *layer_len)
{
    static const char prefix[] = "model.layers.";
    if (strncmp(name, prefix, sizeof(prefix) - 1) != 0)
        return NULL;
    const char *p = name + sizeof(prefix) - 1;
    *layer = p;
    while (*p >= '0' && *p <= '9')
        p++;
    *layer_len = (int)(p - *layer);
    return *layer_len > 0 && *p == '.' ? p + 1 : NULL;
}

/* The GGUF module of a part of a layer, *ending at its ".weight" or ".bias"; else NULL. */
static const char *find_module(const name_pair *names, size_t n_names, const char *rest,
                               const char **ending)
{
    for (size_t i = 0; i < n_names; i++) {
        size_t n = strlen(names[i].hf);
        *ending = rest + n;
        if (strncmp(rest, names[i].hf, n) == 0 &&
            (strcmp(*ending, ".weight") == 0 || strcmp(*ending, ".bias") == 0))
            return names[i].gguf;
    }
    return NULL;
}

/* rest = before digits "." module ".weight" */
static bool print_expert(char *out, size_t out_bytes, const char *layer, int layer_len,
                         const char *rest, bool *fits)
{
    for (size_t i = 0; i < PGD_ARRAY_LEN(expert_names); i++) {
        const name_pair *module = &expert_names[i].module;
        size_t n_before = strlen(expert_names[i].before);
        size_t n_module = strlen(module->hf);
        if (strncmp(rest, expert_names[i].before, n_before) != 0)
            continue;
        const char *number = rest + n_before;
        size_t n_digits = strspn(number, "0123456789");
        const char *end = number + n_digits;
        if (n_digits == 0 || end[0] != '.' || strncmp(end + 1, module->hf, n_module) != 0 ||
            strcmp(end + 1 + n_module, ".weight") != 0)
            continue;
        int n = snprintf(out, out_bytes, "blk.%.*s.%s.%.*s.weight", layer_len, layer, module->gguf,
                         (int)n_digits, number);
        *fits = n > 0 && (size_t)n < out_bytes;
        return true;
    }
    return false;
}

bool model_hf_names_map(char *out, size_t out_bytes, const char *name, bool post_norms)
{
    const char *layer = NULL;
    int layer_len = 0;
    const char *rest = split_layer(name, &layer, &layer_len);
    bool fits = false;
    for (size_t i = 0; rest != NULL && i < PGD_ARRAY_LEN(layer_params); i++) {
        if (strcmp(rest, layer_params[i].hf) == 0)
            return print_name(out, out_bytes, layer, layer_len, layer_params[i].gguf, "");
    }
    if (rest != NULL && print_expert(out, out_bytes, layer, layer_len, rest, &fits))
        return fits;
    const char *module = NULL, *ending = NULL;
    if (rest != NULL && post_norms)
        module = find_module(post_norm_names, PGD_ARRAY_LEN(post_norm_names), rest, &ending);
    if (rest != NULL && module == NULL)
        module = find_module(layer_names, PGD_ARRAY_LEN(layer_names), rest, &ending);
    if (module != NULL)
        return print_name(out, out_bytes, layer, layer_len, module, ending);
    const char *mapped = name;
    for (size_t i = 0; i < PGD_ARRAY_LEN(global_names); i++) {
        if (strcmp(name, global_names[i].hf) == 0)
            mapped = global_names[i].gguf;
    }
    int n = snprintf(out, out_bytes, "%s", mapped);
    return n >= 0 && (size_t)n < out_bytes;
}

static const char *skip(const char *name, const char *prefix)
{
    size_t n = strlen(prefix);
    return strncmp(name, prefix, n) == 0 ? name + n : NULL;
}

/* --- models with an image encoder --- */

/* name, or what follows prefix. */
static const char *skip_any(const char *name, const char *prefix)
{
    const char *rest = skip(name, prefix);
    return rest != NULL ? rest : name;
}

bool model_hf_names_is_vision(const char *name)
{
    static const char *const parts[] = {"vision_tower.", "vision_model.", "multi_modal_projector."};
    const char *inner = skip_any(name, "model.");
    for (size_t i = 0; i < PGD_ARRAY_LEN(parts); i++) {
        if (skip(inner, parts[i]) != NULL)
            return true;
    }
    return false;
}

bool model_hf_names_unwrap(char *out, size_t out_bytes, const char *name)
{
    static const char head[] = "lm_head.weight";
    const char *text = skip(skip_any(name, "model."), "language_model.");
    const char *rest = text != NULL ? skip_any(text, "model.") : name;
    bool has_prefix = text != NULL && strcmp(rest, head) != 0;
    int n = snprintf(out, out_bytes, "%s%s", has_prefix ? "model." : "", rest);
    return n >= 0 && (size_t)n < out_bytes;
}

/* --- encoder-decoder models --- */

/* Whole names behind "model.". */
static const name_pair encdec_names[] = {
    {"shared.weight", "token_embd.weight"},
    {"lm_head.weight", "output.weight"},
    {"final_logits_bias", "output.bias"},
};

/* What stands between "encoder." or "decoder." and ".weight" or ".bias". */
static const name_pair side_names[] = {
    {"embed_tokens", "token_embd"},
    {"embed_positions", "position_embd"},
    {"layernorm_embedding", "token_embd_norm"},
};

/* ... and behind "layers.N.". */
static const name_pair side_layer_names[] = {
    {"self_attn.q_proj", "attn_q"},
    {"self_attn.k_proj", "attn_k"},
    {"self_attn.v_proj", "attn_v"},
    {"self_attn.out_proj", "attn_output"},
    {"self_attn_layer_norm", "attn_output_norm"},
    {"encoder_attn.q_proj", "cross_attn_q"},
    {"encoder_attn.k_proj", "cross_attn_k"},
    {"encoder_attn.v_proj", "cross_attn_v"},
    {"encoder_attn.out_proj", "cross_attn_output"},
    {"encoder_attn_layer_norm", "cross_attn_output_norm"},
    {"fc1", "ffn_up"},
    {"fc2", "ffn_down"},
    {"final_layer_norm", "layer_output_norm"},
};

/* Of a name behind "encoder." or "decoder."; false when it has no counterpart or does not fit. */
static bool map_side(char *out, size_t out_bytes, const char *side, const char *name)
{
    const char *ending;
    const char *module = find_module(side_names, PGD_ARRAY_LEN(side_names), name, &ending);
    int n = -1;
    if (module != NULL) {
        n = snprintf(out, out_bytes, "%s.%s%s", side, module, ending);
        return n > 0 && (size_t)n < out_bytes;
    }
    const char *layer = skip(name, "layers.");
    int n_digits = layer != NULL ? (int)strspn(layer, "0123456789") : 0;
    if (n_digits == 0 || layer[n_digits] != '.')
        return false;
    module = find_module(side_layer_names, PGD_ARRAY_LEN(side_layer_names), layer + n_digits + 1,
                         &ending);
    if (module != NULL)
        n = snprintf(out, out_bytes, "%s.blk.%.*s.%s%s", side, n_digits, layer, module, ending);
    return n > 0 && (size_t)n < out_bytes;
}

bool model_hf_names_map_encdec(char *out, size_t out_bytes, const char *name)
{
    const char *inner = skip(name, "model.");
    inner = inner != NULL ? inner : name;
    const char *in_encoder = skip(inner, "encoder."), *in_decoder = skip(inner, "decoder.");
    if (in_encoder != NULL && map_side(out, out_bytes, "enc", in_encoder))
        return true;
    if (in_decoder != NULL && map_side(out, out_bytes, "dec", in_decoder))
        return true;
    const char *mapped = name;
    for (size_t i = 0; i < PGD_ARRAY_LEN(encdec_names); i++) {
        if (strcmp(inner, encdec_names[i].hf) == 0)
            mapped = encdec_names[i].gguf;
    }
    int n = snprintf(out, out_bytes, "%s", mapped);
    return n >= 0 && (size_t)n < out_bytes;
}
