/* Invariant I1 at the runner: tokens and log probabilities of a request, its prompt's too, are the same bits alone as
 * in any mix of batches, chunks, block tables, shared prefixes, preemptions, worker restarts and
 * thread counts.
 *
 * A small engine in this file plays the scheduler: it picks requests, chunks and blocks at random
 * and keeps the facts; the runner under test gets only messages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/file.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/model/dtype.h"
#include "kernels/cpu_features.h"
#include "tests/unit/one_group.h"
#include "worker/model_runner.h"

enum {
    BLOCK_SIZE = 16,
    MAX_REQUESTS = 64,
    MAX_TOKENS = 256,
    MAX_REQUEST_BLOCKS = MAX_TOKENS / BLOCK_SIZE,
    N_LOGPROBS = 3
};

static uint64_t rng_state;

static uint32_t random_u32(void)
{
    uint64_t z = (rng_state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)(z >> 32);
}

static int32_t random_int(int32_t first, int32_t last)
{
    return first + (int32_t)(random_u32() % (uint32_t)(last - first + 1));
}

typedef struct test_request {
    token_id tokens[MAX_TOKENS];
    int32_t n_prompt;
    int32_t n_out;
    sampling_params params;
    token_id stop_ids[2];
    logit_bias bias[2];
    /* What the request gives when it runs alone. */
    token_id want[MAX_TOKENS];
    token_logprob want_logprobs[MAX_TOKENS][N_LOGPROBS + 1];
    token_logprob want_prompt[MAX_TOKENS][N_LOGPROBS + 1]; /* of the token at that position */
    /* State in the mix. */
    int32_t n_prompt_seen; /* since the last admission; token 0 counts as seen */
    int32_t n_tokens;
    int32_t n_computed;
    bool is_running;
    bool is_finished;
    uint32_t epoch;
    block_id blocks[MAX_REQUEST_BLOCKS];
    int32_t n_blocks;
} test_request;

typedef struct engine {
    const char *model;
    dtype kv_dtype;
    int32_t vocab_size;
    step_runner *runner;
    int32_t max_seqs, max_batched, n_threads;
    int32_t n_blocks;
    int32_t *refs; /* [n_blocks] */
    int32_t n_requests;
    test_request *requests;
    uint64_t finished[MAX_REQUESTS], preempted[MAX_REQUESTS];
    int32_t n_finished, n_preempted;
    uint64_t step_id;
    bool chunk_exact; /* chunks are as long as they can be, not shorter at random */
    int32_t n_hits, n_preemptions, n_steps, n_scored;
} engine;

/* --- the worker's life ------------------------------------------------------------------------ */

static void start_worker(engine *e)
{
    pgd_why why = {{0}};
    load_msg load = {.kv_dtype = e->kv_dtype,
                     .block_size = BLOCK_SIZE,
                     .max_model_len = MAX_TOKENS,
                     .max_num_seqs = e->max_seqs,
                     .max_num_batched_tokens = e->max_batched,
                     .max_logprobs = N_LOGPROBS,
                     .n_threads = e->n_threads};
    load_done_msg done;
    kv_ready_msg ready;
    (void)snprintf(load.model_path, sizeof(load.model_path), "%s", e->model);
    if (model_runner_create(&e->runner, "cpu", &why) != PGD_OK ||
        e->runner->vtbl->load(e->runner, &load, &done, NULL, NULL, &why) != PGD_OK)
        fail_msg("%s: %s", e->model, why.text);
    kv_config_msg kv = one_group_config(&done, BLOCK_SIZE, e->n_blocks);
    if (e->runner->vtbl->init_kv(e->runner, &kv, &ready, &why) != PGD_OK)
        fail_msg("%s: %s", e->model, why.text);
    e->vocab_size = done.vocab_size;
    assert_int_equal(ready.kv_bytes, (uint64_t)e->n_blocks * kv_layout_block_bytes(&kv.layout));
}

static void stop_worker(engine *e)
{
    e->runner->vtbl->destroy(e->runner);
    e->runner = NULL;
}

