/* The runner with an encoder-decoder model: tokens and log probabilities of a request are the same
 * bits alone as in batches, with decoder tokens in any chunks, after preemptions and in a new worker
 * (I1); and messages that contradict themselves are refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "common/log.h"
#include "common/mem.h"
#include "common/model/dtype.h"
#include "engine/kv/kv_groups.h"
#include "worker/model_runner.h"

#define MODEL "tests/data/models/bart-tiny"

enum {
    BLOCK_SIZE = 16,
    MAX_LEN = 128,
    MAX_SOURCE = 320,
    N_BLOCKS = 400,
    N_REQUESTS = 4,
    MAX_BATCHED = 24,
    N_OUT = 24,
    N_LOGPROBS = 3
};

typedef struct test_request {
    token_id tokens[MAX_LEN];
    token_id encoder[MAX_SOURCE];
    int32_t n_prompt, n_encoder;
    token_id want[N_OUT];
    token_logprob want_logprobs[N_OUT][N_LOGPROBS + 1];
    int32_t n_out, n_computed, n_admissions;
    bool is_running;
    block_id blocks[2][MAX_SOURCE / BLOCK_SIZE];
} test_request;

typedef struct rig {
    step_runner *runner;
    dtype kv_dtype;
    uint64_t n_steps;
    test_request requests[N_REQUESTS];
    /* the step being made */
    scheduler_output out;
    new_request_msg news[N_REQUESTS];
    cached_request_msg cached[N_REQUESTS];
    encoder_input_msg inputs[N_REQUESTS + 1];
    uint64_t preempted[N_REQUESTS];
} rig;

static uint32_t rng_state = 12345;

static int32_t random_int(int32_t first, int32_t last)
{
    rng_state = rng_state * 1664525u + 1013904223u;
    return first + (int32_t)((rng_state >> 8) % (uint32_t)(last - first + 1));
}

static void start_worker(rig *g)
{
    static kv_groups groups;
    pgd_why why = {{0}};
    load_msg load = {.model_path = MODEL,
                     .kv_dtype = (int32_t)g->kv_dtype,
                     .block_size = BLOCK_SIZE,
                     .max_model_len = MAX_LEN,
                     .max_num_seqs = N_REQUESTS,
                     .max_num_batched_tokens = MAX_BATCHED,
                     .max_encoder_tokens = 2 * MAX_SOURCE,
                     .max_logprobs = N_LOGPROBS,
                     .n_threads = 2};
    load_done_msg done;
    kv_ready_msg ready;
    assert_int_equal(model_runner_create(&g->runner, "cpu", &why), PGD_OK);
    if (g->runner->vtbl->load(g->runner, &load, &done, NULL, NULL, &why) != PGD_OK)
        fail_msg("%s", why.text);
    assert_int_equal(done.max_encoder_tokens, MAX_SOURCE);
    kv_groups_opts opts = {
        .block_size = BLOCK_SIZE, .max_encoder_tokens = MAX_SOURCE, .is_hybrid = true};
    assert_int_equal(kv_groups_init(&groups, done.kv_layers, done.n_kv_layers, &opts, &why),
                     PGD_OK);
    assert_int_equal(groups.layout.n_groups, 2);
    kv_config_msg config = {
        .n_blocks = N_BLOCKS, .max_model_len = MAX_LEN, .layout = groups.layout};
    assert_int_equal(g->runner->vtbl->init_kv(g->runner, &config, &ready, &why), PGD_OK);
}

static void stop_worker(rig *g)
{
    g->runner->vtbl->destroy(g->runner);
    for (int32_t i = 0; i < N_REQUESTS; i++) {
        g->requests[i].is_running = false;
        g->requests[i].n_computed = 0;
    }
}

static void begin_step(rig *g)
{
    g->out = (scheduler_output){.step_id = ++g->n_steps,
                                .n_groups = 2,
                                .new_requests = g->news,
                                .cached_requests = g->cached,
                                .encoder_inputs = g->inputs,
                                .preempted_ids = g->preempted};
}

