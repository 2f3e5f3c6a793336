/* Groups that recycle blocks behind a window: trace H14, rules SM3, SM9, SM10. */
#include "tests/unit/kv_fixture.h"

static void test_kv_group_manager_h14_sliding_window_removal(void **state)
{
    (void)state;
    block_pool *pool;
    kv_zero_list zero_list = {0};
    block_id taken[999];
    kv_group_manager g;
    kv_group_row row = {0};
    assert_int_equal(block_pool_create(&pool, 1011, true), PGD_OK);
    assert_true(block_pool_get_new(taken, pool, 999));
    kv_group_opts opts = {.spec = spec_of(ATTENTION_SLIDING, 2, 4),
                          .pool = pool,
                          .zero_list = &zero_list,
                          .n_rows = 1,
                          .rows = &row,
                          .row_bytes = sizeof row,
                          .max_model_len = 64,
                          .max_unfinished_tokens = 64};
    assert_int_equal(kv_group_manager_init(&g, &opts), PGD_OK);
    kv_group_manager_attach(&g, 0, NULL, 0, 0);
    kv_group_manager_allocate(&g, 0, 22);
    const block_id *table = kv_group_manager_get_table(&g, 0);
    for (int i = 0; i < 11; i++)
        assert_int_equal(table[i], 1000 + i);
    const struct {
        int32_t n_computed;
        int32_t n_null;
    } steps[] = {{0, 0}, {4, 0}, {5, 1}, {6, 1}, {7, 2}, {11, 4}};
    for (size_t s = 0; s < PGD_ARRAY_LEN(steps); s++) {
        kv_group_manager_remove_skipped(&g, 0, steps[s].n_computed);
        for (int i = 0; i < 11; i++)
            assert_int_equal(table[i], i < steps[s].n_null ? BLOCK_POOL_NULL : 1000 + i);
        assert_int_equal(block_pool_n_free(pool), steps[s].n_null);
    }
    /* The two that went last left in the order 1003, 1002. */
    block_id first = block_pool_next_free(pool, -1);
    assert_int_equal(first, 1003);
    assert_int_equal(block_pool_next_free(pool, first), 1002);
    kv_group_manager_free(&g, 0);
    block_pool_free(pool, taken, 999);
    block_pool_check(pool);
    kv_group_manager_deinit(&g);
    block_pool_destroy(pool);
}

static kv_manager *new_window_manager(int32_t n_blocks, int32_t max_unfinished_tokens)
{
    const kv_group_spec specs[2] = {
        spec_of(ATTENTION_FULL, 2, 0),
        {.ops = kv_group_ops_of(ATTENTION_SLIDING),
         .block_size = 2,
         .window = 4,
         .zero_new_blocks = true},
    };
    kv_manager_opts opts = {.n_blocks = n_blocks,
                            .groups = specs,
                            .n_groups = 2,
                            .max_holders = 4,
                            .max_model_len = 64,
                            .max_unfinished_tokens = max_unfinished_tokens};
    kv_manager *m;
    assert_int_equal(kv_manager_create(&m, &opts), PGD_OK);
    return m;
}

static void test_kv_group_manager_window_group_recycles(void **state)
{
    (void)state;
    kv_manager *m = new_window_manager(64, 64);
    request *r = new_range(0, 20, 16);
    block_ids_msg got;
    for (int i = 0; i < 20; i++)
        assert_true(alloc(&got, m, r, 1));
    /* Full attention holds 10 blocks; the window of 4 holds the entries from skipped(19) / 2 = 8
     * on. */
    kv_manager_get_table(&got, m, r);
    assert_int_equal(got.n_blocks[0], 10);
    assert_int_equal(got.n_blocks[1], 10);
    for (int i = 0; i < 10; i++) {
        assert_true(got.ids[0][i] > 0);
        assert_int_equal(got.ids[1][i] > 0, i >= 8);
    }
    assert_int_equal(n_free(m), 63 - 10 - 2);
    /* Tokens of steps in flight stay in the window. */
    request *r1 = new_range(0, 20, 16);
    assert_true(alloc(NULL, m, r1, 11));
    kv_alloc a = {.n_new_tokens = 1, .n_in_flight_tokens = 4};
    assert_true(kv_manager_allocate(NULL, m, r1, &a));
    kv_manager_get_table(&got, m, r1);
    assert_int_equal(got.ids[1][1], BLOCK_POOL_NULL); /* skipped(7) / 2 = 2 */
    assert_true(got.ids[1][2] > 0);
    give_back(m, r);
    give_back(m, r1);
    assert_int_equal(n_free(m), 63);
    request_destroy(r);
    request_destroy(r1);
    kv_manager_destroy(m);
}

