/* Storing K and V on 512-bit registers; the algorithm is in kv_write_simd.h. */
#include "kernels/cpu/kv_write_simd.h"

pgd_err kv_write_avx512(const kv_write_args *args, kernel_ctx *ctx)
{
    return kv_write(args, ctx);
}
