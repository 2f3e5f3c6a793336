/* Tokens from the logits of a step: fills the sample op's rows from request rows, runs it, and
 * makes results of what comes back.
 *
 * Owns:    op rows, results and log probabilities, sized at create
 * Thread:  the worker's main thread
 */
#ifndef WORKER_SAMPLER_H
#define WORKER_SAMPLER_H

#include "kernels/ops.h"
#include "proto/step_result.h"
#include "worker/input_batch.h"
#include "worker/request_rows.h"

typedef struct sampler sampler;

PGD_MUST_USE pgd_err sampler_create(sampler **out, int32_t max_seqs, int32_t max_logprobs,
                                    int32_t vocab_size);
void sampler_destroy(sampler *s);
void sampler_reset(sampler *s);

/* Samples every logit row of the batch whose request has not failed: its token is appended to its
 * row, and a result is added. A row whose logits are not finite, or that has no token left to
 * choose from, gets an error result and is marked has_failed. */
PGD_MUST_USE pgd_err sampler_run(sampler *s, const float *logits, const input_batch *batch,
                                 request_rows *rows, const kernel_ops *ops, kernel_ctx *ctx);
/* Adds a result without a token. */
void sampler_add_error(sampler *s, const request_row *r, request_error error);
/* Points the result's arrays at what was added since reset; borrows until the next reset. */
void sampler_fill_result(const sampler *s, step_result *out);

#endif
