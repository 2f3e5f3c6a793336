/* RMS normalisation in double: the oracle, and the path of last resort. */
#include "kernels/rmsnorm.h"

#include <math.h>

#include "kernels/cpu/cpu_split.h"

static void norm_group(float *out, const float *x, const rmsnorm_args *a)
{
    double sum = 0;
    for (int32_t i = 0; i < a->dim; i++)
        sum += (double)x[i] * x[i];
    double scale = 1.0 / sqrt(sum / a->dim + (double)a->eps);
    for (int32_t i = 0; i < a->dim; i++) {
        double y = x[i] * scale * (a->weight ? a->weight[i] : 1);
        out[i] = (float)(a->accumulate ? out[i] + y : y);
    }
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

pgd_err rmsnorm_ref(const rmsnorm_args *args, kernel_ctx *ctx)
{
    int64_t width = (int64_t)args->n_groups * args->dim;
    if (args->n_rows < 0 || args->n_groups < 1 || args->dim < 1 || args->x_stride < width ||
        args->out_stride < width)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, args->n_rows * width);
    return PGD_OK;
}
