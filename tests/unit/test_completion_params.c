/* The body of a completion request: what is taken, with which values, and a random-bytes sweep (the
 * e2e tests cover the messages). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/hash.h"
#include "common/strbuf.h"
#include "config/config.h"
#include "engine/http/completion_params.h"

static config cfg;
static const sampling_params neutral = {
    .temperature = 1, .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1};

static bool parse(completion_params *p, completion_fault *f, const char *body, size_t n)
{
    memset(f, 0, sizeof(*f));
    return completion_params_parse(p, body, n, &cfg, &neutral, "m", 1000, f);
}

static void test_completion_params_defaults(void **state)
{
    (void)state;
    completion_params p;
    completion_fault f;
    const char *body = "{\"prompt\":\"hi\"}";
    assert_true(parse(&p, &f, body, strlen(body)));
    assert_int_equal(p.n_prompts, 1);
    assert_int_equal(p.n, 1);
    assert_int_equal(p.max_tokens, -1);
    assert_true(p.skip_special && !p.stream && !p.has_seed && p.cache_salt == NULL);
    assert_true(p.sampling.temperature == 1.0f && p.sampling.n_logprobs == -1);
    assert_memory_equal(p.prompts[0].text, "hi", 3);
    completion_params_deinit(&p);
}

static void test_completion_params_all_fields(void **state)
{
    (void)state;
    completion_params p;
    completion_fault f;
    const char *body = "{\"model\":\"m\",\"prompt\":[[1,2,999],[0]],\"max_tokens\":9,\"min_"
                       "tokens\":2,\"n\":3,\"temperature\":0.5,\"top_p\":0.25,"
                       "\"top_k\":-1,\"min_p\":0.125,\"seed\":-7,\"presence_penalty\":-2,"
                       "\"frequency_penalty\":2,\"repetition_penalty\":1.5,"
                       "\"stop\":[\"a\\u0000b\",\"\\u00e9\"],\"stop_token_ids\":[5,6],\"logit_"
                       "bias\":{\"7\":-100,\"8\":1.5},\"logprobs\":4,"
                       "\"ignore_eos\":true,\"stream\":true,\"stream_options\":{\"include_usage\":"
                       "true},\"skip_special_tokens\":false,"
                       "\"include_stop_str_in_output\":true,\"return_token_ids\":true,"
                       "\"return_cached_tokens_details\":true,\"cache_"
                       "salt\":\"s\",\"echo\":true,\"suffix\":\"\","
                       "\"user\":\"u\",\"max_tokens\":3,\"priority\":0}";
    assert_true(parse(&p, &f, body, strlen(body)));
    assert_true(p.n_prompts == 2 && p.prompts[0].n_ids == 3 && p.prompts[0].ids[2] == 999 &&
                p.prompts[1].n_ids == 1);
    assert_true(p.max_tokens == 9 && p.sampling.min_tokens == 2 &&
                p.n == 3); /* the first of two equal names wins */
    assert_true(p.sampling.top_k == 0 && p.sampling.seed == (uint64_t)-7 && p.has_seed);
    assert_true(p.n_stop == 2 && p.stop_bytes[0] == 3 && memcmp(p.stop[0], "a\0b", 3) == 0 &&
                p.stop_bytes[1] == 2);
    assert_true(p.sampling.n_stop_ids == 2 && p.sampling.stop_ids[1] == 6);
    assert_true(p.sampling.n_logit_bias == 2 && p.sampling.logit_bias[0].id == 7 &&
                p.sampling.logit_bias[1].bias == 1.5f);
    assert_true(p.sampling.n_logprobs == 4 && p.ignore_eos && p.stream && p.include_usage &&
                !p.skip_special);
    assert_true(p.include_stop && p.return_token_ids && p.return_cached_details && p.echo);
    assert_true(p.best_of == 3 && p.wants_logprobs);
    assert_int_equal(p.sampling.n_prompt_logprobs_per_token, 5);
    assert_string_equal(p.cache_salt, "s");
    completion_params_deinit(&p);
}

static void expect_fault(const char *body, const char *param)
{
    completion_params p;
    completion_fault f;
    bool ok = parse(&p, &f, body, strlen(body));
    completion_params_deinit(&p);
    if (ok || f.status != 400 || f.param == NULL || strcmp(f.param, param) != 0)
        fail_msg("%s: expected a fault of %s, got %s", body, param, ok ? "none" : f.message);
}

