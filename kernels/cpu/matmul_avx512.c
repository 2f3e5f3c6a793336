/* Matrix products with AVX-512 (F, BW, DQ, VL): f32, f16, bf16 weights, and int8 without VNNI.
 *
 * Float tiles are R rows x one panel (two registers), lane i = output row i of the half, one fma
 * per k in K order. K is cut in chunks (matmul__k_chunk, a function of n_in alone); each chunk is
 * summed from zero and added to the total, so that rounding errors stay small and a chunk of a panel
 * fits in the second-level cache. With many rows f16 and bf16 panels are converted once per chunk;
 * the values, hence the sums, are those of the direct path.
 */
#define MATMUL_VNNI 0
#include "kernels/cpu/matmul_quant_avx512.h"

#define FLOAT_ROWS    12
#define CONVERT_TILES 3 /* from so many row tiles on, panels are converted first */

void matmul__avx512_quantize(matmul_x_unit *out, const float *x, int32_t n_units)
{
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    for (int32_t b = 0; b < n_units; b++, x += MATMUL_UNIT, out++) {
        __m512 x0 = _mm512_loadu_ps(x);
        __m512 x1 = _mm512_loadu_ps(x + 16);
        /* The largest magnitude by bits: a NaN counts as larger than all and reaches the output. */
        __m512i bits = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(x0), no_sign),
                                        _mm512_and_si512(_mm512_castps_si512(x1), no_sign));
        int32_t max_bits = _mm512_reduce_max_epi32(bits);
        float max;
        memcpy(&max, &max_bits, sizeof(max));
        float d = max < 0x1p-100f ? 0.0f : max / 127.0f;
        __m512 inverse = _mm512_set1_ps(d == 0.0f ? 0.0f : 1.0f / d);
        __m128i q0 = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x0, inverse)));
        __m128i q1 = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x1, inverse)));
        _mm_storeu_si128((__m128i *)(void *)out->q, q0);
        _mm_storeu_si128((__m128i *)(void *)(out->q + 16), q1);
        /* psadbw adds 8 unsigned bytes: q + 128, so each half of 16 is 2048 too large. */
        const __m128i offset = _mm_set1_epi8(-128);
        __m128i sum0 = _mm_sad_epu8(_mm_xor_si128(q0, offset), _mm_setzero_si128());
        __m128i sum1 = _mm_sad_epu8(_mm_xor_si128(q1, offset), _mm_setzero_si128());
        int32_t first = _mm_cvtsi128_si32(sum0) + _mm_extract_epi16(sum0, 4) - 2048;
        int32_t second = _mm_cvtsi128_si32(sum1) + _mm_extract_epi16(sum1, 4) - 2048;
        out->d = d;
        out->d_sum = d * (float)(first + second);
        out->neg_sum = -(first + second);
        out->neg_sum_first = -first;
    }
}

/* One tile over one K chunk. */
typedef struct float_tile {
    const uint8_t *w; /* the panel, at the chunk */
    const float *x;   /* [n_k][R] */
    int32_t n_k;
    bool is_first;
    bool is_last;
    float *total; /* [R][32], between chunks */
    const matmul_span *span;
    int32_t panel;
    int32_t row;
} float_tile;

typedef void (*float_tile_fn)(const float_tile *tile);

