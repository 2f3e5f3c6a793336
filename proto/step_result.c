/* Field tables of a step's answer, and the rules that hold between its fields: tokens or an error,
 * never both, and logprob windows inside the arrays of the step. Whether a request is known is
 * the scheduler's to check. */
#include "proto/step_result.h"

static_assert(sizeof(token_logprob) == 8, "an i32 and an f32, used where it lies in the frame");

/* Tokens inside the struct: copied, there are at most PGD_MAX_DRAFT_TOKENS + 1. */
#define TOKENS(member, count)                                                                  \
    {                                                                                          \
        .name = #member, .kind = WIRE_KIND_INLINE, .elem = WIRE_KIND_I32, .count_bytes = 4,    \
        .offset = (uint32_t)offsetof(request_result_msg, member),                              \
        .max_ref = W_LIMIT(max_token_id), .count_offset = W_OFF(request_result_msg, count, 4), \
        .max_n = (uint32_t)PGD_ARRAY_LEN(((request_result_msg *)0)->member)                    \
    }

static const wire_field RESULT_FIELDS[] = {
    W_U64(request_result_msg, request_id),
    W_U32(request_result_msg, request_epoch, 0, UINT32_MAX),
    W_U32(request_result_msg, error, REQUEST_ERROR_NONE, REQUEST_ERROR_INTERNAL),
    W_I32_REF(request_result_msg, n_logprobs_per_token, 0, max_logprobs_per_token),
    W_I32_REF(request_result_msg, first_logprob, 0, max_result_logprobs),
    TOKENS(tokens, n_tokens),
    TOKENS(drafts, n_drafts),
};
static const wire_record RESULT_RECORD = {"request_result", RESULT_FIELDS,
                                          PGD_ARRAY_LEN(RESULT_FIELDS), sizeof(request_result_msg)};

static const wire_field PROMPT_FIELDS[] = {
    W_U64(prompt_result_msg, request_id),
    W_U32(prompt_result_msg, request_epoch, 0, UINT32_MAX),
    W_I32_REF(prompt_result_msg, first_token, 1, max_model_len),
    W_I32_REF(prompt_result_msg, n_tokens, 1, max_num_batched_tokens),
    W_I32_REF(prompt_result_msg, n_logprobs_per_token, 1, max_logprobs_per_token),
    W_I32_REF(prompt_result_msg, first_logprob, 0, max_prompt_logprobs),
};
static const wire_record PROMPT_RECORD = {"prompt_result", PROMPT_FIELDS,
                                          PGD_ARRAY_LEN(PROMPT_FIELDS), sizeof(prompt_result_msg)};

static const wire_field FIELDS[] = {
    W_U64(step_result, step_id),
    W_U32(step_result, forward_us, 0, UINT32_MAX),
    W_U32(step_result, total_us, 0, UINT32_MAX),
    W_U32(step_result, idle_us, 0, UINT32_MAX),
    {
        .name = "results",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_RECORD,
        .record = &RESULT_RECORD,
        .offset = (uint32_t)offsetof(step_result, results),
        .count_offset = W_OFF(step_result, n_results, 4),
        .count_bytes = 4,
        .max_n_ref = W_LIMIT(max_num_seqs),
    },
    {
        .name = "logprobs",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_PAIR,
        .offset = (uint32_t)offsetof(step_result, logprobs),
        .count_offset = W_OFF(step_result, n_logprobs, 4),
        .count_bytes = 4,
        .max_n_ref = W_LIMIT(max_result_logprobs),
        .max_ref = W_LIMIT(max_token_id),
    },
    {
        .name = "prompt_results",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_RECORD,
        .record = &PROMPT_RECORD,
        .offset = (uint32_t)offsetof(step_result, prompt_results),
        .count_offset = W_OFF(step_result, n_prompt_results, 4),
        .count_bytes = 4,
        .max_n_ref = W_LIMIT(max_num_seqs),
    },
    {
        .name = "prompt_logprobs",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_PAIR,
        .offset = (uint32_t)offsetof(step_result, prompt_logprobs),
        .count_offset = W_OFF(step_result, n_prompt_logprobs, 4),
        .count_bytes = 4,
        .max_n_ref = W_LIMIT(max_prompt_logprobs),
        .max_ref = W_LIMIT(max_token_id),
    },
};

const wire_record step_result_record = {"result", FIELDS, PGD_ARRAY_LEN(FIELDS),
                                        sizeof(step_result)};

size_t step_result_scratch_bytes(const wire_limits *limits)
{
    return (size_t)limits->max_num_seqs * (sizeof(request_result_msg) + sizeof(prompt_result_msg));
}

size_t step_result_max_frame_bytes(const wire_limits *limits)
{
    return (size_t)limits->max_num_seqs *
               (sizeof(request_result_msg) + sizeof(prompt_result_msg) + 64) +
           ((size_t)limits->max_result_logprobs + (size_t)limits->max_prompt_logprobs) *
               sizeof(token_logprob) +
           4096;
}

pgd_err step_result_decode(step_result *out, wire_scratch *scratch, const void *frame,
                           size_t n_bytes, const wire_limits *limits, pgd_why *why)
{
    PGD_TRY(
        wire_decode(out, scratch, frame, n_bytes, WIRE_RESULT, &step_result_record, limits, why));
    for (int32_t i = 0; i < out->n_results; i++) {
        const request_result_msg *r = &out->results[i];
        if ((r->n_tokens == 0) != (r->error != REQUEST_ERROR_NONE))
            return pgd_fail(why, PGD_EPROTO,
                            "result of step %llu: request %llu: expected tokens or an error, got "
                            "%d tokens and error %d",
                            (unsigned long long)out->step_id, (unsigned long long)r->request_id,
                            r->n_tokens, (int)r->error);
        if ((int64_t)r->first_logprob + (int64_t)r->n_tokens * r->n_logprobs_per_token >
            out->n_logprobs)
            return pgd_fail(why, PGD_EPROTO,
                            "result of step %llu: request %llu: expected logprobs within %d, got "
                            "%d of %d tokens from %d",
                            (unsigned long long)out->step_id, (unsigned long long)r->request_id,
                            out->n_logprobs, r->n_logprobs_per_token, r->n_tokens,
                            r->first_logprob);
    }
    for (int32_t i = 0; i < out->n_prompt_results; i++) {
        const prompt_result_msg *p = &out->prompt_results[i];
        if ((int64_t)p->first_logprob + (int64_t)p->n_tokens * p->n_logprobs_per_token >
            out->n_prompt_logprobs)
            return pgd_fail(why, PGD_EPROTO,
                            "result of step %llu: request %llu: expected prompt logprobs within "
                            "%d, got %d of %d tokens from %d",
                            (unsigned long long)out->step_id, (unsigned long long)p->request_id,
                            out->n_prompt_logprobs, p->n_logprobs_per_token, p->n_tokens,
                            p->first_logprob);
    }
    return PGD_OK;
}
