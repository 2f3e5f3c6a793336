/* The tokenizer as a whole: flags, bounds, round trips, long words, added tokens, threads. Ids
 * against the reference are in test_tokenizer_golden.c, damaged sources in test_tokenizer_load.c.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <pthread.h>

#include <cmocka.h>

#include "common/mem.h"
#include "common/utf8.h"
#include "engine/text/detokenizer.h"
#include "engine/text/tokenizer_internal.h"

static tokenizer *open_dir(const char *name)
{
    char dir[128];
    tokenizer *t = NULL;
    pgd_why why = {0};
    snprintf(dir, sizeof(dir), "tests/data/tokenizers/%s", name);
    if (tokenizer_create_from_dir(&t, dir, &why) != PGD_OK)
        fail_msg("%s", why.text);
    return t;
}

static tokenizer *open_gguf(const char *name)
{
    char path[128];
    gguf_file *file;
    tokenizer *t = NULL;
    pgd_why why = {0};
    snprintf(path, sizeof(path), "tests/data/tokenizers/%s/vocab.gguf", name);
    if (gguf_open(&file, path, &why) != PGD_OK ||
        tokenizer_create_from_gguf(&t, file, &why) != PGD_OK)
        fail_msg("%s", why.text);
    gguf_close(file); /* the tokenizer keeps nothing of it */
    return t;
}

static tokenizer *from_json(const char *json, const char *config)
{
    tokenizer *t = NULL;
    pgd_why why = {0};
    if (tokenizer_from_json(&t, json, strlen(json), config, config == NULL ? 0 : strlen(config),
                            &why) != PGD_OK)
        fail_msg("%s", why.text);
    return t;
}

static void expect_ids(const tokenizer *t, const char *text, size_t n_bytes, unsigned flags,
                       const token_id *want, int32_t n_want)
{
    token_id *ids;
    int32_t n;
    assert_int_equal(tokenizer_encode(&ids, &n, t, text, n_bytes, flags, 10000), PGD_OK);
    bool same = n == n_want;
    for (int32_t i = 0; same && i < n; i++)
        same = ids[i] == want[i];
    if (!same) {
        for (int32_t i = 0; i < n; i++)
            print_message("%d ", ids[i]);
        fail_msg("wrong ids of \"%.*s\"", (int)n_bytes, text);
    }
    mem_free(ids);
}

#define EXPECT(t, text, flags, ...)                                         \
    expect_ids(t, text, sizeof(text) - 1, flags, (token_id[]){__VA_ARGS__}, \
               (int32_t)(sizeof((token_id[]){__VA_ARGS__}) / sizeof(token_id)))
#define EXPECT_NONE(t, text, flags) expect_ids(t, text, sizeof(text) - 1, flags, NULL, 0)

static void test_tokenizer_getters(void **state)
{
    (void)state;
    tokenizer *sources[] = {open_dir("llama3"), open_gguf("llama3")};
    for (size_t i = 0; i < 2; i++) {
        tokenizer *t = sources[i];
        size_t n;
        assert_int_equal(tokenizer_vocab_size(t), 1500);
        assert_int_equal(tokenizer_bos_id(t), 1495);
        assert_int_equal(tokenizer_eos_id(t), 1499);
        assert_int_equal(tokenizer_find(t, "<|eot_id|>", 10), 1499);
        assert_int_equal(tokenizer_find(t, "<|eot_id", 8), -1);
        assert_int_equal(tokenizer_find(t, "", 0), -1);
        assert_true(tokenizer_is_special(t, 1499));
        assert_false(tokenizer_is_special(t, 0));
        assert_false(tokenizer_is_special(t, -1));
        assert_false(tokenizer_is_special(t, 1500));
        assert_memory_equal(tokenizer_piece(t, 1499, &n), "<|eot_id|>", 10);
        assert_int_equal(n, 10);
        token_id space_t = tokenizer_find(t, "\xC4\xA0t", 3); /* the spelling in the vocabulary */
        assert_true(space_t >= 0);
        assert_memory_equal(tokenizer_piece(t, space_t, &n), " t", 2);
        assert_int_equal(n, 2);
        assert_non_null(tokenizer_piece(t, 1500, &n));
        assert_int_equal(n, 0);
        tokenizer_destroy(t);
    }
}

