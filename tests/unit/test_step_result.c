/* Results on the wire: round trips of random results, hostile frames, the rules between fields. */
#include "tests/unit/proto_samples.h"

static sample_arena arena_;
static wire_scratch scratch_;

static pgd_err decode_result(void *out, wire_scratch *scratch, const void *data, size_t n_bytes,
                             const wire_limits *limits, pgd_why *why)
{
    return step_result_decode(out, scratch, data, n_bytes, limits, why);
}

static void start(uint64_t seed)
{
    sample_arena_init(&arena_, seed);
    free(scratch_.data);
    scratch_ = scratch_make(step_result_scratch_bytes(&arena_.limits));
}

static void test_step_result_round_trip(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 500; seed++) {
        step_result in;
        step_result out;
        pgd_why why = {0};
        start(seed);
        sample_result(&arena_, &in);
        frame f = frame_encode(WIRE_RESULT, &step_result_record, &in);
        assert_true(f.n_bytes <= step_result_max_frame_bytes(&arena_.limits));
        if (step_result_decode(&out, &scratch_, f.data, f.n_bytes, &arena_.limits, &why) != PGD_OK)
            fail_msg("seed %llu: %s", (unsigned long long)seed, why.text);
        assert_true(in.step_id == out.step_id && in.forward_us == out.forward_us &&
                    in.total_us == out.total_us && in.idle_us == out.idle_us);
        assert_int_equal(in.n_results, out.n_results);
        for (int i = 0; i < in.n_results; i++) {
            const request_result_msg *x = &in.results[i];
            const request_result_msg *y = &out.results[i];
            assert_true(x->request_id == y->request_id && x->request_epoch == y->request_epoch);
            assert_int_equal(x->n_tokens, y->n_tokens);
            assert_memory_equal(x->tokens, y->tokens, (size_t)x->n_tokens * sizeof x->tokens[0]);
            assert_int_equal(x->n_drafts, y->n_drafts);
            assert_memory_equal(x->drafts, y->drafts, (size_t)x->n_drafts * sizeof x->drafts[0]);
            assert_int_equal(x->first_logprob, y->first_logprob);
            assert_int_equal(x->n_logprobs_per_token, y->n_logprobs_per_token);
            assert_int_equal(x->error, y->error);
        }
        assert_int_equal(in.n_logprobs, out.n_logprobs);
        if (in.n_logprobs > 0)
            assert_memory_equal(in.logprobs, out.logprobs,
                                (size_t)in.n_logprobs * sizeof(token_logprob));
        assert_int_equal(in.n_prompt_results, out.n_prompt_results);
        for (int i = 0; i < in.n_prompt_results; i++) {
            const prompt_result_msg *x = &in.prompt_results[i];
            const prompt_result_msg *y = &out.prompt_results[i];
            assert_true(x->request_id == y->request_id && x->request_epoch == y->request_epoch);
            assert_int_equal(x->first_token, y->first_token);
            assert_int_equal(x->n_tokens, y->n_tokens);
            assert_int_equal(x->n_logprobs_per_token, y->n_logprobs_per_token);
            assert_int_equal(x->first_logprob, y->first_logprob);
        }
        assert_int_equal(in.n_prompt_logprobs, out.n_prompt_logprobs);
        if (in.n_prompt_logprobs > 0)
            assert_memory_equal(in.prompt_logprobs, out.prompt_logprobs,
                                (size_t)in.n_prompt_logprobs * sizeof(token_logprob));
        free(f.data);
    }
}

static void test_step_result_hostile(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        step_result in;
        start(seed * 77);
        sample_result(&arena_, &in);
        frame f = frame_encode(WIRE_RESULT, &step_result_record, &in);
        check_frame_hostile(f, WIRE_RESULT, &step_result_record, decode_result, &scratch_,
                            &arena_.limits);
        free(f.data);
    }
}

static void expect(const step_result *in, const char *why_part)
{
    step_result out;
    pgd_why why = {0};
    frame f = frame_encode(WIRE_RESULT, &step_result_record, in);
    pgd_err err = step_result_decode(&out, &scratch_, f.data, f.n_bytes, &arena_.limits, &why);
    free(f.data);
    if (why_part == NULL) {
        if (err != PGD_OK)
            fail_msg("%s", why.text);
        return;
    }
    assert_int_equal(err, PGD_EPROTO);
    if (strstr(why.text, why_part) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", why_part, why.text);
}

static void test_step_result_rules(void **state)
{
    (void)state;
    start(5);
    token_logprob lp[4] = {{1, -1}, {2, -2}, {3, -3}, {4, -4}};
    request_result_msg r = {
        .request_id = 1, .n_tokens = 2, .tokens = {5, 6}, .n_logprobs_per_token = 2};
    step_result in = {.step_id = 1, .n_results = 1, .results = &r, .n_logprobs = 4, .logprobs = lp};
    expect(&in, NULL);
    r.first_logprob = 1;
    expect(&in, "expected logprobs within 4");
    r.first_logprob = -1;
    expect(&in, "first_logprob");
    r.first_logprob = 0;
    r.error = REQUEST_ERROR_NAN_LOGITS;
    expect(&in, "expected tokens or an error");
    r.n_tokens = 0;
    expect(&in, NULL);
    r.error = REQUEST_ERROR_NONE;
    expect(&in, "expected tokens or an error");
    r.n_tokens = 1;
    r.tokens[0] = arena_.limits.vocab_size;
    expect(&in, "tokens: expected 0..299, got 300");
    r.tokens[0] = -1;
    expect(&in, "tokens");
    r.tokens[0] = 0;
    lp[2].logprob = -INFINITY;
    expect(&in, "finite");
}

static void test_step_result_prompt_rules(void **state)
{
    (void)state;
    start(6);
    token_logprob lp[6] = {{1, -1}, {2, -2}, {3, -3}, {4, -4}, {5, -5}, {6, -6}};
    prompt_result_msg p = {
        .request_id = 1, .first_token = 1, .n_tokens = 3, .n_logprobs_per_token = 2};
    step_result in = {.step_id = 1,
                      .n_prompt_results = 1,
                      .prompt_results = &p,
                      .n_prompt_logprobs = 6,
                      .prompt_logprobs = lp};
    expect(&in, NULL);
    p.first_logprob = 1;
    expect(&in, "expected prompt logprobs within 6");
    p.first_logprob = 0;
    p.n_tokens = 4;
    expect(&in, "expected prompt logprobs within 6");
    p.n_tokens = 0;
    expect(&in, "n_tokens");
    p.n_tokens = arena_.limits.max_num_batched_tokens + 1;
    expect(&in, "n_tokens");
    p.n_tokens = 1;
    p.first_token = 0;
    expect(&in, "first_token");
    p.first_token = arena_.limits.max_model_len + 1;
    expect(&in, "first_token");
    p.first_token = 1;
    p.n_logprobs_per_token = 0;
    expect(&in, "n_logprobs_per_token");
    p.n_logprobs_per_token = arena_.limits.max_logprobs_per_token + 1;
    expect(&in, "n_logprobs_per_token");
    p.n_logprobs_per_token = 1;
    lp[5].logprob = INFINITY;
    expect(&in, "finite");
    lp[5] = (token_logprob){arena_.limits.vocab_size, -1};
    expect(&in, "prompt_logprobs");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_step_result_round_trip),
        cmocka_unit_test(test_step_result_hostile),
        cmocka_unit_test(test_step_result_rules),
        cmocka_unit_test(test_step_result_prompt_rules),
    };
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(scratch_.data);
    return n_failed;
}
