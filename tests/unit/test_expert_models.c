/* Files that keep the same experts in different forms: the same rows and biases whichever way they
 * are read, the same bits of logits; and what MXFP4 does to them at the levels that round
 * activations for it.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/model/expert_source.h"
#include "common/thread.h"
#include "tests/unit/decoder_rig.h"

#define MODELS "tests/data/models/"

enum { MAX_ROW_BYTES = 4096, N_TOKENS = 40 };

static model_file *open_model(const char *path)
{
    model_file *f;
    pgd_why why = {{0}};
    DECODER_RIG_CHECK(model_file_open(&f, path, &why) == PGD_OK, why);
    DECODER_RIG_CHECK(model_file_check_runnable(f, &why) == PGD_OK, why);
    return f;
}

static expert_source find(const model_file *f, int32_t layer, int32_t expert, expert_part part)
{
    expert_source s;
    pgd_why why = {{0}};
    DECODER_RIG_CHECK(expert_source_find(&s, f, layer, expert, part, &why) == PGD_OK, why);
    return s;
}

static void compare_part(const model_file *a, const model_file *b, int32_t layer, int32_t expert,
                         expert_part part)
{
    expert_source x = find(a, layer, expert, part), y = find(b, layer, expert, part);
    assert_int_equal(x.type, y.type);
    assert_int_equal(x.n_rows, y.n_rows);
    assert_int_equal(x.n_cols, y.n_cols);
    size_t row_bytes = dtype_row_bytes(x.type, x.n_cols);
    size_t n_bytes = row_bytes * (size_t)x.n_rows;
    uint8_t *whole = malloc(n_bytes), *pieces = malloc(n_bytes);
    assert_true(whole != NULL && pieces != NULL);
    expert_source_read(whole, &x, 0, x.n_rows);
    for (int32_t row = 0, n; row < y.n_rows; row += n) {
        n = PGD_MIN(1 + row % 7, y.n_rows - row);
        expert_source_read(pieces + (size_t)row * row_bytes, &y, row, n);
    }
    assert_memory_equal(whole, pieces, n_bytes);
    const expert_source *sources[] = {&x, &y};
    for (int i = 0; i < 2; i++) {
        const void *rows = expert_source_get_rows(sources[i]);
        if (rows != NULL)
            assert_memory_equal(rows, whole, n_bytes);
    }
    if (model_file_get_config(a)->expert_bias) {
        float *bias = (float *)(void *)calloc((size_t)x.n_rows * 2, sizeof(float));
        pgd_why why = {{0}};
        assert_non_null(bias);
        DECODER_RIG_CHECK(expert_source_read_bias(bias, a, layer, expert, part, &why) == PGD_OK,
                          why);
        DECODER_RIG_CHECK(
            expert_source_read_bias(bias + x.n_rows, b, layer, expert, part, &why) == PGD_OK, why);
        assert_memory_equal(bias, bias + x.n_rows, (size_t)x.n_rows * sizeof(float));
        free(bias);
    }
    free(whole);
    free(pieces);
}

static void compare_sources(const char *path_a, expert_form form_a, const char *path_b,
                            expert_form form_b)
{
    model_file *a = open_model(path_a), *b = open_model(path_b);
    const model_config *cfg = model_file_get_config(a);
    assert_int_equal(cfg->expert_form, form_a);
    assert_int_equal(model_file_get_config(b)->expert_form, form_b);
    for (int32_t layer = 0; layer < cfg->n_layers; layer++) {
        for (int32_t e = 0; cfg->layer_has_experts[layer] && e < cfg->n_experts; e++) {
            for (int part = EXPERT_PART_GATE; part <= EXPERT_PART_DOWN; part++)
                compare_part(a, b, layer, e, (expert_part)part);
        }
    }
    model_file_close(a);
    model_file_close(b);
}

static void test_expert_models_have_the_same_rows_in_every_form(void **state)
{
    (void)state;
    compare_sources(MODELS "mixtral-tiny", EXPERT_FORM_APART,
                    MODELS "mixtral-tiny/mixtral-tiny.f32.gguf", EXPERT_FORM_STACKED);
    compare_sources(MODELS "qwen3moe-tiny", EXPERT_FORM_FUSED,
                    MODELS "qwen3moe-tiny/qwen3moe-tiny.f32.gguf", EXPERT_FORM_STACKED);
    compare_sources(MODELS "gptoss-tiny", EXPERT_FORM_TURNED,
                    MODELS "gptoss-tiny/gptoss-tiny.f32.gguf", EXPERT_FORM_STACKED);
    compare_sources(MODELS "gptoss-mxfp4-tiny", EXPERT_FORM_MXFP4,
                    MODELS "gptoss-tiny/gptoss-tiny.mxfp4.gguf", EXPERT_FORM_STACKED);
}

/* The blocks of MXFP4 stand for the very numbers of the F32 file. */
static void test_expert_models_mxfp4_stands_for_f32(void **state)
{
    (void)state;
    model_file *f32 = open_model(MODELS "gptoss-tiny"),
               *mx = open_model(MODELS "gptoss-mxfp4-tiny");
    for (int part = EXPERT_PART_GATE; part <= EXPERT_PART_DOWN; part++) {
        expert_source x = find(f32, 1, 3, (expert_part)part), y = find(mx, 1, 3, (expert_part)part);
        assert_int_equal(y.type, DTYPE_MXFP4);
        for (int32_t row = 0; row < x.n_rows; row++) {
            float want[MAX_ROW_BYTES / 4], got[MAX_ROW_BYTES / 4];
            uint8_t blocks[MAX_ROW_BYTES];
            assert_true(x.n_cols <= MAX_ROW_BYTES / 4);
            expert_source_read(want, &x, row, 1);
            expert_source_read(blocks, &y, row, 1);
            dtype_dequantize_row(got, blocks, y.n_cols, y.type);
            for (int32_t k = 0; k < x.n_cols; k++)
                assert_true(got[k] == want[k]);
        }
    }
    model_file_close(f32);
    model_file_close(mx);
}

