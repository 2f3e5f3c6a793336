/* KV manager: traces H1-H7, H11 and the rules AL around them. */
#include "tests/unit/kv_fixture.h"

static void test_kv_manager_h1_first_request_and_its_hit(void **state)
{
    (void)state;
    kv_manager *m = new_manager(11, 16, true);
    block_ids_msg got;
    request *r0 = new_request(48, 7, 16);
    assert_int_equal(kv_manager_lookup(m, r0)->n_tokens, 0);
    assert_int_equal(r0->n_block_hashes, 3);
    assert_true(alloc(&got, m, r0, 55));
    EXPECT_IDS(got.ids[0], got.n_blocks[0], 1, 2, 3, 4);
    for (block_id id = 1; id <= 4; id++) {
        assert_int_equal(ref_of(m, id), 1);
        assert_int_equal(is_hashed(m, id), id < 4);
        if (id < 4)
            assert_memory_equal(block_pool_get_hash(kv_manager_get_pool(m), id),
                                &r0->block_hashes[id - 1], sizeof(block_hash));
    }

    request *r1 = new_request(48, 5, 16);
    const kv_hit *hit = kv_manager_lookup(m, r1);
    assert_int_equal(hit->n_tokens, 48);
    EXPECT_IDS(hit->blocks[0], hit->n_blocks[0], 1, 2, 3);
    assert_int_equal(ref_of(m, 1), 1); /* looking does not touch */
    assert_true(alloc(&got, m, r1, 5));
    EXPECT_IDS(got.ids[0], got.n_blocks[0], 5);
    EXPECT_TABLE(m, r1, 1, 2, 3, 5);
    for (block_id id = 1; id <= 3; id++)
        assert_int_equal(ref_of(m, id), 2);
    assert_int_equal(n_free(m), 5);

    give_back(m, r0);
    give_back(m, r1);
    EXPECT_FREE(m, 5, 4, 6, 7, 8, 9, 10, 3, 2, 1);

    request *r2 = new_request(48, 6, 16);
    assert_int_equal(kv_manager_lookup(m, r2)->n_tokens, 48);
    assert_true(alloc(&got, m, r2, 6));
    EXPECT_IDS(got.ids[0], got.n_blocks[0], 5);
    assert_int_equal(n_free(m), 6);
    give_back(m, r2);

    request *r3 = new_request(0, 160, 16);
    assert_int_equal(kv_manager_lookup(m, r3)->n_tokens, 0);
    assert_true(alloc(&got, m, r3, 160));
    EXPECT_IDS(got.ids[0], got.n_blocks[0], 5, 4, 6, 7, 8, 9, 10, 3, 2, 1);
    assert_int_equal(n_free(m), 0);
    give_back(m, r3);
    request_destroy(r0);
    request_destroy(r1);
    request_destroy(r2);
    request_destroy(r3);
    kv_manager_destroy(m);
}

static void test_kv_manager_h2_decode_growth(void **state)
{
    (void)state;
    kv_manager *m = new_manager(11, 16, true);
    block_ids_msg got;
    request *r = new_request(48, 7, 16);
    assert_true(alloc(NULL, m, r, 55));
    for (int i = 0; i < 4; i++)
        request_append_token(r, 5000 + i, hasher);
    assert_true(alloc(&got, m, r, 4));
    assert_int_equal(got.n_blocks[0], 0);
    assert_false(is_hashed(m, 4));
    for (int i = 0; i < 19; i++)
        request_append_token(r, 6000 + i, hasher);
    assert_true(alloc(&got, m, r, 19));
    EXPECT_IDS(got.ids[0], got.n_blocks[0], 5);
    assert_true(is_hashed(m, 4));
    assert_false(is_hashed(m, 5));
    give_back(m, r);
    request_destroy(r);
    kv_manager_destroy(m);
}

