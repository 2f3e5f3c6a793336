/* Checkpoints of text and images, of which the text part is read: config.json with "text_config",
 * tensor names in every spelling, and what is left out. */
#include <stdlib.h>

#include "common/file.h"
#include "common/mem.h"
#include "common/model/model_file.h"
#include "common/model/model_hf_names.h"
#include "tests/unit/model_dir.h"

#define TINY "tests/data/models/gemma3-wrapped-tiny"

static const char tensor[] =
    "{\"language_model.model.embed_tokens.weight\":{\"dtype\":\"F16\",\"shape\":[2,2],"
    "\"data_offsets\":[0,8]},\"vision_tower.x.weight\":{\"dtype\":\"F16\",\"shape\":[2,2],"
    "\"data_offsets\":[8,16]}}";

/* Of a directory with this config.json, and generation_config.json unless that is NULL. */
static pgd_err read_config(model_config *out, const char *config, const char *generation,
                           pgd_why *why)
{
    char at[128];
    model_file *f;
    pgd_err config_err;
    builder_write_text(dir, "config.json", config);
    (void)snprintf(at, sizeof(at), "%s/generation_config.json", dir);
    (void)remove(at);
    if (generation != NULL)
        builder_write_text(dir, "generation_config.json", generation);
    builder_write_safetensors(dir, "model.safetensors", tensor, 16);
    assert_int_equal(model_file_open_listing(&f, dir, &config_err, why, why), PGD_OK);
    if (config_err == PGD_OK) {
        *out = *model_file_get_config(f);
        assert_int_equal(model_file_n_tensors(f), 1);
        assert_int_equal(model_file_weight_bytes(f), 8);
        assert_non_null(model_file_get_tensor(f, "token_embd.weight"));
    }
    model_file_close(f);
    return config_err;
}

static model_config config_of(const char *config, const char *generation)
{
    model_config c = {0};
    pgd_why why = {{0}};
    if (read_config(&c, config, generation, &why) != PGD_OK)
        fail_msg("%s: %s", config, why.text);
    return c;
}

static void refused(const char *config, pgd_err wanted_err, const char *wanted)
{
    model_config c;
    pgd_why why = {{0}};
    pgd_err err = read_config(&c, config, NULL, &why);
    check_refusal(err, wanted_err, &why, wanted);
}

#define GEMMA3(top, text)                                                                    \
    "{\"architectures\":[\"Gemma3ForConditionalGeneration\"],\"model_type\":\"gemma3\"," top \
    "\"text_config\":{" text "},\"vision_config\":{\"hidden_size\":1152}}"
#define LLAMA4(top, text)                                                                    \
    "{\"architectures\":[\"Llama4ForConditionalGeneration\"],\"model_type\":\"llama4\"," top \
    "\"text_config\":{" text "},\"vision_config\":{\"hidden_size\":1408}}"

