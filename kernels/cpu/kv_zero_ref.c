/* Block zeroing: memory-bound, so that the C library's memset is the fast version too. */
#include "kernels/kv_zero.h"

#include <string.h>

#include "kernels/cpu/cpu_split.h"

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const kv_zero_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_zero, thread_idx, n_threads);
    for (int64_t i = first; i < last; i++)
        memset((uint8_t *)a->pages + (size_t)a->blocks[i] * a->page_bytes, 0, a->page_bytes);
}

pgd_err kv_zero_ref(const kv_zero_args *args, kernel_ctx *ctx)
{
    if (args->n_zero < 0)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, (int64_t)args->n_zero * (int64_t)(args->page_bytes / 16));
    return PGD_OK;
}
