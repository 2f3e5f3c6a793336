/* Rotary embedding: known values of both pairings, partial rotation, every level against the reference. */
#include "kernels/rope.h"
#include "tests/kernels/kernel_rig.h"

static void test_rope_known_values(void **state)
{
    (void)state;
    kernel_ctx ctx = {0};
    /* Position 1: a quarter turn for pair 0, a half turn for pair 1; the last value is not rotated. */
    const float table[8] = {1, 1, 0, 0, 0, -1, 1, 0};
    const int32_t positions[1] = {1};
    float x[5] = {1, 2, 3, 4, 9};
    rope_args args = {x, 5, table, 2, positions, 1, 1, 5, 4, ROPE_PAIRS_ADJACENT};
    assert_int_equal(rope_ref(&args, &ctx), PGD_OK);
    const float adjacent[5] = {-2, 1, -3, -4, 9};
    kernel_rig_assert_near(x, adjacent, 5, 0, 0, "adjacent");
    float y[5] = {1, 2, 3, 4, 9};
    args.x = y;
    args.pairs = ROPE_PAIRS_HALVES;
    assert_int_equal(rope_ref(&args, &ctx), PGD_OK);
    const float halves[5] = {-3, -2, 1, -4, 9};
    kernel_rig_assert_near(y, halves, 5, 0, 0, "halves");
    args.rope_dim = 6;
    assert_int_equal(rope_ref(&args, &ctx), PGD_EINVAL);
    args.rope_dim = 3;
    assert_int_equal(rope_ref(&args, &ctx), PGD_EINVAL);
}

static void compare(kernel_rig *rig)
{
    const int32_t head_dims[] = {2, 10, 16, 34, 64, 80, 96, 128, 256};
    for (size_t k = 0; k < 2 * PGD_ARRAY_LEN(head_dims); k++) {
        int32_t head_dim = head_dims[k / 2], n_rows = kernel_rig_int(0, 9),
                n_heads = kernel_rig_int(1, 12);
        int32_t rope_dim = kernel_rig_int(0, 1) ? head_dim : 2 * kernel_rig_int(1, head_dim / 2);
        int32_t positions[9];
        int64_t stride = (int64_t)head_dim * n_heads + kernel_rig_int(0, 5),
                n = stride * PGD_MAX(n_rows, 1);
        float *table = kernel_rig_floats((int64_t)50 * rope_dim);
        for (int64_t i = 0; i < (int64_t)50 * rope_dim; i++)
            table[i] = tanhf(table[i]);
        for (int32_t t = 0; t < n_rows; t++)
            positions[t] = kernel_rig_int(0, 49);
        float *want = kernel_rig_floats(n), *got = kernel_rig_floats(n),
              *one = kernel_rig_floats(n);
        memcpy(got, want, (size_t)n * sizeof(float));
        memcpy(one, want, (size_t)n * sizeof(float));
        rope_args args = {
            want,   stride,  table,    50,       positions,
            n_rows, n_heads, head_dim, rope_dim, k % 2 ? ROPE_PAIRS_HALVES : ROPE_PAIRS_ADJACENT};
        assert_int_equal(rope_ref(&args, &rig->alone), PGD_OK);
        args.x = got;
        assert_int_equal(rig->ops->rope(&args, &rig->ctx), PGD_OK);
        kernel_rig_assert_near(got, want, n, 1e-5, KERNEL_RIG_RTOL, rig->ops->name);
        for (int32_t t = 0; t < n_rows; t++) {
            rope_args row = args;
            row.x = one + t * stride;
            row.positions = positions + t;
            row.n_rows = 1;
            assert_int_equal(rig->ops->rope(&row, &rig->alone), PGD_OK);
        }
        kernel_rig_assert_same(one, got, n, "row alone");
        kernel_rig_free(table, (int64_t)50 * rope_dim);
        kernel_rig_free(want, n);
        kernel_rig_free(got, n);
        kernel_rig_free(one, n);
    }
}

static void test_rope_all_levels(void **state)
{
    (void)state;
    kernel_rig_for_all(compare, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rope_known_values),
        cmocka_unit_test(test_rope_all_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
