/* Learned positions: one row of the table for each row of x, in double for one rounding. */
#include "kernels/add_positions.h"

#include "kernels/cpu/cpu_split.h"

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const add_positions_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        float *x = a->x + t * a->x_stride;
        const float *row = a->table + ((int64_t)a->positions[t] + a->offset) * a->dim;
        for (int32_t i = 0; i < a->dim; i++)
            x[i] = (float)((double)a->scale * (double)x[i] + (double)row[i]);
    }
}

pgd_err add_positions_ref(const add_positions_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->dim < 1 || args->offset < 0 || args->x_stride < args->dim)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, (int64_t)args->n_rows * args->dim);
    return PGD_OK;
}
