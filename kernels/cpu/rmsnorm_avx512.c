/* RMS normalisation on 512-bit registers; the algorithm is in rmsnorm_simd.h. */
#include "kernels/cpu/rmsnorm_simd.h"

pgd_err rmsnorm_avx512(const rmsnorm_args *args, kernel_ctx *ctx)
{
    return rmsnorm(args, ctx);
}
