/* Merging by rank against a quadratic reference written from the definition, and its time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "engine/text/bpe.h"

#define MAX_WORD 64

/* Rules by hand: ids 0 a, 1 b, 2 c, 3 ab, 4 bc, 5 abc (from ab c), 6 aa. */
static void make_rules(bpe_rules *r)
{
    *r = (bpe_rules){0};
    assert_int_equal(bpe_rules_reserve(r, 4), PGD_OK);
    bpe_rules_add(r, 1, 2, 0, 4); /* b c */
    bpe_rules_add(r, 0, 1, 1, 3); /* a b */
    bpe_rules_add(r, 3, 2, 2, 5); /* ab c */
    bpe_rules_add(r, 0, 0, 3, 6); /* a a */
}

static int32_t merge(bpe_work *w, const bpe_rules *r, const token_id *word, int32_t n,
                     token_id *out)
{
    assert_int_equal(bpe_work_begin(w, (size_t)n), PGD_OK);
    for (int32_t i = 0; i < n; i++)
        bpe_work_add(w, word[i], (size_t)i, 1);
    bpe_merge(w, r);
    int32_t n_out = 0;
    for (int32_t i = n > 0 ? 0 : -1; i >= 0; i = w->symbols[i].next)
        out[n_out++] = w->symbols[i].id;
    return n_out;
}

static void expect(const token_id *word, int32_t n, const token_id *want, int32_t n_want)
{
    bpe_rules r;
    bpe_work w = {0};
    token_id got[MAX_WORD];
    make_rules(&r);
    assert_int_equal(merge(&w, &r, word, n, got), n_want);
    for (int32_t i = 0; i < n_want; i++)
        assert_int_equal(got[i], want[i]);
    bpe_work_deinit(&w);
    bpe_rules_deinit(&r);
}

static void test_bpe_takes_lowest_rank_first(void **state)
{
    (void)state;
    /* "abc": b c has the lower rank, then nothing joins a and bc. */
    expect((token_id[]){0, 1, 2}, 3, (token_id[]){0, 4}, 2);
    expect((token_id[]){0, 1, 1, 2}, 4, (token_id[]){3, 4}, 2);
}

static void test_bpe_takes_leftmost_of_equal_rank(void **state)
{
    (void)state;
    expect((token_id[]){0, 0, 0}, 3, (token_id[]){6, 0}, 2);
    expect((token_id[]){0, 0, 0, 0}, 4, (token_id[]){6, 6}, 2);
}

static void test_bpe_word_without_pairs(void **state)
{
    (void)state;
    expect((token_id[]){2}, 1, (token_id[]){2}, 1);
    expect(NULL, 0, NULL, 0);
    expect((token_id[]){2, 1, 2, 0}, 4, (token_id[]){2, 4, 0}, 3);
}

static void test_bpe_find_knows_only_what_was_added(void **state)
{
    (void)state;
    bpe_rules r;
    make_rules(&r);
    assert_non_null(bpe_rules_find(&r, 0, 1));
    assert_int_equal(bpe_rules_find(&r, 0, 1)->merged, 3);
    assert_null(bpe_rules_find(&r, 1, 0));
    assert_null(bpe_rules_find(&r, -1, 0));
    assert_null(bpe_rules_find(&r, 100, 200));
    bpe_rules_deinit(&r);
}

static void test_bpe_last_of_equal_pairs_counts(void **state)
{
    (void)state;
    bpe_rules r = {0};
    assert_int_equal(bpe_rules_reserve(&r, 2), PGD_OK);
    bpe_rules_add(&r, 0, 1, 0, 2);
    bpe_rules_add(&r, 0, 1, 1, 3);
    assert_int_equal(bpe_rules_find(&r, 0, 1)->rank, 1);
    assert_int_equal(bpe_rules_find(&r, 0, 1)->merged, 3);
    bpe_rules_deinit(&r);
}

