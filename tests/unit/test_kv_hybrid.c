/* Several groups with prefix caching: trace H15, rules CO3-CO7, and the agreed hit against an oracle
 * that tries every prefix length. */
#include "tests/unit/kv_fixture.h"
#include "tests/unit/kv_oracle.h"

static kv_manager *new_groups(int32_t n_blocks, const kv_group_spec *specs, int32_t n_groups,
                              int32_t hash_bs, bool use_eagle)
{
    kv_manager_opts opts = {.n_blocks = n_blocks,
                            .groups = specs,
                            .n_groups = n_groups,
                            .enable_caching = true,
                            .use_eagle = use_eagle,
                            .hash_block_size = hash_bs,
                            .max_holders = 8,
                            .max_model_len = 1024,
                            .max_unfinished_tokens = 1024};
    kv_manager *m;
    assert_int_equal(kv_manager_create(&m, &opts), PGD_OK);
    return m;
}

static void test_kv_hybrid_h15_basic(void **state)
{
    (void)state;
    const kv_group_spec specs[3] = {spec_of(ATTENTION_FULL, 16, 0),
                                    spec_of(ATTENTION_SLIDING, 16, 32),
                                    spec_of(ATTENTION_SLIDING, 16, 32)};
    const struct {
        int32_t removed[3]; /* group * 10 + hash index, -1 = none */
        int32_t n_blocks;
    } rows[] = {{{10, 20, -1}, 3}, {{0, -1, -1}, 0},  {{2, 12, 22}, 2}, {{2, -1, -1}, 2},
                {{12, -1, -1}, 2}, {{22, -1, -1}, 2}, {{2, 10, 20}, 0}};
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        kv_manager *m = new_groups(21, specs, 3, 16, false);
        block_pool *pool = (block_pool *)(uintptr_t)kv_manager_get_pool(m);
        block_ids_msg got;
        request *r0 = new_request(48, 7, 16);
        request *r1 = new_request(48, 5, 16);
        assert_true(alloc(&got, m, r0, 55));
        EXPECT_IDS(got.ids[0], got.n_blocks[0], 1, 2, 3, 4);
        EXPECT_IDS(got.ids[1], got.n_blocks[1], 5, 6, 7, 8);
        EXPECT_IDS(got.ids[2], got.n_blocks[2], 9, 10, 11, 12);
        const kv_hit *hit = kv_manager_lookup(m, r1);
        assert_int_equal(hit->n_tokens, 48);
        EXPECT_IDS(hit->blocks[0], hit->n_blocks[0], 1, 2, 3);
        EXPECT_IDS(hit->blocks[1], hit->n_blocks[1], 0, 6, 7);
        EXPECT_IDS(hit->blocks[2], hit->n_blocks[2], 0, 10, 11);
        assert_true(alloc(&got, m, r1, 5));
        EXPECT_IDS(got.ids[0], got.n_blocks[0], 13);
        EXPECT_IDS(got.ids[1], got.n_blocks[1], 14);
        EXPECT_IDS(got.ids[2], got.n_blocks[2], 15);
        give_back(m, r0);
        give_back(m, r1);
        for (int k = 0; k < 3 && rows[i].removed[k] >= 0; k++) {
            block_id id = block_pool_lookup(pool, &r1->block_hashes[rows[i].removed[k] % 10],
                                            rows[i].removed[k] / 10);
            assert_true(id > 0);
            block_pool_unpublish(pool, &id, 1);
        }
        hit = kv_manager_lookup(m, r1);
        assert_int_equal(hit->n_tokens, 16 * rows[i].n_blocks);
        for (int g = 0; g < 3; g++)
            assert_int_equal(hit->n_blocks[g], rows[i].n_blocks);
        request_destroy(r0);
        request_destroy(r1);
        kv_manager_destroy(m);
    }
}

