/* Rotary position embedding over float vectors (simd.h).
 *
 * Halves: a vector of first halves and one of second halves. Adjacent: a vector holds pairs (a, b);
 * x * (c, c) -+ (b, a) * (s, s) is one fused step, with cosines and sines doubled once per row for
 * all heads. What is left of a head beyond whole vectors goes one pair at a time, with the same
 * roundings. */
#ifndef KERNELS_CPU_ROPE_SIMD_H
#define KERNELS_CPU_ROPE_SIMD_H

#include <math.h>

#include "kernels/cpu/cpu_split.h"
#include "kernels/cpu/simd.h"
#include "kernels/rope.h"

#if defined(SIMD_LANES)

/* fma(x, c, -+(y s)), the product rounded first, as the vectors have it. */
static void rotate_pair(float *a, float *b, float c, float s)
{
    float x0 = *a, x1 = *b, p0 = x0 * s, p1 = x1 * s;
    *a = fmaf(x0, c, -p1);
    *b = fmaf(x1, c, p0);
}

static void rotate_adjacent(float *x, int32_t n_heads, int32_t head_dim, const float *cos_sin,
                            int32_t half)
{
    int32_t i = 0;
    for (; i + SIMD_LANES <= half; i += SIMD_LANES) {
        vf c = vf_load(cos_sin + i), s = vf_load(cos_sin + half + i);
        vf c0 = vf_double_low(c), c1 = vf_double_high(c);
        vf s0 = vf_double_low(s), s1 = vf_double_high(s);
        float *at = x + 2 * i;
        for (int32_t h = 0; h < n_heads; h++, at += head_dim) {
            vf x0 = vf_load(at), x1 = vf_load(at + SIMD_LANES);
            vf_store(at, vf_fmaddsub(x0, c0, vf_mul(vf_swap_pairs(x0), s0)));
            vf_store(at + SIMD_LANES, vf_fmaddsub(x1, c1, vf_mul(vf_swap_pairs(x1), s1)));
        }
    }
    for (; i < half; i++) {
        for (int32_t h = 0; h < n_heads; h++) {
            float *at = x + (int64_t)h * head_dim + 2 * i;
            rotate_pair(at, at + 1, cos_sin[i], cos_sin[half + i]);
        }
    }
}

static void rotate_halves(float *x, int32_t n_heads, int32_t head_dim, const float *cos_sin,
                          int32_t half)
{
    int32_t i = 0;
    for (; i + SIMD_LANES <= half; i += SIMD_LANES) {
        vf c = vf_load(cos_sin + i), s = vf_load(cos_sin + half + i);
        float *at = x + i;
        for (int32_t h = 0; h < n_heads; h++, at += head_dim) {
            vf a = vf_load(at), b = vf_load(at + half);
            vf_store(at, vf_fma(a, c, vf_sub(vf_zero(), vf_mul(b, s))));
            vf_store(at + half, vf_fma(b, c, vf_mul(a, s)));
        }
    }
    for (; i < half; i++) {
        for (int32_t h = 0; h < n_heads; h++) {
            float *at = x + (int64_t)h * head_dim + i;
            rotate_pair(at, at + half, cos_sin[i], cos_sin[half + i]);
        }
    }
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const rope_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        const float *cos_sin = a->table + (int64_t)a->positions[t] * a->rope_dim;
        float *x = a->x + t * a->x_stride;
        if (a->pairs == ROPE_PAIRS_ADJACENT)
            rotate_adjacent(x, a->n_heads, a->head_dim, cos_sin, a->rope_dim / 2);
        else
            rotate_halves(x, a->n_heads, a->head_dim, cos_sin, a->rope_dim / 2);
    }
}

static pgd_err rope(const rope_args *args, kernel_ctx *ctx)
{
    int64_t width = (int64_t)args->n_heads * args->head_dim;
    if (args->n_rows < 0 || args->n_heads < 0 || args->rope_dim < 2 || args->rope_dim % 2 != 0 ||
        args->rope_dim > args->head_dim || args->x_stride < width)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, args->n_rows * width);
    return PGD_OK;
}

#endif
#endif
