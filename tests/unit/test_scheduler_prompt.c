/* Scheduler: log probabilities of prompt tokens, over chunks, preemption and a lost worker. */
#include "tests/unit/scheduler_fixture.h"

static fix f;

static void expect_scores(uint64_t id, int32_t n_prompt, int32_t n_per_token)
{
    const token_logprob *got = f.prompt_logprobs[id];
    assert_non_null(got);
    for (int32_t t = 1; t < n_prompt; t++) {
        for (int32_t k = 0; k < n_per_token; k++) {
            token_logprob want = fix_prompt_logprob(t, k);
            assert_int_equal(got[t * n_per_token + k].id, want.id);
            assert_true(got[t * n_per_token + k].logprob == want.logprob);
        }
    }
}

static const step_entry *entry(int32_t step_idx, int32_t idx)
{
    return &scheduler__record_at(f.s, step_idx)->entries[idx];
}

static void test_scheduler_prompt_in_chunks(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.long_prefill_token_threshold = 7;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 20, .n_prompt_logprobs = 3, .max_tokens = 2);
    static const int32_t want[] = {7, 7, 5}; /* the last position predicts no prompt token */
    for (int i = 0; i < 3; i++) {
        assert_true(fix_schedule(&f));
        assert_int_equal(entry(0, 0)->n_prompt_results, want[i]);
        if (i == 0)
            assert_int_equal(fix_new_msg(&f, 0)->params.n_prompt_logprobs_per_token, 3);
        assert_null(f.prompt_logprobs[0]);
        fix_answer_all(&f);
    }
    assert_int_equal(f.n_tokens[0], 1);
    expect_scores(0, 20, 3);
    assert_true(fix_schedule(&f));
    assert_int_equal(entry(0, 0)->n_prompt_results, 0);
    fix_answer_all(&f);
    assert_int_equal(f.n_finished[0], 1);
    fix_deinit(&f);
}

static void test_scheduler_prompt_of_one_token(void **state)
{
    (void)state;
    fix_init(&f, fix_opts());
    FIX_ADD(&f, .n_prompt = 1, .n_prompt_logprobs = 1, .max_tokens = 1);
    assert_true(fix_schedule(&f));
    assert_int_equal(entry(0, 0)->n_prompt_results, 0);
    fix_answer_all(&f);
    assert_non_null(f.prompt_logprobs[0]); /* token 0 has none: nothing to look at */
    fix_deinit(&f);
}

/* HS8: no lookup, so that every position is computed; but what it computes can be found. */
static void test_scheduler_prompt_skips_the_prefix_cache(void **state)
{
    (void)state;
    fix_init(&f, fix_opts());
    FIX_ADD(&f, .n_prompt = 64, .n_common = 64, .max_tokens = 1);
    fix_step(&f);
    FIX_ADD(&f, .n_prompt = 64, .n_common = 64, .max_tokens = 1, .n_prompt_logprobs = 1);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_new_msg(&f, 1)->n_computed_tokens, 0);
    assert_int_equal(entry(0, 0)->n_prompt_results, 63);
    fix_answer_all(&f);
    expect_scores(1, 64, 1);
    FIX_ADD(&f, .n_prompt = 64, .n_common = 64, .max_tokens = 1);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_new_msg(&f, 2)->n_computed_tokens, 48);
    fix_answer_all(&f);
    scheduler_stats stats;
    scheduler_get_stats(f.s, &stats);
    assert_int_equal(stats.n_prefix_queries_tokens, 128);
    fix_deinit(&f);
}

/* The worker dies with the second of three chunks out: the prompt is computed from its start. */
static void test_scheduler_prompt_survives_a_lost_worker(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.long_prefill_token_threshold = 10;
    opts.async = true;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 30, .n_prompt_logprobs = 2, .max_tokens = 2);
    assert_true(fix_schedule(&f));
    assert_true(fix_schedule(&f));
    fix_answer_all(&f);
    scheduler_reset_worker(f.s);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_new_msg(&f, 0)->n_computed_tokens, 0);
    assert_int_equal(fix_new_msg(&f, 0)->params.n_prompt_logprobs_per_token, 2);
    assert_int_equal(entry(0, 0)->n_prompt_results, 10);
    fix_answer_all(&f);
    fix_step(&f);
    assert_null(f.prompt_logprobs[0]);
    fix_step(&f);
    expect_scores(0, 30, 2);
    /* From here on it is a request like any other: recomputed without scores, from the cache. */
    scheduler_reset_worker(f.s);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_new_msg(&f, 0)->params.n_prompt_logprobs_per_token, 0);
    assert_int_equal(entry(0, 0)->n_prompt_results, 0);
    fix_answer_all(&f);
    fix_step(&f);
    fix_step(&f);
    fix_step(&f);
    assert_int_equal(f.n_tokens[0], 2);
    assert_int_equal(f.n_finished[0], 1);
    fix_deinit(&f);
}

