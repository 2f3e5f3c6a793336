/* Perplexity of SmolLM2 with its quantized weights on 20 KB of English, against transformers with the same weights
 * dequantised (tests/golden/README.md has the definition). Text goes through the GGUF's own tokenizer, the KV cache is the worker's
 * default F16, prompts are computed in chunks, and every instruction-set level with int8 kernels is measured.
 *
 * What is to be expected: rounding activations to int8 (and nothing else: with F32 weights the same code gives 19.4931, with an F32 cache
 * too 19.4926) costs a divergence of 0.003 nats per token, so the perplexity is 0.3 % higher in the mean. The rounding errors
 * of 5,000 tokens leave a standard deviation of 0.1 % on that, drawn anew by any change of the order of a sum in any kernel; the
 * standard error that is printed, over the windows, shows it. Values from +0.1 to +0.49 % have been seen.
 *
 * A sanitizer build and the reference level would take minutes: the former scores one window, the latter is left to test_decoder_golden. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

#include "common/file.h"
#include "common/json.h"
#include "common/thread.h"
#include "engine/text/tokenizer.h"
#include "tests/unit/decoder_rig.h"

#define GOLDEN_DIR "tests/golden"
#define MODEL      "paged/models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define CHUNK      128   /* tokens of a forward; their logits are 25 MB */
#define LIMIT      0.005 /* of the perplexity of the whole text */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#    define MAX_WINDOWS 1
#    define ALL_LEVELS  false
#else
#    define MAX_WINDOWS 32
#    define ALL_LEVELS  true
#endif

typedef struct golden {
    char model_path[1024];
    token_id *ids;
    int32_t n_ids;
    int32_t window;
    int32_t n_windows;       /* to score */
    double nll[MAX_WINDOWS]; /* mean of each */
    double mean_nll;         /* of those windows */
    double limit;            /* of the relative error of the perplexity */
} golden;

static double get_number(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (!cJSON_IsNumber(item))
        fail_msg("expected a number \"%s\" in perplexity.json", name);
    return item->valuedouble;
}

static void encode_text(golden *g)
{
    char *text;
    size_t n_bytes;
    model_file *file;
    tokenizer *t;
    pgd_why why = {{0}};
    DECODER_RIG_CHECK(
        file_read(&text, &n_bytes, GOLDEN_DIR "/english.txt", 1 << 20, &why) == PGD_OK, why);
    DECODER_RIG_CHECK(model_file_open(&file, g->model_path, &why) == PGD_OK, why);
    DECODER_RIG_CHECK(tokenizer_create(&t, file, &why) == PGD_OK, why);
    DECODER_RIG_CHECK(tokenizer_encode(&g->ids, &g->n_ids, t, text, n_bytes, 0, 1 << 20) == PGD_OK,
                      why);
    tokenizer_destroy(t);
    model_file_close(file);
    mem_free(text);
}

static void read_golden(golden *g)
{
    char *text;
    size_t n_bytes;
    pgd_why why = {{0}};
    DECODER_RIG_CHECK(
        file_read(&text, &n_bytes, GOLDEN_DIR "/perplexity.json", 1 << 20, &why) == PGD_OK, why);
    cJSON *json = cJSON_ParseWithLength(text, n_bytes);
    assert_non_null(json);
    g->window = (int32_t)get_number(json, "window");
    assert_int_equal(g->n_ids, (int32_t)get_number(json, "n_tokens"));
    const cJSON *windows = cJSON_GetObjectItemCaseSensitive(json, "windows"), *w;
    double sum = 0, n_scored = 0;
    g->n_windows = 0;
    cJSON_ArrayForEach(w, windows)
    {
        if (g->n_windows == MAX_WINDOWS)
            break;
        g->nll[g->n_windows] = get_number(w, "mean_nll");
        sum += g->nll[g->n_windows] * (get_number(w, "tokens") - 1);
        n_scored += get_number(w, "tokens") - 1;
        g->n_windows++;
    }
    assert_true(n_scored > 0);
    g->mean_nll = sum / n_scored;
    /* Rounding activations moves each token's likelihood at random; fewer tokens average less of it away. */
    g->limit = LIMIT * sqrt(get_number(json, "n_scored") / n_scored);
    if (ALL_LEVELS) {
        assert_int_equal((int32_t)n_scored, (int32_t)get_number(json, "n_scored"));
        assert_true(fabs(exp(g->mean_nll) - get_number(json, "perplexity")) < 1e-6);
    }
    cJSON_Delete(json);
    mem_free(text);
}

