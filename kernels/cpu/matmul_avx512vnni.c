/* Matrix products with AVX-512 VNNI: vpdpbusd for quantized weights; f32, f16 and bf16 are the
 * AVX-512 level's. */
#define MATMUL_VNNI 1
#include "kernels/cpu/matmul_quant_avx512.h"

static const matmul_isa isa = {
    .quantize = matmul__avx512_quantize,
    .quant_panels = quant_panels,
    .float_panels = matmul__avx512_float_panels,
    .quant_rows = QUANT_ROWS_MAX,
    .float_rows = 12,
};

static pgd_err run(const matmul_args *args, kernel_ctx *ctx)
{
    return matmul__run(args, ctx, &isa);
}

const matmul_impl matmul__avx512vnni = {
    .packed_bytes = matmul__packed_bytes,
    .pack = matmul__pack,
    .pack_rows = MATMUL_PANEL,
    .run = run,
    .workspace_bytes = matmul__workspace_bytes,
};
