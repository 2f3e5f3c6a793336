/* Layer normalisation over float vectors (simd.h). Values, then squares of their distances from the
 * mean, are summed in four vectors by position, then across: an order that depends on dim alone. */
#ifndef KERNELS_CPU_LAYERNORM_SIMD_H
#define KERNELS_CPU_LAYERNORM_SIMD_H

#include <math.h>

#include "kernels/cpu/cpu_split.h"
#include "kernels/cpu/simd.h"
#include "kernels/layernorm.h"

#if defined(SIMD_LANES)

static float sum_values(const float *x, int32_t dim)
{
    vf sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    int32_t i = 0;
    for (; i + 4 * SIMD_LANES <= dim; i += 4 * SIMD_LANES) {
        for (int j = 0; j < 4; j++)
            sum[j] = vf_add(sum[j], vf_load(x + i + j * SIMD_LANES));
    }
    for (int j = 0; i < dim; i += SIMD_LANES, j++)
        sum[j] = vf_add(sum[j], vf_load_n(x + i, dim - i));
    return vf_sum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
}

static float sum_squares(const float *x, int32_t dim, float mean)
{
    vf sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()}, m = vf_set1(mean);
    int32_t i = 0;
    for (; i + 4 * SIMD_LANES <= dim; i += 4 * SIMD_LANES) {
        for (int j = 0; j < 4; j++) {
            vf v = vf_sub(vf_load(x + i + j * SIMD_LANES), m);
            sum[j] = vf_fma(v, v, sum[j]);
        }
    }
    for (int j = 0; i < dim; i += SIMD_LANES, j++) {
        vf v = vf_keep(vf_sub(vf_load_n(x + i, dim - i), m), 0, dim - i, vf_zero());
        sum[j] = vf_fma(v, v, sum[j]);
    }
    return vf_sum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
}

static void norm_row(float *out, const float *x, const layernorm_args *a)
{
    int32_t dim = a->dim, i = 0;
    float mean = sum_values(x, dim) / (float)dim;
    vf m = vf_set1(mean);
    vf scale = vf_set1(1.0f / sqrtf(sum_squares(x, dim, mean) / (float)dim + a->eps));
    for (; i + SIMD_LANES <= dim; i += SIMD_LANES)
        vf_store(out + i, vf_fma(vf_mul(vf_sub(vf_load(x + i), m), scale), vf_load(a->weight + i),
                                 vf_load(a->bias + i)));
    if (i < dim)
        vf_store_n(out + i, dim - i,
                   vf_fma(vf_mul(vf_sub(vf_load_n(x + i, dim - i), m), scale),
                          vf_load_n(a->weight + i, dim - i), vf_load_n(a->bias + i, dim - i)));
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const layernorm_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++)
        norm_row(a->out + t * a->out_stride, a->x + t * a->x_stride, a);
}

static pgd_err layernorm(const layernorm_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->dim < 1 || args->x_stride < args->dim ||
        args->out_stride < args->dim)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, (int64_t)args->n_rows * args->dim);
    return PGD_OK;
}

#endif
#endif
