/* Stores K (transposed inside the page) and V: the oracle for conversion and layout. */
#include "kernels/kv_write.h"

#include <math.h>

#include "kernels/cpu/cpu_split.h"

#define F16_MAX 65504.0f

static void store(void *page, size_t elem, float value, dtype type)
{
    switch (type) {
    case DTYPE_F32:
        ((float *)page)[elem] = value;
        break;
    case DTYPE_F16:
        /* A NaN fails both comparisons and stays. */
        value = value > F16_MAX ? F16_MAX : value < -F16_MAX ? -F16_MAX : value;
        ((uint16_t *)page)[elem] = dtype_f32_to_f16(value);
        break;
    default:
        ((uint16_t *)page)[elem] = dtype_f32_to_bf16(value);
        break;
    }
}

static void write_row(const kv_write_args *a, int64_t t)
{
    const kv_page_layout *kv = &a->kv;
    int32_t block = a->slots[t] / kv->block_size;
    int32_t offset = a->slots[t] % kv->block_size;
    uint8_t *page = (uint8_t *)a->pages + (size_t)block * kv_page_bytes(kv);
    for (int32_t h = 0; h < kv->n_kv_heads; h++) {
        const float *k = a->k + t * a->k_stride + (int64_t)h * kv->head_dim;
        const float *v = a->v + t * a->v_stride + (int64_t)h * kv->head_dim;
        size_t k_at = kv_page_k_elem(kv, h) + (size_t)offset;
        size_t v_at = kv_page_v_elem(kv, h) + (size_t)offset * (size_t)kv->head_dim;
        for (int32_t i = 0; i < kv->head_dim; i++) {
            store(page, k_at + (size_t)i * (size_t)kv->block_size, k[i], kv->type);
            store(page, v_at + (size_t)i, v[i], kv->type);
        }
    }
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const kv_write_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        if (a->slots[t] >= 0)
            write_row(a, t);
    }
}

pgd_err kv_write_ref(const kv_write_args *args, kernel_ctx *ctx)
{
    int64_t width = (int64_t)args->kv.n_kv_heads * args->kv.head_dim;
    if (!kv_page_layout_is_valid(&args->kv) || args->n_rows < 0 || args->k_stride < width ||
        args->v_stride < width)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, 2 * args->n_rows * width);
    return PGD_OK;
}
