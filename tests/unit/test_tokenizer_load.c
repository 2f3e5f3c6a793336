/* Damaged, hostile and unsupported sources: each ends in an error that says what was wrong, or in a
 * working tokenizer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/file.h"
#include "common/mem.h"
#include "engine/text/tokenizer_internal.h"
#include "tests/unit/model_builder.h"

#define MODEL \
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}"
#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"

typedef struct json_case {
    const char *json;
    const char *config;
    pgd_err err;
    const char *says; /* part of the explanation */
} json_case;

static const json_case json_cases[] = {
    {"", NULL, PGD_EFORMAT, "tokenizer.json"},
    {"[]", NULL, PGD_EFORMAT, "object"},
    {"{\"model\":", NULL, PGD_EFORMAT, "tokenizer.json"},
    {"{}", NULL, PGD_EFORMAT, "expected model to be an object"},
    {"{\"model\":[]}", NULL, PGD_EFORMAT, "expected model to be an object"},
    {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", NULL, PGD_EUNSUPPORTED, "Unigram"},
    {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}", NULL, PGD_EUNSUPPORTED, "WordPiece"},
    {"{\"model\":{\"type\":\"BPE\"}}", NULL, PGD_EFORMAT, "model.vocab"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]}}", NULL, PGD_EFORMAT,
     "at least one token"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}", NULL, PGD_EFORMAT,
     "\"a\""},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0.5},\"merges\":[]}}", NULL, PGD_EFORMAT,
     "\"a\""},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":\"0\"},\"merges\":[]}}", NULL, PGD_EFORMAT,
     "\"a\""},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1e300},\"merges\":[]}}", NULL, PGD_EFORMAT,
     "\"a\""},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":4000000},\"merges\":[]}}", NULL, PGD_EFORMAT,
     "dense"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}", NULL, PGD_EFORMAT,
     "one token with id 0"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0}}}", NULL, PGD_EFORMAT, "model.merges"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":{}}}", NULL, PGD_EFORMAT,
     "model.merges"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[1]}}", NULL, PGD_EFORMAT,
     "merges[0]"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a\"]}}", NULL, PGD_EFORMAT,
     "merges[0]"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a a a\"]}}", NULL, PGD_EFORMAT,
     "merges[0]"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]}}", NULL, PGD_EFORMAT,
     "merges[0]"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[[\"a\",2]]}}", NULL, PGD_EFORMAT,
     "merges[0]"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a z\"]}}", NULL, PGD_EFORMAT,
     "\"z\""},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a a\"]}}", NULL, PGD_EFORMAT,
     "\"aa\""},
    {"{\"model\":{\"type\":\"BPE\",\"dropout\":0.1,\"vocab\":{\"a\":0},\"merges\":[]}}", NULL,
     PGD_EUNSUPPORTED, "dropout"},
    {"{\"model\":{\"type\":\"BPE\",\"end_of_word_suffix\":\"</"
     "w>\",\"vocab\":{\"a\":0},\"merges\":[]}}",
     NULL, PGD_EUNSUPPORTED, "</w>"},
    {"{\"model\":{\"type\":\"BPE\",\"continuing_subword_prefix\":\"##\",\"vocab\":{\"a\":0},"
     "\"merges\":[]}}",
     NULL, PGD_EUNSUPPORTED, "##"},
    {"{\"model\":{\"type\":\"BPE\",\"unk_token\":\"u\",\"vocab\":{\"a\":0},\"merges\":[]}}", NULL,
     PGD_EFORMAT, "unk_token"},
    {"{\"model\":{\"type\":\"BPE\",\"byte_fallback\":1,\"vocab\":{\"a\":0},\"merges\":[]}}", NULL,
     PGD_EINVAL, "byte_fallback"},
    {"{\"added_tokens\":{}," MODEL "}", NULL, PGD_EFORMAT, "added_tokens"},
    {"{\"added_tokens\":[3]," MODEL "}", NULL, PGD_EFORMAT, "added_tokens"},
    {"{\"added_tokens\":[{\"id\":3}]," MODEL "}", NULL, PGD_EFORMAT, "content"},
    {"{\"added_tokens\":[{\"id\":99999999,\"content\":\"x\"}]," MODEL "}", NULL, PGD_EFORMAT,
     "added_tokens"},
    {"{\"added_tokens\":[{\"id\":0,\"content\":\"x\"}]," MODEL "}", NULL, PGD_EFORMAT,
     "one token with id 0"},
    {"{\"normalizer\":{\"type\":\"NFKC\"}," MODEL "}", NULL, PGD_EUNSUPPORTED, "NFKC"},
    {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" "
     "+\"},\"content\":\"x\"}," MODEL "}",
     NULL, PGD_EUNSUPPORTED, "Regex"},
    {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\"\"},\"content\":\"x\"}," MODEL
     "}",
     NULL, PGD_EFORMAT, "Replace"},
    {"{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":{}}," MODEL "}", NULL, PGD_EFORMAT,
     "normalizers"},
    {"{\"normalizer\":7," MODEL "}", NULL, PGD_EFORMAT, "normalizer"},
    {"{\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"}," MODEL "}", NULL, PGD_EUNSUPPORTED,
     "BertPreTokenizer"},
    {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\" \"},"
     "\"behavior\":\"MergedWithPrevious\",\"invert\":false}}",
     NULL, PGD_EUNSUPPORTED, "a pre_tokenizer of type \"Split\""}, /* spaces are still there */
    {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":"
     "{\"Regex\":\"[a-z]+\"},"
     "\"behavior\":\"Isolated\",\"invert\":false}," BYTE_LEVEL "]}," MODEL "}",
     NULL, PGD_EUNSUPPORTED, "[a-z]+"},
    {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":"
     "{\"Regex\":\"a\"},"
     "\"behavior\":\"MergedWithNext\",\"invert\":false}," BYTE_LEVEL "]}," MODEL "}",
     NULL, PGD_EUNSUPPORTED, "MergedWithNext"},
    {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Whitespace\"}"
     "," BYTE_LEVEL "]}," MODEL "}",
     NULL, PGD_EUNSUPPORTED, "Whitespace"},
    {"{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"_\"}," MODEL "}", NULL,
     PGD_EUNSUPPORTED, "U+2581"},
    {"{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\\u2581\",\"prepend_scheme\":"
     "\"last\"}," MODEL "}",
     NULL, PGD_EFORMAT, "last"},
    {"{\"decoder\":{\"type\":\"WordPiece\"}," MODEL "}", NULL, PGD_EUNSUPPORTED, "WordPiece"},
    {"{\"decoder\":{\"type\":\"ByteLevel\"}," MODEL "}", NULL, PGD_EUNSUPPORTED, "ByteLevel"},
    {"{\"decoder\":{\"type\":\"Strip\",\"content\":\" \",\"start\":2,\"stop\":0}," MODEL "}", NULL,
     PGD_EUNSUPPORTED, "Strip"},
    {"{\"post_processor\":{\"type\":\"BertProcessing\"}," MODEL "}", NULL, PGD_EUNSUPPORTED,
     "BertProcessing"},
    {"{\"post_processor\":{\"type\":\"RobertaProcessing\",\"cls\":[\"x\",0]}," MODEL "}", NULL,
     PGD_EFORMAT, "\"sep\""},
    {"{\"post_processor\":{\"type\":\"RobertaProcessing\",\"cls\":[\"x\",3]}," MODEL "}", NULL,
     PGD_EFORMAT, "one of the 3 tokens"},
    {"{\"post_processor\":{\"type\":\"RobertaProcessing\",\"cls\":[\"x\",\"y\"]}," MODEL "}", NULL,
     PGD_EFORMAT, "one of the 3 tokens"},
    {"{\"post_processor\":{\"type\":\"TemplateProcessing\"}," MODEL "}", NULL, PGD_EFORMAT,
     "single"},
    {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":"
     "\"x\"}}]}," MODEL "}",
     NULL, PGD_EFORMAT, "\"x\""},
    {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":"
     "\"x\"}}],"
     "\"special_tokens\":{\"x\":{\"ids\":[3]}}}," MODEL "}",
     NULL, PGD_EFORMAT, "one of the 3 tokens"},
    {"{" MODEL "}", "[]", PGD_EFORMAT, "tokenizer_config.json"},
    {"{" MODEL "}", "{", PGD_EFORMAT, "tokenizer_config.json"},
    {"{" MODEL "}", "{\"bos_token\":\"zz\"}", PGD_EFORMAT, "bos_token"},
    {"{" MODEL "}", "{\"eos_token\":[]}", PGD_EFORMAT, "eos_token"},
};

