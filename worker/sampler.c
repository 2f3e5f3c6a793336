/* The op's structs repeat those of proto, since kernels know nothing of messages; entries that are
 * handed over as arrays (bias, log probabilities) have the same layout, which is asserted here. */
#include "worker/sampler.h"

#include <stddef.h>
#include <string.h>

#include "common/mem.h"

static_assert(sizeof(sample_bias) == sizeof(logit_bias) &&
                  offsetof(sample_bias, bias) == offsetof(logit_bias, bias),
              "bias entries are passed through");
static_assert(sizeof(sample_logprob) == sizeof(token_logprob) &&
                  offsetof(sample_logprob, logprob) == offsetof(token_logprob, logprob),
              "log probabilities are passed through");

struct sampler {
    int32_t max_seqs;
    int32_t vocab_size;
    sample_row *rows;            /* [max_seqs] */
    int32_t *row_seqs;           /* [max_seqs] row in request_rows of each */
    request_result_msg *results; /* [max_seqs] */
    int32_t n_results;
    sample_logprob *logprobs; /* [max_seqs * (max_logprobs + 1)] */
    int32_t n_logprobs;
};

pgd_err sampler_create(sampler **out, int32_t max_seqs, int32_t max_logprobs, int32_t vocab_size)
{
    *out = NULL;
    if (max_seqs < 1 || max_logprobs < 0 || max_logprobs > PGD_MAX_LOGPROBS || vocab_size < 1)
        return PGD_EINVAL;
    sampler *s = mem_calloc(1, sizeof(*s));
    if (!s)
        return PGD_ENOMEM;
    s->max_seqs = max_seqs;
    s->vocab_size = vocab_size;
    s->rows = mem_calloc((size_t)max_seqs, sizeof(*s->rows));
    s->row_seqs = mem_calloc((size_t)max_seqs, sizeof(*s->row_seqs));
    s->results = mem_calloc((size_t)max_seqs, sizeof(*s->results));
    s->logprobs = mem_calloc((size_t)max_seqs * (size_t)(max_logprobs + 1), sizeof(*s->logprobs));
    if (!s->rows || !s->row_seqs || !s->results || !s->logprobs) {
        sampler_destroy(s);
        return PGD_ENOMEM;
    }
    *out = s;
    return PGD_OK;
}

void sampler_destroy(sampler *s)
{
    if (!s)
        return;
    mem_free(s->rows);
    mem_free(s->row_seqs);
    mem_free(s->results);
    mem_free(s->logprobs);
    mem_free(s);
}

void sampler_reset(sampler *s)
{
    s->n_results = 0;
    s->n_logprobs = 0;
}

/* A token that is given takes no sampling; its logprob is still the raw logits'. */
static void force_token(sample_row *row, const request_row *r)
{
    for (int32_t i = 0; i < r->params.n_forced; i++) {
        if (r->params.forced[i].position == r->n_tokens - r->n_prompt_tokens) {
            row->has_token = true;
            row->token = r->params.forced[i].id;
        }
    }
}

static void fill_row(sample_row *out, const request_row *r, const float *logits,
                     sample_logprob *logprobs)
{
    const sampling_params *p = &r->params;
    bool is_early = r->n_tokens - r->n_prompt_tokens < p->min_tokens;
    *out = (sample_row){.logits = logits,
                        .temperature = p->temperature,
                        .top_p = p->top_p,
                        .min_p = p->min_p,
                        .top_k = p->top_k,
                        .repetition_penalty = p->repetition_penalty,
                        .presence_penalty = p->presence_penalty,
                        .frequency_penalty = p->frequency_penalty,
                        .seed = p->seed,
                        .choice_idx = p->choice_idx,
                        .n_logprobs = p->n_logprobs,
                        .n_masked_ids = is_early ? p->n_stop_ids : 0,
                        .masked_ids = p->stop_ids,
                        .n_bias = p->n_logit_bias,
                        .bias = (const sample_bias *)p->logit_bias,
                        .tokens = r->tokens,
                        .n_prompt_tokens = r->n_prompt_tokens,
                        .n_tokens = r->n_tokens,
                        .logprobs = logprobs};
    force_token(out, r);
}

static request_result_msg *add_result(sampler *s, const request_row *r)
{
    PGD_ASSERT(s->n_results < s->max_seqs);
    request_result_msg *out = &s->results[s->n_results++];
    memset(out, 0, sizeof(*out));
    out->request_id = r->request_id;
    out->request_epoch = r->request_epoch;
    return out;
}

void sampler_add_error(sampler *s, const request_row *r, request_error error)
{
    add_result(s, r)->error = error;
}

pgd_err sampler_run(sampler *s, const float *logits, const input_batch *batch, request_rows *rows,
                    const kernel_ops *ops, kernel_ctx *ctx)
{
    int32_t n = 0;
    for (int32_t i = 0; i < batch->n_logit_rows; i++) {
        const request_row *r = request_rows_get(rows, batch->logit_seqs[i]);
        if (r->has_failed) /* in this step, at a token of its prompt */
            continue;
        PGD_ASSERT(n < s->max_seqs - s->n_results);
        s->row_seqs[n] = batch->logit_seqs[i];
        fill_row(&s->rows[n++], r, logits + (int64_t)i * s->vocab_size,
                 s->logprobs + s->n_logprobs);
        s->n_logprobs += r->params.n_logprobs + 1;
    }
    sample_args args = {.rows = s->rows, .n_rows = n, .vocab_size = s->vocab_size};
    PGD_TRY(ops->sample(&args, ctx));
    for (int32_t i = 0; i < n; i++) {
        const sample_row *row = &s->rows[i];
        request_row *r = request_rows_get(rows, s->row_seqs[i]);
        if (row->error != SAMPLE_OK) {
            r->has_failed = true;
            sampler_add_error(s, r,
                              row->error == SAMPLE_ERROR_NOT_FINITE ? REQUEST_ERROR_NAN_LOGITS
                                                                    : REQUEST_ERROR_INTERNAL);
            continue;
        }
        request_result_msg *out = add_result(s, r);
        out->n_tokens = 1;
        out->tokens[0] = row->token;
        out->n_logprobs_per_token = row->n_logprobs + 1;
        out->first_logprob = (int32_t)(row->logprobs - s->logprobs);
        /* A row that is full cannot be scheduled any further: the batch refuses it. */
        (void)request_rows_append_token(rows, s->row_seqs[i], row->token);
    }
    return PGD_OK;
}

void sampler_fill_result(const sampler *s, step_result *out)
{
    out->n_results = s->n_results;
    out->results = s->results;
    out->n_logprobs = s->n_logprobs;
    out->logprobs = (const token_logprob *)(const void *)s->logprobs;
}
