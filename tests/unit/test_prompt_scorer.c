/* Log probabilities of prompt tokens against Hugging Face transformers, for every tiny model, at every
 * instruction-set level of this machine, in one step and in chunks. (The same bits in any mix:
 * test_model_runner_exact.c.) */
#include <math.h>
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
#include "kernels/cpu_features.h"
#include "kernels/ops.h"
#include "tests/unit/one_group.h"
#include "worker/model_runner.h"
#include "worker/prompt_scorer.h"

#define GOLDEN_DIR "tests/golden/prompt_logprobs"
#define MODELS_DIR "tests/data/models"

enum { BLOCK_SIZE = 16, MAX_LEN = 352, MAX_BEST = 8 };
static const double MAX_ERROR = 1e-4;

typedef struct reader {
    const uint8_t *at, *end;
} reader;

static const void *read_bytes(reader *rd, size_t n_bytes)
{
    assert_true(n_bytes <= (size_t)(rd->end - rd->at));
    const void *data = rd->at;
    rd->at += n_bytes;
    return data;
}

static uint32_t read_u32(reader *rd)
{
    uint32_t value;
    memcpy(&value, read_bytes(rd, 4), 4);
    return value;
}

static float read_f32(reader *rd)
{
    float value;
    memcpy(&value, read_bytes(rd, 4), 4);
    return value;
}

static step_runner *open_runner(const char *model)
{
    step_runner *r;
    pgd_why why = {{0}};
    load_msg load = {.kv_dtype = DTYPE_F32,
                     .block_size = BLOCK_SIZE,
                     .max_model_len = MAX_LEN,
                     .max_num_seqs = 2,
                     .max_num_batched_tokens = MAX_LEN,
                     .max_logprobs = MAX_BEST,
                     .n_threads = 2};
    load_done_msg done;
    kv_ready_msg ready;
    (void)snprintf(load.model_path, sizeof(load.model_path), "%s", model);
    if (model_runner_create(&r, "cpu", &why) != PGD_OK ||
        r->vtbl->load(r, &load, &done, NULL, NULL, &why) != PGD_OK)
        fail_msg("%s: %s", model, why.text);
    kv_config_msg kv = one_group_config(&done, BLOCK_SIZE, MAX_LEN / BLOCK_SIZE + 1);
    if (r->vtbl->init_kv(r, &kv, &ready, &why) != PGD_OK)
        fail_msg("%s: %s", model, why.text);
    return r;
}

/* Scores a prompt in chunks; out[token * n_per_token], token 0 unused. */
static void score(step_runner *r, token_logprob *out, const token_id *prompt, int32_t n_prompt,
                  int32_t n_per_token, int32_t chunk)
{
    static uint64_t id;
    block_id blocks[MAX_LEN / BLOCK_SIZE];
    for (int32_t i = 0; i < MAX_LEN / BLOCK_SIZE; i++)
        blocks[i] = i + 1;
    const uint64_t last_id = id++;
    int32_t n_seen = 1;
    for (int32_t at = 0; at < n_prompt; at += chunk) {
        int32_t n = PGD_MIN(chunk, n_prompt - at);
        new_request_msg first = {.request_id = id,
                                 .n_prompt_tokens = n_prompt,
                                 .n_tokens = n_prompt,
                                 .tokens = prompt,
                                 .n_scheduled_tokens = n,
                                 .params = {.top_p = 1,
                                            .repetition_penalty = 1,
                                            .n_logprobs = -1,
                                            .n_prompt_logprobs_per_token = n_per_token},
                                 .blocks = {{MAX_LEN / BLOCK_SIZE}, {blocks}}};
        cached_request_msg next = {
            .request_id = id, .n_computed_tokens = at, .n_scheduled_tokens = n};
        scheduler_output in = {.step_id = id,
                               .n_groups = 1,
                               .total_scheduled_tokens = n,
                               .n_new = at == 0,
                               .new_requests = &first,
                               .n_cached = at > 0,
                               .cached_requests = &next,
                               .n_finished = at == 0 && last_id > 0,
                               .finished_ids = &last_id};
        step_result result;
        pgd_why why = {{0}};
        if (r->vtbl->step(r, &in, &result, &why) != PGD_OK)
            fail_msg("%s", why.text);
        for (int32_t i = 0; i < result.n_prompt_results; i++) {
            const prompt_result_msg *m = &result.prompt_results[i];
            assert_int_equal(m->first_token, n_seen);
            assert_int_equal(m->n_logprobs_per_token, n_per_token);
            memcpy(out + (size_t)n_seen * (size_t)n_per_token,
                   result.prompt_logprobs + m->first_logprob,
                   (size_t)m->n_tokens * (size_t)n_per_token * sizeof(*out));
            n_seen += m->n_tokens;
        }
    }
    assert_int_equal(n_seen, n_prompt);
}

