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

bool model_hf_names_map(char *out, size_t out_bytes, const char *name)
{
    const char *layer = NULL;
    int layer_len = 0;
    const char *rest = split_layer(name, &layer, &layer_len);
    if (rest != NULL && strcmp(rest, "self_attn.rotary_emb.inv_freq") == 0)
        return print_name(out, out_bytes, layer, layer_len, "attn_rot_embd", ".weight");
    for (size_t i = 0; rest != NULL && i < PGD_ARRAY_LEN(layer_names); i++) {
        size_t n = strlen(layer_names[i].hf);
        if (strncmp(rest, layer_names[i].hf, n) == 0 &&
            (strcmp(rest + n, ".weight") == 0 || strcmp(rest + n, ".bias") == 0))
            return print_name(out, out_bytes, layer, layer_len, layer_names[i].gguf, rest + n);
    }
    const char *mapped = name;
    for (size_t i = 0; i < PGD_ARRAY_LEN(global_names); i++) {
        if (strcmp(name, global_names[i].hf) == 0)
            mapped = global_names[i].gguf;
    }
    int n = snprintf(out, out_bytes, "%s", mapped);
    return n >= 0 && (size_t)n < out_bytes;
}
