/* Scaling of rows, in place: of embeddings by one factor, of queries by a factor of their position.
 *
 *   x[t, i] = x[t, i] * (factors ? factors[positions[t]] : factor)
 *
 * Shapes:  x [n_rows, dim] with x_stride elements between rows; positions [n_rows], factors
 *          [n_positions], or both NULL
 * Types:   f32; positions int32; a product is rounded once
 * Limits:  n_rows >= 0, dim >= 1, any dim; 0 <= positions[t] < n_positions (the caller has checked)
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits other than positions)
 */
#ifndef KERNELS_ROW_SCALE_H
#define KERNELS_ROW_SCALE_H

#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

typedef struct row_scale_args {
    float *x;
    int64_t x_stride;
    int32_t n_rows;
    int32_t dim;
    float factor;
    const float *factors;
    const int32_t *positions;
} row_scale_args;

/* The only CPU version: the result does not depend on the width of vectors, and rows are few. */
pgd_err row_scale_ref(const row_scale_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