/* What the published models of 4 billion and of 17 billion active parameters have. */
static void test_model_wrapper_published_configs(void **state)
{
    (void)state;
    model_config c = config_of(
        GEMMA3("\"boi_token_index\":255999,\"eoi_token_index\":256000,\"eos_token_id\":[1,106],"
               "\"image_token_index\":262144,\"initializer_range\":0.02,"
               "\"mm_tokens_per_image\":256,\"torch_dtype\":\"bfloat16\",",
               "\"hidden_size\":2560,\"intermediate_size\":10240,\"model_type\":\"gemma3_text\","
               "\"num_hidden_layers\":34,\"rope_scaling\":{\"factor\":8.0,\"rope_type\":"
               "\"linear\"},\"sliding_window\":1024"),
        NULL);
    assert_string_equal(c.arch, "gemma3_text");
    assert_true(c.is_text_part && c.tied_head && c.qk_norm && c.scales_embed && c.post_norms);
    assert_true(c.n_layers == 34 && c.dim == 2560 && c.ffn_dim == 10240);
    assert_true(c.n_heads == 8 && c.n_kv_heads == 4 && c.head_dim == 256);
    assert_true(c.vocab_size == 262208 && c.max_context == 131072 && c.sliding_window == 1024);
    assert_true(c.rope_theta == 1e6 && c.rope_local_theta == 1e4 && c.rope_factor == 8.0);
    assert_int_equal(c.rope_scaling, ROPE_SCALING_LINEAR);
    assert_int_equal(c.layer_attention[4], ATTENTION_SLIDING);
    assert_int_equal(c.layer_attention[5], ATTENTION_FULL);
    assert_true(c.n_eos_ids == 2 && c.eos_ids[0] == 1 && c.eos_ids[1] == 106);

    c = config_of(
        LLAMA4("\"boi_token_index\":200080,\"image_token_index\":200092,",
               "\"attention_bias\":false,\"attention_chunk_size\":8192,\"bos_token_id\":200000,"
               "\"eos_token_id\":[200001,200007,200008],\"head_dim\":128,\"hidden_act\":\"silu\","
               "\"hidden_size\":5120,\"interleave_moe_layer_step\":1,\"intermediate_size\":8192,"
               "\"intermediate_size_mlp\":16384,\"max_position_embeddings\":10485760,"
               "\"model_type\":\"llama4_text\",\"no_rope_layers\":[],\"num_attention_heads\":40,"
               "\"num_experts_per_tok\":1,\"num_hidden_layers\":48,\"num_key_value_heads\":8,"
               "\"num_local_experts\":16,\"pad_token_id\":200018,\"rms_norm_eps\":1e-05,"
               "\"rope_scaling\":{\"factor\":16.0,\"high_freq_factor\":1.0,\"low_freq_factor\":"
               "1.0,\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\"},"
               "\"rope_theta\":500000.0,\"use_qk_norm\":true,\"vocab_size\":202048"),
        NULL);
    assert_string_equal(c.arch, "llama4_text");
    assert_true(c.is_text_part && !c.tied_head && c.qk_l2_norm);
    assert_true(c.n_layers == 48 && c.n_heads == 40 && c.n_experts == 16);
    assert_true(c.n_eos_ids == 3 && c.eos_ids[2] == 200008);
    assert_true(c.bos_id == 200000 && c.pad_id == 200018);
    assert_true(!c.layer_has_rope[3] && c.layer_attention[3] == ATTENTION_FULL);
    assert_int_equal(c.layer_attention[2], ATTENTION_CHUNKED);
}

static void test_model_wrapper_class_defaults(void **state)
{
    (void)state;
    model_config c = config_of(GEMMA3("", ""), NULL);
    assert_true(c.n_layers == 26 && c.dim == 2304 && c.ffn_dim == 9216 && c.n_heads == 8);
    assert_true(c.n_eos_ids == 1 && c.eos_ids[0] == 1);
    c = config_of(LLAMA4("", ""), NULL);
    assert_true(c.n_layers == 48 && c.dim == 5120 && c.n_heads == 40 && c.n_kv_heads == 8);
    assert_true(c.ffn_dim == 16384 && c.expert_ffn_dim == 8192 && c.vocab_size == 202048);
    assert_true(c.n_eos_ids == 1 && c.eos_ids[0] == 2);
    /* Without "architectures". */
    c = config_of("{\"model_type\":\"gemma3\",\"text_config\":{\"num_hidden_layers\":7}}", NULL);
    assert_true(c.is_text_part && c.n_layers == 7);
    /* The text class alone has the same defaults and leaves nothing out. */
    builder_write_text(dir, "config.json", "{\"architectures\":[\"Gemma3ForCausalLM\"]}");
    model_file *f;
    pgd_why why = {{0}};
    assert_int_equal(model_file_open(&f, dir, &why), PGD_OK);
    assert_false(model_file_get_config(f)->is_text_part);
    assert_int_equal(model_file_n_tensors(f), 2);
    model_file_close(f);
}

static void test_model_wrapper_end_tokens(void **state)
{
    (void)state;
    model_config c = config_of(GEMMA3("\"eos_token_id\":5,\"bos_token_id\":6,",
                                      "\"eos_token_id\":7,\"bos_token_id\":8,\"pad_token_id\":9"),
                               NULL);
    assert_true(c.n_eos_ids == 1 && c.eos_ids[0] == 5 && c.bos_id == 6 && c.pad_id == 9);
    c = config_of(GEMMA3("", "\"eos_token_id\":[7,8]"), NULL);
    assert_true(c.n_eos_ids == 2 && c.eos_ids[0] == 7 && c.eos_ids[1] == 8);
    /* Named in one file, the class's own is not added. */
    c = config_of(GEMMA3("", ""), "{\"eos_token_id\":106}");
    assert_true(c.n_eos_ids == 1 && c.eos_ids[0] == 106);
    refused(GEMMA3("\"eos_token_id\":300000,", ""), PGD_ERANGE, "eos_token_id");
}

