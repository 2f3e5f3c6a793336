/* The common view of a model: config from GGUF metadata and from config.json, tensor names, what
 * makes a model runnable, fingerprint. */
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
#include "common/model/model_file.h"
#include "common/model/model_hf_names.h"
#include "common/model/model_layout.h"
#include "tests/unit/model_dir.h"

static model_file *open_path_ok(const char *where)
{
    model_file *f = NULL;
    pgd_why why = {{0}};
    pgd_err err = model_file_open(&f, where, &why);
    if (err != PGD_OK)
        fail_msg("model_file_open %s: %d %s", where, (int)err, why.text);
    return f;
}

static model_file *open_ok(builder *b)
{
    builder_end(b);
    builder_write(path, b->data, b->n_bytes);
    builder_free(b);
    return open_path_ok(path);
}

static void open_path_fails(const char *where, pgd_err wanted_err, const char *wanted)
{
    model_file *f = NULL;
    pgd_why why = {{0}};
    pgd_err err = model_file_open(&f, where, &why);
    check_refusal(err, wanted_err, &why, wanted);
    assert_null(f);
}

static void open_fails(builder *b, pgd_err wanted_err, const char *wanted)
{
    builder_end(b);
    builder_write(path, b->data, b->n_bytes);
    builder_free(b);
    open_path_fails(path, wanted_err, wanted);
}

static void check_runnable(const model_file *f)
{
    pgd_why why = {{0}};
    if (model_file_check_runnable(f, &why) != PGD_OK)
        fail_msg("not runnable: %s", why.text);
}

static void check_not_runnable(model_file *f, pgd_err wanted_err, const char *wanted)
{
    pgd_why why = {{0}};
    pgd_err err = model_file_check_runnable(f, &why);
    check_refusal(err, wanted_err, &why, wanted);
    model_file_close(f);
}

static void test_model_file_gguf_config(void **state)
{
    (void)state;
    builder b;
    builder_begin(&b);
    builder_llama_meta(&b);
    builder_llama_tokenizer(&b);
    builder_kv_f32(&b, "general.sampling.temp", 0.5f);
    builder_kv_u32(&b, "general.sampling.top_k", 20);
    builder_llama_tensors(&b);
    model_file *f = open_ok(&b);
    const model_config *c = model_file_get_config(f);
    assert_string_equal(c->arch, "llama");
    assert_string_equal(c->name, "test model");
    assert_int_equal(c->n_layers, 1);
    assert_int_equal(c->dim, 256);
    assert_int_equal(c->n_heads, 4);
    assert_int_equal(c->n_kv_heads, 2);
    assert_int_equal(c->head_dim, 64);
    assert_int_equal(c->ffn_dim, 256);
    assert_int_equal(c->vocab_size, 48);
    assert_int_equal(c->max_context, 512);
    assert_true(c->norm_eps == 1e-5f);
    assert_int_equal(c->rope, ROPE_ADJACENT);
    assert_int_equal(c->rope_dim, 64);
    assert_true(c->rope_theta == 50000.0);
    assert_int_equal(c->rope_scaling, ROPE_SCALING_NONE);
    assert_true(c->has_rope_freqs);
    assert_true(c->layer_has_rope[0]);
    assert_false(c->tied_head || c->qkv_bias || c->o_bias || c->mlp_bias || c->qk_norm);
    assert_int_equal(c->bos_id, 1);
    assert_int_equal(c->pad_id, -1);
    assert_int_equal(c->n_eos_ids, 2); /* eos_token_id and the control token <|im_end|> */
    assert_int_equal(c->eos_ids[0], 2);
    assert_int_equal(c->eos_ids[1], 47);
    assert_true(c->has_temperature && c->gen_temperature == 0.5f);
    assert_true(c->has_top_k && c->gen_top_k == 20);
    assert_false(c->has_top_p || c->has_min_p || c->has_repetition_penalty);
    check_runnable(f);
    assert_non_null(model_file_get_gguf(f));
    assert_null(model_file_get_dir(f));
    assert_int_equal(model_file_n_tensors(f), 13);
    const model_tensor *t = model_file_get_tensor(f, "blk.0.ffn_down.weight");
    assert_int_equal(t->type, DTYPE_Q6_K);
    assert_int_equal(t->n_bytes, 256 * 210);
    assert_null(model_file_get_tensor(f, "blk.1.ffn_down.weight"));
    assert_string_equal(model_file_get_tensor_at(f, 0)->name, "token_embd.weight");
    model_file_close(f);
    model_file_close(NULL);
}

/* A model without tensors beyond the embedding, for config questions. */
static void begin_config(builder *b, const char *arch)
{
    static const char *const u32_keys[] = {"block_count", "context_length", "embedding_length",
                                           "feed_forward_length", "attention.head_count"};
    static const uint32_t values[] = {8, 1024, 64, 128, 4};
    char key[96];
    builder_begin(b);
    builder_kv_string(b, "general.architecture", arch);
    for (size_t i = 0; i < PGD_ARRAY_LEN(values); i++) {
        (void)snprintf(key, sizeof(key), "%s.%s", arch, u32_keys[i]);
        builder_kv_u32(b, key, values[i]);
    }
    (void)snprintf(key, sizeof(key), "%s.attention.layer_norm_rms_epsilon", arch);
    builder_kv_f32(b, key, 1e-6f);
    builder_tensor(b, "token_embd.weight", DTYPE_F32, 16, 64);
}

/* Tensors come after all values in a file, so extra values go in by hand: begin, values, then this.
 */