/* Logits [N_TOKENS, vocab_size] of a fixed prompt; free them. */
static float *compute(const char *path, cpu_isa isa, int32_t *n)
{
    decoder_rig g;
    decoder_rig_opts opts = {
        .isa = isa, .max_rows = N_TOKENS, .max_context = 64, .kv_type = DTYPE_F32};
    token_id tokens[N_TOKENS];
    decoder_rig_open(&g, path, &opts);
    for (int32_t i = 0; i < N_TOKENS; i++)
        tokens[i] = (i * 97 + 13) % g.cfg->vocab_size;
    decoder_rig_start(&g, tokens, N_TOKENS);
    *n = N_TOKENS * g.cfg->vocab_size;
    float *copy = malloc((size_t)*n * sizeof(float));
    assert_non_null(copy);
    memcpy(copy, decoder_rig_forward(&g, N_TOKENS), (size_t)*n * sizeof(float));
    decoder_rig_close(&g);
    return copy;
}

/* Of a half of the tokens. Rounding activations to int8 by blocks of 32 adds at most 1.3 % of its
 * size to the input of a map (test_quantized_models); two maps of three layers are rounded here. A
 * token may be further off: another expert is a jump. */
#define MAX_ROUNDING 0.03

static int order_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median over tokens of the error of their logits, relative to these. */
static double median_error(const float *got, const float *want, int32_t n)
{
    double errors[N_TOKENS];
    for (int32_t t = 0; t < N_TOKENS; t++) {
        double error = 0, size = 0;
        for (int32_t i = 0; i < n; i++, got++, want++) {
            error += ((double)*got - *want) * ((double)*got - *want);
            size += (double)*want * *want;
        }
        errors[t] = sqrt(error / size);
    }
    qsort(errors, N_TOKENS, sizeof(errors[0]), order_doubles);
    return errors[N_TOKENS / 2];
}

static void test_expert_models_mxfp4_at_every_level(void **state)
{
    (void)state;
    for (int isa = CPU_ISA_REF; isa <= CPU_ISA_NEON; isa++) {
        const kernel_ops *ops;
        int32_t n, n_gguf, n_f32;
        if (ops_cpu_get(&ops, (cpu_isa)isa) != PGD_OK)
            continue;
        float *dir = compute(MODELS "gptoss-mxfp4-tiny", (cpu_isa)isa, &n);
        float *gguf = compute(MODELS "gptoss-tiny/gptoss-tiny.mxfp4.gguf", (cpu_isa)isa, &n_gguf);
        float *f32 = compute(MODELS "gptoss-tiny", (cpu_isa)isa, &n_f32);
        assert_true(n == n_gguf && n == n_f32);
        assert_memory_equal(dir, gguf, (size_t)n * sizeof(float));
        double median = median_error(dir, f32, n / N_TOKENS);
        print_message("%s: MXFP4 is %.1e off\n", cpu_features_name((cpu_isa)isa), median);
        assert_true(median <= (isa == CPU_ISA_REF ? 1e-6 : MAX_ROUNDING));
        free(dir);
        free(gguf);
        free(f32);
    }
}

int main(void)
{
    thread_set_flush_denormals();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_expert_models_have_the_same_rows_in_every_form),
        cmocka_unit_test(test_expert_models_mxfp4_stands_for_f32),
        cmocka_unit_test(test_expert_models_mxfp4_at_every_level),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
