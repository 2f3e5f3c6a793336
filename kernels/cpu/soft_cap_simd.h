/* Soft cap of logits over float vectors (simd.h). */
#ifndef KERNELS_CPU_SOFT_CAP_SIMD_H
#define KERNELS_CPU_SOFT_CAP_SIMD_H

#include "kernels/cpu/cpu_split.h"
#include "kernels/cpu/simd.h"
#include "kernels/soft_cap.h"

#if defined(SIMD_LANES)

SIMD_INLINE vf cap_lanes(vf x, vf cap)
{
    return vf_mul(cap, vf_tanh(vf_div(x, cap)));
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const soft_cap_args *a = arg;
    const vf cap = vf_set1(a->cap);
    int64_t i, last;
    cpu_split_range(&i, &last, a->n, thread_idx, n_threads);
    for (; i + SIMD_LANES <= last; i += SIMD_LANES)
        vf_store(a->x + i, cap_lanes(vf_load(a->x + i), cap));
    int32_t n = (int32_t)(last - i);
    if (n > 0)
        vf_store_n(a->x + i, n, cap_lanes(vf_load_n(a->x + i, n), cap));
}

static pgd_err soft_cap(const soft_cap_args *args, kernel_ctx *ctx)
{
    if (args->n < 0 || !(args->cap > 0))
        return PGD_EINVAL;
    /* An exponential and two divisions weigh about six moves. */
    cpu_split_run(ctx, run, (void *)args, 6 * args->n);
    return PGD_OK;
}

#endif
#endif
