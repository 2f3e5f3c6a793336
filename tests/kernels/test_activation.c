/* Activations without a gate: known values, extremes, every level and kind against the reference. */
#include "kernels/activation.h"
#include "tests/kernels/kernel_rig.h"

static void test_activation_known_values(void **state)
{
    (void)state;
    kernel_ctx ctx = {0};
    const float x[6] = {0, 1, -1, 3, -100, 100};
    const float want[4][6] = {{0, 0.84134475f, -0.15865525f, 2.99595031f, 0, 100},
                              {0, 0.84119199f, -0.15880801f, 2.99636260f, 0, 100},
                              {0, 1, 0, 3, 0, 100},
                              {0, 0.73105858f, -0.26894142f, 2.85772238f, 0, 100}};
    float out[6];
    activation_args args = {out, 6, x, 6, 1, 6, ACTIVATION_GELU};
    for (int kind = 0; kind < 4; kind++) {
        args.kind = (activation_kind)kind;
        assert_int_equal(activation_ref(&args, &ctx), PGD_OK);
        kernel_rig_assert_near(out, want[kind], 6, 1e-30, 1e-6, "known values");
    }
    args.kind = (activation_kind)4;
    assert_int_equal(activation_ref(&args, &ctx), PGD_EINVAL);
    args.kind = ACTIVATION_GELU;
    args.x_stride = 5;
    assert_int_equal(activation_ref(&args, &ctx), PGD_EINVAL);
}

static void compare_kind(kernel_rig *rig, activation_kind kind, int32_t dim)
{
    int32_t n_rows = kernel_rig_int(0, 9);
    int64_t stride = dim + kernel_rig_int(0, 3), n = stride * PGD_MAX(n_rows, 1);
    float *x = kernel_rig_floats(n);
    for (int64_t i = 0; i < n; i += 37) /* beyond where exp overflows */
        x[i] *= 40;
    for (int64_t i = 5; i < n; i += 91)
        x[i] = i % 2 ? NAN : INFINITY;
    float *want = kernel_rig_floats(n), *got = kernel_rig_floats(n), *one = kernel_rig_floats(n);
    memcpy(got, want, (size_t)n * sizeof(float));
    memcpy(one, want, (size_t)n * sizeof(float));
    activation_args args = {want, stride, x, stride, n_rows, dim, kind};
    assert_int_equal(activation_ref(&args, &rig->alone), PGD_OK);
    args.out = got;
    assert_int_equal(rig->ops->activation(&args, &rig->ctx), PGD_OK);
    for (int64_t i = 0; i < n; i++) {
        if (isinf(want[i]))
            assert_true(got[i] == want[i]);
        else
            kernel_rig_assert_near(got + i, want + i, 1, KERNEL_RIG_ATOL, KERNEL_RIG_RTOL,
                                   rig->ops->name);
    }
    for (int32_t t = 0; t < n_rows; t++) {
        activation_args row = {one + t * stride, stride, x + t * stride, stride, 1, dim, kind};
        assert_int_equal(rig->ops->activation(&row, &rig->alone), PGD_OK);
    }
    kernel_rig_assert_same(one, got, n, "row alone");
    args.out = x;
    assert_int_equal(rig->ops->activation(&args, &rig->ctx), PGD_OK);
    for (int32_t t = 0; t < n_rows; t++)
        kernel_rig_assert_same(x + t * stride, got + t * stride, dim, "in place");
    kernel_rig_free(x, n);
    kernel_rig_free(want, n);
    kernel_rig_free(got, n);
    kernel_rig_free(one, n);
}

static void compare(kernel_rig *rig)
{
    const int32_t dims[] = {1, 5, 16, 33, 192, 1536, 5000};
    for (size_t k = 0; k < PGD_ARRAY_LEN(dims); k++) {
        for (int kind = ACTIVATION_GELU; kind <= ACTIVATION_SILU; kind++)
            compare_kind(rig, (activation_kind)kind, dims[k]);
    }
}

static void test_activation_all_levels(void **state)
{
    (void)state;
    kernel_rig_for_all(compare, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_activation_known_values),
        cmocka_unit_test(test_activation_all_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
