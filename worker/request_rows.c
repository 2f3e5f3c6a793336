/* Rows live in fixed arrays; free ones are a stack, lowest index on top at start. The map from
 * request id to row is sized for all rows. Every value of a new request is checked here once, so
 * that the batch, the kernels and the sampler may trust a row. */
#include "worker/request_rows.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "common/hash_map.h"
#include "common/mem.h"

struct request_rows {
    request_rows_opts opts;
    request_row *rows; /* [max_rows] */
    token_id *tokens;  /* [max_rows, max_tokens] */
    size_t tokens_bytes;
    logit_bias *biases; /* [max_rows, PGD_MAX_LOGIT_BIAS] */
    int32_t *free_rows; /* [max_rows] stack */
    int32_t n_free;
    hash_map *by_id;
};

pgd_err request_rows_create(request_rows **out, const request_rows_opts *opts)
{
    *out = NULL;
    if (opts->max_rows < 1 || opts->max_tokens < 1 || opts->vocab_size < 1 ||
        opts->max_logprobs < 0 || opts->max_logprobs > PGD_MAX_LOGPROBS)
        return PGD_EINVAL;
    request_rows *rows = mem_calloc(1, sizeof(*rows));
    if (!rows)
        return PGD_ENOMEM;
    pgd_err err = PGD_ENOMEM;
    size_t n_rows = (size_t)opts->max_rows;
    rows->opts = *opts;
    if (!mem_mul(&rows->tokens_bytes, n_rows * sizeof(token_id), (size_t)opts->max_tokens))
        goto fail;
    rows->rows = mem_calloc(n_rows, sizeof(request_row));
    rows->tokens = mem_alloc_aligned(rows->tokens_bytes, 64);
    rows->biases = mem_calloc(n_rows * PGD_MAX_LOGIT_BIAS, sizeof(logit_bias));
    rows->free_rows = mem_calloc(n_rows, sizeof(int32_t));
    if (!rows->rows || !rows->tokens || !rows->biases || !rows->free_rows)
        goto fail;
    err = hash_map_create(&rows->by_id, n_rows);
    if (err != PGD_OK)
        goto fail;
    for (int32_t i = 0; i < opts->max_rows; i++) {
        rows->rows[i].tokens = rows->tokens + (int64_t)i * opts->max_tokens;
        rows->rows[i].logit_bias = rows->biases + (int64_t)i * PGD_MAX_LOGIT_BIAS;
        rows->free_rows[i] = opts->max_rows - 1 - i;
    }
    rows->n_free = opts->max_rows;
    *out = rows;
    return PGD_OK;
fail:
    request_rows_destroy(rows);
    return err;
}

void request_rows_destroy(request_rows *rows)
{
    if (!rows)
        return;
    hash_map_destroy(rows->by_id);
    mem_free(rows->free_rows);
    mem_free(rows->biases);
    mem_free_aligned(rows->tokens, rows->tokens_bytes);
    mem_free(rows->rows);
    mem_free(rows);
}

/* --- checks -------------------------------------------------------------------------------------
 */

static pgd_err check_ids(const request_rows *rows, const token_id *ids, int32_t n_ids,
                         const char *what, uint64_t request_id, pgd_why *why)
{
    for (int32_t i = 0; i < n_ids; i++) {
        if (ids[i] < 0 || ids[i] >= rows->opts.vocab_size)
            return pgd_fail(why, PGD_EPROTO,
                            "expected a token id in [0, %" PRId32 "), got %" PRId32
                            ", at %s[%" PRId32 "] of request %" PRIu64,
                            rows->opts.vocab_size, ids[i], what, i, request_id);
    }
    return PGD_OK;
}

static pgd_err check_range(double value, double min, double max, const char *name, uint64_t id,
                           pgd_why *why)
{
    if (value >= min && value <= max)
        return PGD_OK;
    return pgd_fail(why, PGD_EPROTO,
                    "expected a value in [%g, %g], got %g, at %s of request %" PRIu64, min, max,
                    value, name, id);
}

