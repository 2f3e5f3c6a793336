/* Arrays are kept as text, elements separated by commas: a token is rendered once, when it comes,
 * and an answer is put together by copying. An allocation that failed stays noted in its buffer and
 * passes to the answer (strbuf.failed), which is then not sent. */
#include "engine/http/completion_render.h"

#include <inttypes.h>
#include <string.h>

void completion_render_init(completion_render *r, const tokenizer *tok, bool wants_ids,
                            bool wants_logprobs)
{
    memset(r, 0, sizeof(*r));
    r->tok = tok;
    r->wants_ids = wants_ids;
    r->wants_logprobs = wants_logprobs;
    r->stop_token = -1;
}

void completion_render_deinit(completion_render *r)
{
    strbuf_deinit(&r->text);
    strbuf_deinit(&r->ids);
    strbuf_deinit(&r->lp_tokens);
    strbuf_deinit(&r->lp_values);
    strbuf_deinit(&r->lp_tops);
    strbuf_deinit(&r->lp_offsets);
}

void completion_render_reset(completion_render *r)
{
    strbuf_reset(&r->text);
    strbuf_reset(&r->ids);
    strbuf_reset(&r->lp_tokens);
    strbuf_reset(&r->lp_values);
    strbuf_reset(&r->lp_tops);
    strbuf_reset(&r->lp_offsets);
    r->has_logprobs = false;
}

/* --- tokens ----------------------------------------------------------------------------------- */

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
static double json_logprob(float v)
{
    return v < -9999.0f ? -9999.0 : (double)v;
}

static void comma(strbuf *b)
{
    if (b->n_bytes > 0)
        strbuf_append_char(b, ',');
}

static void add_logprobs(completion_render *r, const generation_token *t)
{
    size_t n;
    const char *piece = tokenizer_piece(r->tok, t->id, &n);
    r->has_logprobs = true;
    comma(&r->lp_tokens);
    append_piece_json(&r->lp_tokens, r->tok, t->id);
    comma(&r->lp_values);
    strbuf_appendf(&r->lp_values, "%.7g", json_logprob(t->logprobs[0].logprob));
    comma(&r->lp_offsets);
    strbuf_append_int(&r->lp_offsets, r->n_text_chars);
    r->n_text_chars += count_chars(piece, n);
    comma(&r->lp_tops);
    strbuf_append_char(&r->lp_tops, '{');
    bool sampled_shown = false;
    for (int32_t i = 1; i < t->n_logprobs; i++) {
        if (i > 1)
            strbuf_append_char(&r->lp_tops, ',');
        sampled_shown = sampled_shown || t->logprobs[i].id == t->id;
        append_piece_json(&r->lp_tops, r->tok, t->logprobs[i].id);
        strbuf_appendf(&r->lp_tops, ":%.7g", json_logprob(t->logprobs[i].logprob));
    }
    if (!sampled_shown) { /* the sampled token is always among them */
        if (t->n_logprobs > 1)
            strbuf_append_char(&r->lp_tops, ',');
        append_piece_json(&r->lp_tops, r->tok, t->id);
        strbuf_appendf(&r->lp_tops, ":%.7g", json_logprob(t->logprobs[0].logprob));
    }
    strbuf_append_char(&r->lp_tops, '}');
}

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
    if (r->wants_logprobs && t->n_logprobs > 0)
        add_logprobs(r, t);
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
    b->failed = b->failed || r->text.failed || r->ids.failed || r->lp_tokens.failed ||
                r->lp_values.failed || r->lp_tops.failed || r->lp_offsets.failed;
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
                   ",\"prompt_tokens_details\":{\"cached_tokens\":%" PRId64 "}}",
                   usage->n_prompt_tokens, usage->n_output_tokens,
                   usage->n_prompt_tokens + usage->n_output_tokens, usage->n_cached_tokens);
}