static void test_kv_manager_h3_eviction_order(void **state)
{
    (void)state;
    kv_manager *m = new_manager(11, 16, true);
    block_ids_msg got;
    request *r0 = new_range(0, 87, 16);
    request *r1 = new_range(500, 48, 16);
    assert_true(alloc(NULL, m, r0, 87));
    assert_true(alloc(NULL, m, r1, 48));
    EXPECT_TABLE(m, r0, 1, 2, 3, 4, 5, 6);
    EXPECT_TABLE(m, r1, 7, 8, 9);
    EXPECT_FREE(m, 10);
    give_back(m, r0);
    EXPECT_FREE(m, 6, 10, 5, 4, 3, 2, 1);
    give_back(m, r1);
    EXPECT_FREE(m, 6, 10, 5, 4, 3, 2, 1, 9, 8, 7);
    request *r2 = new_range(0, 35, 16);
    const kv_hit *hit = kv_manager_lookup(m, r2);
    EXPECT_IDS(hit->blocks[0], hit->n_blocks[0], 1, 2);
    assert_int_equal(hit->n_tokens, 32);
    assert_true(alloc(&got, m, r2, 3));
    EXPECT_IDS(got.ids[0], got.n_blocks[0], 6);
    assert_int_equal(n_free(m), 7);
    give_back(m, r2);
    request_destroy(r0);
    request_destroy(r1);
    request_destroy(r2);
    kv_manager_destroy(m);
}

static void test_kv_manager_h4_failed_allocation_leaves_no_trace(void **state)
{
    (void)state;
    kv_manager *m = new_manager(11, 16, true);
    token_id p48[144];
    for (int i = 0; i < 144; i++)
        p48[i] = i % 48;
    request *r0 = new_salted(p48, 48, 16, NULL);
    assert_true(alloc(NULL, m, r0, 48));
    EXPECT_TABLE(m, r0, 1, 2, 3);
    request *r1 = new_salted(p48, 96, 16, NULL);
    assert_int_equal(kv_manager_lookup(m, r1)->n_tokens, 48);
    assert_true(alloc(NULL, m, r1, 48));
    EXPECT_TABLE(m, r1, 1, 2, 3, 4, 5, 6);
    give_back(m, r1);
    request *r2 = new_range(900, 32, 16);
    assert_true(alloc(NULL, m, r2, 32));
    assert_int_equal(n_free(m), 5);

    request *r3 = new_salted(p48, 144, 16, NULL);
    const kv_hit *hit = kv_manager_lookup(m, r3);
    EXPECT_IDS(hit->blocks[0], hit->n_blocks[0], 1, 2, 3, 4, 5, 6);
    assert_int_equal(hit->n_tokens, 96);
    block_id before[11];
    block_id id = -1;
    for (int i = 0; i < 5; i++)
        before[i] = id = block_pool_next_free(kv_manager_get_pool(m), id);
    assert_false(alloc(NULL, m, r3, 48));
    assert_int_equal(r3->kv_row, -1);
    expect_free(m, before, 5);
    for (block_id b = 1; b <= 6; b++)
        assert_int_equal(ref_of(m, b), b <= 3);
    kv_manager_check(m);
    give_back(m, r0);
    give_back(m, r2);
    request_destroy(r0);
    request_destroy(r1);
    request_destroy(r2);
    request_destroy(r3);
    kv_manager_destroy(m);
}

static void test_kv_manager_h5_hit_protects_itself(void **state)
{
    (void)state;
    kv_manager *m = new_manager(3, 16, true);
    request *r0 = new_range(0, 16, 16);
    request *r1 = new_range(16, 16, 16);
    assert_true(alloc(NULL, m, r0, 16));
    assert_true(alloc(NULL, m, r1, 16));
    give_back(m, r0);
    give_back(m, r1);
    request *r2 = new_range(0, 32, 16);
    const kv_hit *hit = kv_manager_lookup(m, r2);
    EXPECT_IDS(hit->blocks[0], hit->n_blocks[0], 1);
    block_ids_msg got;
    assert_true(alloc(&got, m, r2, 16));
    EXPECT_IDS(got.ids[0], got.n_blocks[0], 2);
    EXPECT_TABLE(m, r2, 1, 2);
    give_back(m, r2);
    request_destroy(r0);
    request_destroy(r1);
    request_destroy(r2);
    kv_manager_destroy(m);
}

static void test_kv_manager_h6_recycled_block_loses_hash(void **state)
{
    (void)state;
    kv_manager *m = new_manager(2, 16, true);
    request *r0 = new_range(0, 16, 16);
    assert_true(alloc(NULL, m, r0, 16));
    assert_true(is_hashed(m, 1));
    give_back(m, r0);
    assert_true(is_hashed(m, 1));
    request *r1 = new_range(0, 15, 16);
    assert_true(alloc(NULL, m, r1, 15));
    EXPECT_TABLE(m, r1, 1);
    assert_false(is_hashed(m, 1));
    give_back(m, r1);
    request_destroy(r0);
    request_destroy(r1);
    kv_manager_destroy(m);
}

