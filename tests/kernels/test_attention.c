/* Paged attention: the reference against the plain formula over contiguous keys; every level against the reference; and I1: bits
 * do not depend on the batch, on how a prompt was cut, on where blocks lie, or on threads. Unused slots hold NaN throughout. */
#include "kernels/attention.h"
#include "kernels/kv_write.h"
#include "tests/kernels/kernel_rig.h"

enum { MAX_SEQS = 6, MAX_BLOCKS = 80, POOL_BLOCKS = MAX_SEQS * MAX_BLOCKS + 1 };

/* Some sequences with their K and V, contiguous and in pages. */
typedef struct scene {
    kv_page_layout kv;
    int32_t n_heads;
    int32_t n_seqs;
    int32_t n_context[MAX_SEQS];
    int32_t n_query[MAX_SEQS];
    float *k[MAX_SEQS]; /* [n_context, n_kv_heads * head_dim], rounded as in the pages */
    float *v[MAX_SEQS];
    float *q[MAX_SEQS]; /* [n_context, n_heads * head_dim] */
    int32_t window;
    int32_t chunk;
    bool sees_all; /* not causal: every row all keys of its sequence */
    float soft_cap;
    float sinks[64];
    bool has_sinks;
    uint8_t *pages;
    size_t pages_bytes;
    block_id table[MAX_SEQS * MAX_BLOCKS];
} scene;

static int64_t kv_width(const scene *s)
{
    return (int64_t)s->kv.n_kv_heads * s->kv.head_dim;
}

static int64_t q_width(const scene *s)
{
    return (int64_t)s->n_heads * s->kv.head_dim;
}

static void round_to(float *x, int64_t n, dtype type)
{
    for (int64_t i = 0; i < n; i++) {
        if (type == DTYPE_F16)
            x[i] = dtype_f16_to_f32(dtype_f32_to_f16(x[i]));
        else if (type == DTYPE_BF16)
            x[i] = dtype_bf16_to_f32(dtype_f32_to_bf16(x[i]));
    }
}

/* Gives every sequence blocks in random order and writes its keys and values there. */
static void place(scene *s, kernel_rig *rig)
{
    block_id order[POOL_BLOCKS - 1];
    for (int32_t i = 0; i < POOL_BLOCKS - 1; i++) {
        int32_t j = kernel_rig_int(0, i);
        order[i] = order[j];
        order[j] = i + 1;
    }
    memset(s->pages, 0xff, s->pages_bytes); /* NaN in every type */
    for (int32_t q = 0; q < s->n_seqs; q++) {
        slot_id slots[MAX_BLOCKS * 16];
        memcpy(&s->table[q * MAX_BLOCKS], &order[q * MAX_BLOCKS], MAX_BLOCKS * sizeof(block_id));
        for (int32_t t = 0; t < s->n_context[q]; t++)
            slots[t] = s->table[q * MAX_BLOCKS + t / s->kv.block_size] * s->kv.block_size +
                       t % s->kv.block_size;
        kv_write_args args = {s->pages, s->kv,       s->k[q], kv_width(s),
                              s->v[q],  kv_width(s), slots,   s->n_context[q]};
        assert_int_equal(kv_write_ref(&args, &rig->alone), PGD_OK);
    }
}

static void scene_init(scene *s, kernel_rig *rig, kv_page_layout kv, int32_t group,
                       int32_t max_context, float q_scale)
{
    memset(s, 0, sizeof(*s));
    s->kv = kv;
    s->n_heads = kv.n_kv_heads * group;
    s->n_seqs = kernel_rig_int(1, MAX_SEQS);
    s->pages_bytes = POOL_BLOCKS * kv_page_bytes(&kv);
    s->pages = mem_alloc_aligned(s->pages_bytes, 64);
    assert_non_null(s->pages);
    for (int32_t i = 0; i < s->n_seqs; i++) {
        int32_t n = kernel_rig_int(1, max_context);
        s->n_context[i] = n;
        s->n_query[i] = kernel_rig_int(0, 1) ? 1 : kernel_rig_int(1, PGD_MIN(n, 40));
        s->k[i] = kernel_rig_floats(n * kv_width(s));
        s->v[i] = kernel_rig_floats(n * kv_width(s));
        s->q[i] = kernel_rig_floats(n * q_width(s));
        for (int64_t j = 0; j < n * q_width(s); j++)
            s->q[i][j] *= q_scale;
        round_to(s->k[i], n * kv_width(s), kv.type);
        round_to(s->v[i], n * kv_width(s), kv.type);
    }
    place(s, rig);
}

