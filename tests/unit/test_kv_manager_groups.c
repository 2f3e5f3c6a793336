/* KV manager with several groups: what an allocation counts, promises and gives back when groups
 * recycle blocks or hold the encoder's (rules AL3-AL10, SM3, SM7, SM9). */
#include "tests/unit/kv_fixture.h"
#include "tests/unit/kv_oracle.h"

static kv_manager *new_groups(int32_t n_blocks, const kv_group_spec *specs, int32_t n_groups,
                              bool enable_caching, int32_t max_unfinished_tokens)
{
    kv_manager_opts opts = {.n_blocks = n_blocks,
                            .groups = specs,
                            .n_groups = n_groups,
                            .enable_caching = enable_caching,
                            .hash_block_size = 2,
                            .max_holders = 8,
                            .max_model_len = 2048,
                            .max_unfinished_tokens = max_unfinished_tokens};
    kv_manager *m;
    assert_int_equal(kv_manager_create(&m, &opts), PGD_OK);
    return m;
}

static request *new_with_encoder(int32_t n_tokens, int32_t n_encoder_tokens)
{
    token_id tokens[MAX_TOKENS];
    for (int32_t i = 0; i < MAX_TOKENS; i++)
        tokens[i] = i;
    request_opts opts = {.id = next_id++,
                         .prompt = tokens,
                         .n_prompt_tokens = n_tokens,
                         .encoder_tokens = tokens,
                         .n_encoder_tokens = n_encoder_tokens,
                         .max_tokens = 100,
                         .max_model_len = 2048,
                         .block_size = 2,
                         .hasher = hasher};
    request *r;
    assert_int_equal(request_create(&r, &opts), PGD_OK);
    return r;
}

/* The count of a step must not be bounded by what a request holds in the end: one step may need
 * more at once than the window keeps, and the pool would be asked for blocks that nobody counted. */
static void test_kv_manager_groups_step_is_counted_in_full(void **state)
{
    (void)state;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 2, 0),
                                    spec_of(ATTENTION_SLIDING, 2, 4)};
    request *r = new_range(0, 40, 2);
    kv_manager *m = new_groups(1 + 39, specs, 2, true, 4); /* a window row is to hold 5 at most */
    assert_int_equal(kv_manager_n_blocks_for(m, 40, 0), 20 + 5);
    assert_false(alloc(NULL, m, r, 40));
    assert_int_equal(n_free(m), 39);
    kv_manager_destroy(m);
    m = new_groups(1 + 40, specs, 2, true, 4);
    assert_true(alloc(NULL, m, r, 40));
    assert_int_equal(n_free(m), 0);
    give_back(m, r);
    request_destroy(r);
    kv_manager_destroy(m);
}

static void test_kv_manager_groups_long_generation_holds_its_window(void **state)
{
    (void)state;
    const kv_group_spec specs[3] = {spec_of(ATTENTION_SLIDING, 2, 8),
                                    spec_of(ATTENTION_CHUNKED, 2, 8),
                                    spec_of(ATTENTION_SLIDING, 6, 20)};
    kv_manager *m = new_groups(1 + 20, specs, 3, true, 10);
    request *r = new_range(0, 10, 2);
    int32_t most = 0;
    assert_true(alloc(NULL, m, r, 10));
    for (int i = 0; i < 99; i++) {
        request_append_token(r, i, hasher);
        kv_alloc a = {.n_new_tokens = 1};
        assert_true(kv_manager_allocate(NULL, m, r, &a));
        r->num_computed_tokens++;
        kv_manager_check(m);
        most = PGD_MAX(most, 20 - n_free(m));
    }
    /* At most 8 / 2 + 1, 8 / 2 and ceil(20 / 6) + 1 blocks, at least what the windows cover. */
    assert_in_range(most, 4 + 4 + 4, 5 + 4 + 5);
    block_ids_msg table;
    kv_manager_get_table(&table, m, r);
    assert_int_equal(table.n_blocks[0], 55);
    for (int g = 0; g < 3; g++) {
        int32_t n_skipped = kv_group_ops_skipped_blocks(&specs[g], 108);
        for (int32_t i = 0; i < table.n_blocks[g]; i++)
            assert_int_equal(table.ids[g][i] == BLOCK_POOL_NULL, i < n_skipped);
    }
    give_back(m, r);
    assert_int_equal(n_free(m), 20);
    request_destroy(r);
    kv_manager_destroy(m);
}