static void test_tokenizer_adds_bos_once_and_only_when_asked(void **state)
{
    (void)state;
    tokenizer *t = open_dir("llama3");
    token_id a = tokenizer_find(t, "a", 1);
    token_id bos = tokenizer_bos_id(t);
    EXPECT(t, "a", 0, a);
    EXPECT(t, "a", TOKENIZER_ADD_SPECIAL, bos, a);
    EXPECT(t, "", TOKENIZER_ADD_SPECIAL, bos);
    EXPECT_NONE(t, "", 0);
    /* A chat template writes BOS itself: parsed, not added again. */
    EXPECT(t, "<|begin_of_text|>a", TOKENIZER_PARSE_SPECIAL, bos, a);
    tokenizer_destroy(t);
}

static void test_tokenizer_plain_text_never_gives_special_tokens(void **state)
{
    (void)state;
    static const char *const names[] = {"gpt2",   "llama3",         "qwen2",
                                        "smollm", "mistral-legacy", "mistral-first"};
    static const char text[] =
        "hi<|im_end|>\n<|im_start|>system\n<|endoftext|><|eot_id|></s><s>[INST]<unk> x";
    for (size_t i = 0; i < PGD_ARRAY_LEN(names); i++) {
        tokenizer *t = open_dir(names[i]);
        token_id *ids;
        int32_t n;
        int32_t n_special = 0;
        assert_int_equal(tokenizer_encode(&ids, &n, t, text, sizeof(text) - 1, 0, 1000), PGD_OK);
        for (int32_t k = 0; k < n; k++)
            assert_false(tokenizer_is_special(t, ids[k]));
        mem_free(ids);
        assert_int_equal(
            tokenizer_encode(&ids, &n, t, text, sizeof(text) - 1, TOKENIZER_PARSE_SPECIAL, 1000),
            PGD_OK);
        for (int32_t k = 0; k < n; k++)
            n_special += tokenizer_is_special(t, ids[k]);
        assert_true(n_special > 0);
        mem_free(ids);
        tokenizer_destroy(t);
    }
}

static void test_tokenizer_text_goes_on_after_nul(void **state)
{
    (void)state;
    tokenizer *t = open_dir("gpt2");
    token_id a = tokenizer_find(t, "a", 1);
    token_id nul = tokenizer_find(t, "\xC4\x80", 2);
    EXPECT(t, "a\0a", 0, a, nul, a);
    tokenizer_destroy(t);
}

static void test_tokenizer_space_after_special_token(void **state)
{
    (void)state;
    tokenizer *sources[] = {open_dir("mistral-legacy"), open_gguf("spm")};
    for (size_t i = 0; i < 2; i++) {
        EXPECT(sources[i], "a</s> b", TOKENIZER_PARSE_SPECIAL, 262, 2, 897, 280);
        EXPECT(sources[i], "</s>a", TOKENIZER_PARSE_SPECIAL, 2, 262);
        EXPECT(sources[i], " a", TOKENIZER_ADD_SPECIAL, 1, 897, 262);
        tokenizer_destroy(sources[i]);
    }
}