static void scene_deinit(scene *s)
{
    for (int32_t i = 0; i < s->n_seqs; i++) {
        kernel_rig_free(s->k[i], s->n_context[i] * kv_width(s));
        kernel_rig_free(s->v[i], s->n_context[i] * kv_width(s));
        kernel_rig_free(s->q[i], s->n_context[i] * q_width(s));
    }
    mem_free_aligned(s->pages, s->pages_bytes);
}

typedef pgd_err (*attention_fn)(const attention_args *args, kernel_ctx *ctx);

/* Attends the rows [first, first + n) of the listed sequences; out rows in that order. Keys after the last row count as not yet
 * there. */
static void attend(const scene *s, attention_fn fn, kernel_ctx *ctx, float *out,
                   const int32_t *seqs, const int32_t *first, const int32_t *n_rows, int32_t n_seqs)
{
    int32_t query_start[MAX_SEQS + 1] = {0}, n_context[MAX_SEQS], n_keys[MAX_SEQS];
    for (int32_t i = 0; i < n_seqs; i++) {
        query_start[i + 1] = query_start[i] + n_rows[i];
        n_context[i] = first[i] + n_rows[i];
        n_keys[i] = s->n_context[seqs[i]];
    }
    int64_t q_stride = q_width(s) + 3, n = q_stride * query_start[n_seqs];
    float *q = kernel_rig_floats(n);
    for (int32_t i = 0; i < n_seqs; i++) {
        for (int32_t t = 0; t < n_rows[i]; t++)
            memcpy(q + (query_start[i] + t) * q_stride, s->q[seqs[i]] + (first[i] + t) * q_width(s),
                   (size_t)q_width(s) * sizeof(float));
    }
    attention_args args = {.out = out,
                           .out_stride = q_width(s),
                           .q = q,
                           .q_stride = q_stride,
                           .n_heads = s->n_heads,
                           .pages = s->pages,
                           .kv = s->kv,
                           .n_seqs = n_seqs,
                           .query_start = query_start,
                           .n_context = s->sees_all ? NULL : n_context,
                           .n_keys = s->sees_all ? n_keys : NULL,
                           .seq_row = seqs,
                           .block_table = s->table,
                           .block_table_stride = MAX_BLOCKS,
                           .scale = 1 / sqrtf((float)s->kv.head_dim),
                           .window = s->window,
                           .chunk = s->chunk,
                           .soft_cap = s->soft_cap,
                           .sinks = s->has_sinks ? s->sinks : NULL};
    assert_int_equal(fn(&args, ctx), PGD_OK);
    kernel_rig_free(q, n);
}

