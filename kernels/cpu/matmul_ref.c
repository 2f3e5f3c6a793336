/* Reference matrix product: rows of the file as they are, one output after the other, double sums.
 *
 * It is the oracle of the fast levels and the path of a CPU without AVX2, so it stays plain: a
 * weight row is dequantized once per call into the thread's own piece of the workspace. Threads
 * split the output rows, which changes no sum.
 */
#include <math.h>
#include <string.h>

#include "common/mem.h"
#include "kernels/cpu/matmul_internal.h"

typedef struct ref_job {
    const matmul_args *args;
    cpu_pool *pool;
    float *rows; /* [n_threads, row_floats] */
    size_t row_floats;
} ref_job;

static size_t row_floats(int32_t n_in)
{
    return PGD_ROUND_UP((size_t)n_in, 16);
}

static size_t ref_packed_bytes(dtype type, int32_t n_out, int32_t n_in)
{
    const dtype_info *info = dtype_get_info((int32_t)type);
    size_t n_bytes;
    if (info == NULL || !info->is_weight || n_out < 0 || n_in < 0)
        return 0;
    if (!mem_mul(&n_bytes, dtype_row_bytes(type, n_in), (size_t)n_out))
        return 0;
    return n_bytes;
}

static void ref_pack(packed_weight *w, const void *rows, int32_t first_row, int32_t n_rows)
{
    size_t row_bytes = dtype_row_bytes(w->type, w->n_in);
    __atomic_store_n(&w->layout, MATMUL_LAYOUT_ROWS, __ATOMIC_RELAXED); /* several threads pack */
    memcpy((char *)w->data + (size_t)first_row * row_bytes, rows, (size_t)n_rows * row_bytes);
}

static size_t ref_workspace_bytes(int32_t max_rows, int32_t max_n_in, int32_t n_threads)
{
    (void)max_rows;
    return row_floats(max_n_in) * sizeof(float) * (size_t)n_threads;
}

static double dot(const float *a, const float *b, int32_t n)
{
    double sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* Output n of weight j, for the rows of group g. */
static void ref_row(const matmul_args *args, int32_t j, int32_t g, int32_t n, float *w_row)
{
    const packed_weight *w = &args->weights[j][g];
    int32_t last = matmul__group_start(args, g + 1);
    size_t row_bytes = dtype_row_bytes(w->type, w->n_in);
    dtype_dequantize_row(w_row, (const char *)w->data + (size_t)n * row_bytes, w->n_in, w->type);
    for (int32_t t = matmul__group_start(args, g); t < last; t++) {
        float *out = args->out[j] + t * args->out_stride[j] + n;
        double sum = dot(args->x + t * args->x_stride, w_row, args->n_in);
        if (args->bias[j] != NULL)
            sum += args->bias[j][g * args->bias_stride + n];
        *out = (float)(args->accumulate ? sum + *out : sum);
    }
}

static void ref_thread(void *arg, int32_t thread_idx, int32_t n_threads)
{
    (void)n_threads;
    const ref_job *job = arg;
    float *w_row = job->rows + (size_t)thread_idx * job->row_floats;
    int64_t n_items = 0;
    for (int32_t j = 0; j < job->args->n_weights; j++)
        n_items += job->args->weights[j]->n_out;
    int64_t first;
    int64_t last;
    while (cpu_pool_next(job->pool, n_items, 16, &first, &last)) {
        for (int64_t i = first; i < last; i++) {
            int32_t j = 0;
            int64_t n = i;
            while (n >= job->args->weights[j]->n_out)
                n -= job->args->weights[j++]->n_out;
            for (int32_t g = 0; g < matmul__n_groups(job->args); g++) {
                if (matmul__group_start(job->args, g) < matmul__group_start(job->args, g + 1))
                    ref_row(job->args, j, g, (int32_t)n, w_row);
            }
        }
    }
}

static pgd_err ref_run(const matmul_args *args, kernel_ctx *ctx)
{
    int32_t n_threads = cpu_pool_n_threads(ctx->pool);
    PGD_TRY(matmul__check(args, ctx, MATMUL_LAYOUT_ROWS,
                          ref_workspace_bytes(args->n_rows, args->n_in, n_threads)));
    ref_job job = {args, ctx->pool, ctx->workspace, row_floats(args->n_in)};
    cpu_pool_run(ctx->pool, ref_thread, &job);
    return PGD_OK;
}

const matmul_impl matmul__ref = {
    .packed_bytes = ref_packed_bytes,
    .pack = ref_pack,
    .pack_rows = 1,
    .run = ref_run,
    .workspace_bytes = ref_workspace_bytes,
};

/* --- the int8 path in plain C --- */

static float bits_to_f32(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

void matmul__quantize_ref(matmul_x_unit *out, const float *x, int32_t n_units)
{
    for (int32_t b = 0; b < n_units; b++, x += MATMUL_UNIT, out++) {
        /* The largest magnitude by bits, so that a NaN counts as larger than all and reaches the
         * output. */
        uint32_t max_bits = 0;
        for (int i = 0; i < MATMUL_UNIT; i++) {
            uint32_t bits;
            memcpy(&bits, &x[i], sizeof(bits));
            max_bits = PGD_MAX(max_bits, bits & 0x7fffffffu);
        }
        float max = bits_to_f32(max_bits);
        /* Below 2^-100 the reciprocal would overflow: such a unit is zero. */
        out->d = max < 0x1p-100f ? 0.0f : max / 127.0f;
        float inverse = out->d == 0.0f ? 0.0f : 1.0f / out->d;
        int32_t sums[2] = {0, 0};
        for (int i = 0; i < MATMUL_UNIT; i++) {
            float scaled = x[i] * inverse;
            out->q[i] = isfinite(scaled) ? (int8_t)lrintf(scaled) : 0;
            sums[i / 16] += out->q[i];
        }
        out->d_sum = out->d * (float)(sums[0] + sums[1]);
        out->neg_sum = -(sums[0] + sums[1]);
        out->neg_sum_first = -sums[0];
    }
}

void matmul_ref_quantized(float *out, const float *x, const void *w, dtype type, int32_t n_rows,
                          int32_t n_out, int32_t n_in)
{
    size_t row_bytes = dtype_row_bytes(type, n_in);
    float *w_row = mem_calloc((size_t)n_in + 1, sizeof(float));
    float *x_row = mem_calloc((size_t)n_in + 1, sizeof(float));
    PGD_ASSERT(w_row != NULL && x_row != NULL);
    for (int32_t t = 0; t < n_rows; t++) {
        for (int32_t b = 0; b < n_in / MATMUL_UNIT; b++) {
            matmul_x_unit unit;
            matmul__quantize_ref(&unit, x + (size_t)t * (size_t)n_in + b * MATMUL_UNIT, 1);
            for (int i = 0; i < MATMUL_UNIT; i++)
                x_row[b * MATMUL_UNIT + i] = unit.d * (float)unit.q[i];
        }
        for (int32_t n = 0; n < n_out; n++) {
            dtype_dequantize_row(w_row, (const char *)w + (size_t)n * row_bytes, n_in, type);
            out[(size_t)t * (size_t)n_out + (size_t)n] = (float)dot(x_row, w_row, n_in);
        }
    }
    mem_free(w_row);
    mem_free(x_row);
}
