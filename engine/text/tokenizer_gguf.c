/* Tokenizer from GGUF metadata.
 *
 *   tokenizer.ggml.model       "gpt2" (byte-level BPE) or "llama" (SentencePiece-BPE)
 *   tokenizer.ggml.pre         pre-tokenizer of gpt2
 *   tokenizer.ggml.tokens      strings, by id
 *   tokenizer.ggml.token_type  1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
 *   tokenizer.ggml.scores      of llama
 *   tokenizer.ggml.merges      of gpt2, "left right" by rank
 *   tokenizer.ggml.{bos,eos,unknown}_token_id, add_bos_token, add_eos_token, add_space_prefix
 *
 * A byte without a token in a gpt2 vocabulary is left out of the ids, as the reference does;
 * unknown_token_id is only asked for by llama.
 *
 * What the file does not say follows the Hugging Face tokenizers that such files are made from:
 * Qwen2's text is put into NFC, Llama 3's words that are entries are not merged, a SentencePiece
 * model adds its space in front of every stretch between special tokens.
 */
#include <math.h>
#include <string.h>

#include "common/mem.h"
#include "engine/text/tokenizer_internal.h"

enum {
    TYPE_NORMAL = 1,
    TYPE_UNKNOWN = 2,
    TYPE_CONTROL = 3,
    TYPE_USER = 4,
    TYPE_UNUSED = 5,
    TYPE_BYTE = 6
};

#define KEY(name) "tokenizer.ggml." name

/* The array of that key, of strings or of numbers. NULL and PGD_OK when absent. */
static pgd_err get_array(const gguf_value **out, const gguf_file *file, const char *key,
                         bool strings, pgd_why *why)
{
    const gguf_value *v = gguf_get_value(file, key);
    *out = v;
    if (v == NULL)
        return PGD_OK;
    bool fits = v->type == GGUF_ARRAY && v->elem_type != GGUF_ARRAY &&
                (v->elem_type == GGUF_STRING) == strings;
    if (!fits) {
        return pgd_fail(why, PGD_EFORMAT, "tokenizer: %s is not an array of %s", key,
                        strings ? "strings" : "numbers");
    }
    return PGD_OK;
}

static pgd_err check_length(const gguf_value *v, const char *key, int32_t n_tokens, pgd_why *why)
{
    if (v->n_elems != (uint64_t)n_tokens) {
        return pgd_fail(why, PGD_EFORMAT,
                        "tokenizer: expected %d values in %s, as many as tokens, got %llu",
                        n_tokens, key, (unsigned long long)v->n_elems);
    }
    return PGD_OK;
}

static pgd_err load_tokens(tokenizer *t, const gguf_file *file, const gguf_value *tokens,
                           pgd_why *why)
{
    int32_t n_tokens = (int32_t)tokens->n_elems;
    const gguf_value *types;
    PGD_TRY(get_array(&types, file, KEY("token_type"), false, why));
    if (types != NULL)
        PGD_TRY(check_length(types, KEY("token_type"), n_tokens, why));
    PGD_TRY(tokenizer_reserve(t, n_tokens, 8 * (size_t)n_tokens, why));
    gguf_array_iter it;
    gguf_array_begin(&it, tokens);
    gguf_string text;
    for (token_id id = 0; gguf_array_next_string(&it, &text); id++) {
        int64_t type = TYPE_NORMAL;
        if (types != NULL && !gguf_array_i64(types, (uint64_t)id, &type))
            type = 0;
        unsigned attrs = 0;
        switch (type) {
        case TYPE_NORMAL:
            attrs = TOKEN_MODEL;
            break;
        case TYPE_UNKNOWN:
        case TYPE_CONTROL:
            attrs = TOKEN_SPECIAL | TOKEN_ADDED;
            break;
        case TYPE_USER:
            attrs = TOKEN_ADDED;
            break;
        case TYPE_UNUSED:
        case TYPE_BYTE:
            break;
        default:
            return pgd_fail(why, PGD_EFORMAT,
                            "tokenizer: type of token %d is %lld, expected 1 to 6", id,
                            (long long)type);
        }
        PGD_TRY(tokenizer_set_token(t, text.data, text.n_bytes, attrs, true, why));
    }
    for (token_id id = 0; id < n_tokens; id++) {
        if (t->attrs[id] & TOKEN_ADDED) {
            added_flags flags = {.special = (t->attrs[id] & TOKEN_SPECIAL) != 0};
            PGD_TRY(tokenizer_add_added(t, id, flags, false, why));
        }
    }
    return PGD_OK;
}