static void test_kv_manager_h7_caching_disabled(void **state)
{
    (void)state;
    kv_manager *m = new_manager(5, 4, false);
    block_ids_msg got;
    request *r0 = new_range(0, 10, 4);
    assert_true(alloc(&got, m, r0, 10));
    assert_int_equal(got.n_blocks[0], 3);
    give_back(m, r0);
    request *r1 = new_range(0, 16, 4);
    assert_int_equal(kv_manager_lookup(m, r1)->n_tokens, 0);
    assert_true(alloc(&got, m, r1, 16));
    assert_int_equal(got.n_blocks[0], 4);
    request *r2 = new_range(100, 4, 4);
    assert_false(alloc(NULL, m, r2, 4));
    give_back(m, r1);
    request_destroy(r0);
    request_destroy(r1);
    request_destroy(r2);
    kv_manager_destroy(m);
}

static void test_kv_manager_h11_salt_separates_caches(void **state)
{
    (void)state;
    kv_manager *m = new_manager(11, 16, true);
    token_id tokens[59];
    for (int i = 0; i < 59; i++)
        tokens[i] = i;
    request *r[3] = {new_salted(tokens, 59, 16, "s1"), new_salted(tokens, 59, 16, "s1"),
                     new_salted(tokens, 59, 16, "s2")};
    assert_true(alloc(NULL, m, r[0], 59));
    assert_int_equal(kv_manager_lookup(m, r[1])->n_blocks[0], 3);
    assert_int_equal(kv_manager_lookup(m, r[2])->n_blocks[0], 0);
    give_back(m, r[0]);
    for (int i = 0; i < 3; i++)
        request_destroy(r[i]);
    kv_manager_destroy(m);
}

static void test_kv_manager_gate_counts_promised_blocks(void **state)
{
    (void)state;
    kv_manager *m = new_manager(11, 16, true);
    request *r0 = new_request(0, 96, 16); /* 6 blocks */
    kv_alloc a = {.n_new_tokens = 20,
                  .hit = kv_manager_lookup(m, r0),
                  .is_admission = true,
                  .must_fit_whole = true};
    assert_true(kv_manager_allocate(NULL, m, r0, &a));
    r0->num_computed_tokens = 20;
    assert_int_equal(kv_manager_n_promised(m), 4);
    assert_int_equal(n_free(m), 8);
    /* 8 are free, but 4 of them are spoken for: 5 are too many, 4 fit. */
    request *r1 = new_request(0, 80, 16);
    request *r2 = new_request(0, 64, 16);
    a.hit = kv_manager_lookup(m, r1);
    assert_false(kv_manager_allocate(NULL, m, r1, &a));
    a.hit = kv_manager_lookup(m, r2);
    a.n_spare_blocks = 1; /* a watermark of one more block */
    assert_false(kv_manager_allocate(NULL, m, r2, &a));
    a.n_spare_blocks = 0;
    assert_true(kv_manager_allocate(NULL, m, r2, &a));
    r2->num_computed_tokens = 20;
    assert_int_equal(kv_manager_n_promised(m), 6);
    assert_true(alloc(NULL, m, r0, 76));
    assert_int_equal(kv_manager_n_promised(m), 2);
    give_back(m, r2);
    assert_int_equal(kv_manager_n_promised(m), 0);
    give_back(m, r0);
    request_destroy(r0);
    request_destroy(r1);
    request_destroy(r2);
    kv_manager_destroy(m);
}

/* Without the gate the first chunk is enough; what was promised is still told to loads (SC8). */
static void test_kv_manager_sc8_promises_bind_loads(void **state)
{
    (void)state;
    kv_manager *m = new_manager(11, 16, true);
    request *r0 = new_request(0, 96, 16); /* 6 blocks */
    request *r1 = new_request(0, 90, 16);
    request *r2 = new_request(0, 90, 16);
    kv_alloc a = {.n_new_tokens = 20, .hit = kv_manager_lookup(m, r0), .is_admission = true};
    assert_true(kv_manager_allocate(NULL, m, r0, &a));
    assert_int_equal(kv_manager_n_promised(m), 4);
    kv_alloc load = {.hit = kv_manager_lookup(m, r1), .n_external_tokens = 80};
    assert_false(kv_manager_allocate(NULL, m, r1, &load)); /* 5 of 8 - 4 */
    load.n_external_tokens = 64;
    load.is_admission = true;
    assert_true(kv_manager_allocate(NULL, m, r1, &load));
    assert_int_equal(kv_manager_n_promised(m), 4 + 2);
    a.hit = kv_manager_lookup(m, r2);
    a.n_new_tokens = 64;
    assert_true(kv_manager_allocate(NULL, m, r2, &a)); /* all that there is */
    assert_int_equal(n_free(m), 0);
    give_back(m, r0);
    give_back(m, r1);
    give_back(m, r2);
    assert_int_equal(kv_manager_n_promised(m), 0);
    request_destroy(r0);
    request_destroy(r1);
    request_destroy(r2);
    kv_manager_destroy(m);
}

