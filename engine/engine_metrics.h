/* What is measured of requests on their way: histograms and counters, fed by the core thread's
 * events.
 *
 * All times are of one monotonic clock in one process. With preemptions:
 *
 *   arrival ──queue──► last admission before the first token ──prefill──► first token ──decode──► last token
 *                      └───────────────────────────── inference ─────────────────────────────────┘
 *
 * Histograms of whole requests hold those that were answered to their end (stop or length).
 * Thread:  io
 */
#ifndef ENGINE_ENGINE_METRICS_H
#define ENGINE_ENGINE_METRICS_H

#include "engine/generation.h"
#include "engine/histogram.h"

typedef struct engine_metrics {
    histogram time_to_first_token_s;
    histogram inter_token_s;
    histogram e2e_s;
    histogram queue_s;
    histogram prefill_s;
    histogram decode_s;
    histogram inference_s;
    histogram per_output_token_s; /* mean of a request; of two tokens or more */
    histogram prompt_tokens;
    histogram computed_prompt_tokens; /* those not found in the prefix cache */
    histogram output_tokens;
    histogram max_output_tokens; /* of the choices of one prompt */
    histogram params_n;
    histogram params_max_tokens;
    histogram preemptions;
    uint64_t n_finished[GENERATION_ERROR + 1]; /* by generation_finish */
    uint64_t n_nan_logits;                     /* of GENERATION_ERROR */
} engine_metrics;

void engine_metrics_init(engine_metrics *m);
/* Before the event is applied to g. */
void engine_metrics_note_token(engine_metrics *m, const generation *g, const core_event *event);
/* Once per generation, with its last event applied. finish: as it counts. */
void engine_metrics_note_end(engine_metrics *m, const generation *g, const core_event *event,
                             generation_finish finish);
/* Once per prompt of a request, when its choices are begun. */
void engine_metrics_note_params(engine_metrics *m, int32_t n, int32_t max_tokens);
/* Once per prompt, when all of its choices have ended. */
void engine_metrics_note_choices(engine_metrics *m, int32_t max_output_tokens);

#endif
