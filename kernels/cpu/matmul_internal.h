/* What the CPU implementations of kernels/matmul.h share: packed layouts, quantized activations,
 * the driver.
 *
 * An instruction-set level supplies three functions (matmul_isa); the driver checks, quantizes or
 * packs the activations, splits the work over the pool and calls them.
 *
 * Layout "panels": a panel is 32 consecutive output rows (n_out is padded with zeros), read as one
 * linear stream. Per panel, K ascending:
 *
 *   F32, F16, BF16   [k][32] values
 *   quantized        units of 32 K values: scales, then lines
 *
 * A line is 64 bytes: 4 consecutive K values of each of 16 rows; line 2g+h is for the rows of half h.
 *
 *   8-bit lines      g = 0..7: K 4g..4g+3, unsigned bytes (Q8_0: q + 128, Q5: 0..31, Q6_K: 0..63)
 *   4-bit lines      g = 0..3: low nibbles K 4g..4g+3, high nibbles K 16+4g..16+4g+3
 *
 * Sizes are the file's where the bits are:
 *
 *   Q8_0 Q4_0 Q5_0   d f16[32] | lines
 *   Q4_1 Q5_1        d f16[32] | m f16[32] | lines
 *   MXFP4            per 2 units (the last may be alone): 2 x e u8[32] | 1 or 2 x lines
 *   Q4_K Q5_K        per 8 units: d f16[32] | dmin f16[32] | 8 x (scale u8[32] | min u8[32] | lines)
 *   Q6_K             per 8 units: d f16[32] | 8 x (scale s8[32] | scale s8[32] | lines);
 *                    the first scale is for K 0..15 of the unit, the second for K 16..31
 *
 * Thread:  any
 */
#ifndef KERNELS_CPU_MATMUL_INTERNAL_H
#define KERNELS_CPU_MATMUL_INTERNAL_H

#include "kernels/matmul.h"

#define MATMUL_PANEL        32   /* output rows of a panel */
#define MATMUL_UNIT         32   /* K values that share an activation scale */
#define MATMUL_STREAM_AHEAD 4096 /* prefetch distance of matmul_isa.prefetch */
#define MATMUL_TILE_AHEAD   8192 /* ... of tiles of more rows, into the second-level cache */
#define MATMUL_MAX_K_CHUNK  512  /* f32 sums run over at most so many K values, then are added up */
#define MATMUL_CHUNK_ROWS   128  /* rows of one work item at most (f32 types) */
/* Per thread: a panel's K chunk converted to f32, and one sum per row and output of a work item. */
#define MATMUL_SCRATCH_FLOATS (MATMUL_PANEL * (MATMUL_MAX_K_CHUNK + MATMUL_CHUNK_ROWS))

enum { MATMUL_LAYOUT_ROWS = 1, MATMUL_LAYOUT_PANELS = 2 };

/* 32 quantized activations: x ~ d * q. */
typedef struct matmul_x_unit {
    int8_t q[MATMUL_UNIT];
    float d;
    float d_sum;           /* d * (sum of q), for types with a minimum */
    int32_t neg_sum;       /* -(sum of q): times 128, 8, 16 or 32 it undoes a weight's offset */
    int32_t neg_sum_first; /* ... of the first 16 values */
} matmul_x_unit;

static_assert(sizeof(matmul_x_unit) == 48, "the tiles step through rows of units by this size");

/* One weight of a call as the level's functions see it. */
typedef struct matmul_span {
    dtype type;
    int32_t n_in;
    int32_t n_out;
    int32_t n_rows;
    int32_t n_tiles; /* row tiles: tile t is rows [t*n_rows/n_tiles, (t+1)*n_rows/n_tiles) */
    const uint8_t *w;
    size_t panel_bytes;
    const matmul_x_unit *x_q; /* [n_rows, n_in/32] */
    const float *x_f;         /* per tile of R rows: [n_in][R] */
    float *out;
    int64_t out_stride;
    const float *bias;
    bool accumulate;
    bool prefetch; /* of streams that are read once, see matmul_isa */
} matmul_span;

typedef struct matmul_isa {
    void (*quantize)(matmul_x_unit *out, const float *x, int32_t n_units);
    /* Panels [panel_first, panel_last), row tiles [tile_first, tile_last); scratch:
     * MATMUL_SCRATCH_FLOATS. */
    void (*quant_panels)(const matmul_span *span, int32_t panel_first, int32_t panel_last,
                         int32_t tile_first, int32_t tile_last);
    void (*float_panels)(const matmul_span *span, int32_t panel_first, int32_t panel_last,
                         int32_t tile_first, int32_t tile_last, float *scratch);
    int32_t quant_rows; /* rows of a full tile */
    int32_t float_rows;
    /* Whether tiles of one or two rows prefetch. Measured: Zen 4 reads a linear stream a quarter faster without,
     * Ice Lake needs it to keep enough lines in flight. */
    bool prefetch;
} matmul_isa;