static void begin_values(builder *b, const char *arch)
{
    begin_config(b, arch);
    /* Take the embedding back: it is the last thing written. */
    b->n_bytes -= 8 + strlen("token_embd.weight") + 4 + 16 + 4 + 8;
    b->n_tensors = 0;
    b->next_offset = 0;
}

static void put_embedding(builder *b)
{
    builder_tensor(b, "token_embd.weight", DTYPE_F32, 16, 64);
}

static void test_model_file_gguf_architectures(void **state)
{
    (void)state;
    builder b;
    begin_config(&b, "qwen2");
    model_file *f = open_ok(&b);
    const model_config *c = model_file_get_config(f);
    assert_int_equal(c->rope, ROPE_HALVES);
    assert_true(c->qkv_bias && !c->qk_norm && c->tied_head);
    assert_int_equal(c->n_kv_heads, 4); /* as many as heads when not given */
    assert_int_equal(c->head_dim, 16);
    assert_true(c->rope_theta == 10000.0);
    model_file_close(f);

    begin_values(&b, "qwen3");
    builder_kv_u32(&b, "qwen3.attention.key_length", 32);
    builder_kv_u32(&b, "qwen3.attention.value_length", 32);
    put_embedding(&b);
    f = open_ok(&b);
    c = model_file_get_config(f);
    assert_int_equal(c->rope, ROPE_HALVES);
    assert_int_equal(c->head_dim, 32);
    assert_int_equal(c->rope_dim, 32);
    assert_true(c->qk_norm && !c->qkv_bias);
    model_file_close(f);

    begin_config(&b, "smollm3");
    f = open_ok(&b);
    c = model_file_get_config(f);
    assert_int_equal(c->rope, ROPE_ADJACENT);
    for (int i = 0; i < 8; i++)
        assert_int_equal(c->layer_has_rope[i], i != 3 && i != 7);
    model_file_close(f);

    begin_config(&b, "gemma");
    open_fails(&b, PGD_EUNSUPPORTED,
               "architecture \"gemma\" is not supported by this build, which runs llama, qwen2, "
               "qwen3, smollm3");
    begin_config(&b, "\033[2Jllama");
    open_fails(&b, PGD_EFORMAT, "printable"); /* the keys made of it */
    builder_begin(&b);
    builder_kv_string(&b, "general.architecture", "\033[2J");
    open_fails(&b, PGD_EUNSUPPORTED, "\"?[2J\"");
    builder_begin(&b);
    open_fails(&b, PGD_EFORMAT, "general.architecture");
}

static void test_model_file_gguf_rope_scaling(void **state)
{
    (void)state;
    static const struct {
        const char *type; /* NULL = no key */
        float factor;
        rope_scaling wanted;
    } cases[] = {
        {"linear", 4.0f, ROPE_SCALING_LINEAR}, {NULL, 2.0f, ROPE_SCALING_LINEAR},
        {"none", 4.0f, ROPE_SCALING_NONE},     {"yarn", 1.0f, ROPE_SCALING_NONE},
        {"yarn", 4.0f, ROPE_SCALING_YARN},     {"linear", 1.0f, ROPE_SCALING_NONE},
    };
    builder b;
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        begin_values(&b, "llama");
        if (cases[i].type != NULL)
            builder_kv_string(&b, "llama.rope.scaling.type", cases[i].type);
        builder_kv_f32(&b, "llama.rope.scaling.factor", cases[i].factor);
        put_embedding(&b);
        model_file *f = open_ok(&b);
        const model_config *cfg = model_file_get_config(f);
        assert_int_equal(cfg->rope_scaling, cases[i].wanted);
        if (cases[i].wanted == ROPE_SCALING_YARN) {
            assert_true(fabs(cfg->rope_attention_factor - 1.1386294361119891) < 1e-12);
            assert_true(cfg->rope_beta_fast == 32.0 && cfg->rope_beta_slow == 1.0);
            assert_true(cfg->rope_truncates);
        }
        model_file_close(f);
    }
    begin_values(&b, "llama");
    builder_kv_string(&b, "llama.rope.scaling.type", "longrope");
    builder_kv_f32(&b, "llama.rope.scaling.factor", 2.0f);
    put_embedding(&b);
    open_fails(&b, PGD_EUNSUPPORTED, "llama.rope.scaling.type");
    begin_values(&b, "llama");
    builder_kv_u32(&b, "llama.rope.scaling.type", 1);
    put_embedding(&b);
    open_fails(&b, PGD_EFORMAT, "llama.rope.scaling.type");
}

