/* Gated activation on 256-bit registers; the algorithm is in gated_act_simd.h. */
#include "kernels/cpu/gated_act_simd.h"

pgd_err gated_act_avx2(const gated_act_args *args, kernel_ctx *ctx)
{
    return gated_act(args, ctx);
}
