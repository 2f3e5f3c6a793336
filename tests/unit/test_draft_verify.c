/* Trace H23. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "worker/spec/draft_verify.h"

#define ANY 4

typedef struct example {
    token_id drafts[ANY];
    int32_t n_drafts;
    token_id sampled[ANY];
    token_id want[ANY];
    int32_t n_want;
} example;

static void check(const example *e)
{
    token_id tokens[ANY] = {77, 77, 77, 77};
    assert_int_equal(draft_verify(tokens, e->drafts, e->sampled, e->n_drafts), e->n_want);
    for (int32_t i = 0; i < ANY; i++)
        assert_int_equal(tokens[i], i <= e->n_drafts ? e->want[i] : 77);
    token_id in_place[ANY];
    memcpy(in_place, e->sampled, sizeof in_place);
    assert_int_equal(draft_verify(in_place, e->drafts, in_place, e->n_drafts), e->n_want);
    assert_memory_equal(in_place, tokens, (size_t)(e->n_drafts + 1) * sizeof *tokens);
}

static void test_draft_verify_h23_examples(void **state)
{
    static const example examples[] = {
        {{1, 2, 3}, 3, {1, 2, 3, 4}, {1, 2, 3, 4}, 4},
        {{1, 2, 3}, 3, {1, 5, 3, 4}, {1, 5, -1, -1}, 2},
        {{1, 2}, 2, {1, 2, 5}, {1, 2, 5}, 3},
        {{3}, 1, {3, 4}, {3, 4}, 2},
        {{0}, 0, {5}, {5}, 1},
        {{1}, 1, {2, 3}, {2, -1}, 1},
    };
    (void)state;
    for (size_t i = 0; i < PGD_ARRAY_LEN(examples); i++)
        check(&examples[i]);
}

static void test_draft_verify_longest(void **state)
{
    token_id drafts[PGD_MAX_DRAFT_TOKENS];
    token_id sampled[PGD_MAX_DRAFT_TOKENS + 1];
    token_id tokens[PGD_MAX_DRAFT_TOKENS + 1];
    (void)state;
    for (int32_t i = 0; i <= PGD_MAX_DRAFT_TOKENS; i++)
        sampled[i] = 100 + i;
    memcpy(drafts, sampled, sizeof drafts);
    assert_int_equal(draft_verify(tokens, drafts, sampled, PGD_MAX_DRAFT_TOKENS),
                     PGD_MAX_DRAFT_TOKENS + 1);
    assert_memory_equal(tokens, sampled, sizeof tokens);
    for (int32_t wrong = 0; wrong < PGD_MAX_DRAFT_TOKENS; wrong++) {
        drafts[wrong]++;
        assert_int_equal(draft_verify(tokens, drafts, sampled, PGD_MAX_DRAFT_TOKENS), wrong + 1);
        assert_int_equal(tokens[wrong], sampled[wrong]);
        assert_int_equal(tokens[wrong + 1], -1);
        drafts[wrong]--;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_draft_verify_h23_examples),
        cmocka_unit_test(test_draft_verify_longest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
