/* Gated activation in double: the oracle, and the path of last resort. */
#include "kernels/silu_mul.h"

#include <math.h>

#include "kernels/cpu/cpu_split.h"

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const silu_mul_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        const float *gate = a->gate + t * a->in_stride;
        const float *up = a->up + t * a->in_stride;
        float *out = a->out + t * a->out_stride;
        for (int32_t i = 0; i < a->dim; i++)
            out[i] = (float)(gate[i] / (1.0 + exp(-(double)gate[i])) * up[i]);
    }
}

pgd_err silu_mul_ref(const silu_mul_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->dim < 1 || args->in_stride < args->dim ||
        args->out_stride < args->dim)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, (int64_t)args->n_rows * args->dim);
    return PGD_OK;
}
