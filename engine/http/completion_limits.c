/* Everything is counted in 64 bits: the factors have bounds of their own (completion_params.h), so no
 * product comes near them. */
#include "engine/http/completion_limits.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#define MAX_WHOLE_ANSWER_BYTES (512 << 20)
#define MAX_TOKEN_BYTES        32 /* of a token's text and id in the answer, in the mean */
#define MAX_LOGPROB_BYTES      48 /* of one logprob with its token */

PGD_PRINTF(4, 5)
static bool fail(completion_fault *fault, const char *param, const char *code, const char *fmt, ...)
{
    va_list args;
    fault->status = 400;
    fault->param = param;
    fault->code = code;
    va_start(args, fmt);
    vsnprintf(fault->message, sizeof(fault->message), fmt, args);
    va_end(args);
    return false;
}

/* An encoder's input has a limit of its own; the text has the decoder's, where one more token begins
 * it. */
static bool check_source(completion_fault *fault, int64_t n, int64_t max_tokens,
                         const core_stats *stats, int32_t max_source)
{
    int64_t most = PGD_MIN(stats->max_model_len,
                           stats->max_pool_len > 0 ? stats->max_pool_len + 1 : INT32_MAX) -
                   1;
    if (n == 0)
        return fail(fault, "prompt", NULL,
                    "prompt: expected at least one token, got an empty prompt");
    if (n > max_source)
        return fail(fault, "prompt", "context_length_exceeded",
                    "This model's encoder takes at most %d tokens. You requested %" PRId64
                    " tokens in the prompt; shorten the prompt.",
                    max_source, n);
    if (max_tokens > most)
        return fail(fault, "max_tokens", "context_length_exceeded",
                    "This model's completions have at most %" PRId64
                    " tokens here. You requested %" PRId64 "; lower max_tokens.",
                    most, max_tokens);
    return true;
}

static bool check_prompt(completion_fault *fault, int64_t n, int64_t max_tokens,
                         const core_stats *stats)
{
    int64_t wanted = PGD_MAX(max_tokens, 1);
    if (n == 0)
        return fail(fault, "prompt", NULL,
                    "prompt: expected at least one token, got an empty prompt");
    if (n + wanted > stats->max_model_len)
        return fail(fault, wanted > 1 && n < stats->max_model_len ? "max_tokens" : "prompt",
                    "context_length_exceeded",
                    "This model's maximum context length is %d tokens. You requested %" PRId64
                    " tokens in the prompt and %" PRId64
                    " for the completion; shorten the prompt or lower max_tokens.",
                    stats->max_model_len, n, wanted);
    /* The last token is returned, never computed. The pool is known once a worker was ready. */
    if (stats->max_pool_len > 0 && n + wanted - 1 > stats->max_pool_len)
        return fail(fault, wanted > 1 && n <= stats->max_pool_len ? "max_tokens" : "prompt",
                    "context_length_exceeded",
                    "the KV cache of this server holds %d tokens; you requested %" PRId64
                    " tokens in the prompt and %" PRId64
                    " for the completion; shorten the prompt or lower max_tokens.",
                    stats->max_pool_len, n, wanted);
    return true;
}

/* An answer that is not streamed is held whole, and so are the echoed prompts of a stream, which
 * may all come at once: what they may come to must have a limit. */
static bool check_answer(completion_fault *fault, const completion_params *p, const config *cfg)
{
    int64_t max_tokens = p->max_tokens < 0 ? COMPLETION_DEFAULT_TOKENS : p->max_tokens;
    int64_t token_bytes = MAX_TOKEN_BYTES;
    if (p->wants_logprobs)
        token_bytes += MAX_LOGPROB_BYTES * (2 + (int64_t)p->sampling.n_logprobs);
    int64_t n_tokens = p->stream ? 0 : max_tokens * p->n_prompts * p->best_of;
    for (int32_t i = 0; p->echo && i < p->n_prompts; i++)
        n_tokens += (int64_t)p->best_of * p->prompts[i].n_ids;
    int64_t total_bytes = token_bytes * n_tokens;
    int64_t max_bytes = p->stream ? cfg->max_output_buffer_bytes : MAX_WHOLE_ANSWER_BYTES;
    if (total_bytes <= max_bytes)
        return true;
    if (p->stream)
        return fail(fault, "echo", NULL,
                    "echo: the echoed prompts may come to %" PRId64 " kB, more than the %" PRId64
                    " kB that are held for a stream (max_output_buffer_bytes): ask for less, or "
                    "set stream = false",
                    total_bytes >> 10, max_bytes >> 10);
    return fail(fault, p->wants_logprobs && p->sampling.n_logprobs > 0 ? "logprobs" : "max_tokens",
                NULL,
                "the answer may come to %" PRId64
                " MB (max_tokens, n or best_of, prompts, echo and logprobs multiplied); at most "
                "%" PRId64 " MB are held: ask for less, or set stream = true",
                total_bytes >> 20, max_bytes >> 20);
}

bool completion_limits_check(completion_fault *fault, const completion_params *p,
                             const core_stats *stats, const config *cfg, int32_t max_source)
{
    if (max_source > 0 && p->echo)
        return fail(fault, "echo", NULL,
                    "echo: expected false: this model has an encoder, and the prompt is its input, "
                    "no part of the text");
    for (int32_t i = 0; i < p->n_prompts; i++) {
        int32_t n = p->prompts[i].n_ids;
        if (max_source > 0 ? !check_source(fault, n, p->max_tokens, stats, max_source)
                           : !check_prompt(fault, n, p->max_tokens, stats))
            return false;
    }
    return check_answer(fault, p, cfg);
}