/* CO5: the drop happens once per candidate length. Dropping once per round would spiral down. */
static void test_kv_hybrid_three_groups_with_speculation_keep_their_hits(void **state)
{
    (void)state;
    const kv_group_spec specs[4] = {
        spec_of(ATTENTION_FULL, 16, 0), spec_of(ATTENTION_SLIDING, 16, 32),
        spec_of(ATTENTION_SLIDING, 16, 64), spec_of(ATTENTION_CHUNKED, 16, 64)};
    for (int32_t n_groups = 1; n_groups <= 4; n_groups++) {
        for (int eagle_group = -1; eagle_group < n_groups; eagle_group++) {
            kv_group_spec marked[4];
            memcpy(marked, specs, sizeof marked);
            if (eagle_group >= 0)
                marked[eagle_group].is_eagle = true;
            kv_manager *m = new_groups(100, marked, n_groups, 16, true);
            request *r0 = new_request(200, 5, 16);
            request *r1 = new_request(200, 9, 16);
            assert_true(alloc(NULL, m, r0, 205));
            /* 12 full blocks are shared; the last of them is computed again. */
            const kv_hit *hit = kv_manager_lookup(m, r1);
            assert_int_equal(hit->n_tokens, 11 * 16);
            for (int g = 0; g < n_groups; g++)
                assert_int_equal(hit->n_blocks[g], 11);
            assert_true(alloc(NULL, m, r1, 33));
            give_back(m, r0);
            give_back(m, r1);
            request_destroy(r0);
            request_destroy(r1);
            kv_manager_destroy(m);
        }
    }
}

static void test_kv_hybrid_drop_is_bounded_by_the_request(void **state)
{
    (void)state;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 16, 0),
                                    spec_of(ATTENTION_SLIDING, 16, 32)};
    kv_manager *m = new_groups(100, specs, 2, 16, true);
    request *r0 = new_range(0, 64, 16);
    assert_true(alloc(NULL, m, r0, 64));
    /* The block behind the answer must lie within the tokens that a hit may cover (HS7). */
    const int32_t n_tokens[] = {16, 17, 32, 33, 64, 65};
    const int32_t n_hits[] = {0, 0, 0, 1, 2, 3};
    for (int i = 0; i < 6; i++) {
        request *r = new_range(0, n_tokens[i], 16);
        assert_int_equal(kv_manager_lookup(m, r)->n_tokens, 16 * n_hits[i]);
        request_destroy(r);
    }
    give_back(m, r0);
    request_destroy(r0);
    kv_manager_destroy(m);
}

/* CO6, HS6: hash blocks of 16; full attention in blocks of 64, a window of 20 in blocks of 16. */
static void check_published(bool use_eagle, const int32_t *want_full, int32_t n_want_full,
                            const int32_t *want_window, int32_t n_want_window)
{
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 64, 0),
                                    spec_of(ATTENTION_SLIDING, 16, 20)};
    kv_manager *m = new_groups(100, specs, 2, 16, use_eagle);
    request *r = new_range(0, 213, 16); /* 3 full blocks of 64, 13 of 16 */
    block_ids_msg table;
    assert_true(alloc(NULL, m, r, 100));
    assert_true(alloc(NULL, m, r, 50));
    assert_true(alloc(NULL, m, r, 63));
    kv_manager_get_table(&table, m, r);
    assert_int_equal(table.n_blocks[0], 4);
    assert_int_equal(table.n_blocks[1], 14);
    for (int g = 0, k = 0; g < 2; g++, k = 0) {
        const int32_t *want = g == 0 ? want_full : want_window;
        int32_t n_want = g == 0 ? n_want_full : n_want_window;
        int32_t n_hashes_per_block = g == 0 ? 4 : 1;
        for (int32_t i = 0; (i + 1) * n_hashes_per_block <= r->n_block_hashes; i++) {
            const block_hash *name = &r->block_hashes[(i + 1) * n_hashes_per_block - 1];
            bool is_wanted = k < n_want && want[k] == i;
            k += is_wanted;
            assert_int_equal(block_pool_lookup(kv_manager_get_pool(m), name, g) >= 0, is_wanted);
        }
        assert_int_equal(k, n_want);
    }
    give_back(m, r);
    request_destroy(r);
    kv_manager_destroy(m);
}

static void test_kv_hybrid_publishes_what_a_hit_can_need(void **state)
{
    (void)state;
    /* Segments of 64 tokens, 3 of them full: of each the last ceil(19 / 16) = 2 blocks. */
    const int32_t full[] = {0, 1, 2};
    const int32_t window[] = {2, 3, 6, 7, 10, 11};
    check_published(false, full, 3, window, 6);
    /* Draft heads: the block behind each boundary too; that of full attention is not full yet. */
    const int32_t window_eagle[] = {2, 3, 4, 6, 7, 8, 10, 11, 12};
    check_published(true, full, 3, window_eagle, 9);
}

