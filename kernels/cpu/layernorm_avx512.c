/* Layer normalisation on 512-bit registers; the algorithm is in layernorm_simd.h. */
#include "kernels/cpu/layernorm_simd.h"

pgd_err layernorm_avx512(const layernorm_args *args, kernel_ctx *ctx)
{
    return layernorm(args, ctx);
}