static pgd_err load_merges(tokenizer *t, const gguf_file *file, pgd_why *why)
{
    const gguf_value *merges;
    PGD_TRY(get_array(&merges, file, KEY("merges"), true, why));
    if (merges == NULL)
        return pgd_fail(why, PGD_EFORMAT, "tokenizer: expected %s, it is absent", KEY("merges"));
    if (merges->n_elems > INT32_MAX ||
        bpe_rules_reserve(&t->rules, (int32_t)merges->n_elems) != PGD_OK) {
        return pgd_fail(why, PGD_EFORMAT,
                        "tokenizer: %s has %llu entries, more than this build can hold",
                        KEY("merges"), (unsigned long long)merges->n_elems);
    }
    gguf_array_iter it;
    gguf_array_begin(&it, merges);
    gguf_string s;
    for (uint32_t rank = 0; gguf_array_next_string(&it, &s); rank++) {
        /* The first character of the left half may be a space itself only in damaged files. */
        const char *space = s.n_bytes > 1 ? memchr(s.data + 1, ' ', s.n_bytes - 1) : NULL;
        if (space == NULL) {
            return pgd_fail(
                why, PGD_EFORMAT,
                "tokenizer: expected two entries with a space between in merge %u, got \"%.*s\"",
                rank, (int)PGD_MIN(s.n_bytes, 80), s.data);
        }
        size_t n_left = (size_t)(space - s.data);
        PGD_TRY(
            tokenizer_add_merge(t, s.data, n_left, space + 1, s.n_bytes - n_left - 1, rank, why));
    }
    return PGD_OK;
}

static pgd_err load_scores(tokenizer *t, const gguf_file *file, pgd_why *why)
{
    int32_t n_tokens = t->texts.n_tokens;
    const gguf_value *scores;
    PGD_TRY(get_array(&scores, file, KEY("scores"), false, why));
    if (scores == NULL)
        return pgd_fail(why, PGD_EFORMAT, "tokenizer: expected %s, it is absent", KEY("scores"));
    PGD_TRY(check_length(scores, KEY("scores"), n_tokens, why));
    t->scores = mem_calloc((size_t)n_tokens, sizeof(*t->scores));
    if (t->scores == NULL)
        return PGD_ENOMEM;
    for (token_id id = 0; id < n_tokens; id++) {
        double score;
        if (!gguf_array_f64(scores, (uint64_t)id, &score) || !isfinite((float)score)) {
            return pgd_fail(why, PGD_EFORMAT, "tokenizer: score of token %d is not a finite number",
                            id);
        }
        t->scores[id] = (float)score;
    }
    return PGD_OK;
}

static pgd_err load_id(token_id *out, const tokenizer *t, const gguf_file *file, const char *key,
                       pgd_why *why)
{
    int64_t id;
    if (gguf_get_value(file, key) == NULL)
        return PGD_OK;
    if (!gguf_get_i64(file, key, &id) || id < -1 || id >= t->texts.n_tokens) {
        return pgd_fail(why, PGD_EFORMAT, "tokenizer: %s is not the id of one of the %d tokens",
                        key, t->texts.n_tokens);
    }
    *out = (token_id)id;
    return PGD_OK;
}

/* absent: what holds when the key is not there. */
static pgd_err load_flag(bool *out, const gguf_file *file, const char *key, bool absent,
                         pgd_why *why)
{
    *out = absent;
    if (gguf_get_value(file, key) != NULL && !gguf_get_bool(file, key, out))
        return pgd_fail(why, PGD_EFORMAT, "tokenizer: expected true or false in %s", key);
    return PGD_OK;
}

static pgd_err load_specials(tokenizer *t, const gguf_file *file, pgd_why *why)
{
    bool is_spm = t->model == TOKENIZER_SPM;
    PGD_TRY(load_id(&t->bos_id, t, file, KEY("bos_token_id"), why));
    PGD_TRY(load_id(&t->eos_id, t, file, KEY("eos_token_id"), why));
    if (is_spm)
        PGD_TRY(load_id(&t->unk_id, t, file, KEY("unknown_token_id"), why));
    bool add_bos;
    bool add_eos;
    PGD_TRY(load_flag(&add_bos, file, KEY("add_bos_token"),
                      is_spm || t->rule == PRETOKENIZER_LLAMA3, why));
    PGD_TRY(load_flag(&add_eos, file, KEY("add_eos_token"), false, why));
    if (add_bos && t->bos_id >= 0)
        t->prefix[t->n_prefix++] = t->bos_id;
    if (add_eos && t->eos_id >= 0)
        t->suffix[t->n_suffix++] = t->eos_id;
    return PGD_OK;
}

