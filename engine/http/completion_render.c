/* Arrays are kept as text, elements separated by commas: a token is rendered once, when it comes,
 * and an answer is put together by copying. An allocation that failed stays noted in its buffer and
 * passes to the answer (strbuf.failed), which is then not sent. */
#include "engine/http/completion_render.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

void completion_render_init(completion_render *r, const tokenizer *tok, bool wants_ids,
                            bool wants_logprobs, bool skip_special)
{
    memset(r, 0, sizeof(*r));
    r->tok = tok;
    r->wants_ids = wants_ids;
    r->wants_logprobs = wants_logprobs;
    r->skip_special = skip_special;
    detokenizer_init(&r->detok, tok, skip_special, true);
    r->stop_token = -1;
}

void completion_render_deinit(completion_render *r)
{
    strbuf_deinit(&r->piece);
    strbuf_deinit(&r->text);
    strbuf_deinit(&r->prompt_ids);
    strbuf_deinit(&r->ids);
    strbuf_deinit(&r->lp_tokens);
    strbuf_deinit(&r->lp_values);
    strbuf_deinit(&r->lp_tops);
    strbuf_deinit(&r->lp_offsets);
}

size_t completion_render_held_bytes(const completion_render *r)
{
    return r->text.cap_bytes + r->prompt_ids.cap_bytes + r->ids.cap_bytes + r->lp_tokens.cap_bytes +
           r->lp_values.cap_bytes + r->lp_tops.cap_bytes + r->lp_offsets.cap_bytes;
}

void completion_render_reset(completion_render *r)
{
    strbuf_reset(&r->text);
    strbuf_reset(&r->prompt_ids);
    r->has_prompt_ids = false;
    strbuf_reset(&r->ids);
    strbuf_reset(&r->lp_tokens);
    strbuf_reset(&r->lp_values);
    strbuf_reset(&r->lp_tops);
    strbuf_reset(&r->lp_offsets);
    r->has_logprobs = false;
}

/* --- log probabilities ------------------------------------------------------------------------ */

static void append_piece_json(strbuf *b, const tokenizer *tok, token_id id)
{
    size_t n;
    const char *piece = tokenizer_piece(tok, id, &n);
    strbuf_append_json(b, piece, n);
}

static int32_t count_chars(const char *text, size_t n)
{
    int32_t chars = 0;
    for (size_t i = 0; i < n; i++)
        chars += ((unsigned char)text[i] & 0xC0) != 0x80;
    return chars;
}

/* Minus infinity is no JSON number; clients know -9999. */
static void append_logprob(strbuf *b, float v)
{
    char text[32];
    int n = snprintf(text, sizeof(text), "%.7g", v < -9999.0f ? -9999.0 : (double)v);
    strbuf_append(b, text, (size_t)n);
}

static void comma(strbuf *b)
{
    if (b->n_bytes > 0)
        strbuf_append_char(b, ',');
}

/* The best ones and the token itself. Different tokens may have the same text (parts of characters):
 * it stands once, with the best value. */
static void append_top(completion_render *r, const token_logprob *logprobs, int32_t n_logprobs)
{
    strbuf *b = &r->lp_tops;
    size_t key_at[PGD_MAX_LOGPROBS + 1];
    size_t key_bytes[PGD_MAX_LOGPROBS + 1];
    int32_t n_keys = 0;
    PGD_ASSERT(n_logprobs <= (int32_t)PGD_ARRAY_LEN(key_at));
    strbuf_append_char(b, '{');
    for (int32_t i = 1; i <= n_logprobs; i++) {
        const token_logprob *t = &logprobs[i % n_logprobs]; /* the token itself comes last */
        size_t start = b->n_bytes;
        if (n_keys > 0)
            strbuf_append_char(b, ',');
        key_at[n_keys] = b->n_bytes;
        append_piece_json(b, r->tok, t->id);
        if (b->failed)
            return;
        key_bytes[n_keys] = b->n_bytes - key_at[n_keys];
        int32_t k = 0;
        while (k < n_keys &&
               (key_bytes[k] != key_bytes[n_keys] ||
                memcmp(b->data + key_at[k], b->data + key_at[n_keys], key_bytes[k]) != 0))
            k++;
        if (k < n_keys) {
            strbuf_truncate(b, start);
            continue;
        }
        n_keys++;
        strbuf_append_char(b, ':');
        append_logprob(b, t->logprob);
    }
    strbuf_append_char(b, '}');
}