/* -log of the probability of token. */
static double token_nll(const float *logits, int32_t vocab_size, token_id token)
{
    float max = logits[0];
    for (int32_t i = 1; i < vocab_size; i++)
        max = PGD_MAX(max, logits[i]);
    double sum = 0;
    for (int32_t i = 0; i < vocab_size; i++)
        sum += (double)expf(logits[i] - max);
    return log(sum) + (double)max - (double)logits[token];
}

/* Sum over the tokens of one window but the first; every forward but the last gives the logits for
 * CHUNK tokens. */
static double window_nll(decoder_rig *rig, const token_id *ids, int32_t n)
{
    double sum = 0;
    decoder_rig_start(rig, ids, n);
    for (int32_t at = 0; at < n - 1; at += CHUNK) {
        int32_t n_rows = PGD_MIN(CHUNK, n - 1 - at);
        const float *logits = decoder_rig_forward(rig, n_rows);
        for (int32_t i = 0; i < n_rows; i++)
            sum += token_nll(logits + (int64_t)i * rig->cfg->vocab_size, rig->cfg->vocab_size,
                             ids[at + i + 1]);
    }
    return sum;
}

static void measure(const golden *g, cpu_isa isa)
{
    decoder_rig rig;
    decoder_rig_opts opts = {.isa = isa,
                             .max_rows = CHUNK,
                             .max_context = PGD_ROUND_UP(g->window, DECODER_RIG_BLOCK_SIZE),
                             .kv_type = DTYPE_F16};
    clock_t start = clock();
    decoder_rig_open(&rig, g->model_path, &opts);
    double sum = 0, excess = 0, excess2 = 0; /* of the windows' log perplexities */
    int32_t n_scored = 0;
    for (int32_t i = 0; i < g->n_windows; i++) {
        int32_t at = i * g->window, n = PGD_MIN(g->window, g->n_ids - at);
        double nll = window_nll(&rig, g->ids + at, n), d = nll / (n - 1) - g->nll[i];
        sum += nll;
        excess += d;
        excess2 += d * d;
        n_scored += n - 1;
    }
    int32_t n_w = g->n_windows;
    double error = n_w > 1 ? sqrt((excess2 - excess * excess / n_w) / (n_w - 1) / n_w) : 0;
    decoder_rig_close(&rig);
    double got = exp(sum / n_scored), want = exp(g->mean_nll);
    print_message("%s: perplexity %.4f, expected %.4f (%+.3f %%, standard error %.3f %%), %d "
                  "tokens, %.1f s of CPU time\n",
                  cpu_features_name(isa), got, want, 100 * (got / want - 1), 100 * error, n_scored,
                  (double)(clock() - start) / CLOCKS_PER_SEC);
    if (!(fabs(got / want - 1) <= g->limit))
        fail_msg("%s: expected a perplexity within %g %% of %.4f, got %.4f", cpu_features_name(isa),
                 100 * g->limit, want, got);
}

static bool find_model(char *out, size_t cap)
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && cache[0])
        (void)snprintf(out, cap, "%s/" MODEL, cache);
    else
        (void)snprintf(out, cap, "%s/.cache/" MODEL, home ? home : "");
    return file_exists(out);
}

static void test_perplexity_smollm2(void **state)
{
    (void)state;
    golden g = {0};
    if (!find_model(g.model_path, sizeof(g.model_path))) {
        print_message("no %s; scripts/fetch_model gets it\n", g.model_path);
        skip();
    }
    encode_text(&g);
    read_golden(&g);
    const kernel_ops *ops;
    for (int isa = CPU_ISA_NEON; isa > CPU_ISA_REF; isa--) {
        if (ops_cpu_get(&ops, (cpu_isa)isa) != PGD_OK)
            continue;
        measure(&g, (cpu_isa)isa);
        if (!ALL_LEVELS)
            break;
    }
    mem_free(g.ids);
}

int main(void)
{
    thread_set_flush_denormals();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_perplexity_smollm2),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
