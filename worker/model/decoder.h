/* The decoder: one list of op calls, driven by model_config, for every architecture of the Llama
 * family.
 *
 * Owns:    activations and the rope table, sized at create; borrows cfg, weights and ops until
 *          destroy
 * Limits:  the batch was built by input_batch and fits max_rows and max_seqs
 * Thread:  the worker's main thread
 */
#ifndef WORKER_MODEL_DECODER_H
#define WORKER_MODEL_DECODER_H

#include "worker/input_batch.h"
#include "worker/kv_cache.h"
#include "worker/weights.h"

/* Prompt rows whose logits are computed at a time: a prompt's logits are never held whole. */
#define DECODER_MAX_SLICE 32

typedef struct decoder decoder;

typedef struct decoder_opts {
    const model_config *cfg;
    const weights *w;
    const kernel_ops *ops;
    int32_t max_rows; /* tokens of a step */
    int32_t max_seqs; /* requests of a step, each with at most one row of logits */
    int32_t max_positions;
} decoder_opts;

PGD_MUST_USE pgd_err decoder_create(decoder **out, const decoder_opts *opts, pgd_why *why);
void decoder_destroy(decoder *d);

/* Computes all rows of the batch, writes their K and V, and leaves the raw logits [n_logit_rows,
 * vocab_size] in *logits, a borrow until the next call. progress is incremented (atomically) after
 * each layer. */
PGD_MUST_USE pgd_err decoder_forward(decoder *d, float **logits, const input_batch *batch,
                                     const kv_tables *tables, const kv_cache *kv, kernel_ctx *ctx,
                                     uint64_t *progress);
/* After decoder_forward: the raw logits [n, vocab_size] of prompt rows first to first + n - 1, n <=
 * DECODER_MAX_SLICE, in *logits, a borrow until the next call of this function; the logits of the
 * logit rows stay. */
PGD_MUST_USE pgd_err decoder_prompt_logits(decoder *d, float **logits, const input_batch *batch,
                                           int32_t first, int32_t n, kernel_ctx *ctx);
/* Bytes of activations and tables, for messages. */
size_t decoder_bytes(const decoder *d);

#endif
