/* Matrix products: every weight type on every level of this machine against sums in double.
 *
 * Weights are random bytes with sensible scales, so every bit pattern of a block format occurs. The
 * tolerance is relative to (sum of |x|) * (largest |w| of the row): one wrong nibble is far
 * outside. Exactness (I1) is compared bit by bit: a row alone, in any batch, with any number of
 * threads.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "kernels/matmul.h"

#define RTOL   3e-6
#define CANARY 12345.0f

static const dtype types[] = {DTYPE_F32,  DTYPE_F16,  DTYPE_BF16, DTYPE_Q8_0,
                              DTYPE_Q4_0, DTYPE_Q4_1, DTYPE_Q5_0, DTYPE_Q5_1,
                              DTYPE_Q4_K, DTYPE_Q5_K, DTYPE_Q6_K, DTYPE_MXFP4};
static const cpu_isa levels[] = {CPU_ISA_REF, CPU_ISA_AVX2, CPU_ISA_AVX512, CPU_ISA_AVX512VNNI};

static uint64_t rng_state = 0x9e3779b97f4a7c15u;

static uint32_t rng(void)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng_state >> 32);
}

/* 1 to max, at most n_left. */
static int32_t random_step(int32_t max, int32_t n_left)
{
    int32_t n = 1 + (int32_t)(rng() % (uint32_t)max);
    return PGD_MIN(n, n_left);
}

static float uniform(void) /* [-1, 1) */
{
    return (float)(int32_t)rng() * 0x1p-31f;
}

static bool is_quantized(dtype type)
{
    return type != DTYPE_F32 && type != DTYPE_F16 && type != DTYPE_BF16;
}

static void put_u16(uint8_t *p, uint16_t v)
{
    memcpy(p, &v, sizeof(v));
}

/* [n_out, n_in] of random source data. */
static uint8_t *make_weights(dtype type, int32_t n_out, int32_t n_in)
{
    size_t n_bytes = dtype_row_bytes(type, n_in) * (size_t)n_out;
    uint8_t *w = malloc(n_bytes + 1);
    int64_t n_values = (int64_t)n_out * n_in;
    if (!is_quantized(type)) {
        for (int64_t i = 0; i < n_values; i++) {
            float v = uniform();
            if (type == DTYPE_F32)
                memcpy(w + 4 * i, &v, 4);
            else
                put_u16(w + 2 * i, type == DTYPE_F16 ? dtype_f32_to_f16(v) : dtype_f32_to_bf16(v));
        }
        return w;
    }
    for (size_t i = 0; i < n_bytes; i++)
        w[i] = (uint8_t)rng();
    size_t block_bytes = (size_t)dtype_get_info((int32_t)type)->block_bytes;
    for (uint8_t *b = w; b < w + n_bytes; b += block_bytes) {
        if (type == DTYPE_MXFP4) {
            b[0] = rng() % 64 == 0 ? 0 : (uint8_t)(112 + rng() % 16);
            continue;
        }
        uint8_t *d = type == DTYPE_Q6_K ? b + 208 : b;
        put_u16(d, dtype_f32_to_f16(uniform() * 0.01f));
        if (type == DTYPE_Q4_1 || type == DTYPE_Q5_1 || type == DTYPE_Q4_K || type == DTYPE_Q5_K)
            put_u16(b + 2, dtype_f32_to_f16(uniform() * 0.1f));
        if (type == DTYPE_Q8_0 && rng() % 8 == 0)
            memset(b + 2, 0x80, 32); /* -128 everywhere: the widest products */
    }
    return w;
}

enum { X_PLAIN, X_SPIKES, X_ZERO, X_TINY, X_HUGE, N_X_KINDS };

