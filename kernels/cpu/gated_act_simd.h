/* Gated activation over float vectors (simd.h). */
#ifndef KERNELS_CPU_GATED_ACT_SIMD_H
#define KERNELS_CPU_GATED_ACT_SIMD_H

#include "kernels/cpu/cpu_split.h"
#include "kernels/cpu/simd.h"
#include "kernels/gated_act.h"

#if defined(SIMD_LANES)

/* All kinds are g / (1 + exp(-z)) times up: infinity for very negative g, which gives -0. */
SIMD_INLINE vf activate(vf g, vf up, const gated_act_args *a, const gated_act_kind kind)
{
    if (kind == GATED_ACT_CLAMPED) {
        vf limit = vf_set1(a->limit);
        g = vf_min(limit, g); /* the second operand when one is a NaN */
        up = vf_max(vf_set1(-a->limit), vf_min(limit, up));
        up = vf_add(up, vf_set1(1.0f));
    }
    vf z = kind == GATED_ACT_CLAMPED ? vf_mul(g, vf_set1(a->alpha)) : g;
    if (kind == GATED_ACT_GELU_TANH) {
        /* 2 sqrt(2 / pi) and that times 0.044715 */
        vf slope = vf_fma(vf_mul(g, g), vf_set1(0x1.2444f2p-4f), vf_set1(0x1.988454p+0f));
        z = vf_mul(g, slope);
    }
    vf e = vf_exp(vf_sub(vf_zero(), z));
    return vf_mul(vf_div(g, vf_add(e, vf_set1(1.0f))), up);
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
            vf_store(out + i, activate(vf_load(gate + i), vf_load(up + i), a, kind));
        int32_t n = a->dim - i;
        if (n > 0)
            vf_store_n(out + i, n, activate(vf_load_n(gate + i, n), vf_load_n(up + i, n), a, kind));
    }
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const gated_act_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    if (a->kind == GATED_ACT_SILU)
        run_rows(a, first, last, GATED_ACT_SILU);
    else if (a->kind == GATED_ACT_GELU_TANH)
        run_rows(a, first, last, GATED_ACT_GELU_TANH);
    else
        run_rows(a, first, last, GATED_ACT_CLAMPED);
}

static pgd_err gated_act(const gated_act_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->dim < 1 || args->in_stride < args->dim ||
        args->out_stride < args->dim || !(args->limit >= 0))
        return PGD_EINVAL;
    /* An exponential and a division weigh about four moves. */
    cpu_split_run(ctx, run, (void *)args, 4 * (int64_t)args->n_rows * args->dim);
    return PGD_OK;
}

#endif
#endif
