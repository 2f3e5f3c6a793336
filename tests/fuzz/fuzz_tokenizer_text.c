/* Any bytes as text through the tokenizers of tests/data: ids lie in the vocabulary, decoding gives
 * UTF-8, and byte-level tokenizers give valid text back exactly. The first byte chooses tokenizer
 * and flags. */
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/utf8.h"
#include "engine/text/detokenizer.h"
#include "engine/text/tokenizer.h"
#include "tests/fuzz/fuzz_input.h"

#define MAX_IDS 65536

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);
int LLVMFuzzerInitialize(int *argc, char ***argv);

typedef struct subject {
    const char *path; /* directory with a tokenizer.json, or a GGUF file */
    tokenizer *tok;
    bool is_lossless; /* a token for each byte, no normalizer */
} subject;

static subject subjects[] = {
    {"tests/data/tokenizers/gpt2", NULL, true},
    {"tests/data/tokenizers/llama3", NULL, true},
    {"tests/data/tokenizers/o200k", NULL, true},
    {"tests/data/tokenizers/qwen2/vocab.gguf", NULL, false},
    {"tests/data/tokenizers/smollm", NULL, false},
    {"tests/data/tokenizers/spm/vocab.gguf", NULL, false},
    {"tests/data/tokenizers/mistral-first", NULL, false},
    {"tests/data/tokenizers/mistral-legacy", NULL, false},
    {"tests/data/tokenizers/added", NULL, false},
};

static void load(subject *s)
{
    pgd_why why = {{0}};
    pgd_err err;
    gguf_file *gguf = NULL;
    if (strstr(s->path, ".gguf") == NULL) {
        err = tokenizer_create_from_dir(&s->tok, s->path, &why);
    } else {
        err = gguf_open(&gguf, s->path, &why);
        if (err == PGD_OK)
            err = tokenizer_create_from_gguf(&s->tok, gguf, &why);
        gguf_close(gguf);
    }
    PGD_ASSERTF(err == PGD_OK, "%s: %s (run this at the root of the tree)", s->path, why.text);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fuzz_quiet();
    for (size_t i = 0; i < PGD_ARRAY_LEN(subjects); i++)
        load(&subjects[i]);
    return 0;
}

static void decode(const tokenizer *t, const token_id *ids, int32_t n_ids, bool skip_special,
                   strbuf *text, strbuf *pieces)
{
    detokenizer d;
    detokenizer_init(&d, t, skip_special, false);
    for (int32_t i = 0; i < n_ids; i++) {
        size_t n;
        PGD_ASSERTF(ids[i] >= 0 && ids[i] < tokenizer_vocab_size(t), "id %d of %d", ids[i],
                    tokenizer_vocab_size(t));
        const char *piece = tokenizer_piece(t, ids[i], &n);
        strbuf_append(pieces, piece, n);
        detokenizer_push(&d, ids[i], text);
    }
    detokenizer_flush(&d, text);
    PGD_ASSERT(text->n_bytes == 0 || utf8_is_valid(text->data, text->n_bytes, NULL));
}

static bool is_equal(const strbuf *b, const char *text, size_t n_bytes)
{
    return b->n_bytes == n_bytes && (n_bytes == 0 || memcmp(b->data, text, n_bytes) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes == 0)
        return 0;
    const subject *s = &subjects[data[0] % PGD_ARRAY_LEN(subjects)];
    unsigned flags = (unsigned)(data[0] / PGD_ARRAY_LEN(subjects)) %
                     (TOKENIZER_ADD_SPECIAL + TOKENIZER_PARSE_SPECIAL + 1);
    const char *text = (const char *)data + 1;
    token_id *ids;
    int32_t n_ids;
    strbuf out;
    strbuf pieces;
    n_bytes--;
    pgd_err err = tokenizer_encode(&ids, &n_ids, s->tok, text, n_bytes, flags, MAX_IDS);
    if (err != PGD_OK) {
        PGD_ASSERT(err == PGD_ERANGE);
        return 0;
    }
    strbuf_init(&out);
    strbuf_init(&pieces);
    decode(s->tok, ids, n_ids, data[0] >= 128, &out, &pieces);
    if (s->is_lossless && flags == 0) {
        PGD_ASSERT(is_equal(&pieces, text, n_bytes));
        PGD_ASSERT(!utf8_is_valid(text, n_bytes, NULL) || is_equal(&out, text, n_bytes));
    }
    strbuf_deinit(&out);
    strbuf_deinit(&pieces);
    mem_free(ids);
    return 0;
}
