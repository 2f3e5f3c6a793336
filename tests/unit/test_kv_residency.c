/* Times of sampled blocks: what counts as use and eviction, the share that is sampled, and the pool
 * that tells it. */
#include "tests/unit/kv_fixture.h"

static uint64_t now_us;

static uint64_t fake_now_us(void)
{
    return now_us;
}

static kv_residency *new_residency(double sample, int32_t n_blocks)
{
    kv_residency *k;
    now_us = 1000000;
    assert_int_equal(kv_residency_create(&k, sample, fake_now_us), PGD_OK);
    if (n_blocks > 0)
        assert_int_equal(kv_residency_set_pool(k, n_blocks), PGD_OK);
    return k;
}

static void expect_stats(const kv_residency *k, uint64_t n_evicted, double lifetime_s,
                         double idle_s, uint64_t n_gaps, double gap_s)
{
    kv_residency_stats s;
    kv_residency_read(k, &s);
    assert_int_equal(histogram_count(&s.lifetime_s), n_evicted);
    assert_int_equal(histogram_count(&s.idle_s), n_evicted);
    assert_int_equal(histogram_count(&s.reuse_gap_s), n_gaps);
    assert_float_equal(s.lifetime_s.sum, lifetime_s, 1e-9);
    assert_float_equal(s.idle_s.sum, idle_s, 1e-9);
    assert_float_equal(s.reuse_gap_s.sum, gap_s, 1e-9);
}

static void test_kv_residency_life_of_a_block(void **state)
{
    (void)state;
    kv_residency *k = new_residency(1.0, 100);
    const block_id ids[3] = {0, 70, 71};
    expect_stats(k, 0, 0, 0, 0, 0);
    kv_residency_note_given(k, ids + 1, 2);
    now_us += 3000000;
    kv_residency_note_used(k, ids, 2); /* the null block is nobody's */
    expect_stats(k, 0, 0, 0, 1, 3.0);
    now_us += 500000;
    kv_residency_note_used(k, ids, 2);
    expect_stats(k, 0, 0, 0, 2, 3.5);
    now_us += 20000000;
    kv_residency_note_evicted(k, 70);
    kv_residency_note_given(k, ids + 1, 1);
    expect_stats(k, 1, 23.5, 20.0, 2, 3.5);
    /* The next life begins with it. */
    now_us += 1000000;
    kv_residency_note_evicted(k, 70);
    kv_residency_note_evicted(k, 71);
    kv_residency_note_given(k, ids + 1, 2);
    expect_stats(k, 3, 23.5 + 1.0 + 24.5, 20.0 + 1.0 + 24.5, 2, 3.5);
    kv_residency_destroy(k);
}

static void test_kv_residency_samples_the_share(void **state)
{
    (void)state;
    const double shares[] = {0.01, 0.25, 1.0};
    for (size_t s = 0; s < PGD_ARRAY_LEN(shares); s++) {
        kv_residency *k = new_residency(shares[s], 1000);
        kv_residency_stats stats;
        int32_t n_blocks_seen = 0;
        uint64_t n_before = 0;
        for (int round = 0; round < 100; round++) {
            for (block_id id = 1; id < 1000; id++)
                kv_residency_note_given(k, &id, 1);
            for (block_id id = 1; id < 1000; id++)
                kv_residency_note_evicted(k, id);
            block_id id = 500; /* the same block is not always in, nor always out */
            kv_residency_note_given(k, &id, 1);
            kv_residency_note_evicted(k, id);
            kv_residency_note_given(k, &id, 1);
            kv_residency_read(k, &stats);
            n_blocks_seen += histogram_count(&stats.lifetime_s) > n_before;
            n_before = histogram_count(&stats.lifetime_s);
        }
        double share = (double)n_before / (100 * 1000.0);
        assert_true(share > 0.85 * shares[s] && share < 1.15 * shares[s]);
        assert_true(n_blocks_seen > 90);
        kv_residency_destroy(k);
    }
    kv_residency *k;
    assert_int_equal(kv_residency_create(&k, 0, fake_now_us), PGD_EINVAL);
    assert_int_equal(kv_residency_create(&k, 1.5, fake_now_us), PGD_EINVAL);
    assert_null(k);
}

static void test_kv_residency_pool_tells(void **state)
{
    (void)state;
    const kv_group_spec spec = spec_of(ATTENTION_FULL, 16, 0);
    kv_residency *k = new_residency(1.0, 0);
    kv_manager_opts opts = {.n_blocks = 5,
                            .groups = &spec,
                            .n_groups = 1,
                            .enable_caching = true,
                            .residency = k,
                            .hash_block_size = 16,
                            .max_holders = 8,
                            .max_model_len = 1024};
    kv_manager *m;
    assert_int_equal(kv_manager_create(&m, &opts), PGD_OK);
    request *r0 = new_request(32, 8, 16);
    request *r1 = new_request(32, 1, 16);
    assert_true(alloc(NULL, m, r0, 40)); /* 1, 2 cached, 3 not full */
    now_us += 2000000;
    assert_true(alloc(NULL, m, r1, 1)); /* hits 1, 2, takes 4 */
    expect_stats(k, 0, 0, 0, 2, 4.0);
    give_back(m, r0);
    give_back(m, r1);
    now_us += 5000000;
    /* 4 and 3 were never cached: handing them out again evicts nothing; 2 and 1 lived 7 s. */
    request *r2 = new_request(0, 60, 16);
    assert_true(alloc(NULL, m, r2, 60));
    expect_stats(k, 2, 14.0, 10.0, 2, 4.0);
    give_back(m, r2);
    now_us += 1000000;
    assert_true(kv_manager_reset_cache(m));
    request *r3 = new_request(0, 60, 16);
    assert_true(alloc(NULL, m, r3, 60));
    expect_stats(k, 2, 14.0, 10.0, 2, 4.0);
    give_back(m, r3);
    request *all[] = {r0, r1, r2, r3};
    for (size_t i = 0; i < PGD_ARRAY_LEN(all); i++)
        request_destroy(all[i]);
    kv_manager_destroy(m);
    kv_residency_destroy(k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_residency_life_of_a_block),
        cmocka_unit_test(test_kv_residency_samples_the_share),
        cmocka_unit_test(test_kv_residency_pool_tells),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
