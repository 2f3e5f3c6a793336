/* Routing against a sort of all logits, ties and NaN, the order by expert, gathering and summing at
 * every level; a row alone against the row in a batch. */
#include "kernels/moe.h"
#include "tests/kernels/kernel_rig.h"

enum { MAX_EXPERTS = 300, MAX_ROWS = 70, MAX_CHOSEN = 64 };

static float logits[MAX_ROWS * MAX_EXPERTS];
static float weights[MAX_ROWS * MAX_CHOSEN];
static int32_t places[MAX_ROWS * MAX_CHOSEN];
static int32_t group_start[MAX_EXPERTS + 1];

static moe_route_args route_args(int32_t n_rows, int32_t n_experts, int32_t n_chosen, moe_gate gate)
{
    return (moe_route_args){.weights = weights,
                            .places = places,
                            .group_start = group_start,
                            .logits = logits,
                            .logits_stride = n_experts,
                            .n_rows = n_rows,
                            .n_experts = n_experts,
                            .n_chosen = n_chosen,
                            .gate = gate};
}

/* The expert whose group holds that place. */
static int32_t expert_of(int32_t place, int32_t n_experts)
{
    int32_t e = 0;
    while (e < n_experts && group_start[e + 1] <= place)
        e++;
    assert_in_range(e, 0, n_experts - 1);
    return e;
}

/* How many experts come before e in the order of row t. */
static int32_t rank_of(const float *row, int32_t e, int32_t n_experts)
{
    int32_t rank = 0;
    for (int32_t i = 0; i < n_experts; i++)
        rank += row[i] > row[e] || (row[i] == row[e] && i < e);
    return rank;
}

static void check_row(const moe_route_args *a, int32_t t)
{
    const float *row = a->logits + (int64_t)t * a->n_experts;
    double all = 0, chosen = 0;
    for (int32_t e = 0; e < a->n_experts; e++) {
        double x = exp((double)row[e]);
        all += x;
        chosen += rank_of(row, e, a->n_experts) < a->n_chosen ? x : 0;
    }
    for (int32_t r = 0; r < a->n_chosen; r++) {
        int32_t e = expert_of(places[t * a->n_chosen + r], a->n_experts);
        assert_int_equal(rank_of(row, e, a->n_experts), r);
        double x = exp((double)row[e]);
        double want = a->gate == MOE_GATE_SIGMOID       ? x / (1 + x)
                      : a->gate == MOE_GATE_SOFTMAX_ALL ? x / all
                                                        : x / chosen;
        float got = weights[t * a->n_chosen + r];
        if (!(fabs(got - want) <= 1e-7 * want))
            fail_msg("row %d rank %d: weight %.9g, expected %.9g", t, r, (double)got, want);
    }
}

/* Every place is taken once, and places of one expert ascend with the rows. */
static void check_order(const moe_route_args *a)
{
    static int32_t row_at[MAX_ROWS * MAX_CHOSEN];
    int32_t n_copies = a->n_rows * a->n_chosen;
    assert_int_equal(group_start[0], 0);
    assert_int_equal(group_start[a->n_experts], n_copies);
    for (int32_t i = 0; i < n_copies; i++)
        row_at[i] = -1;
    for (int32_t i = 0; i < n_copies; i++) {
        assert_in_range(places[i], 0, n_copies - 1);
        assert_int_equal(row_at[places[i]], -1);
        row_at[places[i]] = i / a->n_chosen;
    }
    for (int32_t e = 0; e < a->n_experts; e++) {
        for (int32_t i = group_start[e] + 1; i < group_start[e + 1]; i++)
            assert_true(row_at[i] > row_at[i - 1]);
    }
}

static void route_randomly(kernel_rig *rig)
{
    static const int32_t shapes[][3] = {{0, 8, 2},   {1, 1, 1},    {1, 128, 8},  {3, 8, 8},
                                        {70, 32, 4}, {70, 128, 8}, {33, 300, 64}};
    for (size_t i = 0; i < PGD_ARRAY_LEN(shapes); i++) {
        for (int gate = MOE_GATE_SOFTMAX_CHOSEN; gate <= MOE_GATE_SIGMOID; gate++) {
            moe_route_args a = route_args(shapes[i][0], shapes[i][1], shapes[i][2], (moe_gate)gate);
            for (int32_t k = 0; k < a.n_rows * a.n_experts; k++) {
                logits[k] = kernel_rig_float();
                if (kernel_rig_u32() % 4 == 0 && k % a.n_experts > 0)
                    logits[k] = logits[k - 1]; /* ties */
            }
            assert_int_equal(rig->ops->moe_route(&a, &rig->ctx), PGD_OK);
            for (int32_t t = 0; t < a.n_rows; t++)
                check_row(&a, t);
            check_order(&a);
        }
    }
}

static void test_moe_route(void **state)
{
    (void)state;
    kernel_rig_for_all(route_randomly, 0);
}

