/* Layer normalisation on 256-bit registers; the algorithm is in layernorm_simd.h. */
#include "kernels/cpu/layernorm_simd.h"

pgd_err layernorm_avx2(const layernorm_args *args, kernel_ctx *ctx)
{
    return layernorm(args, ctx);
}