static pgd_err answer_with(const prompt_result_msg *prompts, int32_t n_prompts, request_error error)
{
    static token_logprob logprobs[64];
    request_result_msg res = {.request_id = 0, .request_epoch = 1, .error = error};
    step_result result = {.step_id = scheduler__record_at(f.s, 0)->step_id,
                          .n_results = error != REQUEST_ERROR_NONE,
                          .results = &res,
                          .n_prompt_results = n_prompts,
                          .prompt_results = prompts,
                          .n_prompt_logprobs = 64,
                          .prompt_logprobs = logprobs};
    return scheduler_update(f.s, &result);
}

static void test_scheduler_prompt_faulty_results_change_nothing(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.long_prefill_token_threshold = 10;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 30, .n_prompt_logprobs = 2, .max_tokens = 2);
    assert_true(fix_schedule(&f));
    const prompt_result_msg good = {
        .request_epoch = 1, .first_token = 1, .n_tokens = 10, .n_logprobs_per_token = 2};
    prompt_result_msg two[2] = {good, good};
    assert_int_equal(answer_with(NULL, 0, REQUEST_ERROR_NONE), PGD_EPROTO);
    assert_int_equal(answer_with(two, 2, REQUEST_ERROR_NONE), PGD_EPROTO);
    prompt_result_msg bad = good;
    bad.request_id = 9;
    assert_int_equal(answer_with(&bad, 1, REQUEST_ERROR_NONE), PGD_EPROTO);
    bad = good;
    bad.request_epoch = 2;
    assert_int_equal(answer_with(&bad, 1, REQUEST_ERROR_NONE), PGD_EPROTO);
    bad = good;
    bad.first_token = 2;
    assert_int_equal(answer_with(&bad, 1, REQUEST_ERROR_NONE), PGD_EPROTO);
    bad = good;
    bad.n_tokens = 9;
    assert_int_equal(answer_with(&bad, 1, REQUEST_ERROR_NONE), PGD_EPROTO);
    bad = good;
    bad.n_logprobs_per_token = 3;
    assert_int_equal(answer_with(&bad, 1, REQUEST_ERROR_NONE), PGD_EPROTO);
    bad = good;
    bad.first_logprob = 45;
    assert_int_equal(answer_with(&bad, 1, REQUEST_ERROR_NONE), PGD_EPROTO);
    scheduler_check(f.s);
    /* A request that fails in the step owes none. */
    assert_int_equal(answer_with(NULL, 0, REQUEST_ERROR_NAN_LOGITS), PGD_OK);
    assert_int_equal(f.status[0], REQUEST_FINISHED_ERROR);
    fix_deinit(&f);
}

/* Results of a request that ended meanwhile are checked and dropped. */
static void test_scheduler_prompt_abort_in_flight(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.long_prefill_token_threshold = 10;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 30, .n_prompt_logprobs = 2, .max_tokens = 2);
    assert_true(fix_schedule(&f));
    assert_true(scheduler_finish_request(f.s, 0, REQUEST_FINISHED_ABORTED));
    assert_int_equal(f.n_released[0], 0);
    fix_answer_all(&f);
    assert_int_equal(f.n_released[0], 1);
    assert_null(f.prompt_logprobs[0]);
    assert_true(fix_schedule(&f)); /* the finished id */
    fix_answer_all(&f);
    fix_deinit(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler_prompt_in_chunks),
        cmocka_unit_test(test_scheduler_prompt_of_one_token),
        cmocka_unit_test(test_scheduler_prompt_skips_the_prefix_cache),
        cmocka_unit_test(test_scheduler_prompt_survives_a_lost_worker),
        cmocka_unit_test(test_scheduler_prompt_faulty_results_change_nothing),
        cmocka_unit_test(test_scheduler_prompt_abort_in_flight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