static pgd_err check_params(const request_rows *rows, const new_request_msg *msg, pgd_why *why)
{
    const sampling_params *p = &msg->params;
    uint64_t id = msg->request_id;
    PGD_TRY(check_range(p->temperature, 0, SAMPLING_HUGE, "temperature", id, why));
    PGD_TRY(check_range(p->top_p, SAMPLING_TINY, 1, "top_p", id, why));
    PGD_TRY(check_range(p->min_p, 0, 1, "min_p", id, why));
    PGD_TRY(check_range(p->top_k, 0, INT32_MAX, "top_k", id, why));
    PGD_TRY(check_range(p->repetition_penalty, SAMPLING_TINY, SAMPLING_HUGE, "repetition_penalty",
                        id, why));
    PGD_TRY(check_range(p->presence_penalty, -2, 2, "presence_penalty", id, why));
    PGD_TRY(check_range(p->frequency_penalty, -2, 2, "frequency_penalty", id, why));
    PGD_TRY(check_range(p->choice_idx, 0, INT32_MAX, "choice_idx", id, why));
    PGD_TRY(check_range(p->n_logprobs, -1, PGD_MIN(rows->opts.max_logprobs, rows->opts.vocab_size),
                        "n_logprobs", id, why));
    PGD_TRY(check_range(p->n_prompt_logprobs_per_token, 0,
                        PGD_MIN(rows->opts.max_logprobs, rows->opts.vocab_size) + 1,
                        "n_prompt_logprobs_per_token", id, why));
    PGD_TRY(check_range(p->min_tokens, 0, INT32_MAX, "min_tokens", id, why));
    PGD_TRY(check_range(p->n_stop_ids, 0, REQUEST_ROWS_MAX_STOP_IDS, "n_stop_ids", id, why));
    PGD_TRY(check_range(p->n_logit_bias, 0, PGD_MAX_LOGIT_BIAS, "n_logit_bias", id, why));
    PGD_TRY(check_ids(rows, p->stop_ids, p->n_stop_ids, "stop_ids", id, why));
    PGD_TRY(check_range(p->n_forced, 0, SAMPLING_MAX_FORCED, "n_forced", id, why));
    for (int32_t i = 0; i < p->n_forced; i++)
        PGD_TRY(check_ids(rows, &p->forced[i].id, 1, "forced", id, why));
    for (int32_t i = 0; i < p->n_logit_bias; i++) {
        PGD_TRY(check_ids(rows, &p->logit_bias[i].id, 1, "logit_bias", id, why));
        PGD_TRY(check_range(p->logit_bias[i].bias, -SAMPLING_HUGE, SAMPLING_HUGE, "logit_bias", id,
                            why));
    }
    return PGD_OK;
}

static pgd_err check_tokens(const request_rows *rows, const new_request_msg *msg, pgd_why *why)
{
    uint64_t id = msg->request_id;
    if (msg->n_tokens < 1 || msg->n_tokens > rows->opts.max_tokens)
        return pgd_fail(why, PGD_EPROTO,
                        "expected 1 to %" PRId32 " tokens, got %" PRId32 ", at request %" PRIu64,
                        rows->opts.max_tokens, msg->n_tokens, id);
    if (msg->n_prompt_tokens < 1 || msg->n_prompt_tokens > msg->n_tokens)
        return pgd_fail(why, PGD_EPROTO,
                        "expected 1 to %" PRId32 " prompt tokens, got %" PRId32
                        ", at request %" PRIu64,
                        msg->n_tokens, msg->n_prompt_tokens, id);
    if (msg->n_computed_tokens < 0 || msg->n_scheduled_tokens < 0 ||
        msg->n_computed_tokens > msg->n_tokens ||
        msg->n_scheduled_tokens > msg->n_tokens - msg->n_computed_tokens)
        return pgd_fail(why, PGD_EPROTO,
                        "expected computed + scheduled <= %" PRId32 " tokens, got %" PRId32
                        " + %" PRId32 ", at request %" PRIu64,
                        msg->n_tokens, msg->n_computed_tokens, msg->n_scheduled_tokens, id);
    return check_ids(rows, msg->tokens, msg->n_tokens, "tokens", id, why);
}

