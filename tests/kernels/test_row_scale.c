/* Scaling of rows: exact products, by one factor and by the factor of a position; what lies between rows stays. */
#include "kernels/row_scale.h"
#include "tests/kernels/kernel_rig.h"

static void compare(kernel_rig *rig)
{
    const int32_t dims[] = {1, 7, 64, 1000};
    const float factors[4] = {1, 0.5f, 1.1f, -3};
    for (size_t k = 0; k < 2 * PGD_ARRAY_LEN(dims); k++) {
        int32_t dim = dims[k / 2], n_rows = kernel_rig_int(0, 20), positions[20];
        int64_t stride = dim + kernel_rig_int(0, 3), n = stride * PGD_MAX(n_rows, 1);
        bool by_position = k % 2 == 1;
        float *x = kernel_rig_floats(n), *want = kernel_rig_floats(n);
        memcpy(want, x, (size_t)n * sizeof(float));
        for (int32_t t = 0; t < n_rows; t++) {
            positions[t] = kernel_rig_int(0, 3);
            for (int32_t i = 0; i < dim; i++)
                want[t * stride + i] *= by_position ? factors[positions[t]] : 7.7f;
        }
        row_scale_args args = {.x = x,
                               .x_stride = stride,
                               .n_rows = n_rows,
                               .dim = dim,
                               .factor = 7.7f,
                               .factors = by_position ? factors : NULL,
                               .positions = by_position ? positions : NULL};
        assert_int_equal(rig->ops->row_scale(&args, &rig->ctx), PGD_OK);
        kernel_rig_assert_same(x, want, n, rig->ops->name);
        args.x_stride = dim - 1;
        assert_int_equal(rig->ops->row_scale(&args, &rig->ctx), PGD_EINVAL);
        kernel_rig_free(x, n);
        kernel_rig_free(want, n);
    }
}

static void test_row_scale_all_levels(void **state)
{
    (void)state;
    kernel_rig_for_all(compare, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_row_scale_all_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