static void fill_x(float *x, int64_t n, int kind)
{
    for (int64_t i = 0; i < n; i++) {
        float v = uniform();
        if (kind == X_SPIKES)
            v *= rng() % 97 == 0 ? 1000.0f : 1.0f;
        else if (kind == X_ZERO)
            v = rng() % 2 ? 0.0f : -0.0f;
        else if (kind == X_TINY)
            v *= i / 32 % 2 ? 1e-40f : 1e-20f;
        else if (kind == X_HUGE)
            v = (v < 0 ? -1e15f : 1e15f) * (1.0f + (float)(i % 3));
        x[i] = v;
    }
}

typedef struct rig {
    const matmul_impl *impl;
    kernel_ctx ctx;
} rig;

static bool rig_init(rig *g, cpu_isa isa, int32_t n_threads, int32_t max_rows, int32_t max_n_in)
{
    g->impl = matmul_get_impl(isa);
    if (g->impl == NULL)
        return false;
    assert_int_equal(cpu_pool_create(&g->ctx.pool, n_threads, false), PGD_OK);
    g->ctx.workspace_bytes = g->impl->workspace_bytes(max_rows, max_n_in, n_threads);
    g->ctx.workspace = mem_alloc_aligned(g->ctx.workspace_bytes + 64, 64);
    assert_non_null(g->ctx.workspace);
    return true;
}

static void rig_deinit(rig *g)
{
    cpu_pool_destroy(g->ctx.pool);
    mem_free_aligned(g->ctx.workspace, g->ctx.workspace_bytes + 64);
}

static packed_weight pack_weight(const matmul_impl *impl, dtype type, const void *src,
                                 int32_t n_out, int32_t n_in)
{
    packed_weight w = {.type = type, .n_out = n_out, .n_in = n_in};
    w.n_bytes = impl->packed_bytes(type, n_out, n_in);
    assert_true(w.n_bytes > 0);
    w.data = mem_alloc_aligned(w.n_bytes, 64);
    memset(w.data, 0xaa, w.n_bytes);
    impl->pack(&w, src, 0, n_out);
    return w;
}

static void free_weight(packed_weight *w)
{
    mem_free_aligned(w->data, w->n_bytes);
}

/* Sums in double of x, as the level sees it, with the dequantized weights; scale[t, n]: what the
 * tolerance refers to. */
static void oracle(float *out, double *scale, const float *x, int64_t x_stride, const uint8_t *src,
                   dtype type, bool quantize, int32_t n_rows, int32_t n_out, int32_t n_in)
{
    size_t row_bytes = dtype_row_bytes(type, n_in);
    float *w = malloc(((size_t)n_in + 1) * sizeof(float));
    for (int32_t n = 0; n < n_out; n++) {
        dtype_dequantize_row(w, src + (size_t)n * row_bytes, n_in, type);
        double w_max = 0;
        for (int32_t k = 0; k < n_in; k++)
            w_max = fmax(w_max, fabs((double)w[k]));
        for (int32_t t = 0; t < n_rows; t++) {
            double sum = 0;
            double x_sum = 0;
            for (int32_t k = 0; k < n_in; k++) {
                sum += (double)x[t * x_stride + k] * (double)w[k];
                x_sum += fabs((double)x[t * x_stride + k]);
            }
            out[(int64_t)t * n_out + n] = (float)sum;
            scale[(int64_t)t * n_out + n] = x_sum * w_max;
        }
    }
    free(w);
    if (!quantize)
        return;
    for (int32_t t = 0; t < n_rows; t++)
        matmul_ref_quantized(out + (int64_t)t * n_out, x + t * x_stride, src, type, 1, n_out, n_in);
}