static void free_blocks(engine *e, test_request *r)
{
    for (int32_t i = 0; i < r->n_blocks; i++)
        e->refs[r->blocks[i]]--;
    r->n_blocks = 0;
}

/* As after a worker's death: tokens are kept, everything else is forgotten. */
static void restart_worker(engine *e)
{
    stop_worker(e);
    for (int32_t i = 0; i < e->n_requests; i++) {
        free_blocks(e, &e->requests[i]);
        e->requests[i].is_running = false;
    }
    e->n_finished = e->n_preempted = 0;
    start_worker(e);
}

/* --- scheduling ------------------------------------------------------------------------------- */

static block_id allocate(engine *e)
{
    int32_t at = random_int(1, e->n_blocks - 1);
    for (int32_t i = 0; i < e->n_blocks - 1; i++, at = at % (e->n_blocks - 1) + 1) {
        if (e->refs[at] == 0) {
            e->refs[at] = 1;
            return at;
        }
    }
    return -1;
}

/* Takes over full blocks that a running request has computed, or computes in this very step, for
 * the same tokens. */
static void share_prefix(engine *e, test_request *r)
{
    for (int32_t i = 0; i < e->n_requests; i++) {
        const test_request *o = &e->requests[i];
        if (o == r || !o->is_running || random_int(0, 3) == 0)
            continue;
        int32_t n = 0;
        while ((n + 1) * BLOCK_SIZE <= PGD_MIN(r->n_tokens - 1, o->n_computed) &&
               memcmp(r->tokens + n * BLOCK_SIZE, o->tokens + n * BLOCK_SIZE,
                      BLOCK_SIZE * sizeof(token_id)) == 0)
            n++;
        if (n == 0)
            continue;
        for (int32_t b = 0; b < n; b++) {
            r->blocks[b] = o->blocks[b];
            e->refs[r->blocks[b]]++;
        }
        r->n_blocks = n;
        r->n_computed = n * BLOCK_SIZE;
        e->n_hits++;
        return;
    }
}

static bool grow(engine *e, test_request *r, int32_t n_positions)
{
    while (r->n_blocks * BLOCK_SIZE < n_positions) {
        block_id id = allocate(e);
        if (id < 0)
            return false;
        r->blocks[r->n_blocks++] = id;
    }
    return true;
}

static void preempt(engine *e, int32_t idx)
{
    test_request *r = &e->requests[idx];
    free_blocks(e, r);
    r->is_running = false;
    e->preempted[e->n_preempted++] = (uint64_t)idx;
    e->n_preemptions++;
}

/* Entries come in order, each once for each admission, and all before the first sampled token. */
static void read_prompt_results(engine *e, const step_result *result)
{
    for (int32_t i = 0; i < result->n_prompt_results; i++) {
        const prompt_result_msg *m = &result->prompt_results[i];
        test_request *r = &e->requests[m->request_id];
        int32_t n_per_token = r->params.n_prompt_logprobs_per_token;
        assert_int_equal(m->request_epoch, r->epoch);
        assert_int_equal(m->first_token, r->n_prompt_seen);
        assert_int_equal(m->n_logprobs_per_token, n_per_token);
        assert_true(m->n_tokens > 0 && m->first_token + m->n_tokens <= r->n_prompt);
        assert_int_equal(m->first_token + m->n_tokens, PGD_MIN(r->n_computed + 1, r->n_prompt));
        assert_true(m->first_logprob + m->n_tokens * n_per_token <= result->n_prompt_logprobs);
        const token_logprob *got = result->prompt_logprobs + m->first_logprob;
        size_t n_bytes = (size_t)n_per_token * sizeof(token_logprob);
        for (int32_t t = 0; t < m->n_tokens; t++, got += n_per_token) {
            int32_t at = m->first_token + t;
            assert_int_equal(got[0].id, r->tokens[at]);
            assert_true(got[0].logprob <= 0);
            for (int32_t k = 2; k < n_per_token; k++)
                assert_true(got[k].logprob <= got[k - 1].logprob);
            if (e->n_requests == 1)
                memcpy(r->want_prompt[at], got, n_bytes);
            else
                assert_memory_equal(got, r->want_prompt[at], n_bytes);
        }
        r->n_prompt_seen = m->first_token + m->n_tokens;
        e->n_scored += m->n_tokens;
    }
}

