/* Tensor names of Hugging Face checkpoints in the spelling of GGUF, which the rest of paged uses.
 *
 * Thread:  any
 * Source:  parameter names of the Llama family and of BART in Hugging Face
 *          transformers; the GGUF
 *          specification's tensor names
 */
#ifndef COMMON_MODEL_MODEL_HF_NAMES_H
#define COMMON_MODEL_MODEL_HF_NAMES_H

#include "common/err.h"

/* "model.layers.3.mlp.up_proj.weight" → "blk.3.ffn_up.weight"; a name without a GGUF counterpart is
 * copied as it is. post_norms (model_config): post_attention_layernorm is a norm of attention's
 * output, not the FFN's own. False when out_bytes is too small. */
PGD_MUST_USE bool model_hf_names_map(char *out, size_t out_bytes, const char *name,
                                     bool post_norms);

/* Of a checkpoint with an image encoder beside the text model: true for tensors of the former, which
 * have no counterpart. */
bool model_hf_names_is_vision(const char *name);
/* Likewise the name without what the wrapper puts in front:
 * "language_model.model.layers.0...", "model.language_model.layers.0..." → "model.layers.0...", the
 * head's → "lm_head.weight"; others are copied as they are. False when out_bytes is too small. */
PGD_MUST_USE bool model_hf_names_unwrap(char *out, size_t out_bytes, const char *name);

/* The same for an encoder-decoder model: "model.decoder.layers.0.fc1.bias" → "dec.blk.0.ffn_up.bias",
 * with or without "model." in front. */
PGD_MUST_USE bool model_hf_names_map_encdec(char *out, size_t out_bytes, const char *name);

#endif