static void test_completion_params_echo_and_best_of(void **state)
{
    (void)state;
    static const struct {
        const char *body;
        bool echo, wants_logprobs;
        int32_t max_tokens, n, best_of, n_logprobs, n_prompt_logprobs;
    } cases[] = {
        {"{\"prompt\":\"a\",\"echo\":true,\"max_tokens\":0}", true, false, 0, 1, 1, -1, 0},
        {"{\"prompt\":\"a\",\"echo\":true,\"logprobs\":0}", true, true, -1, 1, 1, 0, 1},
        {"{\"prompt\":\"a\",\"echo\":false,\"logprobs\":2}", false, true, -1, 1, 1, 2, 0},
        {"{\"prompt\":\"a\",\"best_of\":20,\"n\":2}", false, false, -1, 2, 20, 0, 0},
        {"{\"prompt\":\"a\",\"best_of\":2,\"n\":2}", false, false, -1, 2, 2, -1, 0},
        {"{\"prompt\":\"a\",\"best_of\":4,\"logprobs\":3,\"echo\":true}", true, true, -1, 1, 4, 3,
         4},
        {"{\"prompt\":\"a\",\"best_of\":1,\"stream\":true}", false, false, -1, 1, 1, -1, 0},
        {"{\"prompt\":\"a\",\"n\":128}", false, false, -1, 128, 128, -1, 0},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        completion_params p;
        completion_fault f;
        if (!parse(&p, &f, cases[i].body, strlen(cases[i].body)))
            fail_msg("%s: %s", cases[i].body, f.message);
        assert_true(p.echo == cases[i].echo && p.wants_logprobs == cases[i].wants_logprobs);
        assert_int_equal(p.max_tokens, cases[i].max_tokens);
        assert_int_equal(p.n, cases[i].n);
        assert_int_equal(p.best_of, cases[i].best_of);
        assert_int_equal(p.sampling.n_logprobs, cases[i].n_logprobs);
        assert_int_equal(p.sampling.n_prompt_logprobs_per_token, cases[i].n_prompt_logprobs);
        completion_params_deinit(&p);
    }
    expect_fault("{\"prompt\":\"a\",\"max_tokens\":0}", "max_tokens");
    expect_fault("{\"prompt\":\"a\",\"max_tokens\":-1,\"echo\":true}", "max_tokens");
    expect_fault("{\"prompt\":\"a\",\"max_tokens\":0,\"echo\":true,\"min_tokens\":1}",
                 "min_tokens");
    expect_fault("{\"prompt\":\"a\",\"echo\":\"yes\"}", "echo");
    expect_fault("{\"prompt\":\"a\",\"best_of\":0}", "best_of");
    expect_fault("{\"prompt\":\"a\",\"best_of\":21}", "best_of");
    expect_fault("{\"prompt\":\"a\",\"best_of\":2,\"n\":3}", "best_of");
    expect_fault("{\"prompt\":\"a\",\"best_of\":2,\"stream\":true}", "best_of");
    expect_fault("{\"prompt\":\"a\",\"suffix\":\"b\"}", "suffix");
    expect_fault("{\"prompt\":\"a\",\"prompt_logprobs\":1}", "prompt_logprobs");
    expect_fault("{\"prompt\":\"a\",\"response_format\":{\"type\":\"json_object\"}}",
                 "response_format");
}

/* Bytes of a good body changed at random: a verdict every time, a fault always worded. */
static void test_completion_params_unknown(void **state)
{
    (void)state;
    completion_params p;
    completion_fault f;
    const char *body = "{\"a\":1,\"prompt\":\"x\",\"b\\n\":[],\"c\":null,\"a\":2}";
    assert_true(parse(&p, &f, body, strlen(body)));
    assert_int_equal(p.n_unknown, 2); /* null is left out, and so is a second one of a name */
    assert_string_equal(p.unknown[0], "a");
    assert_string_equal(p.unknown[1], "b\n");
    completion_params_deinit(&p);

    strbuf b;
    strbuf_init(&b);
    strbuf_append_str(&b, "{\"prompt\":\"x\"");
    for (int i = 0; i < COMPLETION_MAX_UNKNOWN + 10; i++)
        strbuf_appendf(&b, ",\"u%d\":0", i);
    strbuf_append_str(&b, ",\"max_tokens\":3}");
    assert_true(parse(&p, &f, b.data, b.n_bytes));
    assert_int_equal(p.n_unknown, COMPLETION_MAX_UNKNOWN);
    assert_string_equal(p.unknown[COMPLETION_MAX_UNKNOWN - 1], "u63");
    assert_int_equal(p.max_tokens, 3);
    completion_params_deinit(&p);
    strbuf_deinit(&b);
}

