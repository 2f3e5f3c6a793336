/* Activations in double: the oracle, and the path of last resort. */
#include "kernels/activation.h"

#include <math.h>

#include "kernels/cpu/cpu_split.h"

static double activate(double x, activation_kind kind)
{
    switch (kind) {
    case ACTIVATION_GELU:
        return 0.5 * x * erfc(-x * 0.70710678118654752);
    case ACTIVATION_GELU_TANH:
        /* (1 + tanh u) / 2 = 1 / (1 + exp(-2u)), without cancellation for negative u */
        return x / (1.0 + exp(-2.0 * 0.79788456080286536 * (x + 0.044715 * x * x * x)));
    case ACTIVATION_RELU:
        return x <= 0 ? 0 : x;
    default:
        return x / (1.0 + exp(-x));
    }
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const activation_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        const float *x = a->x + t * a->x_stride;
        float *out = a->out + t * a->out_stride;
        for (int32_t i = 0; i < a->dim; i++)
            out[i] = (float)activate((double)x[i], a->kind);
    }
}

pgd_err activation_ref(const activation_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->dim < 1 || args->x_stride < args->dim ||
        args->out_stride < args->dim || (unsigned)args->kind > ACTIVATION_SILU)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, 4 * (int64_t)args->n_rows * args->dim);
    return PGD_OK;
}
