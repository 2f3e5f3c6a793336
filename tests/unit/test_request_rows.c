/* Rows of the worker: copies, reuse, and every field of a new request out of range. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "worker/request_rows.h"

enum { MAX_ROWS = 3, MAX_TOKENS = 8, VOCAB = 100 };

static const token_id tokens[] = {1, 2, 3, 4, 99, 98, 97, 96, 95};

static request_rows *make(void)
{
    request_rows *rows;
    request_rows_opts opts = {
        .max_rows = MAX_ROWS, .max_tokens = MAX_TOKENS, .vocab_size = VOCAB, .max_logprobs = 5};
    assert_int_equal(request_rows_create(&rows, &opts), PGD_OK);
    return rows;
}

static new_request_msg message(uint64_t id)
{
    return (new_request_msg){.request_id = id,
                             .request_epoch = 4,
                             .n_prompt_tokens = 3,
                             .n_tokens = 5,
                             .tokens = tokens,
                             .n_computed_tokens = 2,
                             .n_scheduled_tokens = 3,
                             .params = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1}};
}

static void test_request_rows_copies(void **state)
{
    (void)state;
    request_rows *rows = make();
    pgd_why why;
    token_id mine[5], stop[2] = {7, 8};
    logit_bias bias[1] = {{9, 1.5f}};
    int32_t row;
    new_request_msg m = message(0xffffffffffffffffu);
    memcpy(mine, tokens, sizeof(mine));
    m.tokens = mine;
    m.params.stop_ids = stop;
    m.params.n_stop_ids = 2;
    m.params.logit_bias = bias;
    m.params.n_logit_bias = 1;
    assert_int_equal(request_rows_add(rows, &row, &m, &why), PGD_OK);
    memset(mine, 0, sizeof(mine));
    memset(stop, 0, sizeof(stop));
    memset(bias, 0, sizeof(bias));
    const request_row *r = request_rows_get(rows, row);
    assert_int_equal(request_rows_find(rows, m.request_id), row);
    assert_int_equal(r->request_epoch, 4);
    assert_memory_equal(r->tokens, tokens, 5 * sizeof(token_id));
    assert_int_equal(r->params.stop_ids[1], 8);
    assert_int_equal(r->params.logit_bias[0].id, 9);
    assert_int_equal(r->n_computed_tokens, 2);
    for (int32_t i = 5; i < MAX_TOKENS; i++)
        assert_true(request_rows_append_token(rows, row, i));
    assert_false(request_rows_append_token(rows, row, 1));
    assert_int_equal(r->n_tokens, MAX_TOKENS);
    assert_int_equal(r->tokens[MAX_TOKENS - 1], MAX_TOKENS - 1);
    request_rows_destroy(rows);
}

static void test_request_rows_reuse(void **state)
{
    (void)state;
    request_rows *rows = make();
    pgd_why why;
    int32_t row[MAX_ROWS], extra;
    for (int32_t i = 0; i < MAX_ROWS; i++) {
        new_request_msg m = message((uint64_t)i);
        assert_int_equal(request_rows_add(rows, &row[i], &m, &why), PGD_OK);
        for (int32_t j = 0; j < i; j++)
            assert_int_not_equal(row[i], row[j]);
    }
    new_request_msg m = message(50), again = message(1);
    assert_int_equal(request_rows_add(rows, &extra, &m, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "at most 3 requests"));
    assert_int_equal(request_rows_release(rows, 49), -1);
    assert_int_equal(request_rows_release(rows, 1), row[1]);
    assert_int_equal(request_rows_release(rows, 1), -1);
    assert_int_equal(request_rows_n_used(rows), 2);
    assert_int_equal(request_rows_add(rows, &extra, &m, &why), PGD_OK);
    assert_int_equal(extra, row[1]);
    assert_int_equal(request_rows_find(rows, 1), -1);
    assert_int_equal(request_rows_release(rows, 0), row[0]);
    m = message(2);
    assert_int_equal(request_rows_add(rows, &extra, &m, &why), PGD_EPROTO); /* still there */
    for (int32_t i = 0; i < 1000; i++) {
        assert_int_equal(request_rows_add(rows, &extra, &again, &why), PGD_OK);
        assert_int_equal(request_rows_release(rows, again.request_id), extra);
        again.request_id = again.request_id * 2654435761u + 3;
    }
    assert_int_equal(request_rows_n_used(rows), 2);
    request_rows_destroy(rows);
}

