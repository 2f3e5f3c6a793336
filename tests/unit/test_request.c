/* Requests: ownership of what they were made from, limits, stop rule ST7, block hashes as tokens
 * come. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "engine/core/request.h"

#define EOS 2

static const token_id PROMPT[5] = {11, 12, 13, 14, 15};
static const token_id EOS_IDS[1] = {EOS};

static request_opts base_opts(void)
{
    return (request_opts){.id = 1,
                          .prompt = PROMPT,
                          .n_prompt_tokens = 5,
                          .max_tokens = 16,
                          .max_model_len = 100,
                          .eos_ids = EOS_IDS,
                          .n_eos_ids = 1};
}

static request *make(const request_opts *opts)
{
    request *r;
    assert_int_equal(request_create(&r, opts), PGD_OK);
    return r;
}

static void test_request_copies_everything(void **state)
{
    (void)state;
    token_id prompt[3] = {7, 8, 9};
    token_id eos[2] = {1, 2};
    token_id stop[1] = {42};
    logit_bias bias[2] = {{3, 1.5f}, {4, -2.0f}};
    request_opts opts = base_opts();
    opts.prompt = prompt;
    opts.n_prompt_tokens = 3;
    opts.eos_ids = eos;
    opts.n_eos_ids = 2;
    opts.params.stop_ids = stop;
    opts.params.n_stop_ids = 1;
    opts.params.logit_bias = bias;
    opts.params.n_logit_bias = 2;
    opts.params.seed = 99;
    request *r = make(&opts);
    memset(prompt, 0, sizeof prompt);
    memset(eos, 0, sizeof eos);
    memset(stop, 0, sizeof stop);
    memset(bias, 0, sizeof bias);
    assert_int_equal(r->n_tokens, 3);
    assert_int_equal(r->tokens[2], 9);
    assert_int_equal(r->max_total_tokens, 19);
    assert_int_equal(r->num_cached_tokens, -1);
    assert_int_equal(r->kv_row, -1);
    /* The worker masks everything that would end it. */
    assert_int_equal(r->params.n_stop_ids, 3);
    assert_int_equal(r->params.stop_ids[0], 1);
    assert_int_equal(r->params.stop_ids[1], 2);
    assert_int_equal(r->params.stop_ids[2], 42);
    assert_int_equal(r->params.logit_bias[1].id, 4);
    assert_true(r->params.logit_bias[0].bias == 1.5f);
    assert_int_equal(r->params.seed, 99);
    request_destroy(r);
    request_destroy(NULL);
}

static void test_request_prompt_logprobs(void **state)
{
    (void)state;
    request_opts opts = base_opts();
    request *r = make(&opts);
    assert_null(request_take_prompt_logprobs(r));
    assert_false(r->skip_prefix_lookup);
    request_destroy(r);
    opts.params.n_prompt_logprobs_per_token = 3;
    r = make(&opts);
    assert_true(r->skip_prefix_lookup);
    r->prompt_logprobs[5 * 3 - 1].id = 9;
    token_logprob *taken = request_take_prompt_logprobs(r);
    assert_int_equal(taken[14].id, 9);
    mem_free(taken);
    assert_null(request_take_prompt_logprobs(r));
    assert_false(r->skip_prefix_lookup);
    assert_int_equal(r->params.n_prompt_logprobs_per_token, 0);
    request_destroy(r);
    request_destroy(make(&opts)); /* nobody took them */
}

static void expect_refused(const request_opts *opts)
{
    request *r = (request *)8;
    assert_int_equal(request_create(&r, opts), PGD_EINVAL);
    assert_null(r);
}

