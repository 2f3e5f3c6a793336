/* Which tensors an encoder-decoder model needs: model_layout's functions for such a model_config.
 *
 * Names are GGUF's of other encoder-decoder models where it has them: "enc.blk.0.attn_q.weight",
 * "dec.blk.0.cross_attn_q.weight". A norm is named after what it normalises: attn_output_norm,
 * cross_attn_output_norm, layer_output_norm.
 * Thread:  any
 */
#ifndef COMMON_MODEL_ENCDEC_LAYOUT_H
#define COMMON_MODEL_ENCDEC_LAYOUT_H

#include "common/model/model_layout.h"

int32_t encdec_layout_n_tensors(const model_config *cfg);
void encdec_layout_get_tensor(model_layout_tensor *out, const model_config *cfg, int32_t idx);
bool encdec_layout_has_tensor(const model_config *cfg, const char *name);
/* Copies of the shared embedding under the names of encoder, decoder and head. */
bool encdec_layout_may_ignore(const char *name);

#endif
