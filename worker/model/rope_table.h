/* The cosines and sines of every position that a model may meet, for kernels/rope.h.
 *
 *   table[p, i] = cos(p f_i),  table[p, rope_dim / 2 + i] = sin(p f_i)
 *   f_i = theta^(-2 i / rope_dim) / freqs[i], scaled:
 *     LINEAR   f_i / factor
 *     LLAMA3   with w = 2 pi / f_i and c = original context
 *              w < c / high:  f_i
 *              w > c / low:   f_i / factor
 *              between:       (1 - s) f_i / factor + s f_i,  s = (c / w - low) / (high - low)
 *     YARN     f_i / factor * ramp + f_i (1 - ramp),  ramp = (i - low) / (high - low) in [0, 1],
 *              low and high the indices whose frequencies turn beta_fast and beta_slow times in the
 *              original context; the table is multiplied by the attention factor
 *
 * Computed in double, rounded once. theta, factors and contexts as in model_config.
 * Thread:  any
 * Source:  Su et al. 2021; Meta's Llama 3.1 release for LLAMA3; Peng et al. 2023 for YARN
 */
#ifndef WORKER_MODEL_ROPE_TABLE_H
#define WORKER_MODEL_ROPE_TABLE_H

#include "common/model/model_config.h"

/* out [n_positions, cfg->rope_dim]; freqs [rope_dim / 2] or NULL. */
void rope_table_fill(float *out, int32_t n_positions, const model_config *cfg, const float *freqs);
/* The same for layers with rope_local_theta as base, which nothing scales. */
void rope_table_fill_local(float *out, int32_t n_positions, const model_config *cfg);

#endif