static void test_request_limits(void **state)
{
    (void)state;
    request_opts opts = base_opts();
    opts.n_prompt_tokens = 0;
    expect_refused(&opts);
    opts = base_opts();
    opts.max_tokens = 0;
    expect_refused(&opts);
    opts = base_opts();
    opts.max_model_len = 5; /* no room for an output token */
    expect_refused(&opts);
    opts.max_model_len = 6;
    request *r = make(&opts);
    assert_int_equal(r->max_total_tokens, 6);
    request_destroy(r);
    opts = base_opts();
    opts.max_tokens = INT32_MAX; /* the sum does not wrap */
    r = make(&opts);
    assert_int_equal(r->max_total_tokens, 100);
    request_destroy(r);
    opts = base_opts();
    opts.params.n_stop_ids = PGD_MAX_STOP_IDS + 1;
    expect_refused(&opts);
    opts = base_opts();
    opts.params.n_logit_bias = PGD_MAX_LOGIT_BIAS + 1;
    expect_refused(&opts);
    opts = base_opts();
    opts.params.n_logit_bias = -1;
    expect_refused(&opts);
}

/* Feeds the tokens until it stops; returns how many were taken. */
static int feed(request *r, const token_id *tokens, int n_tokens)
{
    for (int i = 0; i < n_tokens; i++) {
        request_append_token(r, tokens[i], NULL);
        if (request_check_stop(r, 100))
            return i + 1;
    }
    return n_tokens;
}

#define FEED(r, ...) \
    feed(r, (const token_id[]){__VA_ARGS__}, (int)PGD_ARRAY_LEN(((const token_id[]){__VA_ARGS__})))

static void test_request_stops_at_eos(void **state)
{
    (void)state;
    request_opts opts = base_opts();
    request *r = make(&opts);
    assert_int_equal(FEED(r, 10, EOS, 12), 2);
    assert_int_equal(r->status, REQUEST_FINISHED_STOPPED);
    assert_int_equal(r->stop_token, -1);
    assert_int_equal(request_n_output_tokens(r), 2);
    request_destroy(r);
    opts.n_eos_ids = 0; /* ignore_eos */
    r = make(&opts);
    assert_int_equal(FEED(r, EOS, 10, 11), 3);
    assert_false(request_is_finished(r));
    request_destroy(r);
}

static void test_request_stops_at_stop_token(void **state)
{
    (void)state;
    const token_id stop[2] = {41, 42};
    request_opts opts = base_opts();
    opts.params.stop_ids = stop;
    opts.params.n_stop_ids = 2;
    request *r = make(&opts);
    assert_int_equal(FEED(r, 10, 42, 12), 2);
    assert_int_equal(r->status, REQUEST_FINISHED_STOPPED);
    assert_int_equal(r->stop_token, 42);
    request_destroy(r);
}

static void test_request_length_caps(void **state)
{
    (void)state;
    request_opts opts = base_opts();
    opts.max_tokens = 2;
    request *r = make(&opts);
    assert_int_equal(FEED(r, 10, 11, 12), 2);
    assert_int_equal(r->status, REQUEST_FINISHED_LENGTH_CAPPED);
    request_destroy(r);
    /* EOS on the last token counts as a stop. */
    r = make(&opts);
    assert_int_equal(FEED(r, 10, EOS), 2);
    assert_int_equal(r->status, REQUEST_FINISHED_STOPPED);
    request_destroy(r);
    /* The model length given later may be smaller. */
    opts.max_tokens = 50;
    r = make(&opts);
    request_append_token(r, 10, NULL);
    assert_false(request_check_stop(r, 7));
    request_append_token(r, 10, NULL);
    assert_true(request_check_stop(r, 7));
    assert_int_equal(r->status, REQUEST_FINISHED_LENGTH_CAPPED);
    request_destroy(r);
}