/* One product on one level, checked against the oracle. */
static void check_product(cpu_isa isa, dtype type, int32_t n_rows, int32_t n_out, int32_t n_in,
                          int x_kind, bool with_bias, bool accumulate)
{
    rig g;
    if (!rig_init(&g, isa, 1 + (int32_t)(rng() % 2), n_rows, n_in))
        return;
    int64_t x_stride = n_in + (int64_t)(rng() % 5);
    int64_t out_stride = n_out + (int64_t)(rng() % 5);
    size_t n_elems = (size_t)n_rows * (size_t)n_out + 1;
    float *x = malloc(((size_t)n_rows * (size_t)x_stride + 1) * sizeof(float));
    float *out = malloc(((size_t)n_rows * (size_t)out_stride + 1) * sizeof(float));
    float *old = malloc(((size_t)n_rows * (size_t)out_stride + 1) * sizeof(float));
    float *expected = malloc(n_elems * sizeof(float));
    double *scale = malloc(n_elems * sizeof(double));
    float *bias = malloc(((size_t)n_out + 1) * sizeof(float));
    uint8_t *src = make_weights(type, n_out, n_in);
    fill_x(x, n_rows * x_stride, x_kind);
    for (int64_t i = 0; i < n_rows * out_stride; i++)
        old[i] = out[i] = i % out_stride < n_out ? uniform() : CANARY;
    for (int32_t n = 0; n < n_out; n++)
        bias[n] = uniform();
    packed_weight w = pack_weight(g.impl, type, src, n_out, n_in);
    matmul_args args = {.x = x,
                        .x_stride = x_stride,
                        .n_rows = n_rows,
                        .n_in = n_in,
                        .n_weights = 1,
                        .weights = {&w},
                        .out = {out},
                        .out_stride = {out_stride},
                        .bias = {with_bias ? bias : NULL},
                        .accumulate = accumulate};
    assert_int_equal(g.impl->run(&args, &g.ctx), PGD_OK);
    oracle(expected, scale, x, x_stride, src, type, is_quantized(type) && isa != CPU_ISA_REF,
           n_rows, n_out, n_in);
    for (int32_t t = 0; t < n_rows; t++) {
        for (int64_t n = 0; n < out_stride; n++) {
            float got = out[t * out_stride + n];
            if (n >= n_out) {
                assert_true(got == CANARY);
                continue;
            }
            double want = (double)expected[(int64_t)t * n_out + n];
            double tol = RTOL * scale[(int64_t)t * n_out + n] + 1e-36;
            if (with_bias || accumulate)
                tol += 1e-6 + 2e-7 * fabs(want);
            want += with_bias ? (double)bias[n] : 0;
            want += accumulate ? (double)old[t * out_stride + n] : 0;
            if (!(fabs((double)got - want) <= tol))
                fail_msg("%s %s rows %d out %d in %d kind %d: [%d, %d] got %.9g want %.9g tol %.3g",
                         cpu_features_name(isa), dtype_name((int32_t)type), (int)n_rows, (int)n_out,
                         (int)n_in, x_kind, (int)t, (int)n, (double)got, want, tol);
        }
    }
    free_weight(&w);
    free(x);
    free(out);
    free(old);
    free(expected);
    free(scale);
    free(bias);
    free(src);
    rig_deinit(&g);
}

static int32_t random_n_in(dtype type)
{
    int32_t block = dtype_get_info((int32_t)type)->block_elems;
    if (block == 1)
        return 1 + (int32_t)(rng() % 1300);
    return block * (1 + (int32_t)(rng() % (block == 32 ? 23 : 4)));
}

static void test_matmul_matches_oracle(void **state)
{
    (void)state;
    static const int32_t row_counts[] = {0, 1, 2, 3, 5, 7, 8, 17, 64, 129};
    for (size_t l = 0; l < PGD_ARRAY_LEN(levels); l++) {
        for (size_t i = 0; i < PGD_ARRAY_LEN(types); i++) {
            for (size_t r = 0; r < PGD_ARRAY_LEN(row_counts); r++) {
                int32_t n_rows = row_counts[r];
                int32_t n_out = 1 + (int32_t)(rng() % 67);
                int kind = n_rows <= 8 ? (int)(rng() % N_X_KINDS) : X_SPIKES;
                check_product(levels[l], types[i], n_rows, n_out, random_n_in(types[i]), kind,
                              rng() % 2, rng() % 2);
            }
        }
    }
}

