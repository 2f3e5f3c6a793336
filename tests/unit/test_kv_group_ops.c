/* The kinds of attention: trace H13, rules SM4-SM7 and SM9, and every search against the definition
 * of its kind. */
#include "tests/unit/kv_oracle.h"

/* Cached blocks of one group, written as T and F. */
typedef struct one_group {
    block_pool *pool;
    kv_group_spec spec;
    oracle_group truth;
    block_hash hashes[ORACLE_MAX_BLOCKS];
    int32_t n_blocks;
} one_group;

static void cache_pattern(one_group *s, attention_kind kind, int32_t bs, int32_t window,
                          const char *pattern)
{
    *s = (one_group){
        .spec = {.ops = kv_group_ops_of(kind), .block_size = bs, .window = window},
        .truth = {.kind = kind, .block_size = bs, .window = window},
        .n_blocks = (int32_t)strlen(pattern),
    };
    oracle_hashes(s->hashes, ORACLE_MAX_BLOCKS);
    assert_int_equal(block_pool_create(&s->pool, 2 * ORACLE_MAX_BLOCKS, true), PGD_OK);
    for (int32_t i = 0; i < s->n_blocks; i++) {
        s->truth.ids[i] = -1;
        if (pattern[i] == 'T')
            oracle_cache(&s->truth, s->pool, 3, s->hashes, bs, i);
    }
}

/* Longest prefix of at most max_blocks blocks; checks the list. */
static int32_t search(one_group *s, int32_t max_blocks, int32_t alignment_blocks, int32_t n_drop)
{
    static const int32_t group_id = 3;
    block_id list[ORACLE_MAX_BLOCKS];
    block_id *lists[1] = {list};
    kv_lookup q = {.pool = s->pool,
                   .spec = &s->spec,
                   .group_ids = &group_id,
                   .n_groups = 1,
                   .hashes = s->hashes,
                   .hashes_per_block = 1,
                   .n_known = s->n_blocks,
                   .alignment_blocks = alignment_blocks,
                   .n_drop = n_drop};
    q.max_blocks = kv_group_ops_align(&q, PGD_MIN(max_blocks, s->n_blocks - n_drop));
    memset(list, 0x7f, sizeof list);
    int32_t n = s->spec.ops->lookup(lists, &q);
    s->truth.n_drop = n_drop;
    oracle_check_list(&s->truth, list, n, n * s->spec.block_size);
    assert_int_equal(list[ORACLE_MAX_BLOCKS - 1], 0x7f7f7f7f);
    return n;
}

static int32_t search_pattern(attention_kind kind, int32_t bs, int32_t window, const char *pattern,
                              int32_t alignment_blocks, int32_t n_drop)
{
    one_group s;
    cache_pattern(&s, kind, bs, window, pattern);
    int32_t n = search(&s, s.n_blocks, alignment_blocks, n_drop);
    block_pool_destroy(s.pool);
    return n;
}

static void test_kv_group_ops_table_has_every_kind(void **state)
{
    (void)state;
    for (int kind = 0; kind <= ATTENTION_KIND_LAST; kind++) {
        const kv_group_ops *ops = kv_group_ops_of((attention_kind)kind);
        assert_non_null(ops);
        assert_string_equal(ops->name, attention_kind_name((attention_kind)kind));
    }
    assert_null(kv_group_ops_of((attention_kind)(ATTENTION_KIND_LAST + 1)));
    assert_null(kv_group_ops_of((attention_kind)-1));
}

static void test_kv_group_ops_h13_sliding_window_lookup(void **state)
{
    (void)state;
    const struct {
        const char *cached;
        int32_t n_blocks;
    } rows[] = {
        {"FFFFFFFFFF", 0},  {"T", 1},
        {"TF", 1},          {"TT", 2},
        {"TTF", 2},         {"TTT", 3},
        {"TTTF", 3},        {"TTFTFFTTFTTT", 12},
        {"TTFTFFTTFFF", 8}, {"TTFTFFTTFFFT", 8},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++)
        assert_int_equal(search_pattern(ATTENTION_SLIDING, 2, 4, rows[i].cached, 1, 0),
                         rows[i].n_blocks);
}