/* Other blocks than before, spread over the pool, which no other request has. */
static void take_blocks(rig *g, int32_t idx)
{
    enum { N_EACH = MAX_SOURCE / BLOCK_SIZE };
    test_request *r = &g->requests[idx];
    int32_t first = (2 * idx + r->n_admissions++ % 2) * 2 * N_EACH;
    for (int32_t i = 0; i < 2 * N_EACH; i++)
        r->blocks[i / N_EACH][i % N_EACH] = 1 + (first + i) * 37 % (N_BLOCKS - 1);
}

static void add_new(rig *g, int32_t idx, int32_t n)
{
    test_request *r = &g->requests[idx];
    take_blocks(g, idx);
    new_request_msg *m = &g->news[g->out.n_new++];
    *m = (new_request_msg){.request_id = (uint64_t)idx + 1,
                           .n_prompt_tokens = r->n_prompt,
                           .n_tokens = r->n_prompt + r->n_out,
                           .tokens = r->tokens,
                           .n_scheduled_tokens = n,
                           .n_encoder_tokens = r->n_encoder,
                           .encoder_tokens = r->encoder,
                           .params = {.top_p = 1,
                                      .repetition_penalty = 1,
                                      .temperature = idx % 2 ? 0.9f : 0,
                                      .seed = (uint64_t)idx,
                                      .n_logprobs = N_LOGPROBS}};
    m->blocks =
        (block_ids_msg){.n_blocks = {MAX_LEN / BLOCK_SIZE, PGD_CEIL_DIV(r->n_encoder, BLOCK_SIZE)},
                        .ids = {r->blocks[0], r->blocks[1]}};
    g->inputs[g->out.n_encoder_inputs++] =
        (encoder_input_msg){.request_id = m->request_id, .n_tokens = r->n_encoder};
    g->out.total_scheduled_tokens += n;
    r->n_computed = n;
    r->is_running = true;
}

static void add_cached(rig *g, int32_t idx, int32_t n)
{
    test_request *r = &g->requests[idx];
    g->cached[g->out.n_cached++] = (cached_request_msg){.request_id = (uint64_t)idx + 1,
                                                        .n_computed_tokens = r->n_computed,
                                                        .n_scheduled_tokens = n};
    g->out.total_scheduled_tokens += n;
    r->n_computed += n;
}

static void preempt(rig *g, int32_t idx)
{
    g->preempted[g->out.n_preempted++] = (uint64_t)idx + 1;
    g->requests[idx].is_running = false;
    g->requests[idx].n_computed = 0;
}

/* Runs the step; what comes is noted (is_first) or compared. */
static void run_step(rig *g, bool is_first)
{
    pgd_why why = {{0}};
    step_result result;
    if (g->runner->vtbl->step(g->runner, &g->out, &result, &why) != PGD_OK)
        fail_msg("%s", why.text);
    for (int32_t i = 0; i < result.n_results; i++) {
        const request_result_msg *res = &result.results[i];
        test_request *r = &g->requests[res->request_id - 1];
        const token_logprob *logprobs = result.logprobs + res->first_logprob;
        assert_int_equal(res->error, 0);
        assert_int_equal(res->n_logprobs_per_token, N_LOGPROBS + 1);
        if (is_first) {
            r->want[r->n_out] = res->tokens[0];
            memcpy(r->want_logprobs[r->n_out], logprobs, sizeof(r->want_logprobs[0]));
        } else if (r->want[r->n_out] != res->tokens[0] ||
                   memcmp(r->want_logprobs[r->n_out], logprobs, sizeof(r->want_logprobs[0])) != 0) {
            fail_msg("request %d, output %d: token %d, expected %d, or other logprobs",
                     (int)res->request_id, r->n_out, res->tokens[0], r->want[r->n_out]);
        }
        r->tokens[r->n_prompt + r->n_out++] = res->tokens[0];
    }
}