static void test_model_file_gguf_refuses_bad_metadata(void **state)
{
    (void)state;
    builder b;
    begin_values(&b, "llama");
    builder_kv_u32(&b, "llama.expert_count", 8);
    put_embedding(&b);
    open_fails(&b, PGD_EFORMAT, "llama.expert_used_count");
    begin_values(&b, "llama");
    builder_kv_u32(&b, "llama.expert_count", 8);
    builder_kv_u32(&b, "llama.expert_used_count", 2);
    put_embedding(&b);
    open_fails(&b, PGD_EFORMAT, "ffn_gate_inp.weight");
    begin_values(&b, "llama");
    builder_kv_u32(&b, "llama.expert_count", 8);
    builder_kv_u32(&b, "llama.expert_used_count", 2);
    builder_kv_u32(&b, "llama.expert_shared_count", 1);
    put_embedding(&b);
    open_fails(&b, PGD_EUNSUPPORTED, "1 shared");
    begin_values(&b, "llama");
    builder_kv_u32(&b, "split.count", 3);
    put_embedding(&b);
    open_fails(&b, PGD_EUNSUPPORTED, "one of 3 parts");
    begin_values(&b, "llama");
    builder_kv_u32(&b, "llama.attention.head_count_kv", 3);
    put_embedding(&b);
    open_fails(&b, PGD_EFORMAT, "4 heads and 3 KV heads");
    begin_values(&b, "llama");
    builder_kv_u32(&b, "llama.attention.head_count_kv", 0);
    put_embedding(&b);
    open_fails(&b, PGD_ERANGE, "number of KV heads");
    begin_values(&b, "llama");
    builder_kv_string(&b, "llama.attention.head_count_kv", "2");
    put_embedding(&b);
    open_fails(&b, PGD_EFORMAT, "llama.attention.head_count_kv");
    begin_values(&b, "llama");
    builder_kv_u32(&b, "llama.attention.value_length", 32);
    put_embedding(&b);
    open_fails(&b, PGD_EUNSUPPORTED, "llama.attention.value_length");
    begin_values(&b, "llama");
    builder_kv_u32(&b, "llama.attention.key_length", UINT32_MAX);
    put_embedding(&b);
    open_fails(&b, PGD_ERANGE, "llama.attention.key_length");
    begin_values(&b, "llama");
    builder_kv_f32(&b, "llama.rope.freq_base", NAN);
    put_embedding(&b);
    open_fails(&b, PGD_ERANGE, "rope base frequency");
    begin_values(&b, "llama");
    builder_kv_u32(&b, "llama.rope.dimension_count", 18);
    put_embedding(&b);
    open_fails(&b, PGD_ERANGE, "rotated size");
    begin_values(&b, "llama");
    open_fails(&b, PGD_EFORMAT, "token_embd.weight");
    begin_values(&b, "llama");
    builder_kv_array(&b, "llama.attention.head_count_kv", GGUF_U32, 2);
    builder_u32(&b, 2);
    builder_u32(&b, 4);
    put_embedding(&b);
    open_fails(&b, PGD_EUNSUPPORTED, "same value for all layers");
    begin_values(&b, "llama");
    builder_kv_array(&b, "llama.attention.head_count_kv", GGUF_U32, 2);
    builder_u32(&b, 2);
    builder_u32(&b, 2);
    put_embedding(&b);
    model_file *f = open_ok(&b);
    assert_int_equal(model_file_get_config(f)->n_kv_heads, 2);
    model_file_close(f);
    builder_begin(&b);
    builder_kv_string(&b, "general.architecture", "llama");
    open_fails(&b, PGD_EFORMAT, "llama.block_count");
}

/* B097. */
static void test_model_file_gguf_refuses_ids_outside(void **state)
{
    (void)state;
    static const char *const keys[] = {"eos",     "bos", "unknown",
                                       "padding", "eot", "some_new_kind_of"};
    builder b;
    for (size_t i = 0; i < PGD_ARRAY_LEN(keys); i++) {
        static const uint32_t bad[] = {16, UINT32_MAX};
        for (int j = 0; j < 2; j++) {
            char key[96];
            (void)snprintf(key, sizeof(key), "tokenizer.ggml.%s_token_id", keys[i]);
            begin_values(&b, "llama");
            builder_kv_u32(&b, key, bad[j]);
            put_embedding(&b);
            open_fails(&b, PGD_ERANGE, key);
        }
    }
    begin_values(&b, "llama");
    builder_kv_array(&b, "tokenizer.ggml.tokens", GGUF_STRING, 17);
    for (int i = 0; i < 17; i++)
        builder_string(&b, "x");
    put_embedding(&b);
    open_fails(&b, PGD_EFORMAT, "tokenizer.ggml.tokens");
}

static void test_model_file_check_finds_first_fault(void **state)
{
    (void)state;
    builder b;
    begin_config(&b, "llama");
    check_not_runnable(open_ok(&b), PGD_EFORMAT, "blk.0.attn_norm.weight");

    builder_begin(&b);
    builder_llama_meta(&b);
    builder_llama_tensors(&b);
    builder_tensor(&b, "blk.0.attn_sinks.weight", DTYPE_F32, 0, 4);
    check_not_runnable(open_ok(&b), PGD_EUNSUPPORTED, "blk.0.attn_sinks.weight");

    builder_begin(&b);
    builder_llama_meta(&b);
    builder_llama_tensors(&b);
    builder_tensor(&b, "blk.1.attn_norm.weight", DTYPE_F32, 0, 256); /* beyond block_count */
    check_not_runnable(open_ok(&b), PGD_EUNSUPPORTED, "blk.1.attn_norm.weight");

    builder_begin(&b);
    builder_llama_meta(&b);
    builder_llama_tensors(&b);
    builder_tensor(&b, "blk.0.attn_q.bias", DTYPE_F32, 0, 256); /* q has one, so k and v must */
    check_not_runnable(open_ok(&b), PGD_EFORMAT, "blk.0.attn_k.bias");
}

