/* The sampler module: what it hands to the op and what it makes of the answer. (The op itself:
 * tests/kernels/test_sample.c.) */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "worker/sampler.h"

enum { VOCAB = 8, MAX_ROWS = 4 };

typedef struct rig {
    request_rows *rows;
    input_batch *batch;
    sampler *sampler;
    const kernel_ops *ops;
    kernel_ctx ctx;
    float logits[MAX_ROWS * VOCAB];
} rig;

static void rig_init(rig *g)
{
    memset(g, 0, sizeof(*g));
    request_rows_opts opts = {
        .max_rows = MAX_ROWS, .max_tokens = 6, .vocab_size = VOCAB, .max_logprobs = 3};
    assert_int_equal(request_rows_create(&g->rows, &opts), PGD_OK);
    assert_int_equal(input_batch_create(&g->batch, 16, MAX_ROWS), PGD_OK);
    assert_int_equal(sampler_create(&g->sampler, MAX_ROWS, 3, VOCAB), PGD_OK);
    assert_int_equal(ops_cpu_get(&g->ops, CPU_ISA_REF), PGD_OK);
    g->ctx.workspace_bytes = g->ops->sample_workspace_bytes(VOCAB, 1);
    g->ctx.workspace = mem_alloc_aligned(g->ctx.workspace_bytes, 64);
    for (int32_t i = 0; i < MAX_ROWS * VOCAB; i++)
        g->logits[i] = (float)(i % VOCAB) / 4; /* the best is 7, then 6 ... */
    sampler_reset(g->sampler);
    input_batch_reset(g->batch);
}

static void rig_deinit(rig *g)
{
    mem_free_aligned(g->ctx.workspace, g->ctx.workspace_bytes);
    sampler_destroy(g->sampler);
    input_batch_destroy(g->batch);
    request_rows_destroy(g->rows);
}

static int32_t add_request(rig *g, uint64_t id, sampling_params params)
{
    static const token_id tokens[3] = {1, 2, 3};
    pgd_why why;
    int32_t row;
    params.top_p = 1;
    params.repetition_penalty = 1;
    new_request_msg m = {.request_id = id,
                         .request_epoch = (uint32_t)id + 10,
                         .n_prompt_tokens = 3,
                         .n_tokens = 3,
                         .tokens = tokens,
                         .params = params};
    assert_int_equal(request_rows_add(g->rows, &row, &m, &why), PGD_OK);
    g->batch->logit_seqs[g->batch->n_logit_rows] = row;
    g->batch->logit_rows[g->batch->n_logit_rows] = g->batch->n_logit_rows;
    g->batch->n_logit_rows++;
    return row;
}

static step_result run(rig *g)
{
    step_result out = {0};
    sampler_reset(g->sampler);
    assert_int_equal(sampler_run(g->sampler, g->logits, g->batch, g->rows, g->ops, &g->ctx),
                     PGD_OK);
    sampler_fill_result(g->sampler, &out);
    return out;
}

static void test_sampler_results(void **state)
{
    (void)state;
    rig g;
    rig_init(&g);
    int32_t plain = add_request(&g, 5, (sampling_params){.n_logprobs = -1});
    add_request(&g, 6, (sampling_params){.n_logprobs = 2});
    add_request(&g, 7, (sampling_params){.n_logprobs = 0});
    step_result out = run(&g);
    assert_int_equal(out.n_results, 3);
    assert_int_equal(out.n_logprobs, 4);
    assert_int_equal(out.results[0].request_id, 5);
    assert_int_equal(out.results[0].request_epoch, 15);
    assert_int_equal(out.results[0].n_tokens, 1);
    assert_int_equal(out.results[0].tokens[0], 7);
    assert_int_equal(out.results[0].n_logprobs_per_token, 0);
    assert_int_equal(out.results[1].n_logprobs_per_token, 3);
    assert_int_equal(out.results[1].first_logprob, 0);
    assert_int_equal(out.results[2].first_logprob, 3);
    double sum = 0;
    for (int32_t i = 0; i < VOCAB; i++)
        sum += exp(i / 4.0);
    const token_id ids[] = {7, 7, 6, 7};
    for (int32_t i = 0; i < 4; i++) {
        assert_int_equal(out.logprobs[i].id, ids[i]);
        assert_true(fabs(out.logprobs[i].logprob - (ids[i] / 4.0 - log(sum))) < 1e-6);
    }
    const request_row *r = request_rows_get(g.rows, plain);
    assert_int_equal(r->n_tokens, 4);
    assert_int_equal(r->tokens[3], 7);
    rig_deinit(&g);
}

static void test_sampler_min_tokens(void **state)
{
    (void)state;
    rig g;
    rig_init(&g);
    const token_id stop[] = {7, 6};
    add_request(
        &g, 1,
        (sampling_params){.n_logprobs = -1, .min_tokens = 2, .n_stop_ids = 2, .stop_ids = stop});
    assert_int_equal(run(&g).results[0].tokens[0], 5);
    assert_int_equal(run(&g).results[0].tokens[0], 5);
    assert_int_equal(run(&g).results[0].tokens[0], 7); /* two tokens are out */
    rig_deinit(&g);
}