/* A message that differs from a good one in one field must be refused and leave nothing behind. */
#define REFUSES(field, value)                                                    \
    do {                                                                         \
        new_request_msg bad_ = message(1);                                       \
        bad_.field = (value);                                                    \
        assert_int_equal(request_rows_add(rows, &row, &bad_, &why), PGD_EPROTO); \
        assert_int_equal(row, -1);                                               \
        assert_int_equal(request_rows_n_used(rows), 0);                          \
        assert_int_equal(request_rows_find(rows, 1), -1);                        \
    } while (0)

static void test_request_rows_refuses(void **state)
{
    (void)state;
    request_rows *rows = make();
    pgd_why why;
    int32_t row;
    REFUSES(n_tokens, 0);
    REFUSES(n_tokens, MAX_TOKENS + 1);
    REFUSES(n_tokens, -1);
    REFUSES(n_prompt_tokens, 0);
    REFUSES(n_prompt_tokens, 6);
    REFUSES(n_computed_tokens, -1);
    REFUSES(n_computed_tokens, 3);
    REFUSES(n_computed_tokens, INT32_MAX);
    REFUSES(n_scheduled_tokens, 4);
    REFUSES(n_scheduled_tokens, -1);
    REFUSES(n_scheduled_tokens, INT32_MAX);
    const token_id negative[5] = {1, 2, -1, 4, 5}, big[5] = {1, 2, 3, 4, VOCAB};
    REFUSES(tokens, negative);
    REFUSES(tokens, big);
    REFUSES(params.temperature, -1);
    REFUSES(params.temperature, NAN);
    REFUSES(params.temperature, INFINITY);
    REFUSES(params.top_p, 0);
    REFUSES(params.top_p, 1.5f);
    REFUSES(params.top_p, NAN);
    REFUSES(params.min_p, -0.1f);
    REFUSES(params.min_p, 1.1f);
    REFUSES(params.top_k, -1);
    REFUSES(params.repetition_penalty, 0);
    REFUSES(params.repetition_penalty, NAN);
    REFUSES(params.presence_penalty, 2.5f);
    REFUSES(params.frequency_penalty, -2.5f);
    REFUSES(params.choice_idx, -1);
    REFUSES(params.n_logprobs, -2);
    REFUSES(params.n_logprobs, 6);
    REFUSES(params.min_tokens, -1);
    REFUSES(params.n_stop_ids, -1);
    REFUSES(params.n_stop_ids, REQUEST_ROWS_MAX_STOP_IDS + 1);
    REFUSES(params.n_logit_bias, PGD_MAX_LOGIT_BIAS + 1);
    REFUSES(params.n_logit_bias, -1);

    new_request_msg m = message(1);
    m.params.n_stop_ids = 3;
    m.params.stop_ids = negative;
    assert_int_equal(request_rows_add(rows, &row, &m, &why), PGD_EPROTO);
    const logit_bias bias[2] = {{VOCAB, 1}, {1, NAN}};
    m = message(1);
    m.params.n_logit_bias = 1;
    m.params.logit_bias = bias;
    assert_int_equal(request_rows_add(rows, &row, &m, &why), PGD_EPROTO);
    m.params.logit_bias = bias + 1;
    assert_int_equal(request_rows_add(rows, &row, &m, &why), PGD_EPROTO);
    m = message(1);
    assert_int_equal(request_rows_add(rows, &row, &m, &why), PGD_OK);
    request_rows_destroy(rows);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_request_rows_copies),
        cmocka_unit_test(test_request_rows_reuse),
        cmocka_unit_test(test_request_rows_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
