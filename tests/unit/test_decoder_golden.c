/* The decoder against Hugging Face transformers: logits at chosen positions and 64 greedy tokens,
 * for every weight file of each tiny model, and for SmolLM2 when its F32 file is in the cache; at
 * every instruction-set level of this machine.
 *
 * Prompts are cut at the recorded positions, so that chunked prefill is part of what is compared.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <dirent.h>

#include <cmocka.h>

#include "common/file.h"
#include "common/thread.h"
#include "tests/unit/decoder_rig.h"

#define LOGITS_DIR  "tests/golden/logits"
#define MODELS_DIR  "tests/data/models"
#define MAX_CONTEXT 1024
#define MAX_ERROR   1e-4 /* of the range of the logits */

/* --- golden file ------------------------------------------------------------------------------ */

typedef struct golden_case {
    uint32_t n_prompt, n_positions, n_greedy;
    float range;
    const uint32_t *prompt, *position, *greedy;
    const float *margin, *logits;
} golden_case;

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

static void read_case(golden_case *c, reader *rd, uint32_t vocab_size)
{
    c->n_prompt = read_u32(rd);
    c->n_positions = read_u32(rd);
    c->n_greedy = read_u32(rd);
    memcpy(&c->range, read_bytes(rd, 4), 4);
    c->prompt = read_bytes(rd, (size_t)4 * c->n_prompt);
    c->position = read_bytes(rd, (size_t)4 * c->n_positions);
    c->greedy = read_bytes(rd, (size_t)4 * c->n_greedy);
    c->margin = read_bytes(rd, (size_t)4 * c->n_greedy);
    c->logits = read_bytes(rd, (size_t)4 * c->n_positions * vocab_size);
}

/* --- comparison ------------------------------------------------------------------------------- */

static double max_error(const float *got, const float *want, int32_t n, double range)
{
    double worst = 0;
    for (int32_t i = 0; i < n; i++) {
        double error = fabs((double)got[i] - want[i]);
        worst = error <= worst ? worst : error; /* a NaN is the worst */
    }
    return worst / range;
}

static int32_t arg_max(const float *x, int32_t n)
{
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    return best;
}

static double compare_case(decoder_rig *g, const golden_case *c, const char *label)
{
    int32_t vocab_size = g->cfg->vocab_size;
    double worst = 0;
    assert_true(c->n_positions > 0 && c->n_prompt + c->n_greedy <= MAX_CONTEXT);
    decoder_rig_start(g, (const token_id *)c->prompt, (int32_t)c->position[0] + 1);
    const float *logits = NULL;
    for (uint32_t i = 0; i < c->n_positions; i++) {
        const request_row *r = request_rows_get(g->rows, g->row);
        while (r->n_tokens <= (int32_t)c->position[i])
            assert_true(
                request_rows_append_token(g->rows, g->row, (token_id)c->prompt[r->n_tokens]));
        logits = decoder_rig_catch_up(g);
        double error =
            max_error(logits, c->logits + (size_t)i * (size_t)vocab_size, vocab_size, c->range);
        if (!(error <= MAX_ERROR))
            fail_msg("%s: logits at position %u differ by %g of their range", label, c->position[i],
                     error);
        worst = PGD_MAX(worst, error);
    }
    for (uint32_t i = 0; i < c->n_greedy; i++) {
        int32_t token = arg_max(logits, vocab_size);
        if (token != (int32_t)c->greedy[i])
            fail_msg("%s: greedy token %u is %d, expected %u (margin %g)", label, i, token,
                     c->greedy[i], c->margin[i]);
        assert_true(request_rows_append_token(g->rows, g->row, token));
        if (i + 1 < c->n_greedy)
            logits = decoder_rig_catch_up(g);
    }
    return worst;
}

static void compare_model(const char *model_path, const char *golden_path, cpu_isa isa)
{
    char *data, label[1200];
    size_t n_bytes;
    pgd_why why = {{0}};
    if (file_read(&data, &n_bytes, golden_path, (size_t)64 << 20, &why) != PGD_OK)
        fail_msg("%s", why.text);
    reader rd = {.at = (const uint8_t *)data, .end = (const uint8_t *)data + n_bytes};
    assert_memory_equal(read_bytes(&rd, 8), "PGLOGIT1", 8);
    uint32_t n_cases = read_u32(&rd), vocab_size = read_u32(&rd);
    (void)snprintf(label, sizeof(label), "%s at %s", model_path, cpu_features_name(isa));
    decoder_rig g;
    decoder_rig_opts opts = {.isa = isa,
                             .max_rows = MAX_CONTEXT,
                             .max_context = MAX_CONTEXT,
                             .max_logit_rows = 1,
                             .kv_type = DTYPE_F32};
    decoder_rig_open(&g, model_path, &opts);
    assert_int_equal(g.cfg->vocab_size, vocab_size);
    double worst = 0;
    for (uint32_t i = 0; i < n_cases; i++) {
        golden_case c;
        read_case(&c, &rd, vocab_size);
        double error = compare_case(&g, &c, label);
        worst = PGD_MAX(worst, error);
    }
    assert_ptr_equal(rd.at, rd.end);
    assert_true(n_cases > 0);
    print_message("%s: %u cases, largest error %.2g of the range\n", label, n_cases, worst);
    decoder_rig_close(&g);
    mem_free(data);
}

