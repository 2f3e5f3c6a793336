/* Float vectors for the op families other than matmul, at the width that the including file is
 * compiled for, and the functions of <math.h> that these families need.
 *
 * A family's algorithm is written once over these in <family>_simd.h; <family>_avx2.c and
 * <family>_avx512.c include it under their own compiler flags. Without such flags SIMD_LANES is
 * undefined and those headers are empty. A result depends on its own lane only, so that neither
 * ragged ends nor neighbours change bits; between levels results may differ.
 *
 * Thread:  any; FTZ and DAZ are expected to be set: tiny exponentials are then zero
 */
#ifndef KERNELS_CPU_SIMD_H
#define KERNELS_CPU_SIMD_H

#include <stdint.h>

#define SIMD_INLINE static inline __attribute__((always_inline))
#define SIMD_UNROLL _Pragma("GCC unroll 8")

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#    include "kernels/cpu/simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#    include "kernels/cpu/simd_avx2.h"
#endif

#if defined(SIMD_LANES)
/* e^x to about one unit in the last place; 0 from -105 down, infinity from 89 up, NaN stays NaN.
 *
 * x = n ln 2 + r, |r| <= ln 2 / 2; e^r = 1 + r + r^2 p(r), p interpolated at Chebyshev nodes
 * (relative error 1.1e-8). e^0 is exactly 1. */
SIMD_INLINE vf vf_exp(vf x)
{
    x = vf_max(vf_set1(-105.0f), x); /* the second operand when one is a NaN */
    x = vf_min(vf_set1(105.0f), x);
    vf n = vf_round(vf_mul(x, vf_set1(0x1.715476p+0f)));
    vf r = vf_fnma(n, vf_set1(0x1.62e400p-1f), x); /* ln 2 in two parts, the first of few bits */
    r = vf_fnma(n, vf_set1(0x1.7f7d1cp-20f), r);
    vf p = vf_set1(0x1.6d117cp-10f);
    p = vf_fma(p, r, vf_set1(0x1.120be2p-7f));
    p = vf_fma(p, r, vf_set1(0x1.555518p-5f));
    p = vf_fma(p, r, vf_set1(0x1.5554dcp-3f));
    p = vf_fma(p, r, vf_set1(0.5f));
    p = vf_fma(vf_mul(r, r), p, r);
    return vf_scale2(vf_add(p, vf_set1(1.0f)), n);
}

/* 2^x to about one unit in the last place, for x <= 127; 0 from -150 down, NaN stays NaN.
 *
 * x = n + r, |r| <= 1/2; 2^r = 1 + r p(r), p interpolated at Chebyshev nodes (relative error
 * 9.2e-9). 2^0 is exactly 1. */
SIMD_INLINE vf vf_exp2(vf x)
{
    x = vf_max(vf_set1(-150.0f), x);
    vf n = vf_round(x), r = vf_sub(x, n);
    vf p = vf_set1(0x1.44138ap-13f);
    p = vf_fma(p, r, vf_set1(0x1.5f0890p-10f));
    p = vf_fma(p, r, vf_set1(0x1.3b2a54p-7f));
    p = vf_fma(p, r, vf_set1(0x1.c6af6cp-5f));
    p = vf_fma(p, r, vf_set1(0x1.ebfbe0p-3f));
    p = vf_fma(p, r, vf_set1(0x1.62e430p-1f));
    return vf_scale2(vf_fma(p, r, vf_set1(1.0f)), n);
}

/* tanh x to 2e-7 absolute: 1 - 2 / (e^2x + 1). */
SIMD_INLINE vf vf_tanh(vf x)
{
    vf e = vf_exp(vf_add(x, x));
    return vf_sub(vf_set1(1.0f), vf_div(vf_set1(2.0f), vf_add(e, vf_set1(1.0f))));
}
#endif

#endif
