/* The sum over a row's experts, over float vectors (simd.h). */
#ifndef KERNELS_CPU_MOE_SIMD_H
#define KERNELS_CPU_MOE_SIMD_H

#include "kernels/cpu/cpu_split.h"
#include "kernels/cpu/simd.h"
#include "kernels/moe.h"

#if defined(SIMD_LANES)

/* Values i to i + n - 1 of the sum over the copies [first, last). */
SIMD_INLINE vf sum_copies(const moe_combine_args *a, int64_t first, int64_t last, int32_t i,
                          const bool whole, int32_t n)
{
    vf sum = vf_zero();
    for (int64_t c = first; c < last; c++) {
        const float *y = a->y + a->places[c] * a->y_stride + i;
        vf v = whole ? vf_load(y) : vf_load_n(y, n);
        sum = a->weights != NULL ? vf_fma(vf_set1(a->weights[c]), v, sum) : vf_add(sum, v);
    }
    return sum;
}

static void combine_rows(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const moe_combine_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        float *out = a->out + t * a->out_stride;
        int64_t c0 = t * a->n_chosen, c1 = c0 + a->n_chosen;
        int32_t i = 0;
        for (; i + SIMD_LANES <= a->dim; i += SIMD_LANES)
            vf_store(out + i, vf_add(sum_copies(a, c0, c1, i, true, 0), vf_load(out + i)));
        int32_t n = a->dim - i;
        if (n > 0)
            vf_store_n(out + i, n,
                       vf_add(sum_copies(a, c0, c1, i, false, n), vf_load_n(out + i, n)));
    }
}

static pgd_err moe_combine(const moe_combine_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->n_chosen < 1 || args->dim < 1 || args->y_stride < args->dim ||
        args->out_stride < args->dim)
        return PGD_EINVAL;
    cpu_split_run(ctx, combine_rows, (void *)args,
                  (int64_t)args->n_rows * args->n_chosen * args->dim);
    return PGD_OK;
}

#endif
#endif
