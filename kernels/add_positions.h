/* Adds learned position embeddings to scaled token embeddings, in place.
 *
 *   x[t, i] = scale * x[t, i] + table[positions[t] + offset, i]
 *
 * Shapes:  x [n_rows, dim] with x_stride elements between rows; positions [n_rows];
 *          table [n_positions + offset, dim], contiguous
 * Types:   x, table f32, one rounding; positions int32
 * Limits:  0 <= positions[t] < n_positions (the caller has checked); offset >= 0; n_rows >= 0,
 *          dim >= 1
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits other than positions)
 * Source:  Lewis et al. 2019 (BART; its table begins with two rows that no position has)
 */
#ifndef KERNELS_ADD_POSITIONS_H
#define KERNELS_ADD_POSITIONS_H

#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

typedef struct add_positions_args {
    float *x;
    int64_t x_stride;
    float scale;
    const float *table;
    int32_t offset;
    const int32_t *positions;
    int32_t n_rows;
    int32_t dim;
} add_positions_args;

/* The only CPU version: a step adds few rows, once. */
pgd_err add_positions_ref(const add_positions_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
