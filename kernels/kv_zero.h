/* Zeroes whole blocks of one layer's paged KV cache, so that reused memory holds no stale NaN.
 *
 * Shapes:  pages [n_blocks] of page_bytes; blocks [n_zero] block ids, duplicates allowed
 * Limits:  ids in [0, n_blocks) (the caller has checked)
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (n_zero < 0)
 */
#ifndef KERNELS_KV_ZERO_H
#define KERNELS_KV_ZERO_H

#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

typedef struct kv_zero_args {
    void *pages;
    size_t page_bytes;
    const block_id *blocks;
    int32_t n_zero;
} kv_zero_args;

/* The only CPU version: memset is as fast as memory. */
pgd_err kv_zero_ref(const kv_zero_args *args, kernel_ctx *ctx);

PGD_END_C
#endif
