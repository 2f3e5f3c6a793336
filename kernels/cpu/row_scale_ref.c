/* Scaling of rows. One rounding per value whatever the code, so that this is the only CPU version. */
#include "kernels/row_scale.h"

#include "kernels/cpu/cpu_split.h"

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const row_scale_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        float *x = a->x + t * a->x_stride;
        float factor = a->factors ? a->factors[a->positions[t]] : a->factor;
        for (int32_t i = 0; i < a->dim; i++)
            x[i] *= factor;
    }
}

pgd_err row_scale_ref(const row_scale_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->dim < 1 || args->x_stride < args->dim ||
        (args->factors && !args->positions))
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, (int64_t)args->n_rows * args->dim);
    return PGD_OK;
}