static void test_kv_manager_groups_chunked_alone_needs_no_cache(void **state)
{
    (void)state;
    const kv_group_spec spec = spec_of(ATTENTION_CHUNKED, 2, 8);
    kv_manager *m = new_groups(21, &spec, 1, true, 64);
    request *r = new_range(0, 21, 2);
    /* No later token reads what lies before the last chunk, in no layer: 16 tokens count. */
    const kv_hit *hit = kv_manager_lookup(m, r);
    assert_int_equal(hit->n_tokens, 16);
    for (int i = 0; i < 8; i++)
        assert_int_equal(hit->blocks[0][i], BLOCK_POOL_NULL);
    assert_true(alloc(NULL, m, r, 5));
    assert_int_equal(n_free(m), 20 - 3);
    give_back(m, r);
    request_destroy(r);
    kv_manager_destroy(m);
}

static void test_kv_manager_groups_promise_follows_the_window(void **state)
{
    (void)state;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 2, 0),
                                    spec_of(ATTENTION_SLIDING, 2, 4)};
    kv_manager *m = new_groups(1 + 30, specs, 2, true, 4);
    request *r = new_range(0, 40, 2);
    kv_alloc a = {.n_new_tokens = 4,
                  .hit = kv_manager_lookup(m, r),
                  .is_admission = true,
                  .must_fit_whole = true};
    assert_true(kv_manager_allocate(NULL, m, r, &a));
    r->num_computed_tokens = 4;
    /* 20 and 5 blocks in all, of which 2 and 2 are taken. */
    assert_int_equal(kv_manager_n_promised(m), 18 + 3);
    assert_true(alloc(NULL, m, r, 4)); /* tokens 0-7, none skipped before token 4 */
    assert_int_equal(kv_manager_n_promised(m), 16 + 1);
    assert_true(alloc(NULL, m, r, 4)); /* skipped(8) = 5: two blocks back, two new */
    assert_int_equal(n_free(m), 30 - 6 - 4);
    assert_int_equal(kv_manager_n_promised(m), 14 + 1);
    /* A refusal gives skipped blocks back (AL4), so the row may take as many again. */
    block_id taken[30];
    int32_t n_taken = n_free(m);
    block_pool *pool = (block_pool *)(uintptr_t)kv_manager_get_pool(m);
    assert_true(block_pool_get_new(taken, pool, n_taken));
    a = (kv_alloc){.n_new_tokens = 12};
    assert_false(kv_manager_allocate(NULL, m, r, &a));
    assert_int_equal(n_free(m), 2);
    assert_int_equal(kv_manager_n_promised(m), 14 + 3);
    block_pool_free(pool, taken, n_taken);
    while (r->num_computed_tokens < 40)
        assert_true(alloc(NULL, m, r, 4));
    assert_int_equal(kv_manager_n_promised(m), 0);
    /* Decoding recycles too, and promises nothing. */
    for (int i = 0; i < 10; i++) {
        request_append_token(r, i, hasher);
        assert_true(alloc(NULL, m, r, 1));
        assert_int_equal(kv_manager_n_promised(m), 0);
    }
    give_back(m, r);
    request_destroy(r);
    kv_manager_destroy(m);
}

/* Shared blocks that leave the window do not come back to the pool, so they are not set against
 * what the row may still take. */
static void test_kv_manager_groups_promise_counts_own_blocks(void **state)
{
    (void)state;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 2, 0),
                                    spec_of(ATTENTION_SLIDING, 2, 8)};
    kv_manager *m = new_groups(1 + 80, specs, 2, true, 4);
    request *r0 = new_range(0, 20, 2);
    request *r1 = new_range(0, 60, 2);
    assert_true(alloc(NULL, m, r0, 20));
    kv_alloc a = {.n_new_tokens = 4,
                  .hit = kv_manager_lookup(m, r1),
                  .is_admission = true,
                  .must_fit_whole = true};
    assert_int_equal(a.hit->n_tokens, 20);
    assert_true(kv_manager_allocate(NULL, m, r1, &a));
    /* 30 blocks of full attention, 10 of them hits and 2 new; at most ceil(11 / 2) + 1 = 7 of the
     * window, 2 of them new. */
    assert_int_equal(kv_manager_n_promised(m), 18 + 5);
    kv_manager_free(m, r1, 24);
    give_back(m, r0);
    request_destroy(r0);
    request_destroy(r1);
    kv_manager_destroy(m);
}

