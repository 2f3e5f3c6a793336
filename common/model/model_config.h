/* What the decoder must know of a model, from config.json or GGUF metadata alike.
 *
 * One struct for every architecture: the decoder is driven by these fields, never by the model's
 * name.
 * Owns:    plain data, copied by value
 * Thread:  any
 */
#ifndef COMMON_MODEL_MODEL_CONFIG_H
#define COMMON_MODEL_MODEL_CONFIG_H

#include "common/err.h"
#include "common/model/attention_kind.h"
#include "common/model/dtype.h"

#define MODEL_MAX_LAYERS  512
#define MODEL_MAX_EOS_IDS 16
#define MODEL_MAX_EXPERTS 4096

/* ADJACENT rotates pairs (2i, 2i+1) (GGUF "llama"); HALVES rotates (i, i + rope_dim/2) (Hugging
 * Face, GGUF "qwen2", "qwen3"). */
typedef enum rope_kind { ROPE_ADJACENT, ROPE_HALVES } rope_kind;

typedef enum rope_scaling {
    ROPE_SCALING_NONE,
    ROPE_SCALING_LINEAR,
    ROPE_SCALING_LLAMA3,
    ROPE_SCALING_YARN
} rope_scaling;

/* Of the gate in the feed-forward part; GELU_TANH is GELU's tanh form, CLAMPED that of
 * gpt-oss (kernels/gated_act.h). GELU and RELU: of an encoder-decoder model's, which has no gate. */
typedef enum ffn_act {
    FFN_ACT_SILU,
    FFN_ACT_GELU_TANH,
    FFN_ACT_CLAMPED,
    FFN_ACT_GELU,
    FFN_ACT_RELU
} ffn_act;

/* What an encoder-decoder model has besides its decoder, whose sizes are the model_config's own: an
 * encoder of the same hidden size, and tokens that begin and end a text. Norms are layer norms
 * behind each part (post-norm), positions are learned, every map has a bias. */
typedef struct encdec_config {
    int32_t n_layers; /* of the encoder, as the next ones */
    int32_t n_heads;
    int32_t head_dim;
    int32_t ffn_dim;
    int32_t max_source;      /* tokens that an encoder input has at most */
    int32_t position_offset; /* rows of a table of positions before position 0 */
    float embed_scale;       /* factor of token embeddings */
    bool has_logits_bias;    /* tensor output.bias [1, vocab_size] */
    token_id start_id;       /* the decoder's first token, not generated */
    token_id forced_bos_id;  /* the first token that is generated; -1 = any */
    token_id forced_eos_id;  /* the last one when a text is cut at its limit; -1 = any */
    char ignored[160];       /* members of generation_config that this build leaves out */
} encdec_config;

/* What becomes of the chosen experts' router logits (kernels/moe.h). */
typedef enum expert_gate {
    EXPERT_GATE_SOFTMAX_CHOSEN,
    EXPERT_GATE_SOFTMAX_ALL,
    EXPERT_GATE_SIGMOID
} expert_gate;

/* In which tensors a file keeps the experts of a layer (expert_source.h). */
typedef enum expert_form {
    EXPERT_FORM_STACKED, /* ffn_gate_exps, ffn_up_exps [experts, ffn, dim], ffn_down_exps */
    EXPERT_FORM_APART,   /* ffn_gate.N, ffn_up.N, ffn_down.N: matrices of each expert N */
    EXPERT_FORM_FUSED,   /* ffn_gate_up_exps [experts, 2 ffn, dim], ffn_down_exps */
    EXPERT_FORM_TURNED,  /* ffn_gate_up_exps [experts, dim, 2 ffn], ffn_down_exps turned too */
    EXPERT_FORM_MXFP4    /* FUSED, as bytes .blocks [..., blocks, 16] and .scales [..., blocks] */
} expert_form;