static void read_result(engine *e, const step_result *result)
{
    read_prompt_results(e, result);
    for (int32_t i = 0; i < result->n_results; i++) {
        const request_result_msg *m = &result->results[i];
        test_request *r = &e->requests[m->request_id];
        assert_int_equal(m->error, REQUEST_ERROR_NONE);
        assert_int_equal(m->n_tokens, 1);
        assert_int_equal(m->request_epoch, r->epoch);
        assert_int_equal(r->n_computed, r->n_tokens);
        if (r->params.n_prompt_logprobs_per_token > 0)
            assert_int_equal(r->n_prompt_seen, r->n_prompt);
        int32_t at = r->n_tokens - r->n_prompt;
        const token_logprob *logprobs = result->logprobs + m->first_logprob;
        assert_int_equal(m->n_logprobs_per_token, N_LOGPROBS + 1);
        assert_true(m->first_logprob + m->n_logprobs_per_token <= result->n_logprobs);
        if (e->n_requests == 1) {
            r->want[at] = m->tokens[0];
            memcpy(r->want_logprobs[at], logprobs, sizeof(r->want_logprobs[at]));
        } else {
            if (m->tokens[0] != r->want[at])
                fail_msg("%s: request %d output %d is %d, alone it is %d", e->model,
                         (int)m->request_id, at, m->tokens[0], r->want[at]);
            assert_memory_equal(logprobs, r->want_logprobs[at], sizeof(r->want_logprobs[at]));
        }
        r->tokens[r->n_tokens++] = m->tokens[0];
        if (at + 1 == r->n_out) {
            r->is_finished = true;
            r->is_running = false;
            free_blocks(e, r);
            e->finished[e->n_finished++] = m->request_id;
        }
    }
}

/* One step over a random choice of requests. chunk: most tokens of one request. */
static void run_step(engine *e, int32_t chunk, int32_t max_seqs)
{
    new_request_msg new_requests[MAX_REQUESTS];
    cached_request_msg cached[MAX_REQUESTS];
    block_append_msg appends[MAX_REQUESTS];
    block_id zero[MAX_REQUESTS * MAX_REQUEST_BLOCKS];
    scheduler_output out = {.step_id = ++e->step_id,
                            .n_groups = 1,
                            .new_requests = new_requests,
                            .cached_requests = cached,
                            .appends = appends,
                            .blocks_to_zero = zero};
    int32_t budget = e->max_batched, n_running = 0;
    for (int32_t i = 0; i < e->n_requests; i++)
        n_running += e->requests[i].is_running;
    int32_t first = random_int(0, e->n_requests - 1);
    for (int32_t k = 0; k < e->n_requests && budget > 0; k++) {
        int32_t idx = (first + k) % e->n_requests;
        test_request *r = &e->requests[idx];
        if (r->is_finished || (!r->is_running && n_running >= max_seqs) ||
            (e->n_requests > 1 && random_int(0, 4) == 0))
            continue;
        bool is_new = !r->is_running;
        if (is_new) {
            r->n_computed = 0;
            r->n_prompt_seen = 1;
            if (r->params.n_prompt_logprobs_per_token == 0)
                share_prefix(e, r);
        }
        int32_t n_before = r->n_blocks, n = e->chunk_exact ? chunk : random_int(1, chunk);
        n = PGD_MIN(PGD_MIN(budget, n), r->n_tokens - r->n_computed);
        if (!grow(e, r, r->n_computed + n)) {
            if (is_new)
                free_blocks(e, r);
            else
                preempt(e, idx);
            n_running -= !is_new;
            continue;
        }
        for (int32_t b = n_before; b < r->n_blocks; b++)
            zero[out.n_blocks_to_zero++] = r->blocks[b];
        if (is_new) {
            new_requests[out.n_new++] = (new_request_msg){.request_id = (uint64_t)idx,
                                                          .request_epoch = ++r->epoch,
                                                          .n_prompt_tokens = r->n_prompt,
                                                          .n_tokens = r->n_tokens,
                                                          .tokens = r->tokens,
                                                          .n_computed_tokens = r->n_computed,
                                                          .n_scheduled_tokens = n,
                                                          .params = r->params,
                                                          .blocks = {{r->n_blocks}, {r->blocks}}};
            r->is_running = true;
            n_running++;
        } else {
            cached[out.n_cached++] = (cached_request_msg){.request_id = (uint64_t)idx,
                                                          .n_computed_tokens = r->n_computed,
                                                          .n_scheduled_tokens = n};
            if (r->n_blocks > n_before)
                appends[out.n_appends++] = (block_append_msg){
                    .request_id = (uint64_t)idx,
                    .blocks = {{r->n_blocks - n_before}, {r->blocks + n_before}}};
        }
        r->n_computed += n;
        budget -= n;
        out.total_scheduled_tokens += n;
    }
    /* A request preempted in this step was not scheduled in it; its row goes before new ones come.
     */
    out.finished_ids = e->finished;
    out.n_finished = e->n_finished;
    out.preempted_ids = e->preempted;
    out.n_preempted = e->n_preempted;
    if (random_int(0, 1))
        out.n_blocks_to_zero = 0; /* zeroing is for hygiene: results may not depend on it */
    step_result result;
    pgd_why why = {{0}};
    if (e->runner->vtbl->step(e->runner, &out, &result, &why) != PGD_OK)
        fail_msg("%s", why.text);
    assert_int_equal(result.step_id, out.step_id);
    e->n_finished = e->n_preempted = 0;
    e->n_steps++;
    read_result(e, &result);
}

