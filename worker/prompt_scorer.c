/* Prompt rows of one request lie together and in order of position, so that a request is one run of
 * them: its result grows while the rows belong to it and is dropped again when one of them fails.
 * Entries of a dropped result stay unused in the array, which has room for every row of a step. */
#include "worker/prompt_scorer.h"

#include "common/mem.h"

struct prompt_scorer {
    int32_t max_seqs;
    int32_t vocab_size;
    sample_row rows[DECODER_MAX_SLICE];
    prompt_result_msg *results; /* [max_seqs] */
    int32_t n_results;
    token_logprob *logprobs; /* [max_rows * (max_logprobs + 1)] */
    int32_t n_logprobs;
};

pgd_err prompt_scorer_create(prompt_scorer **out, int32_t max_seqs, int32_t max_rows,
                             int32_t max_logprobs, int32_t vocab_size)
{
    size_t n_logprobs;
    *out = NULL;
    if (max_seqs < 1 || max_rows < 1 || max_logprobs < 0 || max_logprobs > PGD_MAX_LOGPROBS ||
        vocab_size < 1 || max_rows > WIRE_MAX_BATCHED_TOKENS)
        return PGD_EINVAL;
    prompt_scorer *s = mem_calloc(1, sizeof(*s));
    if (!s)
        return PGD_ENOMEM;
    s->max_seqs = max_seqs;
    s->vocab_size = vocab_size;
    n_logprobs = (size_t)max_rows * (size_t)(max_logprobs + 1);
    s->results = mem_calloc((size_t)max_seqs, sizeof(*s->results));
    s->logprobs = mem_calloc(n_logprobs, sizeof(*s->logprobs));
    if (!s->results || !s->logprobs) {
        prompt_scorer_destroy(s);
        return PGD_ENOMEM;
    }
    *out = s;
    return PGD_OK;
}

void prompt_scorer_destroy(prompt_scorer *s)
{
    if (!s)
        return;
    mem_free(s->results);
    mem_free(s->logprobs);
    mem_free(s);
}

void prompt_scorer_reset(prompt_scorer *s)
{
    s->n_results = 0;
    s->n_logprobs = 0;
}

/* One row of the slice: the logits after position p, the prompt's token p + 1. */
static void fill_row(prompt_scorer *s, sample_row *out, const request_row *r, int32_t position,
                     const float *logits)
{
    *out = (sample_row){.logits = logits,
                        .n_logprobs = r->params.n_prompt_logprobs_per_token - 1,
                        .has_token = true,
                        .token = r->tokens[position + 1],
                        .logprobs = (sample_logprob *)(void *)(s->logprobs + s->n_logprobs)};
    s->n_logprobs += r->params.n_prompt_logprobs_per_token;
}

static void add_row(prompt_scorer *s, const request_row *r, int32_t position, const sample_row *row)
{
    prompt_result_msg *last = s->n_results > 0 ? &s->results[s->n_results - 1] : NULL;
    if (last != NULL && last->request_id == r->request_id) {
        last->n_tokens++;
        return;
    }
    PGD_ASSERT(s->n_results < s->max_seqs);
    s->results[s->n_results++] = (prompt_result_msg){
        .request_id = r->request_id,
        .request_epoch = r->request_epoch,
        .first_token = position + 1,
        .n_tokens = 1,
        .n_logprobs_per_token = r->params.n_prompt_logprobs_per_token,
        .first_logprob = (int32_t)((token_logprob *)(void *)row->logprobs - s->logprobs)};
}

static void fail_request(prompt_scorer *s, sampler *failures, request_row *r)
{
    if (s->n_results > 0 && s->results[s->n_results - 1].request_id == r->request_id)
        s->n_results--;
    r->has_failed = true;
    sampler_add_error(failures, r, REQUEST_ERROR_NAN_LOGITS);
}

pgd_err prompt_scorer_run(prompt_scorer *s, sampler *failures, network *net,
                          const input_batch *batch, request_rows *rows, const kernel_ops *ops,
                          kernel_ctx *ctx, uint64_t *progress)
{
    for (int32_t first = 0; first < batch->n_prompt_rows; first += DECODER_MAX_SLICE) {
        int32_t n = PGD_MIN(batch->n_prompt_rows - first, DECODER_MAX_SLICE);
        const int32_t *batch_rows = batch->prompt_rows + first;
        const int32_t *seqs = batch->prompt_seqs + first;
        float *logits;
        PGD_TRY(network_prompt_logits(net, &logits, batch, first, n, ctx));
        for (int32_t i = 0; i < n; i++)
            fill_row(s, &s->rows[i], request_rows_get(rows, seqs[i]),
                     batch->positions[batch_rows[i]], logits + (int64_t)i * s->vocab_size);
        sample_args args = {.rows = s->rows, .n_rows = n, .vocab_size = s->vocab_size};
        PGD_TRY(ops->sample(&args, ctx));
        for (int32_t i = 0; i < n; i++) {
            request_row *r = request_rows_get(rows, seqs[i]);
            if (r->has_failed)
                continue;
            if (s->rows[i].error != SAMPLE_OK)
                fail_request(s, failures, r);
            else
                add_row(s, r, batch->positions[batch_rows[i]], &s->rows[i]);
        }
        __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
    }
    return PGD_OK;
}

void prompt_scorer_fill_result(const prompt_scorer *s, step_result *out)
{
    out->n_prompt_results = s->n_results;
    out->prompt_results = s->results;
    out->n_prompt_logprobs = s->n_logprobs;
    out->prompt_logprobs = s->logprobs;
}
