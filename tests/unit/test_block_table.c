/* Block tables: replace, append, slots, and the refusal of everything that would index outside. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "worker/block_table.h"

static block_table *make(attention_kind kind, int32_t window)
{
    block_table *t;
    block_table_opts opts = {.n_rows = 3,
                             .max_blocks_per_row = 4,
                             .block_size = 16,
                             .n_blocks = 10,
                             .kind = kind,
                             .window = window};
    assert_int_equal(block_table_create(&t, &opts), PGD_OK);
    return t;
}

static void test_block_table_replace_and_append(void **state)
{
    (void)state;
    block_table *t = make(ATTENTION_FULL, 0);
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
    block_table *t = make(ATTENTION_FULL, 0);
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
    block_table *t = make(ATTENTION_FULL, 0);
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

    block_table_opts opts = {
        .n_rows = 1, .max_blocks_per_row = 1 << 28, .block_size = 16, .n_blocks = 10};
    assert_int_equal(block_table_create(&t, &opts), PGD_EINVAL); /* positions beyond int32 */
}

/* A window's table may begin with null blocks, and has none after the first real one. */
static void test_block_table_null_blocks(void **state)
{
    (void)state;
    pgd_why why = {0};
    const block_id table[] = {0, 0, 5, 6}, inside[] = {0, 5, 0};
    static const attention_kind without[] = {ATTENTION_FULL, ATTENTION_CROSS};
    for (size_t i = 0; i < PGD_ARRAY_LEN(without); i++) {
        block_table *t = make(without[i], 0);
        assert_int_equal(block_table_append(t, 0, table, 1, &why), PGD_EPROTO);
        block_table_destroy(t);
    }
    block_table *t = make(ATTENTION_SLIDING, 10);
    assert_int_equal(block_table_replace(t, 0, inside, 3, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "got 0, at row 0 entry 2"));
    assert_int_equal(block_table_replace(t, 0, table, 4, &why), PGD_OK);
    assert_int_equal(block_table_replace(t, 0, inside, 3, &why), PGD_EPROTO); /* no change */
    assert_int_equal(block_table_check(t, 0, 41, 64, &why), PGD_OK);          /* sees 32 */
    assert_int_equal(block_table_check(t, 0, 40, 64, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "positions 31 to 63, got blocks for 32 to 63"));
    assert_int_equal(block_table_check(t, 0, 41, 65, &why), PGD_EPROTO);
    assert_int_equal(block_table_append(t, 1, table, 1, &why), PGD_OK);
    assert_int_equal(block_table_append(t, 1, table, 1, &why), PGD_OK); /* still leading */
    assert_int_equal(block_table_append(t, 1, table + 2, 1, &why), PGD_OK);
    assert_int_equal(block_table_append(t, 1, table, 1, &why), PGD_EPROTO);
    block_table_reset_row(t, 0);
    assert_int_equal(block_table_append(t, 0, table + 2, 2, &why), PGD_OK);
    assert_int_equal(block_table_check(t, 0, 0, 32, &why), PGD_OK);
    block_table_destroy(t);
    t = make(ATTENTION_CHUNKED, 40);
    assert_int_equal(block_table_replace(t, 0, table, 4, &why), PGD_OK);
    assert_int_equal(block_table_check(t, 0, 40, 41, &why), PGD_OK); /* a chunk begins */
    assert_int_equal(block_table_check(t, 0, 39, 41, &why), PGD_EPROTO);
    block_table_destroy(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block_table_replace_and_append),
        cmocka_unit_test(test_block_table_slots),
        cmocka_unit_test(test_block_table_refuses),
        cmocka_unit_test(test_block_table_null_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