/* For tiles: everything inlined, loops over constant bounds unrolled, so that the arrays become
 * registers. */
#define MATMUL_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#    define MATMUL_UNROLL _Pragma("clang loop unroll(full)")
#else
#    define MATMUL_UNROLL _Pragma("GCC unroll 16")
#endif

static inline bool matmul__is_float(dtype type)
{
    return type == DTYPE_F32 || type == DTYPE_F16 || type == DTYPE_BF16;
}

static inline int32_t matmul__tile_row(const matmul_span *span, int32_t tile)
{
    return (int32_t)((int64_t)tile * span->n_rows / span->n_tiles);
}

/* K values of one f32 partial sum: the same for every call with this n_in. */
static inline int32_t matmul__k_chunk(int32_t n_in)
{
    int32_t n_chunks = PGD_CEIL_DIV(n_in, MATMUL_MAX_K_CHUNK);
    return n_chunks <= 1 ? n_in : PGD_ROUND_UP(PGD_CEIL_DIV(n_in, n_chunks), 8);
}

/* Byte offsets in a panel of unit b's lines, its scales, and its super-block's scales. */
typedef struct matmul_place {
    size_t lines;
    size_t meta;
    size_t super;
} matmul_place;

MATMUL_INLINE bool matmul__is_4bit(dtype type)
{
    return type == DTYPE_Q4_0 || type == DTYPE_Q4_1 || type == DTYPE_Q4_K || type == DTYPE_MXFP4;
}

/* A minimum is added (Q4_1, Q5_1) or subtracted (Q4_K, Q5_K) besides. */
MATMUL_INLINE bool matmul__is_k45(dtype type)
{
    return type == DTYPE_Q4_K || type == DTYPE_Q5_K;
}

MATMUL_INLINE bool matmul__has_min(dtype type)
{
    return type == DTYPE_Q4_1 || type == DTYPE_Q5_1 || matmul__is_k45(type);
}

MATMUL_INLINE bool matmul__is_k(dtype type)
{
    return matmul__is_k45(type) || type == DTYPE_Q6_K;
}

enum { MATMUL_META = 64 /* one f16 or two bytes for each row of a panel */ };

MATMUL_INLINE size_t matmul__lines_bytes(dtype type)
{
    return MATMUL_PANEL * MATMUL_UNIT / (matmul__is_4bit(type) ? 2 : 1);
}

/* A unit with its own scales. */
MATMUL_INLINE size_t matmul__unit_bytes(dtype type)
{
    if (type == DTYPE_MXFP4)
        return MATMUL_META / 2 + matmul__lines_bytes(type);
    size_t meta = matmul__has_min(type) && !matmul__is_k45(type) ? 2 * MATMUL_META : MATMUL_META;
    return meta + matmul__lines_bytes(type);
}

/* The scales that 8 units of a K type share. */
MATMUL_INLINE size_t matmul__super_meta(dtype type)
{
    return matmul__is_k45(type) ? 2 * MATMUL_META : MATMUL_META;
}

MATMUL_INLINE matmul_place matmul__locate(dtype type, int32_t b)
{
    size_t unit = matmul__unit_bytes(type);
    size_t to_lines = unit - matmul__lines_bytes(type);
    if (type == DTYPE_MXFP4) {
        size_t pair = (size_t)(b >> 1) * 2 * unit;
        return (matmul_place){pair + MATMUL_META + (size_t)(b & 1) * matmul__lines_bytes(type),
                              pair + (size_t)(b & 1) * MATMUL_PANEL, 0};
    }
    if (!matmul__is_k(type))
        return (matmul_place){(size_t)b * unit + to_lines, (size_t)b * unit, 0};
    size_t super = (size_t)(b >> 3) * (matmul__super_meta(type) + 8 * unit);
    size_t meta = super + matmul__super_meta(type) + (size_t)(b & 7) * unit;
    return (matmul_place){meta + to_lines, meta, super};
}

/* log2 of the offset in the stored bytes; -1 when there is none. */
MATMUL_INLINE int matmul__offset_shift(dtype type)
{
    switch (type) {
    case DTYPE_Q8_0:
        return 7;
    case DTYPE_Q4_0:
        return 3;
    case DTYPE_Q5_0:
    case DTYPE_MXFP4: /* what the look-up of a nibble gives: 4..28 */
        return 4;
    case DTYPE_Q6_K:
        return 5;
    default:
        return -1;
    }
}

