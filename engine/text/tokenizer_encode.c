/* Text to ids, in stages that each cut the text further:
 *
 *   raw text     ── added ──►                           stretches of raw text
 *   stretch      ── normalizer, added_normalized ──►    stretches of normalised text
 *   stretch      ── pretokenizer or word marks ──►      words
 *   word         ── merge ──►                           ids
 *
 * All buffers belong to one call (struct encoder) and grow to the longest stretch; nothing is
 * shared, so any number of threads encode at once. There is no cache of words: it would need a
 * lock, and merging a usual word costs less than a microsecond.
 */
#include <string.h>

#include "common/mem.h"
#include "engine/text/spm.h"
#include "engine/text/tokenizer_internal.h"
#include "engine/text/unicode_class.h"

typedef struct encoder {
    const tokenizer *t;
    token_id *ids; /* [n_ids] */
    int32_t n_ids;
    int32_t cap_ids;
    int32_t max_ids;
    bool parse_special;
    bpe_work work;
    strbuf normalized;
    strbuf spaced;
    strbuf spare;
} encoder;

static pgd_err put_id(encoder *e, token_id id)
{
    if (e->n_ids == e->max_ids)
        return PGD_ERANGE;
    if (e->n_ids == e->cap_ids) {
        int64_t cap = PGD_MIN((int64_t)e->max_ids, 2 * (int64_t)e->cap_ids + 64);
        token_id *ids = mem_realloc_array(e->ids, (size_t)cap, sizeof(*ids));
        if (ids == NULL)
            return PGD_ENOMEM;
        e->ids = ids;
        e->cap_ids = (int32_t)cap;
    }
    e->ids[e->n_ids++] = id;
    return PGD_OK;
}

/* Merges the word's symbols and puts what is left. An entry joins at most as many symbols as its
 * text has bytes, so a word too long for max_ids is refused before the work. */
static pgd_err merge_and_put(encoder *e)
{
    int64_t room = (int64_t)(e->max_ids - e->n_ids) * PGD_MAX(e->t->texts.longest_bytes, 1);
    if (e->work.n_symbols > room)
        return PGD_ERANGE;
    bpe_merge(&e->work, &e->t->rules);
    for (int32_t i = e->work.n_symbols > 0 ? 0 : -1; i >= 0; i = e->work.symbols[i].next)
        PGD_TRY(put_id(e, e->work.symbols[i].id));
    return PGD_OK;
}

static pgd_err encode_byte_word(encoder *e, const char *word, size_t n_bytes)
{
    const tokenizer *t = e->t;
    if (t->ignore_merges) {
        token_id id = vocab_find(&t->pieces, word, n_bytes);
        if (id >= 0)
            return put_id(e, id);
    }
    PGD_TRY(bpe_work_begin(&e->work, n_bytes));
    for (size_t i = 0; i < n_bytes; i++) {
        token_id id = t->byte_ids[(uint8_t)word[i]];
        if (id < 0)
            id = t->unk_id;
        if (id >= 0)
            bpe_work_add(&e->work, id, i, 1);
    }
    return merge_and_put(e);
}

/* All bytes of the character have a token of their own. */
static bool has_bytes(const tokenizer *t, const char *text, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        if (t->byte_ids[(uint8_t)text[i]] < 0)
            return false;
    return true;
}

static pgd_err encode_char_word(encoder *e, const char *word, size_t n_bytes)
{
    const tokenizer *t = e->t;
    if (t->ignore_merges) {
        token_id id = vocab_find(&t->texts, word, n_bytes);
        if (id >= 0)
            return put_id(e, id);
    }
    PGD_TRY(bpe_work_begin(&e->work, n_bytes));
    bool last_unknown = false;
    for (size_t at = 0; at < n_bytes;) {
        size_t used;
        (void)unicode_decode(word + at, n_bytes - at, &used);
        token_id id = vocab_find(&t->texts, word + at, used);
        bool unknown = false;
        if (id >= 0) {
            bpe_work_add(&e->work, id, at, used);
        } else if (t->byte_fallback && has_bytes(t, word + at, used)) {
            for (size_t i = at; i < at + used; i++)
                bpe_work_add(&e->work, t->byte_ids[(uint8_t)word[i]], i, 1);
        } else if (t->unk_id >= 0) {
            unknown = true;
            if (!last_unknown || !t->fuse_unk)
                bpe_work_add(&e->work, t->unk_id, at, used);
        }
        last_unknown = unknown;
        at += used;
    }
    return merge_and_put(e);
}

