/* The register tiles of attention_simd.h: P pairs x vectors of keys, P pairs x vectors of
 * dimensions. They come as one function for each type of page, P and width. */
#ifndef KERNELS_CPU_ATTENTION_TILE_SIMD_H
#define KERNELS_CPU_ATTENTION_TILE_SIMD_H

#include "kernels/cpu/attention_internal.h"
#include "kernels/cpu/simd.h"

#if defined(SIMD_LANES)

enum {
    PAIRS = 6, /* of a register tile */
    MAX_REGISTER_TILES = ATTENTION_MAX_PAIRS / PAIRS + 1,
    KEY_VECTORS = ATTENTION_KEY_GROUP / SIMD_LANES, /* of a key group */
    WIDE_GROUPS = SIMD_LANES == 16 ? 4 : 1,         /* key groups of the widest score tile */
    WIDE_DIMS = SIMD_LANES == 16 ? 4 : 2,           /* vectors of the widest value tile */
    CONVERT_FROM = 3,                               /* register tiles that pay for converting */
    FEW_PAIRS = 4 /* with so few pairs keys and values come from memory, and are prefetched */
};

/* Where the keys, or the values, of a split are: those of key group g from at[g] on. */
typedef struct source {
    const uint8_t *at[ATTENTION_GROUPS];
    /* What is read after them, key group for key group: the values, the keys of the next split.
     * Where pages are contiguous for a group, it is as many bytes and is prefetched alongside. */
    const uint8_t *ahead[ATTENTION_GROUPS];
    int64_t step; /* bytes to the next dimension of keys, to the next key's values */
    dtype type;
} source;

SIMD_INLINE vf load_kv(const uint8_t *p, dtype type)
{
    const void *at = p;
    if (type == DTYPE_F32)
        return vf_load(at);
    return type == DTYPE_F16 ? vf_load_f16(at) : vf_load_bf16(at);
}

SIMD_INLINE int32_t elem_bytes(dtype type)
{
    return type == DTYPE_F32 ? 4 : 2;
}

/* --- scores --- */

/* scores[P][ATTENTION_SPLIT] of V key groups; q [n_dims][P]. */
SIMD_INLINE void score_tile(float *scores, const float *q, const uint8_t *const *keys,
                            const uint8_t *const *ahead, int64_t step, int32_t n_dims, dtype type,
                            const int P, const int V)
{
    const int n_vectors = V * KEY_VECTORS;
    const int group_bytes = ATTENTION_KEY_GROUP * (type == DTYPE_F32 ? 4 : 2);
    const uint8_t *k[WIDE_GROUPS];
    vf acc[PAIRS][WIDE_GROUPS * KEY_VECTORS];
    SIMD_UNROLL
    for (int v = 0; v < V; v++)
        k[v] = keys[v];
    SIMD_UNROLL
    for (int r = 0; r < P; r++) {
        SIMD_UNROLL
        for (int v = 0; v < n_vectors; v++)
            acc[r][v] = vf_zero();
    }
    for (int32_t i = 0; i < n_dims; i++, q += P) {
        vf kv[WIDE_GROUPS * KEY_VECTORS];
        if (P <= FEW_PAIRS) {
            SIMD_UNROLL
            for (int v = 0; v < V; v++)
                __builtin_prefetch(ahead[v] + i * group_bytes);
        }
        SIMD_UNROLL
        for (int v = 0; v < n_vectors; v++)
            kv[v] = load_kv(k[v / KEY_VECTORS] + i * step +
                                v % KEY_VECTORS * SIMD_LANES * (type == DTYPE_F32 ? 4 : 2),
                            type);
        SIMD_UNROLL
        for (int r = 0; r < P; r++) {
            vf qr = vf_set1(q[r]);
            SIMD_UNROLL
            for (int v = 0; v < n_vectors; v++)
                acc[r][v] = vf_fma(qr, kv[v], acc[r][v]);
        }
    }
    SIMD_UNROLL
    for (int r = 0; r < P; r++) {
        SIMD_UNROLL
        for (int v = 0; v < n_vectors; v++)
            vf_store(scores + r * ATTENTION_SPLIT + v * SIMD_LANES, acc[r][v]);
    }
}

/* --- weighted values --- */

/* acc[P][acc_step] += weights[P][key] * values[key], keys [first, last) of the split, D vectors of
 * dimensions from byte offset at of a row on. */
