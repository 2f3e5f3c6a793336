/* Gated activation on 256-bit registers; the algorithm is in silu_mul_simd.h. */
#include "kernels/cpu/silu_mul_simd.h"

pgd_err silu_mul_avx2(const silu_mul_args *args, kernel_ctx *ctx)
{
    return silu_mul(args, ctx);
}