/* One row of the four arrays: the token at the place n_text_chars. logprobs: [n_logprobs], the token
 * itself first; none for the first token of a prompt. */
static void add_logprobs(completion_render *r, token_id id, const token_logprob *logprobs,
                         int32_t n_logprobs)
{
    r->has_logprobs = true;
    comma(&r->lp_tokens);
    append_piece_json(&r->lp_tokens, r->tok, id);
    comma(&r->lp_offsets);
    strbuf_append_int(&r->lp_offsets, r->n_text_chars);
    comma(&r->lp_values);
    comma(&r->lp_tops);
    if (n_logprobs == 0) {
        strbuf_append_str(&r->lp_values, "null");
        strbuf_append_str(&r->lp_tops, "null");
        return;
    }
    append_logprob(&r->lp_values, logprobs[0].logprob);
    append_top(r, logprobs, n_logprobs);
}

/* --- prompt ----------------------------------------------------------------------------------- */

void completion_render_add_prompt_ids(completion_render *r, const token_id *ids, int32_t n_ids)
{
    if (!r->wants_ids)
        return;
    r->has_prompt_ids = true;
    for (int32_t i = 0; i < n_ids; i++) {
        comma(&r->prompt_ids);
        strbuf_append_int(&r->prompt_ids, ids[i]);
    }
}

/* The text that the token completes, in r->piece. */
static void detokenize(completion_render *r, detokenizer *d, token_id id)
{
    strbuf_reset(&r->piece);
    detokenizer_push(d, id, &r->piece);
    r->lp_offsets.failed = r->lp_offsets.failed || r->piece.failed;
}

static void add_prompt_logprobs(completion_render *r, const completion_render_prompt *p, int32_t i)
{
    if (p->logprobs != NULL)
        add_logprobs(r, p->ids[i], p->logprobs + (size_t)i * (size_t)p->n_logprobs_per_token,
                     i == 0 ? 0 : p->n_logprobs_per_token);
}

/* A prompt of ids: its text is what they decode to. */
static void echo_ids(completion_render *r, const completion_render_prompt *p)
{
    detokenizer d;
    detokenizer_init(&d, r->tok, r->skip_special, false);
    for (int32_t i = 0; i < p->n_ids; i++) {
        size_t n_before = r->text.n_bytes;
        add_prompt_logprobs(r, p, i);
        detokenizer_push(&d, p->ids[i], &r->text);
        if (r->text.n_bytes > n_before)
            r->n_text_chars += count_chars(r->text.data + n_before, r->text.n_bytes - n_before);
    }
    detokenizer_flush(&d, &r->text);
}

/* A prompt of text comes back as it was given; its tokens are laid along it. Special tokens that the
 * tokenizer added are not in it. (A normalizer may have changed the text before it was cut into
 * tokens: places are then near, never beyond the end.) */
static void echo_text(completion_render *r, const completion_render_prompt *p)
{
    strbuf_append(&r->text, p->text, p->n_text_bytes);
    if (p->logprobs == NULL)
        return;
    detokenizer d;
    size_t at = 0;
    detokenizer_init(&d, r->tok, false, false);
    for (int32_t i = 0; i < p->n_ids; i++) {
        add_prompt_logprobs(r, p, i);
        size_t n_name;
        const char *name = tokenizer_piece(r->tok, p->ids[i], &n_name);
        if (tokenizer_is_special(r->tok, p->ids[i]) &&
            (n_name > p->n_text_bytes - at || memcmp(p->text + at, name, n_name) != 0))
            continue;
        detokenize(r, &d, p->ids[i]);
        size_t n = PGD_MIN(r->piece.n_bytes, p->n_text_bytes - at);
        r->n_text_chars += count_chars(p->text + at, n);
        at += n;
    }
}

void completion_render_echo(completion_render *r, const completion_render_prompt *prompt)
{
    if (prompt->text != NULL)
        echo_text(r, prompt);
    else
        echo_ids(r, prompt);
    r->n_text_chars = count_chars(r->text.data, r->text.n_bytes);
}

/* --- tokens ----------------------------------------------------------------------------------- */

void completion_render_add_text(completion_render *r, const char *text, size_t n_bytes)
{
    strbuf_append(&r->text, text, n_bytes);
}

