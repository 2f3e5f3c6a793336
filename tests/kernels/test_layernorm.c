/* Layer normalisation: known values, every level against the reference, and rows that do not know of each other. */
#include "kernels/layernorm.h"
#include "tests/kernels/kernel_rig.h"

static void test_layernorm_known_values(void **state)
{
    (void)state;
    kernel_ctx ctx = {0};
    const float x[4] = {1, 2, 3, 6}, weight[4] = {1, 2, -1, 0}, bias[4] = {0, 1, 0, 7};
    float out[4];
    layernorm_args args = {out, 4, x, 4, weight, bias, 1, 4, 0};
    assert_int_equal(layernorm_ref(&args, &ctx), PGD_OK);
    const float sd = sqrtf(3.5f);
    const float want[4] = {-2 / sd, 1 - 2 / sd, 0, 7};
    kernel_rig_assert_near(out, want, 4, 1e-7, 1e-6, "known values");
    const float same[4] = {5, 5, 5, 5};
    args.x = same; /* no variance: eps alone keeps the division finite */
    args.eps = 1e-5f;
    assert_int_equal(layernorm_ref(&args, &ctx), PGD_OK);
    kernel_rig_assert_same(out, bias, 4, "equal values");
    args.x_stride = 3;
    assert_int_equal(layernorm_ref(&args, &ctx), PGD_EINVAL);
}

static void compare(kernel_rig *rig)
{
    const int32_t dims[] = {1, 7, 16, 31, 64, 80, 576, 1000, 1024, 4099};
    for (size_t k = 0; k < PGD_ARRAY_LEN(dims); k++) {
        int32_t dim = dims[k], n_rows = kernel_rig_int(0, 9);
        int64_t stride = (int64_t)dim + kernel_rig_int(0, 5), n = stride * PGD_MAX(n_rows, 1);
        float *x = kernel_rig_floats(n), *weight = kernel_rig_floats(dim),
              *bias = kernel_rig_floats(dim);
        for (int64_t i = 0; k % 2 == 1 && i < n; i++)
            x[i] += 20; /* far from zero: squares are of distances from the mean */
        float *want = kernel_rig_floats(n), *got = kernel_rig_floats(n),
              *one = kernel_rig_floats(n);
        memcpy(got, want, (size_t)n * sizeof(float)); /* what lies between rows stays */
        memcpy(one, want, (size_t)n * sizeof(float));
        layernorm_args args = {want, stride, x, stride, weight, bias, n_rows, dim, 1e-5f};
        assert_int_equal(layernorm_ref(&args, &rig->alone), PGD_OK);
        args.out = got;
        assert_int_equal(rig->ops->layernorm(&args, &rig->ctx), PGD_OK);
        /* Distances from the mean are as exact as the mean is, here of values of some 20. */
        kernel_rig_assert_near(got, want, n, k % 2 == 1 ? 2e-4 : 1e-5, KERNEL_RIG_RTOL,
                               rig->ops->name);
        for (int32_t t = 0; t < n_rows; t++) {
            layernorm_args row = args;
            row.x = x + t * stride;
            row.out = one + t * stride;
            row.n_rows = 1;
            assert_int_equal(rig->ops->layernorm(&row, &rig->alone), PGD_OK);
        }
        kernel_rig_assert_same(one, got, n, "row alone");
        args.out = x; /* in place */
        assert_int_equal(rig->ops->layernorm(&args, &rig->ctx), PGD_OK);
        for (int32_t t = 0; t < n_rows; t++)
            kernel_rig_assert_same(x + t * stride, got + t * stride, dim, "in place");
        kernel_rig_free(x, n);
        kernel_rig_free(weight, dim);
        kernel_rig_free(bias, dim);
        kernel_rig_free(want, n);
        kernel_rig_free(got, n);
        kernel_rig_free(one, n);
    }
}

static void test_layernorm_all_levels(void **state)
{
    (void)state;
    kernel_rig_for_all(compare, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layernorm_known_values),
        cmocka_unit_test(test_layernorm_all_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
