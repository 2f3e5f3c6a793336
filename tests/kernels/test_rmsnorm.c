/* RMS normalisation: known values, every level against the reference, and rows that do not know of each other. */
#include "kernels/rmsnorm.h"
#include "tests/kernels/kernel_rig.h"

static void test_rmsnorm_known_values(void **state)
{
    (void)state;
    kernel_ctx ctx = {0};
    const float x[4] = {3, 4, 0, -1}, weight[2] = {1, 2};
    float out[4];
    rmsnorm_args args = {out, 4, x, 4, weight, 1, 2, 2, 0};
    assert_int_equal(rmsnorm_ref(&args, &ctx), PGD_OK);
    const float want[4] = {3 / sqrtf(12.5f), 8 / sqrtf(12.5f), 0, -2 / sqrtf(0.5f)};
    kernel_rig_assert_near(out, want, 4, 0, 1e-6, "known values");
    const float zero[4] = {0};
    args.x = zero;
    args.eps = 1e-5f;
    assert_int_equal(rmsnorm_ref(&args, &ctx), PGD_OK);
    kernel_rig_assert_same(out, zero, 4, "all zero");
    const float ones[4] = {1, 1, 1, 1};
    memcpy(out, ones, sizeof(out));
    args = (rmsnorm_args){out, 4, x, 4, NULL, 1, 2, 2, 0, true};
    assert_int_equal(rmsnorm_ref(&args, &ctx), PGD_OK);
    const float sums[4] = {1 + 3 / sqrtf(12.5f), 1 + 4 / sqrtf(12.5f), 1, 1 - 1 / sqrtf(0.5f)};
    kernel_rig_assert_near(out, sums, 4, 0, 1e-6, "added, without weights");
    args.x_stride = 3;
    assert_int_equal(rmsnorm_ref(&args, &ctx), PGD_EINVAL);
}

static void compare_kind(kernel_rig *rig, bool accumulate, bool has_weight)
{
    const int32_t dims[] = {1, 7, 16, 31, 64, 80, 128, 576, 1000, 2048, 4099};
    for (size_t k = 0; k < PGD_ARRAY_LEN(dims); k++) {
        int32_t dim = dims[k], n_rows = kernel_rig_int(0, 9), n_groups = kernel_rig_int(1, 4);
        int64_t stride = (int64_t)dim * n_groups + kernel_rig_int(0, 5),
                n = stride * PGD_MAX(n_rows, 1);
        float *x = kernel_rig_floats(n), *weight = kernel_rig_floats(dim);
        float *want = kernel_rig_floats(n), *got = kernel_rig_floats(n),
              *one = kernel_rig_floats(n);
        memcpy(got, want, (size_t)n * sizeof(float)); /* what lies between rows stays */
        memcpy(one, want, (size_t)n * sizeof(float));
        rmsnorm_args args = {want,   stride,   x,   stride, has_weight ? weight : NULL,
                             n_rows, n_groups, dim, 1e-5f,  accumulate};
        assert_int_equal(rmsnorm_ref(&args, &rig->alone), PGD_OK);
        args.out = got;
        assert_int_equal(rig->ops->rmsnorm(&args, &rig->ctx), PGD_OK);
        kernel_rig_assert_near(got, want, n, KERNEL_RIG_ATOL, KERNEL_RIG_RTOL, rig->ops->name);
        for (int32_t t = 0; t < n_rows; t++) {
            rmsnorm_args row = args;
            row.x = x + t * stride;
            row.out = one + t * stride;
            row.n_rows = 1;
            assert_int_equal(rig->ops->rmsnorm(&row, &rig->alone), PGD_OK);
        }
        kernel_rig_assert_same(one, got, n, "row alone");
        args.out = x; /* in place */
        if (!accumulate)
            assert_int_equal(rig->ops->rmsnorm(&args, &rig->ctx), PGD_OK);
        for (int32_t t = 0; t < n_rows && !accumulate; t++)
            kernel_rig_assert_same(x + t * stride, got + t * stride, (int64_t)dim * n_groups,
                                   "in place");
        kernel_rig_free(x, n);
        kernel_rig_free(weight, dim);
        kernel_rig_free(want, n);
        kernel_rig_free(got, n);
        kernel_rig_free(one, n);
    }
}

static void compare(kernel_rig *rig)
{
    compare_kind(rig, false, true);
    compare_kind(rig, true, true);
    compare_kind(rig, false, false);
}

static void test_rmsnorm_all_levels(void **state)
{
    (void)state;
    kernel_rig_for_all(compare, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rmsnorm_known_values),
        cmocka_unit_test(test_rmsnorm_all_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
