/* Rotary position embedding on 512-bit registers; the algorithm is in rope_simd.h. */
#include "kernels/cpu/rope_simd.h"

pgd_err rope_avx512(const rope_args *args, kernel_ctx *ctx)
{
    return rope(args, ctx);
}
