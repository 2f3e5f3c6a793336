/* Invariant I1 for models whose layers differ: the real scheduler, KV groups and runner together,
 * without messages between them. Tokens and log probabilities are the same bits for any chunk size,
 * from cached blocks and beside other requests, with layers that free what their window has passed
 * as in a worker that keeps everything.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/hash.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/model/dtype.h"
#include "engine/core/scheduler.h"
#include "engine/kv/kv_groups.h"
#include "worker/step_runner.h"

enum {
    BLOCK_SIZE = 16,
    MAX_LEN = 512,
    N_PROMPT = 330,
    N_OUT = 24,
    /* Of each group: one request fits, three do not, so that what is freed is used again. */
    N_GROUP_BLOCKS = 3 * (N_PROMPT + N_OUT) / (2 * BLOCK_SIZE),
    MAX_REQUESTS = 8,
    N_LOGPROBS = 3
};

static const uint8_t SEED[HASH_SHA256_BYTES] = {7};

typedef struct answer {
    int32_t n_tokens;
    token_id tokens[N_OUT];
    token_logprob logprobs[N_OUT][N_LOGPROBS + 1];
} answer;

typedef struct rig {
    step_runner *runner;
    scheduler *sched;
    block_hasher *hasher; /* NULL: no prefix caching */
    kv_groups groups;
    int32_t vocab_size;
    answer answers[MAX_REQUESTS]; /* by request id */
    uint64_t n_requests;
    int32_t n_unfinished;
} rig;

static void on_token(void *arg, request *r, token_id token, const token_logprob *logprobs,
                     int32_t n_logprobs)
{
    answer *a = &((rig *)arg)->answers[r->id];
    assert_int_equal(n_logprobs, N_LOGPROBS + 1);
    assert_true(a->n_tokens < N_OUT);
    memcpy(a->logprobs[a->n_tokens], logprobs, sizeof(a->logprobs[0]));
    a->tokens[a->n_tokens++] = token;
}

static void on_finished(void *arg, request *r, request_error error)
{
    (void)r;
    assert_int_equal(error, REQUEST_ERROR_NONE);
    ((rig *)arg)->n_unfinished--;
}

static void on_release(void *arg, request *r)
{
    (void)arg;
    request_destroy(r);
}

/* is_hybrid: layers free the blocks that their window has passed, and prompts may be cached. */
static void rig_open(rig *g, const char *model, dtype kv_dtype, int32_t chunk, bool is_hybrid)
{
    load_msg load = {.kv_dtype = kv_dtype,
                     .block_size = BLOCK_SIZE,
                     .max_model_len = MAX_LEN,
                     .max_num_seqs = MAX_REQUESTS,
                     .max_num_batched_tokens = chunk,
                     .max_logprobs = N_LOGPROBS,
                     .n_threads = 1};
    load_done_msg done;
    kv_ready_msg ready;
    pgd_why why = {{0}};
    kv_groups_opts opts = {.block_size = BLOCK_SIZE, .is_hybrid = is_hybrid};
    memset(g, 0, sizeof(*g));
    (void)snprintf(load.model_path, sizeof(load.model_path), "tests/data/models/%s", model);
    if (model_runner_create(&g->runner, "cpu", &why) != PGD_OK ||
        g->runner->vtbl->load(g->runner, &load, &done, NULL, NULL, &why) != PGD_OK ||
        kv_groups_init(&g->groups, done.kv_layers, done.n_kv_layers, &opts, &why) != PGD_OK)
        fail_msg("%s: %s", model, why.text);
    int32_t n_blocks = N_GROUP_BLOCKS * g->groups.layout.n_groups + 1;
    kv_config_msg kv = {.n_blocks = n_blocks, .max_model_len = MAX_LEN, .layout = g->groups.layout};
    if (g->runner->vtbl->init_kv(g->runner, &kv, &ready, &why) != PGD_OK)
        fail_msg("%s: %s", model, why.text);
    kv_group_spec specs[PGD_MAX_KV_GROUPS];
    for (int32_t i = 0; i < g->groups.layout.n_groups; i++)
        specs[i] = kv_groups_spec(&g->groups, i);
    scheduler_opts sched = {.max_num_seqs = MAX_REQUESTS,
                            .max_num_batched_tokens = chunk,
                            .max_model_len = MAX_LEN,
                            .max_queued_requests = MAX_REQUESTS,
                            .enable_chunked_prefill = true,
                            .enable_prefix_caching = is_hybrid,
                            .max_steps_in_flight = 1,
                            .n_blocks = n_blocks,
                            .block_size = BLOCK_SIZE,
                            .n_groups = g->groups.layout.n_groups,
                            .groups = specs,
                            .hash_seed = SEED,
                            .on_token = on_token,
                            .on_finished = on_finished,
                            .on_release = on_release,
                            .arg = g};
    assert_int_equal(scheduler_create(&g->sched, &sched), PGD_OK);
    if (is_hybrid)
        assert_int_equal(block_hasher_create(&g->hasher, SEED), PGD_OK);
    g->vocab_size = done.vocab_size;
}

