/* Rotary position embedding in double: the oracle, and the path of last resort. */
#include "kernels/rope.h"

#include "kernels/cpu/cpu_split.h"

static void rotate_head(float *x, const float *cos_sin, int32_t rope_dim, rope_pairs pairs)
{
    int32_t half = rope_dim / 2;
    for (int32_t i = 0; i < half; i++) {
        float *a = pairs == ROPE_PAIRS_ADJACENT ? &x[2 * i] : &x[i];
        float *b = pairs == ROPE_PAIRS_ADJACENT ? &x[2 * i + 1] : &x[i + half];
        double c = cos_sin[i], s = cos_sin[half + i];
        double x0 = *a, x1 = *b;
        *a = (float)(x0 * c - x1 * s);
        *b = (float)(x0 * s + x1 * c);
    }
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const rope_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        const float *cos_sin = a->table + (int64_t)a->positions[t] * a->rope_dim;
        for (int32_t h = 0; h < a->n_heads; h++)
            rotate_head(a->x + t * a->x_stride + (int64_t)h * a->head_dim, cos_sin, a->rope_dim,
                        a->pairs);
    }
}

pgd_err rope_ref(const rope_args *args, kernel_ctx *ctx)
{
    int64_t width = (int64_t)args->n_heads * args->head_dim;
    if (args->n_rows < 0 || args->n_heads < 0 || args->rope_dim < 2 || args->rope_dim % 2 != 0 ||
        args->rope_dim > args->head_dim || args->x_stride < width)
        return PGD_EINVAL;
    cpu_split_run(ctx, run, (void *)args, args->n_rows * width);
    return PGD_OK;
}
