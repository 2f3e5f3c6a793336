/* Hugging Face tensor names and their GGUF counterparts: two tables, for whole names and for the
 * parts of a layer. */
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
    {"input_layernorm", "attn_norm"},    {"self_attn.q_proj", "attn_q"},
    {"self_attn.k_proj", "attn_k"},      {"self_attn.v_proj", "attn_v"},
    {"self_attn.o_proj", "attn_output"}, {"self_attn.q_norm", "attn_q_norm"},
    {"self_attn.k_norm", "attn_k_norm"}, {"post_attention_layernorm", "ffn_norm"},
    {"mlp.gate_proj", "ffn_gate"},       {"mlp.up_proj", "ffn_up"},
    {"mlp.down_proj", "ffn_down"},
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

bool model_hf_names_map(char *out, size_t out_bytes, const char *name, bool post_norms)
{
    const char *layer = NULL;
    int layer_len = 0;
    const char *rest = split_layer(name, &layer, &layer_len);
    if (rest != NULL && strcmp(rest, "self_attn.rotary_emb.inv_freq") == 0)
        return print_name(out, out_bytes, layer, layer_len, "attn_rot_embd", ".weight");
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
