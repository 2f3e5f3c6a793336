/* What `paged inspect` says of sound, foreign, damaged and hostile files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/inspect.h"
#include "tests/unit/model_dir.h"

/* The text for a path; free it. */
static char *inspect(const char *where, int wanted_status)
{
    char *text = NULL;
    size_t n_bytes = 0;
    FILE *out = open_memstream(&text, &n_bytes);
    if (out == NULL)
        abort();
    int status = inspect_run(where, out);
    (void)fclose(out);
    if (status != wanted_status)
        fail_msg("status %d, expected %d:\n%s", status, wanted_status, text);
    return text;
}

static void check_has(const char *text, const char *wanted)
{
    if (strstr(text, wanted) == NULL)
        fail_msg("lacks \"%s\":\n%s", wanted, text);
}

static void check_ends(const char *text, const char *wanted)
{
    size_t n_text = strlen(text);
    size_t n_wanted = strlen(wanted);
    if (n_text < n_wanted || strcmp(text + n_text - n_wanted, wanted) != 0)
        fail_msg("does not end in \"%s\":\n%s", wanted, text);
}

static void test_inspect_runnable_models(void **state)
{
    (void)state;
    char *text = inspect("tests/data/models/llama31-tiny", INSPECT_RUNNABLE);
    check_has(text, "kind            Hugging Face directory\n");
    check_has(text, "architecture    llama\n");
    check_has(text, "llama3 scaling by 8");
    check_has(text, "blk.*.attn_q.weight ");
    check_ends(text, "\nthis build can run it: yes\n");
    free(text);
    text = inspect("tests/data/models/llama31-tiny/llama31-tiny.f16.gguf", INSPECT_RUNNABLE);
    check_has(text, "GGUF version 3");
    check_has(text, "frequency factors in the file");
    check_ends(text, "\nthis build can run it: yes\n");
    free(text);
    text = inspect("tests/data/models/gptoss-mxfp4-tiny", INSPECT_RUNNABLE);
    check_has(text, "2 of 6 experts of 32 for each token in 3 layers, clamped gate\n");
    check_has(text, "full in 1 of 3 layers; scale 0.25, a sink for each head");
    check_has(text, "yarn scaling by 8 from a context of 256\n");
    check_has(text, "blk.*.ffn_gate_up_exps.blocks");
    free(text);
    text = inspect("tests/data/models/qwen3moe-tiny/qwen3moe-tiny.f16.gguf", INSPECT_RUNNABLE);
    check_has(text, "3 of 6 experts of 48 for each token in 2 layers, 96 in the others, SiLU gate");
    free(text);
    text = inspect("tests/data/models/mixtral-tiny", INSPECT_RUNNABLE);
    check_has(text, "blk.*.ffn_down.*.weight");
    free(text);
}

static void test_inspect_hybrid_models(void **state)
{
    (void)state;
    static const char *const forms[] = {"tests/data/models/gemma2-tiny",
                                        "tests/data/models/gemma2-tiny/gemma2-tiny.f32.gguf"};
    char *text;
    for (size_t i = 0; i < PGD_ARRAY_LEN(forms); i++) {
        text = inspect(forms[i], INSPECT_RUNNABLE);
        check_has(text,
                  "attention       sliding window of 24 in 2 of 4 layers, full in 2 of 4 layers; "
                  "scale 0.204124, soft cap 4\n");
        check_has(text, "64, GELU gate; norms after attention and feed-forward too\n");
        check_has(text,
                  "512, scaled embedding, output tied to the embedding, logits' soft cap 8\n");
        free(text);
    }
    text = inspect("tests/data/models/gemma3-tiny", INSPECT_RUNNABLE);
    check_has(text, "sliding window of 24 in 6 of 7 layers");
    check_has(
        text,
        "base 2000, 16 of 16 values of a head, linear scaling by 2; base 200 in sliding layers\n");
    free(text);
}

static void test_inspect_text_part(void **state)
{
    (void)state;
    char *text = inspect("tests/data/models/llama4-wrapped-tiny", INSPECT_RUNNABLE);
    check_has(text, "architecture    llama4_text\n");
    check_has(text, "images          not supported; of this model only the text part is served\n");
    check_has(text, "1 of 4 experts of 32");
    assert_null(strstr(text, "vision"));
    assert_null(strstr(text, "projector"));
    free(text);
}

