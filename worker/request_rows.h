/* The worker's rows: what it remembers of each request between steps (rules WK1, WK2).
 *
 * A row is a cache of what the engine said: tokens (prompt and sampled ones), sampling parameters,
 * how far KV has been computed. A row keeps its index for as long as its request lives here.
 * Owns:    every row and its buffers, sized at create; nothing is allocated afterwards
 * Thread:  the worker's main thread
 */
#ifndef WORKER_REQUEST_ROWS_H
#define WORKER_REQUEST_ROWS_H

#include "common/err.h"
#include "common/model/model_config.h"
#include "proto/scheduler_output.h"

#define REQUEST_ROWS_MAX_STOP_IDS (PGD_MAX_STOP_IDS + MODEL_MAX_EOS_IDS)

typedef struct request_row {
    uint64_t request_id;
    uint32_t request_epoch;
    bool is_used;
    bool has_failed; /* a sample failed: no token is known beyond n_tokens, and none is computed */
    uint64_t last_step; /* 1 + index of the last step that scheduled it; 0 = none */
    int32_t n_prompt_tokens;
    int32_t n_tokens;
    int32_t n_computed_tokens; /* KV of positions [0, n_computed_tokens) is in the blocks */
    token_id *tokens;          /* [max_tokens] */
    int32_t n_encoder_tokens;
    sampling_params params; /* its pointers lead into the two arrays below */
    token_id stop_ids[REQUEST_ROWS_MAX_STOP_IDS];
    logit_bias *logit_bias; /* [PGD_MAX_LOGIT_BIAS] */
} request_row;

typedef struct request_rows request_rows;

typedef struct request_rows_opts {
    int32_t max_rows;
    int32_t max_tokens;         /* of one request, prompt and output */
    int32_t max_encoder_tokens; /* of one request, which then has some; 0 = none has any */
    int32_t vocab_size;
    int32_t max_logprobs;
} request_rows_opts;

PGD_MUST_USE pgd_err request_rows_create(request_rows **out, const request_rows_opts *opts);
void request_rows_destroy(request_rows *rows);

/* Takes a free row and copies the request into it after checking every field: PGD_EPROTO with a why
 * (id already there, no free row, tokens or ids outside the vocabulary, more computed or scheduled
 * tokens than there are, parameters out of range). A failed add changes nothing. */
PGD_MUST_USE pgd_err request_rows_add(request_rows *rows, int32_t *row, const new_request_msg *msg,
                                      pgd_why *why);
/* Frees the row of this request; -1 when there is none, else the row that was freed. */
int32_t request_rows_release(request_rows *rows, uint64_t request_id);
/* -1 when there is none. */
int32_t request_rows_find(const request_rows *rows, uint64_t request_id);
/* Borrow until the row is released. */
request_row *request_rows_get(const request_rows *rows, int32_t row);
int32_t request_rows_n_used(const request_rows *rows);

/* Appends a sampled token; false when the buffer is full. */
bool request_rows_append_token(request_rows *rows, int32_t row, token_id token);

#endif
