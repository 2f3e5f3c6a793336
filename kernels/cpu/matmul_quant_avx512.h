/* Tiles of the int8 path on 512-bit registers, included by matmul_avx512.c and matmul_avx512vnni.c.
 *
 * MATMUL_VNNI (0 or 1) chooses how 4 products of unsigned weight and signed activation become an
 * int32; both are exact. A tile is R rows x one panel, whose halves are two registers: 2R float
 * sums, 2R int32 sums of the current unit, two lines of weights. Lane i is row i of the half
 * throughout. Per unit: int32 sum -> float, times the weight's scale, then fma with the
 * activation's scale; that order, and units in K order, is all that an output element sees,
 * whatever R. Six rows fill the registers.
 */
#ifndef KERNELS_CPU_MATMUL_QUANT_AVX512_H
#define KERNELS_CPU_MATMUL_QUANT_AVX512_H

#include <string.h>

#include <immintrin.h>

#include "kernels/cpu/matmul_internal.h"

#define QUANT_ROWS_MAX 6
#define HALVES         2

/* Lanes i with i < n_left. */
MATMUL_INLINE __mmask16 lanes_below(int32_t n_left)
{
    return (__mmask16)(n_left >= 16 ? 0xffff : n_left > 0 ? (1 << n_left) - 1 : 0);
}

/* Outputs n..n+15 of one row: bias, then the old value, are added last. */
MATMUL_INLINE void store_lanes(const matmul_span *span, int32_t row, int32_t n, __mmask16 mask,
                               __m512 v)
{
    if (mask == 0)
        return;
    float *out = span->out + row * span->out_stride + n;
    if (span->bias != NULL)
        v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, span->bias + n));
    if (span->accumulate)
        v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, out));
    _mm512_mask_storeu_ps(out, mask, v);
}

typedef struct tile_sums {
    __m512i v[QUANT_ROWS_MAX][HALVES];
} tile_sums;

MATMUL_INLINE __m512i load_line(const uint8_t *p)
{
    return _mm512_load_si512((const void *)p);
}

MATMUL_INLINE __m512 load_f16(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(const void *)p));
}

MATMUL_INLINE __m512 load_u8(const uint8_t *p)
{
    return _mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)(const void *)p)));
}

MATMUL_INLINE __m512 load_s8(const uint8_t *p)
{
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)(const void *)p)));
}

/* 2^(e - 128) of 16 bytes e; zero for the two lowest, which are below the normal range. */
MATMUL_INLINE __m512 load_e8m0(const uint8_t *p)
{
    __m512i e = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)(const void *)p));
    const __m512i one = _mm512_set1_epi32(1);
    e = _mm512_sub_epi32(_mm512_max_epi32(e, one), one);
    return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}

/* Activations 4g..4g+3 in every lane. */
MATMUL_INLINE __m512i broadcast_x(const matmul_x_unit *x, int g)
{
    int32_t four;
    memcpy(&four, x->q + 4 * g, sizeof(four));
    return _mm512_set1_epi32(four);
}

/* K group g of a unit's half as unsigned bytes; lines: the half's first line. */
MATMUL_INLINE __m512i load_weights(const uint8_t *lines, dtype type, int g)
{
    if (!matmul__is_4bit(type))
        return load_line(lines + g * 128);
    __m512i raw = load_line(lines + (g & 3) * 128);
    if (g >= 4)
        raw = _mm512_srli_epi16(raw, 4);
    raw = _mm512_and_si512(raw, _mm512_set1_epi8(0x0f));
    if (type == DTYPE_MXFP4)
        raw = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(MATMUL_E2M1)), raw);
    return raw;
}

/* What the sum over K groups [g0, g1) starts at: -(offset) * (sum of x). */
MATMUL_INLINE __m512i start_sum(const matmul_x_unit *x, dtype type, int g0, int g1)
{
    int shift = matmul__offset_shift(type);
    if (shift < 0)
        return _mm512_setzero_si512();
    return _mm512_slli_epi32(_mm512_set1_epi32(matmul__neg_sum(x, g0, g1)), (unsigned)shift);
}

