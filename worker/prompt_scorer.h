/* Log probabilities of prompt tokens: every prompt row of a step against the token that follows it
 * in the prompt, from the raw logits, by the same op as a sampled token's.
 *
 * Logits are computed in slices of DECODER_MAX_SLICE rows, so that memory does not grow with the
 * chunk. A row depends on nothing but itself: slices, chunks and batches cannot change a value.
 * Owns:    op rows, results and log probabilities, sized at create for the largest step
 * Thread:  the worker's main thread
 */
#ifndef WORKER_PROMPT_SCORER_H
#define WORKER_PROMPT_SCORER_H

#include "worker/model/network.h"
#include "worker/sampler.h"

typedef struct prompt_scorer prompt_scorer;

PGD_MUST_USE pgd_err prompt_scorer_create(prompt_scorer **out, int32_t max_seqs, int32_t max_rows,
                                          int32_t max_logprobs, int32_t vocab_size);
void prompt_scorer_destroy(prompt_scorer *s);
void prompt_scorer_reset(prompt_scorer *s);

/* Scores the prompt rows of the batch that network_forward has just computed; before sampler_run. A
 * request with logits that are not finite gets an error result in `failures`, no prompt result, and
 * is marked has_failed. progress is incremented after each slice. */
PGD_MUST_USE pgd_err prompt_scorer_run(prompt_scorer *s, sampler *failures, network *net,
                                       const input_batch *batch, request_rows *rows,
                                       const kernel_ops *ops, kernel_ctx *ctx, uint64_t *progress);
/* Points the result's arrays at what was added since reset; borrows until the next reset. */
void prompt_scorer_fill_result(const prompt_scorer *s, step_result *out);

#endif
