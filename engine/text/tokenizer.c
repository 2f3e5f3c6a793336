/* The tokenizer: what its loaders build, and the getters. Encoding is in tokenizer_encode.c.
 *
 * Two tables of strings are kept: texts, as the file spells entries (merges and tokenizer_find use
 * it), and pieces, the bytes they decode to (the detokenizer and byte-level look-ups use it).
 * Keeping both costs a few megabytes at most and saves decoding at every token.
 */
#include "engine/text/tokenizer.h"

#include <string.h>

#include "common/bytes.h"
#include "common/mem.h"
#include "engine/text/byte_alphabet.h"
#include "engine/text/tokenizer_internal.h"

pgd_err tokenizer_create(tokenizer **out, const model_file *file, pgd_why *why)
{
    const gguf_file *gguf = model_file_get_gguf(file);
    if (gguf != NULL)
        return tokenizer_create_from_gguf(out, gguf, why);
    PGD_TRY(tokenizer_create_from_dir(out, model_file_get_dir(file), why));
    const model_config *cfg = model_file_get_config(file);
    int32_t n_tokens = (*out)->texts.n_tokens;
    if ((*out)->bos_id < 0 && cfg->bos_id < n_tokens)
        (*out)->bos_id = cfg->bos_id;
    if ((*out)->eos_id < 0 && cfg->n_eos_ids > 0 && cfg->eos_ids[0] < n_tokens)
        (*out)->eos_id = cfg->eos_ids[0];
    return PGD_OK;
}

pgd_err tokenizer_alloc(tokenizer **out)
{
    tokenizer *t = mem_calloc(1, sizeof(*t));
    if (t == NULL)
        return PGD_ENOMEM;
    t->unk_id = -1;
    t->bos_id = -1;
    t->eos_id = -1;
    for (int32_t b = 0; b < 256; b++)
        t->byte_ids[b] = -1;
    *out = t;
    return PGD_OK;
}

void tokenizer_destroy(tokenizer *t)
{
    if (t == NULL)
        return;
    vocab_deinit(&t->texts);
    vocab_deinit(&t->pieces);
    mem_free(t->attrs);
    mem_free(t->scores);
    bpe_rules_deinit(&t->rules);
    normalizer_deinit(&t->normalizer);
    added_tokens_deinit(&t->added);
    added_tokens_deinit(&t->added_normalized);
    mem_free(t);
}

pgd_err tokenizer_reserve(tokenizer *t, int32_t n_tokens, size_t n_bytes, pgd_why *why)
{
    if (n_tokens <= 0 || n_tokens > VOCAB_MAX_TOKENS) {
        return pgd_fail(why, PGD_EFORMAT, "tokenizer: expected 1 to %d tokens, got %d",
                        VOCAB_MAX_TOKENS, n_tokens);
    }
    t->attrs = mem_calloc((size_t)n_tokens, sizeof(*t->attrs));
    if (t->attrs == NULL)
        return PGD_ENOMEM;
    PGD_TRY(vocab_reserve(&t->texts, n_tokens, n_bytes));
    return vocab_reserve(&t->pieces, n_tokens, n_bytes);
}

