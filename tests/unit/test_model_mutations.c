/* Damaged model files, by the thousand: each ends in a message or in a model that can be read,
 * never in a crash.
 *
 * Run under ASan and UBSan this is the real test; in a plain build it still finds missing messages
 * and accepted truncations. Each header field of a GGUF gets hostile values; each number, string
 * and punctuation mark of the JSON files is replaced; files are cut at every header byte and at
 * every kilobyte.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/file.h"
#include "common/model/model_file.h"
#include "tests/unit/model_dir.h"

static volatile uint64_t sink; /* what is read must not be optimised away */

typedef struct tally {
    int n_probes;
    int n_refused;
} tally;

/* Values of the first and last row, and every byte once. */
static uint64_t touch_tensor(const model_tensor *t)
{
    uint64_t sum = 0;
    const uint8_t *bytes = t->data;
    for (size_t i = 0; i < t->n_bytes; i++)
        sum += bytes[i];
    const dtype_info *info = dtype_get_info((int32_t)t->type);
    int64_t row_elems = t->n_dims > 0 ? t->dims[PGD_MIN(t->n_dims, 4) - 1] : 1;
    if (info == NULL || !info->is_weight || t->n_bytes == 0 || row_elems > 65536)
        return sum;
    size_t row_bytes = dtype_row_bytes(t->type, row_elems);
    float *row = malloc((size_t)row_elems * sizeof(float));
    if (row == NULL)
        abort();
    dtype_dequantize_row(row, bytes, row_elems, t->type);
    dtype_dequantize_row(row, bytes + t->n_bytes - row_bytes, row_elems, t->type);
    free(row);
    return sum;
}

static uint64_t touch_metadata(const gguf_file *gguf)
{
    uint64_t sum = 0;
    for (int32_t i = 0; i < gguf_n_values(gguf); i++) {
        gguf_string key;
        const gguf_value *v = gguf_get_value_at(gguf, i, &key);
        gguf_array_iter iter;
        gguf_string s;
        double number;
        gguf_array_begin(&iter, v);
        while (gguf_array_next_string(&iter, &s)) {
            for (size_t j = 0; j < s.n_bytes; j++)
                sum += (uint8_t)s.data[j];
        }
        for (uint64_t j = 0; v->type == GGUF_ARRAY && j < v->n_elems && j < 4096; j++)
            sum += gguf_array_f64(v, j, &number);
    }
    return sum;
}

/* Opens, checks and reads everything. True when the file was refused, and then there must be a
 * message. */
static bool probe(tally *t, const char *where)
{
    model_file *f = NULL;
    pgd_why why = {{0}};
    pgd_why config_why = {{0}};
    pgd_err config_err = PGD_OK;
    t->n_probes++;
    pgd_err err = model_file_open_listing(&f, where, &config_err, &config_why, &why);
    if (err == PGD_OK) {
        uint8_t digest[32];
        for (int32_t i = 0; i < model_file_n_tensors(f); i++)
            sink += touch_tensor(model_file_get_tensor_at(f, i));
        if (model_file_get_gguf(f) != NULL)
            sink += touch_metadata(model_file_get_gguf(f));
        assert_int_equal(model_file_fingerprint(f, digest), PGD_OK);
        if (config_err != PGD_OK) {
            err = config_err;
            why = config_why;
        } else {
            err = model_file_check_runnable(f, &why);
        }
    } else {
        assert_null(f);
    }
    model_file_close(f);
    if (err == PGD_OK)
        return false;
    t->n_refused++;
    if (why.text[0] == '\0')
        fail_msg("refused with error %d and no message", (int)err);
    return true;
}

static void check_untouched_runs(const char *where)
{
    tally t = {0};
    if (probe(&t, where))
        fail_msg("%s is refused before any damage", where);
}

static void write_at(int fd, size_t at, const void *data, size_t n_bytes)
{
    if (pwrite(fd, data, n_bytes, (off_t)at) != (ssize_t)n_bytes)
        abort();
}

