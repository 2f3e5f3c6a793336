/* Row gather: exact for every weight type. */
#include "kernels/embed.h"
#include "tests/kernels/kernel_rig.h"

static void compare(kernel_rig *rig)
{
    for (int32_t type = 0; type <= DTYPE_BF16; type++) {
        const dtype_info *info = dtype_get_info(type);
        if (!info || !info->is_weight)
            continue;
        int32_t dim = info->block_elems * kernel_rig_int(1, 5), n_rows = kernel_rig_int(1, 40);
        int64_t row_bytes = (int64_t)dtype_row_bytes((dtype)type, dim) + kernel_rig_int(0, 3);
        enum { N_TABLE = 13 };
        uint8_t *table = mem_alloc((size_t)(N_TABLE * row_bytes));
        int32_t ids[40];
        for (int64_t i = 0; i < N_TABLE * row_bytes; i++)
            table[i] = (uint8_t)(kernel_rig_u32() & 0x3f); /* no exponent of all ones: no NaN */
        for (int32_t t = 0; t < n_rows; t++)
            ids[t] = kernel_rig_int(0, N_TABLE - 1);
        int64_t stride = dim + kernel_rig_int(0, 3), n = stride * n_rows;
        float *want = kernel_rig_floats(n), *got = kernel_rig_floats(n);
        memcpy(got, want, (size_t)n * sizeof(float));
        for (int32_t t = 0; t < n_rows; t++)
            dtype_dequantize_row(want + t * stride, table + ids[t] * row_bytes, dim, (dtype)type);
        embed_args args = {got, stride, table, (dtype)type, row_bytes, N_TABLE, ids, n_rows, dim};
        assert_int_equal(rig->ops->embed(&args, &rig->ctx), PGD_OK);
        kernel_rig_assert_same(got, want, n, info->name);
        if (info->block_elems > 1) {
            args.dim--;
            assert_int_equal(rig->ops->embed(&args, &rig->ctx), PGD_EINVAL);
        }
        mem_free(table);
        kernel_rig_free(want, n);
        kernel_rig_free(got, n);
    }
}

static void test_embed_all_levels(void **state)
{
    (void)state;
    kernel_rig_for_all(compare, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_embed_all_levels)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
