/* Activations over float vectors (simd.h). */
#ifndef KERNELS_CPU_ACTIVATION_SIMD_H
#define KERNELS_CPU_ACTIVATION_SIMD_H

#include "kernels/activation.h"
#include "kernels/cpu/cpu_split.h"
#include "kernels/cpu/simd.h"

#if defined(SIMD_LANES)

/* x / (1 + e^y): e^y is infinity for a large y, which gives 0 of x's sign. */
SIMD_INLINE vf logistic(vf x, vf y)
{
    return vf_div(x, vf_add(vf_exp(y), vf_set1(1.0f)));
}

/* x Phi(x). With z = |x| / sqrt 2 and t = 1 / (1 + 0.4 z), erfc z = e^(-z^2) t p(t), p interpolated
 * at Chebyshev nodes in (0, 1] (relative error 3e-7); Phi(x) is erfc(z) / 2 or what it leaves
 * of 1. */
SIMD_INLINE vf gelu(vf x)
{
    vf z = vf_mul(vf_max(x, vf_sub(vf_zero(), x)), vf_set1(0x1.6a09e6p-1f));
    vf t = vf_div(vf_set1(1.0f), vf_fma(z, vf_set1(0.4f), vf_set1(1.0f)));
    vf p = vf_set1(0x1.a4a162p-5f);
    p = vf_fma(p, t, vf_set1(-0x1.7fa484p-3f));
    p = vf_fma(p, t, vf_set1(0x1.69530cp-3f));
    p = vf_fma(p, t, vf_set1(-0x1.87f4f2p-7f));
    p = vf_fma(p, t, vf_set1(0x1.27e5d4p-3f));
    p = vf_fma(p, t, vf_set1(0x1.578b5ep-3f));
    p = vf_fma(p, t, vf_set1(0x1.a9dee4p-3f));
    p = vf_fma(p, t, vf_set1(0x1.ce2942p-3f));
    p = vf_fma(p, t, vf_set1(0x1.ce2f2ap-3f));
    vf e = vf_exp(vf_mul(vf_sub(vf_zero(), z), z));
    vf tail = vf_mul(vf_mul(vf_mul(p, t), e), vf_set1(0.5f));
    return vf_mul(x, vf_if_ge(x, vf_zero(), vf_sub(vf_set1(1.0f), tail), tail));
}

SIMD_INLINE vf activate(vf x, activation_kind kind)
{
    vf cubic;
    switch (kind) {
    case ACTIVATION_GELU:
        return gelu(x);
    case ACTIVATION_GELU_TANH:
        /* (1 + tanh u) / 2 = 1 / (1 + e^-2u); the constant is -2 sqrt(2 / pi). */
        cubic = vf_fma(vf_mul(vf_mul(x, x), vf_set1(0.044715f)), x, x);
        return logistic(x, vf_mul(cubic, vf_set1(-0x1.988454p+0f)));
    case ACTIVATION_RELU:
        return vf_max(vf_zero(), x); /* the second operand when one is a NaN */
    default:
        return logistic(x, vf_sub(vf_zero(), x));
    }
}

SIMD_INLINE void activate_row(float *out, const float *x, int32_t dim, activation_kind kind)
{
    int32_t i = 0;
    for (; i + SIMD_LANES <= dim; i += SIMD_LANES)
        vf_store(out + i, activate(vf_load(x + i), kind));
    if (i < dim)
        vf_store_n(out + i, dim - i, activate(vf_load_n(x + i, dim - i), kind));
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const activation_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        float *out = a->out + t * a->out_stride;
        const float *x = a->x + t * a->x_stride;
        switch (a->kind) {
        case ACTIVATION_GELU:
            activate_row(out, x, a->dim, ACTIVATION_GELU);
            break;
        case ACTIVATION_GELU_TANH:
            activate_row(out, x, a->dim, ACTIVATION_GELU_TANH);
            break;
        case ACTIVATION_RELU:
            activate_row(out, x, a->dim, ACTIVATION_RELU);
            break;
        case ACTIVATION_SILU:
            activate_row(out, x, a->dim, ACTIVATION_SILU);
            break;
        }
    }
}

static pgd_err activation(const activation_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->dim < 1 || args->x_stride < args->dim ||
        args->out_stride < args->dim || (unsigned)args->kind > ACTIVATION_SILU)
        return PGD_EINVAL;
    /* An exponential and a division weigh about four moves. */
    cpu_split_run(ctx, run, (void *)args, 4 * (int64_t)args->n_rows * args->dim);
    return PGD_OK;
}

#endif
#endif