/* What was loaded behind a hit is admitted to the smallest pool, once nobody else holds blocks: the
 * gate must not want room for the window beside the hit. */
static void test_kv_manager_groups_loaded_behind_a_hit_fits_alone(void **state)
{
    (void)state;
    const kv_group_spec spec = spec_of(ATTENTION_SLIDING, 2, 6);
    kv_manager *m = new_groups(1 + 7, &spec, 1, true, 6); /* ceil((5 + 6) / 2) + 1 */
    request *r0 = new_range(0, 2, 2);
    request *r1 = new_range(0, 15, 2);
    request *r2 = new_range(500, 2, 2);
    assert_true(alloc(NULL, m, r0, 2));
    give_back(m, r0);
    kv_alloc load = {.hit = kv_manager_lookup(m, r1), .n_external_tokens = 4, .is_admission = true};
    assert_int_equal(load.hit->n_tokens, 2);
    assert_true(kv_manager_allocate(NULL, m, r1, &load));
    r1->num_computed_tokens = 6;
    kv_alloc a = {.n_new_tokens = 6, .is_admission = true, .must_fit_whole = true};
    assert_true(alloc(NULL, m, r2, 2));
    assert_false(kv_manager_allocate(NULL, m, r1, &a));
    give_back(m, r2);
    assert_true(kv_manager_allocate(NULL, m, r1, &a));
    r1->num_computed_tokens = 12;
    assert_true(alloc(NULL, m, r1, 3));
    give_back(m, r1);
    request_destroy(r0);
    request_destroy(r1);
    request_destroy(r2);
    kv_manager_destroy(m);
}

static kv_group_spec draw_spec(uint64_t *seed)
{
    attention_kind kind = (attention_kind)oracle_random(seed, 3);
    int32_t bs = 2 + 2 * (int32_t)oracle_random(seed, 3);
    return spec_of(kind, bs, kind == ATTENTION_FULL ? 0 : 1 + (int32_t)oracle_random(seed, 30));
}

/* Prefills that passed the gate finish, in whatever order and with whatever in flight, as long as
 * nothing else takes blocks: the gate never promises what is not there. */
static void test_kv_manager_groups_admitted_prefills_finish(void **state)
{
    (void)state;
    uint64_t seed = 5;
    int32_t n_together = 0;
    for (int i = 0; i < 400; i++) {
        kv_group_spec specs[3] = {draw_spec(&seed), draw_spec(&seed), draw_spec(&seed)};
        int32_t n_groups = 1 + (int32_t)oracle_random(&seed, 3);
        if (n_groups == 1)
            specs[0].block_size = 2;
        int32_t n_chunk = 1 + (int32_t)oracle_random(&seed, 20);
        int32_t depth = 1 + (int32_t)oracle_random(&seed, 2);
        kv_manager *m = new_groups(20 + (int32_t)oracle_random(&seed, 150), specs, n_groups, true,
                                   n_chunk * depth);
        request *r[6];
        int32_t n_last[6] = {0}; /* tokens of the step in flight */
        for (int k = 0; k < 6; k++)
            r[k] = new_request(0, 1 + (int32_t)oracle_random(&seed, 120), 2);
        int32_t n_running = 0;
        for (int turn = 0; turn < 300; turn++) {
            int32_t k = (int32_t)oracle_random(&seed, 6);
            int32_t n_left = r[k]->n_tokens - r[k]->num_computed_tokens;
            bool is_holder = r[k]->kv_row >= 0;
            if (n_left == 0)
                continue;
            kv_alloc a = {.hit = is_holder ? NULL : kv_manager_lookup(m, r[k]),
                          .n_in_flight_tokens = depth > 1 ? n_last[k] : 0,
                          .is_admission = !is_holder,
                          .must_fit_whole = !is_holder};
            if (a.hit != NULL)
                n_left -= a.hit->n_tokens;
            int32_t n_wanted = 1 + (int32_t)oracle_random(&seed, (uint32_t)n_chunk);
            a.n_new_tokens = PGD_MIN(n_left, n_wanted);
            bool is_done = kv_manager_allocate(NULL, m, r[k], &a);
            assert_true(is_done || !is_holder);
            kv_manager_check(m);
            if (!is_done)
                continue;
            r[k]->num_computed_tokens += a.n_new_tokens + (a.hit != NULL ? a.hit->n_tokens : 0);
            n_last[k] = a.n_new_tokens;
            n_running += !is_holder;
        }
        n_together += n_running > 1;
        for (int k = 0; k < 6; k++) {
            kv_manager_free(m, r[k], r[k]->num_computed_tokens);
            request_destroy(r[k]);
        }
        assert_int_equal(kv_manager_n_promised(m), 0);
        kv_manager_check(m);
        kv_manager_destroy(m);
    }
    assert_true(n_together > 200);
}

