/* Row gather. Conversion is dtype's own, exact, so that this is the only CPU version: a step
 * gathers a few rows, and each row is read from memory once whatever the code. */
#include "kernels/embed.h"

#include "kernels/cpu/cpu_split.h"

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const embed_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        const uint8_t *row = (const uint8_t *)a->table + (int64_t)a->ids[t] * a->row_bytes;
        dtype_dequantize_row(a->out + t * a->out_stride, row, a->dim, a->type);
    }
}

pgd_err embed_ref(const embed_args *args, kernel_ctx *ctx)
{
    const dtype_info *info = dtype_get_info(args->type);
    if (!info || !info->is_weight || args->n_rows < 0 || args->dim < 1 ||
        args->dim % info->block_elems != 0 || args->out_stride < args->dim)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, (int64_t)args->n_rows * args->dim);
    return PGD_OK;
}
