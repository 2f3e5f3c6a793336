/* What a completion may ask for in all: on each limit, and one over it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/http/completion_limits.h"

static config cfg;
static core_stats stats;
static completion_prompt prompts[COMPLETION_MAX_PROMPTS];
static completion_params params;
static completion_fault fault;
static int32_t max_source;

static int setup(void **state)
{
    (void)state;
    config_init(&cfg);
    memset(&stats, 0, sizeof(stats));
    memset(prompts, 0, sizeof(prompts));
    stats.max_model_len = 100;
    max_source = 0;
    prompts[0].n_ids = 10;
    params = (completion_params){.prompts = prompts,
                                 .n_prompts = 1,
                                 .n = 1,
                                 .best_of = 1,
                                 .max_tokens = -1,
                                 .sampling = {.n_logprobs = -1}};
    return 0;
}

static bool allows(void)
{
    fault = (completion_fault){0};
    return completion_limits_check(&fault, &params, &stats, &cfg, max_source);
}

static void expect_refused(const char *param, const char *code, const char *words)
{
    assert_false(allows());
    assert_int_equal(fault.status, 400);
    assert_string_equal(fault.param, param);
    if (code != NULL)
        assert_string_equal(fault.code, code);
    else
        assert_null(fault.code);
    if (strstr(fault.message, words) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", words, fault.message);
}

/* Prompt and completion have a limit each. */
static void test_completion_limits_encoder(void **state)
{
    (void)state;
    max_source = 300;
    params.max_tokens = 99;
    prompts[0].n_ids = 300;
    assert_true(allows());
    prompts[0].n_ids = 301;
    expect_refused("prompt", "context_length_exceeded", "at most 300 tokens. You requested 301");
    prompts[0].n_ids = 0;
    expect_refused("prompt", NULL, "empty");
    prompts[0].n_ids = 1;
    params.max_tokens = 100;
    expect_refused("max_tokens", "context_length_exceeded", "at most 99 tokens here");
    stats.max_pool_len = 40;
    params.max_tokens = 41;
    expect_refused("max_tokens", "context_length_exceeded", "at most 40 tokens here");
    params.max_tokens = 40;
    assert_true(allows());
    params.echo = true;
    expect_refused("echo", NULL, "encoder");
}

static void test_completion_limits_context(void **state)
{
    (void)state;
    assert_true(allows());
    params.max_tokens = 90;
    assert_true(allows());
    params.max_tokens = 91;
    expect_refused("max_tokens", "context_length_exceeded", "10 tokens in the prompt and 91");
    params.max_tokens = INT32_MAX;
    expect_refused("max_tokens", "context_length_exceeded", "2147483647");
    params.max_tokens = -1;
    prompts[0].n_ids = 99; /* one output token has room, the default of 16 is cut */
    assert_true(allows());
    prompts[0].n_ids = 100;
    expect_refused("prompt", "context_length_exceeded", "100 tokens in the prompt and 1 ");
    prompts[0].n_ids = 0;
    expect_refused("prompt", NULL, "empty prompt");
    prompts[0].n_ids = 10;
    params.n_prompts = 2; /* the second one is empty */
    expect_refused("prompt", NULL, "empty prompt");
}

static void test_completion_limits_pool(void **state)
{
    (void)state;
    stats.max_pool_len = 32;
    params.max_tokens = 23; /* 10 + 22 computed: the last token only comes out */
    assert_true(allows());
    params.max_tokens = 24;
    expect_refused("max_tokens", "context_length_exceeded", "holds 32 tokens");
    params.max_tokens = 1;
    prompts[0].n_ids = 32;
    assert_true(allows());
    prompts[0].n_ids = 33;
    expect_refused("prompt", "context_length_exceeded", "holds 32 tokens");
    stats.max_pool_len = 0; /* not known yet */
    assert_true(allows());
}

/* 512 MB of tokens of 32 bytes are 2^24. */
static void test_completion_limits_whole_answer(void **state)
{
    (void)state;
    stats.max_model_len = INT32_MAX;
    params.max_tokens = 1 << 24;
    assert_true(allows());
    params.max_tokens++;
    expect_refused("max_tokens", NULL, "stream = true");
    params.stream = true;
    assert_true(allows());
    params.stream = false;
    params.max_tokens = (1 << 24) / 256;
    params.n_prompts = COMPLETION_MAX_PROMPTS;
    for (int i = 0; i < COMPLETION_MAX_PROMPTS; i++)
        prompts[i].n_ids = 1;
    assert_true(allows());
    params.best_of = 2;
    expect_refused("max_tokens", NULL, "best_of");
    params.best_of = 1;
    params.wants_logprobs = true;
    params.sampling.n_logprobs = 0;
    expect_refused("max_tokens", NULL, "logprobs");
    params.sampling.n_logprobs = 1;
    expect_refused("logprobs", NULL, "logprobs");
    params.wants_logprobs = false;
    params.echo = true; /* one token of each prompt more */
    expect_refused("max_tokens", NULL, "echo");
    params.max_tokens--;
    assert_true(allows());
    params.max_tokens = INT32_MAX - 1; /* the largest product */
    params.best_of = COMPLETION_MAX_N;
    params.wants_logprobs = true;
    params.sampling.n_logprobs = PGD_MAX_LOGPROBS;
    expect_refused("logprobs", NULL, "MB");
}

static void test_completion_limits_streamed_echo(void **state)
{
    (void)state;
    stats.max_model_len = INT32_MAX;
    params.stream = true;
    params.echo = true;
    cfg.max_output_buffer_bytes = 32 * 1000;
    prompts[0].n_ids = 1000;
    assert_true(allows());
    prompts[0].n_ids = 1001;
    expect_refused("echo", NULL, "max_output_buffer_bytes");
    params.echo = false;
    assert_true(allows());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_completion_limits_context, setup),
        cmocka_unit_test_setup(test_completion_limits_encoder, setup),
        cmocka_unit_test_setup(test_completion_limits_pool, setup),
        cmocka_unit_test_setup(test_completion_limits_whole_answer, setup),
        cmocka_unit_test_setup(test_completion_limits_streamed_echo, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
