/* The worker without a model: deterministic tokens after a delay, and a strict check of everything
 * the engine says.
 *
 * The token at an output position is a hash of all tokens before it, the position, and with
 * temperature > 0 the seed and choice index: so batching, chunking, preemption and restarts cannot
 * change it. stop_ids are avoided before min_tokens; the other sampling parameters have no effect.
 * The KV cache is real: each slot holds the hash of the prefix that ends there, written and read
 * through the block table, so that a wrong table, a block reused too early or a false prefix hit
 * ends the worker with a message; sim_layers.h tells how layers with windows are given. Faults for tests, from the environment:
 * PAGED_SIM_FAULTS="kill:T,nan:T,hang:T": a step in which a scheduled token has the id T aborts the
 * process, answers with REQUEST_ERROR_NAN_LOGITS for that request, or never ends.
 * With sim_draft_tokens it speculates: it keeps drafts of its own, of which sim_draft_accept percent
 * are right, and verifies them with worker/spec/draft_verify; the output is the same without.
 * Thread:  worker
 */
#ifndef WORKER_SIM_RUNNER_H
#define WORKER_SIM_RUNNER_H

#include "worker/step_runner.h"

/* The token after tokens[n_tokens], as the simulated worker draws it; for tests. */
token_id sim_runner_next_token(const token_id *tokens, int32_t n_tokens, int32_t n_prompt_tokens,
                               const sampling_params *params, int32_t vocab_size);

#endif