/* Half c of the 32 values at k. */
MATMUL_INLINE __m512 load_values(const uint8_t *w, dtype type, int32_t k, int c)
{
    size_t i = (size_t)k * MATMUL_PANEL + 16 * (size_t)c;
    if (type == DTYPE_F32)
        return _mm512_load_ps((const float *)(const void *)w + i);
    __m256i half = _mm256_load_si256((const __m256i *)(const void *)(w + 2 * i));
    if (type == DTYPE_F16)
        return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

MATMUL_INLINE void compute_float(const float_tile *tile, dtype type, const int R)
{
    const int k_bytes = MATMUL_PANEL * (type == DTYPE_F32 ? 4 : 2);
    __m512 acc[FLOAT_ROWS][HALVES];
    const uint8_t *w = tile->w;
    const float *x = tile->x;
    MATMUL_UNROLL
    for (int r = 0; r < R; r++) {
        MATMUL_UNROLL
        for (int c = 0; c < HALVES; c++)
            acc[r][c] = _mm512_setzero_ps();
    }
    for (int32_t k = 0; k < tile->n_k; k++, x += R, w += k_bytes) {
        __m512 v[HALVES];
        MATMUL_UNROLL
        for (int c = 0; c < HALVES; c++)
            v[c] = load_values(w, type, 0, c);
        if (R <= 2 && tile->span->prefetch) {
            MATMUL_UNROLL
            for (int i = 0; i < k_bytes; i += 64)
                _mm_prefetch((const char *)w + MATMUL_STREAM_AHEAD + i, _MM_HINT_T0);
        }
        MATMUL_UNROLL
        for (int r = 0; r < R; r++) {
            __m512 xr = _mm512_set1_ps(x[r]);
            MATMUL_UNROLL
            for (int c = 0; c < HALVES; c++)
                acc[r][c] = _mm512_fmadd_ps(xr, v[c], acc[r][c]);
        }
    }
    MATMUL_UNROLL
    for (int c = 0; c < HALVES; c++) {
        int32_t n = tile->panel * MATMUL_PANEL + 16 * c;
        __mmask16 mask = lanes_below(tile->span->n_out - n);
        MATMUL_UNROLL
        for (int r = 0; r < R; r++) {
            float *total = tile->total + r * MATMUL_PANEL + 16 * c;
            __m512 sum = acc[r][c];
            if (!tile->is_first)
                sum = _mm512_add_ps(_mm512_load_ps(total), sum);
            if (tile->is_last)
                store_lanes(tile->span, tile->row + r, n, mask, sum);
            else
                _mm512_store_ps(total, sum);
        }
    }
}

#define FLOAT_TILE(T, R)                                \
    static void float_##T##_##R(const float_tile *tile) \
    {                                                   \
        compute_float(tile, DTYPE_##T, R);              \
    }
#define FLOAT_TYPE(T)                                                 \
    FLOAT_TILE(T, 1)                                                  \
    FLOAT_TILE(T, 2)                                                  \
    FLOAT_TILE(T, 3)                                                  \
    FLOAT_TILE(T, 4)                                                  \
    FLOAT_TILE(T, 5)                                                  \
    FLOAT_TILE(T, 6)                                                  \
    FLOAT_TILE(T, 7)                                                  \
    FLOAT_TILE(T, 8)                                                  \
    FLOAT_TILE(T, 9)                                                  \
    FLOAT_TILE(T, 10)                                                 \
    FLOAT_TILE(T, 11)                                                 \
    FLOAT_TILE(T, 12)                                                 \
    static const float_tile_fn tiles_f##T[FLOAT_ROWS] = {             \
        float_##T##_1, float_##T##_2,  float_##T##_3,  float_##T##_4, \
        float_##T##_5, float_##T##_6,  float_##T##_7,  float_##T##_8, \
        float_##T##_9, float_##T##_10, float_##T##_11, float_##T##_12};

FLOAT_TYPE(F32)
FLOAT_TYPE(F16)
FLOAT_TYPE(BF16)

/* [R - 1] */
static const float_tile_fn *get_float_tiles(dtype type)
{
    if (type == DTYPE_F32)
        return tiles_fF32;
    return type == DTYPE_F16 ? tiles_fF16 : tiles_fBF16;
}

static void convert_chunk(float *dst, const uint8_t *w, int32_t n_k, dtype type)
{
    for (int32_t k = 0; k < n_k; k++, dst += MATMUL_PANEL) {
        _mm512_store_ps(dst, load_values(w, type, k, 0));
        _mm512_store_ps(dst + 16, load_values(w, type, k, 1));
    }
}

static void float_panel(const matmul_span *span, int32_t panel, int32_t tile_first,
                        int32_t tile_last, float *scratch)
{
    const int32_t k_chunk = matmul__k_chunk(span->n_in);
    const size_t k_bytes = MATMUL_PANEL * (span->type == DTYPE_F32 ? 4u : 2u);
    const int32_t first_row = matmul__tile_row(span, tile_first);
    float *totals = scratch + MATMUL_PANEL * MATMUL_MAX_K_CHUNK;
    float_tile tile = {.span = span, .panel = panel, .is_first = true};
    for (int32_t k = 0; !tile.is_last; k += k_chunk, tile.is_first = false) {
        dtype type = span->type;
        tile.n_k = PGD_MIN(k_chunk, span->n_in - k);
        tile.is_last = k + tile.n_k == span->n_in;
        tile.w = span->w + (size_t)panel * span->panel_bytes + (size_t)k * k_bytes;
        if (type != DTYPE_F32 && tile_last - tile_first >= CONVERT_TILES) {
            convert_chunk(scratch, tile.w, tile.n_k, type);
            tile.w = (const uint8_t *)scratch;
            type = DTYPE_F32;
        }
        const float_tile_fn *tiles = get_float_tiles(type);
        for (int32_t t = tile_first; t < tile_last; t++) {
            tile.row = matmul__tile_row(span, t);
            int32_t n_rows = matmul__tile_row(span, t + 1) - tile.row;
            tile.x = span->x_f + (size_t)tile.row * (size_t)span->n_in + (size_t)k * (size_t)n_rows;
            tile.total = totals + (tile.row - first_row) * MATMUL_PANEL;
            tiles[n_rows - 1](&tile);
        }
    }
}

void matmul__avx512_float_panels(const matmul_span *span, int32_t panel_first, int32_t panel_last,
                                 int32_t tile_first, int32_t tile_last, float *scratch)
{
    for (int32_t panel = panel_first; panel < panel_last; panel++)
        float_panel(span, panel, tile_first, tile_last, scratch);
}

MATMUL_IMPL(matmul__avx512, matmul__avx512_quantize, quant_panels, matmul__avx512_float_panels, 4,
            FLOAT_ROWS)