static void test_kv_group_ops_sliding_window_alignment(void **state)
{
    (void)state;
    /* Two blocks in a row are needed. Aligned to 2 blocks, the run of 3 ends at 5: its first two
     * count; a run of two that ends at an odd place does not. */
    assert_int_equal(search_pattern(ATTENTION_SLIDING, 2, 4, "FFTTTF", 2, 0), 4);
    assert_int_equal(search_pattern(ATTENTION_SLIDING, 2, 4, "FFFTTF", 2, 0), 0);
    assert_int_equal(search_pattern(ATTENTION_SLIDING, 2, 4, "TTFTTF", 2, 0), 2);
    assert_int_equal(search_pattern(ATTENTION_SLIDING, 2, 4, "TFF", 2, 0), 0);
    assert_int_equal(search_pattern(ATTENTION_SLIDING, 2, 100, "TTTTTF", 4, 0), 4);
}

static void test_kv_group_ops_drop_needs_the_block_behind(void **state)
{
    (void)state;
    /* Draft heads: one more block must match, and is then computed again. */
    assert_int_equal(search_pattern(ATTENTION_SLIDING, 2, 4, "FFTTTFF", 1, 1), 4);
    assert_int_equal(search_pattern(ATTENTION_SLIDING, 2, 4, "FFFTTFF", 1, 1), 0);
    assert_int_equal(search_pattern(ATTENTION_SLIDING, 2, 4, "TTFFTT", 1, 1), 1);
    /* The pop counts for the alignment: the answer is aligned, not what was matched. */
    assert_int_equal(search_pattern(ATTENTION_SLIDING, 2, 4, "FFTTTFF", 2, 1), 4);
    assert_int_equal(search_pattern(ATTENTION_SLIDING, 2, 4, "FFTTFF", 2, 1), 0);
    assert_int_equal(search_pattern(ATTENTION_FULL, 2, 0, "TTTTTF", 1, 1), 4);
    assert_int_equal(search_pattern(ATTENTION_FULL, 2, 0, "TTTTTF", 2, 1), 4);
    assert_int_equal(search_pattern(ATTENTION_FULL, 2, 0, "TTTT", 4, 1), 0);
    assert_int_equal(search_pattern(ATTENTION_FULL, 2, 0, "T", 1, 1), 0);
}

static void test_kv_group_ops_full_stops_at_the_first_miss(void **state)
{
    (void)state;
    assert_int_equal(search_pattern(ATTENTION_FULL, 2, 0, "FTTT", 1, 0), 0);
    assert_int_equal(search_pattern(ATTENTION_FULL, 2, 0, "TTFT", 1, 0), 2);
    assert_int_equal(search_pattern(ATTENTION_FULL, 2, 0, "TTTF", 2, 0), 2);
}

static void test_kv_group_ops_chunked_counts_earlier_chunks_as_computed(void **state)
{
    (void)state;
    /* Chunks of 4 blocks: nothing of the first chunk is looked at once the candidate is beyond. */
    assert_int_equal(search_pattern(ATTENTION_CHUNKED, 2, 8, "FFFFTTF", 1, 0), 6);
    assert_int_equal(search_pattern(ATTENTION_CHUNKED, 2, 8, "FFFFF", 1, 0), 4);
    assert_int_equal(search_pattern(ATTENTION_CHUNKED, 2, 8, "TTF", 1, 0), 2);
    assert_int_equal(search_pattern(ATTENTION_CHUNKED, 2, 8, "FFFFFFFF", 1, 0), 8);
    /* A chunk of 3 tokens begins inside block 1 of 2 tokens: its block is needed. */
    assert_int_equal(search_pattern(ATTENTION_CHUNKED, 2, 3, "FF", 1, 0), 0);
    assert_int_equal(search_pattern(ATTENTION_CHUNKED, 2, 3, "FT", 1, 0), 2);
}

