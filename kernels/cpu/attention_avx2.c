/* Paged attention on 256-bit registers; the algorithm is in attention_simd.h. */
#include "kernels/cpu/attention_simd.h"

pgd_err attention_avx2(const attention_args *args, kernel_ctx *ctx)
{
    static const attention_isa isa = {.run = run_unit};
    return attention__run(args, ctx, &isa);
}
