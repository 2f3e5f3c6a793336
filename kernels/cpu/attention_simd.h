/* One item of attention over float vectors (simd.h): scores, softmax, weighted values, fold.
 *
 * Keys lie transposed, so that a vector holds one dimension of consecutive keys: a score tile is P
 * pairs x some vectors of keys, one fma per dimension in ascending order, no horizontal sums. The
 * weighted values are P pairs x some vectors of dimensions, one fma per key in ascending order. P
 * and the number of vectors change which sums share a load, never a sum.
 *
 * Rows of a tile see different ranges of keys. Scores are computed for whole groups of keys and cut
 * by lane in the softmax; values are added tile-wise over the keys that all rows see, and pair by
 * pair before and after, so that nothing of a key outside its range reaches a pair, not even a NaN.
 *
 * Tiles of many pairs convert 16-bit keys and values once per chunk; the values, hence the sums,
 * are those of the direct path. q is multiplied by the scale and by log2 e beforehand: scores,
 * maxima, soft cap and sinks are in units of ln 2, and powers are of 2.
 */
#ifndef KERNELS_CPU_ATTENTION_SIMD_H
#define KERNELS_CPU_ATTENTION_SIMD_H

#include <math.h>

#include "kernels/cpu/attention_tile_simd.h"

#if defined(SIMD_LANES)

#    define LOG2_E 0x1.715476p+0f

/* One unit of a tile at work. */
typedef struct work {
    const attention_job *job;
    const attention_args *args;
    const attention_tile *tile;
    const attention_scratch *scratch;
    const block_id *table;
    int32_t kv_head;
    int32_t first_head;
    int32_t n_heads;
    int32_t n_pairs; /* pair = row * n_heads + head */
    int32_t n_register_tiles;
    int32_t first_pair[MAX_REGISTER_TILES + 1];
    /* Of the split at hand: each row's keys, relative to the split; first >= last: none. */
    int32_t first_key[ATTENTION_MAX_PAIRS];
    int32_t last_key[ATTENTION_MAX_PAIRS];
    int32_t first_group; /* key groups that any row needs */
    int32_t last_group;
} work;

/* --- a unit of a tile --- */

static void init_work(work *w, const attention_job *job, const attention_tile *tile, int32_t unit,
                      const attention_scratch *scratch)
{
    const attention_args *a = job->args;
    int32_t group = a->n_heads / a->kv.n_kv_heads;
    int32_t first = unit % job->units_per_kv_head * job->heads_per_unit;
    w->job = job;
    w->args = a;
    w->tile = tile;
    w->scratch = scratch;
    w->table = a->block_table + (int64_t)a->seq_row[tile->seq] * a->block_table_stride;
    w->kv_head = unit / job->units_per_kv_head;
    w->first_head = w->kv_head * group + first;
    w->n_heads = PGD_MIN(job->heads_per_unit, group - first);
    w->n_pairs = tile->n_rows * w->n_heads;
    int32_t n = PGD_CEIL_DIV(w->n_pairs, PAIRS);
    w->n_register_tiles = n;
    for (int32_t i = 0; i <= n; i++)
        w->first_pair[i] = w->n_pairs * i / n;
}

static int32_t row_of(const work *w, int32_t pair)
{
    return pair / w->n_heads;
}

/* Rows of q, scaled, [n_dims][pairs] for each register tile. */
static void pack_q(const work *w)
{
    const attention_args *a = w->args;
    const float scale = a->scale * LOG2_E;
    int32_t n_dims = a->kv.head_dim;
    for (int32_t t = 0; t < w->n_register_tiles; t++) {
        int32_t first = w->first_pair[t], n = w->first_pair[t + 1] - first;
        for (int32_t r = 0; r < n; r++) {
            int32_t row = row_of(w, first + r), head = first + r - row * w->n_heads;
            const float *q = a->q + (int64_t)(w->tile->first_row + row) * a->q_stride +
                             (int64_t)(w->first_head + head) * n_dims;
            float *dst = w->scratch->q + (int64_t)first * n_dims + r;
            for (int32_t i = 0; i < n_dims; i++)
                dst[(int64_t)i * n] = q[i] * scale;
        }
    }
}

