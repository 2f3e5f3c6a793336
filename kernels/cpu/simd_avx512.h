/* Vectors of 16 floats: the AVX-512 part of simd.h. Include simd.h instead. */
#ifndef KERNELS_CPU_SIMD_AVX512_H
#define KERNELS_CPU_SIMD_AVX512_H

#include <immintrin.h>

#include "kernels/cpu/simd.h"

#define SIMD_LANES 16

typedef __m512 vf;
typedef __m512i vi;

SIMD_INLINE __mmask16 vf_mask_below(int32_t n)
{
    return (__mmask16)(n >= 16 ? 0xffff : n > 0 ? (1 << n) - 1 : 0);
}

SIMD_INLINE vf vf_zero(void)
{
    return _mm512_setzero_ps();
}

SIMD_INLINE vf vf_set1(float x)
{
    return _mm512_set1_ps(x);
}

SIMD_INLINE vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

/* The first n lanes, the others 0; nothing behind them is touched. */
SIMD_INLINE vf vf_load_n(const float *p, int32_t n)
{
    return _mm512_maskz_loadu_ps(vf_mask_below(n), p);
}

SIMD_INLINE void vf_store(float *p, vf v)
{
    _mm512_storeu_ps(p, v);
}

SIMD_INLINE void vf_store_n(float *p, int32_t n, vf v)
{
    _mm512_mask_storeu_ps(p, vf_mask_below(n), v);
}

SIMD_INLINE vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}

SIMD_INLINE vf vf_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}

SIMD_INLINE vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}

SIMD_INLINE vf vf_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}

/* a b + c */
SIMD_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

/* c - a b */
SIMD_INLINE vf vf_fnma(vf a, vf b, vf c)
{
    return _mm512_fnmadd_ps(a, b, c);
}

/* Even lanes a b - c, odd lanes a b + c. */
SIMD_INLINE vf vf_fmaddsub(vf a, vf b, vf c)
{
    return _mm512_fmaddsub_ps(a, b, c);
}

/* b where a lane of either is a NaN. */
SIMD_INLINE vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

SIMD_INLINE vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}

SIMD_INLINE vf vf_round(vf a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* a 2^n for whole n in [-152, 152]. */
SIMD_INLINE vf vf_scale2(vf a, vf n)
{
    return _mm512_scalef_ps(a, n);
}

/* v in lanes [first, last), other elsewhere. */
SIMD_INLINE vf vf_keep(vf v, int32_t first, int32_t last, vf other)
{
    return _mm512_mask_blend_ps(vf_mask_below(last) & (__mmask16)~vf_mask_below(first), other, v);
}

/* Sum of the lanes in a fixed order. */
SIMD_INLINE float vf_sum(vf a)
{
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

SIMD_INLINE float vf_first(vf a)
{
    return _mm512_cvtss_f32(a);
}

SIMD_INLINE float vf_max_lane(vf a)
{
    return _mm512_reduce_max_ps(a);
}

/* Bit i: lane i of a >= b; false with a NaN. */
SIMD_INLINE uint32_t vf_bits_ge(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
}

SIMD_INLINE uint32_t vf_bits_gt(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}

/* a >= b ? yes : no */
SIMD_INLINE vf vf_if_ge(vf a, vf b, vf yes, vf no)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), no, yes);
}

SIMD_INLINE vf vf_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

SIMD_INLINE vf vf_load_bf16(const uint16_t *p)
{
    __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

SIMD_INLINE void vf_store_f16(uint16_t *p, vf v)
{
    _mm256_storeu_si256((__m256i *)(void *)p,
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* To nearest even; a NaN becomes a quiet one. */
SIMD_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    __m512i x = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, nan, x, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}

/* Lanes 2i and 2i + 1 exchanged. */
SIMD_INLINE vf vf_swap_pairs(vf a)
{
    return _mm512_permute_ps(a, 0xb1);
}

/* Each of the low (high) half's lanes twice. */
SIMD_INLINE vf vf_double_low(vf a)
{
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                                 a);
}

SIMD_INLINE vf vf_double_high(vf a)
{
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), a);
}

/* --- 32-bit integers --- */

SIMD_INLINE vi vi_set1(uint32_t x)
{
    return _mm512_set1_epi32((int32_t)x);
}

SIMD_INLINE vi vi_add(vi a, vi b)
{
    return _mm512_add_epi32(a, b);
}

SIMD_INLINE vi vi_xor(vi a, vi b)
{
    return _mm512_xor_si512(a, b);
}

/* Lane 4 L + k = k SIMD_LANES / 4 + L: vi_unpack4 then yields ascending order. */
SIMD_INLINE vi vi_unpack_order(void)
{
    return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}

/* High and low halves of the 64-bit products of unsigned lanes. */
SIMD_INLINE void vi_mul_wide(vi *high, vi *low, vi a, vi b)
{
    __m512i even = _mm512_mul_epu32(a, b);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b); /* b has equal lanes */
    *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}

/* w[j], lane c = word j of group c (groups in vi_unpack_order) -> all words, group by group. */
SIMD_INLINE void vi_unpack4(vi w[4])
{
    __m512i a = _mm512_unpacklo_epi32(w[0], w[1]), b = _mm512_unpacklo_epi32(w[2], w[3]);
    __m512i c = _mm512_unpackhi_epi32(w[0], w[1]), d = _mm512_unpackhi_epi32(w[2], w[3]);
    w[0] = _mm512_unpacklo_epi64(a, b);
    w[1] = _mm512_unpackhi_epi64(a, b);
    w[2] = _mm512_unpacklo_epi64(c, d);
    w[3] = _mm512_unpackhi_epi64(c, d);
}

SIMD_INLINE vf vf_from_u32(vi a)
{
    return _mm512_cvtepu32_ps(a);
}

/* Exponent and mantissa of positive normal values: a = m 2^e, m in [1, 2). */
SIMD_INLINE vf vf_exponent(vf a)
{
    return _mm512_getexp_ps(a);
}

SIMD_INLINE vf vf_mantissa(vf a)
{
    return _mm512_getmant_ps(a, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
}

#endif
