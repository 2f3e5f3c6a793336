/* Between the parts of the GGUF metadata reader: the traits of an architecture, and the reader at
 * work.
 *
 * Thread:  any
 */
#ifndef COMMON_MODEL_MODEL_CONFIG_GGUF_INTERNAL_H
#define COMMON_MODEL_MODEL_CONFIG_GGUF_INTERNAL_H

#include <string.h>

#include "common/model/gguf.h"
#include "common/model/model_config.h"

#define GGUF_MAX_KEY 160

typedef struct gguf_traits {
    const char *name;
    rope_kind rope;
    bool always_qkv_bias;
    bool always_qk_norm;
    int32_t no_rope_interval; /* every so-manieth layer has no rope; 0 = all have it */
    int32_t full_interval;    /* every so-manieth layer sees all; 0 = none, if there is a window */
    int32_t default_window;   /* of files older than the key; 0 = none */
    double local_theta;  /* base of sliding layers unless the file says; 0 = one base for all */
    bool is_gemma;       /* post norms, scaled embeddings, GELU */
    float attn_soft_cap; /* unless the file says; 0 = none */
    float final_soft_cap;
    int32_t wide_scale_layers; /* a model of so many layers scales attention by dim / heads instead
                                  of the head size */
    bool needs_experts;
    bool is_gpt_oss; /* attention sinks, clamped gates, exact YaRN bounds */
    bool is_llama4;  /* chunks, temperatures, norms of Q and K after rope, a shared expert */
} gguf_traits;

typedef struct gguf_reader {
    model_config *cfg;
    const gguf_file *file;
    const gguf_traits *arch;
    pgd_why *why;
} gguf_reader;

/* "<arch>.<suffix>" */
void model_config_gguf__key(char out[GGUF_MAX_KEY], const gguf_reader *r, const char *suffix);
/* PGD_EFORMAT: the key's value is not the wanted one. */
PGD_MUST_USE pgd_err model_config_gguf__fail_type(const gguf_reader *r, const char *key,
                                                  const char *wanted);
/* *out unchanged when the key is absent and optional. */
PGD_MUST_USE pgd_err model_config_gguf__i32(int32_t *out, const gguf_reader *r, const char *suffix,
                                            bool is_required);
PGD_MUST_USE pgd_err model_config_gguf__f64(double *out, const gguf_reader *r, const char *suffix,
                                            bool is_required);
/* What each layer attends to, with which scale, and rotary position encoding. */
PGD_MUST_USE pgd_err model_config_gguf__layers(const gguf_reader *r);

static inline bool model_config_gguf__is(const gguf_string *s, const char *text)
{
    return s->n_bytes == strlen(text) && memcmp(s->data, text, s->n_bytes) == 0;
}

#endif