void completion_render_add_token(completion_render *r, const generation_token *t)
{
    if (r->wants_ids) {
        comma(&r->ids);
        strbuf_append_int(&r->ids, t->id);
    }
    if (!r->wants_logprobs || t->n_logprobs == 0)
        return;
    add_logprobs(r, t->id, t->logprobs, t->n_logprobs);
    detokenize(r, &r->detok, t->id);
    r->n_text_chars += count_chars(r->piece.data, r->piece.n_bytes);
}

/* --- the answer ------------------------------------------------------------------------------- */

void completion_render_append_head(strbuf *b, const char *id, int64_t created_s, const char *model)
{
    strbuf_appendf(
        b, "{\"id\":\"%s\",\"object\":\"text_completion\",\"created\":%" PRId64 ",\"model\":", id,
        created_s);
    strbuf_append_json(b, model, strlen(model));
}

static void append_logprobs(strbuf *b, const completion_render *r)
{
    if (!r->has_logprobs) {
        strbuf_append_str(b, "\"logprobs\":null");
        return;
    }
    strbuf_append_str(b, "\"logprobs\":{\"tokens\":[");
    strbuf_append(b, r->lp_tokens.data, r->lp_tokens.n_bytes);
    strbuf_append_str(b, "],\"token_logprobs\":[");
    strbuf_append(b, r->lp_values.data, r->lp_values.n_bytes);
    strbuf_append_str(b, "],\"top_logprobs\":[");
    strbuf_append(b, r->lp_tops.data, r->lp_tops.n_bytes);
    strbuf_append_str(b, "],\"text_offset\":[");
    strbuf_append(b, r->lp_offsets.data, r->lp_offsets.n_bytes);
    strbuf_append_str(b, "]}");
}

static void append_stop_reason(strbuf *b, const completion_render *r)
{
    strbuf_append_str(b, ",\"stop_reason\":");
    if (r->stop_string != NULL)
        strbuf_append_json(b, r->stop_string, r->n_stop_string_bytes);
    else if (r->stop_token >= 0)
        strbuf_append_int(b, r->stop_token);
    else
        strbuf_append_str(b, "null");
}

void completion_render_append_choice(strbuf *b, const completion_render *r, int32_t idx)
{
    b->failed = b->failed || r->text.failed || r->prompt_ids.failed || r->ids.failed ||
                r->lp_tokens.failed || r->lp_values.failed || r->lp_tops.failed ||
                r->lp_offsets.failed;
    strbuf_append_str(b, "{\"index\":");
    strbuf_append_int(b, idx);
    strbuf_append_str(b, ",\"text\":");
    strbuf_append_json(b, r->text.data != NULL ? r->text.data : "", r->text.n_bytes);
    strbuf_append_char(b, ',');
    append_logprobs(b, r);
    if (r->finish_reason != NULL)
        strbuf_appendf(b, ",\"finish_reason\":\"%s\"", r->finish_reason);
    else
        strbuf_append_str(b, ",\"finish_reason\":null");
    append_stop_reason(b, r);
    if (r->has_prompt_ids) {
        strbuf_append_str(b, ",\"prompt_token_ids\":[");
        strbuf_append(b, r->prompt_ids.data, r->prompt_ids.n_bytes);
        strbuf_append_char(b, ']');
    }
    if (r->wants_ids) {
        strbuf_append_str(b, ",\"token_ids\":[");
        strbuf_append(b, r->ids.data, r->ids.n_bytes);
        strbuf_append_char(b, ']');
    }
    strbuf_append_char(b, '}');
}

void completion_render_append_usage(strbuf *b, const completion_usage *usage)
{
    strbuf_appendf(b,
                   "\"usage\":{\"prompt_tokens\":%" PRId64 ",\"completion_tokens\":%" PRId64
                   ",\"total_tokens\":%" PRId64
                   ",\"prompt_tokens_details\":{\"cached_tokens\":%" PRId64,
                   usage->n_prompt_tokens, usage->n_output_tokens,
                   usage->n_prompt_tokens + usage->n_output_tokens, usage->n_cached_tokens);
    if (usage->has_tiers)
        strbuf_appendf(b,
                       ",\"cached_tokens_details\":{\"device\":%" PRId64 ",\"host\":%" PRId64
                       ",\"storage\":%" PRId64 "}",
                       usage->n_cached_tokens - usage->n_host_tokens - usage->n_disk_tokens,
                       usage->n_host_tokens, usage->n_disk_tokens);
    strbuf_append_str(b, "}}");
}