static bool all_finished(const engine *e)
{
    for (int32_t i = 0; i < e->n_requests; i++) {
        if (!e->requests[i].is_finished)
            return false;
    }
    return true;
}

/* --- requests --------------------------------------------------------------------------------- */

static void make_request(test_request *r, const test_request *others, int32_t idx,
                         int32_t vocab_size, int32_t max_prompt, int32_t max_out)
{
    memset(r, 0, sizeof(*r));
    r->n_prompt = random_int(1, max_prompt);
    r->n_out = random_int(1, max_out);
    for (int32_t i = 0; i < r->n_prompt; i++)
        r->tokens[i] = random_int(0, vocab_size - 1);
    if (idx > 0 && random_int(0, 1)) { /* shares the beginning of an earlier prompt */
        const test_request *o = &others[random_int(0, idx - 1)];
        memcpy(r->tokens, o->tokens, (size_t)PGD_MIN(o->n_prompt, r->n_prompt) * sizeof(token_id));
    }
    r->params = (sampling_params){.top_p = 1,
                                  .repetition_penalty = 1,
                                  .seed = (uint64_t)random_u32() << 17,
                                  .n_logprobs = N_LOGPROBS,
                                  .stop_ids = r->stop_ids,
                                  .logit_bias = r->bias};
    if (random_int(0, 2) == 0)
        r->params.n_prompt_logprobs_per_token = random_int(1, N_LOGPROBS + 1);
    if (random_int(0, 2) == 0)
        return; /* greedy */
    r->params.temperature = 0.5f + (float)random_int(0, 10) * 0.1f;
    r->params.top_k = random_int(0, 1) ? random_int(1, 50) : 0;
    r->params.top_p = random_int(0, 1) ? 0.9f : 1;
    r->params.min_p = random_int(0, 3) == 0 ? 0.05f : 0;
    r->params.repetition_penalty = random_int(0, 1) ? 1.2f : 1;
    r->params.presence_penalty = random_int(0, 3) == 0 ? 0.5f : 0;
    r->params.frequency_penalty = random_int(0, 3) == 0 ? 0.3f : 0;
    r->params.min_tokens = random_int(0, 3);
    r->params.n_stop_ids = random_int(0, 2);
    r->params.n_logit_bias = random_int(0, 2);
    for (int32_t i = 0; i < 2; i++) {
        r->stop_ids[i] = random_int(0, vocab_size - 1);
        r->bias[i] = (logit_bias){random_int(0, vocab_size - 1), (float)random_int(-5, 5)};
    }
}

