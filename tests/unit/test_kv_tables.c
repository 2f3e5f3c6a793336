/* Tables of several groups that one message fills: sizes by kind, and which group is at fault. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "worker/kv_tables.h"

static const kv_layout layout = {
    .n_groups = 3,
    .groups = {{ATTENTION_FULL, 0, 16}, {ATTENTION_SLIDING, 20, 32}, {ATTENTION_CROSS, 0, 16}}};

static void test_kv_tables_groups(void **state)
{
    (void)state;
    kv_tables t;
    pgd_why why = {0};
    const kv_tables_opts opts = {
        .n_rows = 2, .max_tokens = 64, .max_encoder_tokens = 20, .n_blocks = 50};
    assert_int_equal(kv_tables_init(&t, &layout, &opts), PGD_OK);
    const block_id full[] = {1, 2, 3, 4, 5}, sliding[] = {0, 11, 12}, cross[] = {21, 22, 23};
    block_ids_msg m = {.n_blocks = {3, 2, 2}, .ids = {full, sliding, cross}};
    assert_int_equal(kv_tables_replace(&t, 1, &m, &why), PGD_OK);
    assert_int_equal(kv_tables_check(&t, 1, 51, 48, &why), PGD_OK); /* looks back to 32 */
    assert_int_equal(kv_tables_check(&t, 1, 50, 48, &why), PGD_EPROTO);
    assert_int_equal(kv_tables_check(&t, 1, 51, 49, &why), PGD_EPROTO);
    m = (block_ids_msg){.n_blocks = {1, 0, 0}, .ids = {full + 3}};
    assert_int_equal(kv_tables_append(&t, 1, &m, &why), PGD_OK);
    assert_int_equal(kv_tables_check(&t, 1, 51, 64, &why), PGD_OK);
    for (int g = 0; g < 3; g++) { /* each group is full: of its own number of tokens */
        m = (block_ids_msg){.n_blocks = {0}, .ids = {full + 4, sliding + 2, cross + 2}};
        m.n_blocks[g] = 1;
        assert_int_equal(kv_tables_append(&t, 1, &m, &why), PGD_EPROTO);
    }
    assert_int_equal(block_table_n_blocks(t.groups[0], 0), 0);
    kv_tables_reset_row(&t, 1);
    for (int g = 0; g < 3; g++)
        assert_int_equal(block_table_n_blocks(t.groups[g], 1), 0);
    kv_tables_deinit(&t);
    kv_tables_deinit(&t); /* nothing left to do */
    const kv_tables_opts none = {.n_rows = 2, .max_tokens = 64, .n_blocks = 50};
    assert_int_equal(kv_tables_init(&t, &layout, &none), PGD_EINVAL); /* no encoder tokens */
    kv_tables_deinit(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_kv_tables_groups)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
