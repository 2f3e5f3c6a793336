/* Ids and decoded text of every tokenizer at hand against Hugging Face tokenizers and
 * sentencepiece.
 *
 * Committed tokenizers are always compared; those that are too big for the repository (Llama 2,
 * Llama 3.1, Qwen3: scripts/fetch_tokenizers; SmolLM2: scripts/fetch_model) where they lie in the
 * cache, else the test is skipped.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/file.h"
#include "common/mem.h"
#include "common/utf8.h"
#include "engine/text/detokenizer.h"
#include "engine/text/tokenizer_internal.h"

#define MAX_FILE  ((size_t)1 << 24)
#define NO_SOURCE 0xFFFFFFFFu

/* A golden file being read; every count is checked against what is left. */
typedef struct reader {
    char *data;
    size_t n_bytes;
    size_t at;
} reader;

static void reader_open(reader *r, const char *path, const char *magic)
{
    pgd_why why = {0};
    if (file_read(&r->data, &r->n_bytes, path, MAX_FILE, &why) != PGD_OK)
        fail_msg("%s", why.text);
    assert_true(r->n_bytes >= 8);
    assert_memory_equal(r->data, magic, 8);
    r->at = 8;
}

static uint32_t take_u32(reader *r)
{
    uint32_t v;
    assert_true(r->n_bytes - r->at >= 4);
    memcpy(&v, r->data + r->at, 4);
    r->at += 4;
    return v;
}

static const char *take(reader *r, size_t n_bytes)
{
    const char *p = r->data + r->at;
    assert_true(r->n_bytes - r->at >= n_bytes);
    r->at += n_bytes;
    return p;
}

static uint32_t u32_at(const char *array, size_t i)
{
    uint32_t v;
    memcpy(&v, array + 4 * i, 4);
    return v;
}

typedef struct strings {
    reader file;
    uint32_t n;
    const char *offsets;
    const char *bytes;
} strings;

static void strings_open(strings *s)
{
    reader_open(&s->file, "tests/golden/tokenizer/strings.bin", "PGSTRNG1");
    s->n = take_u32(&s->file);
    uint32_t n_bytes = take_u32(&s->file);
    s->offsets = take(&s->file, 4 * ((size_t)s->n + 1));
    s->bytes = take(&s->file, n_bytes);
    assert_int_equal(u32_at(s->offsets, s->n), n_bytes);
}

static const char *string_at(const strings *s, uint32_t i, size_t *n_bytes)
{
    assert_true(i < s->n);
    *n_bytes = u32_at(s->offsets, i + 1) - u32_at(s->offsets, i);
    return s->bytes + u32_at(s->offsets, i);
}

/* Ids equal, and equal affixes. Returns the number of strings that differ; the first few are
 * printed. */
static int compare_ids(const char *name, const tokenizer *t, const strings *s)
{
    char path[256];
    reader r;
    snprintf(path, sizeof(path), "tests/golden/tokenizer/%s.ids", name);
    reader_open(&r, path, "PGTOKID1");
    uint32_t n = take_u32(&r);
    assert_int_equal(take_u32(&r), tokenizer_vocab_size(t));
    uint32_t n_ids = take_u32(&r);
    uint32_t id_bytes = take_u32(&r);
    uint32_t n_prefix = take_u32(&r);
    uint32_t n_suffix = take_u32(&r);
    assert_true(id_bytes == 2 || id_bytes == 4);
    assert_int_equal(n_prefix, t->n_prefix);
    assert_int_equal(n_suffix, t->n_suffix);
    for (uint32_t i = 0; i < n_prefix; i++)
        assert_int_equal(take_u32(&r), t->prefix[i]);
    for (uint32_t i = 0; i < n_suffix; i++)
        assert_int_equal(take_u32(&r), t->suffix[i]);
    const char *offsets = take(&r, 4 * ((size_t)n + 1));
    const char *want = take(&r, (size_t)n_ids * id_bytes);
    int n_bad = 0;
    for (uint32_t i = 0; i < n; i++) {
        size_t n_bytes;
        const char *text = string_at(s, i, &n_bytes);
        token_id *got;
        int32_t n_got;
        assert_int_equal(
            tokenizer_encode(&got, &n_got, t, text, n_bytes, TOKENIZER_PARSE_SPECIAL, INT32_MAX),
            PGD_OK);
        uint32_t first = u32_at(offsets, i);
        uint32_t n_want = u32_at(offsets, i + 1) - first;
        bool same = n_want == (uint32_t)n_got;
        for (uint32_t k = 0; same && k < n_want; k++) {
            uint32_t id = 0;
            memcpy(&id, want + (size_t)id_bytes * (first + k), id_bytes);
            same = id == (uint32_t)got[k];
        }
        if (!same && n_bad++ < 5) {
            print_message("%s: string %u \"%.*s\": got", name, i, (int)n_bytes, text);
            for (int32_t k = 0; k < n_got; k++)
                print_message(" %d", got[k]);
            print_message(", want");
            for (uint32_t k = 0; k < n_want; k++) {
                uint32_t id = 0;
                memcpy(&id, want + (size_t)id_bytes * (first + k), id_bytes);
                print_message(" %u", id);
            }
            print_message("\n");
        }
        mem_free(got);
    }
    mem_free(r.data);
    return n_bad;
}

