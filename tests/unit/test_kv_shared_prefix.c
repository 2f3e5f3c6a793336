/* The common prefix of all holders against counting it (CPX1). kv_manager_check, which the fixture
 * calls after every change, compares what is kept with the reference counts. */
#include "tests/unit/kv_fixture.h"
#include "tests/unit/kv_oracle.h"

static int32_t common_of(const kv_manager *m)
{
    int32_t n_common[PGD_MAX_KV_GROUPS];
    kv_manager_common_prefix(n_common, m);
    return n_common[0];
}

static void test_kv_shared_prefix_comes_back_when_a_stranger_leaves(void **state)
{
    (void)state;
    kv_manager *m = new_manager(100, 16, true);
    request *r[4] = {new_request(160, 7, 16), new_request(160, 9, 16), new_request(160, 20, 16),
                     new_request(0, 40, 16)};
    assert_int_equal(common_of(m), 0);
    assert_true(alloc(NULL, m, r[0], 167));
    assert_int_equal(common_of(m), 11); /* alone: its own blocks too */
    assert_true(alloc(NULL, m, r[1], 9));
    assert_true(alloc(NULL, m, r[2], 20));
    assert_int_equal(common_of(m), 10);
    assert_true(alloc(NULL, m, r[3], 40));
    assert_int_equal(common_of(m), 0);
    give_back(m, r[3]);
    assert_int_equal(common_of(m), 10);
    /* The reference goes; with one holder left all of its blocks are common, and grow with it. */
    give_back(m, r[0]);
    assert_int_equal(common_of(m), 10);
    give_back(m, r[2]);
    assert_int_equal(common_of(m), 11);
    assert_true(alloc(NULL, m, r[1], 16));
    assert_int_equal(common_of(m), 12);
    give_back(m, r[1]);
    assert_int_equal(common_of(m), 0);
    for (int i = 0; i < 4; i++)
        request_destroy(r[i]);
    kv_manager_destroy(m);
}

/* Prompts that branch at several depths, duplicates of blocks (HS8), growth, any order of leaving. */
static void test_kv_shared_prefix_random_trees(void **state)
{
    (void)state;
    uint64_t seed = 2;
    int32_t n_partly = 0;
    for (int round = 0; round < 40; round++) {
        kv_manager *m = new_manager(600, 2, true);
        request *r[4] = {0};
        for (int turn = 0; turn < 150; turn++) {
            int32_t k = (int32_t)oracle_random(&seed, 4);
            if (r[k] == NULL) {
                token_id tokens[40];
                int32_t depth = 1 + (int32_t)oracle_random(&seed, 4);
                int32_t n_tokens = 8 + (int32_t)oracle_random(&seed, 32);
                for (int32_t i = 0; i < n_tokens; i++)
                    tokens[i] = i < 8 * depth ? i : 1000 + k % 3 + i;
                r[k] = new_salted(tokens, n_tokens, 2, NULL);
                r[k]->skip_prefix_lookup = oracle_random(&seed, 12) == 0;
                int32_t n_hit = kv_manager_lookup(m, r[k])->n_tokens;
                assert_true(alloc(NULL, m, r[k], n_tokens - n_hit));
            } else if (oracle_random(&seed, 3) == 0) {
                give_back(m, r[k]);
                request_destroy(r[k]);
                r[k] = NULL;
            } else if (r[k]->n_tokens < r[k]->max_total_tokens) {
                request_append_token(r[k], (token_id)oracle_random(&seed, 2), hasher);
                assert_true(alloc(NULL, m, r[k], 1));
            }
            int32_t n_holders = 0;
            for (int i = 0; i < 4; i++)
                n_holders += r[i] != NULL;
            n_partly += n_holders > 1 && common_of(m) > 0;
        }
        for (int k = 0; k < 4; k++) {
            if (r[k] != NULL)
                give_back(m, r[k]);
            request_destroy(r[k]);
        }
        kv_manager_destroy(m);
    }
    assert_true(n_partly > 300);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_shared_prefix_comes_back_when_a_stranger_leaves),
        cmocka_unit_test(test_kv_shared_prefix_random_trees),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