static void test_matmul_every_ragged_n_out(void **state)
{
    (void)state;
    for (size_t l = 0; l < PGD_ARRAY_LEN(levels); l++) {
        for (size_t i = 0; i < PGD_ARRAY_LEN(types); i++) {
            int32_t n_in = dtype_get_info((int32_t)types[i])->block_elems;
            for (int32_t n_out = 1; n_out <= 67; n_out++)
                check_product(levels[l], types[i], 1 + n_out % 2, n_out, PGD_MAX(n_in, 32), X_PLAIN,
                              false, false);
        }
    }
}

static void test_matmul_x_kinds(void **state)
{
    (void)state;
    for (size_t l = 0; l < PGD_ARRAY_LEN(levels); l++) {
        for (size_t i = 0; i < PGD_ARRAY_LEN(types); i++) {
            for (int kind = 0; kind < N_X_KINDS; kind++)
                check_product(levels[l], types[i], 3, 37, 512, kind, false, false);
        }
    }
}

/* Runs rows [first, first + n) of x; out has n_out columns. */
static void run_rows(rig *g, const packed_weight *w, float *out, const float *x, int32_t first,
                     int32_t n)
{
    matmul_args args = {.x = x + (int64_t)first * w->n_in,
                        .x_stride = w->n_in,
                        .n_rows = n,
                        .n_in = w->n_in,
                        .n_weights = 1,
                        .weights = {w},
                        .out = {out + (int64_t)first * w->n_out},
                        .out_stride = {w->n_out}};
    assert_int_equal(g->impl->run(&args, &g->ctx), PGD_OK);
}

/* Every row count, thread count and level computes the bits that a row alone has on one thread. */
static void check_exact(dtype type, int32_t n_rows, int32_t n_out, int32_t n_in)
{
    size_t n_bytes = (size_t)n_rows * (size_t)n_out * sizeof(float);
    float *x = malloc((size_t)n_rows * (size_t)n_in * sizeof(float));
    float *alone = malloc(n_bytes);
    float *batch = malloc(n_bytes);
    float *first_level = NULL;
    uint8_t *src = make_weights(type, n_out, n_in);
    fill_x(x, (int64_t)n_rows * n_in, X_SPIKES);
    for (size_t l = 0; l < PGD_ARRAY_LEN(levels); l++) {
        rig g;
        if (!rig_init(&g, levels[l], 1, n_rows, n_in))
            continue;
        packed_weight w = pack_weight(g.impl, type, src, n_out, n_in);
        for (int32_t t = 0; t < n_rows; t++)
            run_rows(&g, &w, alone, x, t, 1);
        rig_deinit(&g);
        for (int32_t n_threads = 1; n_threads <= 3; n_threads++) {
            assert_true(rig_init(&g, levels[l], n_threads, n_rows, n_in));
            memset(batch, 0xff, n_bytes);
            run_rows(&g, &w, batch, x, 0, n_rows);
            assert_memory_equal(batch, alone, n_bytes);
            memset(batch, 0xff, n_bytes);
            for (int32_t t = 0; t < n_rows;) {
                int32_t n = random_step(1 + n_rows / 4, n_rows - t);
                run_rows(&g, &w, batch, x, t, n);
                t += n;
            }
            assert_memory_equal(batch, alone, n_bytes);
            rig_deinit(&g);
        }
        free_weight(&w);
        if (levels[l] == CPU_ISA_REF)
            continue;
        /* The fast levels agree with each other too. */
        if (first_level == NULL) {
            first_level = malloc(n_bytes);
            memcpy(first_level, alone, n_bytes);
        }
        assert_memory_equal(first_level, alone, n_bytes);
    }
    free(x);
    free(alone);
    free(batch);
    free(first_level);
    free(src);
}