static pgd_err encode_spm_word(encoder *e, const char *word, size_t n_bytes)
{
    const tokenizer *t = e->t;
    spm_pieces pieces = {&t->texts, t->scores, t->attrs, TOKEN_MODEL};
    PGD_TRY(spm_merge(&e->work, &pieces, word, n_bytes));
    bool last_unknown = false;
    for (int32_t i = e->work.n_symbols > 0 ? 0 : -1; i >= 0; i = e->work.symbols[i].next) {
        const bpe_symbol *s = &e->work.symbols[i];
        bool unknown = false;
        if (s->id >= 0) {
            PGD_TRY(put_id(e, s->id));
        } else if (has_bytes(t, word + s->at, s->n_bytes)) {
            for (uint32_t k = 0; k < s->n_bytes; k++)
                PGD_TRY(put_id(e, t->byte_ids[(uint8_t)word[s->at + k]]));
        } else if (t->unk_id >= 0) {
            unknown = true;
            if (!last_unknown)
                PGD_TRY(put_id(e, t->unk_id));
        }
        last_unknown = unknown;
    }
    return PGD_OK;
}

static pgd_err encode_word(encoder *e, const char *word, size_t n_bytes)
{
    switch (e->t->model) {
    case TOKENIZER_BYTE_BPE:
        return encode_byte_word(e, word, n_bytes);
    case TOKENIZER_CHAR_BPE:
        return encode_char_word(e, word, n_bytes);
    case TOKENIZER_SPM:
        return encode_spm_word(e, word, n_bytes);
    }
    return PGD_OK;
}

/* A stretch without added tokens, normalised. is_first: nothing of the text lies before it. */
static pgd_err encode_metaspace(encoder *e, const char *text, size_t n_bytes, bool is_first)
{
    const tokenizer *t = e->t;
    bool marked = n_bytes >= TOKENIZER_MARK_BYTES &&
                  memcmp(text, TOKENIZER_WORD_MARK, TOKENIZER_MARK_BYTES) == 0;
    bool wants_mark = t->metaspace_prepend == METASPACE_ALWAYS ||
                      (t->metaspace_prepend == METASPACE_FIRST && is_first);
    strbuf_reset(&e->spaced);
    if (wants_mark && !marked && text[0] != ' ')
        strbuf_append(&e->spaced, TOKENIZER_WORD_MARK, TOKENIZER_MARK_BYTES);
    for (size_t i = 0; i < n_bytes;) {
        const char *space = memchr(text + i, ' ', n_bytes - i);
        size_t end = space == NULL ? n_bytes : (size_t)(space - text);
        strbuf_append(&e->spaced, text + i, end - i);
        if (space != NULL) {
            strbuf_append(&e->spaced, TOKENIZER_WORD_MARK, TOKENIZER_MARK_BYTES);
            end++;
        }
        i = end;
    }
    if (e->spaced.failed)
        return PGD_ENOMEM;
    const char *words = e->spaced.data;
    size_t n = e->spaced.n_bytes;
    if (!t->metaspace_split)
        return encode_word(e, words, n);
    for (size_t start = 0; start < n;) {
        size_t from = start + 1;
        const char *mark =
            memmem(words + from, n - from, TOKENIZER_WORD_MARK, TOKENIZER_MARK_BYTES);
        size_t end = mark == NULL ? n : (size_t)(mark - words);
        PGD_TRY(encode_word(e, words + start, end - start));
        start = end;
    }
    return PGD_OK;
}

