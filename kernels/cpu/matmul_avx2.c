/* Matrix products with AVX2, FMA and F16C.
 *
 * A panel's 32 output rows are four registers; tiles of more rows take two at a time. Sums are
 * formed exactly as in matmul_quant_avx512.h and matmul_avx512.c (same int32 sums, same float
 * operations in the same order per lane), so all three levels agree bit for bit. pmaddubsw adds two
 * products in 16 bits: for up to 6 bits of weight several lines fit before widening; for Q8_0 the
 * operands are |w| and x with w's sign, at most 2 * 128 * 127.
 */
#include <string.h>

#include <immintrin.h>

#include "kernels/cpu/matmul_internal.h"

#define QUANT_ROWS    3
#define FLOAT_ROWS    6
#define VECS          4 /* registers of a panel */
#define CONVERT_TILES 3 /* from so many row tiles on, f16 and bf16 panels are converted first */

static void quantize(matmul_x_unit *out, const float *x, int32_t n_units)
{
    const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
    for (int32_t b = 0; b < n_units; b++, x += MATMUL_UNIT, out++) {
        __m256 v[4];
        __m256i max8 = _mm256_setzero_si256();
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_loadu_ps(x + 8 * i);
            max8 = _mm256_max_epi32(max8, _mm256_and_si256(_mm256_castps_si256(v[i]), no_sign));
        }
        /* The largest magnitude by bits: a NaN counts as larger than all and reaches the output. */
        __m128i max4 =
            _mm_max_epi32(_mm256_castsi256_si128(max8), _mm256_extracti128_si256(max8, 1));
        max4 = _mm_max_epi32(max4, _mm_shuffle_epi32(max4, 0x4e));
        max4 = _mm_max_epi32(max4, _mm_shuffle_epi32(max4, 0xb1));
        float max = _mm_cvtss_f32(_mm_castsi128_ps(max4));
        float d = max < 0x1p-100f ? 0.0f : max / 127.0f;
        __m256 inverse = _mm256_set1_ps(d == 0.0f ? 0.0f : 1.0f / d);
        __m256i q[4];
        for (int i = 0; i < 4; i++)
            q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        /* Packing works on 128-bit halves: dwords come out in the order 0 2 4 6 1 3 5 7. */
        __m256i bytes =
            _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
        bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)(void *)out->q, bytes);
        /* psadbw adds 8 unsigned bytes: q + 128, so each half of 16 is 2048 too large. */
        __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)),
                                       _mm256_setzero_si256());
        int32_t first = _mm256_extract_epi16(sums, 0) + _mm256_extract_epi16(sums, 4) - 2048;
        int32_t second = _mm256_extract_epi16(sums, 8) + _mm256_extract_epi16(sums, 12) - 2048;
        out->d = d;
        out->d_sum = d * (float)(first + second);
        out->neg_sum = -(first + second);
        out->neg_sum_first = -first;
    }
}

/* v[r][i]: row r of x, register i of those that the tile has. */
typedef struct int_tile {
    __m256i v[QUANT_ROWS][VECS];
} int_tile;

typedef struct float_acc {
    __m256 v[FLOAT_ROWS][VECS];
} float_acc;

MATMUL_INLINE __m256i load_line(const uint8_t *p)
{
    return _mm256_load_si256((const __m256i *)(const void *)p);
}

MATMUL_INLINE __m256 load_f16(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(const void *)p));
}

MATMUL_INLINE __m256 load_u8(const uint8_t *p)
{
    return _mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}

MATMUL_INLINE __m256 load_s8(const uint8_t *p)
{
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}

/* 2^(e - 128) of 8 bytes e; zero for the two lowest, which are below the normal range. */
MATMUL_INLINE __m256 load_e8m0(const uint8_t *p)
{
    __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
    const __m256i one = _mm256_set1_epi32(1);
    e = _mm256_sub_epi32(_mm256_max_epi32(e, one), one);
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}

MATMUL_INLINE __m256i broadcast_x(const matmul_x_unit *x, int g)
{
    int32_t four;
    memcpy(&four, x->q + 4 * g, sizeof(four));
    return _mm256_set1_epi32(four);
}

MATMUL_INLINE __m256i load_weights(const uint8_t *p, dtype type, int g)
{
    if (!matmul__is_4bit(type))
        return load_line(p + g * 128);
    __m256i raw = load_line(p + (g & 3) * 128);
    if (g >= 4)
        raw = _mm256_srli_epi16(raw, 4);
    raw = _mm256_and_si256(raw, _mm256_set1_epi8(0x0f));
    if (type == DTYPE_MXFP4)
        raw = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_setr_epi8(MATMUL_E2M1)), raw);
    return raw;
}