/* The answer equals what the gate says once the victims are gone. */
static void test_kv_manager_groups_would_fit_is_what_happens(void **state)
{
    (void)state;
    uint64_t seed = 8;
    int32_t n_yes = 0;
    int32_t n_no = 0;
    for (int i = 0; i < 600; i++) {
        kv_group_spec specs[3] = {spec_of(ATTENTION_FULL, 2, 0), draw_spec(&seed),
                                  draw_spec(&seed)};
        kv_manager *m = new_groups(60 + (int32_t)oracle_random(&seed, 100), specs, 3, true, 40);
        request *r[4];
        request *victims[4];
        int32_t n_victims = 0;
        for (int k = 0; k < 4; k++) {
            r[k] = new_request(2 * (int32_t)oracle_random(&seed, 20),
                               1 + (int32_t)oracle_random(&seed, 40), 2);
            const kv_hit *hit = kv_manager_lookup(m, r[k]);
            int32_t n_left = r[k]->n_tokens - hit->n_tokens;
            int32_t n_wanted = 1 + (int32_t)oracle_random(&seed, 40);
            kv_alloc a = {.n_new_tokens = PGD_MIN(n_left, n_wanted),
                          .hit = hit,
                          .is_admission = true,
                          .must_fit_whole = true};
            if (!kv_manager_allocate(NULL, m, r[k], &a))
                continue;
            r[k]->num_computed_tokens = hit->n_tokens + a.n_new_tokens;
            if (oracle_random(&seed, 2) != 0)
                victims[n_victims++] = r[k];
        }
        request *head = new_request(2 * (int32_t)oracle_random(&seed, 20),
                                    1 + (int32_t)oracle_random(&seed, 60), 2);
        const kv_hit *hit = kv_manager_lookup(m, head);
        bool fits = kv_manager_would_fit(m, head, hit, victims, n_victims, 0);
        kv_manager_check(m);
        for (int32_t k = 0; k < n_victims; k++) {
            kv_manager_free(m, victims[k], victims[k]->num_computed_tokens);
            victims[k]->num_computed_tokens = 0;
        }
        int32_t n_hit = hit->n_tokens;
        hit = kv_manager_lookup(m, head);
        assert_int_equal(hit->n_tokens, n_hit);
        kv_alloc a = {.n_new_tokens = 1, .hit = hit, .is_admission = true, .must_fit_whole = true};
        assert_int_equal(kv_manager_allocate(NULL, m, head, &a), fits);
        n_yes += fits;
        n_no += !fits;
        for (int k = 0; k < 4; k++) {
            kv_manager_free(m, r[k], r[k]->num_computed_tokens);
            request_destroy(r[k]);
        }
        kv_manager_free(m, head, 0);
        request_destroy(head);
        kv_manager_destroy(m);
    }
    assert_true(n_yes > 50 && n_no > 50);
}