/* Twice the value of each E2M1 code (dtype.c), plus 16: bytes for one shuffle. */
#define MATMUL_E2M1 16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4

/* Lines whose 16-bit sums of byte products cannot overflow: 2 * (largest weight) * 127 * lines <=
 * 32767. Not for Q8_0. */
MATMUL_INLINE int matmul__groups_in_16bit(dtype type)
{
    if (type == DTYPE_MXFP4)
        return 4; /* 28 */
    if (matmul__is_4bit(type))
        return 8; /* 15 */
    return type == DTYPE_Q6_K ? 2 /* 63 */ : 4 /* 31 */;
}

/* -(sum of x) over the lines [g0, g1): all, the first half or the second. */
MATMUL_INLINE int32_t matmul__neg_sum(const matmul_x_unit *x, int g0, int g1)
{
    if (g1 - g0 == 8)
        return x->neg_sum;
    return g0 == 0 ? x->neg_sum_first : x->neg_sum - x->neg_sum_first;
}

static inline int32_t matmul__n_groups(const matmul_args *args)
{
    return args->group_start != NULL ? args->n_groups : 1;
}

/* The first row of group g; of n_groups: the number of rows. */
static inline int32_t matmul__group_start(const matmul_args *args, int32_t g)
{
    if (args->group_start != NULL)
        return args->group_start[g];
    return g == 0 ? 0 : args->n_rows;
}

/* Bytes of one panel; 0 when the type or n_in is not supported. */
size_t matmul__panel_bytes(dtype type, int32_t n_in);
/* Implementations of matmul_impl's members, common to the levels with the panel layout. */
size_t matmul__packed_bytes(dtype type, int32_t n_out, int32_t n_in);
void matmul__pack(packed_weight *w, const void *rows, int32_t first_row, int32_t n_rows);
size_t matmul__workspace_bytes(int32_t max_rows, int32_t max_n_in, int32_t n_threads);
pgd_err matmul__run(const matmul_args *args, kernel_ctx *ctx, const matmul_isa *isa);
/* The checks of run that all levels share. */
PGD_MUST_USE pgd_err matmul__check(const matmul_args *args, const kernel_ctx *ctx, int32_t layout,
                                   size_t workspace_bytes);
/* The quantization of activations in plain C: what every level's quantize computes. */
void matmul__quantize_ref(matmul_x_unit *out, const float *x, int32_t n_units);

extern const matmul_impl matmul__ref;
#if defined(__x86_64__)
/* [0] without, [1] with matmul_isa.prefetch. */
extern const matmul_impl matmul__avx2[2];
extern const matmul_impl matmul__avx512[2];
extern const matmul_impl matmul__avx512vnni[2];
/* Shared by the two AVX-512 levels; as matmul_isa's members. */
void matmul__avx512_quantize(matmul_x_unit *out, const float *x, int32_t n_units);
void matmul__avx512_float_panels(const matmul_span *span, int32_t panel_first, int32_t panel_last,
                                 int32_t tile_first, int32_t tile_last, float *scratch);
#endif

/* The matmul_impl pair of one level. */
#define MATMUL_IMPL(LEVEL, QUANTIZE, QUANT_PANELS, FLOAT_PANELS, QUANT_ROWS_, FLOAT_ROWS_)         \
    MATMUL_RUN(run_plain, false, QUANTIZE, QUANT_PANELS, FLOAT_PANELS, QUANT_ROWS_, FLOAT_ROWS_)   \
    MATMUL_RUN(run_prefetch, true, QUANTIZE, QUANT_PANELS, FLOAT_PANELS, QUANT_ROWS_, FLOAT_ROWS_) \
    const matmul_impl LEVEL[2] = {                                                                 \
        {matmul__packed_bytes, matmul__pack, MATMUL_PANEL, run_plain, matmul__workspace_bytes},    \
        {matmul__packed_bytes, matmul__pack, MATMUL_PANEL, run_prefetch,                           \
         matmul__workspace_bytes}};
#define MATMUL_RUN(NAME, PREFETCH, QUANTIZE, QUANT_PANELS, FLOAT_PANELS, QUANT_ROWS_, FLOAT_ROWS_) \
    static pgd_err NAME(const matmul_args *args, kernel_ctx *ctx)                                  \
    {                                                                                              \
        static const matmul_isa isa = {QUANTIZE,    QUANT_PANELS, FLOAT_PANELS,                    \
                                       QUANT_ROWS_, FLOAT_ROWS_,  PREFETCH};                       \
        return matmul__run(args, ctx, &isa);                                                       \
    }

#endif