static void test_load_json_says_what_is_wrong(void **state)
{
    (void)state;
    for (size_t i = 0; i < PGD_ARRAY_LEN(json_cases); i++) {
        const json_case *c = &json_cases[i];
        tokenizer *t = NULL;
        pgd_why why = {0};
        pgd_err err = tokenizer_from_json(&t, c->json, strlen(c->json), c->config,
                                          c->config == NULL ? 0 : strlen(c->config), &why);
        if (err != c->err || strstr(why.text, c->says) == NULL) {
            fail_msg("case %zu %s: got %d \"%s\", want %d with \"%s\"", i, c->json, err, why.text,
                     c->err, c->says);
        }
        assert_null(t);
    }
}

static void test_load_json_deep_nesting(void **state)
{
    (void)state;
    strbuf json;
    tokenizer *t;
    pgd_why why = {0};
    strbuf_init(&json);
    strbuf_append_str(&json, "{\"normalizer\":");
    for (int32_t i = 0; i < 20; i++)
        strbuf_append_str(&json, "{\"type\":\"Sequence\",\"normalizers\":[");
    for (int32_t i = 0; i < 20; i++)
        strbuf_append_str(&json, "]}");
    strbuf_append_str(&json, "," MODEL "}");
    assert_int_equal(tokenizer_from_json(&t, json.data, json.n_bytes, NULL, 0, &why), PGD_EFORMAT);
    assert_non_null(strstr(why.text, "4 deep"));
    strbuf_reset(&json);
    for (int32_t i = 0; i < 200000; i++)
        strbuf_append_char(&json, '[');
    assert_int_equal(tokenizer_from_json(&t, json.data, json.n_bytes, NULL, 0, &why), PGD_EFORMAT);
    strbuf_deinit(&json);
}