static void make_requests(rig *g)
{
    static const int32_t n_encoder[N_REQUESTS] = {1, 37, 200, 320};
    static const int32_t n_prompt[N_REQUESTS] = {1, 9, 1, 20};
    for (int32_t i = 0; i < N_REQUESTS; i++) {
        test_request *r = &g->requests[i];
        r->n_encoder = n_encoder[i];
        r->n_prompt = n_prompt[i];
        for (int32_t k = 0; k < r->n_encoder; k++)
            r->encoder[k] = random_int(3, 511);
        r->tokens[0] = 2;
        for (int32_t k = 1; k < r->n_prompt; k++)
            r->tokens[k] = random_int(3, 511);
    }
}

static void run_alone(rig *g)
{
    for (int32_t i = 0; i < N_REQUESTS; i++) {
        test_request *r = &g->requests[i];
        start_worker(g);
        while (r->n_out < N_OUT) {
            begin_step(g);
            if (!r->is_running)
                add_new(g, i, r->n_prompt);
            else
                add_cached(g, i, 1);
            run_step(g, true);
        }
        stop_worker(g);
        r->n_out = 0;
    }
}

/* Admits, chunks, preempts and kills at random until every request has all its tokens. */
static void run_mixed(rig *g)
{
    start_worker(g);
    for (int32_t step = 0;; step++) {
        int32_t n_left = 0, budget = MAX_BATCHED, encoder_budget = 2 * MAX_SOURCE;
        if (random_int(0, 11) == 0) {
            stop_worker(g);
            start_worker(g);
        }
        begin_step(g);
        for (int32_t i = 0; i < N_REQUESTS; i++) {
            test_request *r = &g->requests[i];
            int32_t n = r->n_prompt + r->n_out - r->n_computed;
            n_left += r->n_out < N_OUT;
            if (r->n_out >= N_OUT || random_int(0, 4) == 0)
                continue;
            if (r->is_running && random_int(0, 9) == 0) {
                preempt(g, i);
                continue;
            }
            int32_t chunk = random_int(1, MAX_BATCHED);
            n = PGD_MIN(PGD_MIN(n, budget), chunk);
            if (n == 0 || (!r->is_running && encoder_budget < r->n_encoder))
                continue;
            budget -= n;
            if (!r->is_running) {
                encoder_budget -= r->n_encoder;
                add_new(g, i, n);
            } else {
                add_cached(g, i, n);
            }
        }
        if (n_left == 0)
            break;
        run_step(g, false);
        assert_true(step < 2000);
    }
    stop_worker(g);
    for (int32_t i = 0; i < N_REQUESTS; i++)
        g->requests[i].n_out = 0;
}

static void test_encdec_runner_same_bits_in_any_mix(void **state)
{
    (void)state;
    static const dtype types[] = {DTYPE_F32, DTYPE_F16};
    for (size_t t = 0; t < PGD_ARRAY_LEN(types); t++) {
        static rig g;
        memset(&g, 0, sizeof(g));
        g.kv_dtype = types[t];
        make_requests(&g);
        run_alone(&g);
        for (int32_t round = 0; round < 3; round++)
            run_mixed(&g);
    }
}

/* Forced outputs: whatever the logits, with their own logprobs; also in a resumed request. */
static void test_encdec_runner_forces_tokens(void **state)
{
    (void)state;
    static rig g;
    memset(&g, 0, sizeof(g));
    make_requests(&g);
    start_worker(&g);
    for (int32_t i = 0; i < 4; i++) {
        begin_step(&g);
        if (i == 2)
            preempt(&g, 1);
        if (!g.requests[1].is_running) {
            add_new(&g, 1, g.requests[1].n_prompt + g.requests[1].n_out);
            g.news[0].params.n_forced = 2;
            g.news[0].params.forced[0] = (forced_token){0, 77};
            g.news[0].params.forced[1] = (forced_token){3, 2};
        } else {
            add_cached(&g, 1, 1);
        }
        run_step(&g, true);
    }
    assert_int_equal(g.requests[1].want[0], 77);
    assert_int_equal(g.requests[1].want_logprobs[0][0].id, 77);
    assert_true(g.requests[1].want_logprobs[0][0].logprob < 0);
    assert_int_equal(g.requests[1].want[3], 2);
    assert_int_not_equal(g.requests[1].want[1], 2);
    stop_worker(&g);
}

