/* The sum over a row's experts on 256-bit registers; the algorithm is in moe_simd.h. */
#include "kernels/cpu/moe_simd.h"

pgd_err moe_combine_avx2(const moe_combine_args *args, kernel_ctx *ctx)
{
    return moe_combine(args, ctx);
}
