/* Learned positions: every level against the plain formula, rows in any order. */
#include "kernels/add_positions.h"
#include "tests/kernels/kernel_rig.h"

enum { N_POSITIONS = 40, OFFSET = 2 };

static void compare(kernel_rig *rig)
{
    const int32_t dims[] = {1, 7, 64, 1030};
    for (size_t k = 0; k < PGD_ARRAY_LEN(dims); k++) {
        int32_t dim = dims[k], n_rows = kernel_rig_int(0, 30), positions[30];
        int64_t stride = dim + kernel_rig_int(0, 3), n = stride * PGD_MAX(n_rows, 1);
        int64_t n_table = (int64_t)(N_POSITIONS + OFFSET) * dim;
        float *x = kernel_rig_floats(n), *want = kernel_rig_floats(n);
        float *table = kernel_rig_floats(n_table);
        float scale = k % 2 == 0 ? 1 : 8.5f;
        memcpy(want, x, (size_t)n * sizeof(float));
        for (int32_t t = 0; t < n_rows; t++) {
            positions[t] = kernel_rig_int(0, N_POSITIONS - 1);
            for (int32_t i = 0; i < dim; i++)
                want[t * stride + i] = (float)((double)scale * x[t * stride + i] +
                                               table[(positions[t] + OFFSET) * dim + i]);
        }
        add_positions_args args = {x, stride, scale, table, OFFSET, positions, n_rows, dim};
        assert_int_equal(rig->ops->add_positions(&args, &rig->ctx), PGD_OK);
        kernel_rig_assert_near(x, want, n, 1e-6, 1e-6, rig->ops->name);
        args.offset = -1;
        assert_int_equal(rig->ops->add_positions(&args, &rig->ctx), PGD_EINVAL);
        kernel_rig_free(x, n);
        kernel_rig_free(want, n);
        kernel_rig_free(table, n_table);
    }
}

static void test_add_positions_all_levels(void **state)
{
    (void)state;
    kernel_rig_for_all(compare, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_add_positions_all_levels)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