static void test_request_min_tokens(void **state)
{
    (void)state;
    request_opts opts = base_opts();
    opts.params.min_tokens = 5;
    request *r = make(&opts);
    assert_int_equal(FEED(r, 10, 11, EOS), 3);
    assert_false(request_is_finished(r));
    assert_int_equal(FEED(r, 10, 11, 12, 13, 14, EOS, 15), 6);
    assert_int_equal(r->status, REQUEST_FINISHED_STOPPED);
    assert_int_equal(request_n_output_tokens(r), 9);
    request_destroy(r);
    /* With the fifth it may end. */
    r = make(&opts);
    assert_int_equal(FEED(r, 10, 11, 12, EOS, EOS, 13), 5);
    assert_int_equal(r->status, REQUEST_FINISHED_STOPPED);
    request_destroy(r);
    /* No min_tokens beats the room that there is. */
    opts.max_tokens = 3;
    r = make(&opts);
    assert_int_equal(FEED(r, EOS, EOS, EOS), 3);
    assert_int_equal(r->status, REQUEST_FINISHED_LENGTH_CAPPED);
    request_destroy(r);
}

static void test_request_hashes_follow_tokens(void **state)
{
    (void)state;
    const uint8_t seed[32] = {3};
    block_hasher *h;
    assert_int_equal(block_hasher_create(&h, seed), PGD_OK);
    request_opts opts = base_opts();
    opts.hasher = h;
    opts.block_size = 4;
    request *r = make(&opts);
    assert_int_equal(r->n_block_hashes, 1);
    for (int i = 0; i < 11; i++) {
        request_append_token(r, 20 + i, h);
        assert_int_equal(r->n_block_hashes, (6 + i) / 4);
    }
    /* The same tokens as one prompt give the same chain. */
    opts.prompt = r->tokens;
    opts.n_prompt_tokens = r->n_tokens;
    request *whole = make(&opts);
    assert_int_equal(whole->n_block_hashes, r->n_block_hashes);
    assert_memory_equal(whole->block_hashes, r->block_hashes,
                        (size_t)r->n_block_hashes * sizeof(block_hash));
    request_destroy(r);
    request_destroy(whole);
    opts.block_size = 0;
    expect_refused(&opts);
    block_hasher_destroy(h);
}

/* Hashes worked out beforehand are those the request would make, and its chain goes on from them. */
static void test_request_takes_prompt_hashes(void **state)
{
    (void)state;
    const uint8_t seed[32] = {3};
    static const char *const salts[] = {NULL, "tenant"};
    block_hasher *h;
    assert_int_equal(block_hasher_create(&h, seed), PGD_OK);
    token_id prompt[40];
    for (int i = 0; i < 40; i++)
        prompt[i] = 7 * i;
    for (int32_t n = 1; n <= 40; n++) {
        for (size_t s = 0; s < PGD_ARRAY_LEN(salts); s++) {
            request_opts opts = base_opts();
            opts.hasher = h;
            opts.block_size = 4;
            opts.prompt = prompt;
            opts.n_prompt_tokens = n;
            opts.max_tokens = 8;
            opts.max_model_len = 64;
            opts.cache_salt = salts[s];
            request *inside = make(&opts);
            block_hash *hashes;
            assert_int_equal(request_hash_prompt(&hashes, h, prompt, n, 4, salts[s]), PGD_OK);
            opts.prompt_hashes = hashes;
            request *given = make(&opts);
            mem_free(hashes);
            for (int i = 0; i < 8; i++) {
                assert_int_equal(given->n_block_hashes, (n + i) / 4);
                assert_int_equal(inside->n_block_hashes, (n + i) / 4);
                assert_memory_equal(given->block_hashes, inside->block_hashes,
                                    (size_t)given->n_block_hashes * sizeof(block_hash));
                request_append_token(given, 900 + i, h);
                request_append_token(inside, 900 + i, h);
            }
            request_destroy(inside);
            request_destroy(given);
        }
    }
    block_hasher_destroy(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_request_prompt_logprobs),
        cmocka_unit_test(test_request_copies_everything),
        cmocka_unit_test(test_request_limits),
        cmocka_unit_test(test_request_stops_at_eos),
        cmocka_unit_test(test_request_stops_at_stop_token),
        cmocka_unit_test(test_request_length_caps),
        cmocka_unit_test(test_request_min_tokens),
        cmocka_unit_test(test_request_hashes_follow_tokens),
        cmocka_unit_test(test_request_takes_prompt_hashes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
