/* Field table of sampling_params: the ranges of its header, held once more on the worker's side of
 * the wire. */
#include "proto/sampling_params.h"

static_assert(SAMPLING_MAX_FORCED == 2, "each is a row of the table");
static_assert(sizeof(logit_bias) == 8, "an i32 and an f32, used where it lies in the frame");

static const wire_field FIELDS[] = {
    W_F32(sampling_params, temperature, 0, SAMPLING_HUGE),
    W_F32(sampling_params, top_p, SAMPLING_TINY, 1),
    W_F32(sampling_params, min_p, 0, 1),
    W_I32(sampling_params, top_k, 0, INT32_MAX),
    W_F32(sampling_params, repetition_penalty, SAMPLING_TINY, SAMPLING_HUGE),
    W_F32(sampling_params, presence_penalty, -2, 2),
    W_F32(sampling_params, frequency_penalty, -2, 2),
    W_I32(sampling_params, choice_idx, 0, INT32_MAX),
    W_U64(sampling_params, seed),
    W_I32_REF(sampling_params, n_logprobs, -1, max_logprobs),
    W_I32_REF(sampling_params, n_prompt_logprobs_per_token, 0, max_logprobs_per_token),
    W_I32(sampling_params, min_tokens, 0, INT32_MAX),
    W_I32(sampling_params, n_forced, 0, SAMPLING_MAX_FORCED),
    W_I32(sampling_params, forced[0].position, 0, INT32_MAX),
    W_I32_REF(sampling_params, forced[0].id, 0, max_token_id),
    W_I32(sampling_params, forced[1].position, 0, INT32_MAX),
    W_I32_REF(sampling_params, forced[1].id, 0, max_token_id),
    {
        .name = "stop_ids",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_I32,
        .offset = (uint32_t)offsetof(sampling_params, stop_ids),
        .count_offset = W_OFF(sampling_params, n_stop_ids, 4),
        .count_bytes = 4,
        .max_n = 4096, /* PGD_MAX_STOP_IDS of the request and the model's own */
        .max_ref = W_LIMIT(max_token_id),
    },
    {
        .name = "logit_bias",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_PAIR,
        .offset = (uint32_t)offsetof(sampling_params, logit_bias),
        .count_offset = W_OFF(sampling_params, n_logit_bias, 4),
        .count_bytes = 4,
        .max_n = PGD_MAX_LOGIT_BIAS,
        .max_ref = W_LIMIT(max_token_id),
    },
};

const wire_record sampling_params_record = {"sampling_params", FIELDS, PGD_ARRAY_LEN(FIELDS),
                                            sizeof(sampling_params)};