/* The formula, in double, over contiguous keys. */
static void attend_plainly(const scene *s, float *out, int32_t seq, int32_t pos)
{
    int32_t hd = s->kv.head_dim;
    const float *queries = s->q[seq] + pos * q_width(s);
    pos = s->sees_all ? s->n_context[seq] - 1 : pos; /* of the last key */
    int32_t first = s->window > 0 ? PGD_MAX(0, pos - s->window + 1) : 0;
    while (s->chunk > 0 && first / s->chunk < pos / s->chunk)
        first++;
    double *p = mem_calloc((size_t)pos + 1, sizeof(double));
    for (int32_t h = 0; h < s->n_heads; h++) {
        int32_t kv_head = h / (s->n_heads / s->kv.n_kv_heads);
        const float *q = queries + (int64_t)h * hd;
        double m = s->has_sinks ? s->sinks[h] : -INFINITY, sum = 0;
        for (int32_t j = first; j <= pos; j++) {
            const float *k = s->k[seq] + j * kv_width(s) + (int64_t)kv_head * hd;
            double dot = 0;
            for (int32_t i = 0; i < hd; i++)
                dot += (double)q[i] * k[i];
            dot *= 1 / sqrtf((float)hd);
            p[j] = s->soft_cap > 0 ? s->soft_cap * tanh(dot / s->soft_cap) : dot;
            m = fmax(m, p[j]);
        }
        for (int32_t j = first; j <= pos; j++)
            sum += p[j] = exp(p[j] - m);
        if (s->has_sinks)
            sum += exp(s->sinks[h] - m);
        for (int32_t i = 0; i < hd; i++) {
            double acc = 0;
            for (int32_t j = first; j <= pos; j++)
                acc += p[j] * s->v[seq][j * kv_width(s) + (int64_t)kv_head * hd + i];
            out[(int64_t)h * hd + i] = (float)(acc / sum);
        }
    }
    mem_free(p);
}

static void check_scene(scene *s, kernel_rig *rig, double atol, double rtol)
{
    int32_t seqs[MAX_SEQS], first[MAX_SEQS], n_rows = 0;
    for (int32_t i = 0; i < s->n_seqs; i++) {
        seqs[i] = i;
        first[i] = s->n_context[i] - s->n_query[i];
        n_rows += s->n_query[i];
    }
    int64_t n = n_rows * q_width(s);
    float *want = kernel_rig_floats(n), *got = kernel_rig_floats(n), *other = kernel_rig_floats(n);
    int64_t row = 0;
    for (int32_t i = 0; i < s->n_seqs; i++) {
        for (int32_t t = 0; t < s->n_query[i]; t++)
            attend_plainly(s, want + row++ * q_width(s), i, first[i] + t);
    }
    attend(s, attention_ref, &rig->alone, got, seqs, first, s->n_query, s->n_seqs);
    kernel_rig_assert_near(got, want, n, 1e-6, 1e-6, "reference against the formula");
    attend(s, rig->ops->attention, &rig->ctx, got, seqs, first, s->n_query, s->n_seqs);
    kernel_rig_assert_near(got, want, n, atol, rtol, rig->ops->name);

    /* Each sequence alone, its rows cut at random, without the pool. */
    row = 0;
    for (int32_t i = 0; i < s->n_seqs; i++) {
        for (int32_t t = 0; t < s->n_query[i];) {
            int32_t at = first[i] + t, chunk = kernel_rig_int(1, s->n_query[i] - t);
            attend(s, rig->ops->attention, &rig->alone, other + row * q_width(s), &i, &at, &chunk,
                   1);
            row += chunk;
            t += chunk;
        }
    }
    kernel_rig_assert_same(other, got, n, "alone and cut otherwise");
    place(s, rig);
    attend(s, rig->ops->attention, &rig->ctx, other, seqs, first, s->n_query, s->n_seqs);
    kernel_rig_assert_same(other, got, n, "in other blocks");
    kernel_rig_free(want, n);
    kernel_rig_free(got, n);
    kernel_rig_free(other, n);
}

static void check_case(kernel_rig *rig, int32_t k, kv_page_layout kv, int32_t group,
                       int32_t max_context)
{
    scene s;
    /* Every other scene has spikes of q times spikes of k: scores of hundreds, whose f32 roundings
     * are factors of some 1e-5 in the weights. */
    bool is_spiky = k % 2 == 0;
    scene_init(&s, rig, kv, group, max_context, is_spiky ? 1 : 0.02f);
    s.sees_all = k >= 12;
    if (k % 3 == 1 && !s.sees_all)
        s.window = kernel_rig_int(1, 300);
    if (k % 3 == 2 && !s.sees_all)
        s.chunk = kernel_rig_int(1, 300);
    if (k % 4 == 2)
        s.soft_cap = 5;
    s.has_sinks = k % 5 == 3;
    for (int32_t h = 0; h < s.n_heads; h++)
        s.sinks[h] = kernel_rig_float();
    check_scene(&s, rig, is_spiky ? 1e-3 : 1e-5, is_spiky ? 1e-3 : 2e-5);
    scene_deinit(&s);
}

