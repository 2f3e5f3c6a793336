/* Sampling over float vectors (simd.h): the reference's tokens, found without its work per
 * candidate.
 *
 * Greedy: maxima of vectors, then the first place of the maximum. Ordered candidates: the k-th
 * largest of the maxima of STRIPE ids is a lower bound of the k-th largest logit, so that few ids
 * go onto the heap; when top_p wants more than these, more do, in the end all. All others: keys are computed in f32
 * for all ids, and those within KEY_TOLERANCE of the best, a large multiple of the error, are
 * decided in double. Only the mass for top_p and the sum of the log probabilities are f32
 * exponentials, added in double in a fixed order.
 */
#ifndef KERNELS_CPU_SAMPLE_SIMD_H
#define KERNELS_CPU_SAMPLE_SIMD_H

#include <float.h>

#include "kernels/cpu/sample_internal.h"
#include "kernels/cpu/simd.h"

#if defined(SIMD_LANES)

enum {
    STRIPE = 64,            /* ids of which one maximum is kept */
    FIRST_CANDIDATES = 128, /* ordered at first when only top_p limits them */
    MORE_CANDIDATES = 6,    /* so many times as many when they did not do */
    WORDS = 4 * SIMD_LANES  /* ids that one Philox call over vectors covers */
};

/* Keys that can win are above -3.2, so that |y| is below 27 and its f32 error below 1e-5. */
#    define KEY_TOLERANCE 1e-3f

static float max_of(const float *z, int32_t n)
{
    vf m0 = vf_set1(-INFINITY), m1 = m0;
    int32_t i = 0;
    for (; i + 2 * SIMD_LANES <= n; i += 2 * SIMD_LANES) {
        m0 = vf_max(m0, vf_load(z + i));
        m1 = vf_max(m1, vf_load(z + i + SIMD_LANES));
    }
    float m = vf_max_lane(vf_max(m0, m1));
    for (; i < n; i++)
        m = z[i] > m ? z[i] : m;
    return m;
}

/* Largest value; *is_finite: no NaN or infinity at all. */
static float scan(const float *x, int32_t n, bool *is_finite)
{
    vf max[2] = {vf_set1(-INFINITY), vf_set1(-INFINITY)}, sum[2] = {vf_zero(), vf_zero()};
    int32_t i = 0;
    for (; i + 2 * SIMD_LANES <= n; i += 2 * SIMD_LANES) {
        for (int j = 0; j < 2; j++) {
            vf v = vf_load(x + i + j * SIMD_LANES);
            max[j] = vf_max(max[j], v);
            sum[j] = vf_fma(v, vf_zero(), sum[j]); /* NaN as soon as one is not finite */
        }
    }
    float m = vf_max_lane(vf_max(max[0], max[1])), s = vf_sum(vf_add(sum[0], sum[1]));
    for (; i < n; i++) {
        m = x[i] > m ? x[i] : m;
        s += x[i] * 0;
    }
    *is_finite = s == 0;
    return m;
}

/* First id in [first, n) with z >= limit; n when there is none. */
static int32_t find_ge(const float *z, int32_t first, int32_t n, float limit)
{
    vf l = vf_set1(limit);
    int32_t i = first;
    for (; i + 2 * SIMD_LANES <= n; i += 2 * SIMD_LANES) {
        uint32_t b0 = vf_bits_ge(vf_load(z + i), l);
        uint32_t b1 = vf_bits_ge(vf_load(z + i + SIMD_LANES), l);
        if (b0 | b1)
            return b0 ? i + __builtin_ctz(b0) : i + SIMD_LANES + __builtin_ctz(b1);
    }
    while (i < n && !(z[i] >= limit))
        i++;
    return i;
}

