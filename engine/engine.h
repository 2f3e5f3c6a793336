/* The engine as the front ends see it: a model with its tokenizer, a core loop, and generations.
 *
 * `paged serve`, `paged run` and `paged bench` all stand on this. Core events are drained on the io
 * loop through one uv_async.
 * Thread:  io
 */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include <uv.h>

#include "common/model/model_file.h"
#include "config/config.h"
#include "engine/core/core_loop.h"
#include "engine/engine_metrics.h"
#include "engine/generation.h"
#include "engine/text/tokenizer.h"

typedef struct engine engine;

/* Opens the model's headers and its tokenizer, creates the core loop. cfg is copied. */
PGD_MUST_USE pgd_err engine_create(engine **out, uv_loop_t *loop, const config *cfg, pgd_why *why);
/* Starts the core thread and with it the worker. on_state (may be NULL) is told of each change. */
PGD_MUST_USE pgd_err engine_start(engine *e, void (*on_state)(void *arg, core_state state),
                                  void *arg, pgd_why *why);
/* Refuses new work, lets running generations finish within drain_s, ends the worker; CORE_STOPPED
 * is the last state told. */
void engine_drain(engine *e, uint32_t drain_s);
/* After CORE_STOPPED or CORE_FAILED, or to give up at once: joins the core thread, closes the
 * handles. Run the loop until they are closed, then destroy. */
void engine_stop(engine *e);
void engine_destroy(engine *e);

const config *engine_get_config(const engine *e);
const model_config *engine_get_model(const engine *e);
const tokenizer *engine_get_tokenizer(const engine *e);
/* Tokens that a prompt of an encoder-decoder model may have, as its encoder's input; 0 for other
 * models, whose prompts share max_model_len with the completion. */
int32_t engine_max_source(const engine *e);
/* served_model_name or the name derived from the path. */
const char *engine_model_name(const engine *e);
void engine_get_stats(const engine *e, core_stats *out);
/* As core_loop_get_residency. */
const kv_residency *engine_get_residency(const engine *e);
/* Borrow until destroy; the front end notes into it what it alone knows. */
engine_metrics *engine_get_metrics(engine *e);
int32_t engine_n_generations(const engine *e);
uv_loop_t *engine_get_loop(const engine *e);
/* Sampling defaults: the model's generation_config unless generation_config = none; greedy is not
 * implied. */
void engine_default_params(const engine *e, sampling_params *out);
/* A fresh random seed for a request that brings none. */
uint64_t engine_draw_seed(engine *e);
/* with_tiers: host memory and disk too. fn is called once: what became of it, HELD too when the engine
 * stops first. False and no call when another reset is under way. */
typedef void (*engine_cache_reset_fn)(void *arg, core_reset outcome);
PGD_MUST_USE bool engine_reset_prefix_cache(engine *e, bool with_tiers, engine_cache_reset_fn fn,
                                            void *arg);

/* The hashes of the prompt's full blocks, for generation_opts: work that grows with the prompt. *out
 * (mem_free) is NULL without prefix caching. cache_salt may be NULL. Thread: any */
PGD_MUST_USE pgd_err engine_hash_prompt(block_hash **out, const engine *e, const token_id *prompt,
                                        int32_t n_prompt_tokens, const char *cache_salt);
/* Takes up a generation; on_chunk is never called from inside. CORE_REFUSAL_NONE: *out is a borrow
 * until its last on_chunk or engine_cancel. PGD_ENOMEM-like trouble is CORE_REFUSAL_WORKER. */
PGD_MUST_USE core_refusal engine_generate(engine *e, generation **out, const generation_opts *opts);
/* The consumer is gone: no further on_chunk; the request ends within one step. */
void engine_cancel(engine *e, generation *g);
/* In on_chunk: the consumer is not ready. What g has stays with it and gathers, until engine_resume
 * has it delivered, from inside this call only when the engine has stopped. It may be cancelled
 * meanwhile. */
void engine_hold(generation *g);
void engine_resume(engine *e, generation *g);

#endif