/* --- refusals --------------------------------------------------------------------------------- */

static void break_nothing(rig *g)
{
    (void)g;
}
static void lack_input(rig *g)
{
    g->out.n_encoder_inputs = 0;
}
static void add_input(rig *g)
{
    g->inputs[g->out.n_encoder_inputs++] = g->inputs[0];
}
static void name_another(rig *g)
{
    g->inputs[0].request_id++;
}
static void cut_input(rig *g)
{
    g->inputs[0].n_tokens--;
}
static void lack_tokens(rig *g)
{
    g->news[0].n_encoder_tokens = 0;
}
static void exceed_source(rig *g)
{
    g->news[0].n_encoder_tokens = g->inputs[0].n_tokens = MAX_SOURCE + 1;
}
static void leave_vocabulary(rig *g)
{
    g->requests[1].encoder[3] = 512;
}
static void lack_blocks(rig *g)
{
    g->news[0].blocks.n_blocks[1]--;
}
static void exceed_table(rig *g)
{
    g->news[0].blocks.n_blocks[1] = MAX_SOURCE / BLOCK_SIZE + 1;
}
static void leave_pool(rig *g)
{
    g->requests[1].blocks[1][0] = N_BLOCKS;
}
static void score_prompt(rig *g)
{
    g->news[0].params.n_prompt_logprobs_per_token = 1;
}
static void force_unknown(rig *g)
{
    g->news[0].params.n_forced = 1;
    g->news[0].params.forced[0].id = -1;
}

static void test_encdec_runner_refuses(void **state)
{
    (void)state;
    static const struct {
        void (*change)(rig *g);
        const char *wanted;
    } cases[] = {{break_nothing, NULL},
                 {lack_input, "expected an encoder input of 37 tokens"},
                 {add_input, "expected 1 encoder inputs, got 2"},
                 {name_another, "expected an encoder input"},
                 {cut_input, "expected an encoder input"},
                 {lack_tokens, "expected 1 to 320 encoder tokens, got 0"},
                 {exceed_source, "expected 1 to 320 encoder tokens, got 321"},
                 {leave_vocabulary, "encoder_tokens[3]"},
                 {lack_blocks, "expected blocks for 37 encoder tokens, got blocks for 32"},
                 {exceed_table, ""},
                 {leave_pool, ""},
                 {score_prompt, "prompt logprobs"},
                 {force_unknown, "forced[0]"}};
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        static rig g;
        pgd_why why = {{0}};
        step_result result;
        memset(&g, 0, sizeof(g));
        make_requests(&g);
        start_worker(&g);
        begin_step(&g);
        add_new(&g, 1, 5);
        cases[i].change(&g);
        pgd_err err = g.runner->vtbl->step(g.runner, &g.out, &result, &why);
        if (cases[i].wanted == NULL)
            assert_int_equal(err, PGD_OK);
        else if (err != PGD_EPROTO || strstr(why.text, cases[i].wanted) == NULL)
            fail_msg("case %zu: got %d \"%s\", expected \"%s\"", i, (int)err, why.text,
                     cases[i].wanted);
        stop_worker(&g);
    }
}

/* Steps with a word or two of their frame changed: refused by the decoder or the runner, or computed,
 * never read outside of what is there (for a sanitizer to see). */