static void test_matmul_row_alone_equals_row_in_batch(void **state)
{
    (void)state;
    for (size_t i = 0; i < PGD_ARRAY_LEN(types); i++) {
        check_exact(types[i], 67, 67,
                    dtype_get_info((int32_t)types[i])->block_elems == 256 ? 512 : 544);
        check_exact(types[i], 9, 200,
                    dtype_get_info((int32_t)types[i])->block_elems == 256 ? 1280 : 1120);
        check_exact(types[i], 13, 112, 256);
    }
    check_exact(DTYPE_F32, 200, 50, 1031);
    check_exact(DTYPE_F16, 200, 130, 513);
    check_exact(DTYPE_Q4_1, 300, 96, 576);
}

/* Three weights of different types in one call equal three calls. */
static void test_matmul_several_weights(void **state)
{
    (void)state;
    static const dtype trios[][3] = {{DTYPE_Q4_1, DTYPE_F16, DTYPE_Q8_0},
                                     {DTYPE_Q4_K, DTYPE_Q6_K, DTYPE_Q5_K},
                                     {DTYPE_BF16, DTYPE_F32, DTYPE_Q4_0}};
    static const int32_t n_outs[3] = {100, 33, 48};
    enum { N_IN = 512, MAX_ROWS = 19 };
    static float x[MAX_ROWS * N_IN];
    for (size_t l = 0; l < PGD_ARRAY_LEN(levels); l++) {
        for (size_t i = 0; i < PGD_ARRAY_LEN(trios); i++) {
            rig g;
            if (!rig_init(&g, levels[l], 2, MAX_ROWS, N_IN))
                continue;
            fill_x(x, MAX_ROWS * N_IN, X_PLAIN);
            for (int32_t n_rows = 0; n_rows <= MAX_ROWS; n_rows += n_rows < 2 ? 1 : 17) {
                packed_weight w[3];
                float *together[3];
                float *apart[3];
                matmul_args args = {
                    .x = x, .x_stride = N_IN, .n_rows = n_rows, .n_in = N_IN, .n_weights = 3};
                for (int j = 0; j < 3; j++) {
                    uint8_t *src = make_weights(trios[i][j], n_outs[j], N_IN);
                    w[j] = pack_weight(g.impl, trios[i][j], src, n_outs[j], N_IN);
                    together[j] = calloc((size_t)n_outs[j] * MAX_ROWS, sizeof(float));
                    apart[j] = calloc((size_t)n_outs[j] * MAX_ROWS, sizeof(float));
                    args.weights[j] = &w[j];
                    args.out[j] = together[j];
                    args.out_stride[j] = n_outs[j];
                    free(src);
                }
                assert_int_equal(g.impl->run(&args, &g.ctx), PGD_OK);
                for (int j = 0; j < 3; j++) {
                    run_rows(&g, &w[j], apart[j], x, 0, n_rows);
                    assert_memory_equal(together[j], apart[j],
                                        (size_t)n_outs[j] * MAX_ROWS * sizeof(float));
                    free_weight(&w[j]);
                    free(together[j]);
                    free(apart[j]);
                }
            }
            rig_deinit(&g);
        }
    }
}

static void test_matmul_pack_in_pieces(void **state)
{
    (void)state;
    for (size_t l = 0; l < PGD_ARRAY_LEN(levels); l++) {
        const matmul_impl *impl = matmul_get_impl(levels[l]);
        if (impl == NULL)
            continue;
        for (size_t i = 0; i < PGD_ARRAY_LEN(types); i++) {
            const int32_t n_out = 83;
            const int32_t n_in = 512;
            uint8_t *src = make_weights(types[i], n_out, n_in);
            packed_weight whole = pack_weight(impl, types[i], src, n_out, n_in);
            packed_weight pieces = whole;
            pieces.data = mem_alloc_aligned(whole.n_bytes, 64);
            memset(pieces.data, 0xaa, whole.n_bytes);
            for (int32_t row = 0; row < n_out;) {
                int32_t n = random_step(2, 2) * impl->pack_rows;
                n = PGD_MIN(n, n_out - row);
                impl->pack(&pieces, src + (size_t)row * dtype_row_bytes(types[i], n_in), row, n);
                row += n;
            }
            assert_int_equal(pieces.layout, whole.layout);
            assert_memory_equal(pieces.data, whole.data, whole.n_bytes);
            free_weight(&whole);
            free_weight(&pieces);
            free(src);
        }
    }
}