/* The byte that "<0x41>" stands for, or -1. */
static int32_t fallback_byte(const char *text, size_t n_bytes)
{
    if (n_bytes != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>')
        return -1;
    int32_t high = bytes_hex_digit(text[3]);
    int32_t low = bytes_hex_digit(text[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/* Writes what text decodes to into out[n_bytes]; returns its length. */
static size_t decode_entry(const tokenizer *t, char *out, const char *text, size_t n_bytes,
                           unsigned *attrs)
{
    if (t->model == TOKENIZER_BYTE_BPE) {
        ptrdiff_t n = byte_alphabet_read(out, text, n_bytes);
        if (n >= 0)
            return (size_t)n;
        memcpy(out, text, n_bytes);
        return n_bytes;
    }
    int32_t byte = t->decodes_bytes ? fallback_byte(text, n_bytes) : -1;
    if (byte >= 0) {
        *attrs |= TOKEN_BYTE;
        out[0] = (char)byte;
        return 1;
    }
    size_t n = 0;
    for (size_t i = 0; i < n_bytes;) {
        if (t->marks_are_spaces && n_bytes - i >= TOKENIZER_MARK_BYTES &&
            memcmp(text + i, TOKENIZER_WORD_MARK, TOKENIZER_MARK_BYTES) == 0) {
            out[n++] = ' ';
            i += TOKENIZER_MARK_BYTES;
        } else {
            out[n++] = text[i++];
        }
    }
    return n;
}

pgd_err tokenizer_set_token(tokenizer *t, const char *text, size_t n_bytes, unsigned attrs,
                            bool indexed, pgd_why *why)
{
    token_id id = t->texts.n_tokens;
    if (n_bytes > VOCAB_MAX_TOKEN_BYTES) {
        return pgd_fail(why, PGD_EFORMAT, "tokenizer: token %d has %zu bytes, expected at most %d",
                        id, n_bytes, VOCAB_MAX_TOKEN_BYTES);
    }
    char small[256];
    char *piece = n_bytes <= sizeof(small) ? small : mem_alloc(n_bytes);
    if (piece == NULL)
        return PGD_ENOMEM;
    size_t n_piece = decode_entry(t, piece, text, n_bytes, &attrs);
    t->attrs[id] = (uint8_t)attrs;
    pgd_err err = vocab_add(&t->texts, text, n_bytes, indexed && n_bytes > 0);
    if (err == PGD_OK) {
        bool sought = t->model == TOKENIZER_BYTE_BPE && t->ignore_merges && (attrs & TOKEN_MODEL);
        err = vocab_add(&t->pieces, piece, n_piece, sought && n_piece > 0);
    }
    if (piece != small)
        mem_free(piece);
    return err;
}

pgd_err tokenizer_add_merge(tokenizer *t, const char *left, size_t n_left, const char *right,
                            size_t n_right, uint32_t rank, pgd_why *why)
{
    token_id a = vocab_find(&t->texts, left, n_left);
    token_id b = vocab_find(&t->texts, right, n_right);
    char joined[2 * 256];
    if (a < 0 || b < 0) {
        return pgd_fail(
            why, PGD_EFORMAT,
            "tokenizer: merge %u joins \"%.*s\" and \"%.*s\", expected both in the vocabulary",
            rank, (int)PGD_MIN(n_left, 80), left, (int)PGD_MIN(n_right, 80), right);
    }
    size_t n = n_left + n_right;
    char *text = n <= sizeof(joined) ? joined : mem_alloc(n);
    if (text == NULL)
        return PGD_ENOMEM;
    memcpy(text, left, n_left);
    memcpy(text + n_left, right, n_right);
    token_id merged = vocab_find(&t->texts, text, n);
    if (text != joined)
        mem_free(text);
    if (merged < 0) {
        return pgd_fail(why, PGD_EFORMAT,
                        "tokenizer: merge %u gives \"%.*s%.*s\", expected it in the vocabulary",
                        rank, (int)PGD_MIN(n_left, 80), left, (int)PGD_MIN(n_right, 80), right);
    }
    bpe_rules_add(&t->rules, a, b, rank, merged);
    return PGD_OK;
}

pgd_err tokenizer_add_added(tokenizer *t, token_id id, added_flags flags, bool normalized,
                            pgd_why *why)
{
    size_t n_bytes;
    const char *text = vocab_text(&t->texts, id, &n_bytes);
    if (n_bytes == 0)
        return PGD_OK; /* an empty text cannot be found */
    strbuf content;
    strbuf spare;
    strbuf_init(&content);
    strbuf_init(&spare);
    pgd_err err = PGD_OK;
    if (normalized && t->normalizer.n_steps > 0) {
        err = normalizer_apply(&t->normalizer, text, n_bytes, &content, &spare);
        text = content.data;
        n_bytes = content.n_bytes;
    }
    if (err == PGD_OK && n_bytes > 0) {
        err = added_tokens_add(normalized ? &t->added_normalized : &t->added, text, n_bytes, id,
                               flags);
    }
    if (err == PGD_ERANGE) {
        err = pgd_fail(why, PGD_EFORMAT,
                       "tokenizer: added token %d has %zu bytes, expected at most %d", id, n_bytes,
                       ADDED_MAX_BYTES);
    }
    strbuf_deinit(&content);
    strbuf_deinit(&spare);
    return err;
}

pgd_err tokenizer_finish(tokenizer *t, pgd_why *why)
{
    int32_t n_tokens = t->texts.n_tokens;
    for (int32_t b = 0; b < 256; b++) {
        char text[8];
        size_t n_bytes;
        if (t->model == TOKENIZER_BYTE_BPE) {
            n_bytes = byte_alphabet_spell(text, (uint8_t)b);
        } else {
            static const char hex[] = "0123456789ABCDEF";
            memcpy(text, "<0x00>", 6);
            text[3] = hex[b >> 4];
            text[4] = hex[b & 15];
            n_bytes = 6;
        }
        t->byte_ids[b] = vocab_find(&t->texts, text, n_bytes);
    }
    const struct {
        const char *name;
        token_id id;
    } named[] = {{"unknown", t->unk_id}, {"bos", t->bos_id}, {"eos", t->eos_id}};
    for (size_t i = 0; i < PGD_ARRAY_LEN(named); i++) {
        if (named[i].id >= n_tokens || named[i].id < -1) {
            return pgd_fail(why, PGD_EFORMAT, "tokenizer: %s token id is %d, expected below %d",
                            named[i].name, named[i].id, n_tokens);
        }
    }
    return PGD_OK;
}

int32_t tokenizer_vocab_size(const tokenizer *t)
{
    return t->texts.n_tokens;
}

static bool has_attr(const tokenizer *t, token_id id, unsigned attr)
{
    return id >= 0 && id < t->texts.n_tokens && (t->attrs[id] & attr);
}

bool tokenizer_is_special(const tokenizer *t, token_id id)
{
    return has_attr(t, id, TOKEN_SPECIAL);
}

bool tokenizer_is_byte(const tokenizer *t, token_id id)
{
    return has_attr(t, id, TOKEN_BYTE);
}

token_id tokenizer_bos_id(const tokenizer *t)
{
    return t->bos_id;
}

token_id tokenizer_eos_id(const tokenizer *t)
{
    return t->eos_id;
}

token_id tokenizer_find(const tokenizer *t, const char *text, size_t n_bytes)
{
    token_id id = vocab_find(&t->texts, text, n_bytes);
    if (id < 0 && n_bytes > 0)
        id = added_tokens_find(&t->added, text, n_bytes);
    for (token_id i = 0; id < 0 && n_bytes > 0 && i < t->texts.n_tokens; i++) {
        size_t n;
        if ((t->attrs[i] & TOKEN_ADDED) && n_bytes == (vocab_text(&t->texts, i, &n), n) &&
            memcmp(text, vocab_text(&t->texts, i, &n), n) == 0)
            id = i;
    }
    return id;
}

const char *tokenizer_piece(const tokenizer *t, token_id id, size_t *n_bytes)
{
    if (id < 0 || id >= t->pieces.n_tokens) {
        *n_bytes = 0;
        return "";
    }
    return vocab_text(&t->pieces, id, n_bytes);
}

bool tokenizer_strips_first_space(const tokenizer *t)
{
    return t->first_space != FIRST_SPACE_KEEP;
}