/* CO6: of full attention in blocks of 16 beside a window in blocks of 48, whole segments alone. */
static void test_kv_hybrid_publishes_whole_segments(void **state)
{
    (void)state;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 16, 0),
                                    spec_of(ATTENTION_SLIDING, 48, 20)};
    kv_manager *m = new_groups(100, specs, 2, 16, false);
    request *r = new_range(0, 150, 16);
    const int32_t n_tokens[] = {47, 60, 95, 130, 143, 150};
    int32_t n_before = 0;
    for (int i = 0; i < 6; i++) {
        assert_true(alloc(NULL, m, r, n_tokens[i] - n_before));
        assert_int_equal(block_pool_n_published(kv_manager_get_pool(m)),
                         n_tokens[i] / 48 * (3 + 1));
        n_before = n_tokens[i];
    }
    give_back(m, r);
    request_destroy(r);
    kv_manager_destroy(m);
}

static void test_kv_hybrid_unequal_blocks_hit_in_segments(void **state)
{
    (void)state;
    const kv_group_spec specs[3] = {spec_of(ATTENTION_FULL, 32, 0),
                                    spec_of(ATTENTION_SLIDING, 48, 40),
                                    spec_of(ATTENTION_CROSS, 80, 160)};
    kv_manager *m = new_groups(100, specs, 3, 16, false);
    request *r0 = new_range(0, 200, 16);
    assert_true(alloc(NULL, m, r0, 200));
    /* S = lcm(32, 48) = 96; the cross group has no say. */
    const int32_t n_tokens[] = {95, 96, 97, 192, 193};
    const int32_t n_hit[] = {0, 0, 96, 96, 192};
    for (int i = 0; i < 5; i++) {
        request *r = new_range(0, n_tokens[i], 16);
        const kv_hit *hit = kv_manager_lookup(m, r);
        assert_int_equal(hit->n_tokens, n_hit[i]);
        assert_int_equal(hit->n_blocks[0], n_hit[i] / 32);
        assert_int_equal(hit->n_blocks[1], n_hit[i] / 48);
        assert_int_equal(hit->n_blocks[2], 0);
        request_destroy(r);
    }
    /* What was not computed goes, in each group by its own blocks: 100 valid tokens leave blocks
     * 0-2 of 32 and, of 48, block 1, the one that a hit of 96 needs. */
    request *r1 = new_range(0, 193, 16);
    kv_manager_free(m, r0, 100);
    kv_manager_check(m);
    assert_int_equal(kv_manager_lookup(m, r1)->n_tokens, 96);
    assert_int_equal(block_pool_n_published(kv_manager_get_pool(m)), 3 + 1);
    /* Distrust goes by content, over all hashes of the request. */
    kv_manager_forget(m, r1);
    assert_int_equal(block_pool_n_published(kv_manager_get_pool(m)), 0);
    assert_int_equal(kv_manager_lookup(m, r1)->n_tokens, 0);
    request_destroy(r0);
    request_destroy(r1);
    kv_manager_destroy(m);
}

static void test_kv_hybrid_longest_and_single_group_hits(void **state)
{
    (void)state;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_SLIDING, 16, 32),
                                    spec_of(ATTENTION_FULL, 16, 0)};
    kv_manager *m = new_groups(40, specs, 2, 16, false);
    block_pool *pool = (block_pool *)(uintptr_t)kv_manager_get_pool(m);
    request *r0 = new_range(0, 96, 16);
    request *r1 = new_range(0, 97, 16);
    assert_true(alloc(NULL, m, r0, 96));
    give_back(m, r0);
    /* The window lacks block 4: it allows 64 tokens, full attention all 96. */
    block_id id = block_pool_lookup(pool, &r0->block_hashes[4], 0);
    block_pool_unpublish(pool, &id, 1);
    const kv_hit *hit = kv_manager_lookup(m, r1);
    assert_int_equal(hit->n_tokens, 64);
    assert_int_equal(hit->n_longest_tokens, 96);
    assert_int_equal(kv_manager_lookup_group(&hit, m, r1, 0), 64);
    EXPECT_IDS(hit->blocks[0], hit->n_blocks[0], 0, 0, 3, 4);
    assert_int_equal(kv_manager_lookup_group(&hit, m, r1, 1), 96);
    assert_int_equal(hit->n_blocks[1], 6);
    /* Full attention lacks block 1: nothing beyond it counts, though the window would reach. */
    id = block_pool_lookup(pool, &r0->block_hashes[1], 1);
    block_pool_unpublish(pool, &id, 1);
    hit = kv_manager_lookup(m, r1);
    assert_int_equal(hit->n_tokens, 16);
    assert_int_equal(hit->n_longest_tokens, 16);
    assert_int_equal(kv_manager_lookup_group(&hit, m, r1, 1), 16);
    assert_int_equal(kv_manager_lookup_group(&hit, m, r1, 0), 64);
    r1->skip_prefix_lookup = true;
    assert_int_equal(kv_manager_lookup_group(&hit, m, r1, 0), 0);
    request_destroy(r0);
    request_destroy(r1);
    kv_manager_destroy(m);
}