/* A run of byte tokens that holds both a whole character and an ill-formed byte: where a stream
 * cannot follow the reference (see detokenizer.c). */
static bool has_mixed_run(const tokenizer *t, const char *ids, uint32_t n_ids)
{
    size_t n_run = 0;
    bool some_good = false;
    bool some_bad = false;
    char run[64];
    for (uint32_t i = 0; i <= n_ids; i++) {
        token_id id = i < n_ids ? (token_id)u32_at(ids, i) : -1;
        if (tokenizer_is_byte(t, id) && n_run < sizeof(run)) {
            size_t n;
            run[n_run++] = tokenizer_piece(t, id, &n)[0];
            continue;
        }
        some_good = false;
        some_bad = false;
        for (size_t k = 0; k < n_run;) {
            size_t used;
            bool good = utf8_decode(NULL, &used, run + k, n_run - k) == UTF8_OK;
            some_good = some_good || good;
            some_bad = some_bad || !good;
            k += used;
        }
        if (some_good && some_bad)
            return true;
        n_run = 0;
    }
    return false;
}

/* Decoded text equal, one id at a time, each step ending at a character. */
static int compare_text(const char *name, const tokenizer *t, int *n_left_out)
{
    char path[256];
    reader r;
    snprintf(path, sizeof(path), "tests/golden/tokenizer/%s.dec", name);
    reader_open(&r, path, "PGTOKDE1");
    uint32_t n = take_u32(&r);
    uint32_t n_ids = take_u32(&r);
    uint32_t n_bytes = take_u32(&r);
    (void)take(&r, 4 * (size_t)n);
    const char *id_offsets = take(&r, 4 * ((size_t)n + 1));
    const char *text_offsets = take(&r, 4 * ((size_t)n + 1));
    const char *ids = take(&r, 4 * (size_t)n_ids);
    const char *text = take(&r, n_bytes);
    int n_bad = 0;
    strbuf out;
    strbuf_init(&out);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t first = u32_at(id_offsets, i);
        uint32_t n_case = u32_at(id_offsets, i + 1) - first;
        if (has_mixed_run(t, ids + 4 * (size_t)first, n_case)) {
            (*n_left_out)++;
            continue;
        }
        detokenizer d;
        detokenizer_init(&d, t, false, false);
        strbuf_reset(&out);
        for (uint32_t k = 0; k < n_case; k++) {
            detokenizer_push(&d, (token_id)u32_at(ids, first + k), &out);
            assert_true(out.n_bytes == 0 || utf8_is_valid(out.data, out.n_bytes, NULL));
        }
        detokenizer_flush(&d, &out);
        size_t at = u32_at(text_offsets, i);
        size_t n_want = u32_at(text_offsets, i + 1) - at;
        if (out.n_bytes != n_want || (n_want > 0 && memcmp(out.data, text + at, n_want) != 0)) {
            if (n_bad++ < 5) {
                print_message("%s: case %u: got \"%.*s\", want \"%.*s\"\n", name, i,
                              (int)out.n_bytes, out.data, (int)n_want, text + at);
            }
        }
    }
    strbuf_deinit(&out);
    mem_free(r.data);
    return n_bad;
}

static void compare(const char *name, const tokenizer *t)
{
    strings s;
    strings_open(&s);
    int n_bad_ids = compare_ids(name, t, &s);
    int n_left_out = 0;
    char path[256];
    snprintf(path, sizeof(path), "tests/golden/tokenizer/%s.dec", name);
    int n_bad_text = file_exists(path) ? compare_text(name, t, &n_left_out) : 0;
    mem_free(s.file.data);
    if (n_left_out > 0)
        print_message("%s: %d of 400 texts with mixed byte runs left out\n", name, n_left_out);
    assert_int_equal(n_bad_ids, 0);
    assert_int_equal(n_bad_text, 0);
    assert_in_range(n_left_out, 0, 40);
}