/* sum exp((z - z_max) / temperature), each term in f32. */
static double sum_exp(const float *z, int32_t n, float z_max, float temperature)
{
    vf m = vf_set1(z_max), t = vf_set1(temperature);
    double total = 0;
    for (int32_t i = 0; i < n;) {
        vf sum = vf_zero();
        int32_t end = PGD_MIN(n, i + 64 * SIMD_LANES);
        for (; i + SIMD_LANES <= end; i += SIMD_LANES)
            sum = vf_add(sum, vf_exp(vf_div(vf_sub(vf_load(z + i), m), t)));
        if (i < end) {
            vf p = vf_exp(vf_div(vf_sub(vf_load_n(z + i, end - i), m), t));
            sum = vf_add(sum, vf_keep(p, 0, end - i, vf_zero()));
            i = end;
        }
        total += vf_sum(sum);
    }
    return total;
}

/* --- ordered candidates --- */

/* The n-th largest of values, which are reordered; n in [1, n_values]. */
static float nth_largest(float *values, int32_t n_values, int32_t n)
{
    int32_t first = 0, last = n_values - 1, at = n - 1;
    while (first < last) {
        float pivot = values[(first + last) / 2];
        int32_t i = first, j = last;
        while (i <= j) {
            while (values[i] > pivot)
                i++;
            while (values[j] < pivot)
                j--;
            if (i <= j) {
                float swap = values[i];
                values[i++] = values[j];
                values[j--] = swap;
            }
        }
        if (at <= j)
            last = j;
        else if (at >= i)
            first = i;
        else
            break;
    }
    return values[at];
}

/* A logit that at least n ids reach; -INFINITY when that is not quick to find. */
static float lower_bound(float *maxima, const float *z, int32_t vocab_size, int32_t n)
{
    int32_t n_stripes = vocab_size / STRIPE;
    if (n > n_stripes)
        return -INFINITY;
    for (int32_t i = 0; i < n_stripes; i++) {
        vf m = vf_load(z + i * STRIPE);
        for (int32_t j = SIMD_LANES; j < STRIPE; j += SIMD_LANES)
            m = vf_max(m, vf_load(z + i * STRIPE + j));
        maxima[i] = vf_max_lane(m);
    }
    return nth_largest(maxima, n_stripes, n);
}

/* A heap of all ids that reach limit, masked ones excepted. */
static int32_t build_heap(int32_t *heap, const float *z, int32_t vocab_size, float limit)
{
    int32_t n = 0;
    for (int32_t id = 0; (id = find_ge(z, id, vocab_size, limit)) < vocab_size; id++) {
        if (z[id] > -INFINITY)
            heap[n++] = id;
    }
    sample__make_heap(heap, n, z);
    return n;
}

/* Offers what top_k and top_p leave of the heap's ids; false when top_p wants more than it holds.
 */
static bool offer_ordered(sample_chooser *c, int32_t *heap, int32_t n_heap, const float *z,
                          int32_t n_keep, double mass, bool is_all)
{
    const sample_row *r = c->row;
    double reached = 0;
    for (int32_t i = 0; i < n_keep; i++) {
        if (n_heap == 0)
            return is_all;
        token_id id = sample__pop_heap(heap, &n_heap, z);
        sample__offer(c, id, z[id]);
        reached += exp(sample__scaled(c, z[id]));
        if (r->top_p < 1 && reached >= r->top_p * mass)
            break;
    }
    return true;
}

static double top_k_mass(const sample_chooser *c, int32_t *heap, int32_t n_heap, const float *z)
{
    double mass = 0;
    for (int32_t i = 0; i < c->row->top_k && n_heap > 0; i++)
        mass += exp(sample__scaled(c, z[sample__pop_heap(heap, &n_heap, z)]));
    return mass;
}

static void choose_ordered(sample_chooser *c, sample_scratch *s, const float *z, int32_t vocab_size)
{
    const sample_row *r = c->row;
    bool has_top_k = r->top_k > 0 && r->top_k < vocab_size;
    int32_t n_keep = has_top_k ? r->top_k : vocab_size;
    int32_t n_wanted = has_top_k ? r->top_k : FIRST_CANDIDATES;
    double mass = 0;
    if (!has_top_k)
        mass = sum_exp(z, vocab_size, (float)c->z_max, r->temperature);
    for (;; n_wanted *= MORE_CANDIDATES) {
        /* The heap's memory is free for the maxima until it is built. */
        float limit = lower_bound((float *)(void *)s->heap, z, vocab_size, n_wanted);
        bool is_all = limit == -INFINITY; /* at the latest when there are fewer stripes */
        int32_t n_heap = build_heap(s->heap, z, vocab_size, limit);
        if (has_top_k && r->top_p < 1) {
            mass = top_k_mass(c, s->heap, n_heap, z);
            sample__make_heap(s->heap, n_heap, z);
        }
        sample_chooser attempt = *c;
        if (offer_ordered(&attempt, s->heap, n_heap, z, n_keep, mass, is_all || has_top_k)) {
            *c = attempt;
            return;
        }
    }
}