/* As transformers 5.24 ties: Gemma 3 by the wrapper's member, Llama 4 by the text model's. */
static void test_model_wrapper_tied_heads(void **state)
{
    (void)state;
#define TIE(value) "\"tie_word_embeddings\":" value
    assert_true(config_of(GEMMA3("", TIE("false")), NULL).tied_head);
    assert_false(config_of(GEMMA3(TIE("false") ",", TIE("true")), NULL).tied_head);
    assert_true(config_of(LLAMA4("", TIE("true")), NULL).tied_head);
    assert_false(config_of(LLAMA4(TIE("true") ",", ""), NULL).tied_head);
}

static void test_model_wrapper_malformed(void **state)
{
    (void)state;
#define HEAD "{\"architectures\":[\"Gemma3ForConditionalGeneration\"]"
    refused(HEAD "}", PGD_EFORMAT,
            "expected an object \"text_config\" in a model of "
            "\"Gemma3ForConditionalGeneration\", got none");
    refused(HEAD ",\"text_config\":null}", PGD_EFORMAT, "got none");
    refused(HEAD ",\"text_config\":[]}", PGD_EFORMAT, "got another JSON value");
    refused(HEAD ",\"text_config\":\"x\"}", PGD_EFORMAT, "got another JSON value");
    refused(GEMMA3("", "\"model_type\":\"llama4_text\""), PGD_EUNSUPPORTED,
            "expected \"model_type\" gemma3_text in \"text_config\", got \"llama4_text\"");
    refused(LLAMA4("", "\"model_type\":7"), PGD_EUNSUPPORTED, "another JSON value");
    refused(GEMMA3("", "\"hidden_size\":\"x\""), PGD_EINVAL, "config.json: text_config: ");
    refused(GEMMA3("", "\"num_hidden_layers\":0"), PGD_ERANGE, "layers");
    refused(GEMMA3("\"quantization_config\":{},", ""), PGD_EUNSUPPORTED, "quantization_config");
    refused(GEMMA3("", "\"quantization_config\":{}"), PGD_EUNSUPPORTED, "quantization_config");
    refused(GEMMA3("", "\"use_bidirectional_attention\":true"), PGD_EUNSUPPORTED,
            "use_bidirectional_attention");
    refused("{\"architectures\":[\"LlavaForConditionalGeneration\"],\"text_config\":{}}",
            PGD_EUNSUPPORTED,
            "those in Gemma3ForConditionalGeneration and Llama4ForConditionalGeneration");
}

static void test_model_wrapper_names(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {"language_model.model.layers.0.x", "model.layers.0.x"},
        {"model.language_model.layers.0.x", "model.layers.0.x"},
        {"language_model.layers.0.x", "model.layers.0.x"},
        {"language_model.model.norm.weight", "model.norm.weight"},
        {"language_model.lm_head.weight", "lm_head.weight"},
        {"lm_head.weight", "lm_head.weight"},
        {"audio_tower.x", "audio_tower.x"},
        {"", ""},
    };
    char out[64];
    for (size_t i = 0; i < PGD_ARRAY_LEN(pairs); i++) {
        assert_true(model_hf_names_unwrap(out, sizeof(out), pairs[i][0]));
        assert_string_equal(out, pairs[i][1]);
    }
    assert_true(model_hf_names_unwrap(out, 17, "language_model.layers.0.x"));
    assert_false(model_hf_names_unwrap(out, 16, "language_model.layers.0.x"));
    assert_true(model_hf_names_is_vision("vision_tower.x"));
    assert_true(model_hf_names_is_vision("model.vision_tower.x"));
    assert_true(model_hf_names_is_vision("vision_model.x"));
    assert_true(model_hf_names_is_vision("multi_modal_projector.linear_1.weight"));
    assert_true(model_hf_names_is_vision("model.multi_modal_projector.x"));
    assert_false(model_hf_names_is_vision("language_model.vision_tower.x"));
    assert_false(model_hf_names_is_vision("vision_towers.x"));
    assert_false(model_hf_names_is_vision("lm_head.weight"));
}