/* #33775: hits of all groups leave the free queue before any group takes a block from its front. */
static void test_kv_hybrid_allocation_spares_the_hits_of_other_groups(void **state)
{
    (void)state;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 16, 0),
                                    spec_of(ATTENTION_SLIDING, 16, 32)};
    kv_manager *m = new_groups(11, specs, 2, 16, false);
    request *r0 = new_range(0, 48, 16);
    request *junk = new_range(5000, 32, 16);
    assert_true(alloc(NULL, m, r0, 48));
    assert_true(alloc(NULL, m, junk, 32));
    give_back(m, r0);
    give_back(m, junk);
    EXPECT_FREE(m, 3, 2, 1, 6, 5, 4, 8, 7, 10, 9);
    request *r1 = new_range(0, 64, 16);
    block_ids_msg table;
    assert_true(alloc(NULL, m, r1, 16));
    kv_manager_get_table(&table, m, r1);
    EXPECT_IDS(table.ids[0], table.n_blocks[0], 1, 2, 3, 4);
    EXPECT_IDS(table.ids[1], table.n_blocks[1], 0, 5, 6, 8);
    give_back(m, r1);
    request_destroy(r0);
    request_destroy(r1);
    request_destroy(junk);
    kv_manager_destroy(m);
}

/* AL5, AL6: what a hit takes out of the free queue counts in every group, without the gate too. */
static void test_kv_hybrid_free_hits_of_every_group_count(void **state)
{
    (void)state;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 16, 0),
                                    spec_of(ATTENTION_SLIDING, 16, 32)};
    kv_manager *m = new_groups(11, specs, 2, 16, false);
    request *r0 = new_range(0, 48, 16);
    request *r1 = new_range(0, 64, 16);
    request *other = new_range(5000, 16, 16);
    assert_true(alloc(NULL, m, r0, 48));
    give_back(m, r0);
    assert_true(alloc(NULL, m, other, 16));
    /* 3 hits of full attention, 2 of the window and a new block in each: 7 of 8. */
    assert_int_equal(n_free(m), 8);
    kv_alloc a = {.n_new_tokens = 16, .hit = kv_manager_lookup(m, r1), .n_spare_blocks = 2};
    assert_int_equal(a.hit->n_tokens, 48);
    assert_false(kv_manager_allocate(NULL, m, r1, &a));
    a.n_spare_blocks = 1;
    assert_true(kv_manager_allocate(NULL, m, r1, &a));
    assert_int_equal(n_free(m), 1);
    kv_manager_free(m, r1, 64);
    give_back(m, other);
    request_destroy(r0);
    request_destroy(r1);
    request_destroy(other);
    kv_manager_destroy(m);
}

typedef struct random_case {
    int32_t n_groups;
    int32_t n_known;
    int32_t max_tokens;
    bool use_eagle;
    kv_group_spec specs[PGD_MAX_KV_GROUPS];
    oracle_group truth[PGD_MAX_KV_GROUPS];
} random_case;