/* The packed size of types whose bits are kept is the file's (plus padding to whole panels and
 * lines). */
static void test_matmul_packed_bytes(void **state)
{
    (void)state;
    for (size_t l = 0; l < PGD_ARRAY_LEN(levels); l++) {
        const matmul_impl *impl = matmul_get_impl(levels[l]);
        if (impl == NULL)
            continue;
        static const dtype same[] = {DTYPE_F32,  DTYPE_F16,  DTYPE_BF16, DTYPE_Q8_0,
                                     DTYPE_Q4_0, DTYPE_Q4_1, DTYPE_MXFP4};
        for (size_t i = 0; i < PGD_ARRAY_LEN(same); i++)
            assert_int_equal(impl->packed_bytes(same[i], 64, 576),
                             64 * dtype_row_bytes(same[i], 576));
        assert_int_equal(impl->packed_bytes(DTYPE_Q4_1, 64, 48), 0);
        assert_int_equal(impl->packed_bytes(DTYPE_Q4_K, 64, 576), 0);
        assert_int_equal(impl->packed_bytes(DTYPE_I32, 64, 576), 0);
        assert_int_equal(impl->packed_bytes(DTYPE_F32, -1, 32), 0);
    }
    assert_null(matmul_get_impl(CPU_ISA_NEON));
}

static void test_matmul_refuses_bad_arguments(void **state)
{
    (void)state;
    static float x[64];
    static float out[64];
    for (size_t l = 0; l < PGD_ARRAY_LEN(levels); l++) {
        rig g;
        if (!rig_init(&g, levels[l], 1, 1, 64))
            continue;
        uint8_t *src = make_weights(DTYPE_Q8_0, 16, 64);
        packed_weight w = pack_weight(g.impl, DTYPE_Q8_0, src, 16, 64);
        matmul_args good = {.x = x,
                            .x_stride = 64,
                            .n_rows = 1,
                            .n_in = 64,
                            .n_weights = 1,
                            .weights = {&w},
                            .out = {out},
                            .out_stride = {16}};
        assert_int_equal(g.impl->run(&good, &g.ctx), PGD_OK);
        matmul_args bad = good;
        bad.n_in = 32;
        assert_int_equal(g.impl->run(&bad, &g.ctx), PGD_EINVAL);
        bad = good;
        bad.n_rows = -1;
        assert_int_equal(g.impl->run(&bad, &g.ctx), PGD_EINVAL);
        bad = good;
        bad.n_weights = 0;
        assert_int_equal(g.impl->run(&bad, &g.ctx), PGD_EINVAL);
        bad.n_weights = MATMUL_MAX_WEIGHTS + 1;
        assert_int_equal(g.impl->run(&bad, &g.ctx), PGD_EINVAL);
        packed_weight unpacked = w;
        unpacked.layout = 0;
        bad = good;
        bad.weights[0] = &unpacked;
        assert_int_equal(g.impl->run(&bad, &g.ctx), PGD_EINVAL);
        kernel_ctx small = g.ctx;
        small.workspace_bytes = 0;
        assert_int_equal(g.impl->run(&good, &small), PGD_EINVAL);
        free_weight(&w);
        free(src);
        rig_deinit(&g);
    }
}

/* Rows sorted into groups, some of them empty, two weights of each group in one call: the bits of a
 * call for each group, on any number of threads. */
