/* The JSON of choices: tokens, offsets and log probabilities, cut into chunks or whole; echoed prompts
 * given as text and as ids. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/json.h"
#include "common/mem.h"
#include "engine/http/completion_render.h"

static tokenizer *tok;

static token_id find(const char *text)
{
    token_id id = tokenizer_find(tok, text, strlen(text));
    if (id < 0)
        fail_msg("no token \"%s\"", text);
    return id;
}

static cJSON *render(const completion_render *r)
{
    strbuf b;
    cJSON *tree;
    pgd_why why = {{0}};
    strbuf_init(&b);
    completion_render_append_choice(&b, r, 3);
    assert_false(b.failed);
    if (json_parse(&tree, b.data, b.n_bytes, 8, &why) != PGD_OK)
        fail_msg("%s: %s", why.text, b.data);
    strbuf_deinit(&b);
    return tree;
}

static double number_at(const cJSON *tree, const char *array, int i)
{
    return cJSON_GetArrayItem(json_get(json_get(tree, "logprobs"), array), i)->valuedouble;
}

static int n_rows(const cJSON *tree)
{
    return cJSON_GetArraySize(json_get(json_get(tree, "logprobs"), "tokens"));
}

static void encode(token_id **ids, int32_t *n_ids, const char *text)
{
    assert_int_equal(
        tokenizer_encode(ids, n_ids, tok, text, strlen(text), TOKENIZER_PARSE_SPECIAL, 1000),
        PGD_OK);
}

static void test_completion_render_plain(void **state)
{
    (void)state;
    completion_render r;
    completion_render_init(&r, tok, false, false, true);
    completion_render_add_text(&r, "a\"b", 3);
    cJSON *t = render(&r);
    assert_string_equal(json_string(json_get(t, "text")), "a\"b");
    assert_int_equal(json_get(t, "index")->valueint, 3);
    assert_true(json_get(t, "logprobs") == NULL && json_get(t, "token_ids") == NULL);
    cJSON_Delete(t);
    completion_render_deinit(&r);
}

/* Whatever the bytes of a prompt: with a row for each token, offsets that rise within the text, and
 * generated tokens at its end; as text and as ids. */
static void test_completion_render_echo_offsets(void **state)
{
    (void)state;
    static const char *const texts[] = {"In the beginning", " a  b ",
                                        "Gr\xC3\xBC\xC3\x9F"
                                        "e \xE4\xB8\x96\xE7\x95\x8C",
                                        "\xF0\x9F\x98\x80\xF0\x9F\x91\xA9\xE2\x80\x8D", "x"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(texts); i++) {
        token_id *ids;
        int32_t n_ids;
        int n_chars = 0;
        for (const char *s = texts[i]; *s != '\0'; s++)
            n_chars += ((unsigned char)*s & 0xC0) != 0x80;
        encode(&ids, &n_ids, texts[i]);
        token_logprob *lp = mem_calloc((size_t)n_ids * 2, sizeof(*lp));
        for (int32_t k = 0; k < n_ids; k++) {
            lp[2 * k] = (token_logprob){ids[k], -(float)k};
            lp[2 * k + 1] = (token_logprob){ids[0], -0.5f};
        }
        for (int as_ids = 0; as_ids < 2; as_ids++) {
            completion_render r;
            completion_render_init(&r, tok, true, true, true);
            completion_render_prompt prompt = {.text = as_ids ? NULL : texts[i],
                                               .n_text_bytes = as_ids ? 0 : strlen(texts[i]),
                                               .ids = ids,
                                               .n_ids = n_ids,
                                               .logprobs = lp,
                                               .n_logprobs_per_token = 2};
            completion_render_add_prompt_ids(&r, ids, n_ids);
            completion_render_echo(&r, &prompt);
            generation_token next = {
                .id = ids[0], .n_logprobs = 1, .logprobs = {{ids[0], -INFINITY}}};
            completion_render_add_token(&r, &next);
            cJSON *t = render(&r);
            assert_string_equal(json_string(json_get(t, "text")), texts[i]);
            assert_int_equal(n_rows(t), n_ids + 1);
            assert_true(cJSON_IsNull(
                cJSON_GetArrayItem(json_get(json_get(t, "logprobs"), "token_logprobs"), 0)));
            assert_true(cJSON_IsNull(
                cJSON_GetArrayItem(json_get(json_get(t, "logprobs"), "top_logprobs"), 0)));
            for (int32_t k = 1; k < n_ids; k++) {
                assert_true(number_at(t, "token_logprobs", k) == -k);
                assert_true(number_at(t, "text_offset", k) >= number_at(t, "text_offset", k - 1));
            }
            assert_true(number_at(t, "text_offset", 0) == 0);
            assert_true(number_at(t, "text_offset", n_ids) == n_chars);
            assert_true(number_at(t, "token_logprobs", n_ids) == -9999);
            assert_int_equal(cJSON_GetArraySize(json_get(t, "prompt_token_ids")), n_ids);
            assert_int_equal(cJSON_GetArraySize(json_get(t, "token_ids")), 1);
            cJSON_Delete(t);

            /* The next chunk has only what is new, and goes on counting. */
            completion_render_reset(&r);
            completion_render_add_token(&r, &next);
            t = render(&r);
            assert_int_equal(n_rows(t), 1);
            assert_true(number_at(t, "text_offset", 0) >= n_chars);
            assert_null(json_get(t, "prompt_token_ids"));
            cJSON_Delete(t);
            completion_render_deinit(&r);
        }
        mem_free(lp);
        mem_free(ids);
    }
}