/* --- the rest: keys of all ids --- */

/* ln of positive normal values, to 1e-6. x = m 2^e with m around 1; ln m = (m - 1) p(m - 1), p
 * interpolated at Chebyshev nodes. */
SIMD_INLINE vf vf_log(vf x)
{
    static const float p[] = {-0.09895351f, 0.16126248f, -0.17278206f, 0.19913349f,
                              -0.24968907f, 0.33334607f, -0.50000376f, 0.99999994f};
    vf e = vf_exponent(x), m = vf_mantissa(x), big = vf_set1(0x1.6a09e6p+0f);
    vf t = vf_sub(vf_if_ge(m, big, vf_mul(m, vf_set1(0.5f)), m), vf_set1(1.0f));
    e = vf_if_ge(m, big, vf_add(e, vf_set1(1.0f)), e);
    vf sum = vf_set1(p[0]);
    SIMD_UNROLL
    for (size_t i = 1; i < PGD_ARRAY_LEN(p); i++)
        sum = vf_fma(sum, t, vf_set1(p[i]));
    return vf_fma(e, vf_set1(0x1.62e430p-1f), vf_mul(t, sum));
}

/* g = -ln E, E = -ln(1 - u), u = (word + 0.5) 2^-32. For small u, 1 - u would lose all that is known
 * of u: the series of E instead. */
SIMD_INLINE vf gumbel(vi word)
{
    const vf half = vf_set1(0.5f), scale = vf_set1(0x1p-32f);
    vf u = vf_mul(vf_add(vf_from_u32(word), half), scale);
    vf rest = vf_mul(vf_add(vf_from_u32(vi_xor(word, vi_set1(0xffffffffu))), half), scale);
    vf series = vf_fma(u, vf_set1(0.2f), vf_set1(0.25f));
    series = vf_fma(u, series, vf_set1(1.0f / 3));
    series = vf_fma(u, series, half);
    series = vf_fma(u, series, vf_set1(1.0f));
    vf e = vf_if_ge(u, vf_set1(0.0625f), vf_sub(vf_zero(), vf_log(rest)), vf_mul(u, series));
    return vf_sub(vf_zero(), vf_log(e));
}