static void rig_close(rig *g)
{
    scheduler_destroy(g->sched);
    block_hasher_destroy(g->hasher);
    g->runner->vtbl->destroy(g->runner);
}

static uint64_t add(rig *g, const token_id *prompt, int32_t n_prompt)
{
    request *r;
    request_opts opts = {.id = g->n_requests++,
                         .prompt = prompt,
                         .n_prompt_tokens = n_prompt,
                         .max_tokens = N_OUT,
                         .max_model_len = MAX_LEN,
                         .params = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = N_LOGPROBS},
                         .block_size = BLOCK_SIZE,
                         .hasher = g->hasher};
    assert_true(opts.id < MAX_REQUESTS);
    assert_int_equal(request_create(&r, &opts), PGD_OK);
    assert_int_equal(scheduler_add_request(g->sched, r), SCHEDULER_ADDED);
    g->n_unfinished++;
    return opts.id;
}

/* Until all are finished; returns the most blocks that were in use after a step. */
static int32_t run(rig *g)
{
    int32_t most = 0;
    while (scheduler_has_work(g->sched)) {
        scheduler_output out;
        step_result result;
        scheduler_stats stats;
        pgd_why why = {{0}};
        assert_true(scheduler_schedule(g->sched, &out, NULL, 0));
        if (g->runner->vtbl->step(g->runner, &out, &result, &why) != PGD_OK)
            fail_msg("%s", why.text);
        assert_int_equal(scheduler_update(g->sched, &result), PGD_OK);
        scheduler_get_stats(g->sched, &stats);
        most = PGD_MAX(most, stats.n_blocks_total - stats.n_blocks_free);
    }
    scheduler_check(g->sched);
    assert_int_equal(g->n_unfinished, 0);
    return most;
}

static int32_t n_hit_tokens(const rig *g)
{
    scheduler_stats stats;
    scheduler_get_stats(g->sched, &stats);
    return (int32_t)stats.n_prefix_hit_tokens;
}

/* Three prompts: the second begins like the first, the third has nothing of them. */
static void make_prompts(token_id prompts[3][N_PROMPT], int32_t vocab_size)
{
    for (int32_t p = 0; p < 3; p++) {
        for (int32_t i = 0; i < N_PROMPT; i++) {
            uint64_t which = p == 1 && i < N_PROMPT / 2 ? 0 : (uint64_t)p;
            prompts[p][i] =
                (token_id)(hash_u64(which * 1000003 + (uint64_t)i) % (uint64_t)vocab_size);
        }
    }
}

static void check_same(const rig *g, uint64_t id, const answer *want, const char *what)
{
    const answer *got = &g->answers[id];
    assert_int_equal(got->n_tokens, N_OUT);
    for (int32_t i = 0; i < N_OUT; i++) {
        if (got->tokens[i] != want->tokens[i])
            fail_msg("%s: token %d is %d, expected %d", what, i, got->tokens[i], want->tokens[i]);
    }
    assert_memory_equal(got, want, sizeof(*got));
}

