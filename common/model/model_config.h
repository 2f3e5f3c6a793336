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

/* ADJACENT rotates pairs (2i, 2i+1) (GGUF "llama"); HALVES rotates (i, i + rope_dim/2) (Hugging
 * Face, GGUF "qwen2", "qwen3"). */
typedef enum rope_kind { ROPE_ADJACENT, ROPE_HALVES } rope_kind;

typedef enum rope_scaling {
    ROPE_SCALING_NONE,
    ROPE_SCALING_LINEAR,
    ROPE_SCALING_LLAMA3,
    ROPE_SCALING_YARN
} rope_scaling;

typedef struct model_config {
    char arch[32];    /* "llama", "qwen2", "qwen3", "smollm3", "mistral" */
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
    double rope_factor;          /* LINEAR, LLAMA3 */
    double rope_low_freq_factor; /* LLAMA3 */
    double rope_high_freq_factor;
    int32_t rope_original_context;
    bool has_rope_freqs; /* GGUF tensor rope_freqs.weight [rope_dim/2]: divides each frequency */
    bool layer_has_rope[MODEL_MAX_LAYERS]; /* false: no position encoding in that layer (SmolLM3) */
    uint8_t layer_attention[MODEL_MAX_LAYERS]; /* attention_kind of each (decoder) layer */
    int32_t sliding_window;  /* tokens, of the SLIDING layers; 0 = there are none */
    int32_t attention_chunk; /* tokens, of the CHUNKED layers; 0 = there are none */

    bool qkv_bias;
    bool o_bias;
    bool mlp_bias;
    bool qk_norm;   /* RMS norm over head_dim of q and k before rope (Qwen3) */
    bool tied_head; /* no output.weight: the embedding is the head */

    token_id bos_id; /* -1 = none */
    token_id pad_id;
    int32_t n_eos_ids; /* every id that ends a completion: eos, eot, and generation_config's list */
    token_id eos_ids[MODEL_MAX_EOS_IDS];

    /* generation_config.json; has_* false when not given */
    bool has_temperature, has_top_p, has_top_k, has_min_p, has_repetition_penalty;
    float gen_temperature, gen_top_p, gen_min_p, gen_repetition_penalty;
    int32_t gen_top_k;
} model_config;

/* Ranges and cross-field rules (n_heads % n_kv_heads, dims > 0, eos ids inside the vocabulary ...).
 */
PGD_MUST_USE pgd_err model_config_check(const model_config *cfg, pgd_why *why);

#endif
