/* Sampling on 256-bit registers; the algorithm is in sample_simd.h. */
#include "kernels/cpu/sample_simd.h"

pgd_err sample_avx2(const sample_args *args, kernel_ctx *ctx)
{
    return sample__run(args, ctx, sample_one);
}