static void test_moe_route_takes_ties_by_id_and_shows_nan(void **state)
{
    (void)state;
    kernel_ctx ctx = {0};
    moe_route_args a = route_args(3, 4, 2, MOE_GATE_SOFTMAX_CHOSEN);
    const float rows[12] = {1, 2, 2, 2, /**/ 5, NAN, 7, NAN, /**/ -INFINITY, -1e30f, -3e38f, 0};
    memcpy(logits, rows, sizeof(rows));
    assert_int_equal(moe_route_ref(&a, &ctx), PGD_OK);
    assert_int_equal(expert_of(places[0], 4), 1);
    assert_int_equal(expert_of(places[1], 4), 2);
    assert_true(weights[0] == 0.5f && weights[1] == 0.5f);
    assert_int_equal(expert_of(places[2], 4), 1);
    assert_int_equal(expert_of(places[3], 4), 3);
    assert_true(isnan(weights[2]) && isnan(weights[3]));
    assert_int_equal(expert_of(places[4], 4), 3);
    assert_int_equal(expert_of(places[5], 4), 1);
    assert_true(weights[4] == 1 && weights[5] == 0);
}

static void test_moe_refuses_bad_arguments(void **state)
{
    (void)state;
    kernel_ctx ctx = {0};
    static const int32_t bad[][3] = {{-1, 4, 2}, {1, 4, 0}, {1, 4, 5}};
    for (size_t i = 0; i < PGD_ARRAY_LEN(bad); i++) {
        moe_route_args a = route_args(bad[i][0], bad[i][1], bad[i][2], MOE_GATE_SIGMOID);
        assert_int_equal(moe_route_ref(&a, &ctx), PGD_EINVAL);
    }
    moe_route_args narrow = route_args(1, 4, 2, MOE_GATE_SIGMOID);
    narrow.logits_stride = 3;
    assert_int_equal(moe_route_ref(&narrow, &ctx), PGD_EINVAL);
    float x[4] = {0};
    moe_gather_args gather = {x, 4, x, 3, NULL, places, 1, 1, 4};
    assert_int_equal(moe_gather_ref(&gather, &ctx), PGD_EINVAL);
    moe_combine_args combine = {x, 4, x, 3, NULL, places, 1, 1, 4};
    assert_int_equal(moe_combine_ref(&combine, &ctx), PGD_EINVAL);
}

/* Rows through gather and combine; a row's sum is that of the row alone, in any order of places. */
static void move_rows(kernel_rig *rig)
{
    static const int32_t dims[] = {1, 7, 16, 50, 2048};
    for (size_t i = 0; i < 2 * PGD_ARRAY_LEN(dims); i++) {
        int32_t dim = dims[i / 2], n_rows = kernel_rig_int(0, 40), k = kernel_rig_int(1, 8);
        int64_t stride = dim + kernel_rig_int(0, 3), n_copies = (int64_t)n_rows * k;
        moe_route_args a = route_args(n_rows, 12, k, MOE_GATE_SOFTMAX_CHOSEN);
        for (int32_t j = 0; j < n_rows * 12; j++)
            logits[j] = kernel_rig_float();
        assert_int_equal(moe_route_ref(&a, &rig->ctx), PGD_OK);
        float *x = kernel_rig_floats(n_rows * stride), *y = kernel_rig_floats(n_copies * stride);
        float *out = kernel_rig_floats(n_rows * stride), *want = kernel_rig_floats(n_rows * stride);
        memcpy(want, out, (size_t)(n_rows * stride) * sizeof(float));
        const float *w = i % 2 ? weights : NULL;
        moe_gather_args gather = {y, stride, x, stride, w, places, n_rows, k, dim};
        assert_int_equal(rig->ops->moe_gather(&gather, &rig->ctx), PGD_OK);
        for (int64_t c = 0; c < n_copies; c++) {
            for (int32_t j = 0; j < dim; j++) {
                float expected = x[c / k * stride + j] * (w ? w[c] : 1);
                assert_true(y[places[c] * stride + j] == expected);
            }
        }
        for (int64_t j = 0; j < n_copies * stride; j++)
            y[j] = kernel_rig_float();
        moe_combine_args combine = {want, stride, y, stride, w, places, n_rows, k, dim};
        float *alone = kernel_rig_floats(n_rows * stride);
        memcpy(alone, want, (size_t)(n_rows * stride) * sizeof(float));
        assert_int_equal(moe_combine_ref(&combine, &rig->alone), PGD_OK);
        combine.out = out;
        assert_int_equal(rig->ops->moe_combine(&combine, &rig->ctx), PGD_OK);
        kernel_rig_assert_near(out, want, n_rows * stride, KERNEL_RIG_ATOL, KERNEL_RIG_RTOL,
                               rig->ops->name);
        for (int32_t t = 0; t < n_rows; t++) {
            moe_combine_args one = combine;
            one.out = alone + t * stride;
            one.weights = w ? w + (int64_t)t * k : NULL;
            one.places = places + (int64_t)t * k;
            one.n_rows = 1;
            assert_int_equal(rig->ops->moe_combine(&one, &rig->alone), PGD_OK);
        }
        kernel_rig_assert_same(alone, out, n_rows * stride, "row alone");
        kernel_rig_free(x, n_rows * stride);
        kernel_rig_free(y, n_copies * stride);
        kernel_rig_free(out, n_rows * stride);
        kernel_rig_free(want, n_rows * stride);
        kernel_rig_free(alone, n_rows * stride);
    }
}

static void test_moe_gather_and_combine(void **state)
{
    (void)state;
    kernel_rig_for_all(move_rows, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_moe_route),
        cmocka_unit_test(test_moe_route_takes_ties_by_id_and_shows_nan),
        cmocka_unit_test(test_moe_refuses_bad_arguments),
        cmocka_unit_test(test_moe_gather_and_combine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
