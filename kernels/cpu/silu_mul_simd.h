/* Gated activation over float vectors (simd.h). */
#ifndef KERNELS_CPU_SILU_MUL_SIMD_H
#define KERNELS_CPU_SILU_MUL_SIMD_H

#include "kernels/cpu/cpu_split.h"
#include "kernels/cpu/simd.h"
#include "kernels/silu_mul.h"

#if defined(SIMD_LANES)

SIMD_INLINE vf silu(vf x, vf up)
{
    vf e = vf_exp(vf_sub(vf_zero(), x)); /* infinity for very negative x, which gives -0 */
    return vf_mul(vf_div(x, vf_add(e, vf_set1(1.0f))), up);
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const silu_mul_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        const float *gate = a->gate + t * a->in_stride;
        const float *up = a->up + t * a->in_stride;
        float *out = a->out + t * a->out_stride;
        int32_t i = 0;
        for (; i + SIMD_LANES <= a->dim; i += SIMD_LANES)
            vf_store(out + i, silu(vf_load(gate + i), vf_load(up + i)));
        if (i < a->dim)
            vf_store_n(out + i, a->dim - i,
                       silu(vf_load_n(gate + i, a->dim - i), vf_load_n(up + i, a->dim - i)));
    }
}

static pgd_err silu_mul(const silu_mul_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->dim < 1 || args->in_stride < args->dim ||
        args->out_stride < args->dim)
        return PGD_EINVAL;
    /* An exponential and a division weigh about four moves. */
    cpu_split_run(ctx, run, (void *)args, 4 * (int64_t)args->n_rows * args->dim);
    return PGD_OK;
}

#endif
#endif
