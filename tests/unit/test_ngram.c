/* Drafts by n-gram lookup: trace H24 and a brute-force search over random texts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/hash.h"
#include "worker/spec/ngram.h"

static void expect(const token_id *tokens, int32_t n_tokens, int32_t min_n, int32_t max_n,
                   int32_t k, const token_id *want, int32_t n_want)
{
    ngram_opts opts = {.min_n = min_n, .max_n = max_n, .max_drafts = k, .max_model_len = 1000};
    token_id out[8];
    assert_int_equal(ngram_propose(out, tokens, n_tokens, &opts), n_want);
    assert_memory_equal(out, want, (size_t)n_want * sizeof *want);
}

#define TOKENS(...) \
    (const token_id[]){__VA_ARGS__}, (int32_t)PGD_ARRAY_LEN(((const token_id[]){__VA_ARGS__}))
#define NONE NULL, 0

static void test_ngram_h24(void **state)
{
    (void)state;
    expect(TOKENS(1, 2, 3, 4, 1, 2, 3), 2, 2, 3, TOKENS(4, 1, 2));
    expect(TOKENS(1, 2, 3, 4, 1, 2, 3), 1, 1, 2, TOKENS(4, 1));
    expect(TOKENS(1, 2, 3, 4, 1, 2, 3, 5, 6), 2, 2, 2, NONE);
    expect(TOKENS(1, 3, 6, 2, 3, 4, 1, 2, 3), 2, 2, 3, TOKENS(4, 1, 2));
    expect(TOKENS(1, 3, 6, 2, 3, 4, 1, 2, 3), 1, 1, 2, TOKENS(6, 2));
    expect(TOKENS(1, 2, 3, 4, 1, 2, 3), 3, 4, 2, TOKENS(4, 1));
}

static void test_ngram_edges(void **state)
{
    (void)state;
    expect(TOKENS(7), 1, 3, 4, NONE);
    expect(TOKENS(7, 7), 1, 3, 4, TOKENS(7));
    expect(TOKENS(7, 7, 7), 1, 1, 4, TOKENS(7, 7));
    expect(TOKENS(5, 6, 5), 2, 2, 4, NONE);
    token_id out[8];
    ngram_opts opts = {.min_n = 1, .max_n = 2, .max_drafts = 8, .max_model_len = 8};
    assert_int_equal(ngram_propose(out, TOKENS(1, 2, 3, 4, 1, 2), &opts), 2);
    opts.max_model_len = 6;
    assert_int_equal(ngram_propose(out, TOKENS(1, 2, 3, 4, 1, 2), &opts), 0);
}

/* The rule as it reads. */
static int32_t search(token_id *out, const token_id *tokens, int32_t n, const ngram_opts *o)
{
    for (int32_t len = PGD_MIN(o->max_n, n - 1); len >= o->min_n; len--) {
        for (int32_t at = 0; at < n - len; at++) {
            if (memcmp(tokens + at, tokens + n - len, (size_t)len * sizeof *tokens) != 0)
                continue;
            int32_t n_out = PGD_MIN(PGD_MIN(o->max_drafts, n - at - len), o->max_model_len - n);
            memcpy(out, tokens + at + len, (size_t)n_out * sizeof *tokens);
            return n_out;
        }
    }
    return 0;
}

static void test_ngram_equals_search(void **state)
{
    (void)state;
    uint64_t rng = 1;
    for (int32_t i = 0; i < 20000; i++) {
        token_id tokens[40], got[8], want[8];
        rng = hash_u64(rng + 1);
        int32_t n = 1 + (int32_t)(rng % 40), n_words = 1 + (int32_t)(rng >> 8) % 4;
        for (int32_t t = 0; t < n; t++)
            tokens[t] = (token_id)((rng = hash_u64(rng + 1)) % (uint64_t)PGD_MAX(n_words, 1));
        int32_t min_n = 1 + (int32_t)(rng >> 60) % 4;
        ngram_opts o = {.min_n = min_n,
                        .max_n = min_n + (int32_t)(rng >> 50) % 8,
                        .max_drafts = 1 + (int32_t)(rng >> 40) % 8,
                        .max_model_len = 45};
        o.max_n = PGD_MAX(PGD_MIN(o.max_n, NGRAM_MAX_N), o.min_n);
        o.max_drafts = PGD_MAX(o.max_drafts, 1);
        int32_t n_want = search(want, tokens, n, &o);
        assert_int_equal(ngram_propose(got, tokens, n, &o), n_want);
        assert_memory_equal(got, want, (size_t)n_want * sizeof *want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ngram_h24),
        cmocka_unit_test(test_ngram_edges),
        cmocka_unit_test(test_ngram_equals_search),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