/* AL2, AL7: blocks for what is to be loaded stand behind the hit, published only when told. */
static void test_kv_manager_al7_external_blocks(void **state)
{
    (void)state;
    kv_manager *m = new_manager(11, 16, true);
    request *r0 = new_request(40, 0, 16);
    request *r1 = new_request(100, 0, 16);
    block_ids_msg table;
    assert_true(alloc(NULL, m, r0, 40)); /* blocks 1 to 3, two of them full */
    kv_alloc load = {.hit = kv_manager_lookup(m, r1), .n_external_tokens = 48};
    assert_int_equal(load.hit->n_tokens, 32);
    assert_true(kv_manager_allocate(&table, m, r1, &load));
    assert_int_equal(table.n_blocks[0], 3); /* the new ones */
    kv_manager_get_table(&table, m, r1);
    assert_int_equal(table.n_blocks[0], 5);
    assert_int_equal(table.ids[0][0], 1);
    assert_int_equal(table.ids[0][2], 4);
    assert_false(is_hashed(m, 4));
    kv_manager_publish(m, r1, 64);
    assert_true(is_hashed(m, 4) && is_hashed(m, 5));
    assert_false(is_hashed(m, 6));
    r1->num_computed_tokens = 80;
    kv_alloc rest = {.n_new_tokens = 20};
    assert_true(kv_manager_allocate(&table, m, r1, &rest));
    assert_int_equal(table.n_blocks[0], 2);
    assert_true(is_hashed(m, 6) && is_hashed(m, 7));
    give_back(m, r0);
    give_back(m, r1);
    request_destroy(r0);
    request_destroy(r1);
    kv_manager_destroy(m);
}

static void test_kv_manager_drafts_are_not_published(void **state)
{
    (void)state;
    kv_manager *m = new_manager(11, 16, true);
    request *r = new_range(0, 30, 16);
    assert_true(alloc(NULL, m, r, 34)); /* 4 drafts beyond the known tokens fill block 2 */
    assert_true(is_hashed(m, 1));
    assert_false(is_hashed(m, 2));
    request_append_token(r, 77, hasher);
    request_append_token(r, 78, hasher);
    kv_manager_publish(m, r, 31);
    assert_false(is_hashed(m, 2));
    kv_manager_publish(m, r, 32);
    assert_true(is_hashed(m, 2));
    give_back(m, r);
    request_destroy(r);
    kv_manager_destroy(m);
}

static void test_kv_manager_free_unpublishes_what_is_not_computed(void **state)
{
    (void)state;
    kv_manager *m = new_manager(11, 16, true);
    request *r0 = new_range(0, 64, 16);
    request *r1 = new_range(0, 65, 16);
    assert_true(alloc(NULL, m, r0, 64));
    assert_int_equal(kv_manager_lookup(m, r1)->n_tokens, 64);
    kv_manager_free(m, r0, 40); /* blocks 3 and 4 were never written */
    assert_int_equal(kv_manager_lookup(m, r1)->n_tokens, 32);
    EXPECT_FREE(m, 4, 3, 5, 6, 7, 8, 9, 10, 2, 1);
    kv_manager_check(m);
    kv_manager_free(m, r0, 0); /* holds nothing any more: no effect */
    assert_int_equal(n_free(m), 10);
    request_destroy(r0);
    request_destroy(r1);
    kv_manager_destroy(m);
}