#if MATMUL_VNNI

MATMUL_INLINE void dot_groups(tile_sums *sums, const uint8_t *lines, const matmul_x_unit *const *x,
                              int32_t b, dtype type, int g0, int g1, const int R)
{
    MATMUL_UNROLL
    for (int r = 0; r < R; r++) {
        __m512i start = start_sum(x[r] + b, type, g0, g1);
        MATMUL_UNROLL
        for (int c = 0; c < HALVES; c++)
            sums->v[r][c] = start;
    }
    MATMUL_UNROLL
    for (int g = g0; g < g1; g++) {
        __m512i q[HALVES];
        MATMUL_UNROLL
        for (int c = 0; c < HALVES; c++)
            q[c] = load_weights(lines + c * 64, type, g);
        MATMUL_UNROLL
        for (int r = 0; r < R; r++) {
            __m512i four = broadcast_x(x[r] + b, g);
            MATMUL_UNROLL
            for (int c = 0; c < HALVES; c++)
                sums->v[r][c] = _mm512_dpbusd_epi32(sums->v[r][c], q[c], four);
        }
    }
}

#else

/* Q8_0: |w| <= 128 times x with w's sign, so that a pair is at most 32512. */
MATMUL_INLINE void dot_q8(tile_sums *sums, const uint8_t *lines, const matmul_x_unit *const *x,
                          int32_t b, const int R)
{
    const __m512i ones = _mm512_set1_epi16(1);
    MATMUL_UNROLL
    for (int r = 0; r < R; r++) {
        MATMUL_UNROLL
        for (int c = 0; c < HALVES; c++)
            sums->v[r][c] = _mm512_setzero_si512();
    }
    MATMUL_UNROLL
    for (int g = 0; g < 8; g++) {
        MATMUL_UNROLL
        for (int c = 0; c < HALVES; c++) {
            __m512i q =
                _mm512_xor_si512(load_line(lines + g * 128 + c * 64), _mm512_set1_epi8(-128));
            __mmask64 negative = _mm512_movepi8_mask(q);
            __m512i magnitude = _mm512_abs_epi8(q);
            MATMUL_UNROLL
            for (int r = 0; r < R; r++) {
                __m512i four = broadcast_x(x[r] + b, g);
                four = _mm512_mask_sub_epi8(four, negative, _mm512_setzero_si512(), four);
                __m512i pairs = _mm512_maddubs_epi16(magnitude, four);
                sums->v[r][c] = _mm512_add_epi32(sums->v[r][c], _mm512_madd_epi16(pairs, ones));
            }
        }
    }
}

MATMUL_INLINE void dot_groups(tile_sums *sums, const uint8_t *lines, const matmul_x_unit *const *x,
                              int32_t b, dtype type, int g0, int g1, const int R)
{
    if (type == DTYPE_Q8_0) {
        dot_q8(sums, lines, x, b, R);
        return;
    }
    const __m512i ones = _mm512_set1_epi16(1);
    const int step = PGD_MIN(matmul__groups_in_16bit(type), g1 - g0);
    MATMUL_UNROLL
    for (int first = g0; first < g1; first += step) {
        tile_sums pairs;
        MATMUL_UNROLL
        for (int g = first; g < first + step; g++) {
            __m512i q[HALVES];
            MATMUL_UNROLL
            for (int c = 0; c < HALVES; c++)
                q[c] = load_weights(lines + c * 64, type, g);
            MATMUL_UNROLL
            for (int r = 0; r < R; r++) {
                __m512i four = broadcast_x(x[r] + b, g);
                MATMUL_UNROLL
                for (int c = 0; c < HALVES; c++) {
                    __m512i p = _mm512_maddubs_epi16(q[c], four);
                    pairs.v[r][c] = g == first ? p : _mm512_add_epi16(pairs.v[r][c], p);
                }
            }
        }
        MATMUL_UNROLL
        for (int r = 0; r < R; r++) {
            MATMUL_UNROLL
            for (int c = 0; c < HALVES; c++) {
                __m512i sum = first == g0 ? start_sum(x[r] + b, type, g0, g1) : sums->v[r][c];
                sums->v[r][c] = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs.v[r][c], ones));
            }
        }
    }
}

