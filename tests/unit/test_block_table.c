/* Block tables: replace, append, slots, and the refusal of everything that would index outside. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "worker/block_table.h"

static block_table *make(int32_t first_block)
{
    block_table *t;
    block_table_opts opts = {.n_rows = 3,
                             .max_blocks_per_row = 4,
                             .block_size = 16,
                             .n_blocks = 10,
                             .first_block = first_block};
    assert_int_equal(block_table_create(&t, &opts), PGD_OK);
    return t;
}

static void test_block_table_replace_and_append(void **state)
{
    (void)state;
    block_table *t = make(1);
    pgd_why why;
    const block_id a[] = {7, 2}, b[] = {9}, c[] = {5, 4, 3};
    int64_t stride;
    const block_id *ids = block_table_get_ids(t, &stride);
    assert_int_equal(stride, 4);
    assert_int_equal(block_table_replace(t, 1, a, 2, &why), PGD_OK);
    assert_int_equal(block_table_append(t, 1, b, 1, &why), PGD_OK);
    assert_int_equal(block_table_append(t, 1, NULL, 0, &why), PGD_OK);
    assert_int_equal(block_table_n_blocks(t, 1), 3);
    assert_int_equal(block_table_n_positions(t, 1), 48);
    const block_id want[] = {7, 2, 9};
    assert_memory_equal(ids + stride, want, sizeof(want));
    assert_int_equal(block_table_replace(t, 1, c, 3, &why), PGD_OK);
    assert_memory_equal(ids + stride, c, sizeof(c));
    assert_int_equal(block_table_n_blocks(t, 0), 0);
    assert_int_equal(block_table_n_blocks(t, 2), 0);
    block_table_reset_row(t, 1);
    assert_int_equal(block_table_n_positions(t, 1), 0);
    block_table_destroy(t);
}

static void test_block_table_slots(void **state)
{
    (void)state;
    block_table *t = make(1);
    pgd_why why;
    const block_id ids[] = {7, 2, 9, 1};
    slot_id slots[64];
    assert_int_equal(block_table_replace(t, 2, ids, 4, &why), PGD_OK);
    block_table_fill_slots(slots, t, 2, 0, 64);
    for (int32_t p = 0; p < 64; p++)
        assert_int_equal(slots[p], ids[p / 16] * 16 + p % 16);
    block_table_fill_slots(slots, t, 2, 30, 3);
    const slot_id want[] = {2 * 16 + 14, 2 * 16 + 15, 9 * 16};
    assert_memory_equal(slots, want, sizeof(want));
    block_table_destroy(t);
}

static void test_block_table_refuses(void **state)
{
    (void)state;
    block_table *t = make(1);
    pgd_why why;
    const block_id good[] = {1, 2, 3},
                   bad[][2] = {{4, 10}, {4, 0}, {-1, 4}, {INT32_MAX, 4}, {INT32_MIN, 4}};
    assert_int_equal(block_table_replace(t, 0, good, 3, &why), PGD_OK);
    for (size_t i = 0; i < PGD_ARRAY_LEN(bad); i++) {
        assert_int_equal(block_table_replace(t, 0, bad[i], 2, &why), PGD_EPROTO);
        assert_int_equal(block_table_n_blocks(t, 0), 3);
        if (i >= 2)
            assert_int_equal(block_table_append(t, 0, bad[i], 1, &why), PGD_EPROTO);
    }
    assert_non_null(strstr(why.text, "block id in [1, 10)"));
    assert_int_equal(block_table_append(t, 0, good, 2, &why), PGD_EPROTO); /* 5 of 4 */
    assert_int_equal(block_table_append(t, 0, good, -1, &why), PGD_EPROTO);
    assert_int_equal(block_table_append(t, 0, good, INT32_MAX, &why), PGD_EPROTO);
    assert_int_equal(block_table_append(t, 0, good, 1, &why), PGD_OK);
    block_table_destroy(t);

    t = make(0);
    const block_id null_block = 0;
    assert_int_equal(block_table_append(t, 0, &null_block, 1, &why), PGD_OK);
    block_table_destroy(t);

    block_table_opts opts = {
        .n_rows = 1, .max_blocks_per_row = 1 << 28, .block_size = 16, .n_blocks = 10};
    assert_int_equal(block_table_create(&t, &opts), PGD_EINVAL); /* positions beyond int32 */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block_table_replace_and_append),
        cmocka_unit_test(test_block_table_slots),
        cmocka_unit_test(test_block_table_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