static void compare_at_all_levels(const char *model_path, const char *golden_path, cpu_isa first)
{
    for (int isa = (int)first; isa <= CPU_ISA_NEON; isa++) {
        const kernel_ops *ops;
        if (ops_cpu_get(&ops, (cpu_isa)isa) == PGD_OK)
            compare_model(model_path, golden_path, (cpu_isa)isa);
    }
}

/* The directory itself, and every GGUF in it. MXFP4 stands for the very same weights, but the fast
 * levels round activations for it: test_moe_models follows them. */
static void compare_tiny(const char *name)
{
    char dir[512], golden[512], path[1100];
    (void)snprintf(dir, sizeof(dir), MODELS_DIR "/%s", name);
    (void)snprintf(golden, sizeof(golden), LOGITS_DIR "/%s.bin", name);
    if (!file_is_dir(dir) || !file_exists(golden))
        skip();
    compare_at_all_levels(dir, golden, CPU_ISA_REF);
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) {
        size_t n = strlen(e->d_name);
        if (n > 5 && strcmp(e->d_name + n - 5, ".gguf") == 0) {
            (void)snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
            if (strstr(e->d_name, "mxfp4") != NULL)
                compare_model(path, golden, CPU_ISA_REF);
            else
                compare_at_all_levels(path, golden, CPU_ISA_REF);
        }
    }
    (void)closedir(d);
}

static void test_decoder_golden_llama31(void **state)
{
    (void)state;
    compare_tiny("llama31-tiny");
}

static void test_decoder_golden_mistral(void **state)
{
    (void)state;
    compare_tiny("mistral-tiny");
}

static void test_decoder_golden_qwen2(void **state)
{
    (void)state;
    compare_tiny("qwen2-tiny");
}

static void test_decoder_golden_qwen3(void **state)
{
    (void)state;
    compare_tiny("qwen3-tiny");
}

static void test_decoder_golden_smollm3(void **state)
{
    (void)state;
    compare_tiny("smollm3-tiny");
}

static void test_decoder_golden_gemma2(void **state)
{
    (void)state;
    compare_tiny("gemma2-tiny");
}

static void test_decoder_golden_gemma3(void **state)
{
    (void)state;
    compare_tiny("gemma3-tiny");
}

static void test_decoder_golden_mistral_swa(void **state)
{
    (void)state;
    compare_tiny("mistral-swa-tiny");
}

static void test_decoder_golden_qwen3_swa(void **state)
{
    (void)state;
    compare_tiny("qwen3-swa-tiny");
}

static void test_decoder_golden_mixtral(void **state)
{
    (void)state;
    compare_tiny("mixtral-tiny");
}

static void test_decoder_golden_qwen3moe(void **state)
{
    (void)state;
    compare_tiny("qwen3moe-tiny");
}

static void test_decoder_golden_gptoss(void **state)
{
    (void)state;
    compare_tiny("gptoss-tiny");
    compare_model(MODELS_DIR "/gptoss-mxfp4-tiny", LOGITS_DIR "/gptoss-tiny.bin", CPU_ISA_REF);
}

static void test_decoder_golden_llama4(void **state)
{
    (void)state;
    compare_tiny("llama4-tiny");
}

static void test_decoder_golden_gemma3_wrapped(void **state)
{
    (void)state;
    compare_tiny("gemma3-wrapped-tiny");
}

static void test_decoder_golden_llama4_wrapped(void **state)
{
    (void)state;
    compare_tiny("llama4-wrapped-tiny");
}

static void test_decoder_golden_smollm2(void **state)
{
    (void)state;
    static const char golden[] = LOGITS_DIR "/smollm2.bin";
    static const char file[] = "paged/models/SmolLM2-135M-Instruct.F32.gguf";
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    char path[1024];
    if (cache && cache[0])
        (void)snprintf(path, sizeof(path), "%s/%s", cache, file);
    else
        (void)snprintf(path, sizeof(path), "%s/.cache/%s", home ? home : "", file);
    /* Debug and sanitizer builds take minutes for it; the tiny ones go the same ways. */
    if (PGD_DEBUG || !file_exists(path) || !file_exists(golden))
        skip();
    /* Without fast kernels this model takes minutes: the reference level is covered by the tiny
     * ones. */
    compare_at_all_levels(path, golden, CPU_ISA_AVX2);
}

int main(void)
{
    thread_set_flush_denormals();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decoder_golden_llama31),
        cmocka_unit_test(test_decoder_golden_mistral),
        cmocka_unit_test(test_decoder_golden_qwen2),
        cmocka_unit_test(test_decoder_golden_qwen3),
        cmocka_unit_test(test_decoder_golden_smollm3),
        cmocka_unit_test(test_decoder_golden_gemma2),
        cmocka_unit_test(test_decoder_golden_gemma3),
        cmocka_unit_test(test_decoder_golden_mistral_swa),
        cmocka_unit_test(test_decoder_golden_qwen3_swa),
        cmocka_unit_test(test_decoder_golden_mixtral),
        cmocka_unit_test(test_decoder_golden_qwen3moe),
        cmocka_unit_test(test_decoder_golden_gptoss),
        cmocka_unit_test(test_decoder_golden_llama4),
        cmocka_unit_test(test_decoder_golden_gemma3_wrapped),
        cmocka_unit_test(test_decoder_golden_llama4_wrapped),
        cmocka_unit_test(test_decoder_golden_smollm2),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
