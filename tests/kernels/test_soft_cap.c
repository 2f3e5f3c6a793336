/* Soft cap of logits: known values, every level against the reference, and values that do not know of each other. */
#include "kernels/soft_cap.h"
#include "tests/kernels/kernel_rig.h"

static void test_soft_cap_known_values(void **state)
{
    (void)state;
    kernel_ctx ctx = {0};
    float x[6] = {0, 30, -30, 1e6f, -1e6f, NAN};
    soft_cap_args args = {x, 6, 30};
    assert_int_equal(soft_cap_ref(&args, &ctx), PGD_OK);
    const float want[6] = {0, 22.847825f, -22.847825f, 30, -30, NAN};
    kernel_rig_assert_near(x, want, 6, 0, 1e-6, "known values");
    args.cap = 0;
    assert_int_equal(soft_cap_ref(&args, &ctx), PGD_EINVAL);
}

static void compare(kernel_rig *rig)
{
    const int32_t sizes[] = {0, 1, 15, 16, 17, 1000, 40001};
    const float caps[] = {30, 50, 0.5f};
    for (size_t k = 0; k < PGD_ARRAY_LEN(sizes) * PGD_ARRAY_LEN(caps); k++) {
        int32_t n = sizes[k / PGD_ARRAY_LEN(caps)];
        float cap = caps[k % PGD_ARRAY_LEN(caps)];
        float *want = kernel_rig_floats(n + 1), *got = kernel_rig_floats(n + 1),
              *one = kernel_rig_floats(n + 1);
        memcpy(got, want, ((size_t)n + 1) * sizeof(float));
        memcpy(one, want, ((size_t)n + 1) * sizeof(float));
        soft_cap_args args = {want, n, cap};
        assert_int_equal(soft_cap_ref(&args, &rig->alone), PGD_OK);
        args.x = got;
        assert_int_equal(rig->ops->soft_cap(&args, &rig->ctx), PGD_OK);
        kernel_rig_assert_near(got, want, n + 1, 4e-7 * (double)cap, 0, rig->ops->name);
        for (int32_t i = 0; i < n; i += 7) {
            soft_cap_args part = {one + i, PGD_MIN(7, n - i), cap};
            assert_int_equal(rig->ops->soft_cap(&part, &rig->alone), PGD_OK);
        }
        kernel_rig_assert_same(one, got, n + 1, "in parts; what lies behind stays");
        kernel_rig_free(want, n + 1);
        kernel_rig_free(got, n + 1);
        kernel_rig_free(one, n + 1);
    }
}

static void test_soft_cap_all_levels(void **state)
{
    (void)state;
    kernel_rig_for_all(compare, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_soft_cap_known_values),
        cmocka_unit_test(test_soft_cap_all_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
