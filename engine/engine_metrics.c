/* The bounds are a superset of those that dashboards for vLLM expect, each in one range (see
 * api_metrics.c): finer at the low end, where a small model on a CPU lives. */
#include "engine/engine_metrics.h"

#include <string.h>

static const double first_token_bounds[] = {0.001, 0.005, 0.01, 0.02,  0.04,  0.06,  0.08, 0.1,
                                            0.25,  0.5,   0.75, 1.0,   2.5,   5.0,   7.5,  10.0,
                                            20.0,  40.0,  80.0, 160.0, 640.0, 2560.0};
static const double token_bounds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1,
                                      0.15,  0.2,    0.3,   0.4,  0.5,   0.75, 1.0,   2.5,
                                      5.0,   7.5,    10.0,  20.0, 40.0,  80.0};
static const double request_bounds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,  0.2,
                                        0.3,   0.5,    0.8,   1.0,  1.5,   2.0,  2.5,  5.0,
                                        10.0,  15.0,   20.0,  30.0, 40.0,  50.0, 60.0, 120.0,
                                        240.0, 480.0,  960.0, 1920, 7680.0};
static const double count_bounds[] = {1,     2,      5,      10,     20,     50,    100,
                                      200,   500,    1000,   2000,   5000,   10000, 20000,
                                      50000, 100000, 200000, 500000, 1000000};
static const double n_bounds[] = {1, 2, 5, 10, 20, 50, 100};
static const double preemption_bounds[] = {0, 1, 2, 5, 10, 20, 50, 100};

#define INIT(h, bounds) histogram_init(h, bounds, PGD_ARRAY_LEN(bounds))

void engine_metrics_init(engine_metrics *m)
{
    memset(m, 0, sizeof(*m));
    INIT(&m->time_to_first_token_s, first_token_bounds);
    INIT(&m->inter_token_s, token_bounds);
    INIT(&m->per_output_token_s, token_bounds);
    INIT(&m->e2e_s, request_bounds);
    INIT(&m->queue_s, request_bounds);
    INIT(&m->prefill_s, request_bounds);
    INIT(&m->decode_s, request_bounds);
    INIT(&m->inference_s, request_bounds);
    INIT(&m->prompt_tokens, count_bounds);
    INIT(&m->computed_prompt_tokens, count_bounds);
    INIT(&m->output_tokens, count_bounds);
    INIT(&m->max_output_tokens, count_bounds);
    INIT(&m->params_max_tokens, count_bounds);
    INIT(&m->params_n, n_bounds);
    INIT(&m->preemptions, preemption_bounds);
}

/* A sum must never fall, whatever the stamps say. */
static double seconds_between(uint64_t from_us, uint64_t to_us)
{
    return to_us > from_us ? (double)(to_us - from_us) * 1e-6 : 0;
}

void engine_metrics_note_token(engine_metrics *m, const generation *g, const core_event *event)
{
    if (g->first_token_us == 0)
        histogram_add(&m->time_to_first_token_s, seconds_between(g->arrival_us, event->time_us));
    else
        histogram_add(&m->inter_token_s, seconds_between(g->last_token_us, event->time_us));
}

static void note_phases(engine_metrics *m, const generation *g, const core_event *event)
{
    uint64_t scheduled_us = event->scheduled_us;
    histogram_add(&m->queue_s, seconds_between(g->arrival_us, scheduled_us));
    histogram_add(&m->prefill_s, seconds_between(scheduled_us, g->first_token_us));
    histogram_add(&m->decode_s, seconds_between(g->first_token_us, g->last_token_us));
    histogram_add(&m->inference_s, seconds_between(scheduled_us, g->last_token_us));
    if (g->n_output_tokens > 1)
        histogram_add(&m->per_output_token_s, seconds_between(g->first_token_us, g->last_token_us) /
                                                  (g->n_output_tokens - 1));
}

void engine_metrics_note_end(engine_metrics *m, const generation *g, const core_event *event,
                             generation_finish finish)
{
    m->n_finished[finish]++;
    if (event->error == REQUEST_ERROR_NAN_LOGITS)
        m->n_nan_logits++;
    if (finish != GENERATION_STOP && finish != GENERATION_LENGTH)
        return;
    histogram_add(&m->e2e_s, seconds_between(g->arrival_us, event->time_us));
    histogram_add(&m->prompt_tokens, g->n_prompt_tokens);
    histogram_add(&m->computed_prompt_tokens, g->n_prompt_tokens - event->num_cached_tokens);
    histogram_add(&m->output_tokens, g->n_output_tokens);
    histogram_add(&m->preemptions, event->num_preemptions);
    if (g->n_output_tokens > 0)
        note_phases(m, g, event);
}

void engine_metrics_note_params(engine_metrics *m, int32_t n, int32_t max_tokens)
{
    histogram_add(&m->params_n, n);
    histogram_add(&m->params_max_tokens, max_tokens);
}

void engine_metrics_note_choices(engine_metrics *m, int32_t max_output_tokens)
{
    histogram_add(&m->max_output_tokens, max_output_tokens);
}
