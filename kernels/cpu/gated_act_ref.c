/* Gated activation in double: the oracle, and the path of last resort. */
#include "kernels/gated_act.h"

#include <math.h>

#include "kernels/cpu/cpu_split.h"

/* A NaN stays one, unlike with fmin. */
static double min(double a, double b)
{
    return b < a ? b : a;
}

static double activate(double g, double up, const gated_act_args *a)
{
    if (a->kind == GATED_ACT_SILU)
        return g / (1 + exp(-g)) * up;
    if (a->kind == GATED_ACT_CLAMPED) {
        g = min(g, a->limit);
        up = -min(-min(up, a->limit), a->limit);
        return g / (1 + exp(-a->alpha * g)) * (up + 1);
    }
    return g / (1 + exp(-2 * sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * up;
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const gated_act_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        const float *gate = a->gate + t * a->in_stride;
        const float *up = a->up + t * a->in_stride;
        float *out = a->out + t * a->out_stride;
        for (int32_t i = 0; i < a->dim; i++)
            out[i] = (float)activate(gate[i], up[i], a);
    }
}

pgd_err gated_act_ref(const gated_act_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->dim < 1 || args->in_stride < args->dim ||
        args->out_stride < args->dim || !(args->limit >= 0))
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, (int64_t)args->n_rows * args->dim);
    return PGD_OK;
}
