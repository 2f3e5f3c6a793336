/* What a worker answers to one scheduler_output.
 *
 * One result per scheduled request that produced something: a row that is still inside its prompt
 * has no entry unless it failed. Prompt results stand apart from that: a request has one in each
 * step that computes rows before the last token of its prompt, unless that step fails it.
 * Owns:    nothing; pointers are borrows until the next step (worker) or the next frame (engine)
 */
#ifndef PROTO_STEP_RESULT_H
#define PROTO_STEP_RESULT_H

#include "proto/wire.h"

typedef struct token_logprob {
    token_id id;
    float logprob; /* natural logarithm, from the raw logits */
} token_logprob;

typedef enum request_error {
    REQUEST_ERROR_NONE = 0,
    REQUEST_ERROR_NAN_LOGITS = 1, /* logits were not finite */
    REQUEST_ERROR_INTERNAL = 2
} request_error;

typedef struct request_result_msg {
    uint64_t request_id;
    uint32_t request_epoch; /* as sent with new_request_msg */
    request_error error;
    /* For token t: n_logprobs_per_token entries from logprobs[first_logprob + t *
     * n_logprobs_per_token]: the sampled token first, then the best ones in descending order (ties:
     * lower id first). 0 = not asked for. */
    int32_t n_logprobs_per_token;
    int32_t first_logprob;
    int32_t n_tokens; /* 1 to drafts + 1; 0 with an error */
    int32_t n_drafts; /* proposed for the next step; told too when the worker keeps them */
    /* Behind their counts both are unspecified. */
    token_id tokens[PGD_MAX_DRAFT_TOKENS + 1];
    token_id drafts[PGD_MAX_DRAFT_TOKENS];
} request_result_msg;

/* Log probabilities of prompt tokens, for a request that wants them: those that the rows of this
 * step predict, tokens first_token to first_token + n_tokens - 1 of the prompt (token 0 has none). */
typedef struct prompt_result_msg {
    uint64_t request_id;
    uint32_t request_epoch;
    int32_t first_token; /* >= 1 */
    int32_t n_tokens;    /* >= 1 */
    /* For token t: n_logprobs_per_token entries from prompt_logprobs[first_logprob + t *
     * n_logprobs_per_token]: the prompt's token first, then the best ones as above. */
    int32_t n_logprobs_per_token;
    int32_t first_logprob;
} prompt_result_msg;

typedef struct step_result {
    uint64_t step_id;
    int32_t n_results;
    const request_result_msg *results;
    int32_t n_logprobs;
    const token_logprob *logprobs;
    int32_t n_prompt_results;
    const prompt_result_msg *prompt_results;
    int32_t n_prompt_logprobs;
    const token_logprob *prompt_logprobs;
    uint32_t forward_us; /* from the first kernel to the sampled tokens */
    uint32_t total_us;   /* from frame received to result ready */
    uint32_t idle_us;    /* waiting for this frame */
} step_result;

extern const wire_record step_result_record;

size_t step_result_scratch_bytes(const wire_limits *limits);
/* Upper bound of an encoded result, for RECVMAXSZ. */
size_t step_result_max_frame_bytes(const wire_limits *limits);
/* As scheduler_output_decode; token ids are held against the vocabulary, logprob windows against
 * the array.
 * Thread:  any */
PGD_MUST_USE pgd_err step_result_decode(step_result *out, wire_scratch *scratch, const void *frame,
                                        size_t n_bytes, const wire_limits *limits, pgd_why *why);

#endif
