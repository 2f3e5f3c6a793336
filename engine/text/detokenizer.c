/* Streaming decode: append the piece's bytes, let go of what is complete.
 *
 * Byte-level: the result equals decoding all bytes at once and replacing each maximal ill-formed
 * part.
 *
 * Byte fallback: Hugging Face tokenizers looks at a whole run of byte tokens, and if any of it is
 * ill-formed turns every byte of the run into U+FFFD. A stream cannot wait for a run to end, so
 * characters that are complete are let go, and each byte that cannot be part of a character becomes
 * one U+FFFD. The two differ only in runs that hold both. Such a run ends at the next token of
 * text: bytes held at that point are ill-formed whatever follows.
 */
#include "engine/text/detokenizer.h"

#include <string.h>

#include "common/utf8.h"
#include "engine/text/tokenizer_internal.h"

void detokenizer_init(detokenizer *d, const tokenizer *t, bool skip_special, bool has_prefix)
{
    *d = (detokenizer){.tokenizer = t, .skip_special = skip_special, .at_start = !has_prefix};
}

static void put_replacement(strbuf *out)
{
    strbuf_append(out, UTF8_REPLACEMENT, sizeof(UTF8_REPLACEMENT) - 1);
}

/* Lets go of all that is complete in text and holds an incomplete tail. one_by_one: of an
 * ill-formed part, each byte is replaced. */
static void put_text(detokenizer *d, const char *text, size_t n_bytes, bool one_by_one, strbuf *out)
{
    size_t done = 0; /* text before it was appended */
    size_t i = 0;
    while (i < n_bytes) {
        size_t used;
        utf8_status status = utf8_decode(NULL, &used, text + i, n_bytes - i);
        if (status == UTF8_OK) {
            i += used;
            continue;
        }
        strbuf_append(out, text + done, i - done);
        if (status == UTF8_INCOMPLETE) {
            memcpy(d->held, text + i, used);
            d->n_held = (int32_t)used;
        } else {
            for (size_t k = 0; k < (one_by_one ? used : 1); k++)
                put_replacement(out);
        }
        i += used;
        done = i;
    }
    strbuf_append(out, text + done, i - done);
}

/* text follows what is held. */
static void put_bytes(detokenizer *d, const char *text, size_t n_bytes, bool one_by_one,
                      strbuf *out)
{
    /* Held bytes become a character or ill-formed within the next three. */
    while (d->n_held > 0 && n_bytes > 0) {
        char joined[8];
        size_t n_held = (size_t)d->n_held;
        size_t n_next = PGD_MIN(n_bytes, sizeof(joined) - n_held);
        size_t used;
        memcpy(joined, d->held, n_held);
        memcpy(joined + n_held, text, n_next);
        utf8_status status = utf8_decode(NULL, &used, joined, n_held + n_next);
        if (status == UTF8_INCOMPLETE) {
            PGD_ASSERT(n_next == n_bytes && used == n_held + n_next && used < sizeof(d->held));
            memcpy(d->held, joined, used);
            d->n_held = (int32_t)used;
            return;
        }
        PGD_ASSERT(used >= n_held);
        d->n_held = 0;
        if (status == UTF8_OK)
            strbuf_append(out, joined, used);
        else
            for (size_t k = 0; k < (one_by_one ? used : 1); k++)
                put_replacement(out);
        text += used - n_held;
        n_bytes -= used - n_held;
    }
    put_text(d, text, n_bytes, one_by_one, out);
}

static void put_held(detokenizer *d, bool one_by_one, strbuf *out)
{
    for (int32_t k = 0; k < (one_by_one ? d->n_held : PGD_MIN(d->n_held, 1)); k++)
        put_replacement(out);
    d->n_held = 0;
}

static bool has_byte_fallback(const tokenizer *t)
{
    return t->model != TOKENIZER_BYTE_BPE && t->decodes_bytes;
}

/* The piece of the first token under FIRST_SPACE_STRIP_ALL: its text without any word mark. */
static void put_without_marks(detokenizer *d, token_id id, strbuf *out)
{
    size_t n_bytes;
    const char *text = vocab_text(&d->tokenizer->texts, id, &n_bytes);
    for (size_t i = 0; i < n_bytes;) {
        const char *mark = memmem(text + i, n_bytes - i, TOKENIZER_WORD_MARK, TOKENIZER_MARK_BYTES);
        size_t end = mark == NULL ? n_bytes : (size_t)(mark - text);
        put_bytes(d, text + i, end - i, true, out);
        i = end + (mark == NULL ? 0 : TOKENIZER_MARK_BYTES);
    }
}

void detokenizer_push(detokenizer *d, token_id id, strbuf *out)
{
    const tokenizer *t = d->tokenizer;
    size_t n_bytes;
    const char *piece = tokenizer_piece(t, id, &n_bytes);
    if (d->skip_special && tokenizer_is_special(t, id))
        return;
    bool is_byte = tokenizer_is_byte(t, id);
    bool fallback = has_byte_fallback(t);
    if (fallback && !is_byte)
        put_held(d, true, out);
    if (d->at_start && n_bytes > 0) {
        d->at_start = false;
        if (t->first_space == FIRST_SPACE_STRIP_ONE && piece[0] == ' ') {
            piece++;
            n_bytes--;
        } else if (t->first_space == FIRST_SPACE_STRIP_ALL && !is_byte) {
            put_without_marks(d, id, out);
            return;
        }
    }
    put_bytes(d, piece, n_bytes, fallback, out);
}

void detokenizer_flush(detokenizer *d, strbuf *out)
{
    put_held(d, has_byte_fallback(d->tokenizer), out);
}