static void check_groups(cpu_isa isa, const dtype pair[2], const int32_t *group_start,
                         int32_t n_groups, bool accumulate)
{
    enum { N_IN = 256, MAX_GROUPS = 8 };
    static const int32_t n_outs[2] = {96, 41};
    int32_t n_rows = group_start[n_groups];
    packed_weight w[2][MAX_GROUPS];
    float *bias[2];
    float *out[2];
    float *want[2];
    float *x = malloc(((size_t)n_rows + 1) * N_IN * sizeof(float));
    rig g;
    if (!rig_init(&g, isa, 1, n_rows, N_IN)) {
        free(x);
        return;
    }
    fill_x(x, (int64_t)n_rows * N_IN, X_SPIKES);
    for (int j = 0; j < 2; j++) {
        size_t n_elems = (size_t)n_rows * (size_t)n_outs[j] + 1;
        bias[j] = malloc(sizeof(float) * 50 * MAX_GROUPS * 2);
        out[j] = malloc(n_elems * sizeof(float));
        want[j] = malloc(n_elems * sizeof(float));
        for (int32_t i = 0; i < 100 * n_groups; i++)
            bias[j][i] = uniform();
        for (size_t i = 0; i < n_elems; i++)
            want[j][i] = uniform();
        for (int32_t k = 0; k < n_groups; k++) {
            uint8_t *src = make_weights(pair[j], n_outs[j], N_IN);
            w[j][k] = pack_weight(g.impl, pair[j], src, n_outs[j], N_IN);
            free(src);
        }
    }
    matmul_args args = {.n_in = N_IN, .x_stride = N_IN, .n_weights = 2, .accumulate = accumulate};
    for (int32_t n_threads = 1; n_threads <= 3; n_threads++) {
        rig_deinit(&g);
        assert_true(rig_init(&g, isa, n_threads, n_rows, N_IN));
        for (int j = 0; j < 2; j++) {
            size_t n_bytes = (size_t)n_rows * (size_t)n_outs[j] * sizeof(float);
            memcpy(out[j], want[j], n_bytes);
            args.out[j] = out[j];
            args.out_stride[j] = n_outs[j];
            args.weights[j] = w[j];
            args.bias[j] = bias[j];
        }
        args.x = x;
        args.n_rows = n_rows;
        args.n_groups = n_groups;
        args.group_start = group_start;
        args.bias_stride = 100;
        assert_int_equal(g.impl->run(&args, &g.ctx), PGD_OK);
        for (int32_t k = 0; k < n_groups; k++) {
            int32_t first = group_start[k];
            matmul_args one = args;
            one.x = x + (int64_t)first * N_IN;
            one.n_rows = group_start[k + 1] - first;
            one.group_start = NULL;
            for (int j = 0; j < 2; j++) {
                size_t n_bytes = (size_t)one.n_rows * (size_t)n_outs[j] * sizeof(float);
                float *expected = malloc(n_bytes + 1);
                memcpy(expected, want[j] + (int64_t)first * n_outs[j], n_bytes);
                one.weights[j] = &w[j][k];
                one.bias[j] = bias[j] + k * args.bias_stride;
                one.out[j] = expected;
            }
            assert_int_equal(g.impl->run(&one, &g.ctx), PGD_OK);
            for (int j = 0; j < 2; j++) {
                assert_memory_equal(out[j] + (int64_t)first * n_outs[j], one.out[j],
                                    (size_t)one.n_rows * (size_t)n_outs[j] * sizeof(float));
                free(one.out[j]);
            }
        }
    }
    for (int j = 0; j < 2; j++) {
        for (int32_t k = 0; k < n_groups; k++)
            free_weight(&w[j][k]);
        free(bias[j]);
        free(out[j]);
        free(want[j]);
    }
    free(x);
    rig_deinit(&g);
}

static void test_matmul_groups_equal_calls_of_their_own(void **state)
{
    (void)state;
    static const int32_t starts[][9] = {{0, 1, 1, 2, 2, 2, 3, 3, 4},
                                        {0, 0, 17, 18, 18, 60, 61, 80, 80},
                                        {0, 0, 0, 0, 0, 0, 0, 0, 90},
                                        {0}};
    for (size_t l = 0; l < PGD_ARRAY_LEN(levels); l++) {
        for (size_t i = 0; i < PGD_ARRAY_LEN(types); i++) {
            dtype pair[2] = {types[i], types[(i + (size_t)(rng() % 4)) % PGD_ARRAY_LEN(types)]};
            for (size_t k = 0; k < PGD_ARRAY_LEN(starts); k++)
                check_groups(levels[l], pair, starts[k], 8, k % 2);
        }
    }
}