static void test_load_dir_names_what_is_absent(void **state)
{
    (void)state;
    tokenizer *t;
    pgd_why why = {0};
    assert_int_not_equal(tokenizer_create_from_dir(&t, "tests/data/tokenizers/none", &why), PGD_OK);
    assert_non_null(strstr(why.text, "tests/data/tokenizers/none/tokenizer.json"));
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Whatever loads must encode to ids of its vocabulary. */
static void use(const tokenizer *t)
{
    static const char text[] = "ab a\xC3\xA9 <s>\xE2\x96\x81 12 \xFF\0\nabab";
    token_id *ids;
    int32_t n;
    assert_int_equal(tokenizer_encode(&ids, &n, t, text, sizeof(text) - 1,
                                      TOKENIZER_ADD_SPECIAL | TOKENIZER_PARSE_SPECIAL, 100000),
                     PGD_OK);
    for (int32_t i = 0; i < n; i++)
        assert_true(ids[i] >= 0 && ids[i] < tokenizer_vocab_size(t));
    mem_free(ids);
}

static void test_load_json_survives_mutations(void **state)
{
    (void)state;
    static const char *const seeds[] = {
        "{\"added_tokens\":[{\"id\":3,\"content\":\"<s>\",\"special\":true,\"lstrip\":true,"
        "\"normalized\":true}],"
        "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":"
        "\"\\u2581\"},{\"type\":\"NFC\"},"
        "{\"type\":\"Replace\",\"pattern\":{\"String\":\" "
        "\"},\"content\":\"\\u2581\"}]},\"decoder\":{\"type\":\"Sequence\","
        "\"decoders\":[{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"}]}," MODEL "}",
        "{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\\u2581\",\"prepend_scheme\":"
        "\"first\",\"split\":false},"
        "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":"
        "\"x\"}},{\"Sequence\":{}}],"
        "\"special_tokens\":{\"x\":{\"ids\":[1]}}}," MODEL "}",
        "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"use_regex\":true},"
        "\"decoder\":"
        "{\"type\":\"ByteLevel\"}," MODEL "}",
    };
    static const char alphabet[] = "{}[]\",:0129-.eEtrufalsnN\\ \x00\x80\xFF_ab";
    uint64_t seed = 7777;
    int32_t n_loaded = 0;
    for (int32_t round = 0; round < 6000; round++) {
        const char *original = seeds[round % 3];
        size_t n = strlen(original);
        char *json = mem_strdup(original);
        assert_non_null(json);
        for (uint64_t k = next_random(&seed) % 4; k > 0; k--) {
            size_t at = next_random(&seed) % n;
            switch (next_random(&seed) % 3) {
            case 0:
                json[at] = alphabet[next_random(&seed) % (sizeof(alphabet) - 1)];
                break;
            case 1:
                memmove(json + at, json + at + 1, n - at - 1);
                n--;
                break;
            default:
                n = at + 1;
            }
        }
        tokenizer *t;
        pgd_why why = {0};
        pgd_err err = tokenizer_from_json(&t, json, n, NULL, 0, &why);
        if (err == PGD_OK) {
            use(t);
            tokenizer_destroy(t);
            n_loaded++;
        } else {
            assert_true(why.text[0] != '\0');
        }
        mem_free(json);
    }
    assert_true(n_loaded > 100);
}