static void find_keys(work *w, int32_t split)
{
    const attention_args *a = w->args;
    int32_t base = split * ATTENTION_SPLIT;
    int32_t first = ATTENTION_SPLIT, last = 0;
    for (int32_t r = 0; r < w->tile->n_rows; r++) {
        int32_t pos = attention__last_key(a, w->tile->seq, w->tile->first_row + r);
        w->first_key[r] = PGD_MAX(attention__first_key(a, pos) - base, 0);
        w->last_key[r] = PGD_MIN(pos + 1 - base, ATTENTION_SPLIT);
        if (w->first_key[r] < w->last_key[r]) {
            first = PGD_MIN(first, w->first_key[r]);
            last = PGD_MAX(last, w->last_key[r]);
        }
    }
    w->first_group = first / ATTENTION_KEY_GROUP;
    w->last_group = PGD_CEIL_DIV(last, ATTENTION_KEY_GROUP);
}

static const uint8_t *find_page(const work *w, int32_t key)
{
    const kv_page_layout *kv = &w->args->kv;
    return (const uint8_t *)w->args->pages +
           (size_t)w->table[key / kv->block_size] * kv_page_bytes(kv);
}

static void find_pages(const work *w, int32_t split, source *keys, source *values)
{
    const kv_page_layout *kv = &w->args->kv;
    int32_t n_bytes = elem_bytes(kv->type);
    size_t k_at = kv_page_k_elem(kv, w->kv_head) * (size_t)n_bytes;
    size_t v_at = kv_page_v_elem(kv, w->kv_head) * (size_t)n_bytes;
    *keys = (source){.step = (int64_t)kv->block_size * n_bytes, .type = kv->type};
    *values = (source){.step = (int64_t)kv->head_dim * n_bytes, .type = kv->type};
    /* Up to the last row's keys, pages are known. */
    int32_t n_keys =
        attention__last_key(w->args, w->tile->seq, w->tile->first_row + w->tile->n_rows - 1) + 1;
    for (int32_t g = w->first_group; g < w->last_group; g++) {
        int32_t key = split * ATTENTION_SPLIT + g * ATTENTION_KEY_GROUP;
        size_t o = (size_t)(key % kv->block_size) * (size_t)n_bytes;
        const uint8_t *page = find_page(w, key);
        keys->at[g] = page + k_at + o;
        values->at[g] = page + v_at + o * (size_t)kv->head_dim;
        keys->ahead[g] = values->at[g];
        key += ATTENTION_SPLIT;
        values->ahead[g] = key < n_keys && kv->block_size == ATTENTION_KEY_GROUP
                               ? find_page(w, key) + k_at
                               : values->at[g];
    }
}

/* n floats, whole vectors of them. */
SIMD_INLINE void convert(float *dst, const uint8_t *src, int32_t n, dtype type)
{
    SIMD_UNROLL
    for (int32_t i = 0; i + SIMD_LANES <= n; i += SIMD_LANES)
        vf_store(dst + i, load_kv(src + i * elem_bytes(type), type));
}

SIMD_INLINE void convert_key_group(float *dst, const uint8_t *src, int64_t step, int32_t n_dims,
                                   dtype type)
{
    for (int32_t i = 0; i < n_dims; i++)
        convert(dst + (int64_t)i * ATTENTION_CHUNK, src + i * step, ATTENTION_KEY_GROUP, type);
}

/* Key groups [first, last) of 16-bit keys to floats [n_dims][ATTENTION_CHUNK]. */
static void convert_keys(const work *w, source *out, const source *in, int32_t first, int32_t last)
{
    int32_t n_dims = w->args->kv.head_dim;
    *out = (source){.step = ATTENTION_CHUNK * (int64_t)sizeof(float), .type = DTYPE_F32};
    for (int32_t g = first; g < last; g++) {
        float *dst = w->scratch->chunk + (g - first) * ATTENTION_KEY_GROUP;
        out->at[g] = out->ahead[g] = (const uint8_t *)dst;
        if (in->type == DTYPE_F16)
            convert_key_group(dst, in->at[g], in->step, n_dims, DTYPE_F16);
        else
            convert_key_group(dst, in->at[g], in->step, n_dims, DTYPE_BF16);
    }
}

static float load_one(const uint8_t *p, dtype type)
{
    const void *at = p;
    if (type == DTYPE_F32)
        return *(const float *)at;
    uint16_t half = *(const uint16_t *)at;
    return type == DTYPE_F16 ? dtype_f16_to_f32(half) : dtype_bf16_to_f32(half);
}