static pgd_err encode_stretch(encoder *e, const char *text, size_t n_bytes, bool is_first)
{
    const tokenizer *t = e->t;
    if (n_bytes == 0)
        return PGD_OK;
    if (t->has_metaspace)
        return encode_metaspace(e, text, n_bytes, is_first);
    if (t->add_prefix_space && text[0] != ' ') {
        strbuf_reset(&e->spaced);
        strbuf_append_char(&e->spaced, ' ');
        strbuf_append(&e->spaced, text, n_bytes);
        if (e->spaced.failed)
            return PGD_ENOMEM;
        text = e->spaced.data;
        n_bytes = e->spaced.n_bytes;
    }
    for (size_t start = 0; start < n_bytes;) {
        size_t end = pretokenizer_next(t->rule, text, n_bytes, start);
        PGD_TRY(encode_word(e, text + start, end - start));
        start = end;
    }
    return PGD_OK;
}

/* A stretch of raw text between added tokens. */
static pgd_err encode_raw(encoder *e, const char *text, size_t n_bytes, bool is_first)
{
    const tokenizer *t = e->t;
    if (t->normalizer.n_steps > 0) {
        PGD_TRY(normalizer_apply(&t->normalizer, text, n_bytes, &e->normalized, &e->spare));
        text = e->normalized.data == NULL ? "" : e->normalized.data;
        n_bytes = e->normalized.n_bytes;
    }
    added_iter it;
    added_part part;
    added_iter_begin(&it, &t->added_normalized, text, n_bytes, e->parse_special);
    while (added_iter_next(&it, &part)) {
        if (part.id >= 0) {
            PGD_TRY(put_id(e, part.id));
        } else {
            PGD_TRY(encode_stretch(e, text + part.start, part.end - part.start,
                                   is_first && part.start == 0));
        }
    }
    return PGD_OK;
}

static pgd_err encode_all(encoder *e, const char *text, size_t n_bytes, bool add_special)
{
    const tokenizer *t = e->t;
    for (int32_t i = 0; add_special && i < t->n_prefix; i++)
        PGD_TRY(put_id(e, t->prefix[i]));
    added_iter it;
    added_part part;
    added_iter_begin(&it, &t->added, text, n_bytes, e->parse_special);
    while (added_iter_next(&it, &part))
        if (part.id >= 0)
            PGD_TRY(put_id(e, part.id));
        else
            PGD_TRY(encode_raw(e, text + part.start, part.end - part.start, part.start == 0));
    for (int32_t i = 0; add_special && i < t->n_suffix; i++)
        PGD_TRY(put_id(e, t->suffix[i]));
    return PGD_OK;
}

pgd_err tokenizer_encode(token_id **ids, int32_t *n_ids, const tokenizer *t, const char *text,
                         size_t n_bytes, unsigned flags, int32_t max_ids)
{
    *ids = NULL;
    *n_ids = 0;
    if (n_bytes > INT32_MAX / 2)
        return PGD_ERANGE;
    encoder e = {.t = t,
                 .max_ids = PGD_MAX(max_ids, 0),
                 .parse_special = (flags & TOKENIZER_PARSE_SPECIAL) != 0};
    strbuf_init(&e.normalized);
    strbuf_init(&e.spaced);
    strbuf_init(&e.spare);
    pgd_err err = encode_all(&e, text, n_bytes, (flags & TOKENIZER_ADD_SPECIAL) != 0);
    strbuf_deinit(&e.normalized);
    strbuf_deinit(&e.spaced);
    strbuf_deinit(&e.spare);
    bpe_work_deinit(&e.work);
    if (err != PGD_OK) {
        mem_free(e.ids);
        return err;
    }
    *ids = e.ids;
    *n_ids = e.n_ids;
    return PGD_OK;
}