/* A special token takes a place only where the text shows it. */
static void test_completion_render_special_tokens(void **state)
{
    (void)state;
    token_id special = -1;
    for (token_id id = 0; id < tokenizer_vocab_size(tok) && special < 0; id++)
        special = tokenizer_is_special(tok, id) ? id : -1;
    assert_true(special >= 0);
    size_t n_name;
    const char *name = tokenizer_piece(tok, special, &n_name);
    const token_id ids[] = {special, find("a"), special, find("b")};
    token_logprob lp[4] = {{ids[0], 0}, {ids[1], -1}, {ids[2], -2}, {ids[3], -3}};
    strbuf text;
    strbuf_init(&text);
    strbuf_append_char(&text, 'a');
    strbuf_append(&text, name, n_name);
    strbuf_append_char(&text, 'b');
    const struct {
        const char *text;
        size_t n_bytes;
        bool skip_special;
        int want[4];
    } cases[] = {
        {NULL, 0, true, {0, 0, 1, 1}},
        {NULL, 0, false, {0, (int)n_name, (int)n_name + 1, 2 * (int)n_name + 1}},
        {text.data, text.n_bytes, true, {0, 0, 1, (int)n_name + 1}}, /* the first one was added */
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        completion_render r;
        completion_render_init(&r, tok, false, true, cases[i].skip_special);
        completion_render_prompt prompt = {.text = cases[i].text,
                                           .n_text_bytes = cases[i].n_bytes,
                                           .ids = ids,
                                           .n_ids = 4,
                                           .logprobs = lp,
                                           .n_logprobs_per_token = 1};
        completion_render_echo(&r, &prompt);
        cJSON *t = render(&r);
        for (int k = 0; k < 4; k++)
            assert_true(number_at(t, "text_offset", k) == cases[i].want[k]);
        cJSON_Delete(t);
        completion_render_deinit(&r);
    }
    strbuf_deinit(&text);
}

/* Pieces of characters read the same: one key, with the best value; the token itself is there. */
static void test_completion_render_equal_texts(void **state)
{
    (void)state;
    token_id parts[3];
    int n = 0;
    for (token_id id = 0; id < tokenizer_vocab_size(tok) && n < 3; id++) {
        size_t n_bytes;
        const char *piece = tokenizer_piece(tok, id, &n_bytes);
        if (n_bytes == 1 && (unsigned char)piece[0] >= 0x80)
            parts[n++] = id;
    }
    assert_int_equal(n, 3);
    generation_token token = {
        .id = parts[2],
        .n_logprobs = 4,
        .logprobs = {{parts[2], -3}, {parts[0], -0.5f}, {find("a"), -1}, {parts[1], -2}}};
    completion_render r;
    completion_render_init(&r, tok, false, true, true);
    completion_render_add_token(&r, &token);
    cJSON *t = render(&r);
    const cJSON *top = cJSON_GetArrayItem(json_get(json_get(t, "logprobs"), "top_logprobs"), 0);
    assert_int_equal(cJSON_GetArraySize(top), 2);
    assert_true(json_get(top, "\xEF\xBF\xBD")->valuedouble == -0.5);
    assert_true(json_get(top, "a")->valuedouble == -1);
    assert_true(number_at(t, "token_logprobs", 0) == -3);
    cJSON_Delete(t);
    completion_render_deinit(&r);
}

static int set_up(void **state)
{
    pgd_why why = {{0}};
    (void)state;
    if (tokenizer_create_from_dir(&tok, "tests/data/tokenizers/gpt2", &why) != PGD_OK)
        fail_msg("%s", why.text);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    tokenizer_destroy(tok);
    return 0;
}

static void expect_usage(const completion_usage *usage, const char *want)
{
    strbuf b;
    strbuf_init(&b);
    completion_render_append_usage(&b, usage);
    strbuf_append_char(&b, '\0');
    assert_false(b.failed);
    assert_string_equal(b.data, want);
    strbuf_deinit(&b);
}

static void test_completion_render_usage(void **state)
{
    (void)state;
    completion_usage usage = {.n_prompt_tokens = 100,
                              .n_output_tokens = 7,
                              .n_cached_tokens = 96,
                              .n_host_tokens = 48,
                              .n_disk_tokens = 16};
    expect_usage(&usage,
                 "\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":7,\"total_tokens\":107,"
                 "\"prompt_tokens_details\":{\"cached_tokens\":96}}");
    usage.has_tiers = true;
    expect_usage(&usage,
                 "\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":7,\"total_tokens\":107,"
                 "\"prompt_tokens_details\":{\"cached_tokens\":96,\"cached_tokens_details\":"
                 "{\"device\":32,\"host\":48,\"storage\":16}}}");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_completion_render_plain),
        cmocka_unit_test(test_completion_render_echo_offsets),
        cmocka_unit_test(test_completion_render_special_tokens),
        cmocka_unit_test(test_completion_render_equal_texts),
        cmocka_unit_test(test_completion_render_usage),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