/* Alone, whole prompts, every block kept. */
static void find_answers(answer *want, const char *model, dtype kv_dtype,
                         token_id prompts[3][N_PROMPT])
{
    rig g;
    rig_open(&g, model, kv_dtype, MAX_LEN, false);
    make_prompts(prompts, g.vocab_size);
    for (int32_t p = 0; p < 3; p++) {
        uint64_t id = add(&g, prompts[p], N_PROMPT);
        (void)run(&g);
        want[p] = g.answers[id];
        assert_int_equal(want[p].n_tokens, N_OUT);
    }
    rig_close(&g);
}

static void check_chunk(const char *model, dtype kv_dtype, int32_t chunk, const answer *want,
                        token_id prompts[3][N_PROMPT])
{
    rig g;
    char what[128];
    (void)snprintf(what, sizeof(what), "%s in chunks of %d", model, chunk);
    rig_open(&g, model, kv_dtype, chunk, true);
    uint64_t id = add(&g, prompts[0], N_PROMPT);
    int32_t most = run(&g);
    check_same(&g, id, &want[0], what);
    assert_int_equal(n_hit_tokens(&g), 0);
    kv_groups_load load = {.max_unfinished_tokens = chunk, .max_model_len = MAX_LEN};
    assert_true(most <= kv_groups_n_blocks_for(&g.groups, N_PROMPT + N_OUT, &load));

    (void)snprintf(what, sizeof(what), "%s from cached blocks, then in chunks of %d", model, chunk);
    id = add(&g, prompts[0], N_PROMPT);
    (void)run(&g);
    check_same(&g, id, &want[0], what);
    int32_t n_hit = n_hit_tokens(&g);
    assert_true(n_hit >= N_PROMPT / BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE);

    /* All at once, the second one from half a prompt. */
    (void)snprintf(what, sizeof(what), "%s beside others, in chunks of %d", model, chunk);
    uint64_t ids[3];
    for (int32_t p = 0; p < 3; p++)
        ids[p] = add(&g, prompts[p], N_PROMPT);
    (void)run(&g);
    for (int32_t p = 0; p < 3; p++)
        check_same(&g, ids[p], &want[p], what);
    assert_true(n_hit_tokens(&g) > n_hit);
    rig_close(&g);
}

static void check_model(const char *model, dtype kv_dtype)
{
    static const int32_t chunks[] = {1, 7, 16, 64, 300};
    token_id prompts[3][N_PROMPT];
    answer want[3];
    find_answers(want, model, kv_dtype, prompts);
    for (size_t i = 0; i < PGD_ARRAY_LEN(chunks); i++)
        check_chunk(model, kv_dtype, chunks[i], want, prompts);
}

#define CASE(name, model, kv_dtype)                    \
    static void test_hybrid_exact_##name(void **state) \
    {                                                  \
        (void)state;                                   \
        check_model(model, kv_dtype);                  \
    }

CASE(gemma2, "gemma2-tiny", DTYPE_F16)
CASE(gemma3, "gemma3-tiny", DTYPE_F32)
CASE(mistral, "mistral-swa-tiny", DTYPE_BF16)
CASE(qwen3, "qwen3-swa-tiny", DTYPE_F16)
CASE(llama4, "llama4-tiny", DTYPE_F16)
CASE(gptoss, "gptoss-tiny", DTYPE_F16)
CASE(mixtral, "mixtral-tiny", DTYPE_F32)
CASE(qwen3moe, "qwen3moe-tiny", DTYPE_BF16)

int main(void)
{
    log_set_level(LOG_WARN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hybrid_exact_gemma2),  cmocka_unit_test(test_hybrid_exact_gemma3),
        cmocka_unit_test(test_hybrid_exact_mistral), cmocka_unit_test(test_hybrid_exact_qwen3),
        cmocka_unit_test(test_hybrid_exact_llama4),  cmocka_unit_test(test_hybrid_exact_gptoss),
        cmocka_unit_test(test_hybrid_exact_mixtral), cmocka_unit_test(test_hybrid_exact_qwen3moe),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