SIMD_INLINE void value_tile(float *acc_at, int64_t acc_step, const float *weights,
                            const source *values, int64_t at, int32_t first, int32_t last,
                            dtype type, const int P, const int D)
{
    const int vector_bytes = SIMD_LANES * (type == DTYPE_F32 ? 4 : 2);
    vf acc[PAIRS][WIDE_DIMS];
    SIMD_UNROLL
    for (int r = 0; r < P; r++) {
        SIMD_UNROLL
        for (int d = 0; d < D; d++)
            acc[r][d] = vf_load(acc_at + r * acc_step + d * SIMD_LANES);
    }
    for (int32_t key = first; key < last;) {
        const uint8_t *v =
            values->at[key / ATTENTION_KEY_GROUP] + at + key % ATTENTION_KEY_GROUP * values->step;
        int64_t ahead =
            values->ahead[key / ATTENTION_KEY_GROUP] - values->at[key / ATTENTION_KEY_GROUP];
        int32_t end =
            PGD_MIN(last, key / ATTENTION_KEY_GROUP * ATTENTION_KEY_GROUP + ATTENTION_KEY_GROUP);
        for (; key < end; key++, v += values->step) {
            vf x[WIDE_DIMS];
            SIMD_UNROLL
            for (int d = 0; d < D; d++)
                x[d] = load_kv(v + d * vector_bytes, type);
            if (P <= FEW_PAIRS) {
                SIMD_UNROLL
                for (int d = 0; d < D * vector_bytes; d += 64)
                    __builtin_prefetch(v + ahead + d);
            }
            SIMD_UNROLL
            for (int r = 0; r < P; r++) {
                vf w = vf_set1(weights[r * ATTENTION_SPLIT + key]);
                SIMD_UNROLL
                for (int d = 0; d < D; d++)
                    acc[r][d] = vf_fma(w, x[d], acc[r][d]);
            }
        }
    }
    SIMD_UNROLL
    for (int r = 0; r < P; r++) {
        SIMD_UNROLL
        for (int d = 0; d < D; d++)
            vf_store(acc_at + r * acc_step + d * SIMD_LANES, acc[r][d]);
    }
}

typedef void (*score_fn)(float *scores, const float *q, const uint8_t *const *keys,
                         const uint8_t *const *ahead, int64_t step, int32_t n_dims);
typedef void (*value_fn)(float *acc, int64_t acc_step, const float *weights, const source *values,
                         int64_t at, int32_t first, int32_t last);

#    define SCORE_TILE(T, P, V)                                                                    \
        static void score_##T##_##P##_##V(float *scores, const float *q,                           \
                                          const uint8_t *const *keys, const uint8_t *const *ahead, \
                                          int64_t step, int32_t n_dims)                            \
        {                                                                                          \
            score_tile(scores, q, keys, ahead, step, n_dims, DTYPE_##T, P,                         \
                       PGD_MIN(V, WIDE_GROUPS));                                                   \
        }
#    define VALUE_TILE(T, P, D)                                                               \
        static void value_##T##_##P##_##D(float *acc, int64_t acc_step, const float *weights, \
                                          const source *values, int64_t at, int32_t first,    \
                                          int32_t last)                                       \
        {                                                                                     \
            value_tile(acc, acc_step, weights, values, at, first, last, DTYPE_##T, P, D);     \
        }
#    if SIMD_LANES == 16
#        define TILES_OF(T, P)  \
            SCORE_TILE(T, P, 4) \
            SCORE_TILE(T, P, 2) \
            SCORE_TILE(T, P, 1) \
            VALUE_TILE(T, P, 4) \
            VALUE_TILE(T, P, 1)
#        define SCORES_OF(T, P)                                               \
            {                                                                 \
                score_##T##_##P##_1, score_##T##_##P##_2, score_##T##_##P##_4 \
            }
#        define VALUES_OF(T, P)                          \
            {                                            \
                value_##T##_##P##_1, value_##T##_##P##_4 \
            }
#    else
#        define TILES_OF(T, P)  \
            SCORE_TILE(T, P, 1) \
            VALUE_TILE(T, P, 2) \
            VALUE_TILE(T, P, 1)
#        define SCORES_OF(T, P)     \
            {                       \
                score_##T##_##P##_1 \
            }
#        define VALUES_OF(T, P)                          \
            {                                            \
                value_##T##_##P##_1, value_##T##_##P##_2 \
            }
#    endif
#    define TILES_OF_TYPE(T) \
        TILES_OF(T, 1)       \
        TILES_OF(T, 2)       \
        TILES_OF(T, 3)       \
        TILES_OF(T, 4)       \
        TILES_OF(T, 5)       \
        TILES_OF(T, 6)
#    define ALL_OF_TYPE(OF, T)                                         \
        {                                                              \
            OF(T, 1), OF(T, 2), OF(T, 3), OF(T, 4), OF(T, 5), OF(T, 6) \
        }

TILES_OF_TYPE(F32)
TILES_OF_TYPE(F16)
TILES_OF_TYPE(BF16)

/* By type_idx, pairs - 1, and width: 1, 2, 4 key groups. */
static const score_fn score_fns[3][PAIRS][3] = {
    ALL_OF_TYPE(SCORES_OF, F32), ALL_OF_TYPE(SCORES_OF, F16), ALL_OF_TYPE(SCORES_OF, BF16)};
/* ... and width: 1, WIDE_DIMS vectors. */
static const value_fn value_fns[3][PAIRS][2] = {
    ALL_OF_TYPE(VALUES_OF, F32), ALL_OF_TYPE(VALUES_OF, F16), ALL_OF_TYPE(VALUES_OF, BF16)};

static int type_idx(dtype type)
{
    return type == DTYPE_F32 ? 0 : type == DTYPE_F16 ? 1 : 2;
}

#endif
#endif
