/* Streaming decode: whole characters only, the same text for every tokenizer kind, first spaces. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "common/utf8.h"
#include "engine/text/detokenizer.h"
#include "engine/text/tokenizer_internal.h"

#define FFFD UTF8_REPLACEMENT

static tokenizer *open_dir(const char *name)
{
    char dir[128];
    tokenizer *t;
    pgd_why why = {0};
    strcpy(dir, "tests/data/tokenizers/");
    strcat(dir, name);
    if (tokenizer_create_from_dir(&t, dir, &why) != PGD_OK)
        fail_msg("%s", why.text);
    return t;
}

/* Vocabulary of a small SentencePiece-like tokenizer; `decoder` as in tokenizer.json. */
static tokenizer *make_fallback(const char *decoder)
{
    strbuf json;
    tokenizer *t;
    pgd_why why = {0};
    strbuf_init(&json);
    strbuf_appendf(
        &json,
        "{\"added_tokens\":[{\"id\":8,\"content\":\"<s>\",\"special\":true,\"normalized\":false}],"
        "\"decoder\":%s,\"model\":{\"type\":\"BPE\",\"byte_fallback\":true,\"vocab\":{\"a\":0,"
        "\"\\u2581\":1,\"\\u2581\\u2581a\":2,\"<0xF0>\":3,\"<0x9F>\":4,\"<0x99>\":5,\"<0x82>\":6,"
        "\"<0x41>\":7},\"merges\":[]}}",
        decoder);
    if (tokenizer_from_json(&t, json.data, json.n_bytes, NULL, 0, &why) != PGD_OK)
        fail_msg("%s", why.text);
    strbuf_deinit(&json);
    return t;
}

#define LLAMA_DECODER                                                                            \
    "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{\"String\":"        \
    "\"\\u2581\"},"                                                                              \
    "\"content\":\" "                                                                            \
    "\"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" \"," \
    "\"start\":1,\"stop\":0}]}"
#define METASPACE_DECODER                                                                          \
    "{\"type\":\"Metaspace\",\"replacement\":\"\\u2581\",\"prepend_scheme\":\"always\",\"split\":" \
    "true}"

static void expect(const tokenizer *t, const token_id *ids, int32_t n, bool skip_special,
                   bool has_prefix, const char *want)
{
    detokenizer d;
    strbuf out;
    strbuf_init(&out);
    detokenizer_init(&d, t, skip_special, has_prefix);
    for (int32_t i = 0; i < n; i++) {
        detokenizer_push(&d, ids[i], &out);
        assert_true(out.n_bytes == 0 || utf8_is_valid(out.data, out.n_bytes, NULL));
    }
    detokenizer_flush(&d, &out);
    assert_int_equal(out.n_bytes, strlen(want));
    assert_memory_equal(out.data == NULL ? "" : out.data, want, out.n_bytes);
    strbuf_deinit(&out);
}

/* Ids of single bytes of a byte-level vocabulary. */
static void expect_bytes(const tokenizer *t, const char *bytes, size_t n, const char *want)
{
    token_id ids[64];
    for (size_t i = 0; i < n; i++) {
        ids[i] = t->byte_ids[(uint8_t)bytes[i]];
        assert_true(ids[i] >= 0);
    }
    expect(t, ids, (int32_t)n, false, false, want);
}

static void test_detokenizer_holds_incomplete_characters(void **state)
{
    (void)state;
    tokenizer *t = open_dir("gpt2");
    const char *text = "a\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x99\x82z";
    static const size_t whole[] = {1, 1, 3, 3,  3, 6,
                                   6, 6, 6, 10, 11}; /* bytes out after each byte in */
    detokenizer d;
    strbuf out;
    strbuf_init(&out);
    detokenizer_init(&d, t, false, false);
    for (size_t i = 0; i < PGD_ARRAY_LEN(whole); i++) {
        detokenizer_push(&d, t->byte_ids[(uint8_t)text[i]], &out);
        assert_int_equal(out.n_bytes, whole[i]);
        assert_memory_equal(out.data, text, whole[i]);
    }
    detokenizer_flush(&d, &out);
    assert_int_equal(out.n_bytes, 11);
    strbuf_deinit(&out);
    tokenizer_destroy(t);
}

static void test_detokenizer_replaces_maximal_parts(void **state)
{
    (void)state;
    tokenizer *t = open_dir("gpt2");
    expect_bytes(t, "a\xFFz", 3, "a" FFFD "z");
    expect_bytes(t, "\xF0\x9F\x99z", 4, FFFD "z"); /* one part of three bytes */
    expect_bytes(t, "\xE4\xB8", 2, FFFD);          /* flushed */
    expect_bytes(t, "\xE4\xE4\xB8\xAD", 4, FFFD "\xE4\xB8\xAD");
    expect_bytes(t, "\xC0\x80", 2, FFFD FFFD);          /* overlong */
    expect_bytes(t, "\xED\xA0\x80", 3, FFFD FFFD FFFD); /* surrogate */
    expect_bytes(t, "\xF4\x90\x80\x80", 4, FFFD FFFD FFFD FFFD);
    expect_bytes(t, "\xF0\x9F\xF0\x9F\x99\x82", 6, FFFD "\xF0\x9F\x99\x82");
    /* Table 3-8 of the Unicode standard. */
    expect_bytes(t, "\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64", 13,
                 "a" FFFD FFFD FFFD "b" FFFD "c" FFFD FFFD "d");
    tokenizer_destroy(t);
}