static void test_matmul_refuses_bad_groups(void **state)
{
    (void)state;
    static float x[128];
    static float out[64];
    static const int32_t bad[][3] = {{0, 1, 3}, {0, 3, 2}, {1, 1, 2}, {0, -1, 2}};
    for (size_t l = 0; l < PGD_ARRAY_LEN(levels); l++) {
        rig g;
        if (!rig_init(&g, levels[l], 1, 2, 64))
            continue;
        uint8_t *src = make_weights(DTYPE_Q8_0, 16, 64);
        packed_weight w[2] = {pack_weight(g.impl, DTYPE_Q8_0, src, 16, 64),
                              pack_weight(g.impl, DTYPE_Q8_0, src, 16, 64)};
        static const int32_t good[3] = {0, 2, 2};
        matmul_args args = {.x = x,
                            .x_stride = 64,
                            .n_rows = 2,
                            .n_in = 64,
                            .n_weights = 1,
                            .weights = {w},
                            .out = {out},
                            .out_stride = {16},
                            .group_start = good,
                            .n_groups = 2};
        assert_int_equal(g.impl->run(&args, &g.ctx), PGD_OK);
        for (size_t i = 0; i < PGD_ARRAY_LEN(bad); i++) {
            args.group_start = bad[i];
            assert_int_equal(g.impl->run(&args, &g.ctx), PGD_EINVAL);
        }
        args.group_start = good;
        args.n_groups = 0;
        assert_int_equal(g.impl->run(&args, &g.ctx), PGD_EINVAL);
        args.n_groups = 2;
        w[1].n_out = 15; /* unlike its sister, though no row needs it */
        assert_int_equal(g.impl->run(&args, &g.ctx), PGD_EINVAL);
        w[1].n_out = 16;
        free_weight(&w[0]);
        free_weight(&w[1]);
        free(src);
        rig_deinit(&g);
    }
}

/* A NaN or infinity in x must show in the output, not vanish in the quantization. */
static void test_matmul_bad_x_shows(void **state)
{
    (void)state;
    static float x[64];
    static float out[16];
    for (size_t l = 0; l < PGD_ARRAY_LEN(levels); l++) {
        for (size_t i = 0; i < PGD_ARRAY_LEN(types); i++) {
            rig g;
            if (dtype_get_info((int32_t)types[i])->block_elems == 256 ||
                !rig_init(&g, levels[l], 1, 1, 64))
                continue;
            uint8_t *src = make_weights(types[i], 16, 64);
            packed_weight w = pack_weight(g.impl, types[i], src, 16, 64);
            for (int bad = 0; bad < 2; bad++) {
                fill_x(x, 64, X_PLAIN);
                x[37] = bad ? NAN : INFINITY;
                run_rows(&g, &w, out, x, 0, 1);
                for (int n = 0; n < 16; n++)
                    assert_false(isfinite(out[n]));
            }
            free_weight(&w);
            free(src);
            rig_deinit(&g);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matmul_matches_oracle),
        cmocka_unit_test(test_matmul_every_ragged_n_out),
        cmocka_unit_test(test_matmul_x_kinds),
        cmocka_unit_test(test_matmul_row_alone_equals_row_in_batch),
        cmocka_unit_test(test_matmul_several_weights),
        cmocka_unit_test(test_matmul_pack_in_pieces),
        cmocka_unit_test(test_matmul_packed_bytes),
        cmocka_unit_test(test_matmul_refuses_bad_arguments),
        cmocka_unit_test(test_matmul_groups_equal_calls_of_their_own),
        cmocka_unit_test(test_matmul_refuses_bad_groups),
        cmocka_unit_test(test_matmul_bad_x_shows),
    };
    return cmocka_run_group_tests_name("matmul", tests, NULL, NULL);
}
