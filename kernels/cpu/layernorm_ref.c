/* Layer normalisation in double: the oracle, and the path of last resort. */
#include "kernels/layernorm.h"

#include <math.h>

#include "kernels/cpu/cpu_split.h"

static void norm_row(float *out, const float *x, const layernorm_args *a)
{
    double sum = 0, squares = 0;
    for (int32_t i = 0; i < a->dim; i++)
        sum += x[i];
    double mean = sum / a->dim;
    for (int32_t i = 0; i < a->dim; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    double scale = 1.0 / sqrt(squares / a->dim + a->eps);
    for (int32_t i = 0; i < a->dim; i++)
        out[i] = (float)((x[i] - mean) * scale * a->weight[i] + a->bias[i]);
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const layernorm_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++)
        norm_row(a->out + t * a->out_stride, a->x + t * a->x_stride, a);
}

pgd_err layernorm_ref(const layernorm_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->dim < 1 || args->x_stride < args->dim ||
        args->out_stride < args->dim)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, (int64_t)args->n_rows * args->dim);
    return PGD_OK;
}
