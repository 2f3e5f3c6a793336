/* Soft cap of logits, in place.
 *
 *   x[i] = cap * tanh(x[i] / cap)
 *
 * Shapes:  x [n]
 * Types:   f32; the fast versions are within 4e-7 of cap
 * Limits:  n >= 0, any n; cap > 0
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits)
 * Source:  Gemma Team 2024 (Gemma 2)
 */
#ifndef KERNELS_SOFT_CAP_H
#define KERNELS_SOFT_CAP_H

#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

typedef struct soft_cap_args {
    float *x;
    int64_t n;
    float cap;
} soft_cap_args;

pgd_err soft_cap_ref(const soft_cap_args *args, kernel_ctx *ctx);
/* Bits of a value depend on that value alone; between versions they may differ. */
pgd_err soft_cap_avx2(const soft_cap_args *args, kernel_ctx *ctx);
pgd_err soft_cap_avx512(const soft_cap_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