/* The complete small model with one tensor replaced. */
static model_file *open_with(const char *name, dtype type, int64_t rows, int64_t cols)
{
    static const struct {
        const char *name;
        int64_t rows;
        int64_t cols;
    } all[] = {
        {"token_embd.weight", 48, 256},         {"rope_freqs.weight", 0, 32},
        {"blk.0.attn_norm.weight", 0, 256},     {"blk.0.attn_q.weight", 256, 256},
        {"blk.0.attn_k.weight", 128, 256},      {"blk.0.attn_v.weight", 128, 256},
        {"blk.0.attn_output.weight", 256, 256}, {"blk.0.ffn_norm.weight", 0, 256},
        {"blk.0.ffn_gate.weight", 256, 256},    {"blk.0.ffn_up.weight", 256, 256},
        {"blk.0.ffn_down.weight", 256, 256},    {"output_norm.weight", 0, 256},
    };
    builder b;
    builder_begin(&b);
    builder_llama_meta(&b);
    for (size_t i = 0; i < PGD_ARRAY_LEN(all); i++) {
        if (strcmp(all[i].name, name) == 0)
            builder_tensor(&b, name, type, rows, cols);
        else
            builder_tensor(&b, all[i].name, DTYPE_F32, all[i].rows, all[i].cols);
    }
    return open_ok(&b);
}

static void test_model_file_check_shapes_and_types(void **state)
{
    (void)state;
    model_file *f = open_with("-", DTYPE_F32, 0, 0);
    assert_true(model_file_get_config(f)->tied_head);
    check_runnable(f);
    assert_int_equal(model_file_get_config(f)->main_dtype, DTYPE_F32);
    model_file_close(f);
    check_not_runnable(open_with("blk.0.attn_q.weight", DTYPE_F32, 256, 128), PGD_EFORMAT,
                       "expected shape [256, 256] by the model's config, got [256, 128], at tensor "
                       "\"blk.0.attn_q.weight\"");
    check_not_runnable(open_with("blk.0.attn_q.weight", DTYPE_F32, 0, 256), PGD_EFORMAT,
                       "got [256]");
    check_not_runnable(open_with("blk.0.attn_norm.weight", DTYPE_F32, 1, 256), PGD_EFORMAT,
                       "got [1, 256]");
    check_not_runnable(open_with("blk.0.attn_norm.weight", DTYPE_Q8_0, 0, 256), PGD_EUNSUPPORTED,
                       "expected type F32, F16 or BF16, got Q8_0");
    check_not_runnable(open_with("rope_freqs.weight", DTYPE_F16, 0, 32), PGD_EUNSUPPORTED,
                       "expected type F32");
    check_not_runnable(open_with("blk.0.ffn_up.weight", (dtype)99, 256, 256), PGD_EUNSUPPORTED,
                       "got type 99");
    check_not_runnable(open_with("blk.0.ffn_up.weight", (dtype)23, 256, 256), PGD_EUNSUPPORTED,
                       "got IQ4_XS");
    check_not_runnable(open_with("blk.0.ffn_up.weight", DTYPE_I8, 256, 256), PGD_EUNSUPPORTED,
                       "got I8");
}

static void test_model_file_listing_survives_unknown_config(void **state)
{
    (void)state;
    builder b;
    model_file *f = NULL;
    pgd_err config_err;
    pgd_why config_why = {{0}};
    pgd_why why = {{0}};
    begin_config(&b, "rwkv7");
    builder_end(&b);
    builder_write(path, b.data, b.n_bytes);
    builder_free(&b);
    assert_int_equal(model_file_open_listing(&f, path, &config_err, &config_why, &why), PGD_OK);
    check_refusal(config_err, PGD_EUNSUPPORTED, &config_why, "rwkv7");
    assert_null(model_file_get_config(f));
    assert_int_equal(model_file_n_tensors(f), 1);
    check_not_runnable(f, PGD_EUNSUPPORTED, "config");
}

/* --- Hugging Face directories ----------------------------------------------------------------- */

#define SIZES                                                                                     \
    "\"hidden_size\":64,\"num_hidden_layers\":4,\"num_attention_heads\":4,\"intermediate_size\":" \
    "128,"                                                                                        \
    "\"vocab_size\":32"

static void write_dir(const char *config, const char *generation)
{
    builder_remove_dir(dir);
    if (mkdir(dir, 0700) != 0)
        abort();
    builder_write_safetensors(dir, "model.safetensors",
                              "{\"model.embed_tokens.weight\":{\"dtype\":\"F16\",\"shape\":[2,2],"
                              "\"data_offsets\":[0,8]}}",
                              8);
    builder_write_text(dir, "config.json", config);
    if (generation != NULL)
        builder_write_text(dir, "generation_config.json", generation);
}

static model_config read_dir(const char *config, const char *generation)
{
    write_dir(config, generation);
    model_file *f = open_path_ok(dir);
    assert_string_equal(model_file_get_dir(f), dir);
    assert_null(model_file_get_gguf(f));
    assert_non_null(model_file_get_tensor(f, "token_embd.weight"));
    model_config c = *model_file_get_config(f);
    model_file_close(f);
    return c;
}

static void dir_fails(const char *config, const char *generation, pgd_err wanted_err,
                      const char *wanted)
{
    write_dir(config, generation);
    open_path_fails(dir, wanted_err, wanted);
}

