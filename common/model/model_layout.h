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

/* Which types a tensor may have. */
typedef enum model_layout_values {
    MODEL_LAYOUT_WEIGHTS, /* any that the worker computes with */
    MODEL_LAYOUT_FLOATS,  /* F32, F16, BF16: norms, biases, what is read value by value */
    MODEL_LAYOUT_F32,
    MODEL_LAYOUT_BYTES /* U8: parts of a block format */
} model_layout_values;

typedef struct model_layout_tensor {
    char name[MODEL_LAYOUT_MAX_NAME];
    int32_t n_dims; /* 2 = matrix [n_out, n_in], 1 = norm weight, bias or frequencies; more in front
                        of these for experts */
    int64_t dims[4]; /* unused = 1 */
    model_layout_values values;
} model_layout_tensor;

/* A walk over the tensors of a model: the embedding first, then layer by layer, then the output's.
 * Begins at {0}. */
typedef struct model_layout_iter {
    int32_t table;
    int32_t layer;
    int32_t row;
    int32_t expert;
} model_layout_iter;

/* False at the end. */
bool model_layout_next(model_layout_tensor *out, model_layout_iter *iter, const model_config *cfg);
/* False when the decoder computes nothing with a tensor of that name. */
bool model_layout_has_tensor(const model_config *cfg, const char *name);
/* True for names that may be there and are never read: precomputed rotary tables and, with a tied
 * head, output.weight. */
bool model_layout_may_ignore(const model_config *cfg, const char *name);

#endif
