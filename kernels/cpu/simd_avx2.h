/* Vectors of 8 floats: the AVX2 part of simd.h. Include simd.h instead. */
#ifndef KERNELS_CPU_SIMD_AVX2_H
#define KERNELS_CPU_SIMD_AVX2_H

#include <immintrin.h>

#include "kernels/cpu/simd.h"

#define SIMD_LANES 8

typedef __m256 vf;
typedef __m256i vi;

/* All bits set in lanes i < n. */
SIMD_INLINE __m256i vf_mask_below(int32_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

SIMD_INLINE vf vf_zero(void)
{
    return _mm256_setzero_ps();
}

SIMD_INLINE vf vf_set1(float x)
{
    return _mm256_set1_ps(x);
}

SIMD_INLINE vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

/* The first n lanes, the others 0; nothing behind them is touched. */
SIMD_INLINE vf vf_load_n(const float *p, int32_t n)
{
    return _mm256_maskload_ps(p, vf_mask_below(n));
}

SIMD_INLINE void vf_store(float *p, vf v)
{
    _mm256_storeu_ps(p, v);
}

SIMD_INLINE void vf_store_n(float *p, int32_t n, vf v)
{
    _mm256_maskstore_ps(p, vf_mask_below(n), v);
}

SIMD_INLINE vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}

SIMD_INLINE vf vf_sub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}

SIMD_INLINE vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}

SIMD_INLINE vf vf_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}

/* a b + c */
SIMD_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

/* c - a b */
SIMD_INLINE vf vf_fnma(vf a, vf b, vf c)
{
    return _mm256_fnmadd_ps(a, b, c);
}

/* Even lanes a b - c, odd lanes a b + c. */
SIMD_INLINE vf vf_fmaddsub(vf a, vf b, vf c)
{
    return _mm256_fmaddsub_ps(a, b, c);
}

/* b where a lane of either is a NaN. */
SIMD_INLINE vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

SIMD_INLINE vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}

SIMD_INLINE vf vf_round(vf a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* a 2^n for whole n in [-152, 152]: two factors, since one would leave the exponent's range. */
SIMD_INLINE vf vf_scale2(vf a, vf n)
{
    __m256i whole = _mm256_cvtps_epi32(n);
    __m256i half = _mm256_srai_epi32(whole, 1);
    __m256i rest = _mm256_sub_epi32(whole, half);
    const __m256i bias = _mm256_set1_epi32(127);
    __m256 f0 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    __m256 f1 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(a, f0), f1);
}

/* v in lanes [first, last), other elsewhere. */
SIMD_INLINE vf vf_keep(vf v, int32_t first, int32_t last, vf other)
{
    __m256i in = _mm256_andnot_si256(vf_mask_below(first), vf_mask_below(last));
    return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(in));
}

/* Sum of the lanes in a fixed order. */
SIMD_INLINE float vf_sum(vf a)
{
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

SIMD_INLINE float vf_first(vf a)
{
    return _mm256_cvtss_f32(a);
}

SIMD_INLINE float vf_max_lane(vf a)
{
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

/* Bit i: lane i of a >= b; false with a NaN. */
SIMD_INLINE uint32_t vf_bits_ge(vf a, vf b)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ));
}

SIMD_INLINE uint32_t vf_bits_gt(vf a, vf b)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ));
}

/* a >= b ? yes : no */
SIMD_INLINE vf vf_if_ge(vf a, vf b, vf yes, vf no)
{
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GE_OQ));
}

SIMD_INLINE vf vf_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}

SIMD_INLINE vf vf_load_bf16(const uint16_t *p)
{
    __m128i half = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

SIMD_INLINE void vf_store_f16(uint16_t *p, vf v)
{
    _mm_storeu_si128((__m128i *)(void *)p,
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* To nearest even; a NaN becomes a quiet one. */
SIMD_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    __m256i x = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(x, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    up = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
    up = _mm256_permute4x64_epi64(_mm256_packus_epi32(up, up), 0x08);
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_castsi256_si128(up));
}

/* Lanes 2i and 2i + 1 exchanged. */
SIMD_INLINE vf vf_swap_pairs(vf a)
{
    return _mm256_permute_ps(a, 0xb1);
}

/* Each of the low (high) half's lanes twice. */
SIMD_INLINE vf vf_double_low(vf a)
{
    return _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}

SIMD_INLINE vf vf_double_high(vf a)
{
    return _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
}

/* --- 32-bit integers --- */

SIMD_INLINE vi vi_set1(uint32_t x)
{
    return _mm256_set1_epi32((int32_t)x);
}

SIMD_INLINE vi vi_add(vi a, vi b)
{
    return _mm256_add_epi32(a, b);
}

SIMD_INLINE vi vi_xor(vi a, vi b)
{
    return _mm256_xor_si256(a, b);
}

/* Lane 4 L + k = k SIMD_LANES / 4 + L: vi_unpack4 then yields ascending order. */
SIMD_INLINE vi vi_unpack_order(void)
{
    return _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
}

/* High and low halves of the 64-bit products of unsigned lanes. */
SIMD_INLINE void vi_mul_wide(vi *high, vi *low, vi a, vi b)
{
    __m256i even = _mm256_mul_epu32(a, b);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b); /* b has equal lanes */
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}

/* w[j], lane c = word j of group c (groups in vi_unpack_order) -> all words, group by group. */
SIMD_INLINE void vi_unpack4(vi w[4])
{
    __m256i a = _mm256_unpacklo_epi32(w[0], w[1]), b = _mm256_unpacklo_epi32(w[2], w[3]);
    __m256i c = _mm256_unpackhi_epi32(w[0], w[1]), d = _mm256_unpackhi_epi32(w[2], w[3]);
    w[0] = _mm256_unpacklo_epi64(a, b);
    w[1] = _mm256_unpackhi_epi64(a, b);
    w[2] = _mm256_unpacklo_epi64(c, d);
    w[3] = _mm256_unpackhi_epi64(c, d);
}

SIMD_INLINE vf vf_from_u32(vi a)
{
    __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(a, 16));
    __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(0xffff)));
    return _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low);
}

/* Exponent and mantissa of positive normal values: a = m 2^e, m in [1, 2). */
SIMD_INLINE vf vf_exponent(vf a)
{
    __m256i e = _mm256_srli_epi32(_mm256_castps_si256(a), 23);
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(e, _mm256_set1_epi32(127)));
}

SIMD_INLINE vf vf_mantissa(vf a)
{
    __m256i m = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffff));
    return _mm256_castsi256_ps(_mm256_or_si256(m, _mm256_set1_epi32(0x3f800000)));
}

#endif