/* n_keys rows of n_dims values to rows of dim_pad floats, padded with zeros. */
SIMD_INLINE void convert_value_group(float *dst, const uint8_t *src, int32_t n_keys, int32_t n_dims,
                                     int32_t dim_pad, dtype type)
{
    for (int32_t o = 0; o < n_keys; o++, src += n_dims * elem_bytes(type), dst += dim_pad) {
        convert(dst, src, n_dims, type);
        for (int32_t i = n_dims / SIMD_LANES * SIMD_LANES; i < dim_pad; i++)
            dst[i] = i < n_dims ? load_one(src + i * elem_bytes(type), type) : 0;
    }
}

/* Values of key groups [first, last), as far as last_key, to floats [ATTENTION_CHUNK][dim_pad]. */
static void convert_values(const work *w, source *out, const source *in, int32_t first,
                           int32_t last, int32_t last_key)
{
    int32_t n_dims = w->args->kv.head_dim, dim_pad = w->job->slot_floats - 16;
    *out = (source){.step = dim_pad * (int64_t)sizeof(float), .type = DTYPE_F32};
    for (int32_t g = first; g < last; g++) {
        float *dst = w->scratch->chunk + (int64_t)(g - first) * ATTENTION_KEY_GROUP * dim_pad;
        int32_t n = PGD_MIN(ATTENTION_KEY_GROUP, last_key - g * ATTENTION_KEY_GROUP);
        out->at[g] = out->ahead[g] = (const uint8_t *)dst;
        if (in->type == DTYPE_F32)
            convert_value_group(dst, in->at[g], n, n_dims, dim_pad, DTYPE_F32);
        else if (in->type == DTYPE_F16)
            convert_value_group(dst, in->at[g], n, n_dims, dim_pad, DTYPE_F16);
        else
            convert_value_group(dst, in->at[g], n, n_dims, dim_pad, DTYPE_BF16);
    }
}

static void compute_scores(const work *w, const source *keys, int32_t first, int32_t last)
{
    int32_t n_dims = w->args->kv.head_dim;
    for (int32_t t = 0; t < w->n_register_tiles; t++) {
        int32_t pair = w->first_pair[t], n = w->first_pair[t + 1] - pair;
        if (w->last_key[row_of(w, pair + n - 1)] <= first * ATTENTION_KEY_GROUP ||
            w->first_key[row_of(w, pair)] >= last * ATTENTION_KEY_GROUP)
            continue;
        const score_fn *fns = score_fns[type_idx(keys->type)][n - 1];
        const float *q = w->scratch->q + (int64_t)pair * n_dims;
        float *scores = w->scratch->scores + (int64_t)pair * ATTENTION_SPLIT;
        for (int32_t g = first; g < last;) {
            int32_t left = PGD_MIN(last - g, WIDE_GROUPS);
            int32_t width_idx = left >= 4 ? 2 : left >= 2 ? 1 : 0;
            fns[width_idx](scores + g * ATTENTION_KEY_GROUP, q, &keys->at[g], &keys->ahead[g],
                           keys->step, n_dims);
            g += 1 << width_idx;
        }
    }
}

/* Scores [first, last) of one pair become weights. Two vectors at a time, at places that do not
 * depend on first; what of them is outside counts as nothing. */
static void softmax(float *out_max, float *out_sum, float *scores, int32_t first, int32_t last,
                    float soft_cap)
{
    enum { STEP = 2 * SIMD_LANES };
    const vf none = vf_set1(-INFINITY);
    int32_t begin = first / STEP * STEP;
    vf max0 = none, max1 = none, sum0 = vf_zero(), sum1 = vf_zero();
    for (int32_t i = begin; i < last; i += STEP) {
        vf z0 = vf_load(scores + i), z1 = vf_load(scores + i + SIMD_LANES);
        bool is_cut = i < first || i + STEP > last;
        if (soft_cap > 0) {
            z0 = vf_mul(vf_set1(soft_cap), vf_tanh(vf_div(z0, vf_set1(soft_cap))));
            z1 = vf_mul(vf_set1(soft_cap), vf_tanh(vf_div(z1, vf_set1(soft_cap))));
        }
        if (is_cut) {
            z0 = vf_keep(z0, first - i, last - i, none);
            z1 = vf_keep(z1, first - i - SIMD_LANES, last - i - SIMD_LANES, none);
        }
        if (is_cut || soft_cap > 0) {
            vf_store(scores + i, z0);
            vf_store(scores + i + SIMD_LANES, z1);
        }
        max0 = vf_max(max0, z0);
        max1 = vf_max(max1, z1);
    }
    *out_max = vf_max_lane(vf_max(max0, max1));
    vf m = vf_set1(*out_max);
    for (int32_t i = begin; i < last; i += STEP) {
        vf p0 = vf_exp2(vf_sub(vf_load(scores + i), m));
        vf p1 = vf_exp2(vf_sub(vf_load(scores + i + SIMD_LANES), m));
        vf_store(scores + i, p0);
        vf_store(scores + i + SIMD_LANES, p1);
        sum0 = vf_add(sum0, p0);
        sum1 = vf_add(sum1, p1);
    }
    *out_sum = vf_sum(vf_add(sum0, sum1));
}