static int open_file(const char *where)
{
    int fd = open(where, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        abort();
    return fd;
}

static void test_model_mutations_gguf_every_field(void **state)
{
    (void)state;
    builder b;
    tally t = {0};
    builder_llama(&b);
    builder_write(path, b.data, b.n_bytes);
    check_untouched_runs(path);
    int fd = open_file(path);
    for (int i = 0; i < b.n_fields; i++) {
        uint64_t was = 0;
        const builder_field *field = &b.fields[i];
        memcpy(&was, b.data + field->at, (size_t)field->n_bytes);
        const uint64_t values[] = {0,
                                   1,
                                   UINT64_MAX,
                                   UINT64_MAX - 7,
                                   UINT64_C(1) << 31,
                                   (UINT64_C(1) << 31) - 1,
                                   UINT64_C(0xffffffff),
                                   UINT64_C(1) << 32,
                                   (UINT64_C(1) << 42) + 1,
                                   UINT64_C(1) << 60,
                                   UINT64_C(1) << 63,
                                   (UINT64_C(1) << 63) - 1,
                                   was + 1,
                                   was - 1,
                                   was * 2,
                                   was ^ 0x80,
                                   UINT64_C(0x7fc00000) /* NaN in F32 */};
        for (size_t j = 0; j < PGD_ARRAY_LEN(values); j++) {
            write_at(fd, field->at, &values[j], (size_t)field->n_bytes);
            (void)probe(&t, path);
        }
        write_at(fd, field->at, &was, (size_t)field->n_bytes);
    }
    (void)close(fd);
    builder_free(&b);
    check_untouched_runs(path);
    assert_true(t.n_probes > 2000);
    assert_true(t.n_refused > t.n_probes / 2);
}

static void test_model_mutations_gguf_random_bytes(void **state)
{
    (void)state;
    builder b;
    tally t = {0};
    uint64_t seed = 12345;
    builder_llama(&b);
    builder_write(path, b.data, b.n_bytes);
    int fd = open_file(path);
    for (int round = 0; round < 2000; round++) {
        size_t at[4];
        int n = 1 + round % 4;
        for (int i = 0; i < n; i++) {
            seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
            at[i] = (size_t)(seed >> 33) % b.header_bytes;
            uint8_t byte = (uint8_t)(seed >> 24);
            write_at(fd, at[i], &byte, 1);
        }
        (void)probe(&t, path);
        for (int i = 0; i < n; i++)
            write_at(fd, at[i], b.data + at[i], 1);
    }
    (void)close(fd);
    builder_free(&b);
    check_untouched_runs(path);
    assert_true(t.n_refused > 500);
}

/* Shortens the file step by step: at every kilobyte, and at every byte once only the header is
 * left. */
static void cut_everywhere(tally *t, const char *file, const char *where, size_t n_bytes,
                           size_t header_bytes)
{
    for (size_t n = n_bytes - 1;;) {
        if (truncate(file, (off_t)n) != 0)
            abort();
        if (!probe(t, where))
            fail_msg("%s cut to %zu of %zu bytes is accepted", file, n, n_bytes);
        if (n == 0)
            break;
        if (n <= header_bytes || n % 1024 == 0)
            n = n > header_bytes + 1024 ? n - 1024 : n - 1;
        else
            n = n / 1024 * 1024 > header_bytes ? n / 1024 * 1024 : n - 1;
    }
}

static void test_model_mutations_gguf_truncated(void **state)
{
    (void)state;
    builder b;
    tally t = {0};
    builder_llama(&b);
    builder_write(path, b.data, b.n_bytes);
    cut_everywhere(&t, path, path, b.n_bytes, b.header_bytes);
    assert_true((size_t)t.n_probes > b.header_bytes);
    builder_free(&b);
}

/* --- JSON: every number, string and mark replaced --------------------------------------------- */

typedef void (*try_fn)(tally *t, const char *text, void *arg);

/* text with [at, at + n_old) replaced. */
static void try_replaced(tally *t, const char *text, size_t at, size_t n_old, const char *with,
                         try_fn fn, void *arg)
{
    size_t n_text = strlen(text);
    char *mutated = malloc(n_text - n_old + strlen(with) + 1);
    if (mutated == NULL)
        abort();
    memcpy(mutated, text, at);
    strcpy(mutated + at, with);
    strcat(mutated, text + at + n_old);
    fn(t, mutated, arg);
    free(mutated);
}

static void mutate_json(tally *t, const char *text, try_fn fn, void *arg)
{
    static const char *const numbers[] = {"0",
                                          "-1",
                                          "1",
                                          "2147483647",
                                          "2147483648",
                                          "4294967295",
                                          "4398046511105",
                                          "9007199254740993",
                                          "9223372036854775807",
                                          "9223372036854775808",
                                          "18446744073709551616",
                                          "1e308",
                                          "1e999",
                                          "0.5",
                                          "null",
                                          "true",
                                          "[]",
                                          "{}",
                                          "[0]",
                                          "\"x\"",
                                          "NaN",
                                          ""};
    static const char *const strings[] = {
        "\"\"",    "\"x\"",      "7",           "null",        "[]",
        "{}",      "[[[[[[[[[[", "\"\\u0000\"", "\"\\ud800\"", "\"../x.safetensors\"",
        "\"\xff\""};
    static const char *const marks[] = {"", "{", "}", "[", "]", ":", ",", "\"", "0"};
    for (size_t i = 0; text[i] != '\0';) {
        size_t n_digits = strspn(text + i, "0123456789.e-");
        size_t n_string = 0;
        if (text[i] == '"')
            n_string = strcspn(text + i + 1, "\"") + 2;
        if (n_string > 0) {
            for (size_t j = 0; j < PGD_ARRAY_LEN(strings); j++)
                try_replaced(t, text, i, n_string, strings[j], fn, arg);
            i += n_string;
        } else if (n_digits > 0) {
            for (size_t j = 0; j < PGD_ARRAY_LEN(numbers); j++)
                try_replaced(t, text, i, n_digits, numbers[j], fn, arg);
            i += n_digits;
        } else {
            for (size_t j = 0; j < PGD_ARRAY_LEN(marks); j++)
                try_replaced(t, text, i, 1, marks[j], fn, arg);
            i++;
        }
    }
}

/* A complete llama of one layer: hidden size 8, 2 heads of 4, 1 KV head, vocabulary 16. */
static const char hf_config[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":8,\"num_hidden_layers\":1,"
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"intermediate_size\":8,\"vocab_size\":16,"
    "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"eos_token_id\":[2,3],\"bos_token_id\":"
    "1,"
    "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
    "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":32},\"rope_theta\":10000.0,"
    "\"tie_word_embeddings\":true,\"attention_bias\":false}";

/* The members of models whose layers differ, in the newer spelling. */
static const char hybrid_config[] =
    "{\"architectures\":[\"Gemma3ForCausalLM\"],\"hidden_size\":8,\"num_hidden_layers\":2,"
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":4,\"intermediate_size\":8,"
    "\"vocab_size\":16,\"sliding_window\":24,\"query_pre_attn_scalar\":4,"
    "\"attn_logit_softcapping\":null,\"final_logit_softcapping\":30.0,"
    "\"layer_types\":[\"sliding_attention\",\"full_attention\"],\"rope_parameters\":{"
    "\"sliding_attention\":{\"rope_type\":\"default\",\"rope_theta\":10000.0},"
    "\"full_attention\":{\"rope_type\":\"linear\",\"factor\":8.0,\"rope_theta\":1000000.0}}}";

static const char hf_generation[] =
    "{\"eos_token_id\":[2,4],\"temperature\":0.6,\"top_p\":0.9,\"top_k\":40,\"min_p\":0.1,"
    "\"repetition_penalty\":1.1}";

#define T(name, shape, begin, end)                                                                 \
    "\"" name "\":{\"dtype\":\"F16\",\"shape\":[" shape "],\"data_offsets\":[" #begin "," #end "]" \
    "}"

/* clang-format off */
static const char st_header[] =
    "{\"__metadata__\":{\"format\":\"pt\"},"
    T("model.embed_tokens.weight", "16,8", 0, 256) ","
    T("model.layers.0.input_layernorm.weight", "8", 256, 272) ","
    T("model.layers.0.self_attn.q_proj.weight", "8,8", 272, 400) ","
    T("model.layers.0.self_attn.k_proj.weight", "4,8", 400, 464) ","
    T("model.layers.0.self_attn.v_proj.weight", "4,8", 464, 528) ","
    T("model.layers.0.self_attn.o_proj.weight", "8,8", 528, 656) ","
    T("model.layers.0.post_attention_layernorm.weight", "8", 656, 672) ","
    T("model.layers.0.mlp.gate_proj.weight", "8,8", 672, 800) ","
    T("model.layers.0.mlp.up_proj.weight", "8,8", 800, 928) ","
    T("model.layers.0.mlp.down_proj.weight", "8,8", 928, 1056) ","
    T("model.norm.weight", "8", 1056, 1072)
    "}";
/* clang-format on */

enum { ST_DATA_BYTES = 1072 };

static void write_hf_dir(void)
{
    builder_remove_dir(dir);
    if (mkdir(dir, 0700) != 0)
        abort();
    builder_write_text(dir, "config.json", hf_config);
    builder_write_text(dir, "generation_config.json", hf_generation);
    builder_write_safetensors(dir, "model.safetensors", st_header, ST_DATA_BYTES);
}

static void try_text_file(tally *t, const char *text, void *arg)
{
    builder_write_text(dir, arg, text);
    (void)probe(t, dir);
}

static void try_header(tally *t, const char *text, void *arg)
{
    (void)arg;
    builder_write_safetensors(dir, "model.safetensors", text, ST_DATA_BYTES);
    (void)probe(t, dir);
}

static void test_model_mutations_safetensors_header(void **state)
{
    (void)state;
    tally t = {0};
    write_hf_dir();
    check_untouched_runs(dir);
    mutate_json(&t, st_header, try_header, NULL);
    assert_true(t.n_probes > 1000);
    assert_true(t.n_refused > t.n_probes / 2);
}

static void test_model_mutations_safetensors_length(void **state)
{
    (void)state;
    tally t = {0};
    char file[96];
    uint64_t right = sizeof(st_header) - 1;
    write_hf_dir();
    (void)snprintf(file, sizeof(file), "%s/model.safetensors", dir);
    int fd = open_file(file);
    const uint64_t values[] = {0,
                               1,
                               right - 1,
                               right + 1,
                               right + ST_DATA_BYTES,
                               right + ST_DATA_BYTES + 1,
                               1u << 31,
                               UINT64_C(1) << 32,
                               (UINT64_C(1) << 42) + 1,
                               UINT64_C(1) << 63,
                               UINT64_MAX - 7,
                               UINT64_MAX};
    for (size_t i = 0; i < PGD_ARRAY_LEN(values); i++) {
        write_at(fd, 0, &values[i], 8);
        assert_true(probe(&t, dir));
    }
    for (unsigned bit = 0; bit < 64; bit++) {
        uint64_t value = right ^ (UINT64_C(1) << bit);
        write_at(fd, 0, &value, 8);
        assert_true(probe(&t, dir));
    }
    (void)close(fd);
}

static void test_model_mutations_safetensors_truncated(void **state)
{
    (void)state;
    tally t = {0};
    char file[96];
    write_hf_dir();
    (void)snprintf(file, sizeof(file), "%s/model.safetensors", dir);
    cut_everywhere(&t, file, dir, 8 + sizeof(st_header) - 1 + ST_DATA_BYTES,
                   8 + sizeof(st_header) - 1);
    assert_true(t.n_probes > (int)sizeof(st_header));
}

static void test_model_mutations_config_files(void **state)
{
    (void)state;
    tally t = {0};
    char name[32] = "config.json";
    write_hf_dir();
    mutate_json(&t, hf_config, try_text_file, name);
    builder_write_text(dir, name, hf_config);
    (void)snprintf(name, sizeof(name), "generation_config.json");
    mutate_json(&t, hf_generation, try_text_file, name);
    builder_write_text(dir, name, hf_generation);
    check_untouched_runs(dir);
    assert_true(t.n_refused > t.n_probes / 2);
}

static void test_model_mutations_hybrid_config(void **state)
{
    (void)state;
    tally t = {0};
    char name[] = "config.json";
    write_hf_dir();
    mutate_json(&t, hybrid_config, try_text_file, name);
    assert_true(t.n_refused > t.n_probes / 2);
}

static void test_model_mutations_shard_index(void **state)
{
    (void)state;
    static const char index[] =
        "{\"metadata\":{\"total_size\":1072},\"weight_map\":{\"model.norm.weight\":"
        "\"model-1.safetensors\",\"model.embed_tokens.weight\":\"model-1.safetensors\"}}";
    tally t = {0};
    char name[] = "model.safetensors.index.json";
    write_hf_dir();
    builder_write_safetensors(dir, "model-1.safetensors", st_header, ST_DATA_BYTES);
    builder_write_text(dir, name, index);
    check_untouched_runs(dir);
    mutate_json(&t, index, try_text_file, name);
    assert_true(t.n_refused > t.n_probes / 2);
}

/* --- the tiny models of the tree -------------------------------------------------------------- */

static void test_model_mutations_tiny_gguf(void **state)
{
    (void)state;
    tally t = {0};
    char *data;
    size_t n_bytes;
    pgd_why why = {{0}};
    if (file_read(&data, &n_bytes, "tests/data/models/qwen3-tiny/qwen3-tiny.f16.gguf", 1u << 20,
                  &why) != PGD_OK)
        fail_msg("%s", why.text);
    write_hf_dir();
    builder_write(path, data, n_bytes);
    check_untouched_runs(path);
    int fd = open_file(path);
    /* Every 5th byte of what is certainly header, so that counts, lengths and types of real
     * metadata are hit. */
    for (size_t i = 0; i < 4096; i += 5) {
        static const uint8_t bytes[] = {0x00, 0xff, 0x80};
        for (size_t j = 0; j < PGD_ARRAY_LEN(bytes); j++) {
            write_at(fd, i, &bytes[j], 1);
            (void)probe(&t, path);
        }
        write_at(fd, i, data + i, 1);
    }
    (void)close(fd);
    check_untouched_runs(path);
    cut_everywhere(&t, path, path, n_bytes, 512);
    free(data);
}

/* The file's text as a string, which must be freed. */
static char *read_text(const char *from, const char *name)
{
    char file[160], *data;
    size_t n_bytes;
    pgd_why why = {{0}};
    (void)snprintf(file, sizeof(file), "%s/%s", from, name);
    if (file_read(&data, &n_bytes, file, 1u << 20, &why) != PGD_OK)
        fail_msg("%s", why.text);
    char *text = realloc(data, n_bytes + 1);
    if (text == NULL)
        abort();
    text[n_bytes] = '\0';
    return text;
}

static void damage_tiny_directory(const char *from, bool damages_config)
{
    static const char *const names[] = {"config.json", "generation_config.json",
                                        "model.safetensors"};
    tally t = {0};
    char file[160];
    size_t n_bytes = 0;
    uint64_t header_bytes = 0;
    write_hf_dir();
    for (size_t i = 0; i < PGD_ARRAY_LEN(names); i++) {
        char *data;
        pgd_why why = {{0}};
        (void)snprintf(file, sizeof(file), "%s/%s", from, names[i]);
        if (file_read(&data, &n_bytes, file, 1u << 20, &why) != PGD_OK)
            fail_msg("%s", why.text);
        (void)snprintf(file, sizeof(file), "%s/%s", dir, names[i]);
        builder_write(file, data, n_bytes);
        memcpy(&header_bytes, data, 8);
        free(data);
    }
    check_untouched_runs(dir);
    cut_everywhere(&t, file, dir, n_bytes, 64);
    assert_true(header_bytes < n_bytes && (size_t)t.n_probes > n_bytes / 1024);
    for (int i = 0; damages_config && i < 2; i++) {
        char name[32];
        char *text = read_text(from, names[i]);
        (void)snprintf(name, sizeof(name), "%s", names[i]);
        mutate_json(&t, text, try_text_file, name);
        builder_write_text(dir, name, text);
        free(text);
    }
}

static void test_model_mutations_tiny_directory(void **state)
{
    (void)state;
    damage_tiny_directory("tests/data/models/qwen3-tiny", false);
}

static void test_model_mutations_encoder_decoder(void **state)
{
    (void)state;
    damage_tiny_directory("tests/data/models/bart-tiny", true);
}

static void test_model_mutations_tiny_hybrid(void **state)
{
    (void)state;
    damage_tiny_directory("tests/data/models/gemma3-tiny", true);
}

static void test_model_mutations_experts(void **state)
{
    (void)state;
    damage_tiny_directory("tests/data/models/gptoss-tiny", true);
    damage_tiny_directory("tests/data/models/mixtral-tiny", false);
    damage_tiny_directory("tests/data/models/qwen3moe-tiny", true);
}

static void test_model_mutations_wrapper(void **state)
{
    (void)state;
    damage_tiny_directory("tests/data/models/llama4-wrapped-tiny", true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_mutations_gguf_every_field),
        cmocka_unit_test(test_model_mutations_gguf_random_bytes),
        cmocka_unit_test(test_model_mutations_gguf_truncated),
        cmocka_unit_test(test_model_mutations_safetensors_header),
        cmocka_unit_test(test_model_mutations_safetensors_length),
        cmocka_unit_test(test_model_mutations_safetensors_truncated),
        cmocka_unit_test(test_model_mutations_config_files),
        cmocka_unit_test(test_model_mutations_experts),
        cmocka_unit_test(test_model_mutations_hybrid_config),
        cmocka_unit_test(test_model_mutations_shard_index),
        cmocka_unit_test(test_model_mutations_tiny_gguf),
        cmocka_unit_test(test_model_mutations_tiny_directory),
        cmocka_unit_test(test_model_mutations_encoder_decoder),
        cmocka_unit_test(test_model_mutations_tiny_hybrid),
        cmocka_unit_test(test_model_mutations_wrapper),
    };
    return cmocka_run_group_tests(tests, make_model_dir, remove_model_dir);
}