static void test_bpe_refuses_absurd_sizes(void **state)
{
    (void)state;
    bpe_rules r = {0};
    bpe_work w = {0};
    assert_int_equal(bpe_rules_reserve(&r, -1), PGD_ERANGE);
    assert_int_equal(bpe_rules_reserve(&r, INT32_MAX), PGD_ERANGE);
    assert_int_equal(bpe_work_begin(&w, SIZE_MAX), PGD_ERANGE);
    bpe_work_deinit(&w);
    bpe_rules_deinit(&r);
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* The definition: look at all pairs, join the one of lowest rank, leftmost first. */
static int32_t merge_by_definition(const bpe_rules *r, token_id *word, int32_t n)
{
    for (;;) {
        const bpe_rule *best = NULL;
        int32_t at = 0;
        for (int32_t i = 0; i + 1 < n; i++) {
            const bpe_rule *rule = bpe_rules_find(r, word[i], word[i + 1]);
            if (rule != NULL && (best == NULL || rule->rank < best->rank)) {
                best = rule;
                at = i;
            }
        }
        if (best == NULL)
            return n;
        word[at] = (token_id)best->merged;
        for (int32_t i = at + 1; i + 1 < n; i++)
            word[i] = word[i + 1];
        n--;
    }
}

static void test_bpe_equals_definition_on_random_rules(void **state)
{
    (void)state;
    uint64_t seed = 88172645463325252u;
    bpe_work w = {0};
    for (int32_t round = 0; round < 300; round++) {
        bpe_rules r = {0};
        int32_t n_letters = 2 + (int32_t)(next_random(&seed) % 3);
        int32_t n_rules = 1 + (int32_t)(next_random(&seed) % 30);
        assert_int_equal(bpe_rules_reserve(&r, n_rules), PGD_OK);
        for (int32_t i = 0; i < n_rules; i++) {
            token_id known = n_letters + i; /* each rule makes a new token, as training does */
            bpe_rules_add(&r, (token_id)(next_random(&seed) % (uint64_t)known),
                          (token_id)(next_random(&seed) % (uint64_t)known), (uint32_t)i, known);
        }
        for (int32_t k = 0; k < 20; k++) {
            token_id word[MAX_WORD];
            token_id got[MAX_WORD];
            int32_t n = (int32_t)(next_random(&seed) % MAX_WORD);
            for (int32_t i = 0; i < n; i++)
                word[i] = (token_id)(next_random(&seed) % (uint64_t)n_letters);
            int32_t n_got = merge(&w, &r, word, n, got);
            int32_t n_want = merge_by_definition(&r, word, n);
            assert_int_equal(n_got, n_want);
            assert_memory_equal(got, word, (size_t)n_want * sizeof(word[0]));
        }
        bpe_rules_deinit(&r);
    }
    bpe_work_deinit(&w);
}

static void test_bpe_million_symbols_in_bounded_time(void **state)
{
    (void)state;
    bpe_rules r = {0};
    bpe_work w = {0};
    int32_t n = 1 << 20;
    assert_int_equal(bpe_rules_reserve(&r, 10), PGD_OK);
    for (int32_t i = 0; i < 10; i++)
        bpe_rules_add(&r, i, i, (uint32_t)i, i + 1);
    assert_int_equal(bpe_work_begin(&w, (size_t)n), PGD_OK);
    for (int32_t i = 0; i < n; i++)
        bpe_work_add(&w, 0, (size_t)i, 1);
    clock_t began = clock();
    bpe_merge(&w, &r);
    clock_t took = clock() - began;
    int32_t n_left = 0;
    for (int32_t i = 0; i >= 0; i = w.symbols[i].next) {
        assert_int_equal(w.symbols[i].id, 10);
        n_left++;
    }
    assert_int_equal(n_left, n / 1024);
    assert_true(took < 10 * CLOCKS_PER_SEC); /* CPU time; quadratic merging takes hours */
    bpe_work_deinit(&w);
    bpe_rules_deinit(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bpe_takes_lowest_rank_first),
        cmocka_unit_test(test_bpe_takes_leftmost_of_equal_rank),
        cmocka_unit_test(test_bpe_word_without_pairs),
        cmocka_unit_test(test_bpe_find_knows_only_what_was_added),
        cmocka_unit_test(test_bpe_last_of_equal_pairs_counts),
        cmocka_unit_test(test_bpe_refuses_absurd_sizes),
        cmocka_unit_test(test_bpe_equals_definition_on_random_rules),
        cmocka_unit_test(test_bpe_million_symbols_in_bounded_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