/* Keys [first, last) for n pairs from pair on. */
static void add_values(const work *w, const source *values, float *part, int64_t step, int32_t pair,
                       int32_t n, int32_t first, int32_t last)
{
    if (first >= last)
        return;
    const value_fn *fns = value_fns[type_idx(values->type)][n - 1];
    const float *weights = w->scratch->scores + (int64_t)pair * ATTENTION_SPLIT;
    int32_t n_vectors = PGD_CEIL_DIV(w->args->kv.head_dim, SIMD_LANES);
    for (int32_t d = 0; d < n_vectors;) {
        bool is_wide = n_vectors - d >= WIDE_DIMS;
        fns[is_wide](part + pair * step + d * SIMD_LANES, step, weights, values,
                     (int64_t)d * SIMD_LANES * elem_bytes(values->type), first, last);
        d += is_wide ? WIDE_DIMS : 1;
    }
}

/* Key groups [first_group, last_group) for all pairs: what a register tile's rows have in common
 * together, the rest pair by pair. */
static void add_value_groups(const work *w, const source *values, float *part, int64_t step,
                             int32_t first_group, int32_t last_group)
{
    int32_t begin = first_group * ATTENTION_KEY_GROUP, end = last_group * ATTENTION_KEY_GROUP;
    for (int32_t t = 0; t < w->n_register_tiles; t++) {
        int32_t pair = w->first_pair[t], n = w->first_pair[t + 1] - pair;
        int32_t r0 = row_of(w, pair), r1 = row_of(w, pair + n - 1);
        /* Both ends grow with the row. */
        int32_t first = PGD_MAX(w->first_key[r1], begin), last = PGD_MIN(w->last_key[r0], end);
        if (first >= last)
            first = last = end; /* nothing in common: all of it is before that */
        for (int32_t i = 0; i < n && w->first_key[r0] < first; i++) {
            int32_t row = row_of(w, pair + i);
            add_values(w, values, part, step, pair + i, 1, PGD_MAX(w->first_key[row], begin),
                       PGD_MIN(w->last_key[row], first));
        }
        add_values(w, values, part, step, pair, n, first, last);
        for (int32_t i = 0; i < n && w->last_key[r1] > last; i++) {
            int32_t row = row_of(w, pair + i);
            add_values(w, values, part, step, pair + i, 1, last, PGD_MIN(w->last_key[row], end));
        }
    }
}

/* The partial results of one split: slot of pair i at part + i * step. */
static void compute_split(work *w, int32_t split, float *part, int64_t step)
{
    source keys, values, converted;
    int32_t stats_at = w->job->slot_floats - 16;
    find_keys(w, split);
    find_pages(w, split, &keys, &values);
    bool is_large = w->n_register_tiles >= CONVERT_FROM && keys.type != DTYPE_F32;
    bool is_ragged = w->args->kv.head_dim % SIMD_LANES != 0;
    const int32_t chunk_groups = ATTENTION_CHUNK / ATTENTION_KEY_GROUP;
    for (int32_t g = w->first_group; g < w->last_group; g += chunk_groups) {
        int32_t end = PGD_MIN(g + chunk_groups, w->last_group);
        if (is_large)
            convert_keys(w, &converted, &keys, g, end);
        compute_scores(w, is_large ? &converted : &keys, g, end);
    }
    int32_t last_key = 0;
    for (int32_t i = 0; i < w->n_pairs; i++) {
        float *slot = part + i * step;
        int32_t row = row_of(w, i);
        for (int32_t d = 0; d < stats_at; d += SIMD_LANES)
            vf_store(slot + d, vf_zero());
        last_key = PGD_MAX(last_key, w->last_key[row]);
        if (w->first_key[row] < w->last_key[row])
            softmax(&slot[stats_at], &slot[stats_at + 1],
                    w->scratch->scores + (int64_t)i * ATTENTION_SPLIT, w->first_key[row],
                    w->last_key[row], w->args->soft_cap * LOG2_E);
        else
            slot[stats_at + 1] = -1;
    }
    for (int32_t g = w->first_group; g < w->last_group; g += chunk_groups) {
        int32_t end = PGD_MIN(g + chunk_groups, w->last_group);
        if (is_large || is_ragged)
            convert_values(w, &converted, &values, g, end, last_key);
        add_value_groups(w, is_large || is_ragged ? &converted : &values, part, step, g, end);
    }
}