static void test_encdec_runner_survives_mutations(void **state)
{
    (void)state;
    static rig g;
    static uint64_t room[1 << 14];
    wire_limits limits = {.max_num_seqs = N_REQUESTS,
                          .max_num_batched_tokens = MAX_BATCHED,
                          .max_model_len = MAX_LEN,
                          .vocab_size = 512,
                          .n_blocks = N_BLOCKS,
                          .block_sizes = {BLOCK_SIZE, BLOCK_SIZE},
                          .cross_groups = 2,
                          .max_encoder_tokens = MAX_SOURCE,
                          .n_groups = 2,
                          .max_logprobs = N_LOGPROBS};
    int n_refused = 0, n_computed = 0;
    assert_int_equal(wire_limits_derive(&limits, NULL), PGD_OK);
    memset(&g, 0, sizeof(g));
    make_requests(&g);
    start_worker(&g);
    for (int round = 0; round < 200; round++) {
        pgd_why why = {{0}};
        wire_scratch scratch = {.data = (uint8_t *)room, .cap_bytes = sizeof(room)};
        scheduler_output out;
        step_result result;
        begin_step(&g);
        add_new(&g, 1, 9);
        add_new(&g, 0, 1);
        size_t n_bytes = wire_frame_bytes(&scheduler_output_record, &g.out);
        uint8_t *frame = mem_calloc(1, n_bytes);
        assert_non_null(frame);
        wire_encode(frame, n_bytes, WIRE_STEP, 1, &scheduler_output_record, &g.out);
        for (int32_t k = random_int(1, 2); k > 0; k--) {
            static const int32_t values[] = {-1, 0, 1, 2, 15, 16, 17, 36, 38, 320, 321, 399, 400};
            int32_t value = values[random_int(0, PGD_ARRAY_LEN(values) - 1)];
            memcpy(frame + 4 * random_int(WIRE_HEADER_BYTES / 4, (int32_t)(n_bytes / 4) - 1),
                   &value, sizeof(value));
        }
        pgd_err err = scheduler_output_decode(&out, &scratch, frame, n_bytes, &limits, &why);
        if (err == PGD_OK)
            err = g.runner->vtbl->step(g.runner, &out, &result, &why);
        n_refused += err != PGD_OK;
        n_computed += err == PGD_OK;
        mem_free(frame);
        stop_worker(&g); /* rows are as the step left them */
        start_worker(&g);
    }
    stop_worker(&g);
    assert_true(n_refused > 30 && n_computed > 30);
}

/* A step's encoder tokens are bounded by what the load said. */
static void test_encdec_runner_bounds_encoder_tokens(void **state)
{
    (void)state;
    static rig g;
    pgd_why why = {{0}};
    step_result result;
    memset(&g, 0, sizeof(g));
    make_requests(&g);
    start_worker(&g);
    begin_step(&g);
    add_new(&g, 3, 1);
    add_new(&g, 2, 1);
    g.requests[1].n_encoder = 200; /* 720 of 640 */
    add_new(&g, 1, 1);
    assert_int_equal(g.runner->vtbl->step(g.runner, &g.out, &result, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "expected at most 640 encoder tokens"));
    stop_worker(&g);
    load_msg load = {.model_path = MODEL,
                     .kv_dtype = DTYPE_F32,
                     .block_size = BLOCK_SIZE,
                     .max_model_len = MAX_LEN,
                     .max_num_seqs = 1,
                     .max_num_batched_tokens = 1,
                     .max_encoder_tokens = MAX_SOURCE - 1};
    load_done_msg done;
    assert_int_equal(model_runner_create(&g.runner, "cpu", &why), PGD_OK);
    assert_int_equal(g.runner->vtbl->load(g.runner, &load, &done, NULL, NULL, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "expected at least 320 encoder tokens in a step, got 319"));
    stop_worker(&g);
    load.max_encoder_tokens = MAX_SOURCE;
    load.max_model_len = MAX_SOURCE + 1; /* there is no row for the last position */
    assert_int_equal(model_runner_create(&g.runner, "cpu", &why), PGD_OK);
    assert_int_equal(g.runner->vtbl->load(g.runner, &load, &done, NULL, NULL, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "320 positions that the model has learned, got 321"));
    stop_worker(&g);
}

int main(void)
{
    log_set_level(LOG_WARN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_encdec_runner_same_bits_in_any_mix),
        cmocka_unit_test(test_encdec_runner_forces_tokens),
        cmocka_unit_test(test_encdec_runner_refuses),
        cmocka_unit_test(test_encdec_runner_bounds_encoder_tokens),
        cmocka_unit_test(test_encdec_runner_survives_mutations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
