/* Matrix products with AVX-512 VNNI: vpdpbusd for quantized weights.
 *
 * f32, f16 and bf16 weights and the quantization of activations are the AVX-512 level's.
 */
#define MATMUL_VNNI 1
#include "kernels/cpu/matmul_quant_avx512.h"

MATMUL_IMPL(matmul__avx512vnni, matmul__avx512_quantize, quant_panels, matmul__avx512_float_panels,
            QUANT_ROWS_MAX, 12)