MATMUL_INLINE void dot_q8(int_tile *sums, const uint8_t *lines, const matmul_x_unit *const *x,
                          int32_t b, const int R, const int N)
{
    const __m256i ones = _mm256_set1_epi16(1);
    MATMUL_UNROLL
    for (int g = 0; g < 8; g++) {
        MATMUL_UNROLL
        for (int i = 0; i < N; i++) {
            __m256i q =
                _mm256_xor_si256(load_line(lines + g * 128 + i * 32), _mm256_set1_epi8(-128));
            __m256i magnitude = _mm256_abs_epi8(q);
            MATMUL_UNROLL
            for (int r = 0; r < R; r++) {
                __m256i four = _mm256_sign_epi8(broadcast_x(x[r] + b, g), q);
                __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, four), ones);
                sums->v[r][i] = g == 0 ? sum : _mm256_add_epi32(sums->v[r][i], sum);
            }
        }
    }
}

/* Sums over the lines [g0, g1). */
MATMUL_INLINE void dot_groups(int_tile *sums, const uint8_t *lines, const matmul_x_unit *const *x,
                              int32_t b, dtype type, int g0, int g1, const int R, const int N)
{
    const __m256i ones = _mm256_set1_epi16(1);
    const int shift = matmul__offset_shift(type);
    const int step = PGD_MIN(matmul__groups_in_16bit(type), g1 - g0);
    MATMUL_UNROLL
    for (int first = g0; first < g1; first += step) {
        int_tile pairs;
        MATMUL_UNROLL
        for (int g = first; g < first + step; g++) {
            MATMUL_UNROLL
            for (int i = 0; i < N; i++) {
                __m256i q = load_weights(lines + i * 32, type, g);
                MATMUL_UNROLL
                for (int r = 0; r < R; r++) {
                    __m256i p = _mm256_maddubs_epi16(q, broadcast_x(x[r] + b, g));
                    pairs.v[r][i] = g == first ? p : _mm256_add_epi16(pairs.v[r][i], p);
                }
            }
        }
        MATMUL_UNROLL
        for (int r = 0; r < R; r++) {
            MATMUL_UNROLL
            for (int i = 0; i < N; i++) {
                __m256i sum = _mm256_madd_epi16(pairs.v[r][i], ones);
                if (first != g0)
                    sum = _mm256_add_epi32(sums->v[r][i], sum);
                else if (shift >= 0)
                    sum = _mm256_add_epi32(
                        sum, _mm256_set1_epi32(matmul__neg_sum(x[r] + b, g0, g1) * (1 << shift)));
                sums->v[r][i] = sum;
            }
        }
    }
}

/* acc = x.d * (scale * sum) + acc, for register i */
MATMUL_INLINE void add_scaled(float_acc *acc, const int_tile *sums, __m256 scale,
                              const matmul_x_unit *const *x, int32_t b, const int i, const int R)
{
    MATMUL_UNROLL
    for (int r = 0; r < R; r++) {
        __m256 f = _mm256_mul_ps(_mm256_cvtepi32_ps(sums->v[r][i]), scale);
        acc->v[r][i] = _mm256_fmadd_ps(f, _mm256_set1_ps(x[r][b].d), acc->v[r][i]);
    }
}

/* first: the panel's register that is the tile's register 0 */
MATMUL_INLINE void add_unit(float_acc *acc, const uint8_t *w, const matmul_x_unit *const *x,
                            int32_t b, dtype type, const int R, const int N, int first)
{
    const matmul_place at = matmul__locate(type, b);
    const bool is_k45 = matmul__is_k45(type);
    const uint8_t *lines = w + at.lines + 32 * first;
    const uint8_t *bytes = w + at.meta + 8 * first;
    const uint8_t *halves = w + (matmul__is_k(type) ? at.super : at.meta) + 16 * first;
    int_tile sums;
    if (type == DTYPE_Q6_K) {
        MATMUL_UNROLL
        for (int part = 0; part < 2; part++) { /* a scale for each 16 K values */
            dot_groups(&sums, lines, x, b, type, 4 * part, 4 * part + 4, R, N);
            MATMUL_UNROLL
            for (int i = 0; i < N; i++) {
                __m256 scale = _mm256_mul_ps(load_f16(halves + 16 * i),
                                             load_s8(bytes + MATMUL_PANEL * part + 8 * i));
                add_scaled(acc, &sums, scale, x, b, i, R);
            }
        }
        return;
    }
    if (type == DTYPE_Q8_0)
        dot_q8(&sums, lines, x, b, R, N);
    else
        dot_groups(&sums, lines, x, b, type, 0, 8, R, N);
    MATMUL_UNROLL
    for (int i = 0; i < N; i++) {
        __m256 scale = type == DTYPE_MXFP4 ? load_e8m0(bytes + 8 * i) : load_f16(halves + 16 * i);
        if (is_k45)
            scale = _mm256_mul_ps(scale, load_u8(bytes + 8 * i));
        add_scaled(acc, &sums, scale, x, b, i, R);
        if (!matmul__has_min(type))
            continue;
        /* acc += min * (x.d * sum of x.q); the K types subtract theirs */
        __m256 min = load_f16(halves + MATMUL_META + 16 * i);
        if (is_k45)
            min = _mm256_mul_ps(min, load_u8(bytes + MATMUL_PANEL + 8 * i));
        MATMUL_UNROLL
        for (int r = 0; r < R; r++) {
            __m256 d_sum = _mm256_set1_ps(x[r][b].d_sum);
            acc->v[r][i] = is_k45 ? _mm256_fnmadd_ps(min, d_sum, acc->v[r][i])
                                  : _mm256_fmadd_ps(min, d_sum, acc->v[r][i]);
        }
    }
}