static void compare_dir(const char *name, const char *dir)
{
    tokenizer *t = NULL;
    pgd_why why = {0};
    if (tokenizer_create_from_dir(&t, dir, &why) != PGD_OK)
        fail_msg("%s: %s", name, why.text);
    compare(name, t);
    tokenizer_destroy(t);
}

static void compare_gguf(const char *name, const char *path)
{
    tokenizer *t = NULL;
    gguf_file *file;
    pgd_why why = {0};
    if (gguf_open(&file, path, &why) != PGD_OK ||
        tokenizer_create_from_gguf(&t, file, &why) != PGD_OK)
        fail_msg("%s: %s", path, why.text);
    gguf_close(file);
    compare(name, t);
    tokenizer_destroy(t);
}

static void test_golden_committed_json(void **state)
{
    const char *name = *state;
    char dir[256];
    snprintf(dir, sizeof(dir), "tests/data/tokenizers/%s", name);
    compare_dir(name, dir);
}

static void test_golden_committed_gguf(void **state)
{
    const char *name = *state;
    char path[256];
    snprintf(path, sizeof(path), "tests/data/tokenizers/%s/vocab.gguf", name);
    compare_gguf(name, path);
}

static bool cache_path(char *out, size_t cap, const char *rest)
{
    const char *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    if (cache != NULL && cache[0] != '\0')
        snprintf(out, cap, "%s/paged/%s", cache, rest);
    else
        snprintf(out, cap, "%s/.cache/paged/%s", home == NULL ? "" : home, rest);
    return file_exists(out);
}

static void test_golden_fetched(void **state)
{
    const char *name = *state;
    char rest[128];
    char path[1024];
    snprintf(rest, sizeof(rest), "tokenizers/%s/tokenizer.json", name);
    if (!cache_path(path, sizeof(path), rest)) {
        print_message("%s is absent (scripts/fetch_tokenizers): skipped\n", path);
        skip();
    }
    *strrchr(path, '/') = '\0';
    compare_dir(name, path);
}

static void test_golden_smollm2(void **state)
{
    (void)state;
    char path[1024];
    if (!cache_path(path, sizeof(path), "models/SmolLM2-135M-Instruct.Q4_1.gguf")) {
        print_message("%s is absent (scripts/fetch_model): skipped\n", path);
        skip();
    }
    compare_gguf("smollm2", path);
}

#define CASE(function, title, tokenizer_name)                                                      \
    {                                                                                              \
        .name = title, .test_func = function, .initial_state = (void *)(uintptr_t)(tokenizer_name) \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(test_golden_committed_json, "golden_gpt2_json", "gpt2"),
        CASE(test_golden_committed_json, "golden_llama3_json", "llama3"),
        CASE(test_golden_committed_json, "golden_o200k_json", "o200k"),
        CASE(test_golden_committed_json, "golden_qwen2_json", "qwen2"),
        CASE(test_golden_committed_json, "golden_smollm_json", "smollm"),
        CASE(test_golden_committed_json, "golden_added_json", "added"),
        CASE(test_golden_committed_json, "golden_mistral_legacy_json", "mistral-legacy"),
        CASE(test_golden_committed_json, "golden_mistral_first_json", "mistral-first"),
        CASE(test_golden_committed_json, "golden_mistral_always_json", "mistral-always"),
        CASE(test_golden_committed_json, "golden_gemma_json", "gemma"),
        CASE(test_golden_committed_gguf, "golden_gpt2_gguf", "gpt2"),
        CASE(test_golden_committed_gguf, "golden_llama3_gguf", "llama3"),
        CASE(test_golden_committed_gguf, "golden_o200k_gguf", "o200k"),
        CASE(test_golden_committed_gguf, "golden_qwen2_gguf", "qwen2"),
        CASE(test_golden_committed_gguf, "golden_smollm_gguf", "smollm"),
        CASE(test_golden_committed_gguf, "golden_spm_gguf", "spm"),
        CASE(test_golden_committed_gguf, "golden_gemma_gguf", "gemma"),
        CASE(test_golden_smollm2, "golden_smollm2_gguf", NULL),
        CASE(test_golden_fetched, "golden_llama2", "llama2"),
        CASE(test_golden_fetched, "golden_llama3_1", "llama3_1"),
        CASE(test_golden_fetched, "golden_qwen3", "qwen3"),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
