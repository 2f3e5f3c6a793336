/* Soft cap of logits in double: the oracle, and the path of last resort. */
#include "kernels/soft_cap.h"

#include <math.h>

#include "kernels/cpu/cpu_split.h"

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const soft_cap_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n, thread_idx, n_threads);
    for (int64_t i = first; i < last; i++)
        a->x[i] = (float)(a->cap * tanh((double)a->x[i] / a->cap));
}

pgd_err soft_cap_ref(const soft_cap_args *args, kernel_ctx *ctx)
{
    if (args->n < 0 || !(args->cap > 0))
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, 16 * args->n);
    return PGD_OK;
}