static void test_model_file_hf_llama(void **state)
{
    (void)state;
    model_config c =
        read_dir("{\"architectures\":[\"LlamaForCausalLM\"]," SIZES
                 ",\"num_key_value_heads\":2,\"rms_norm_eps\":1e-5,\"rope_theta\":500000.0,"
                 "\"max_position_embeddings\":4096,\"attention_bias\":true,\"mlp_bias\":true,"
                 "\"tie_word_embeddings\":true,\"bos_token_id\":1,\"pad_token_id\":-1,"
                 "\"eos_token_id\":[2,3],\"rope_scaling\":{\"rope_type\":\"llama3\","
                 "\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
                 "\"original_max_position_embeddings\":1024}}",
                 "{\"eos_token_id\":[3,4],\"temperature\":0.6,\"top_p\":0.9,\"top_k\":40,"
                 "\"repetition_penalty\":1.1,\"do_sample\":true}");
    assert_string_equal(c.arch, "llama");
    assert_int_equal(c.rope, ROPE_HALVES);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.n_kv_heads, 2);
    assert_true(c.rope_theta == 500000.0);
    assert_int_equal(c.rope_scaling, ROPE_SCALING_LLAMA3);
    assert_true(c.rope_factor == 8.0 && c.rope_low_freq_factor == 1.0 &&
                c.rope_high_freq_factor == 4.0);
    assert_int_equal(c.rope_original_context, 1024);
    assert_true(c.qkv_bias && c.o_bias && c.mlp_bias && c.tied_head && !c.qk_norm);
    assert_int_equal(c.bos_id, 1);
    assert_int_equal(c.pad_id, -1);
    assert_int_equal(c.n_eos_ids, 3);
    assert_int_equal(c.eos_ids[0], 2);
    assert_int_equal(c.eos_ids[2], 4);
    assert_true(c.has_temperature && c.gen_temperature == 0.6f);
    assert_true(c.has_top_p && c.gen_top_p == 0.9f);
    assert_true(c.has_top_k && c.gen_top_k == 40);
    assert_true(c.has_repetition_penalty && !c.has_min_p);

    /* Defaults of the class; the newer spelling of rope parameters; "type" for "rope_type". */
    c = read_dir(
        "{\"model_type\":\"llama\"," SIZES
        ",\"eos_token_id\":null,\"rope_parameters\":{\"rope_theta\":7000.0,\"type\":\"linear\","
        "\"factor\":2.0}}",
        NULL);
    assert_int_equal(c.n_kv_heads, 4);
    assert_int_equal(c.max_context, 2048);
    assert_true(c.norm_eps == 1e-6f);
    assert_true(c.rope_theta == 7000.0);
    assert_int_equal(c.rope_scaling, ROPE_SCALING_LINEAR);
    assert_int_equal(c.n_eos_ids, 0);
    assert_false(c.qkv_bias || c.tied_head || c.has_temperature);
}