static void test_kv_manager_lookup_limits(void **state)
{
    (void)state;
    kv_manager *m = new_manager(11, 16, true);
    request *r0 = new_range(0, 64, 16);
    assert_true(alloc(NULL, m, r0, 64));
    /* At least one token is left to compute: an exact multiple loses its last block (HS7). */
    request *r1 = new_range(0, 64, 16);
    request *r2 = new_range(0, 63, 16);
    request *r3 = new_range(0, 65, 16);
    assert_int_equal(kv_manager_lookup(m, r1)->n_tokens, 48);
    assert_int_equal(kv_manager_lookup(m, r2)->n_tokens, 48);
    assert_int_equal(kv_manager_lookup(m, r3)->n_tokens, 64);
    r3->skip_prefix_lookup = true;
    assert_int_equal(kv_manager_lookup(m, r3)->n_tokens, 0);
    /* It writes the cache all the same: the newest copy is then found (HS8). */
    assert_true(alloc(NULL, m, r3, 65));
    assert_int_equal(kv_manager_lookup(m, r1)->blocks[0][0], 5);
    assert_false(kv_manager_reset_cache(m));
    give_back(m, r0);
    give_back(m, r3);
    assert_true(kv_manager_reset_cache(m));
    assert_int_equal(kv_manager_lookup(m, r1)->n_tokens, 0);
    request_destroy(r0);
    request_destroy(r1);
    request_destroy(r2);
    request_destroy(r3);
    kv_manager_destroy(m);
}

static void test_kv_manager_common_prefix(void **state)
{
    (void)state;
    kv_manager *m = new_manager(21, 16, true);
    int32_t n_common;
    request *r0 = new_request(48, 7, 16);
    request *r1 = new_request(48, 9, 16);
    request *r2 = new_request(0, 20, 16);
    assert_true(alloc(NULL, m, r0, 55));
    kv_manager_common_prefix(&n_common, m);
    assert_int_equal(n_common, 4);
    assert_true(alloc(NULL, m, r1, 9));
    kv_manager_common_prefix(&n_common, m);
    assert_int_equal(n_common, 3);
    assert_true(alloc(NULL, m, r2, 20)); /* one holder without the prefix makes it 0 */
    kv_manager_common_prefix(&n_common, m);
    assert_int_equal(n_common, 0);
    give_back(m, r0);
    give_back(m, r1);
    give_back(m, r2);
    request_destroy(r0);
    request_destroy(r1);
    request_destroy(r2);
    kv_manager_destroy(m);
}

static void test_kv_manager_would_fit(void **state)
{
    (void)state;
    kv_manager *m = new_manager(11, 16, true);
    request *r0 = new_request(48, 16, 16);
    request *r1 = new_request(48, 16, 16);
    request *r2 = new_request(0, 64, 16);
    assert_true(alloc(NULL, m, r0, 64)); /* 1-4 */
    assert_true(alloc(NULL, m, r1, 16)); /* 1-3, 5 */
    assert_true(alloc(NULL, m, r2, 64)); /* 6-9 */
    assert_int_equal(n_free(m), 1);
    request *big = new_request(0, 32, 16);
    request *bigger = new_request(0, 48, 16);
    request *victims[2] = {r0, r1};
    const kv_hit *hit = kv_manager_lookup(m, big);
    assert_false(kv_manager_would_fit(m, big, hit, NULL, 0, 0));
    /* Shared blocks do not come free with one holder. */
    assert_true(kv_manager_would_fit(m, big, hit, victims, 1, 0));
    assert_false(kv_manager_would_fit(m, big, hit, victims, 1, 1));
    assert_false(kv_manager_would_fit(m, bigger, kv_manager_lookup(m, bigger), victims, 1, 0));
    assert_true(kv_manager_would_fit(m, bigger, kv_manager_lookup(m, bigger), victims, 2, 3));
    /* Blocks that the newcomer hits itself are freed and taken again: 4, 5 and the free one are
     * left for its own. */
    request *sharer = new_request(48, 48, 16);
    hit = kv_manager_lookup(m, sharer);
    assert_int_equal(hit->n_tokens, 48);
    assert_true(kv_manager_would_fit(m, sharer, hit, victims, 2, 0));
    assert_false(kv_manager_would_fit(m, sharer, hit, victims, 2, 1));
    kv_manager_check(m);
    give_back(m, r0);
    give_back(m, r1);
    give_back(m, r2);
    request *all[] = {r0, r1, r2, big, bigger, sharer};
    for (size_t i = 0; i < PGD_ARRAY_LEN(all); i++)
        request_destroy(all[i]);
    kv_manager_destroy(m);
}