static void test_kv_manager_groups_cross_blocks_come_once(void **state)
{
    (void)state;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 2, 0), spec_of(ATTENTION_CROSS, 4, 32)};
    kv_manager *m = new_groups(1 + 20, specs, 2, true, 64);
    assert_int_equal(kv_manager_max_encoder_tokens(m), 32);
    const kv_group_spec two[2] = {spec_of(ATTENTION_CROSS, 4, 24), spec_of(ATTENTION_CROSS, 4, 32)};
    kv_manager *m2 = new_groups(1 + 20, two, 2, true, 64);
    assert_int_equal(kv_manager_max_encoder_tokens(m2), 24);
    kv_manager_destroy(m2);
    assert_int_equal(kv_manager_n_blocks_for(m, 6, 30), 3 + 8);
    assert_int_equal(kv_manager_n_blocks_for(m, 6, 0), 3);
    request *r = new_with_encoder(3, 30);
    block_ids_msg got;
    assert_int_equal(r->n_block_hashes, 0);
    assert_int_equal(kv_manager_lookup(m, r)->n_tokens, 0);
    assert_true(alloc(&got, m, r, 2));
    assert_int_equal(got.n_blocks[0], 1);
    assert_int_equal(got.n_blocks[1], 8);
    for (int i = 0; i < 12; i++) {
        assert_true(alloc(&got, m, r, 1));
        assert_int_equal(got.n_blocks[1], 0);
        if (r->num_computed_tokens >= r->n_tokens)
            request_append_token(r, i, hasher);
    }
    /* Neither kind of block is cached: the request's own tokens depend on the encoder's. */
    assert_int_equal(block_pool_n_published(kv_manager_get_pool(m)), 0);
    kv_manager_get_table(&got, m, r);
    assert_int_equal(got.n_blocks[0], 7);
    assert_int_equal(got.n_blocks[1], 8);
    assert_int_equal(n_free(m), 20 - 15);
    /* The gate counts them: 2 + 4 blocks are too many for the 5 that are free. */
    request *r1 = new_with_encoder(3, 16);
    kv_alloc a = {.n_new_tokens = 1,
                  .hit = kv_manager_lookup(m, r1),
                  .is_admission = true,
                  .must_fit_whole = true};
    assert_false(kv_manager_allocate(NULL, m, r1, &a));
    request *r2 = new_with_encoder(3, 12);
    a.hit = kv_manager_lookup(m, r2);
    assert_true(kv_manager_allocate(NULL, m, r2, &a));
    assert_int_equal(kv_manager_n_promised(m), 1);
    give_back(m, r);
    give_back(m, r2);
    assert_int_equal(n_free(m), 20);
    request_destroy(r);
    request_destroy(r1);
    request_destroy(r2);
    kv_manager_destroy(m);
}

static void test_kv_manager_groups_without_cache_finds_nothing(void **state)
{
    (void)state;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 2, 0),
                                    spec_of(ATTENTION_CHUNKED, 2, 8)};
    kv_manager *m = new_groups(60, specs, 2, false, 64);
    request *r = new_range(0, 20, 2);
    int32_t n_common[PGD_MAX_KV_GROUPS];
    assert_true(alloc(NULL, m, r, 20));
    assert_int_equal(kv_manager_lookup(m, r)->n_tokens, 0);
    kv_manager_common_prefix(n_common, m);
    assert_int_equal(n_common[0], 0);
    assert_int_equal(n_common[1], 0);
    give_back(m, r);
    request_destroy(r);
    kv_manager_destroy(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_manager_groups_step_is_counted_in_full),
        cmocka_unit_test(test_kv_manager_groups_long_generation_holds_its_window),
        cmocka_unit_test(test_kv_manager_groups_chunked_alone_needs_no_cache),
        cmocka_unit_test(test_kv_manager_groups_promise_follows_the_window),
        cmocka_unit_test(test_kv_manager_groups_promise_counts_own_blocks),
        cmocka_unit_test(test_kv_manager_groups_loaded_behind_a_hit_fits_alone),
        cmocka_unit_test(test_kv_manager_groups_admitted_prefills_finish),
        cmocka_unit_test(test_kv_manager_groups_would_fit_is_what_happens),
        cmocka_unit_test(test_kv_manager_groups_cross_blocks_come_once),
        cmocka_unit_test(test_kv_manager_groups_without_cache_finds_nothing),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
