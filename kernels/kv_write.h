/* Stores keys and values of a step's tokens into their slots of one layer's paged KV cache.
 *
 *   page = slots[t] / block_size, o = slots[t] % block_size
 *   K[page][h][i][o] = convert(k[t, h, i]),  V[page][h][o][i] = convert(v[t, h, i])
 *
 * Shapes:  k, v [n_rows, n_kv_heads, head_dim] with k_stride, v_stride elements between rows;
 *          slots [n_rows]; pages as in kernels/kv_page.h
 * Types:   k, v f32; pages of kv.type, rounded to nearest even; F16 saturates at +-65504 (a NaN
 *          stays a NaN)
 * Limits:  -1 <= slots[t] < n_blocks * block_size (the caller has checked); -1 = do not write; no
 *          slot occurs twice
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits other than slots)
 */
#ifndef KERNELS_KV_WRITE_H
#define KERNELS_KV_WRITE_H

#include "kernels/kernel_ctx.h"
#include "kernels/kv_page.h"

PGD_BEGIN_C

typedef struct kv_write_args {
    void *pages;
    kv_page_layout kv;
    const float *k;
    int64_t k_stride;
    const float *v;
    int64_t v_stride;
    const slot_id *slots;
    int32_t n_rows;
} kv_write_args;

pgd_err kv_write_ref(const kv_write_args *args, kernel_ctx *ctx);
/* Bit-equal to the reference. */
pgd_err kv_write_avx2(const kv_write_args *args, kernel_ctx *ctx);
pgd_err kv_write_avx512(const kv_write_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