static void test_tokenizer_max_ids_is_a_refusal(void **state)
{
    (void)state;
    static const char *const names[] = {"gpt2", "mistral-first"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(names); i++) {
        tokenizer *t = open_dir(names[i]);
        token_id *ids;
        int32_t n;
        int32_t n_again;
        static const char text[] = "several words of text, 12345";
        assert_int_equal(tokenizer_encode(&ids, &n, t, text, sizeof(text) - 1, 0, INT32_MAX),
                         PGD_OK);
        mem_free(ids);
        assert_int_equal(tokenizer_encode(&ids, &n_again, t, text, sizeof(text) - 1, 0, n), PGD_OK);
        assert_int_equal(n_again, n);
        mem_free(ids);
        assert_int_equal(tokenizer_encode(&ids, &n_again, t, text, sizeof(text) - 1, 0, n - 1),
                         PGD_ERANGE);
        assert_null(ids);
        assert_int_equal(n_again, 0);
        assert_int_equal(tokenizer_encode(&ids, &n_again, t, text, sizeof(text) - 1, 0, 0),
                         PGD_ERANGE);
        tokenizer_destroy(t);
    }
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* The pieces of a byte-level encoding, one after the other, are the text: any bytes. */
static void test_tokenizer_byte_level_round_trip(void **state)
{
    (void)state;
    tokenizer *sources[] = {open_dir("gpt2"), open_dir("llama3"), open_gguf("smollm"),
                            open_gguf("llama3")};
    uint64_t seed = 4242;
    for (size_t s = 0; s < PGD_ARRAY_LEN(sources); s++) {
        tokenizer *t = sources[s];
        for (int32_t round = 0; round < 2000; round++) {
            char text[64];
            size_t n_bytes = 0;
            bool any_bytes = round % 2 == 0;
            while (n_bytes < sizeof(text) - 4 && next_random(&seed) % 24 != 0) {
                if (any_bytes) {
                    text[n_bytes++] = (char)next_random(&seed);
                } else {
                    uint32_t cp = (uint32_t)(next_random(&seed) %
                                             (next_random(&seed) % 2 ? 0x250 : 0x110000));
                    cp = cp >= 0xD800 && cp < 0xE000 ? ' ' : cp;
                    n_bytes += utf8_encode(text + n_bytes, cp);
                }
            }
            token_id *ids;
            int32_t n;
            assert_int_equal(tokenizer_encode(&ids, &n, t, text, n_bytes, 0, 1000), PGD_OK);
            size_t at = 0;
            for (int32_t i = 0; i < n; i++) {
                size_t n_piece;
                const char *piece = tokenizer_piece(t, ids[i], &n_piece);
                assert_true(at + n_piece <= n_bytes);
                assert_memory_equal(text + at, piece, n_piece);
                at += n_piece;
            }
            assert_int_equal(at, n_bytes);
            mem_free(ids);
        }
        tokenizer_destroy(t);
    }
}

/* CPU time of this process: other load on the machine does not count. */
static double cpu_seconds(void)
{
    return (double)clock() / CLOCKS_PER_SEC;
}

/* A megabyte as one unbroken run, of each unit. Plain builds take a fraction of the second allowed;
 * anything quadratic takes hours. */
static void test_tokenizer_megabyte_words(void **state)
{
    (void)state;
    static const char *const units[] = {
        "a", " ", "\n", "ab", "\xE4\xB8\xAD", "\xCC\x81\xCC\xA3", "<|<|im"};
    const double limit_s = PGD_DEBUG ? 20 : 1;
    tokenizer *sources[] = {open_gguf("smollm"),       open_dir("llama3"), open_gguf("qwen2"),
                            open_dir("mistral-first"), open_gguf("spm"),   open_dir("added")};
    size_t n_text = 1 << 20;
    char *text = mem_alloc(n_text + 16);
    assert_non_null(text);
    for (size_t s = 0; s < PGD_ARRAY_LEN(sources); s++) {
        for (size_t u = 0; u < PGD_ARRAY_LEN(units); u++) {
            size_t n = 0;
            for (; n < n_text; n += strlen(units[u]))
                memcpy(text + n, units[u], strlen(units[u]));
            token_id *ids;
            int32_t n_ids;
            double start = cpu_seconds();
            assert_int_equal(tokenizer_encode(&ids, &n_ids, sources[s], text, n,
                                              TOKENIZER_PARSE_SPECIAL, INT32_MAX),
                             PGD_OK);
            double took = cpu_seconds() - start;
            if (took > limit_s) {
                fail_msg("tokenizer %zu, unit %zu: %.2f s for 1 MB, limit %.0f", s, u, took,
                         limit_s);
            }
            assert_true(n_ids > 0);
            mem_free(ids);
            /* A bound on the ids ends the work early. */
            start = cpu_seconds();
            assert_int_equal(
                tokenizer_encode(&ids, &n_ids, sources[s], text, n, TOKENIZER_PARSE_SPECIAL, 100),
                PGD_ERANGE);
            assert_true(cpu_seconds() - start <= limit_s);
        }
        tokenizer_destroy(sources[s]);
    }
    mem_free(text);
}

#define VOCAB                                                                                     \
    "\"vocab\":{\"<unk>\":0,\"a\":1,\"b\":2,\"\\u2581\":3,\"\\u2581a\":4,\"ab\":5,\"\\u2581ab\":" \
    "6,"                                                                                          \
    "\"<0xC3>\":7,\"<0xA9>\":8,\"b\\u2581\":9},\"merges\":[\"\\u2581 a\",\"a b\",\"\\u2581a "     \
    "b\",\"b \\u2581\"]"
#define MODEL(extra) "\"model\":{\"type\":\"BPE\"," extra VOCAB "}"

static void test_tokenizer_unknown_characters(void **state)
{
    (void)state;
    tokenizer *t = from_json("{" MODEL("\"unk_token\":\"<unk>\",") "}", NULL);
    EXPECT(t, "ab ab", 0, 5, 0, 5);
    EXPECT(t, "xyz", 0, 0, 0, 0);
    EXPECT(t, "a\xC3\xA9x", 0, 1, 0, 0);
    tokenizer_destroy(t);
    t = from_json("{" MODEL("\"unk_token\":\"<unk>\",\"fuse_unk\":true,") "}", NULL);
    EXPECT(t, "xyz", 0, 0);
    EXPECT(t, "xaxyb", 0, 0, 1, 0, 2);
    tokenizer_destroy(t);
    t = from_json("{" MODEL("\"unk_token\":\"<unk>\",\"byte_fallback\":true,") "}", NULL);
    EXPECT(t, "a\xC3\xA9x", 0, 1, 7, 8, 0);
    tokenizer_destroy(t);
    t = from_json("{" MODEL("") "}", NULL);
    EXPECT(t, "xaz", 0, 1);
    EXPECT_NONE(t, "xyz", 0);
    tokenizer_destroy(t);
}

static tokenizer *metaspace(const char *scheme, bool split)
{
    char json[2048];
    snprintf(json, sizeof(json),
             "{\"added_tokens\":[{\"id\":10,\"content\":\"<s>\",\"special\":true}],"
             "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\\u2581\",\"prepend_"
             "scheme\":\"%s\",\"split\":%s}," MODEL("\"unk_token\":\"<unk>\",") "}",
             scheme, split ? "true" : "false");
    return from_json(json, NULL);
}

static void test_tokenizer_metaspace_schemes(void **state)
{
    (void)state;
    for (int32_t split = 0; split < 2; split++) {
        tokenizer *t = metaspace("first", split);
        EXPECT(t, "ab ab", 0, 6, 6);
        EXPECT(t, " a", 0, 4);
        EXPECT(t, "  a", 0, 3, 4);
        EXPECT(t, "a<s>a", TOKENIZER_PARSE_SPECIAL, 4, 10, 1);
        EXPECT(t, "<s> a", TOKENIZER_PARSE_SPECIAL, 10, 4);
        tokenizer_destroy(t);
        t = metaspace("always", split);
        EXPECT(t, "a<s>a", TOKENIZER_PARSE_SPECIAL, 4, 10, 4);
        EXPECT(t, " a", 0, 4);
        tokenizer_destroy(t);
        t = metaspace("never", split);
        EXPECT(t, "ab ab", 0, 5, 6);
        EXPECT(t, " a", 0, 4);
        if (split)
            EXPECT(t, "b b", 0, 2, 3, 2);
        else
            EXPECT(t, "b b", 0, 9, 2);
        tokenizer_destroy(t);
    }
}

static void test_tokenizer_template_decides_what_is_added(void **state)
{
    (void)state;
    static const char template[] = "{\"post_processor\":{\"type\":\"TemplateProcessing\","
                                   "\"single\":[{\"SpecialToken\":{\"id\":\"X\"}},"
                                   "{\"Sequence\":{\"id\":\"A\"}},{\"SpecialToken\":{\"id\":\"Y\"}}"
                                   "],\"special_tokens\":{\"X\":{\"ids\":[1,2]},"
                                   "\"Y\":{\"ids\":[3]}}}," MODEL("") "}";
    static const char config[] = "{\"add_bos_token\":true,\"add_eos_token\":true,\"bos_token\":{"
                                 "\"content\":\"a\"},\"eos_token\":\"b\"}";
    tokenizer *t = from_json(template, config);
    EXPECT(t, "ab", TOKENIZER_ADD_SPECIAL, 1, 2, 5, 3);
    EXPECT(t, "ab", 0, 5);
    assert_int_equal(tokenizer_bos_id(t), 1);
    assert_int_equal(tokenizer_eos_id(t), 2);
    tokenizer_destroy(t);
    t = from_json("{" MODEL("") "}", config);
    EXPECT(t, "ab", TOKENIZER_ADD_SPECIAL, 1, 5, 2);
    tokenizer_destroy(t);
    t = from_json("{" MODEL("") "}", "{\"bos_token\":null}");
    EXPECT(t, "ab", TOKENIZER_ADD_SPECIAL, 5);
    assert_int_equal(tokenizer_bos_id(t), -1);
    tokenizer_destroy(t);
}

/* BART's: cls in front, sep behind. */
static void test_tokenizer_roberta_processing(void **state)
{
    (void)state;
    tokenizer *t = from_json(
        "{\"post_processor\":{\"type\":\"RobertaProcessing\",\"sep\":[\"</s>\",2],"
        "\"cls\":[\"<s>\",3],\"trim_offsets\":true,\"add_prefix_space\":false}," MODEL("") "}",
        "{\"add_bos_token\":true,\"bos_token\":\"a\"}");
    EXPECT(t, "ab", TOKENIZER_ADD_SPECIAL, 3, 5, 2);
    EXPECT(t, "ab", 0, 5);
    tokenizer_destroy(t);
}

static void test_tokenizer_added_token_flags(void **state)
{
    (void)state;
    static const char json[] =
        "{\"added_tokens\":[{\"id\":10,\"content\":\"<l>\",\"lstrip\":true},{\"id\":11,\"content\":"
        "\"<r>\",\"rstrip\":true},"
        "{\"id\":12,\"content\":\"w\",\"single_word\":true},{\"id\":13,\"content\":\"<l>x\"},"
        "{\"id\":14,\"content\":\"<sp>\",\"special\":true},{\"id\":15,\"content\":\"p>\"}]," MODEL(
            "\"unk_token\":\"<unk>\",") "}";
    tokenizer *t = from_json(json, NULL);
    EXPECT(t, "a  <l>  a", 0, 1, 10, 0, 0, 1);
    EXPECT(t, "a <r>\n\xC2\xA0 a", 0, 1, 0, 11, 1);
    EXPECT(t, "<r> <l>", 0, 11, 10);
    EXPECT(t, "w aw w", 0, 12, 0, 1, 0, 0, 12);
    EXPECT(t, "<l>xa", 0, 13, 1); /* the longest at a place */
    EXPECT(t, "<sp>", TOKENIZER_PARSE_SPECIAL, 14);
    EXPECT(t, "<sp>", 0, 0, 0, 0, 0); /* stepped over as a whole: "p>" inside is not looked for */
    EXPECT(t, "<p>", 0, 0, 15);
    assert_int_equal(tokenizer_find(t, "<l>x", 4), 13);
    tokenizer_destroy(t);
}

static void test_tokenizer_nul_in_vocabulary(void **state)
{
    (void)state;
    tokenizer *t =
        from_json("{\"added_tokens\":[{\"id\":3,\"content\":\"x\\u0000y\"}],\"model\":{\"type\":"
                  "\"BPE\",\"vocab\":"
                  "{\"\\u0000\":0,\"a\":1,\"a\\u0000\":2},\"merges\":[[\"a\",\"\\u0000\"]]}}",
                  NULL);
    EXPECT(t, "a\0a", 0, 2, 1);
    EXPECT(t, "\0x\0ya", 0, 0, 3, 1);
    tokenizer_destroy(t);
}

static void test_tokenizer_config_of_the_model_fills_gaps(void **state)
{
    (void)state;
    model_file *file;
    tokenizer *t = NULL;
    pgd_why why = {0};
    if (model_file_open(&file, "tests/data/models/llama31-tiny", &why) != PGD_OK ||
        tokenizer_create(&t, file, &why) != PGD_OK)
        fail_msg("%s", why.text);
    model_file_close(file);
    assert_int_equal(tokenizer_vocab_size(t), 512);
    assert_int_equal(tokenizer_bos_id(t), tokenizer_find(t, "<|begin_of_text|>", 17));
    tokenizer_destroy(t);
}

typedef struct encode_job {
    const tokenizer *t;
    int32_t n_same;
} encode_job;

#define N_ROUNDS 200

static void *encode_many(void *arg)
{
    encode_job *job = arg;
    static const char text[] =
        "Threads share the tables and nothing else: caf\xC3\xA9, 12345, <|im_end|>\n\n";
    token_id *first;
    int32_t n_first;
    if (tokenizer_encode(&first, &n_first, job->t, text, sizeof(text) - 1, TOKENIZER_PARSE_SPECIAL,
                         1000) != PGD_OK)
        return NULL;
    for (int32_t i = 0; i < N_ROUNDS; i++) {
        token_id *ids;
        int32_t n;
        if (tokenizer_encode(&ids, &n, job->t, text, sizeof(text) - 1, TOKENIZER_PARSE_SPECIAL,
                             1000) != PGD_OK)
            break;
        job->n_same += n == n_first && memcmp(ids, first, (size_t)n * sizeof(*ids)) == 0;
        mem_free(ids);
    }
    mem_free(first);
    return NULL;
}

static void test_tokenizer_encodes_from_many_threads(void **state)
{
    (void)state;
    tokenizer *t = open_dir("qwen2");
    pthread_t threads[4];
    encode_job jobs[4] = {{t, 0}, {t, 0}, {t, 0}, {t, 0}};
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, encode_many, &jobs[i]), 0);
    for (size_t i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(jobs[i].n_same, N_ROUNDS);
    }
    tokenizer_destroy(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokenizer_getters),
        cmocka_unit_test(test_tokenizer_adds_bos_once_and_only_when_asked),
        cmocka_unit_test(test_tokenizer_plain_text_never_gives_special_tokens),
        cmocka_unit_test(test_tokenizer_text_goes_on_after_nul),
        cmocka_unit_test(test_tokenizer_space_after_special_token),
        cmocka_unit_test(test_tokenizer_max_ids_is_a_refusal),
        cmocka_unit_test(test_tokenizer_byte_level_round_trip),
        cmocka_unit_test(test_tokenizer_megabyte_words),
        cmocka_unit_test(test_tokenizer_unknown_characters),
        cmocka_unit_test(test_tokenizer_metaspace_schemes),
        cmocka_unit_test(test_tokenizer_template_decides_what_is_added),
        cmocka_unit_test(test_tokenizer_roberta_processing),
        cmocka_unit_test(test_tokenizer_added_token_flags),
        cmocka_unit_test(test_tokenizer_nul_in_vocabulary),
        cmocka_unit_test(test_tokenizer_config_of_the_model_fills_gaps),
        cmocka_unit_test(test_tokenizer_encodes_from_many_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
