/* Which tensors the decoder needs for a model_config, and with which shapes.
 *
 * One table for every architecture; the config's flags say which rows apply.
 * Thread:  any
 */
#ifndef COMMON_MODEL_MODEL_LAYOUT_H
#define COMMON_MODEL_MODEL_LAYOUT_H

#include "common/err.h"
#include "common/model/model_config.h"

#define MODEL_LAYOUT_MAX_NAME 64

typedef struct model_layout_tensor {
    char name[MODEL_LAYOUT_MAX_NAME];
    int32_t n_dims;  /* 2 = matrix [n_out, n_in], 1 = norm weight, bias or frequencies */
    int64_t dims[2]; /* unused = 1 */
    bool needs_f32;  /* rope frequencies: F32 only */
} model_layout_tensor;

int32_t model_layout_n_tensors(const model_config *cfg);
/* idx in [0, n_tensors): the embedding first, then layer by layer, then the output's. */
void model_layout_get_tensor(model_layout_tensor *out, const model_config *cfg, int32_t idx);
/* False when the decoder computes nothing with a tensor of that name. */
bool model_layout_has_tensor(const model_config *cfg, const char *name);
/* True for names that may be there and are never read: precomputed rotary tables and, with a tied
 * head, output.weight. */
bool model_layout_may_ignore(const model_config *cfg, const char *name);

#endif
