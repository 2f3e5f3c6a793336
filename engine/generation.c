/* The stopping token's text is never shown (unless include_stop): the io side applies the same rule
 * as the scheduler (ST7), since its token event comes before the event that says why it ended. */
#include "engine/generation.h"

#include <string.h>

#include "common/mem.h"

pgd_err generation_create(generation **out, const generation_opts *opts, const tokenizer *tok,
                          const token_id *eos_ids, int32_t n_eos_ids)
{
    generation *g = mem_calloc(1, sizeof(*g));
    if (g == NULL)
        return PGD_ENOMEM;
    strbuf_init(&g->text);
    strbuf_init(&g->piece);
    g->n_prompt_tokens = opts->n_prompt_tokens;
    g->stop_string_idx = -1;
    g->stop_token = -1;
    g->arrival_us = opts->arrival_us;
    g->on_chunk = opts->on_chunk;
    g->arg = opts->arg;
    g->min_tokens = opts->params.min_tokens;
    g->keep_tokens = opts->keep_tokens;
    g->include_stop = opts->include_stop;
    detokenizer_init(&g->detok, tok, opts->skip_special, opts->n_prompt_tokens > 0);

    int32_t n_eos = opts->ignore_eos ? 0 : n_eos_ids;
    g->n_stop_ids = n_eos + opts->params.n_stop_ids;
    g->stop_ids = mem_calloc((size_t)g->n_stop_ids, sizeof(token_id));
    if (g->stop_ids == NULL)
        goto fail;
    if (n_eos > 0)
        memcpy(g->stop_ids, eos_ids, (size_t)n_eos * sizeof(token_id));
    if (opts->params.n_stop_ids > 0)
        memcpy(g->stop_ids + n_eos, opts->params.stop_ids,
               (size_t)opts->params.n_stop_ids * sizeof(token_id));
    if (stop_matcher_create(&g->stops, opts->stop, opts->stop_bytes, opts->n_stop,
                            opts->include_stop) != PGD_OK)
        goto fail;
    *out = g;
    return PGD_OK;
fail:
    generation_destroy(g);
    return PGD_ENOMEM;
}

void generation_destroy(generation *g)
{
    if (g == NULL)
        return;
    stop_matcher_destroy(g->stops);
    strbuf_deinit(&g->text);
    strbuf_deinit(&g->piece);
    mem_free(g->tokens);
    mem_free(g->stop_ids);
    mem_free(g->prompt_logprobs);
    mem_free(g);
}

static bool ends_request(const generation *g, token_id id)
{
    if (g->n_output_tokens < g->min_tokens)
        return false;
    for (int32_t i = 0; i < g->n_stop_ids; i++) {
        if (g->stop_ids[i] == id)
            return true;
    }
    return false;
}

static void keep_token(generation *g, const core_event *e)
{
    if (g->n_tokens == g->max_kept_tokens) {
        int32_t cap = g->max_kept_tokens != 0 ? g->max_kept_tokens * 2 : 16;
        generation_token *grown = mem_realloc_array(g->tokens, (size_t)cap, sizeof(*grown));
        if (grown == NULL) {
            g->text.failed = true; /* told when the chunk is delivered */
            return;
        }
        g->tokens = grown;
        g->max_kept_tokens = cap;
    }
    generation_token *t = &g->tokens[g->n_tokens++];
    t->id = e->token;
    t->n_logprobs = e->n_logprobs;
    if (e->n_logprobs > 0)
        memcpy(t->logprobs, e->logprobs, (size_t)e->n_logprobs * sizeof(t->logprobs[0]));
}

/* Passes decoded text through the stop matcher; true when a stop string was found. */
static bool feed_text(generation *g)
{
    if (g->piece.n_bytes == 0)
        return false;
    int32_t hit = stop_matcher_push(g->stops, g->piece.data, g->piece.n_bytes, &g->text);
    strbuf_reset(&g->piece);
    if (hit < 0)
        return false;
    g->stop_string_idx = hit;
    g->finish = GENERATION_STOP;
    return true;
}

static void note_cached(generation *g, const core_event *e)
{
    g->n_cached_tokens = e->num_cached_tokens;
    g->n_host_tokens = e->num_host_tokens;
    g->n_disk_tokens = e->num_disk_tokens;
}

static bool apply_token(generation *g, const core_event *e)
{
    if (g->first_token_us == 0)
        g->first_token_us = e->time_us;
    g->last_token_us = e->time_us;
    g->n_output_tokens++;
    note_cached(g, e);
    if (e->prompt_logprobs != NULL)
        g->prompt_logprobs = e->prompt_logprobs;
    if (g->keep_tokens)
        keep_token(g, e);
    if (ends_request(g, e->token) && !g->include_stop)
        return false;
    detokenizer_push(&g->detok, e->token, &g->piece);
    return feed_text(g);
}

static void apply_finish(generation *g, const core_event *e)
{
    static const char *const worker_text = "the model worker could not be kept running";
    detokenizer_flush(&g->detok, &g->piece);
    if (feed_text(g))
        return;
    stop_matcher_flush(g->stops, &g->text);
    note_cached(g, e);
    switch (e->status) {
    case REQUEST_FINISHED_STOPPED:
        g->finish = GENERATION_STOP;
        g->stop_token = e->stop_token;
        return;
    case REQUEST_FINISHED_LENGTH_CAPPED:
    case REQUEST_FINISHED_IGNORED:
        g->finish = GENERATION_LENGTH;
        return;
    case REQUEST_FINISHED_ABORTED:
        g->finish = GENERATION_ABORT;
        return;
    default:
        break;
    }
    g->finish = GENERATION_ERROR;
    g->error_status = 500;
    g->error_text = "the model failed on this request";
    switch (e->refusal) {
    case CORE_REFUSAL_QUEUE_FULL:
        g->error_status = 429;
        g->error_text = "too many requests are waiting (max_queued_requests)";
        break;
    case CORE_REFUSAL_NEVER_FITS:
        g->error_status = 400;
        g->error_text =
            "prompt and max_tokens together need more KV-cache blocks than this server has";
        break;
    case CORE_REFUSAL_WORKER:
        g->error_status = 503;
        g->error_text = worker_text;
        break;
    case CORE_REFUSAL_DRAINING:
        g->error_status = 503;
        g->error_text = "the server is shutting down";
        break;
    case CORE_REFUSAL_POISON:
        g->error_text = "this request made the model worker fail repeatedly";
        break;
    case CORE_REFUSAL_NONE:
        if (e->error == REQUEST_ERROR_NAN_LOGITS)
            g->error_text = "the model produced values that are not numbers for this request";
        break;
    }
}

bool generation_apply(generation *g, const core_event *event)
{
    if (event->kind == CORE_EVENT_TOKEN)
        return apply_token(g, event);
    apply_finish(g, event);
    return false;
}