static void test_model_file_hf_other_architectures(void **state)
{
    (void)state;
    model_config c = read_dir(
        "{\"architectures\":[\"MistralForCausalLM\"]," SIZES ",\"num_key_value_heads\":4}", NULL);
    assert_int_equal(c.sliding_window, 4096); /* absent: the class's */
    c = read_dir("{\"architectures\":[\"MistralForCausalLM\"]," SIZES
                 ",\"num_key_value_heads\":4,\"sliding_window\":null,\"head_dim\":32}",
                 NULL);
    assert_int_equal(c.sliding_window, 0);
    assert_int_equal(c.head_dim, 32);

    c = read_dir("{\"architectures\":[\"Qwen2ForCausalLM\"]," SIZES
                 ",\"num_key_value_heads\":2,\"sliding_window\":128,\"use_sliding_window\":false}",
                 NULL);
    assert_true(c.qkv_bias && !c.o_bias && !c.qk_norm);
    assert_int_equal(c.sliding_window, 0);
    c = read_dir("{\"architectures\":[\"Qwen2ForCausalLM\"]," SIZES
                 ",\"num_key_value_heads\":2,\"sliding_window\":128,\"use_sliding_window\":true,"
                 "\"max_window_layers\":3}",
                 NULL);
    assert_int_equal(c.sliding_window, 128);

    c = read_dir("{\"architectures\":[\"Qwen3ForCausalLM\"]," SIZES ",\"num_key_value_heads\":2}",
                 NULL);
    assert_true(c.qk_norm && !c.qkv_bias);
    assert_int_equal(c.head_dim, 128);

    c = read_dir("{\"architectures\":[\"SmolLM3ForCausalLM\"]," SIZES "}", NULL);
    assert_true(c.tied_head && c.rope_theta == 2000000.0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(c.layer_has_rope[i], i != 3);
    c = read_dir("{\"architectures\":[\"SmolLM3ForCausalLM\"]," SIZES
                 ",\"no_rope_layer_interval\":2}",
                 NULL);
    for (int i = 0; i < 4; i++)
        assert_int_equal(c.layer_has_rope[i], i % 2 == 0);
    c = read_dir("{\"architectures\":[\"SmolLM3ForCausalLM\"]," SIZES
                 ",\"no_rope_layers\":[0,1,1,1]}",
                 NULL);
    for (int i = 0; i < 4; i++)
        assert_int_equal(c.layer_has_rope[i], i != 0);
}

static void test_model_file_hf_refuses(void **state)
{
    (void)state;
    dir_fails("{\"architectures\":[\"GemmaForCausalLM\"]," SIZES "}", NULL, PGD_EUNSUPPORTED,
              "architecture \"GemmaForCausalLM\"");
    dir_fails("{" SIZES "}", NULL, PGD_EFORMAT, "architectures");
    dir_fails("[1]", NULL, PGD_EFORMAT, "config.json: expected a JSON object");
    dir_fails("{", NULL, PGD_EFORMAT, "config.json");
    dir_fails("{\"architectures\":[\"LlamaForCausalLM\"]}", NULL, PGD_EFORMAT, "num_hidden_layers");
#define LLAMA "{\"architectures\":[\"LlamaForCausalLM\"]," SIZES
    dir_fails(LLAMA ",\"hidden_act\":\"gelu\"}", NULL, PGD_EUNSUPPORTED, "gelu");
    dir_fails(LLAMA ",\"quantization_config\":{}}", NULL, PGD_EUNSUPPORTED, "quantization_config");
    dir_fails(LLAMA ",\"partial_rotary_factor\":0.5}", NULL, PGD_EUNSUPPORTED,
              "partial_rotary_factor");
    dir_fails(LLAMA ",\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}}", NULL,
              PGD_EUNSUPPORTED, "dynamic");
    dir_fails(LLAMA ",\"rope_scaling\":{\"type\":\"linear\"}}", NULL, PGD_EFORMAT, "factor");
    dir_fails(LLAMA ",\"rope_scaling\":7}", NULL, PGD_EFORMAT, "rope_scaling");
    dir_fails(LLAMA ",\"rope_parameters\":{\"full_attention\":{}}}", NULL, PGD_EUNSUPPORTED,
              "per kind of layer");
    dir_fails(LLAMA ",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":5,"
                    "\"high_freq_factor\":4}}",
              NULL, PGD_EFORMAT, "high frequency factor of at least the low");
    dir_fails(LLAMA ",\"num_key_value_heads\":3}", NULL, PGD_EFORMAT, "KV heads");
    dir_fails(LLAMA ",\"num_key_value_heads\":\"2\"}", NULL, PGD_EINVAL, "num_key_value_heads");
    dir_fails(LLAMA ",\"head_dim\":15}", NULL, PGD_EFORMAT, "even head size");
    dir_fails(LLAMA ",\"eos_token_id\":32}", NULL, PGD_ERANGE, "eos_token_id");
    dir_fails(LLAMA ",\"eos_token_id\":[1,4294967295]}", NULL, PGD_ERANGE, "eos_token_id");
    dir_fails(LLAMA ",\"eos_token_id\":\"</s>\"}", NULL, PGD_ERANGE, "eos_token_id");
    dir_fails(LLAMA ",\"bos_token_id\":99}", NULL, PGD_ERANGE, "bos_token_id");
    dir_fails(LLAMA "}", "{\"eos_token_id\":99}", PGD_ERANGE, "generation_config.json");
    dir_fails(LLAMA "}", "{\"temperature\":-1}", PGD_ERANGE, "temperature");
    dir_fails(LLAMA "}", "[]", PGD_EFORMAT, "generation_config.json");
    dir_fails("{\"architectures\":[\"SmolLM3ForCausalLM\"]," SIZES ",\"no_rope_layers\":[1]}", NULL,
              PGD_EFORMAT, "no_rope_layers");
    char weights[96];
    (void)snprintf(weights, sizeof(weights), "%s/model.safetensors", dir);
    open_path_fails(weights, PGD_EUNSUPPORTED, "give the directory");
    builder_remove_dir(dir);
    open_path_fails(dir, PGD_ENOENT, dir);
    if (mkdir(dir, 0700) != 0)
        abort();
    open_path_fails(dir, PGD_ENOENT, "config.json");
    builder_write_text(dir, "config.json", LLAMA "}");
    open_path_fails(dir, PGD_ENOENT, "model.safetensors");
}

static void test_model_file_hf_names(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {"model.embed_tokens.weight", "token_embd.weight"},
        {"lm_head.weight", "output.weight"},
        {"model.norm.weight", "output_norm.weight"},
        {"model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"},
        {"model.layers.11.self_attn.q_proj.weight", "blk.11.attn_q.weight"},
        {"model.layers.11.self_attn.k_proj.bias", "blk.11.attn_k.bias"},
        {"model.layers.2.self_attn.o_proj.weight", "blk.2.attn_output.weight"},
        {"model.layers.2.self_attn.q_norm.weight", "blk.2.attn_q_norm.weight"},
        {"model.layers.2.post_attention_layernorm.weight", "blk.2.ffn_norm.weight"},
        {"model.layers.2.mlp.gate_proj.weight", "blk.2.ffn_gate.weight"},
        {"model.layers.2.mlp.down_proj.bias", "blk.2.ffn_down.bias"},
        {"model.layers.2.block_sparse_moe.gate.weight", "blk.2.ffn_gate_inp.weight"},
        {"model.layers.2.block_sparse_moe.experts.13.w1.weight", "blk.2.ffn_gate.13.weight"},
        {"model.layers.2.block_sparse_moe.experts.0.w2.weight", "blk.2.ffn_down.0.weight"},
        {"model.layers.2.block_sparse_moe.experts.0.w3.weight", "blk.2.ffn_up.0.weight"},
        {"model.layers.2.block_sparse_moe.experts.0.w4.weight",
         "model.layers.2.block_sparse_moe.experts.0.w4.weight"},
        {"model.layers.2.block_sparse_moe.experts..w1.weight",
         "model.layers.2.block_sparse_moe.experts..w1.weight"},
        {"model.layers.2.mlp.experts.7.gate_proj.weight", "blk.2.ffn_gate.7.weight"},
        {"model.layers.2.mlp.experts.7.up_proj.weight", "blk.2.ffn_up.7.weight"},
        {"model.layers.2.mlp.experts.7.down_proj.weight", "blk.2.ffn_down.7.weight"},
        {"model.layers.2.mlp.experts.7.down_proj.bias",
         "model.layers.2.mlp.experts.7.down_proj.bias"},
        {"model.layers.2.mlp.gate.weight", "blk.2.ffn_gate_inp.weight"},
        {"model.layers.2.mlp.router.bias", "blk.2.ffn_gate_inp.bias"},
        {"model.layers.2.mlp.experts.gate_up_proj", "blk.2.ffn_gate_up_exps.weight"},
        {"model.layers.2.mlp.experts.gate_up_proj_bias", "blk.2.ffn_gate_up_exps.bias"},
        {"model.layers.2.mlp.experts.down_proj_blocks", "blk.2.ffn_down_exps.blocks"},
        {"model.layers.2.mlp.experts.down_proj_scales", "blk.2.ffn_down_exps.scales"},
        {"model.layers.2.feed_forward.up_proj.weight", "blk.2.ffn_up.weight"},
        {"model.layers.2.feed_forward.router.weight", "blk.2.ffn_gate_inp.weight"},
        {"model.layers.2.feed_forward.experts.gate_up_proj", "blk.2.ffn_gate_up_exps.weight"},
        {"model.layers.2.feed_forward.shared_expert.down_proj.weight",
         "blk.2.ffn_down_shexp.weight"},
        {"model.layers.2.self_attn.sinks", "blk.2.attn_sinks.weight"},
        {"model.layers.2.mlp.down_proj.weight_scale", "model.layers.2.mlp.down_proj.weight_scale"},
        {"model.layers.x.mlp.down_proj.weight", "model.layers.x.mlp.down_proj.weight"},
        {"model.layers..mlp.down_proj.weight", "model.layers..mlp.down_proj.weight"},
        {"vision.encoder", "vision.encoder"},
    };
    static const char *const post_norms[][2] = {
        {"model.layers.2.input_layernorm.weight", "blk.2.attn_norm.weight"},
        {"model.layers.2.post_attention_layernorm.weight", "blk.2.post_attention_norm.weight"},
        {"model.layers.2.pre_feedforward_layernorm.weight", "blk.2.ffn_norm.weight"},
        {"model.layers.2.post_feedforward_layernorm.weight", "blk.2.post_ffw_norm.weight"},
    };
    char out[64];
    for (size_t i = 0; i < PGD_ARRAY_LEN(pairs); i++) {
        assert_true(model_hf_names_map(out, sizeof(out), pairs[i][0], false));
        assert_string_equal(out, pairs[i][1]);
    }
    for (size_t i = 0; i < PGD_ARRAY_LEN(post_norms); i++) {
        assert_true(model_hf_names_map(out, sizeof(out), post_norms[i][0], true));
        assert_string_equal(out, post_norms[i][1]);
    }
    assert_true(model_hf_names_map(out, sizeof(out), post_norms[2][0], false));
    assert_string_equal(out, post_norms[2][0]);
    assert_false(model_hf_names_map(out, 8, "model.norm.weight", false));
}