#endif

typedef struct tile_acc {
    __m512 v[QUANT_ROWS_MAX][HALVES];
} tile_acc;

/* acc = x.d * (scale * sum) + acc */
MATMUL_INLINE void add_scaled(tile_acc *acc, const tile_sums *sums, const __m512 *scale,
                              const matmul_x_unit *const *x, int32_t b, const int R)
{
    MATMUL_UNROLL
    for (int r = 0; r < R; r++) {
        __m512 d = _mm512_set1_ps(x[r][b].d);
        MATMUL_UNROLL
        for (int c = 0; c < HALVES; c++) {
            __m512 f = _mm512_mul_ps(_mm512_cvtepi32_ps(sums->v[r][c]), scale[c]);
            acc->v[r][c] = _mm512_fmadd_ps(f, d, acc->v[r][c]);
        }
    }
}

MATMUL_INLINE void add_unit(tile_acc *acc, const uint8_t *w, const matmul_x_unit *const *x,
                            int32_t b, dtype type, const int R)
{
    const matmul_place at = matmul__locate(type, b);
    const bool is_k45 = matmul__is_k45(type);
    const uint8_t *lines = w + at.lines;
    const uint8_t *meta = w + at.meta;
    const uint8_t *super = w + at.super;
    __m512 scale[HALVES];
    tile_sums sums;
    if (type == DTYPE_Q6_K) {
        MATMUL_UNROLL
        for (int part = 0; part < 2; part++) { /* a scale for each 16 K values */
            dot_groups(&sums, lines, x, b, type, 4 * part, 4 * part + 4, R);
            MATMUL_UNROLL
            for (int c = 0; c < HALVES; c++)
                scale[c] = _mm512_mul_ps(load_f16(super + 32 * c),
                                         load_s8(meta + MATMUL_PANEL * part + 16 * c));
            add_scaled(acc, &sums, scale, x, b, R);
        }
        return;
    }
    dot_groups(&sums, lines, x, b, type, 0, 8, R);
    MATMUL_UNROLL
    for (int c = 0; c < HALVES; c++) {
        scale[c] = type == DTYPE_MXFP4 ? load_e8m0(meta + 16 * c)
                                       : load_f16((is_k45 ? super : meta) + 32 * c);
        if (is_k45)
            scale[c] = _mm512_mul_ps(scale[c], load_u8(meta + 16 * c));
    }
    add_scaled(acc, &sums, scale, x, b, R);
    if (!matmul__has_min(type))
        return;
    /* acc += min * (x.d * sum of x.q); the K types subtract theirs */
    MATMUL_UNROLL
    for (int c = 0; c < HALVES; c++) {
        __m512 min = load_f16((is_k45 ? super : meta) + MATMUL_META + 32 * c);
        if (is_k45)
            min = _mm512_mul_ps(min, load_u8(meta + MATMUL_PANEL + 16 * c));
        MATMUL_UNROLL
        for (int r = 0; r < R; r++) {
            __m512 d_sum = _mm512_set1_ps(x[r][b].d_sum);
            acc->v[r][c] = is_k45 ? _mm512_fnmadd_ps(min, d_sum, acc->v[r][c])
                                  : _mm512_fmadd_ps(min, d_sum, acc->v[r][c]);
        }
    }
}