static void test_kv_group_manager_admission_cap_of_window_group(void **state)
{
    (void)state;
    /* 40 tokens: 20 blocks of full attention; the window group never holds more than ceil((3 + 4) /
     * 2) + 1 = 5. */
    kv_manager *m = new_window_manager(1 + 25, 4);
    request *r = new_range(0, 40, 16);
    assert_int_equal(kv_manager_n_blocks_for(m, 40, 0), 25);
    kv_alloc a = {.n_new_tokens = 4,
                  .hit = kv_manager_lookup(m, r),
                  .is_admission = true,
                  .must_fit_whole = true};
    assert_true(kv_manager_allocate(NULL, m, r, &a));
    give_back(m, r);
    kv_manager_destroy(m);
    m = new_window_manager(25, 4);
    a.hit = kv_manager_lookup(m, r);
    assert_false(kv_manager_allocate(NULL, m, r, &a));
    request_destroy(r);
    kv_manager_destroy(m);
}

static void test_kv_group_manager_zero_list(void **state)
{
    (void)state;
    kv_manager *m = new_window_manager(64, 64);
    request *r = new_range(0, 6, 16);
    const block_id *ids;
    block_ids_msg table;
    assert_true(alloc(NULL, m, r, 6));
    kv_manager_get_table(&table, m, r);
    /* Only the group that asks for it, each once, drained by taking. */
    assert_int_equal(kv_manager_take_blocks_to_zero(&ids, m), 3);
    for (int i = 0; i < 3; i++)
        assert_int_equal(ids[i], table.ids[1][i]);
    assert_int_equal(kv_manager_take_blocks_to_zero(&ids, m), 0);
    give_back(m, r);
    assert_true(alloc(NULL, m, r, 6));
    give_back(m, r);
    assert_true(alloc(NULL, m, r, 6));
    /* Blocks that were zeroed before are listed again; what the takers have in turn, once. */
    give_back(m, r);
    assert_true(alloc(NULL, m, r, 6));
    int32_t n_ids = kv_manager_take_blocks_to_zero(&ids, m);
    assert_int_equal(n_ids, 6);
    for (int32_t i = 0; i < n_ids; i++) {
        for (int32_t k = 0; k < i; k++)
            assert_int_not_equal(ids[i], ids[k]);
    }
    give_back(m, r);
    request_destroy(r);
    kv_manager_destroy(m);
}

/* A load may write its blocks while the step zeroes, so they are not zeroed, nor are those that others
 * had while the step was put together. */
static void test_kv_group_manager_loaded_blocks_are_not_zeroed(void **state)
{
    (void)state;
    kv_manager *m = new_window_manager(16, 64);
    request *other = new_range(0, 6, 16);
    request *r = new_range(100, 6, 16);
    const block_id *ids;
    block_ids_msg table;
    assert_true(alloc(NULL, m, other, 6));
    give_back(m, other);
    assert_true(alloc(NULL, m, other, 2));
    block_id kept;
    kv_manager_get_table(&table, m, other);
    kept = table.ids[1][0];
    kv_alloc load = {.hit = kv_manager_lookup(m, r), .n_external_tokens = 4};
    assert_true(kv_manager_allocate(NULL, m, r, &load));
    kv_manager_get_table(&table, m, r);
    int32_t n_ids = kv_manager_take_blocks_to_zero(&ids, m);
    bool is_kept_listed = false;
    for (int32_t i = 0; i < n_ids; i++) {
        is_kept_listed = is_kept_listed || ids[i] == kept;
        for (int g = 0; g < 2; g++) {
            for (int32_t k = 0; k < table.n_blocks[g]; k++)
                assert_int_not_equal(ids[i], table.ids[g][k]);
        }
    }
    assert_true(is_kept_listed);
    /* What the request computes itself is zeroed. */
    r->num_computed_tokens = 4;
    assert_true(alloc(NULL, m, r, 2));
    kv_manager_get_table(&table, m, r);
    assert_int_equal(kv_manager_take_blocks_to_zero(&ids, m), 1);
    assert_int_equal(ids[0], table.ids[1][2]);
    give_back(m, other);
    give_back(m, r);
    request_destroy(other);
    request_destroy(r);
    kv_manager_destroy(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_group_manager_h14_sliding_window_removal),
        cmocka_unit_test(test_kv_group_manager_window_group_recycles),
        cmocka_unit_test(test_kv_group_manager_admission_cap_of_window_group),
        cmocka_unit_test(test_kv_group_manager_zero_list),
        cmocka_unit_test(test_kv_group_manager_loaded_blocks_are_not_zeroed),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