static void test_model_layout_lists_what_it_has(void **state)
{
    (void)state;
    model_config c = {.n_layers = 11,
                      .dim = 8,
                      .n_heads = 4,
                      .n_kv_heads = 2,
                      .head_dim = 6,
                      .ffn_dim = 10,
                      .vocab_size = 20,
                      .rope_dim = 6};
    for (unsigned bits = 0; bits < 128; bits++) {
        c.qkv_bias = bits & 1;
        c.o_bias = bits & 2;
        c.mlp_bias = bits & 4;
        c.qk_norm = bits & 8;
        c.tied_head = bits & 16;
        c.has_rope_freqs = bits & 32;
        c.post_norms = bits & 64;
        model_layout_iter iter = {0};
        model_layout_tensor t;
        int32_t n = 0;
        int32_t per_layer =
            9 + 3 * c.qkv_bias + c.o_bias + 3 * c.mlp_bias + 2 * c.qk_norm + 2 * c.post_norms;
        for (; model_layout_next(&t, &iter, &c); n++) {
            assert_true(model_layout_has_tensor(&c, t.name));
            assert_true(t.dims[0] > 0 && t.dims[1] > 0);
        }
        assert_int_equal(n, 11 * per_layer + 2 + !c.tied_head + c.has_rope_freqs);
    }
    assert_true(model_layout_has_tensor(&c, "blk.10.attn_q.weight"));
    assert_false(model_layout_has_tensor(&c, "blk.11.attn_q.weight"));
    assert_false(model_layout_has_tensor(&c, "blk.01.attn_q.weight"));
    assert_false(model_layout_has_tensor(&c, "blk.99999999999999999999.attn_q.weight"));
    assert_false(model_layout_has_tensor(&c, "blk.-1.attn_q.weight"));
    assert_true(model_layout_may_ignore(&c, "blk.3.attn_rot_embd.weight"));
    assert_true(model_layout_may_ignore(&c, "output.weight")); /* tied by the last round */
}

/* --- fingerprint, and the tiny models of the tree --------------------------------------------- */

static void test_model_file_fingerprint(void **state)
{
    (void)state;
    uint8_t first[32];
    uint8_t again[32];
    builder b;
    builder_llama(&b);
    builder_write(path, b.data, b.n_bytes);
    model_file *f = open_path_ok(path);
    assert_int_equal(model_file_fingerprint(f, first), PGD_OK);
    assert_int_equal(model_file_fingerprint(f, again), PGD_OK);
    assert_memory_equal(first, again, 32);
    model_file_close(f);
    b.data[b.n_bytes - 1] ^= 1; /* the last byte of the last tensor */
    builder_write(path, b.data, b.n_bytes);
    f = open_path_ok(path);
    assert_int_equal(model_file_fingerprint(f, again), PGD_OK);
    assert_memory_not_equal(first, again, 32);
    model_file_close(f);
    builder_free(&b);
}