static void test_kv_manager_rows_run_out(void **state)
{
    (void)state;
    kv_manager *m = new_manager(100, 16, true);
    request *r[9];
    for (int i = 0; i < 9; i++) {
        r[i] = new_request(0, 16, 16);
        assert_int_equal(alloc(NULL, m, r[i], 16), i < 8);
    }
    give_back(m, r[3]);
    assert_true(alloc(NULL, m, r[8], 16));
    for (int i = 0; i < 9; i++) {
        if (r[i]->kv_row >= 0)
            give_back(m, r[i]);
        request_destroy(r[i]);
    }
    assert_int_equal(n_free(m), 99);
    kv_manager_destroy(m);
}

static void test_kv_manager_create_refuses(void **state)
{
    (void)state;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 16, 0),
                                    spec_of(ATTENTION_SLIDING, 24, 32)};
    kv_manager_opts good = {.n_blocks = 4,
                            .groups = specs,
                            .n_groups = 1,
                            .enable_caching = true,
                            .hash_block_size = 16,
                            .max_holders = 1,
                            .max_model_len = 64,
                            .max_unfinished_tokens = 64};
    kv_manager *m;
    kv_manager_opts bad = good;
    bad.n_groups = 2; /* 16 does not divide 24 */
    assert_int_equal(kv_manager_create(&m, &bad), PGD_EINVAL);
    assert_null(m);
    bad.hash_block_size = 8;
    assert_int_equal(kv_manager_create(&m, &bad), PGD_OK);
    kv_manager_destroy(m);
    bad.hash_block_size = 16;
    bad.enable_caching = false;
    assert_int_equal(kv_manager_create(&m, &bad), PGD_OK);
    kv_manager_destroy(m);
    const kv_group_spec no_window = spec_of(ATTENTION_SLIDING, 16, 0);
    const kv_group_spec no_kind = {.block_size = 16};
    bad = good;
    bad.groups = &no_window;
    assert_int_equal(kv_manager_create(&m, &bad), PGD_EINVAL);
    bad.groups = &no_kind;
    assert_int_equal(kv_manager_create(&m, &bad), PGD_EINVAL);
    bad = good;
    bad.hash_block_size = 8;
    assert_int_equal(kv_manager_create(&m, &bad), PGD_EINVAL);
    bad = good;
    bad.n_blocks = 1;
    assert_int_equal(kv_manager_create(&m, &bad), PGD_EINVAL);
    bad = good;
    bad.max_holders = 0;
    assert_int_equal(kv_manager_create(&m, &bad), PGD_EINVAL);
    bad = good;
    bad.max_model_len = INT32_MAX;
    assert_int_equal(kv_manager_create(&m, &bad), PGD_EINVAL);
    bad.max_model_len = KV_MANAGER_MAX_MODEL_LEN;
    bad.max_unfinished_tokens = KV_MANAGER_MAX_MODEL_LEN;
    assert_int_equal(kv_manager_create(&m, &bad), PGD_OK);
    assert_int_equal(kv_manager_n_blocks_for(m, INT32_MAX, 0), KV_MANAGER_MAX_MODEL_LEN / 16);
    kv_manager_destroy(m);
    assert_int_equal(kv_manager_create(&m, &good), PGD_OK);
    kv_manager_destroy(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_manager_h1_first_request_and_its_hit),
        cmocka_unit_test(test_kv_manager_h2_decode_growth),
        cmocka_unit_test(test_kv_manager_h3_eviction_order),
        cmocka_unit_test(test_kv_manager_h4_failed_allocation_leaves_no_trace),
        cmocka_unit_test(test_kv_manager_h5_hit_protects_itself),
        cmocka_unit_test(test_kv_manager_h6_recycled_block_loses_hash),
        cmocka_unit_test(test_kv_manager_h7_caching_disabled),
        cmocka_unit_test(test_kv_manager_h11_salt_separates_caches),
        cmocka_unit_test(test_kv_manager_gate_counts_promised_blocks),
        cmocka_unit_test(test_kv_manager_sc8_promises_bind_loads),
        cmocka_unit_test(test_kv_manager_al7_external_blocks),
        cmocka_unit_test(test_kv_manager_drafts_are_not_published),
        cmocka_unit_test(test_kv_manager_free_unpublishes_what_is_not_computed),
        cmocka_unit_test(test_kv_manager_lookup_limits),
        cmocka_unit_test(test_kv_manager_common_prefix),
        cmocka_unit_test(test_kv_manager_would_fit),
        cmocka_unit_test(test_kv_manager_rows_run_out),
        cmocka_unit_test(test_kv_manager_create_refuses),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