/* The words of ids [first, first + WORDS) in order; first % WORDS == 0. */
SIMD_INLINE void philox(vi words[4], const sample_row *r, int32_t first)
{
    const vi m0 = vi_set1(0xD2511F53u), m1 = vi_set1(0xCD9E8D57u);
    vi c0 = vi_add(vi_set1((uint32_t)first / 4), vi_unpack_order());
    vi c1 = vi_set1((uint32_t)(r->n_tokens - r->n_prompt_tokens));
    vi c2 = vi_set1((uint32_t)r->choice_idx), c3 = vi_set1(0);
    uint32_t k0 = (uint32_t)r->seed, k1 = (uint32_t)(r->seed >> 32);
    for (int round = 0; round < 10; round++) {
        vi high0, low0, high1, low1;
        vi_mul_wide(&high0, &low0, c0, m0);
        vi_mul_wide(&high1, &low1, c2, m1);
        c0 = vi_xor(vi_xor(high1, c1), vi_set1(k0));
        c1 = low1;
        c2 = vi_xor(vi_xor(high0, c3), vi_set1(k1));
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
    vi_unpack4(words);
}

/* keys[id] = y + g in f32, -inf for ids that min_p surely drops; returns the best of those that it
 * surely keeps. */
static float compute_keys(float *keys, const sample_chooser *c, const float *z, int32_t vocab_size)
{
    const sample_row *r = c->row;
    const vf none = vf_set1(-INFINITY), m = vf_set1((float)c->z_max);
    const vf scale = vf_set1(1.0f / r->temperature);
    float y_min = r->min_p > 0 ? logf(r->min_p) : -INFINITY;
    const vf sure = vf_set1(y_min + KEY_TOLERANCE), maybe = vf_set1(y_min - KEY_TOLERANCE);
    vf best = none;
    for (int32_t id = 0; id < vocab_size; id += WORDS) {
        vi words[4];
        philox(words, r, id);
        for (int j = 0; j < 4; j++) {
            int32_t at = id + j * SIMD_LANES, left = vocab_size - at;
            if (left <= 0)
                break;
            vf y = vf_keep(vf_mul(vf_sub(vf_load_n(z + at, left), m), scale), 0, left, none);
            vf key = vf_add(y, gumbel(words[j]));
            best = vf_max(best, vf_if_ge(y, sure, key, none));
            vf_store_n(keys + at, left, vf_if_ge(y, maybe, key, none));
        }
    }
    return vf_max_lane(best);
}

static void choose_any(sample_chooser *c, float *keys, const float *z, int32_t vocab_size)
{
    float best = compute_keys(keys, c, z, vocab_size);
    float limit = PGD_MAX(best - KEY_TOLERANCE, -FLT_MAX); /* finite: dropped ids stay out */
    for (int32_t id = 0; (id = find_ge(keys, id, vocab_size, limit)) < vocab_size; id++)
        sample__offer(c, id, z[id]);
}

/* --- a row --- */

static token_id choose(sample_scratch *s, const sample_row *r, const float *z, float z_max,
                       int32_t vocab_size)
{
    if (!(z_max > -INFINITY))
        return -1;
    if (r->temperature < SAMPLE_MIN_TEMPERATURE)
        return find_ge(z, 0, vocab_size, z_max);
    sample_chooser c = {.row = r, .z_max = z_max, .best_id = -1};
    if (r->top_k > 0 || r->top_p < 1)
        choose_ordered(&c, s, z, vocab_size);
    else
        choose_any(&c, (float *)(void *)s->heap, z, vocab_size);
    return c.best_id;
}

static void fill_logprobs(sample_row *r, float x_max, int32_t vocab_size)
{
    const float *x = r->logits;
    double log_sum = x_max + log(sum_exp(x, vocab_size, x_max, 1));
    r->logprobs[0] = (sample_logprob){r->token, (float)(x[r->token] - log_sum)};
    if (r->n_logprobs == 0)
        return;
    /* Insertion into a short descending list; equal logits keep the order of ids. */
    sample_logprob *best = r->logprobs + 1;
    int32_t n = 0;
    float limit = -FLT_MAX;
    for (int32_t id = 0; (id = find_ge(x, id, vocab_size, limit)) < vocab_size; id++) {
        if (n == r->n_logprobs && !(x[id] > x[best[n - 1].id]))
            continue;
        int32_t at = n < r->n_logprobs ? n++ : n - 1;
        for (; at > 0 && x[id] > x[best[at - 1].id]; at--)
            best[at] = best[at - 1];
        best[at].id = id;
        if (n == r->n_logprobs)
            limit = x[best[n - 1].id];
    }
    for (int32_t i = 0; i < n; i++)
        best[i].logprob = (float)(x[best[i].id] - log_sum);
}

static void sample_one(sample_scratch *s, sample_row *r, int32_t vocab_size)
{
    bool is_finite;
    float x_max = scan(r->logits, vocab_size, &is_finite);
    r->error = is_finite ? SAMPLE_OK : SAMPLE_ERROR_NOT_FINITE;
    if (!is_finite) {
        r->token = -1;
        return;
    }
    if (!r->has_token) {
        const float *z = sample__adjust(s, r, vocab_size);
        r->token = choose(s, r, z, z == r->logits ? x_max : max_of(z, vocab_size), vocab_size);
    }
    if (r->token < 0)
        r->error = SAMPLE_ERROR_ALL_MASKED;
    else if (r->n_logprobs >= 0)
        fill_logprobs(r, x_max, vocab_size);
}

#endif
#endif