static void test_sampler_bias_and_penalties(void **state)
{
    (void)state;
    rig g;
    rig_init(&g);
    const logit_bias bias = {2, 5};
    add_request(&g, 1, (sampling_params){.n_logprobs = -1, .n_logit_bias = 1, .logit_bias = &bias});
    add_request(&g, 2, (sampling_params){.n_logprobs = -1, .frequency_penalty = 0.3f});
    step_result out = run(&g);
    assert_int_equal(out.results[0].tokens[0], 2);
    assert_int_equal(out.results[1].tokens[0], 7);
    out = run(&g);
    assert_int_equal(out.results[1].tokens[0], 6); /* 7 costs 0.3 now, 6 is 0.25 behind */
    rig_deinit(&g);
}

static sample_row seen_;

static pgd_err keep_row(const sample_args *args, kernel_ctx *ctx)
{
    (void)ctx;
    assert_int_equal(args->n_rows, 1);
    assert_int_equal(args->vocab_size, VOCAB);
    seen_ = args->rows[0];
    args->rows[0].token = 1;
    return PGD_OK;
}

/* Every parameter reaches the op as its own, and a resumed request goes on at its output position.
 */
static void test_sampler_hands_over_each_parameter(void **state)
{
    (void)state;
    rig g;
    rig_init(&g);
    kernel_ops ops = *g.ops;
    ops.sample = keep_row;
    const token_id tokens[5] = {1, 2, 3, 4, 5};
    const token_id stop[1] = {6};
    const logit_bias bias[1] = {{3, 0.5f}};
    new_request_msg m = {.request_id = 1,
                         .n_prompt_tokens = 2,
                         .n_tokens = 5,
                         .tokens = tokens,
                         .params = {.temperature = 0.25f,
                                    .top_p = 0.375f,
                                    .min_p = 0.125f,
                                    .top_k = 7,
                                    .repetition_penalty = 1.5f,
                                    .presence_penalty = 0.75f,
                                    .frequency_penalty = -0.75f,
                                    .seed = 1ull << 40,
                                    .choice_idx = 3,
                                    .n_logprobs = 2,
                                    .min_tokens = 4,
                                    .n_stop_ids = 1,
                                    .stop_ids = stop,
                                    .n_logit_bias = 1,
                                    .logit_bias = bias}};
    pgd_why why;
    assert_int_equal(request_rows_add(g.rows, &g.batch->logit_seqs[0], &m, &why), PGD_OK);
    g.batch->n_logit_rows = 1;
    assert_int_equal(sampler_run(g.sampler, g.logits, g.batch, g.rows, &ops, &g.ctx), PGD_OK);
    const sampling_params *p = &m.params;
    assert_ptr_equal(seen_.logits, g.logits);
    assert_true(seen_.temperature == p->temperature && seen_.top_p == p->top_p &&
                seen_.min_p == p->min_p && seen_.top_k == p->top_k);
    assert_true(seen_.repetition_penalty == p->repetition_penalty &&
                seen_.presence_penalty == p->presence_penalty &&
                seen_.frequency_penalty == p->frequency_penalty);
    assert_true(seen_.seed == p->seed && seen_.choice_idx == p->choice_idx);
    assert_int_equal(seen_.n_logprobs, 2);
    assert_int_equal(seen_.n_masked_ids, 1);
    assert_int_equal(seen_.masked_ids[0], 6);
    assert_int_equal(seen_.n_bias, 1);
    assert_int_equal(seen_.bias[0].id, 3);
    assert_int_equal(seen_.n_prompt_tokens, 2);
    assert_int_equal(seen_.n_tokens, 5);
    const request_row *r = request_rows_get(g.rows, g.batch->logit_seqs[0]);
    assert_memory_equal(r->tokens, ((token_id[]){1, 2, 3, 4, 5, 1}), 6 * sizeof(token_id));
    rig_deinit(&g);
}

static void test_sampler_errors_stay_with_their_request(void **state)
{
    (void)state;
    rig g;
    rig_init(&g);
    const token_id all[] = {0, 1, 2, 3, 4, 5, 6, 7};
    int32_t bad = add_request(&g, 1, (sampling_params){.n_logprobs = 1});
    add_request(&g, 2, (sampling_params){.n_logprobs = 1});
    add_request(
        &g, 3,
        (sampling_params){.n_logprobs = -1, .min_tokens = 1, .n_stop_ids = 8, .stop_ids = all});
    g.logits[3] = NAN;
    step_result out = run(&g);
    assert_int_equal(out.n_results, 3);
    assert_int_equal(out.results[0].error, REQUEST_ERROR_NAN_LOGITS);
    assert_int_equal(out.results[0].n_tokens, 0);
    assert_true(request_rows_get(g.rows, bad)->has_failed);
    assert_int_equal(request_rows_get(g.rows, bad)->n_tokens, 3);
    assert_int_equal(out.results[1].error, REQUEST_ERROR_NONE);
    assert_int_equal(out.results[1].tokens[0], 7);
    assert_int_equal(out.logprobs[out.results[1].first_logprob].id, 7);
    assert_int_equal(out.results[2].error, REQUEST_ERROR_INTERNAL);
    rig_deinit(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sampler_results),
        cmocka_unit_test(test_sampler_min_tokens),
        cmocka_unit_test(test_sampler_bias_and_penalties),
        cmocka_unit_test(test_sampler_hands_over_each_parameter),
        cmocka_unit_test(test_sampler_errors_stay_with_their_request),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