/* Greatest difference to the golden rows of one prompt. */
static double compare(const token_logprob *got, reader rd, int32_t n_prompt, uint32_t n_best,
                      const char *label)
{
    double worst = 0;
    for (int32_t t = 1; t < n_prompt; t++) {
        const token_logprob *row = got + (size_t)t * (n_best + 1);
        double error = fabs((double)row[0].logprob - read_f32(&rd));
        uint32_t n_clear = read_u32(&rd);
        token_id ids[MAX_BEST];
        for (uint32_t k = 0; k < n_best; k++)
            ids[k] = (token_id)read_u32(&rd);
        for (uint32_t k = 0; k < n_best; k++) {
            double want = read_f32(&rd);
            if (k < n_clear && row[1 + k].id != ids[k])
                fail_msg("%s: token %d: best %u is %d, expected %d", label, t, k, row[1 + k].id,
                         ids[k]);
            error = fmax(error, fabs((double)row[1 + k].logprob - want));
        }
        if (!(error <= MAX_ERROR))
            fail_msg("%s: prompt token %d differs by %g", label, t, error);
        worst = fmax(worst, error);
    }
    return worst;
}

static void compare_model(const char *name, cpu_isa isa)
{
    char *data, golden[512], model[512], label[600];
    size_t n_bytes;
    pgd_why why = {{0}};
    (void)snprintf(golden, sizeof(golden), GOLDEN_DIR "/%s.bin", name);
    (void)snprintf(model, sizeof(model), MODELS_DIR "/%s", name);
    (void)snprintf(label, sizeof(label), "%s at %s", name, cpu_features_name(isa));
    if (file_read(&data, &n_bytes, golden, (size_t)1 << 20, &why) != PGD_OK)
        fail_msg("%s", why.text);
    reader rd = {.at = (const uint8_t *)data, .end = (const uint8_t *)data + n_bytes};
    assert_memory_equal(read_bytes(&rd, 8), "PGPROMP1", 8);
    uint32_t n_cases = read_u32(&rd), n_best = read_u32(&rd);
    assert_true(n_cases > 0 && n_best > 0 && n_best <= MAX_BEST);
    step_runner *r = open_runner(model);
    token_logprob *got = mem_calloc((size_t)MAX_LEN * (n_best + 1), sizeof(*got));
    double worst = 0;
    for (uint32_t i = 0; i < n_cases; i++) {
        static const int32_t chunks[] = {MAX_LEN, 33, 7};
        int32_t n_prompt = (int32_t)read_u32(&rd);
        assert_true(n_prompt > 1 && n_prompt < MAX_LEN);
        const token_id *prompt = read_bytes(&rd, (size_t)4 * (size_t)n_prompt);
        for (size_t k = 0; k < PGD_ARRAY_LEN(chunks); k++) {
            score(r, got, prompt, n_prompt, (int32_t)n_best + 1, chunks[k]);
            worst = fmax(worst, compare(got, rd, n_prompt, n_best, label));
        }
        (void)read_bytes(&rd, (size_t)(n_prompt - 1) * 4 * (2 + 2 * (size_t)n_best));
    }
    assert_ptr_equal(rd.at, rd.end);
    print_message("%s: %u prompts, largest error %.2g\n", label, n_cases, worst);
    r->vtbl->destroy(r);
    mem_free(got);
    mem_free(data);
}

static void compare_at_all_levels(const char *name)
{
    for (int isa = CPU_ISA_REF; isa <= CPU_ISA_NEON; isa++) {
        const kernel_ops *ops;
        if (ops_cpu_get(&ops, (cpu_isa)isa) != PGD_OK)
            continue;
        assert_int_equal(setenv("PGD_CPU_ISA", cpu_features_name((cpu_isa)isa), 1), 0);
        compare_model(name, (cpu_isa)isa);
    }
    assert_int_equal(unsetenv("PGD_CPU_ISA"), 0);
}

static void test_prompt_scorer_golden(void **state)
{
    (void)state;
    compare_at_all_levels("llama31-tiny");
    compare_at_all_levels("mistral-tiny");
    compare_at_all_levels("qwen2-tiny");
    compare_at_all_levels("qwen3-tiny");
    compare_at_all_levels("smollm3-tiny");
    compare_at_all_levels("gemma2-tiny");
    compare_at_all_levels("llama4-tiny");
}

static void test_prompt_scorer_refuses_sizes(void **state)
{
    (void)state;
    prompt_scorer *s;
    assert_int_equal(prompt_scorer_create(&s, 0, 1, 0, 1), PGD_EINVAL);
    assert_int_equal(prompt_scorer_create(&s, 1, 0, 0, 1), PGD_EINVAL);
    assert_int_equal(prompt_scorer_create(&s, 1, WIRE_MAX_BATCHED_TOKENS + 1, 0, 1), PGD_EINVAL);
    assert_int_equal(prompt_scorer_create(&s, 1, 1, PGD_MAX_LOGPROBS + 1, 1), PGD_EINVAL);
    assert_int_equal(prompt_scorer_create(&s, 1, 1, 0, 0), PGD_EINVAL);
    assert_null(s);
    prompt_scorer_destroy(NULL);
}

int main(void)
{
    log_set_level(LOG_WARN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prompt_scorer_golden),
        cmocka_unit_test(test_prompt_scorer_refuses_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