static void draw_groups(random_case *c, uint64_t *seed)
{
    bool is_any_marked = false;
    c->n_groups = 2 + (int32_t)oracle_random(seed, 4);
    c->use_eagle = oracle_random(seed, 2) != 0;
    for (int32_t g = 0; g < c->n_groups; g++) {
        attention_kind kind = (attention_kind)oracle_random(seed, 3);
        int32_t bs = 2 << oracle_random(seed, 3);
        if (oracle_random(seed, 8) == 0)
            bs = 6;
        int32_t window = kind == ATTENTION_FULL ? 0 : 1 + (int32_t)oracle_random(seed, 40);
        c->specs[g] = spec_of(kind, bs, window);
        if (g > 0 && oracle_random(seed, 3) == 0)
            c->specs[g] = c->specs[oracle_random(seed, (uint32_t)g)];
        c->specs[g].is_eagle = oracle_random(seed, 4) == 0;
        is_any_marked = is_any_marked || c->specs[g].is_eagle;
    }
    for (int32_t g = 0; g < c->n_groups; g++) {
        attention_kind kind = ATTENTION_FULL;
        while (kv_group_ops_of(kind) != c->specs[g].ops)
            kind++;
        bool drops = c->use_eagle && (c->specs[g].is_eagle || !is_any_marked);
        c->truth[g] = (oracle_group){.kind = kind,
                                     .block_size = c->specs[g].block_size,
                                     .window = c->specs[g].window,
                                     .n_drop = drops};
    }
}

static void test_kv_hybrid_lookup_equals_trying_every_length(void **state)
{
    (void)state;
    block_hash hashes[ORACLE_MAX_BLOCKS];
    int32_t n_hits = 0;
    uint64_t seed = 3;
    oracle_hashes(hashes, ORACLE_MAX_BLOCKS);
    for (int i = 0; i < 6000; i++) {
        random_case c;
        draw_groups(&c, &seed);
        block_pool *pool;
        kv_coordinator *coordinator;
        assert_int_equal(block_pool_create(&pool, 1024, true), PGD_OK);
        kv_coordinator_opts opts = {.pool = pool,
                                    .groups = c.specs,
                                    .n_groups = c.n_groups,
                                    .enable_caching = true,
                                    .use_eagle = c.use_eagle,
                                    .hash_block_size = 2,
                                    .n_rows = 1,
                                    .max_model_len = 2 * ORACLE_MAX_BLOCKS,
                                    .max_unfinished_tokens = 64};
        assert_int_equal(kv_coordinator_create(&coordinator, &opts), PGD_OK);
        assert_string_equal(coordinator->ops->name, "hybrid");
        int32_t n_hashes = 1 + (int32_t)oracle_random(&seed, 96);
        int32_t max_tokens = (int32_t)oracle_random(&seed, 200);
        for (int32_t g = 0; g < c.n_groups; g++) {
            uint32_t one_in = 2 + oracle_random(&seed, 40);
            for (int32_t b = 0; b < ORACLE_MAX_BLOCKS; b++)
                c.truth[g].ids[b] = -1;
            for (int32_t b = 0; (b + 1) * c.specs[g].block_size <= 2 * n_hashes; b++) {
                if (oracle_random(&seed, one_in) != 0)
                    oracle_cache(&c.truth[g], pool, g, hashes, 2, b);
            }
        }
        block_id lists[PGD_MAX_KV_GROUPS][ORACLE_MAX_BLOCKS];
        kv_hit hit;
        for (int g = 0; g < PGD_MAX_KV_GROUPS; g++)
            hit.blocks[g] = lists[g];
        coordinator->ops->lookup(&hit, coordinator, hashes, n_hashes, max_tokens);
        int32_t n_known = PGD_MIN(2 * n_hashes, max_tokens);
        int32_t want =
            oracle_longest(c.truth, c.n_groups, n_known, n_known, coordinator->alignment_tokens);
        if (hit.n_tokens != want)
            print_message("case %d: %d groups, eagle %d, %d hashes, at most %d\n", i, c.n_groups,
                          c.use_eagle, n_hashes, max_tokens);
        assert_int_equal(hit.n_tokens, want);
        assert_true(hit.n_longest_tokens >= want && hit.n_longest_tokens <= n_known);
        for (int32_t g = 0; g < c.n_groups; g++)
            oracle_check_list(&c.truth[g], hit.blocks[g], hit.n_blocks[g], want);
        n_hits += want > 0;
        kv_coordinator_destroy(coordinator);
        block_pool_destroy(pool);
    }
    assert_true(n_hits > 1500); /* the cases are worth something */
}

/* What publishing leaves out is never missed: after a whole prompt was published by the rules, the
 * hit is as long as if every block had been. */