static void compare(kernel_rig *rig)
{
    const dtype types[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
    const int32_t head_dims[] = {64, 16, 80, 128, 20, 64};
    const int32_t groups[] = {3, 1, 4, 8, 2, 7};
    for (int32_t k = 0; k < 12; k++)
        check_case(rig, k,
                   (kv_page_layout){.type = types[k % 3],
                                    .n_kv_heads = kernel_rig_int(1, 3),
                                    .head_dim = head_dims[k % 6],
                                    .block_size = k % 5 == 4 ? 32 : 16},
                   groups[k % 6], k % 4 == 0 ? 600 : 90);
    /* More heads of one KV head than a tile takes; then just as many. */
    check_case(rig, 1, (kv_page_layout){DTYPE_F16, 1, 32, 16}, 53, 150);
    check_case(rig, 2, (kv_page_layout){DTYPE_BF16, 1, 16, 48}, 48, 150);
    /* Not causal. */
    for (int32_t k = 12; k < 18; k++)
        check_case(rig, k, (kv_page_layout){types[k % 3], 2, head_dims[k % 6], 16}, groups[k % 6],
                   k % 2 == 0 ? 600 : 90);
}

static size_t workspace_bytes(void)
{
    size_t n_bytes = 0;
    attention_limits limits = {.max_rows = 512,
                               .max_seqs = MAX_SEQS,
                               .max_context = MAX_BLOCKS * 16,
                               .n_heads = 64,
                               .kv = {DTYPE_F32, 4, 128, 32},
                               .n_threads = 5};
    for (int isa = CPU_ISA_REF; isa <= CPU_ISA_NEON; isa++) {
        const kernel_ops *ops;
        if (ops_cpu_get(&ops, (cpu_isa)isa) == PGD_OK)
            n_bytes = PGD_MAX(n_bytes, ops->attention_workspace_bytes(&limits));
    }
    return n_bytes;
}

static void test_attention_all_levels(void **state)
{
    (void)state;
    kernel_rig_for_all(compare, workspace_bytes());
}

/* Scores around +-3000: without the running maximum everything would overflow; with it one key takes all. */
static void check_extreme(kernel_rig *rig)
{
    scene s;
    scene_init(&s, rig, (kv_page_layout){DTYPE_F32, 1, 64, 16}, 2, 400, 1);
    for (int32_t i = 0; i < s.n_seqs; i++) {
        for (int64_t j = 0; j < s.n_context[i] * q_width(&s); j++)
            s.q[i][j] *= 100;
    }
    check_scene(&s, rig, 0.1, 0.02); /* f32 dots of thousands are off by some thousandths */
    scene_deinit(&s);
}

static void test_attention_extreme_scores(void **state)
{
    (void)state;
    kernel_rig_for_all(check_extreme, workspace_bytes());
}

static void check_nan(kernel_rig *rig)
{
    scene s;
    scene_init(&s, rig, (kv_page_layout){DTYPE_F32, 1, 16, 16}, 1, 40, 1);
    int32_t seq = 0, first = s.n_context[0] - 1, n_rows = 1;
    float out[16];
    s.q[0][first * 16 + 3] = NAN;
    attend(&s, rig->ops->attention, &rig->ctx, out, &seq, &first, &n_rows, 1);
    for (int32_t i = 0; i < 16; i++)
        assert_true(isnan(out[i])); /* a fault is passed on, never hidden */
    scene_deinit(&s);
}

static void test_attention_passes_nan_on(void **state)
{
    (void)state;
    kernel_rig_for_all(check_nan, workspace_bytes());
}

/* One long sequence, cut into pieces for 2 and 5 threads and whole for 1: the same bits. */
static void check_threads(kernel_rig *rig)
{
    scene s;
    kernel_ctx many = rig->alone;
    assert_int_equal(cpu_pool_create(&many.pool, 5, false), PGD_OK);
    scene_init(&s, rig, (kv_page_layout){DTYPE_F16, 2, 64, 16}, 3, 1, 0.1f);
    for (int32_t k = 0; k < 4; k++) {
        scene_deinit(&s);
        scene_init(&s, rig, (kv_page_layout){DTYPE_F16, 2, 64, 16}, 3, 1200, 0.1f);
        s.sees_all = k == 2;
        int32_t seq = 0, n_rows = PGD_MIN(s.n_context[0], k == 0 ? 1 : 20);
        int32_t first = s.n_context[0] - n_rows;
        int64_t n = n_rows * q_width(&s);
        float *one = kernel_rig_floats(n), *other = kernel_rig_floats(n);
        attend(&s, rig->ops->attention, &rig->alone, one, &seq, &first, &n_rows, 1);
        attend(&s, rig->ops->attention, &rig->ctx, other, &seq, &first, &n_rows, 1);
        kernel_rig_assert_same(other, one, n, "2 threads");
        attend(&s, rig->ops->attention, &many, other, &seq, &first, &n_rows, 1);
        kernel_rig_assert_same(other, one, n, "5 threads");
        kernel_rig_free(one, n);
        kernel_rig_free(other, n);
    }
    scene_deinit(&s);
    cpu_pool_destroy(many.pool);
}

static void test_attention_any_threads(void **state)
{
    (void)state;
    kernel_rig_for_all(check_threads, workspace_bytes());
}

/* A whole prompt at once and cut in pieces, for windows and chunks that fit blocks, splits and tiles and that do not: the same
 * bits. */
static void check_cuts(kernel_rig *rig)
{
    const int32_t cuts[] = {1, 7, 16, 64, 300}, sizes[] = {1, 16, 24, 100, 128, 150};
    scene s;
    scene_init(&s, rig, (kv_page_layout){DTYPE_BF16, 1, 32, 16}, 2, 400, 0.1f);
    for (int32_t k = 0; k < 2 * (int32_t)PGD_ARRAY_LEN(sizes); k++) {
        int32_t seq = 0, first = 0, n = s.n_context[0];
        s.window = k % 2 == 0 ? sizes[k / 2] : 0;
        s.chunk = k % 2 == 1 ? sizes[k / 2] : 0;
        s.soft_cap = k % 3 == 0 ? 3 : 0;
        s.has_sinks = k % 4 == 1;
        float *want = kernel_rig_floats(n * q_width(&s)), *got = kernel_rig_floats(n * q_width(&s));
        attend(&s, rig->ops->attention, &rig->ctx, want, &seq, &first, &n, 1);
        for (size_t c = 0; c < PGD_ARRAY_LEN(cuts); c++) {
            for (int32_t at = 0; at < n; at += cuts[c]) {
                int32_t n_rows = PGD_MIN(cuts[c], n - at);
                attend(&s, rig->ops->attention, &rig->alone, got + at * q_width(&s), &seq, &at,
                       &n_rows, 1);
            }
            kernel_rig_assert_same(got, want, n * q_width(&s), "cut in pieces");
        }
        kernel_rig_free(want, n * q_width(&s));
        kernel_rig_free(got, n * q_width(&s));
    }
    scene_deinit(&s);
}

static void test_attention_any_cut(void **state)
{
    (void)state;
    kernel_rig_for_all(check_cuts, workspace_bytes());
}

/* A NaN in the last row's key and value is no business of the rows before it. */
static void check_future(kernel_rig *rig)
{
    for (int32_t k = 0; k < 6; k++) {
        scene s;
        scene_init(&s, rig, (kv_page_layout){DTYPE_F16, 1, 32, 16}, k % 3 + 1, 200, 0.1f);
        int32_t seq = 0, n = s.n_context[0], n_rows = PGD_MIN(n, 30), first = n - n_rows;
        int64_t width = q_width(&s);
        float *want = kernel_rig_floats(n_rows * width), *got = kernel_rig_floats(n_rows * width);
        attend(&s, rig->ops->attention, &rig->ctx, want, &seq, &first, &n_rows, 1);
        for (int32_t i = 0; i < kv_width(&s); i++) {
            s.k[0][(n - 1) * kv_width(&s) + i] = NAN;
            s.v[0][(n - 1) * kv_width(&s) + i] = k % 2 ? NAN : INFINITY;
        }
        place(&s, rig);
        attend(&s, rig->ops->attention, &rig->ctx, got, &seq, &first, &n_rows, 1);
        kernel_rig_assert_same(got, want, (n_rows - 1) * width, "rows before the NaN");
        assert_true(isnan(got[n_rows * width - 1]));
        kernel_rig_free(want, n_rows * width);
        kernel_rig_free(got, n_rows * width);
        scene_deinit(&s);
    }
}

static void test_attention_ignores_the_future(void **state)
{
    (void)state;
    kernel_rig_for_all(check_future, workspace_bytes());
}

/* The stated workspace is enough; none at all is refused by versions that need some. */
static void check_workspace(kernel_rig *rig)
{
    attention_limits limits = {.max_rows = 4,
                               .max_seqs = 4,
                               .max_context = 64,
                               .n_heads = 2,
                               .kv = {DTYPE_F32, 1, 16, 16},
                               .n_threads = 1};
    size_t n_bytes = rig->ops->attention_workspace_bytes(&limits);
    uint8_t pages[4096] = {0};
    float q[4 * 32] = {0}, out[4 * 32];
    const int32_t query_start[5] = {0, 1, 2, 3, 4}, n_context[4] = {1, 2, 3, 16};
    const int32_t seq_row[4] = {0, 0, 0, 0};
    const block_id table[1] = {0};
    attention_args args = {.out = out,
                           .out_stride = 32,
                           .q = q,
                           .q_stride = 32,
                           .n_heads = 2,
                           .pages = pages,
                           .kv = limits.kv,
                           .n_seqs = 4,
                           .query_start = query_start,
                           .n_context = n_context,
                           .seq_row = seq_row,
                           .block_table = table,
                           .scale = 1};
    kernel_ctx ctx = {.workspace = rig->alone.workspace, .workspace_bytes = n_bytes};
    assert_int_equal(rig->ops->attention(&args, &ctx), PGD_OK);
    ctx.workspace_bytes = 0;
    assert_int_equal(rig->ops->attention(&args, &ctx), n_bytes > 0 ? PGD_EINVAL : PGD_OK);
    args.n_keys = n_context;
    args.window = 1; /* a window needs positions */
    assert_int_equal(rig->ops->attention(&args, &ctx), PGD_EINVAL);
    args.window = 0;
    args.chunk = 1;
    assert_int_equal(rig->ops->attention(&args, &ctx), PGD_EINVAL);
    args.n_keys = NULL;
    args.chunk = -1;
    assert_int_equal(rig->ops->attention(&args, &ctx), PGD_EINVAL);
    args.chunk = 0;
    args.n_heads = 0;
    assert_int_equal(rig->ops->attention(&args, &ctx), PGD_EINVAL);
}

static void test_attention_workspace(void **state)
{
    (void)state;
    kernel_rig_for_all(check_workspace, workspace_bytes());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention_all_levels),
        cmocka_unit_test(test_attention_any_threads),
        cmocka_unit_test(test_attention_any_cut),
        cmocka_unit_test(test_attention_workspace),
        cmocka_unit_test(test_attention_ignores_the_future),
        cmocka_unit_test(test_attention_extreme_scores),
        cmocka_unit_test(test_attention_passes_nan_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
