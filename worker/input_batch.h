/* The arrays of one step that the model reads, made from rows and block tables (rules WK4, WK5,
 * WK7, WK8).
 *
 * Requests are added one by one; positions, slots and input ids follow from the row: inputs are the
 * row's own tokens, so that a decode step reads the worker's last sample without waiting for the
 * engine.
 * Owns:    its arrays, sized at create
 * Limits:  max_seqs requests, max_rows tokens, of each at most max_rows
 * Thread:  the worker's main thread
 */
#ifndef WORKER_INPUT_BATCH_H
#define WORKER_INPUT_BATCH_H

#include "common/err.h"
#include "worker/kv_tables.h"
#include "worker/request_rows.h"

/* The step's encoder inputs, each whole, one after the other. */
typedef struct encoder_batch {
    int32_t n_rows;                    /* tokens */
    int32_t n_seqs;                    /* inputs */
    token_id *ids;                     /* [n_rows] */
    int32_t *positions;                /* [n_rows] */
    slot_id *slots[PGD_MAX_KV_GROUPS]; /* [n_rows] each, of the groups of cross attention */
    int32_t *start;                    /* [n_seqs + 1] */
    int32_t *n_keys;                   /* [n_seqs] tokens of each input */
    int32_t max_rows;
} encoder_batch;

typedef struct input_batch {
    int32_t n_rows; /* tokens */
    int32_t n_seqs; /* requests */
    int32_t n_logit_rows;
    int32_t n_prompt_rows;             /* rows whose next token, a prompt's, is to be scored */
    token_id *ids;                     /* [n_rows] */
    int32_t *positions;                /* [n_rows] */
    slot_id *slots[PGD_MAX_KV_GROUPS]; /* [n_rows] each, of the groups that tokens write to */
    int32_t *query_start;              /* [n_seqs + 1] */
    int32_t *n_context;                /* [n_seqs] keys after this step: computed + scheduled */
    int32_t *seq_row;                  /* [n_seqs] row in the block table */
    int32_t *n_encoder_tokens;         /* [n_seqs] keys of cross attention */
    int32_t *logit_rows;               /* [n_logit_rows] index into the n_rows, ascending */
    int32_t *logit_seqs;               /* [n_logit_rows] row in request_rows */
    int32_t *prompt_rows;              /* [n_prompt_rows] index into the n_rows, ascending */
    int32_t *prompt_seqs;              /* [n_prompt_rows] row in request_rows */
    int32_t max_rows;
    int32_t max_seqs;
    encoder_batch encoder;
} input_batch;

PGD_MUST_USE pgd_err input_batch_create(input_batch **out, int32_t max_rows, int32_t max_seqs);
/* Room for max_rows encoder tokens of a step; without this call there is none. */
PGD_MUST_USE pgd_err input_batch_create_encoder(input_batch *b, int32_t max_rows);
void input_batch_destroy(input_batch *b);
void input_batch_reset(input_batch *b);

/* Adds n_scheduled >= 1 tokens of a row from position n_computed on, with their slots in every group
 * but those of cross attention, whose KV is the encoder's. The row samples when that
 * reaches its last known token; rows before the last token of a prompt that wants its logprobs
 * become prompt rows. PGD_EPROTO with a why: batch full, tokens beyond those known, KV
 * that was never computed, or blocks that do not hold what these tokens write and attend to; the
 * batch is then unchanged. */
PGD_MUST_USE pgd_err input_batch_add(input_batch *b, const request_row *r, int32_t row,
                                     int32_t n_computed, int32_t n_scheduled,
                                     const kv_tables *tables, pgd_why *why);

/* Adds a new row's encoder tokens, with their slots in the groups of cross attention; before
 * input_batch_add of the same row. PGD_EPROTO with a why: no room, or too few blocks. */
PGD_MUST_USE pgd_err input_batch_add_encoder(input_batch *b, const request_row *r, int32_t row,
                                             const token_id *tokens, const kv_tables *tables,
                                             pgd_why *why);

#endif
