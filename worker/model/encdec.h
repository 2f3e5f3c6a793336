/* An encoder-decoder model (BART): the encoder pass over whole inputs, and the decoder with cross
 * attention to them.
 *
 * KV layers: decoder layer i's self attention is layer i, its cross attention layer n_layers + i,
 * whose table covers the encoder's tokens of a request.
 * Owns:    activations, and pages of the encoder's own keys and values, sized at create; borrows
 *          cfg, weights and ops until destroy
 * Limits:  the batch was built by input_batch and fits max_rows, max_seqs and max_encoder_rows
 * Thread:  the worker's main thread
 * Source:  Lewis et al. 2019 (BART)
 */
#ifndef WORKER_MODEL_ENCDEC_H
#define WORKER_MODEL_ENCDEC_H

#include "worker/input_batch.h"
#include "worker/kv_cache.h"
#include "worker/weights.h"

typedef struct encdec encdec;

typedef struct encdec_opts {
    const model_config *cfg;
    const weights *w;
    const kernel_ops *ops;
    int32_t max_rows;         /* decoder tokens of a step */
    int32_t max_seqs;         /* requests of a step, each with at most one row of logits */
    int32_t max_encoder_rows; /* encoder tokens of a step */
} encdec_opts;

PGD_MUST_USE pgd_err encdec_create(encdec **out, const encdec_opts *opts, pgd_why *why);
void encdec_destroy(encdec *e);

/* Encodes the batch's encoder inputs, writes K and V of every cross attention, then computes all
 * rows of the batch and leaves the raw logits [n_logit_rows, vocab_size] in *logits, a borrow until
 * the next call. progress is incremented (atomically) after each layer. */
PGD_MUST_USE pgd_err encdec_forward(encdec *e, float **logits, const input_batch *batch,
                                    const kv_tables *tables, const kv_cache *kv, kernel_ctx *ctx,
                                    uint64_t *progress);
/* Bytes of activations and pages, for messages. */
size_t encdec_bytes(const encdec *e);
/* Workspace of its ops; limits: of the decoder's self attention. */
size_t encdec_workspace_bytes(const encdec *e, const attention_limits *limits);

#endif