static void test_inspect_foreign_architecture(void **state)
{
    (void)state;
    builder b;
    builder_begin(&b);
    builder_kv_string(&b, "general.architecture", "mamba\033[2J");
    builder_tensor(&b, "blk.0.ssm.weight", DTYPE_F32, 4, 8);
    builder_tensor(&b, "blk.1.ssm.weight", DTYPE_F32, 4, 8);
    builder_tensor(&b, "blk.1.other.weight", (dtype)99, 4, 8);
    builder_end(&b);
    builder_write(path, b.data, b.n_bytes);
    builder_free(&b);
    char *text = inspect(path, INSPECT_NOT_RUNNABLE);
    check_has(text, "architecture    mamba?[2J\n");
    check_has(text, "blk.*.ssm.weight              2  [4, 8]            F32            256 B\n");
    check_has(text, "type 99");
    check_has(text, "this build can run it: no: ");
    check_has(
        text,
        "which runs llama, qwen2, qwen3, smollm3, gemma2, gemma3, qwen3moe, gpt-oss, llama4\n");
    assert_null(strchr(text, '\033'));
    free(text);
}

static void test_inspect_damaged_file(void **state)
{
    (void)state;
    builder b;
    builder_llama(&b);
    builder_write(path, b.data, b.n_bytes - 100);
    builder_free(&b);
    char *text = inspect(path, INSPECT_UNREADABLE);
    check_has(text, "this build can run it: no: ");
    check_has(text, "at tensor \"output.weight\"");
    free(text);
    text = inspect("/no/such/model.gguf", INSPECT_UNREADABLE);
    check_has(text, "/no/such/model.gguf");
    free(text);
    text = inspect("/no/such/model.safetensors", INSPECT_UNREADABLE);
    check_has(text, "/no/such/model.safetensors");
    free(text);
}

static void test_inspect_lone_safetensors(void **state)
{
    (void)state;
    char file[96];
    (void)snprintf(file, sizeof(file), "%s/x.safetensors", dir);
    builder_write_safetensors(
        dir, "x.safetensors",
        "{\"layers.0.w\":{\"dtype\":\"F8_E4M3\",\"shape\":[2,4],\"data_offsets\":[0,8]},"
        "\"layers.1.w\":{\"dtype\":\"F8_E4M3\",\"shape\":[2,4],\"data_offsets\":[8,16]}}",
        16);
    char *text = inspect(file, INSPECT_NOT_RUNNABLE);
    check_has(text, "layers.*.w                    2  [2, 4]            F8_E4M3         16 B\n");
    check_has(text, "give the directory");
    free(text);
}

/* Thousands of names without a common pattern: the table is cut, not the program. */
static void test_inspect_many_patterns(void **state)
{
    (void)state;
    builder *b = malloc(sizeof(*b));
    if (b == NULL)
        abort();
    builder_begin(b);
    for (int i = 0; i < 1100; i++) {
        char name[32];
        (void)snprintf(name, sizeof(name), "t%d", i);
        b->n_fields = 0;
        builder_tensor(b, name, DTYPE_F32, 0, 8);
    }
    builder_end(b);
    builder_write(path, b->data, b->n_bytes);
    builder_free(b);
    free(b);
    char *text = inspect(path, INSPECT_UNREADABLE);
    check_has(text, "tensors         1100,");
    check_has(text, "... and 76 more tensors\n");
    check_has(text, "general.architecture");
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_inspect_runnable_models),
        cmocka_unit_test(test_inspect_hybrid_models),
        cmocka_unit_test(test_inspect_text_part),
        cmocka_unit_test(test_inspect_foreign_architecture),
        cmocka_unit_test(test_inspect_damaged_file),
        cmocka_unit_test(test_inspect_lone_safetensors),
        cmocka_unit_test(test_inspect_many_patterns),
    };
    return cmocka_run_group_tests(tests, make_model_dir, remove_model_dir);
}