static void test_kv_hybrid_sparse_publishing_loses_no_hit(void **state)
{
    (void)state;
    uint64_t seed = 11;
    for (int i = 0; i < 300; i++) {
        random_case c;
        draw_groups(&c, &seed);
        /* One group that needs every block: without it nothing is computed before the last chunk. */
        c.specs[c.n_groups] = spec_of(ATTENTION_FULL, 4, 0);
        c.truth[c.n_groups] = (oracle_group){.kind = ATTENTION_FULL, .block_size = 4};
        bool is_any_marked = false;
        for (int32_t g = 0; g < c.n_groups; g++)
            is_any_marked = is_any_marked || c.specs[g].is_eagle;
        c.truth[c.n_groups++].n_drop = c.use_eagle && !is_any_marked;
        kv_manager *m = new_groups(2000, c.specs, c.n_groups, 2, c.use_eagle);
        int32_t alignment = 1;
        for (int32_t g = 0; g < c.n_groups; g++) {
            int32_t step = alignment;
            while (alignment % c.specs[g].block_size != 0)
                alignment += step;
        }
        int32_t n_tokens = 30 + (int32_t)oracle_random(&seed, 200);
        request *r0 = new_range(0, n_tokens, 2);
        /* Windows may recycle a block before it is published, so all at once. */
        assert_true(alloc(NULL, m, r0, n_tokens));
        for (int32_t n = 1; n <= n_tokens; n += 1 + (int32_t)oracle_random(&seed, 30)) {
            request *r = new_range(0, n, 2);
            int32_t want = 0;
            for (int32_t k = alignment; k < n; k += alignment) {
                bool is_good = true;
                for (int32_t g = 0; g < c.n_groups; g++) {
                    int32_t end = k + c.truth[g].n_drop * c.specs[g].block_size;
                    is_good = is_good && end <= n - 1;
                }
                want = is_good ? k : want;
            }
            assert_int_equal(kv_manager_lookup(m, r)->n_tokens, want);
            request_destroy(r);
        }
        give_back(m, r0);
        request_destroy(r0);
        kv_manager_destroy(m);
    }
}

static void test_kv_hybrid_refuses_what_does_not_divide(void **state)
{
    (void)state;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 16, 0),
                                    spec_of(ATTENTION_SLIDING, 24, 32)};
    const kv_group_spec huge[2] = {spec_of(ATTENTION_FULL, 65521, 0),
                                   spec_of(ATTENTION_SLIDING, 65537, 32)};
    kv_manager_opts opts = {.n_blocks = 20,
                            .groups = specs,
                            .n_groups = 2,
                            .enable_caching = true,
                            .hash_block_size = 8,
                            .max_holders = 1,
                            .max_model_len = 64,
                            .max_unfinished_tokens = 64};
    kv_manager *m;
    assert_int_equal(kv_manager_create(&m, &opts), PGD_OK);
    kv_manager_destroy(m);
    opts.hash_block_size = 16;
    assert_int_equal(kv_manager_create(&m, &opts), PGD_EINVAL);
    opts.hash_block_size = 0;
    assert_int_equal(kv_manager_create(&m, &opts), PGD_EINVAL);
    opts.groups = huge;
    opts.hash_block_size = 1;
    assert_int_equal(kv_manager_create(&m, &opts), PGD_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_hybrid_h15_basic),
        cmocka_unit_test(test_kv_hybrid_three_groups_with_speculation_keep_their_hits),
        cmocka_unit_test(test_kv_hybrid_drop_is_bounded_by_the_request),
        cmocka_unit_test(test_kv_hybrid_publishes_what_a_hit_can_need),
        cmocka_unit_test(test_kv_hybrid_publishes_whole_segments),
        cmocka_unit_test(test_kv_hybrid_unequal_blocks_hit_in_segments),
        cmocka_unit_test(test_kv_hybrid_free_hits_of_every_group_count),
        cmocka_unit_test(test_kv_hybrid_longest_and_single_group_hits),
        cmocka_unit_test(test_kv_hybrid_allocation_spares_the_hits_of_other_groups),
        cmocka_unit_test(test_kv_hybrid_lookup_equals_trying_every_length),
        cmocka_unit_test(test_kv_hybrid_sparse_publishing_loses_no_hit),
        cmocka_unit_test(test_kv_hybrid_refuses_what_does_not_divide),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