MATMUL_INLINE void quant_tile(const matmul_span *span, int32_t panel, int32_t row, dtype type,
                              const int R)
{
    const int32_t n_units = span->n_in / MATMUL_UNIT;
    const int unit_bytes = (int)matmul__unit_bytes(type);
    const uint8_t *w = span->w + (size_t)panel * span->panel_bytes;
    const matmul_x_unit *x[QUANT_ROWS_MAX];
    tile_acc acc;
    MATMUL_UNROLL
    for (int r = 0; r < R; r++) {
        x[r] = span->x_q + (size_t)(row + r) * (size_t)n_units;
        MATMUL_UNROLL
        for (int c = 0; c < HALVES; c++)
            acc.v[r][c] = _mm512_setzero_ps();
    }
    for (int32_t b = 0; b < n_units; b++) {
        const char *unit = (const char *)w + matmul__locate(type, b).lines;
        if (R > 2) { /* the first of the row tiles fetches the panel, whichever it is */
            MATMUL_UNROLL
            for (int i = 0; i < unit_bytes; i += 64)
                _mm_prefetch(unit + MATMUL_TILE_AHEAD + i, _MM_HINT_T1);
        } else if (span->prefetch) {
            MATMUL_UNROLL
            for (int i = 0; i < unit_bytes; i += 64)
                _mm_prefetch(unit + MATMUL_STREAM_AHEAD + i, _MM_HINT_T0);
        }
        add_unit(&acc, w, x, b, type, R);
    }
    MATMUL_UNROLL
    for (int c = 0; c < HALVES; c++) {
        int32_t n = panel * MATMUL_PANEL + 16 * c;
        __mmask16 mask = lanes_below(span->n_out - n);
        MATMUL_UNROLL
        for (int r = 0; r < R; r++)
            store_lanes(span, row + r, n, mask, acc.v[r][c]);
    }
}

typedef void (*quant_tile_fn)(const matmul_span *span, int32_t panel, int32_t row);

#define QUANT_TILE(T, R)                                                             \
    static void quant_##T##_##R(const matmul_span *span, int32_t panel, int32_t row) \
    {                                                                                \
        quant_tile(span, panel, row, DTYPE_##T, R);                                  \
    }
#define QUANT_TYPE(T)                                        \
    QUANT_TILE(T, 1)                                         \
    QUANT_TILE(T, 2)                                         \
    QUANT_TILE(T, 3)                                         \
    QUANT_TILE(T, 4)                                         \
    QUANT_TILE(T, 5)                                         \
    QUANT_TILE(T, 6)                                         \
    static const quant_tile_fn tiles_##T[QUANT_ROWS_MAX] = { \
        quant_##T##_1, quant_##T##_2, quant_##T##_3, quant_##T##_4, quant_##T##_5, quant_##T##_6};

QUANT_TYPE(Q8_0)
QUANT_TYPE(MXFP4)
QUANT_TYPE(Q4_0)
QUANT_TYPE(Q4_1)
QUANT_TYPE(Q5_0)
QUANT_TYPE(Q5_1)
QUANT_TYPE(Q4_K)
QUANT_TYPE(Q5_K)
QUANT_TYPE(Q6_K)

static const quant_tile_fn *get_quant_tiles(dtype type)
{
    switch (type) {
    case DTYPE_Q8_0:
        return tiles_Q8_0;
    case DTYPE_MXFP4:
        return tiles_MXFP4;
    case DTYPE_Q4_0:
        return tiles_Q4_0;
    case DTYPE_Q4_1:
        return tiles_Q4_1;
    case DTYPE_Q5_0:
        return tiles_Q5_0;
    case DTYPE_Q5_1:
        return tiles_Q5_1;
    case DTYPE_Q4_K:
        return tiles_Q4_K;
    case DTYPE_Q5_K:
        return tiles_Q5_K;
    default:
        return tiles_Q6_K;
    }
}

static void quant_panels(const matmul_span *span, int32_t panel_first, int32_t panel_last,
                         int32_t tile_first, int32_t tile_last)
{
    const quant_tile_fn *tiles = get_quant_tiles(span->type);
    for (int32_t panel = panel_first; panel < panel_last; panel++) {
        for (int32_t t = tile_first; t < tile_last; t++) {
            int32_t row = matmul__tile_row(span, t);
            tiles[matmul__tile_row(span, t + 1) - row - 1](span, panel, row);
        }
    }
}

#endif
