/* Gated activation over float vectors (simd.h). */
#ifndef KERNELS_CPU_GATED_ACT_SIMD_H
#define KERNELS_CPU_GATED_ACT_SIMD_H

#include "kernels/cpu/cpu_split.h"
#include "kernels/cpu/simd.h"
#include "kernels/gated_act.h"

#if defined(SIMD_LANES)

/* Both kinds are g / (1 + exp(-z)): infinity for very negative g, which gives -0. */
SIMD_INLINE vf activate(vf g, const gated_act_kind kind)
{
    vf z = g;
    if (kind == GATED_ACT_GELU_TANH) {
        /* 2 sqrt(2 / pi) and that times 0.044715 */
        vf a = vf_fma(vf_mul(g, g), vf_set1(0x1.2444f2p-4f), vf_set1(0x1.988454p+0f));
        z = vf_mul(g, a);
    }
    vf e = vf_exp(vf_sub(vf_zero(), z));
    return vf_div(g, vf_add(e, vf_set1(1.0f)));
}

SIMD_INLINE void run_rows(const gated_act_args *a, int64_t first, int64_t last,
                          const gated_act_kind kind)
{
    for (int64_t t = first; t < last; t++) {
        const float *gate = a->gate + t * a->in_stride;
        const float *up = a->up + t * a->in_stride;
        float *out = a->out + t * a->out_stride;
        int32_t i = 0;
        for (; i + SIMD_LANES <= a->dim; i += SIMD_LANES)
            vf_store(out + i, vf_mul(activate(vf_load(gate + i), kind), vf_load(up + i)));
        int32_t n = a->dim - i;
        if (n > 0)
            vf_store_n(out + i, n,
                       vf_mul(activate(vf_load_n(gate + i, n), kind), vf_load_n(up + i, n)));
    }
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const gated_act_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    if (a->kind == GATED_ACT_SILU)
        run_rows(a, first, last, GATED_ACT_SILU);
    else
        run_rows(a, first, last, GATED_ACT_GELU_TANH);
}

static pgd_err gated_act(const gated_act_args *args, kernel_ctx *ctx)
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