/* --- GGUF ---------------------------------------------------------------------------------------
 */

typedef struct gguf_options {
    const char *model;
    const char *pre;
    const char *tokens[8];
    int32_t types[8];
    float scores[8];
    const char *merges[4];
    int n_types; /* elements written; -1 = no such key */
    int n_scores;
    int n_merges;
    uint32_t eos;
} gguf_options;

static const gguf_options good_bpe = {.model = "gpt2",
                                      .pre = "gpt-2",
                                      .tokens = {"a", "b", "ab", "<s>"},
                                      .types = {1, 1, 1, 3},
                                      .merges = {"a b"},
                                      .n_types = 4,
                                      .n_scores = -1,
                                      .n_merges = 1,
                                      .eos = 3};
static const gguf_options good_spm = {.model = "llama",
                                      .tokens = {"a", "b", "ab", "<unk>", "<0xFF>"},
                                      .types = {1, 1, 1, 2, 6},
                                      .scores = {-3, -2, -1, 0, 0},
                                      .n_types = 5,
                                      .n_scores = 5,
                                      .n_merges = -1,
                                      .eos = 3};

static char work_dir[64];

static pgd_err load_gguf(const gguf_options *o, tokenizer **t, pgd_why *why)
{
    builder b;
    char path[128];
    gguf_file *file;
    int n_tokens = 0;
    while (n_tokens < 8 && o->tokens[n_tokens] != NULL)
        n_tokens++;
    builder_begin(&b);
    builder_kv_string(&b, "general.architecture", "llama");
    if (o->model != NULL)
        builder_kv_string(&b, "tokenizer.ggml.model", o->model);
    if (o->pre != NULL)
        builder_kv_string(&b, "tokenizer.ggml.pre", o->pre);
    builder_kv_array(&b, "tokenizer.ggml.tokens", GGUF_STRING, (uint64_t)n_tokens);
    for (int i = 0; i < n_tokens; i++)
        builder_string(&b, o->tokens[i]);
    if (o->n_types >= 0) {
        builder_kv_array(&b, "tokenizer.ggml.token_type", GGUF_I32, (uint64_t)o->n_types);
        builder_put(&b, o->types, 4 * (size_t)o->n_types);
    }
    if (o->n_scores >= 0) {
        builder_kv_array(&b, "tokenizer.ggml.scores", GGUF_F32, (uint64_t)o->n_scores);
        builder_put(&b, o->scores, 4 * (size_t)o->n_scores);
    }
    if (o->n_merges >= 0) {
        builder_kv_array(&b, "tokenizer.ggml.merges", GGUF_STRING, (uint64_t)o->n_merges);
        for (int i = 0; i < o->n_merges; i++)
            builder_string(&b, o->merges[i]);
    }
    builder_kv_u32(&b, "tokenizer.ggml.eos_token_id", o->eos);
    builder_end(&b);
    snprintf(path, sizeof(path), "%s/t.gguf", work_dir);
    builder_write(path, b.data, b.n_bytes);
    builder_free(&b);
    assert_int_equal(gguf_open(&file, path, why), PGD_OK);
    *t = NULL;
    pgd_err err = tokenizer_create_from_gguf(t, file, why);
    gguf_close(file);
    return err;
}