/* Outputs n..n+7 of one row: bias, then the old value, are added last. */
MATMUL_INLINE void store_lanes(const matmul_span *span, int32_t row, int32_t n, __m256 v)
{
    int32_t n_left = span->n_out - n;
    float *out = span->out + row * span->out_stride + n;
    if (n_left >= 8) {
        if (span->bias != NULL)
            v = _mm256_add_ps(v, _mm256_loadu_ps(span->bias + n));
        if (span->accumulate)
            v = _mm256_add_ps(v, _mm256_loadu_ps(out));
        _mm256_storeu_ps(out, v);
        return;
    }
    float sums[8];
    _mm256_storeu_ps(sums, v);
    for (int32_t i = 0; i < n_left; i++) {
        float sum = sums[i];
        if (span->bias != NULL)
            sum += span->bias[n + i];
        out[i] = span->accumulate ? sum + out[i] : sum;
    }
}

MATMUL_INLINE void quant_tile(const matmul_span *span, int32_t panel, int32_t row, int first,
                              dtype type, const int R, const int N)
{
    const int32_t n_units = span->n_in / MATMUL_UNIT;
    const int unit_bytes = (int)matmul__unit_bytes(type);
    const uint8_t *w = span->w + (size_t)panel * span->panel_bytes;
    const matmul_x_unit *x[QUANT_ROWS];
    float_acc acc;
    MATMUL_UNROLL
    for (int r = 0; r < R; r++) {
        x[r] = span->x_q + (size_t)(row + r) * (size_t)n_units;
        MATMUL_UNROLL
        for (int i = 0; i < N; i++)
            acc.v[r][i] = _mm256_setzero_ps();
    }
    for (int32_t b = 0; b < n_units; b++) {
        if (R == 1 && span->prefetch) { /* the next panel follows directly */
            const char *ahead =
                (const char *)w + matmul__locate(type, b).lines + MATMUL_STREAM_AHEAD;
            MATMUL_UNROLL
            for (int i = 0; i < unit_bytes; i += 64)
                _mm_prefetch(ahead + i, _MM_HINT_T0);
        }
        add_unit(&acc, w, x, b, type, R, N, first);
    }
    MATMUL_UNROLL
    for (int r = 0; r < R; r++) {
        MATMUL_UNROLL
        for (int i = 0; i < N; i++)
            store_lanes(span, row + r, panel * MATMUL_PANEL + 8 * (first + i), acc.v[r][i]);
    }
}

/* first: 0 or 2 for a tile of two registers. */
typedef void (*quant_tile_fn)(const matmul_span *span, int32_t panel, int32_t row, int first);

#define QUANT_TILE(T, R, N)                                                                     \
    static void quant_##T##_##R(const matmul_span *span, int32_t panel, int32_t row, int first) \
    {                                                                                           \
        quant_tile(span, panel, row, first, DTYPE_##T, R, N);                                   \
    }
#define QUANT_TYPE(T)                                                                 \
    QUANT_TILE(T, 1, 4)                                                               \
    QUANT_TILE(T, 2, 2)                                                               \
    QUANT_TILE(T, 3, 2)                                                               \
    static const quant_tile_fn tiles_##T[QUANT_ROWS] = {quant_##T##_1, quant_##T##_2, \
                                                        quant_##T##_3};

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
            int32_t n_rows = matmul__tile_row(span, t + 1) - row;
            tiles[n_rows - 1](span, panel, row, 0);
            if (n_rows > 1)
                tiles[n_rows - 1](span, panel, row, 2);
        }
    }
}

