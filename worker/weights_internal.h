/* What the loading of one kind of model takes from weights.c. Each function is called twice: to
 * count, then to fill; what it gives is a place in the weights' one block, NULL while counting.
 *
 * Thread:  the worker's main thread
 */
#ifndef WORKER_WEIGHTS_INTERNAL_H
#define WORKER_WEIGHTS_INTERNAL_H

#include "worker/weights.h"

typedef struct weights_loader weights_loader;

const model_config *weights__config(const weights_loader *ld);
/* [n_rows, n_cols] as f32; n_rows 1 for vectors. */
PGD_MUST_USE pgd_err weights__table(const float **out, weights_loader *ld, const char *name,
                                    int64_t n_rows, int64_t n_cols);
/* Tensors `<prefix><what[i]>.weight` [n_outs[i], n_in] and their biases as one map. */
PGD_MUST_USE pgd_err weights__linear(weights_linear *out, weights_loader *ld, const char *prefix,
                                     int32_t n_in, int32_t n_names, const char *const *what,
                                     const int32_t *n_outs);

/* weights_encdec.c: all of an encoder-decoder model but the embedding and the head's matrix. */
PGD_MUST_USE pgd_err weights__create_encdec(encdec_weights **out, const model_config *cfg);
void weights__destroy_encdec(encdec_weights *w);
PGD_MUST_USE pgd_err weights__walk_encdec(weights *w, weights_loader *ld);

#endif