static void test_completion_params_mutations(void **state)
{
    (void)state;
    static const char seed_body[] = "{\"prompt\":[\"a\",\"b\"],\"stop\":[\"x\"],\"logit_bias\":{"
                                    "\"1\":2},\"max_tokens\":5,\"seed\":1}";
    for (uint64_t i = 0; i < 20000; i++) {
        char body[sizeof(seed_body)];
        memcpy(body, seed_body, sizeof(body));
        for (uint64_t k = 0; k < 1 + i % 4; k++) {
            uint64_t h = hash_u64(i * 8 + k + 1);
            body[h % (sizeof(body) - 1)] = "{}[]\",:0-9eE.\\u\x80"[(h >> 32) % 17];
        }
        completion_params p;
        completion_fault f;
        bool ok = parse(&p, &f, body, sizeof(body) - 1 - i % 3);
        assert_true(ok || ((f.status == 400 || f.status == 404) && f.message[0] != '\0'));
        completion_params_deinit(&p);
    }
}

static int set_up(void **state)
{
    (void)state;
    config_init(&cfg);
    return 0;
}

static void test_completion_params_bounds(void **state)
{
    (void)state;
    completion_params p;
    completion_fault f;
    strbuf b;
    strbuf_init(&b);
    for (int over = 0; over < 2; over++) {
        strbuf_reset(&b); /* "prompt" is one of the fields */
        strbuf_append_str(&b, "{\"prompt\":\"a\"");
        for (int i = 1; i < COMPLETION_MAX_FIELDS + over; i++)
            strbuf_appendf(&b, ",\"user%d\":1", i);
        strbuf_append_str(&b, "}");
        assert_true(parse(&p, &f, b.data, b.n_bytes) == (over == 0));
        assert_true(over == 0 || (f.status == 400 && strstr(f.message, "fields") != NULL));
        completion_params_deinit(&p);

        strbuf_reset(&b);
        strbuf_appendf(&b, "{\"prompt\":\"a\",\"stop\":[\"%0*d\",\"x\"]}",
                       COMPLETION_MAX_STOP_BYTES - 1 + over, 0);
        assert_true(parse(&p, &f, b.data, b.n_bytes) == (over == 0));
        assert_true(over == 0 || (f.status == 400 && strcmp(f.param, "stop") == 0));
        completion_params_deinit(&p);

        strbuf_reset(&b); /* an object, an array and the ids */
        strbuf_append_str(&b, "{\"prompt\":[1");
        for (int i = 4; i <= COMPLETION_MAX_VALUES + over; i++)
            strbuf_append_str(&b, ",1");
        strbuf_append_str(&b, "]}");
        assert_true(parse(&p, &f, b.data, b.n_bytes) == (over == 0));
        assert_true(over == 0 || (f.status == 400 && strstr(f.message, "values") != NULL));
        completion_params_deinit(&p);
    }
    expect_fault("{\"prompt\":\"a\",\"min_tokens\":17}", "min_tokens"); /* max_tokens is 16 */
    expect_fault("{\"prompt\":[\"a\",\"b\",\"c\",\"d\",\"e\"],\"n\":103}", "n"); /* over 512 */
    strbuf_reset(&b);
    strbuf_append_str(&b, "{\"prompt\":\"a\",\"max_tokens\":2147483648}");
    assert_false(parse(&p, &f, b.data, b.n_bytes));
    assert_string_equal(f.message, "max_tokens: expected 0 to 2147483647, got 2147483648");
    completion_params_deinit(&p);
    strbuf_deinit(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_completion_params_defaults),
        cmocka_unit_test(test_completion_params_all_fields),
        cmocka_unit_test(test_completion_params_echo_and_best_of),
        cmocka_unit_test(test_completion_params_unknown),
        cmocka_unit_test(test_completion_params_mutations),
        cmocka_unit_test(test_completion_params_bounds),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
