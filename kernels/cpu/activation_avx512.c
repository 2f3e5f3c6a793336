/* Activations on 512-bit registers; the algorithm is in activation_simd.h. */
#include "kernels/cpu/activation_simd.h"

pgd_err activation_avx512(const activation_args *args, kernel_ctx *ctx)
{
    return activation(args, ctx);
}