/* --- f32, f16, bf16: as in matmul_avx512.c --- */

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

typedef void (*float_tile_fn)(const float_tile *tile, int first);

/* Register i of the 32 values of one k. */
MATMUL_INLINE __m256 load_values(const uint8_t *w, dtype type, int i)
{
    if (type == DTYPE_F32)
        return _mm256_load_ps((const float *)(const void *)w + 8 * i);
    __m128i half = _mm_load_si128((const __m128i *)(const void *)(w + 16 * i));
    if (type == DTYPE_F16)
        return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

MATMUL_INLINE int value_bytes(dtype type)
{
    return type == DTYPE_F32 ? 4 : 2;
}

MATMUL_INLINE void compute_float(const float_tile *tile, int first, dtype type, const int R,
                                 const int N)
{
    const int k_bytes = MATMUL_PANEL * value_bytes(type);
    const uint8_t *w = tile->w + first * 8 * value_bytes(type);
    const float *x = tile->x;
    float_acc acc;
    MATMUL_UNROLL
    for (int r = 0; r < R; r++) {
        MATMUL_UNROLL
        for (int i = 0; i < N; i++)
            acc.v[r][i] = _mm256_setzero_ps();
    }
    for (int32_t k = 0; k < tile->n_k; k++, x += R, w += k_bytes) {
        __m256 v[VECS];
        MATMUL_UNROLL
        for (int i = 0; i < N; i++)
            v[i] = load_values(w, type, i);
        if (R == 1 && tile->span->prefetch) {
            MATMUL_UNROLL
            for (int i = 0; i < k_bytes; i += 64)
                _mm_prefetch((const char *)w + MATMUL_STREAM_AHEAD + i, _MM_HINT_T0);
        }
        MATMUL_UNROLL
        for (int r = 0; r < R; r++) {
            __m256 xr = _mm256_set1_ps(x[r]);
            MATMUL_UNROLL
            for (int i = 0; i < N; i++)
                acc.v[r][i] = _mm256_fmadd_ps(xr, v[i], acc.v[r][i]);
        }
    }
    MATMUL_UNROLL
    for (int r = 0; r < R; r++) {
        MATMUL_UNROLL
        for (int i = 0; i < N; i++) {
            int32_t lane = 8 * (first + i);
            float *total = tile->total + r * MATMUL_PANEL + lane;
            __m256 sum = acc.v[r][i];
            if (!tile->is_first)
                sum = _mm256_add_ps(_mm256_load_ps(total), sum);
            if (tile->is_last)
                store_lanes(tile->span, tile->row + r, tile->panel * MATMUL_PANEL + lane, sum);
            else
                _mm256_store_ps(total, sum);
        }
    }
}

#define FLOAT_TILE(T, R, N)                                        \
    static void float_##T##_##R(const float_tile *tile, int first) \
    {                                                              \
        compute_float(tile, first, DTYPE_##T, R, N);               \
    }
#define FLOAT_TYPE(T)                                     \
    FLOAT_TILE(T, 1, 4)                                   \
    FLOAT_TILE(T, 2, 4)                                   \
    FLOAT_TILE(T, 3, 2)                                   \
    FLOAT_TILE(T, 4, 2)                                   \
    FLOAT_TILE(T, 5, 2)                                   \
    FLOAT_TILE(T, 6, 2)                                   \
    static const float_tile_fn tiles_f##T[FLOAT_ROWS] = { \
        float_##T##_1, float_##T##_2, float_##T##_3, float_##T##_4, float_##T##_5, float_##T##_6};

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
    for (int32_t k = 0; k < n_k; k++, dst += MATMUL_PANEL, w += MATMUL_PANEL * 2) {
        for (int i = 0; i < VECS; i++)
            _mm256_store_ps(dst + 8 * i, load_values(w, type, i));
    }
}

static void float_panel(const matmul_span *span, int32_t panel, int32_t tile_first,
                        int32_t tile_last, float *scratch)
{
    const int32_t k_chunk = matmul__k_chunk(span->n_in);
    const size_t k_bytes = MATMUL_PANEL * (size_t)value_bytes(span->type);
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
            tiles[n_rows - 1](&tile, 0);
            if (n_rows > 2)
                tiles[n_rows - 1](&tile, 2);
        }
    }
}

static void float_panels(const matmul_span *span, int32_t panel_first, int32_t panel_last,
                         int32_t tile_first, int32_t tile_last, float *scratch)
{
    for (int32_t panel = panel_first; panel < panel_last; panel++)
        float_panel(span, panel, tile_first, tile_last, scratch);
}

MATMUL_IMPL(matmul__avx2, quantize, quant_panels, float_panels, QUANT_ROWS, FLOAT_ROWS)