static void test_model_file_tiny_models_run(void **state)
{
    (void)state;
    static const char *const names[] = {
        "llama31-tiny",   "mistral-tiny",        "qwen2-tiny",         "qwen3-tiny",
        "smollm3-tiny",   "gemma2-tiny",         "gemma3-tiny",        "mistral-swa-tiny",
        "qwen3-swa-tiny", "mixtral-tiny",        "qwen3moe-tiny",      "gptoss-tiny",
        "llama4-tiny",    "gemma3-wrapped-tiny", "llama4-wrapped-tiny"};
    static const char *const endings[] = {"", ".f32.gguf", ".f16.gguf", ".mxfp4.gguf"};
    int n_ggufs = 0;
    for (size_t i = 0; i < PGD_ARRAY_LEN(names); i++) {
        model_config from_dir = {0};
        for (size_t j = 0; j < PGD_ARRAY_LEN(endings); j++) {
            char where[160];
            if (j == 0)
                (void)snprintf(where, sizeof(where), "tests/data/models/%s", names[i]);
            else
                (void)snprintf(where, sizeof(where), "tests/data/models/%s/%s%s", names[i],
                               names[i], endings[j]);
            if (j > 0 && !file_exists(where))
                continue;
            n_ggufs += j > 0;
            model_file *f = open_path_ok(where);
            check_runnable(f);
            const model_config *c = model_file_get_config(f);
            if (j == 0)
                from_dir = *c;
            assert_int_equal(c->n_layers, from_dir.n_layers);
            assert_int_equal(c->dim, from_dir.dim);
            assert_int_equal(c->n_kv_heads, from_dir.n_kv_heads);
            assert_int_equal(c->head_dim, from_dir.head_dim);
            assert_int_equal(c->vocab_size, from_dir.vocab_size);
            assert_true(c->rope_theta == from_dir.rope_theta);
            assert_true(c->rope_local_theta == from_dir.rope_local_theta);
            assert_int_equal(c->sliding_window, from_dir.sliding_window);
            assert_memory_equal(c->layer_attention, from_dir.layer_attention,
                                (size_t)c->n_layers * sizeof(c->layer_attention[0]));
            assert_true(fabs(c->attn_scale - from_dir.attn_scale) < 1e-7);
            assert_true(c->attn_soft_cap == from_dir.attn_soft_cap);
            assert_true(c->final_soft_cap == from_dir.final_soft_cap);
            assert_int_equal(c->act, from_dir.act);
            assert_int_equal(c->scales_embed, from_dir.scales_embed);
            assert_int_equal(c->post_norms, from_dir.post_norms);
            assert_int_equal(c->tied_head, from_dir.tied_head);
            assert_int_equal(c->qk_norm, from_dir.qk_norm);
            assert_int_equal(c->qkv_bias, from_dir.qkv_bias);
            assert_int_equal(c->o_bias, from_dir.o_bias);
            assert_int_equal(c->attn_sinks, from_dir.attn_sinks);
            assert_int_equal(c->sliding_window, from_dir.sliding_window);
            assert_memory_equal(c->layer_attention, from_dir.layer_attention, (size_t)c->n_layers);
            assert_int_equal(c->rope_truncates, from_dir.rope_truncates);
            assert_true(c->rope_attention_factor == from_dir.rope_attention_factor);
            if (c->rope_scaling == ROPE_SCALING_YARN)
                assert_int_equal(c->rope_original_context, from_dir.rope_original_context);
            assert_int_equal(c->n_experts, from_dir.n_experts);
            assert_int_equal(c->n_experts_chosen, from_dir.n_experts_chosen);
            assert_memory_equal(c->layer_has_experts, from_dir.layer_has_experts,
                                (size_t)c->n_layers);
            assert_int_equal(c->expert_gate, from_dir.expert_gate);
            assert_int_equal(c->expert_bias, from_dir.expert_bias);
            assert_int_equal(c->router_bias, from_dir.router_bias);
            if (c->n_experts > 0)
                assert_int_equal(c->expert_ffn_dim, from_dir.expert_ffn_dim);
            assert_int_equal(c->act, from_dir.act);
            model_file_close(f);
        }
    }
    assert_true(n_ggufs > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_file_gguf_config),
        cmocka_unit_test(test_model_file_gguf_architectures),
        cmocka_unit_test(test_model_file_gguf_rope_scaling),
        cmocka_unit_test(test_model_file_gguf_refuses_bad_metadata),
        cmocka_unit_test(test_model_file_gguf_refuses_ids_outside),
        cmocka_unit_test(test_model_file_check_finds_first_fault),
        cmocka_unit_test(test_model_file_check_shapes_and_types),
        cmocka_unit_test(test_model_file_listing_survives_unknown_config),
        cmocka_unit_test(test_model_file_hf_llama),
        cmocka_unit_test(test_model_file_hf_other_architectures),
        cmocka_unit_test(test_model_file_hf_refuses),
        cmocka_unit_test(test_model_file_hf_names),
        cmocka_unit_test(test_model_layout_lists_what_it_has),
        cmocka_unit_test(test_model_file_fingerprint),
        cmocka_unit_test(test_model_file_tiny_models_run),
    };
    return cmocka_run_group_tests(tests, make_model_dir, remove_model_dir);
}
