/* RMS normalisation over float vectors (simd.h). Squares are summed in four vectors by position,
 * then across: an order that depends on dim alone. */
#ifndef KERNELS_CPU_RMSNORM_SIMD_H
#define KERNELS_CPU_RMSNORM_SIMD_H

#include <math.h>

#include "kernels/cpu/cpu_split.h"
#include "kernels/cpu/simd.h"
#include "kernels/rmsnorm.h"

#if defined(SIMD_LANES)

static float sum_squares(const float *x, int32_t dim)
{
    vf sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    int32_t i = 0;
    for (; i + 4 * SIMD_LANES <= dim; i += 4 * SIMD_LANES) {
        for (int j = 0; j < 4; j++) {
            vf v = vf_load(x + i + j * SIMD_LANES);
            sum[j] = vf_fma(v, v, sum[j]);
        }
    }
    for (int j = 0; i < dim; i += SIMD_LANES, j++) {
        vf v = vf_load_n(x + i, dim - i);
        sum[j] = vf_fma(v, v, sum[j]);
    }
    return vf_sum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
}

/* The next n lanes at most; a last part of a row differs from whole vectors in its loads alone. */
SIMD_INLINE void norm_lanes(float *out, const float *x, const float *weight, vf scale, int32_t n,
                            bool accumulate)
{
    bool is_whole = n >= SIMD_LANES;
    vf y = vf_mul(is_whole ? vf_load(x) : vf_load_n(x, n), scale);
    if (weight)
        y = vf_mul(y, is_whole ? vf_load(weight) : vf_load_n(weight, n));
    if (accumulate)
        y = vf_add(is_whole ? vf_load(out) : vf_load_n(out, n), y);
    if (is_whole)
        vf_store(out, y);
    else
        vf_store_n(out, n, y);
}

static void norm_group(float *out, const float *x, const rmsnorm_args *a)
{
    int32_t dim = a->dim;
    vf scale = vf_set1(1.0f / sqrtf(sum_squares(x, dim) / (float)dim + a->eps));
    for (int32_t i = 0; i < dim; i += SIMD_LANES)
        norm_lanes(out + i, x + i, a->weight ? a->weight + i : NULL, scale, dim - i, a->accumulate);
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const rmsnorm_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        for (int32_t g = 0; g < a->n_groups; g++) {
            int64_t at = (int64_t)g * a->dim;
            norm_group(a->out + t * a->out_stride + at, a->x + t * a->x_stride + at, a);
        }
    }
}

static pgd_err rmsnorm(const rmsnorm_args *args, kernel_ctx *ctx)
{
    int64_t width = (int64_t)args->n_groups * args->dim;
    if (args->n_rows < 0 || args->n_groups < 1 || args->dim < 1 || args->x_stride < width ||
        args->out_stride < width)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, args->n_rows * width);
    return PGD_OK;
}

#endif
#endif
