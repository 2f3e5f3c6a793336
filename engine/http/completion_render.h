/* The JSON of a completion's answer: one completion_render collects what a choice has to say since
 * the last chunk (streams) or since the start (whole answers).
 *
 * text_offset counts Unicode characters from the start of the choice's returned text, an echoed
 * prompt included: a token's is the place of the first character that its bytes are part of. Tokens
 * that the text leaves out (special ones) take no place. It does not depend on how the answer is cut
 * into chunks.
 * Owns:    its buffers; borrows the tokenizer and stop_string until deinit
 * Thread:  one at a time
 */
#ifndef ENGINE_HTTP_COMPLETION_RENDER_H
#define ENGINE_HTTP_COMPLETION_RENDER_H

#include "common/strbuf.h"
#include "engine/generation.h"

typedef struct completion_render {
    const tokenizer *tok;
    bool wants_ids;
    bool wants_logprobs;
    bool skip_special;
    detokenizer detok;    /* of the generated tokens, for text_offset */
    int32_t n_text_chars; /* of all tokens so far, for text_offset */
    strbuf piece;         /* scratch */
    strbuf text;
    strbuf prompt_ids; /* token ids as JSON elements */
    bool has_prompt_ids;
    strbuf ids;
    strbuf lp_tokens; /* logprobs arrays as JSON elements */
    strbuf lp_values;
    strbuf lp_tops;
    strbuf lp_offsets;
    bool has_logprobs;
    const char *finish_reason; /* NULL while it runs */
    token_id stop_token;       /* the stop_token_id that ended it; -1 */
    const char *stop_string;   /* [n_stop_string_bytes], what ended it; NULL */
    size_t n_stop_string_bytes;
} completion_render;

typedef struct completion_render_prompt {
    const char *text; /* [n_text_bytes] as the client gave it; NULL: given as ids */
    size_t n_text_bytes;
    const token_id *ids; /* [n_ids] */
    int32_t n_ids;
    /* [n_ids, n_logprobs_per_token], the token itself first, row 0 unused; NULL: none */
    const token_logprob *logprobs;
    int32_t n_logprobs_per_token;
} completion_render_prompt;

typedef struct completion_usage {
    int64_t n_prompt_tokens;
    int64_t n_output_tokens;
    int64_t n_cached_tokens;
    int64_t n_host_tokens; /* of them, those that were loaded from the host tier */
    int64_t n_disk_tokens; /* and those that came up from disk */
    bool has_tiers;        /* tell the three apart, under SGLang's names */
} completion_usage;

void completion_render_init(completion_render *r, const tokenizer *tok, bool wants_ids,
                            bool wants_logprobs, bool skip_special);
void completion_render_deinit(completion_render *r);
/* Of memory, about. */
size_t completion_render_held_bytes(const completion_render *r);

/* "prompt_token_ids" of this chunk, if ids are wanted. */
void completion_render_add_prompt_ids(completion_render *r, const token_id *ids, int32_t n_ids);
/* The prompt at the start of the text, with its logprobs; before any token. */
void completion_render_echo(completion_render *r, const completion_render_prompt *prompt);
void completion_render_add_text(completion_render *r, const char *text, size_t n_bytes);
void completion_render_add_token(completion_render *r, const generation_token *t);
/* Forgets what a chunk has delivered; offsets go on. */
void completion_render_reset(completion_render *r);

/* "{id, object, created, model" without the closing brace. */
void completion_render_append_head(strbuf *b, const char *id, int64_t created_s, const char *model);
/* One element of "choices". */
void completion_render_append_choice(strbuf *b, const completion_render *r, int32_t idx);
/* "usage":{...} */
void completion_render_append_usage(strbuf *b, const completion_usage *usage);

#endif
