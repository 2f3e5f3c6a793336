/* Sampling parameters of one request, as the worker needs them.
 *
 * Ranges are checked at the HTTP edge and again when decoded: temperature finite >= 0 (0 = greedy),
 * top_p (0,1], top_k 0 (off) or >= 1, min_p [0,1], penalties: presence and frequency [-2,2],
 * repetition > 0. Order of application: logit bias and min_tokens mask, penalties (repetition over
 * prompt and output; presence and frequency over output), temperature, top-k, top-p, min-p, then
 * Gumbel-max with Philox4x32-10 keyed by (seed, choice_idx, output position), counter = token id;
 * ties go to the lower id. Logprobs, of the prompt's tokens too, come from the raw logits.
 * A forced token is taken before any of these.
 * Owns:    nothing; the pointers are borrows
 */
#ifndef PROTO_SAMPLING_PARAMS_H
#define PROTO_SAMPLING_PARAMS_H

#include "proto/wire.h"

/* Bounds of numbers that have no natural one: what is nearer to 0 or larger is of no use, and would
 * not survive the arithmetic. The HTTP edge keeps values inside; both ends of the wire check. */
#define SAMPLING_TINY 1e-30f
#define SAMPLING_HUGE 1e30f

#define SAMPLING_MAX_FORCED 2 /* a text's first and last token */

typedef struct logit_bias {
    token_id id;
    float bias;
} logit_bias;

typedef struct forced_token {
    int32_t position; /* among the outputs */
    token_id id;
} forced_token;

typedef struct sampling_params {
    float temperature;
    float top_p;
    float min_p;
    int32_t top_k;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    uint64_t seed;      /* always set: drawn at admission when the client gave none */
    int32_t choice_idx; /* which of n samples */
    int32_t n_logprobs; /* -1 none, 0 the sampled token only, k > 0 also the k best */
    int32_t n_prompt_logprobs_per_token; /* 0 none, 1 the prompt's own tokens, 1 + k also the k
                                            best of each position */
    int32_t min_tokens;                  /* until then stop_ids are masked */
    int32_t n_stop_ids;       /* every id that would end the request: eos unless ignore_eos, and
                                 stop_token_ids */
    const token_id *stop_ids; /* [n_stop_ids] */
    int32_t n_forced; /* outputs that are given, whatever the logits; of one position the last */
    forced_token forced[SAMPLING_MAX_FORCED];
    int32_t n_logit_bias;
    const logit_bias *logit_bias; /* [n_logit_bias] */
} sampling_params;

/* How it lies in a frame; refers to wire_limits.max_token_id and max_logprobs. */
extern const wire_record sampling_params_record;

#endif