static pgd_err check_encoder_tokens(const request_rows *rows, const new_request_msg *msg,
                                    pgd_why *why)
{
    int32_t max = rows->opts.max_encoder_tokens;
    if (msg->n_encoder_tokens < (max > 0) || msg->n_encoder_tokens > max)
        return pgd_fail(why, PGD_EPROTO,
                        "expected %d to %" PRId32 " encoder tokens, got %" PRId32
                        ", at request %" PRIu64,
                        max > 0, max, msg->n_encoder_tokens, msg->request_id);
    if (max > 0 && msg->params.n_prompt_logprobs_per_token > 0)
        return pgd_fail(why, PGD_EPROTO,
                        "expected no prompt logprobs of a model with an encoder, got them at "
                        "request %" PRIu64,
                        msg->request_id);
    return check_ids(rows, msg->encoder_tokens, msg->n_encoder_tokens, "encoder_tokens",
                     msg->request_id, why);
}

/* --- rows ----------------------------------------------------------------------------------------
 */

pgd_err request_rows_add(request_rows *rows, int32_t *row, const new_request_msg *msg, pgd_why *why)
{
    *row = -1;
    if (request_rows_find(rows, msg->request_id) >= 0)
        return pgd_fail(why, PGD_EPROTO,
                        "expected a request that is not here yet, got request %" PRIu64 " again",
                        msg->request_id);
    if (rows->n_free == 0)
        return pgd_fail(why, PGD_EPROTO,
                        "expected at most %" PRId32
                        " requests at a time, got one more, request %" PRIu64,
                        rows->opts.max_rows, msg->request_id);
    PGD_TRY(check_tokens(rows, msg, why));
    PGD_TRY(check_encoder_tokens(rows, msg, why));
    PGD_TRY(check_params(rows, msg, why));

    int32_t idx = rows->free_rows[rows->n_free - 1];
    if (!hash_map_put(rows->by_id, msg->request_id, (uintptr_t)idx))
        return pgd_fail(why, PGD_ENOMEM, "no room in the request map");
    rows->n_free--;
    request_row *r = &rows->rows[idx];
    r->request_id = msg->request_id;
    r->request_epoch = msg->request_epoch;
    r->is_used = true;
    r->has_failed = false;
    r->last_step = 0;
    r->n_prompt_tokens = msg->n_prompt_tokens;
    r->n_tokens = msg->n_tokens;
    r->n_computed_tokens = msg->n_computed_tokens;
    r->n_encoder_tokens = msg->n_encoder_tokens;
    memcpy(r->tokens, msg->tokens, (size_t)msg->n_tokens * sizeof(token_id));
    r->params = msg->params;
    for (int32_t i = 0; i < r->params.n_stop_ids; i++)
        r->stop_ids[i] = msg->params.stop_ids[i];
    for (int32_t i = 0; i < r->params.n_logit_bias; i++)
        r->logit_bias[i] = msg->params.logit_bias[i];
    r->params.stop_ids = r->stop_ids;
    r->params.logit_bias = r->logit_bias;
    *row = idx;
    return PGD_OK;
}

int32_t request_rows_release(request_rows *rows, uint64_t request_id)
{
    int32_t idx = request_rows_find(rows, request_id);
    if (idx < 0)
        return -1;
    (void)hash_map_remove(rows->by_id, request_id);
    rows->rows[idx].is_used = false;
    rows->free_rows[rows->n_free++] = idx;
    return idx;
}

int32_t request_rows_find(const request_rows *rows, uint64_t request_id)
{
    uintptr_t value;
    return hash_map_get(rows->by_id, request_id, &value) ? (int32_t)value : -1;
}

request_row *request_rows_get(const request_rows *rows, int32_t row)
{
    PGD_ASSERT(row >= 0 && row < rows->opts.max_rows && rows->rows[row].is_used);
    return &rows->rows[row];
}

int32_t request_rows_n_used(const request_rows *rows)
{
    return rows->opts.max_rows - rows->n_free;
}

bool request_rows_append_token(request_rows *rows, int32_t row, token_id token)
{
    request_row *r = request_rows_get(rows, row);
    if (r->n_tokens >= rows->opts.max_tokens)
        return false;
    r->tokens[r->n_tokens++] = token;
    return true;
}