static pgd_err load_byte_level(tokenizer *t, const gguf_file *file, const gguf_value *tokens,
                               pgd_why *why)
{
    gguf_string pre;
    if (!gguf_get_string(file, KEY("pre"), &pre)) {
        return pgd_fail(
            why, PGD_EUNSUPPORTED,
            "tokenizer: expected %s, it is absent; convert the model again with a newer tool",
            KEY("pre"));
    }
    if (!pretokenizer_from_name(&t->rule, pre.data, pre.n_bytes)) {
        return pgd_fail(
            why, PGD_EUNSUPPORTED,
            "tokenizer: pre-tokenizer \"%.*s\" is not supported; expected one of gpt-2, llama-bpe, "
            "qwen2, smollm, gpt-4o, llama4 in %s",
            (int)PGD_MIN(pre.n_bytes, 80), pre.data, KEY("pre"));
    }
    if (t->rule == PRETOKENIZER_QWEN2)
        PGD_TRY(normalizer_add(&t->normalizer, NORMALIZER_NFC, NULL, 0, NULL, 0));
    t->ignore_merges = t->rule == PRETOKENIZER_LLAMA3;
    PGD_TRY(load_tokens(t, file, tokens, why));
    return load_merges(t, file, why);
}

static pgd_err load_spm(tokenizer *t, const gguf_file *file, const gguf_value *tokens, pgd_why *why)
{
    bool prefix;
    PGD_TRY(load_flag(&prefix, file, KEY("add_space_prefix"), true, why));
    if (prefix) {
        PGD_TRY(normalizer_add(&t->normalizer, NORMALIZER_PREPEND, NULL, 0, TOKENIZER_WORD_MARK,
                               TOKENIZER_MARK_BYTES));
    }
    PGD_TRY(normalizer_add(&t->normalizer, NORMALIZER_REPLACE, " ", 1, TOKENIZER_WORD_MARK,
                           TOKENIZER_MARK_BYTES));
    t->marks_are_spaces = true;
    t->decodes_bytes = true;
    t->first_space = prefix ? FIRST_SPACE_STRIP_ONE : FIRST_SPACE_KEEP;
    PGD_TRY(load_tokens(t, file, tokens, why));
    return load_scores(t, file, why);
}

static pgd_err load(tokenizer *t, const gguf_file *file, pgd_why *why)
{
    gguf_string model;
    if (!gguf_get_string(file, KEY("model"), &model)) {
        return pgd_fail(why, PGD_EFORMAT,
                        "tokenizer: expected %s, it is absent: the file has no tokenizer",
                        KEY("model"));
    }
    const gguf_value *tokens;
    PGD_TRY(get_array(&tokens, file, KEY("tokens"), true, why));
    if (tokens == NULL || tokens->n_elems == 0 || tokens->n_elems > VOCAB_MAX_TOKENS) {
        return pgd_fail(why, PGD_EFORMAT, "tokenizer: expected 1 to %d tokens in %s, got %llu",
                        VOCAB_MAX_TOKENS, KEY("tokens"),
                        tokens == NULL ? 0ull : (unsigned long long)tokens->n_elems);
    }
    if (model.n_bytes == 4 && memcmp(model.data, "gpt2", 4) == 0) {
        t->model = TOKENIZER_BYTE_BPE;
        PGD_TRY(load_byte_level(t, file, tokens, why));
    } else if (model.n_bytes == 5 && memcmp(model.data, "llama", 5) == 0) {
        t->model = TOKENIZER_SPM;
        PGD_TRY(load_spm(t, file, tokens, why));
    } else {
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "tokenizer: model \"%.*s\" is not supported; expected gpt2 or llama in %s",
                        (int)PGD_MIN(model.n_bytes, 80), model.data, KEY("model"));
    }
    PGD_TRY(load_specials(t, file, why));
    return tokenizer_finish(t, why);
}

pgd_err tokenizer_create_from_gguf(tokenizer **out, const gguf_file *file, pgd_why *why)
{
    tokenizer *t;
    PGD_TRY(tokenizer_alloc(&t));
    pgd_err err = load(t, file, why);
    if (err != PGD_OK) {
        tokenizer_destroy(t);
        return err;
    }
    *out = t;
    return PGD_OK;
}