static void test_detokenizer_emoji_sequence_over_tokens(void **state)
{
    (void)state;
    static const char text[] = "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F"
                               "\x91\xA7 e\xCC\x81 \xE0\xB8\x81\xE0\xB9\x87 \xE4\xB8\xAD";
    static const char *const names[] = {"gpt2",           "llama3",        "smollm",
                                        "mistral-legacy", "mistral-first", "mistral-always"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(names); i++) {
        tokenizer *t = open_dir(names[i]);
        token_id *ids;
        int32_t n;
        assert_int_equal(tokenizer_encode(&ids, &n, t, text, sizeof(text) - 1, 0, 1000), PGD_OK);
        expect(t, ids, n, false, false, text);
        mem_free(ids);
        tokenizer_destroy(t);
    }
}

static void test_detokenizer_byte_fallback(void **state)
{
    (void)state;
    tokenizer *t = make_fallback(LLAMA_DECODER);
    expect(t, (token_id[]){3, 4, 5, 6}, 4, false, false, "\xF0\x9F\x99\x82");
    expect(t, (token_id[]){7, 0}, 2, false, false, "Aa");
    expect(t, (token_id[]){3, 4, 0}, 3, false, false, FFFD FFFD "a"); /* each byte, not one part */
    expect(t, (token_id[]){3, 4}, 2, false, false, FFFD FFFD);
    expect(t, (token_id[]){4, 5}, 2, false, false, FFFD FFFD);
    tokenizer_destroy(t);
}

static void test_detokenizer_first_space(void **state)
{
    (void)state;
    tokenizer *t = make_fallback(LLAMA_DECODER);
    assert_true(tokenizer_strips_first_space(t));
    expect(t, (token_id[]){2, 2}, 2, false, false, " a  a"); /* one space less */
    expect(t, (token_id[]){2, 2}, 2, false, true, "  a  a");
    expect(t, (token_id[]){1, 0}, 2, false, false, "a");
    expect(t, (token_id[]){0, 1}, 2, false, false, "a ");
    expect(t, (token_id[]){8, 1, 0}, 3, false, false, "<s> a");
    expect(t, (token_id[]){8, 1, 0}, 3, true, false, "a");
    tokenizer_destroy(t);
    t = make_fallback(METASPACE_DECODER);
    assert_true(tokenizer_strips_first_space(t));
    expect(t, (token_id[]){2, 2}, 2, false, false, "a  a"); /* all marks of the first token */
    expect(t, (token_id[]){2, 2}, 2, false, true, "  a  a");
    tokenizer_destroy(t);
    t = open_dir("gpt2");
    assert_false(tokenizer_strips_first_space(t));
    tokenizer_destroy(t);
}

static void test_detokenizer_special_tokens(void **state)
{
    (void)state;
    tokenizer *t = open_dir("llama3");
    token_id bos = tokenizer_bos_id(t);
    token_id a = t->byte_ids['a'];
    expect(t, (token_id[]){bos, a}, 2, false, false, "<|begin_of_text|>a");
    expect(t, (token_id[]){bos, a, bos}, 3, true, false, "a");
    /* A special token in the middle of a character is no part of it. */
    expect(t, (token_id[]){t->byte_ids[0xC3], bos, t->byte_ids[0xA9]}, 3, false, false,
           FFFD "<|begin_of_text|>" FFFD);
    expect(t, (token_id[]){t->byte_ids[0xC3], bos, t->byte_ids[0xA9]}, 3, true, false, "\xC3\xA9");
    tokenizer_destroy(t);
}

static void test_detokenizer_ignores_ids_outside_the_vocabulary(void **state)
{
    (void)state;
    tokenizer *t = open_dir("gpt2");
    token_id a = t->byte_ids['a'];
    expect(t, (token_id[]){-1, a, INT32_MAX, tokenizer_vocab_size(t), a, INT32_MIN}, 6, false,
           false, "aa");
    tokenizer_destroy(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_detokenizer_holds_incomplete_characters),
        cmocka_unit_test(test_detokenizer_replaces_maximal_parts),
        cmocka_unit_test(test_detokenizer_emoji_sequence_over_tokens),
        cmocka_unit_test(test_detokenizer_byte_fallback),
        cmocka_unit_test(test_detokenizer_first_space),
        cmocka_unit_test(test_detokenizer_special_tokens),
        cmocka_unit_test(test_detokenizer_ignores_ids_outside_the_vocabulary),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
