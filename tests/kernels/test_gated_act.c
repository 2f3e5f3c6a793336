/* Gated activation: known values, extremes, every level against the reference. */
#include "kernels/gated_act.h"
#include "tests/kernels/kernel_rig.h"

static void test_gated_act_known_values(void **state)
{
    (void)state;
    kernel_ctx ctx = {0};
    const float gate[5] = {0, 1, -1, 100, -100}, up[5] = {3, 2, 2, 0.5f, 7};
    float out[5];
    gated_act_args args = {out, 5, gate, up, 5, 1, 5, GATED_ACT_SILU, 0, 0};
    assert_int_equal(gated_act_ref(&args, &ctx), PGD_OK);
    const float silu[5] = {0, 1.46211716f, -0.53788284f, 50, 0};
    kernel_rig_assert_near(out, silu, 5, 1e-30, 1e-6, "SiLU");
    args.kind = GATED_ACT_GELU_TANH;
    assert_int_equal(gated_act_ref(&args, &ctx), PGD_OK);
    const float gelu[5] = {0, 1.68238398f, -0.31761602f, 50, 0};
    kernel_rig_assert_near(out, gelu, 5, 1e-30, 1e-6, "GELU");
    args.kind = GATED_ACT_CLAMPED;
    args.alpha = 1.702f;
    args.limit = 2.5f;
    /* gates 0, 1, -1, 2.5, -100; ups 2.5, 2, 2, 0.5, 2.5 */
    assert_int_equal(gated_act_ref(&args, &ctx), PGD_OK);
    const float clamped[5] = {0, 2.53738730f, -0.46261270f, 3.69752075f, 0};
    kernel_rig_assert_near(out, clamped, 5, 1e-30, 1e-6, "clamped");
    args.limit = -1;
    assert_int_equal(gated_act_ref(&args, &ctx), PGD_EINVAL);
    args.limit = 0;
    args.in_stride = 4;
    assert_int_equal(gated_act_ref(&args, &ctx), PGD_EINVAL);
}

static void compare_kind(kernel_rig *rig, gated_act_kind kind)
{
    const int32_t dims[] = {1, 5, 16, 33, 192, 1536, 5000};
    for (size_t k = 0; k < PGD_ARRAY_LEN(dims); k++) {
        int32_t dim = dims[k], n_rows = kernel_rig_int(0, 9);
        int64_t stride = (int64_t)2 * dim + kernel_rig_int(0, 3), n = stride * PGD_MAX(n_rows, 1);
        float *x = kernel_rig_floats(n);
        /* Spikes of both signs, beyond where exp overflows. */
        for (int64_t i = 0; i + 1 < n; i += 37)
            x[i] *= 40;
        float *want = kernel_rig_floats(n), *got = kernel_rig_floats(n),
              *one = kernel_rig_floats(n);
        memcpy(got, want, (size_t)n * sizeof(float));
        memcpy(one, want, (size_t)n * sizeof(float));
        gated_act_args args = {want, stride, x, x + dim, stride, n_rows, dim, kind, 1.702f, 3};
        assert_int_equal(gated_act_ref(&args, &rig->alone), PGD_OK);
        args.out = got;
        assert_int_equal(rig->ops->gated_act(&args, &rig->ctx), PGD_OK);
        kernel_rig_assert_near(got, want, n, KERNEL_RIG_ATOL, KERNEL_RIG_RTOL, rig->ops->name);
        for (int32_t t = 0; t < n_rows; t++) {
            gated_act_args row = {one + t * stride,
                                  stride,
                                  x + t * stride,
                                  x + t * stride + dim,
                                  stride,
                                  1,
                                  dim,
                                  kind,
                                  1.702f,
                                  3};
            assert_int_equal(rig->ops->gated_act(&row, &rig->alone), PGD_OK);
        }
        kernel_rig_assert_same(one, got, n, "row alone");
        args.out = x;
        assert_int_equal(rig->ops->gated_act(&args, &rig->ctx), PGD_OK);
        for (int32_t t = 0; t < n_rows; t++)
            kernel_rig_assert_same(x + t * stride, got + t * stride, dim, "in place");
        kernel_rig_free(x, n);
        kernel_rig_free(want, n);
        kernel_rig_free(got, n);
        kernel_rig_free(one, n);
    }
}

static void compare(kernel_rig *rig)
{
    compare_kind(rig, GATED_ACT_SILU);
    compare_kind(rig, GATED_ACT_GELU_TANH);
    compare_kind(rig, GATED_ACT_CLAMPED);
}

static void test_gated_act_all_levels(void **state)
{
    (void)state;
    kernel_rig_for_all(compare, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gated_act_known_values),
        cmocka_unit_test(test_gated_act_all_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