static void run_alone(test_request *r, engine *e)
{
    engine solo = *e;
    int32_t *refs = mem_calloc((size_t)e->n_blocks, sizeof(int32_t));
    solo.refs = refs;
    solo.n_requests = 1;
    solo.requests = r;
    r->n_tokens = r->n_prompt;
    while (!r->is_finished)
        run_step(&solo, MAX_TOKENS * 100, 1);
    /* The finished id is told in a step of its own. */
    run_step(&solo, 1, 1);
    e->step_id = solo.step_id;
    r->is_finished = false;
    r->n_tokens = r->n_prompt;
    r->epoch = 0;
    mem_free(refs);
}

typedef struct plan {
    const char *model;
    dtype kv_dtype;
    int32_t n_mixes;
    int32_t max_requests;
    int32_t max_prompt;
    int32_t max_out;
} plan;

static void run_mix(const plan *p, uint64_t seed)
{
    rng_state = seed;
    test_request *requests = mem_calloc(MAX_REQUESTS, sizeof(test_request));
    engine e = {.model = p->model,
                .kv_dtype = p->kv_dtype,
                .n_threads = 1,
                .max_seqs = 1,
                .max_batched = MAX_TOKENS,
                .n_blocks = MAX_REQUEST_BLOCKS + 1,
                .requests = requests};
    start_worker(&e);
    e.n_requests = random_int(2, p->max_requests);
    for (int32_t i = 0; i < e.n_requests; i++) {
        make_request(&requests[i], requests, i, e.vocab_size, p->max_prompt, p->max_out);
        run_alone(&requests[i], &e);
    }
    stop_worker(&e);

    e.n_threads = 2;
    e.max_seqs = random_int(1, e.n_requests);
    e.max_batched = random_int(1, 3) == 1 ? random_int(1, 8) : random_int(16, 200);
    e.n_blocks = MAX_REQUEST_BLOCKS + 1 + random_int(0, e.max_seqs * MAX_REQUEST_BLOCKS / 3);
    e.refs = mem_calloc((size_t)e.n_blocks, sizeof(int32_t));
    e.n_steps = e.n_scored = 0;
    start_worker(&e);
    int32_t chunk = random_int(0, 2) == 0 ? random_int(1, 6) : random_int(8, MAX_TOKENS);
    int32_t restart_at = random_int(0, 1) ? random_int(1, 40) : -1;
    while (!all_finished(&e)) {
        assert_true(e.n_steps < 100000);
        if (e.n_steps == restart_at) {
            restart_worker(&e);
            restart_at = -1;
        }
        int32_t victim = random_int(0, e.n_requests - 1);
        if (random_int(0, 15) == 0 && e.requests[victim].is_running)
            preempt(&e, victim);
        run_step(&e, chunk, e.max_seqs);
    }
    for (int32_t b = 0; b < e.n_blocks; b++)
        assert_int_equal(e.refs[b], 0);
    print_message(
        "%s kv=%s: %d requests, %d steps, %d hits, %d preemptions, %d prompt tokens scored\n",
        p->model, dtype_name(p->kv_dtype), e.n_requests, e.n_steps, e.n_hits, e.n_preemptions,
        e.n_scored);
    stop_worker(&e);
    mem_free(e.refs);
    mem_free(requests);
}

