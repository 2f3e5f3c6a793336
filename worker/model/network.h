/* A model of either kind behind one interface: a decoder alone, or an encoder-decoder. The kind is
 * chosen once, by the model's configuration.
 *
 * Owns:    the model's activations and tables; borrows cfg, weights and ops until destroy
 * Thread:  the worker's main thread
 */
#ifndef WORKER_MODEL_NETWORK_H
#define WORKER_MODEL_NETWORK_H

#include "worker/model/decoder.h"

typedef struct network network;

typedef struct network_opts {
    decoder_opts decoder;
    int32_t max_encoder_rows; /* encoder tokens of a step; 0 without an encoder */
} network_opts;

PGD_MUST_USE pgd_err network_create(network **out, const network_opts *opts, pgd_why *why);
void network_destroy(network *n);

/* As decoder_forward; an encoder-decoder model computes the batch's encoder inputs first and writes
 * the K and V that its cross attention reads. */
PGD_MUST_USE pgd_err network_forward(network *n, float **logits, const input_batch *batch,
                                     const kv_tables *tables, const kv_cache *kv, kernel_ctx *ctx,
                                     uint64_t *progress);
/* As decoder_prompt_logits; an encoder-decoder model has no prompt to score: PGD_EUNSUPPORTED. */
PGD_MUST_USE pgd_err network_prompt_logits(network *n, float **logits, const input_batch *batch,
                                           int32_t first, int32_t n_rows, kernel_ctx *ctx);
/* Bytes of activations and tables, for messages. */
size_t network_bytes(const network *n);
/* Workspace that the model's ops need besides those of a decoder of these limits. */
size_t network_workspace_bytes(const network *n, const attention_limits *limits);

#endif