/* --- fold and output --- */

static void init_total(const work *w, float *total, int32_t pair)
{
    int32_t stats_at = w->job->slot_floats - 16;
    const float *sinks = w->args->sinks;
    for (int32_t d = 0; d < stats_at; d += SIMD_LANES)
        vf_store(total + d, vf_zero());
    /* Nothing yet weighs exp(-inf - m) = 0 in the fold, exactly. */
    total[stats_at] = sinks ? sinks[w->first_head + pair % w->n_heads] * LOG2_E : -INFINITY;
    total[stats_at + 1] = sinks ? 1 : 0;
}

static void fold(const work *w, float *total, const float *part)
{
    int32_t stats_at = w->job->slot_floats - 16;
    float m0 = total[stats_at], m1 = part[stats_at], l1 = part[stats_at + 1];
    if (l1 == -1)
        return; /* no key of this split */
    float m = m1 <= m0 ? m0 : m1;
    vf keep = vf_exp2(vf_set1(m0 - m)), add = vf_exp2(vf_set1(m1 - m));
    for (int32_t d = 0; d < stats_at; d += SIMD_LANES)
        vf_store(total + d, vf_fma(vf_load(part + d), add, vf_mul(vf_load(total + d), keep)));
    total[stats_at] = m;
    total[stats_at + 1] =
        vf_first(vf_fma(vf_set1(l1), add, vf_mul(vf_set1(total[stats_at + 1]), keep)));
}

static void write_out(const work *w, const float *total, int32_t pair)
{
    const attention_args *a = w->args;
    int32_t n_dims = a->kv.head_dim, row = row_of(w, pair), head = pair - row * w->n_heads;
    float *out = a->out + (int64_t)(w->tile->first_row + row) * a->out_stride +
                 (int64_t)(w->first_head + head) * n_dims;
    vf sum = vf_set1(total[w->job->slot_floats - 15]);
    for (int32_t d = 0; d < n_dims; d += SIMD_LANES)
        vf_store_n(out + d, n_dims - d, vf_div(vf_load(total + d), sum));
}

/* All splits at hand at once. */
static void run_whole(work *w)
{
    int64_t step = w->job->slot_floats;
    float *part = w->scratch->part, *total = w->scratch->total;
    for (int32_t i = 0; i < w->n_pairs; i++)
        init_total(w, total + i * step, i);
    for (int32_t s = 0; s < w->tile->n_splits; s++) {
        compute_split(w, w->tile->first_split + s, part, step);
        for (int32_t i = 0; i < w->n_pairs; i++)
            fold(w, total + i * step, part + i * step);
    }
    for (int32_t i = 0; i < w->n_pairs; i++)
        write_out(w, total + i * step, i);
}

static void run_piece(work *w, int32_t unit, int32_t first, int32_t last)
{
    const attention_tile *t = w->tile;
    int64_t step = (int64_t)t->n_splits * w->job->slot_floats;
    int64_t slots_per_unit = (int64_t)t->n_rows * w->job->heads_per_unit * t->n_splits;
    float *slots = w->job->slots + (t->first_slot + unit * slots_per_unit) * w->job->slot_floats;
    for (int32_t s = first; s < last; s++)
        compute_split(w, t->first_split + s, slots + (int64_t)s * w->job->slot_floats, step);
    if (__atomic_add_fetch(&t->counters[unit], 1, __ATOMIC_ACQ_REL) != t->n_pieces)
        return;
    float *total = w->scratch->total;
    for (int32_t i = 0; i < w->n_pairs; i++) {
        init_total(w, total, i);
        for (int32_t s = 0; s < t->n_splits; s++)
            fold(w, total, slots + i * step + (int64_t)s * w->job->slot_floats);
        write_out(w, total, i);
    }
}

static void run_unit(const attention_job *job, const attention_tile *tile, int32_t unit,
                     int32_t first, int32_t last, const attention_scratch *scratch)
{
    work w;
    init_work(&w, job, tile, unit, scratch);
    pack_q(&w);
    if (tile->n_pieces == 1)
        run_whole(&w);
    else
        run_piece(&w, unit, first, last);
}

#endif
#endif
