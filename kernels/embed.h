/* Row gather with conversion to f32: token embedding, and the choice of the rows that need logits.
 *
 *   out[t, i] = dequantize(table[ids[t], i])
 *
 * Shapes:  table [n_table_rows, dim] with row_bytes between rows; ids [n_rows]; out [n_rows, dim]
 *          with out_stride
 * Types:   table of any dtype with is_weight, exactly as dtype_dequantize_row; ids int32; out f32
 * Limits:  0 <= ids[t] < n_table_rows (the caller has checked); dim a whole number of the type's
 *          blocks; out may not alias table
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits other than ids)
 */
#ifndef KERNELS_EMBED_H
#define KERNELS_EMBED_H

#include "common/model/dtype.h"
#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

typedef struct embed_args {
    float *out;
    int64_t out_stride;
    const void *table;
    dtype type;
    int64_t row_bytes;
    int32_t n_table_rows;
    const int32_t *ids;
    int32_t n_rows;
    int32_t dim;
} embed_args;

/* The only CPU version: a step gathers few rows, each read from memory once. */
pgd_err embed_ref(const embed_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
