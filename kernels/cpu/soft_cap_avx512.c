/* Soft cap of logits on 512-bit registers; the algorithm is in soft_cap_simd.h. */
#include "kernels/cpu/soft_cap_simd.h"

pgd_err soft_cap_avx512(const soft_cap_args *args, kernel_ctx *ctx)
{
    return soft_cap(args, ctx);
}
