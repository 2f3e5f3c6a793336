/* Phases of a request from its stamps, what counts as finished, and stamps that make no sense. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine_metrics.h"

static void assert_sum(const histogram *h, uint64_t count, double sum)
{
    assert_int_equal(histogram_count(h), count);
    if (fabs(h->sum - sum) > 1e-9)
        fail_msg("sum is %g, expected %g", h->sum, sum);
}

static void test_engine_metrics_phases(void **state)
{
    (void)state;
    engine_metrics m;
    engine_metrics_init(&m);
    generation g = {.arrival_us = 1000000, .n_prompt_tokens = 40};
    core_event token = {.kind = CORE_EVENT_TOKEN, .time_us = 4000000};
    engine_metrics_note_token(&m, &g, &token);
    g.first_token_us = g.last_token_us = 4000000;
    token.time_us = 4500000;
    engine_metrics_note_token(&m, &g, &token);
    g.last_token_us = 6000000;
    g.n_output_tokens = 5;
    core_event end = {.kind = CORE_EVENT_FINISHED,
                      .time_us = 6250000,
                      .scheduled_us = 3000000,
                      .num_cached_tokens = 16,
                      .num_preemptions = 2};
    engine_metrics_note_end(&m, &g, &end, GENERATION_STOP);
    assert_sum(&m.time_to_first_token_s, 1, 3);
    assert_sum(&m.inter_token_s, 1, 0.5);
    assert_sum(&m.queue_s, 1, 2);
    assert_sum(&m.prefill_s, 1, 1);
    assert_sum(&m.decode_s, 1, 2);
    assert_sum(&m.inference_s, 1, 3);
    assert_sum(&m.e2e_s, 1, 5.25);
    assert_sum(&m.per_output_token_s, 1, 0.5);
    assert_sum(&m.prompt_tokens, 1, 40);
    assert_sum(&m.computed_prompt_tokens, 1, 24);
    assert_sum(&m.preemptions, 1, 2);
    assert_int_equal(m.n_finished[GENERATION_STOP], 1);
}

static void test_engine_metrics_only_whole_answers_have_latencies(void **state)
{
    (void)state;
    engine_metrics m;
    engine_metrics_init(&m);
    generation g = {.arrival_us = 5, .n_prompt_tokens = 1};
    core_event end = {.kind = CORE_EVENT_FINISHED, .time_us = 50};
    engine_metrics_note_end(&m, &g, &end, GENERATION_ABORT);
    end.error = REQUEST_ERROR_NAN_LOGITS;
    engine_metrics_note_end(&m, &g, &end, GENERATION_ERROR);
    assert_int_equal(m.n_finished[GENERATION_ABORT], 1);
    assert_int_equal(m.n_finished[GENERATION_ERROR], 1);
    assert_int_equal(m.n_nan_logits, 1);
    assert_sum(&m.e2e_s, 0, 0);
    assert_sum(&m.queue_s, 0, 0);
}

/* Sums never fall, whatever the stamps say. */
static void test_engine_metrics_backward_stamps(void **state)
{
    (void)state;
    engine_metrics m;
    engine_metrics_init(&m);
    generation g = {.arrival_us = 900,
                    .first_token_us = 800,
                    .last_token_us = 700,
                    .n_output_tokens = 1,
                    .n_prompt_tokens = 1};
    core_event event = {.time_us = 1, .scheduled_us = 850};
    engine_metrics_note_token(&m, &g, &event);
    engine_metrics_note_end(&m, &g, &event, GENERATION_LENGTH);
    assert_sum(&m.inter_token_s, 1, 0);
    assert_sum(&m.queue_s, 1, 0);
    assert_sum(&m.prefill_s, 1, 0);
    assert_sum(&m.decode_s, 1, 0);
    assert_sum(&m.e2e_s, 1, 0);
    assert_sum(&m.per_output_token_s, 0, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_metrics_phases),
        cmocka_unit_test(test_engine_metrics_only_whole_answers_have_latencies),
        cmocka_unit_test(test_engine_metrics_backward_stamps)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