typedef struct model_config {
    char arch[32];    /* "llama", "qwen2", "gemma3", ... */
    char name[128];   /* general.name or the directory's name */
    dtype main_dtype; /* type of most weight bytes, for messages */
    int32_t n_layers;
    int32_t dim; /* hidden size */
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t head_dim;
    int32_t ffn_dim;
    int32_t vocab_size;  /* rows of the embedding */
    int32_t max_context; /* positions the model was made for */
    float norm_eps;

    rope_kind rope;
    int32_t rope_dim; /* leading values of a head that are rotated; <= head_dim */
    double rope_theta;
    rope_scaling rope_scaling;
    double rope_factor;          /* LINEAR, LLAMA3, YARN */
    double rope_low_freq_factor; /* LLAMA3 */
    double rope_high_freq_factor;
    int32_t rope_original_context; /* LLAMA3, YARN */
    double rope_beta_fast; /* YARN: rotations in the original context above which a frequency
                                      stays, and below which it is divided by the factor */
    double rope_beta_slow;
    bool rope_truncates;          /* YARN: those bounds are rounded to whole frequencies */
    double rope_attention_factor; /* YARN: of sines and cosines */
    bool has_rope_freqs; /* GGUF tensor rope_freqs.weight [rope_dim/2]: divides each frequency */
    double rope_local_theta; /* base of the SLIDING layers, without scaling; 0 = as the others */
    bool layer_has_rope[MODEL_MAX_LAYERS]; /* false: no position encoding in that layer (SmolLM3) */

    uint8_t layer_attention[MODEL_MAX_LAYERS]; /* attention_kind of each (decoder) layer */
    int32_t sliding_window;  /* tokens, of the SLIDING layers; 0 = there are none */
    int32_t attention_chunk; /* tokens, of the CHUNKED layers; 0 = there are none */

    double attn_scale;    /* factor of q k: 1 / sqrt(head_dim) in most models */
    float attn_soft_cap;  /* of the scaled q k; 0 = none */
    float final_soft_cap; /* of the logits; 0 = none */
    /* Queries of layers without rope are multiplied by 1 + scale ln(1 + floor((position + 1) /
     * floor)); floor 0: they are not (Llama 4). */
    int32_t temperature_floor;
    double temperature_scale;

    bool qkv_bias;
    bool o_bias;
    bool mlp_bias;
    bool qk_norm;    /* RMS norm over head_dim of q and k before rope (Qwen3) */
    bool qk_l2_norm; /* the same without weights, after rope, in layers with rope (Llama 4) */
    bool attn_sinks; /* a logit for each head that no key has (kernels/attention.h) */
    bool tied_head;  /* no output.weight: the embedding is the head */
    ffn_act act;
    float act_alpha; /* CLAMPED */
    float act_limit;
    bool scales_embed;  /* embeddings are multiplied by sqrt(dim), rounded to their type (Gemma) */
    bool norm_plus_one; /* norm weights are stored less one (Gemma outside GGUF) */
    bool
        post_norms; /* what attention and the FFN give is normalised before it is added (Gemma 2) */

    int32_t n_experts;        /* in layers that have them; 0 = no layer has */
    int32_t n_experts_chosen; /* for each row */
    int32_t expert_ffn_dim;
    int32_t shared_ffn_dim; /* of the expert that every row has besides; 0 = none */
    bool layer_has_experts[MODEL_MAX_LAYERS]; /* instead of one feed-forward part of ffn_dim */
    expert_gate expert_gate;
    bool
        expert_scales_input; /* the weight is a factor of what an expert gets, not gives (Llama 4) */
    bool router_bias;
    bool expert_bias;
    expert_form expert_form;
    bool expert_interleaved; /* rows of gate and up alternate, in the forms that join them */

    bool is_text_part; /* of a checkpoint with an image encoder, whose tensors are left out */

    bool is_encoder_decoder;
    encdec_config encdec; /* all 0 in other models */

    token_id bos_id; /* -1 = none */
    token_id pad_id;
    int32_t n_eos_ids; /* every id that ends a completion: eos, eot, and generation_config's list */
    token_id eos_ids[MODEL_MAX_EOS_IDS];

    /* generation_config.json; has_* false when not given */
    bool has_temperature, has_top_p, has_top_k, has_min_p, has_repetition_penalty;
    float gen_temperature, gen_top_p, gen_min_p, gen_repetition_penalty;
    int32_t gen_top_k;
} model_config;

/* Tokens of the layer's sliding window or chunk; 0 = it attends to everything. */
static inline int32_t model_config_window(const model_config *cfg, int32_t layer)
{
    switch (cfg->layer_attention[layer]) {
    case ATTENTION_SLIDING:
        return cfg->sliding_window;
    case ATTENTION_CHUNKED:
        return cfg->attention_chunk;
    default:
        return 0;
    }
}

/* Ranges and cross-field rules (n_heads % n_kv_heads, dims > 0, eos ids inside the vocabulary ...).
 */
PGD_MUST_USE pgd_err model_config_check(const model_config *cfg, pgd_why *why);

#endif