static void test_kv_group_ops_searches_equal_the_definition(void **state)
{
    (void)state;
    uint64_t seed = 1;
    const attention_kind kinds[] = {ATTENTION_FULL, ATTENTION_SLIDING, ATTENTION_CHUNKED};
    for (int i = 0; i < 20000; i++) {
        attention_kind kind = kinds[oracle_random(&seed, 3)];
        int32_t bs = 1 + (int32_t)oracle_random(&seed, 4);
        int32_t window = 1 + (int32_t)oracle_random(&seed, 24);
        int32_t n_blocks = 1 + (int32_t)oracle_random(&seed, 24);
        uint32_t one_in = 1 + oracle_random(&seed, 8);
        char pattern[25] = {0};
        for (int32_t b = 0; b < n_blocks; b++)
            pattern[b] = oracle_random(&seed, 1 + one_in) != 0 ? 'T' : 'F';
        one_group s;
        cache_pattern(&s, kind, bs, window, pattern);
        int32_t max_blocks = (int32_t)oracle_random(&seed, (uint32_t)n_blocks + 1);
        int32_t alignment = 1 + (int32_t)oracle_random(&seed, 3);
        int32_t n_drop = (int32_t)oracle_random(&seed, 2);
        int32_t n = search(&s, max_blocks, alignment, n_drop);
        int32_t want = oracle_longest(&s.truth, 1, n_blocks * bs, max_blocks * bs, alignment * bs);
        if (n * bs != want)
            print_message("kind %d bs %d window %d %s max %d alignment %d drop %d\n", kind, bs,
                          window, pattern, max_blocks, alignment, n_drop);
        assert_int_equal(n * bs, want);
        block_pool_destroy(s.pool);
    }
}

static void test_kv_group_ops_skipped_tokens_are_those_nobody_reads(void **state)
{
    (void)state;
    for (int kind = ATTENTION_SLIDING; kind <= ATTENTION_CHUNKED; kind++) {
        for (int32_t window = 1; window < 20; window++) {
            kv_group_spec spec = {
                .ops = kv_group_ops_of((attention_kind)kind), .block_size = 1, .window = window};
            oracle_group g = {.kind = (attention_kind)kind, .window = window};
            for (int32_t n = 0; n < 60; n++) {
                int32_t n_unread = 0;
                while (n_unread < n && !oracle_attends(&g, n, n_unread))
                    n_unread++;
                assert_int_equal(spec.ops->skipped_tokens(&spec, n), n_unread);
            }
            for (int32_t n = 1; n < 60; n++) {
                int32_t least = 0;
                while (spec.ops->skipped_tokens(&spec, least) < n)
                    least++;
                assert_int_equal(spec.ops->tokens_to_skip(&spec, n), least);
            }
        }
    }
}

/* SM9: no step of at most max_unfinished tokens makes a request hold more than the bound, and some
 * request comes within a block of it. */
static void test_kv_group_ops_max_held_blocks(void **state)
{
    (void)state;
    for (int kind = ATTENTION_SLIDING; kind <= ATTENTION_CHUNKED; kind++) {
        for (int32_t window = 1; window < 20; window++) {
            for (int32_t bs = 1; bs < 6; bs++) {
                for (int32_t step = 1; step < 12; step += 3) {
                    kv_group_spec spec = {.ops = kv_group_ops_of((attention_kind)kind),
                                          .block_size = bs,
                                          .window = window};
                    int32_t bound = spec.ops->max_held_blocks(&spec, step, 1000);
                    int32_t most = 0;
                    for (int32_t n = 0; n + step < 200; n++) {
                        int32_t n_held =
                            PGD_CEIL_DIV(n + step, bs) - kv_group_ops_skipped_blocks(&spec, n);
                        most = PGD_MAX(most, n_held);
                    }
                    assert_true(most <= bound && bound <= most + 2);
                    assert_true(spec.ops->max_held_blocks(&spec, step, 3) <=
                                PGD_CEIL_DIV(3, bs) + 1);
                }
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_group_ops_table_has_every_kind),
        cmocka_unit_test(test_kv_group_ops_h13_sliding_window_lookup),
        cmocka_unit_test(test_kv_group_ops_sliding_window_alignment),
        cmocka_unit_test(test_kv_group_ops_drop_needs_the_block_behind),
        cmocka_unit_test(test_kv_group_ops_full_stops_at_the_first_miss),
        cmocka_unit_test(test_kv_group_ops_chunked_counts_earlier_chunks_as_computed),
        cmocka_unit_test(test_kv_group_ops_searches_equal_the_definition),
        cmocka_unit_test(test_kv_group_ops_skipped_tokens_are_those_nobody_reads),
        cmocka_unit_test(test_kv_group_ops_max_held_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