static void expect_gguf_error(const gguf_options *o, pgd_err want, const char *says)
{
    tokenizer *t;
    pgd_why why = {0};
    pgd_err err = load_gguf(o, &t, &why);
    if (err != want || strstr(why.text, says) == NULL)
        fail_msg("got %d \"%s\", want %d with \"%s\"", err, why.text, want, says);
    assert_null(t);
}

static void test_load_gguf_good(void **state)
{
    (void)state;
    const gguf_options *good[] = {&good_bpe, &good_spm};
    for (size_t i = 0; i < 2; i++) {
        tokenizer *t;
        pgd_why why = {0};
        if (load_gguf(good[i], &t, &why) != PGD_OK)
            fail_msg("%s", why.text);
        assert_int_equal(tokenizer_eos_id(t), 3);
        assert_true(tokenizer_is_special(t, 3));
        use(t);
        tokenizer_destroy(t);
    }
}

static void test_load_gguf_says_what_is_wrong(void **state)
{
    (void)state;
    gguf_options o = good_bpe;
    o.model = NULL;
    expect_gguf_error(&o, PGD_EFORMAT, "tokenizer.ggml.model");
    o.model = "t5";
    expect_gguf_error(&o, PGD_EUNSUPPORTED, "\"t5\"");
    o = good_bpe;
    o.pre = NULL;
    expect_gguf_error(&o, PGD_EUNSUPPORTED, "tokenizer.ggml.pre");
    o.pre = "tekken";
    expect_gguf_error(&o, PGD_EUNSUPPORTED, "\"tekken\"");
    o = good_bpe;
    o.tokens[0] = NULL;
    expect_gguf_error(&o, PGD_EFORMAT, "tokenizer.ggml.tokens");
    o = good_bpe;
    o.n_types = 3;
    expect_gguf_error(&o, PGD_EFORMAT, "tokenizer.ggml.token_type");
    o = good_bpe;
    o.types[1] = 9;
    expect_gguf_error(&o, PGD_EFORMAT, "type of token 1 is 9");
    o = good_bpe;
    o.n_merges = -1;
    expect_gguf_error(&o, PGD_EFORMAT, "tokenizer.ggml.merges");
    o = good_bpe;
    o.merges[0] = "ab";
    expect_gguf_error(&o, PGD_EFORMAT, "merge 0");
    o.merges[0] = " ab";
    expect_gguf_error(&o, PGD_EFORMAT, "merge 0");
    o.merges[0] = "a z";
    expect_gguf_error(&o, PGD_EFORMAT, "\"z\"");
    o.merges[0] = "b a";
    expect_gguf_error(&o, PGD_EFORMAT, "\"ba\"");
    o = good_bpe;
    o.eos = 4294967295u;
    expect_gguf_error(&o, PGD_EFORMAT, "eos_token_id");
    o.eos = 4;
    expect_gguf_error(&o, PGD_EFORMAT, "eos_token_id");
    o = good_spm;
    o.n_scores = -1;
    expect_gguf_error(&o, PGD_EFORMAT, "tokenizer.ggml.scores");
    o = good_spm;
    o.n_scores = 4;
    expect_gguf_error(&o, PGD_EFORMAT, "tokenizer.ggml.scores");
    o = good_spm;
    uint32_t nan_bits = 0x7FC00000u;
    memcpy(&o.scores[2], &nan_bits, 4);
    expect_gguf_error(&o, PGD_EFORMAT, "score of token 2");
}

static int make_dir(void **state)
{
    (void)state;
    builder_make_dir(work_dir);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    builder_remove_dir(work_dir);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_load_json_says_what_is_wrong),
        cmocka_unit_test(test_load_json_deep_nesting),
        cmocka_unit_test(test_load_dir_names_what_is_absent),
        cmocka_unit_test(test_load_json_survives_mutations),
        cmocka_unit_test(test_load_gguf_good),
        cmocka_unit_test(test_load_gguf_says_what_is_wrong),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