/* The tiny model with a part of every name replaced, in dir. */
static void write_renamed(const char *from, const char *to)
{
    char *data, *header, *out;
    size_t n_bytes, used = 0;
    uint64_t n_header;
    pgd_why why = {{0}};
    if (file_read(&data, &n_bytes, TINY "/model.safetensors", (size_t)1 << 20, &why) != PGD_OK)
        fail_msg("%s", why.text);
    memcpy(&n_header, data, 8);
    header = data + 8;
    out = malloc(4 * n_bytes);
    assert_non_null(out);
    for (size_t i = 0; i < n_header;) {
        if (strncmp(header + i, from, strlen(from)) == 0) {
            used += (size_t)sprintf(out + 8 + used, "%s", to);
            i += strlen(from);
        } else {
            out[8 + used++] = header[i++];
        }
    }
    uint64_t n_out = used;
    memcpy(out, &n_out, 8);
    memcpy(out + 8 + used, header + n_header, n_bytes - 8 - n_header);
    char to_path[128];
    (void)snprintf(to_path, sizeof(to_path), "%s/model.safetensors", dir);
    builder_write(to_path, out, 8 + used + (n_bytes - 8 - n_header));
    mem_free(data);
    free(out);
    if (file_read(&data, &n_bytes, TINY "/config.json", (size_t)1 << 20, &why) != PGD_OK)
        fail_msg("%s", why.text);
    (void)snprintf(to_path, sizeof(to_path), "%s/config.json", dir);
    builder_write(to_path, data, n_bytes);
    mem_free(data);
}

static void test_model_wrapper_spellings(void **state)
{
    (void)state;
    static const char *const prefixes[] = {"\"language_model.model.", "\"model.language_model.",
                                           "\"language_model."};
    uint8_t first[32], other[32];
    pgd_why why = {{0}};
    model_file *f;
    for (size_t i = 0; i < PGD_ARRAY_LEN(prefixes); i++) {
        write_renamed(prefixes[0], prefixes[i]);
        if (model_file_open(&f, dir, &why) != PGD_OK ||
            model_file_check_runnable(f, &why) != PGD_OK)
            fail_msg("%s: %s", prefixes[i], why.text);
        assert_int_equal(model_file_n_tensors(f), 4 * 13 + 2);
        assert_int_equal(model_file_fingerprint(f, i == 0 ? first : other), PGD_OK);
        if (i > 0)
            assert_memory_equal(first, other, 32);
        model_file_close(f);
    }
    write_renamed("\"vision_tower.post_layernorm.bias", "\"audio_tower.bias");
    assert_int_equal(model_file_open(&f, dir, &why), PGD_OK);
    check_refusal(model_file_check_runnable(f, &why), PGD_EUNSUPPORTED, &why, "audio_tower.bias");
    model_file_close(f);
    write_renamed("\"language_model.model.norm.weight", "\"language_model.model.norm.gone");
    assert_int_equal(model_file_open(&f, dir, &why), PGD_OK);
    check_refusal(model_file_check_runnable(f, &why), PGD_EFORMAT, &why, "output_norm.weight");
    model_file_close(f);
    write_renamed("\"vision_tower.post_layernorm.bias", "\"model.language_model.norm.weight");
    check_refusal(model_file_open(&f, dir, &why), PGD_EFORMAT, &why, "twice");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_wrapper_published_configs),
        cmocka_unit_test(test_model_wrapper_class_defaults),
        cmocka_unit_test(test_model_wrapper_end_tokens),
        cmocka_unit_test(test_model_wrapper_tied_heads),
        cmocka_unit_test(test_model_wrapper_malformed),
        cmocka_unit_test(test_model_wrapper_names),
        cmocka_unit_test(test_model_wrapper_spellings),
    };
    return cmocka_run_group_tests(tests, make_model_dir, remove_model_dir);
}
