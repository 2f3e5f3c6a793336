/* Stores K and V into their pages over float vectors (simd.h), bit for bit as the reference.
 *
 * Values are converted by whole vectors straight into the page. Keys are converted into a row, then
 * spread over the transposed page, one element per dimension. */
#ifndef KERNELS_CPU_KV_WRITE_SIMD_H
#define KERNELS_CPU_KV_WRITE_SIMD_H

#include <string.h>

#include "kernels/cpu/cpu_split.h"
#include "kernels/cpu/simd.h"
#include "kernels/kv_write.h"

#if defined(SIMD_LANES)

SIMD_INLINE void store_half(uint16_t *out, vf x, dtype type)
{
    if (type == DTYPE_BF16) {
        vf_store_bf16(out, x);
        return;
    }
    x = vf_max(vf_set1(-65504.0f), x); /* a NaN, as the second operand, stays */
    vf_store_f16(out, vf_min(vf_set1(65504.0f), x));
}

/* n values to 16 bits; nothing behind them is touched. */
SIMD_INLINE void convert_row(uint16_t *out, const float *x, int32_t n, dtype type)
{
    int32_t i = 0;
    for (; i + SIMD_LANES <= n; i += SIMD_LANES)
        store_half(out + i, vf_load(x + i), type);
    if (i < n) {
        uint16_t rest[SIMD_LANES];
        store_half(rest, vf_load_n(x + i, n - i), type);
        memcpy(out + i, rest, (size_t)(n - i) * sizeof(uint16_t));
    }
}

SIMD_INLINE void write_half_row(const kv_write_args *a, int64_t t, dtype type)
{
    const kv_page_layout *kv = &a->kv;
    int32_t block = a->slots[t] / kv->block_size, o = a->slots[t] % kv->block_size;
    uint16_t *page = (uint16_t *)(void *)((uint8_t *)a->pages + (size_t)block * kv_page_bytes(kv));
    uint16_t row[KV_PAGE_MAX_HEAD_DIM];
    for (int32_t h = 0; h < kv->n_kv_heads; h++) {
        int64_t at = (int64_t)h * kv->head_dim;
        uint16_t *k = page + kv_page_k_elem(kv, h) + o;
        convert_row(row, a->k + t * a->k_stride + at, kv->head_dim, type);
        for (int32_t i = 0; i < kv->head_dim; i++, k += kv->block_size)
            *k = row[i];
        convert_row(page + kv_page_v_elem(kv, h) + (int64_t)o * kv->head_dim,
                    a->v + t * a->v_stride + at, kv->head_dim, type);
    }
}

static void write_f32_row(const kv_write_args *a, int64_t t)
{
    const kv_page_layout *kv = &a->kv;
    int32_t block = a->slots[t] / kv->block_size, o = a->slots[t] % kv->block_size;
    float *page = (float *)(void *)((uint8_t *)a->pages + (size_t)block * kv_page_bytes(kv));
    for (int32_t h = 0; h < kv->n_kv_heads; h++) {
        int64_t at = (int64_t)h * kv->head_dim;
        const float *src = a->k + t * a->k_stride + at;
        float *k = page + kv_page_k_elem(kv, h) + o;
        for (int32_t i = 0; i < kv->head_dim; i++, k += kv->block_size)
            *k = src[i];
        memcpy(page + kv_page_v_elem(kv, h) + (int64_t)o * kv->head_dim,
               a->v + t * a->v_stride + at, (size_t)kv->head_dim * sizeof(float));
    }
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const kv_write_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        if (a->slots[t] < 0)
            continue;
        if (a->kv.type == DTYPE_F32)
            write_f32_row(a, t);
        else if (a->kv.type == DTYPE_F16)
            write_half_row(a, t, DTYPE_F16);
        else
            write_half_row(a, t, DTYPE_BF16);
    }
}

static pgd_err kv_write(const kv_write_args *args, kernel_ctx *ctx)
{
    int64_t width = (int64_t)args->kv.n_kv_heads * args->kv.head_dim;
    if (!kv_page_layout_is_valid(&args->kv) || args->n_rows < 0 || args->k_stride < width ||
        args->v_stride < width)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, 2 * args->n_rows * width);
    return PGD_OK;
}

#endif
#endif