/* One prompt in chunks of every size from 1 to 300, each time by a fresh admission. */
static void run_chunks(const char *model, int32_t n_prompt)
{
    rng_state = 99;
    test_request *requests = mem_calloc(2, sizeof(test_request));
    engine e = {.model = model,
                .kv_dtype = DTYPE_F16,
                .n_threads = 2,
                .max_seqs = 2,
                .max_batched = 300,
                .n_blocks = 2 * MAX_REQUEST_BLOCKS + 1,
                .requests = requests,
                .n_requests = 1};
    start_worker(&e);
    for (int32_t i = 0; i < 2; i++) {
        make_request(&requests[i], requests, 0, e.vocab_size, 1, 1);
        requests[i].n_prompt = n_prompt;
        requests[i].n_out = 2;
        requests[i].params = (sampling_params){.top_p = 1,
                                               .repetition_penalty = 1,
                                               .n_logprobs = N_LOGPROBS,
                                               .n_prompt_logprobs_per_token = N_LOGPROBS + 1};
        for (int32_t p = 0; p < n_prompt; p++)
            requests[i].tokens[p] = random_int(0, e.vocab_size - 1);
        run_alone(&requests[i], &e);
        e.requests++;
    }
    e.requests = requests;
    e.n_requests = 2;
    e.refs = mem_calloc((size_t)e.n_blocks, sizeof(int32_t));
    for (int32_t chunk = 1; chunk <= 300; chunk += chunk < 40 ? 1 : 13) {
        for (int32_t i = 0; i < 2; i++) {
            requests[i].n_tokens = n_prompt;
            requests[i].is_finished = false;
        }
        e.chunk_exact = true;
        while (!all_finished(&e))
            run_step(&e, chunk, 2);
    }
    stop_worker(&e);
    mem_free(e.refs);
    mem_free(requests);
}

static void test_model_runner_exact_prompt_chunks(void **state)
{
    (void)state;
    run_chunks("tests/data/models/llama31-tiny", 250);
    run_chunks("config/models/paged-tiny.gguf", 250);
}

static void run_plan(const plan *p)
{
    if (!file_is_dir(p->model) && !file_exists(p->model))
        skip();
    for (int32_t i = 0; i < p->n_mixes; i++)
        run_mix(p, (uint64_t)i * 7919 + 17 + (uint64_t)p->kv_dtype);
}

/* The plain kernels are slow, so that they get fewer mixes than the level that a user gets. */
static void test_model_runner_exact_ref(void **state)
{
    (void)state;
    assert_int_equal(setenv("PGD_CPU_ISA", "ref", 1), 0);
    run_plan(&(plan){"tests/data/models/llama31-tiny", DTYPE_F32, 2, 8, 60, 8});
    assert_int_equal(unsetenv("PGD_CPU_ISA"), 0);
}

static void test_model_runner_exact_tiny(void **state)
{
    (void)state;
    run_plan(&(plan){"tests/data/models/llama31-tiny", DTYPE_F16, 8, 24, 150, 20});
    run_plan(&(plan){"tests/data/models/qwen3-tiny", DTYPE_BF16, 4, 16, 100, 16});
    run_plan(&(plan){"tests/data/models/qwen2-tiny", DTYPE_F32, 4, 16, 100, 16});
}

static void test_model_runner_exact_bundled(void **state)
{
    (void)state;
    run_plan(&(plan){"config/models/paged-tiny.gguf", DTYPE_F16, 4, 24, 150, 24});
}

static void test_model_runner_exact_smollm2(void **state)
{
    (void)state;
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    static const char file[] = "paged/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    char path[1024];
    cpu_isa isa;
    if (cache && cache[0])
        (void)snprintf(path, sizeof(path), "%s/%s", cache, file);
    else
        (void)snprintf(path, sizeof(path), "%s/.cache/%s", home ? home : "", file);
    if (cpu_features_choose(&isa, NULL) != PGD_OK || isa == CPU_ISA_REF || !file_exists(path))
        skip();
    run_plan(&(plan){path, DTYPE_F16, 1, 6, 60, 8});
}

int main(void)
{
    log_set_level(LOG_WARN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_runner_exact_ref),
        cmocka_unit_test(test_model_runner_exact_tiny),
        cmocka_unit_test(test_model_runner_exact_bundled),
        cmocka_unit_test(test_model_runner_exact_smollm2),
        cmocka_unit_test(test_model_runner_exact_prompt_chunks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
