/* Between the parts of the config.json reader: the traits of a configuration class, and the reader
 * at work.
 *
 * Thread:  any
 */
#ifndef COMMON_MODEL_MODEL_CONFIG_HF_INTERNAL_H
#define COMMON_MODEL_MODEL_CONFIG_HF_INTERNAL_H

#include "common/json.h"
#include "common/model/model_config.h"

/* Which layers are local when "layer_types" is absent. */
typedef enum layer_pattern {
    LAYERS_FULL,              /* none; "layer_types" and windows are not read */
    LAYERS_SLIDING,           /* all that there are, if there is a window */
    LAYERS_SLIDING_FROM,      /* those from "max_window_layers" on */
    LAYERS_SLIDING_BUT_NTH,   /* all but every default_interval-th */
    LAYERS_SLIDING_NO_ROPE,   /* those without rope */
    LAYERS_CHUNKED_WITH_ROPE, /* those with rope, in chunks */
} layer_pattern;

/* Of classes with a mixture of experts. */
typedef struct hf_expert_traits {
    int32_t default_count;  /* of absent "num_local_experts" and "num_experts" */
    int32_t default_chosen; /* of an absent "num_experts_per_tok" */
    int32_t default_ffn; /* of an absent "moe_intermediate_size"; 0 = "intermediate_size" counts */
    bool some_layers;    /* "decoder_sparse_step" and "mlp_only_layers" say which have experts */
    bool may_weigh_by_all; /* without "norm_topk_prob" weights are shares of all experts */
    bool is_turned;        /* EXPERT_FORM_TURNED */
    bool is_interleaved;
    bool has_biases; /* of router and experts */
    bool is_llama4; /* a shared expert, sigmoid weights of inputs, "moe_layers" and a second size */
} hf_expert_traits;

/* Of members that every file of most classes has. */
typedef struct hf_sizes {
    int32_t n_layers;
    int32_t dim;
    int32_t ffn_dim;
    int32_t vocab_size;
    int32_t n_heads;
} hf_sizes;

typedef struct hf_traits {
    const char *class_name; /* config.json "architectures" */
    const char *model_type;
    const hf_sizes *default_sizes; /* NULL = their members must be there */
    int32_t default_kv_heads;      /* 0 = as many as heads */
    int32_t default_head_dim;      /* 0 = hidden size / heads */
    int32_t default_context;
    double default_eps; /* 0 = 1e-6 */
    double default_rope_theta;
    double default_local_theta; /* of SLIDING layers; 0 = one base for all */
    int32_t default_no_rope; /* of an absent "no_rope_layer_interval"; 0 = the member is not read */
    bool has_adjacent_rope;  /* pairs side by side */
    layer_pattern layers;
    int32_t default_window;   /* of an absent "sliding_window" or "attention_chunk_size" */
    int32_t default_interval; /* of an absent "sliding_window_pattern" */
    bool window_needs_flag;   /* "sliding_window" counts only with "use_sliding_window" */
    token_id default_eos;     /* where neither file says anything of it; 0 = none */
    bool default_tied;
    bool reads_biases; /* "attention_bias"; "mlp_bias" too if reads_mlp_bias */
    bool reads_mlp_bias;
    bool has_qkv_bias; /* always, without a member */
    bool has_qk_norm;
    const char *act_member; /* NULL = "hidden_act" */
    ffn_act default_act;
    bool is_encdec;
    bool is_gemma;  /* norms less one, post norms, scaled embeddings, "query_pre_attn_scalar" */
    bool is_llama4; /* norms of Q and K after rope, temperatures, two feed-forward sizes */
    float default_attn_soft_cap; /* 0 = none, like null */
    float default_final_soft_cap;
    bool default_bias; /* of an absent "attention_bias" */
    bool is_gpt_oss;   /* attention sinks, clamped gates, YaRN unless told otherwise */
    const hf_expert_traits *experts; /* NULL = none */
} hf_traits;

/* A class that has a text model inside. */
typedef struct hf_wrapper {
    const char *class_name;
    const char *model_type;
    const char *text_type; /* "model_type" in "text_config" */
    bool has_head;         /* its own "tie_word_embeddings" counts, not the text model's */
} hf_wrapper;

typedef struct hf_reader {
    model_config *cfg;
    const cJSON *json;  /* of the text model */
    const cJSON *outer; /* the whole file; json itself unless there is a wrapper */
    const hf_traits *arch;
    const hf_wrapper *wrapper; /* NULL = none */
    pgd_why *why;
} hf_reader;

/* *out unchanged when the member is absent or null and not required. */
PGD_MUST_USE pgd_err model_config_hf__i32(int32_t *out, const hf_reader *r, const char *name,
                                          bool is_required);
/* Likewise a token id of the vocabulary; -1 is a usual way to say "none" and changes nothing. */
PGD_MUST_USE pgd_err model_config_hf__id(token_id *out, const hf_reader *r, const cJSON *json,
                                         const char *name);
/* Layers with rope, local layers with their window or chunk, and rotary position encoding. */
PGD_MUST_USE pgd_err model_config_hf__layers(const hf_reader *r);
/* Finds the text model in the file of a wrapper of that name; others are left as they are. */
PGD_MUST_USE pgd_err model_config_hf__unwrap(hf_reader *r, const char *class_name,
                                             const char *model_type);
/* The object that has a member which may stand in the wrapper or in the text model's part. */
const cJSON *model_config_hf__holder(const hf_reader *r, const char *name);
/* All of an encoder-decoder model but the ids that every model has. */
PGD_MUST_USE pgd_err model_config_hf__encdec(const hf_reader *r);
/* Its start and forced tokens, of config.json or generation_config.json. */
PGD_MUST_USE pgd_err model_config_hf__encdec_ids(const hf_reader *r, const cJSON *json);
/* Notes the members that ask for what this build leaves out. */
void model_config_hf__encdec_ignored(const hf_reader *r, const cJSON *json);
/* The mixture of experts of a class that has one. */
PGD_MUST_USE pgd_err model_config_hf__experts(const hf_reader *r);

#endif
