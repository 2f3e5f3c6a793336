/* What config.json and GGUF metadata say of hybrid models: which layers see a window or a chunk,
 * rope of each kind, scales, caps, norms. */
#include <math.h>

#include "common/model/model_file.h"
#include "tests/unit/model_dir.h"

#define SIZES                                                                                 \
    "\"num_hidden_layers\":8,\"hidden_size\":64,\"intermediate_size\":128,\"vocab_size\":32," \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":16"

/* The config of a directory with this config.json, "{architectures: [class], sizes" being given. */
static pgd_err read_hf(model_config *out, const char *class_name, const char *members, pgd_why *why)
{
    char text[2048];
    model_file *f;
    pgd_err config_err;
    (void)snprintf(text, sizeof(text), "{\"architectures\":[\"%s\"]," SIZES "%s}", class_name,
                   members);
    builder_write_text(dir, "config.json", text);
    builder_write_safetensors(dir, "model.safetensors",
                              "{\"model.embed_tokens.weight\":{\"dtype\":\"F16\",\"shape\":[2,2],"
                              "\"data_offsets\":[0,8]}}",
                              8);
    pgd_err err = model_file_open_listing(&f, dir, &config_err, why, why);
    assert_int_equal(err, PGD_OK);
    if (config_err == PGD_OK)
        *out = *model_file_get_config(f);
    model_file_close(f);
    return config_err;
}

static model_config hf(const char *class_name, const char *members)
{
    model_config c = {0};
    pgd_why why = {{0}};
    if (read_hf(&c, class_name, members, &why) != PGD_OK)
        fail_msg("%s %s: %s", class_name, members, why.text);
    return c;
}

static void hf_fails(const char *class_name, const char *members, pgd_err wanted_err,
                     const char *wanted)
{
    model_config c;
    pgd_why why = {{0}};
    pgd_err err = read_hf(&c, class_name, members, &why);
    check_refusal(err, wanted_err, &why, wanted);
}

/* kinds: one letter per layer, f(ull), s(liding), c(hunked). */
static void check_kinds(const model_config *c, const char *kinds, int32_t window, int32_t chunk)
{
    static const char letters[] = "fsc";
    assert_int_equal(c->n_layers, strlen(kinds));
    for (int32_t i = 0; i < c->n_layers; i++) {
        if (letters[c->layer_attention[i]] != kinds[i])
            fail_msg("layer %d is %c, expected %s", i, letters[c->layer_attention[i]], kinds);
    }
    assert_int_equal(c->sliding_window, window);
    assert_int_equal(c->attention_chunk, chunk);
}

static void test_model_traits_hf_windows(void **state)
{
    (void)state;
    model_config c = hf("MistralForCausalLM", ",\"sliding_window\":24");
    check_kinds(&c, "ssssssss", 24, 0);
    c = hf("MistralForCausalLM", ",\"sliding_window\":null");
    check_kinds(&c, "ffffffff", 0, 0);
#define USED ",\"use_sliding_window\":true,\"sliding_window\":24"
    c = hf("Qwen2ForCausalLM", USED);
    check_kinds(&c, "ffffffff", 0, 0); /* from layer 28 on */
    c = hf("Qwen2ForCausalLM", USED ",\"max_window_layers\":5");
    check_kinds(&c, "fffffsss", 24, 0);
    c = hf("Qwen3ForCausalLM", USED ",\"max_window_layers\":0");
    check_kinds(&c, "ssssssss", 24, 0);
    c = hf("Qwen3ForCausalLM", ",\"sliding_window\":24,\"max_window_layers\":0");
    check_kinds(&c, "ffffffff", 0, 0);
#define FULL    "\"full_attention\""
#define SLIDING "\"sliding_attention\""
#define TYPES   ",\"layer_types\":[" FULL "," SLIDING "," FULL "," FULL "," SLIDING
#define REST    "," FULL "," FULL "," FULL "]"
    c = hf("Qwen3ForCausalLM", USED ",\"max_window_layers\":0" TYPES REST);
    check_kinds(&c, "fsffsfff", 24, 0);
    c = hf("SmolLM3ForCausalLM", USED);
    check_kinds(&c, "fffsfffs", 24, 0); /* the layers without rope */
    hf_fails("Qwen3ForCausalLM", USED TYPES "]", PGD_EFORMAT, "layer_types");
    hf_fails("Qwen3ForCausalLM", USED TYPES ",\"x\"" REST, PGD_EFORMAT, "layer_types");
    hf_fails("Qwen3ForCausalLM", USED TYPES ",\"x\"," FULL "," FULL "]", PGD_EUNSUPPORTED, "\"x\"");
    hf_fails("Qwen3ForCausalLM", USED TYPES ",7," FULL "," FULL "]", PGD_EUNSUPPORTED,
             "layer_types");
    hf_fails("Qwen3ForCausalLM", ",\"sliding_window\":24" TYPES REST, PGD_ERANGE, "sliding window");
    hf_fails("MistralForCausalLM", ",\"sliding_window\":-1", PGD_ERANGE, "sliding_window");
    hf_fails("MistralForCausalLM", ",\"sliding_window\":1e300", PGD_ERANGE, "got 1e+300");
}

static void test_model_traits_hf_within_another(void **state)
{
    (void)state;
    hf_fails("Mistral3ForConditionalGeneration", ",\"text_config\":{\"num_hidden_layers\":8}",
             PGD_EUNSUPPORTED, "use a GGUF file of the language model");
    hf_fails("GemmaForCausalLM", "", PGD_EUNSUPPORTED, "which runs LlamaForCausalLM");
}

static void test_model_traits_hf_gemma2(void **state)
{
    (void)state;
    model_config c = hf("Gemma2ForCausalLM", "");
    check_kinds(&c, "sfsfsfsf", 4096, 0);
    assert_true(c.norm_plus_one && c.post_norms && c.scales_embed && c.tied_head && !c.qk_norm);
    assert_int_equal(c.act, FFN_ACT_GELU_TANH);
    assert_true(c.attn_soft_cap == 50.0f && c.final_soft_cap == 30.0f);
    assert_true(c.attn_scale == 1.0 / 16);
    assert_true(c.rope_theta == 10000.0 && c.rope_local_theta == 0.0);
    c = hf("Gemma2ForCausalLM", ",\"query_pre_attn_scalar\":144,\"attn_logit_softcapping\":null,"
                                "\"final_logit_softcapping\":15.0,\"sliding_window\":24,"
                                "\"hidden_act\":\"gelu\",\"hidden_activation\":\"silu\"");
    assert_true(c.attn_soft_cap == 0.0f && c.final_soft_cap == 15.0f);
    assert_true(fabs(c.attn_scale - 1.0 / 12) < 1e-15);
    assert_int_equal(c.act, FFN_ACT_SILU); /* "hidden_act" is not this class's */
    hf_fails("Gemma2ForCausalLM", ",\"hidden_activation\":\"gelu\"", PGD_EUNSUPPORTED,
             "hidden_activation");
    hf_fails("Gemma2ForCausalLM", ",\"query_pre_attn_scalar\":0", PGD_ERANGE, "attention scale");
    hf_fails("Gemma2ForCausalLM", ",\"attn_logit_softcapping\":-1", PGD_ERANGE, "soft cap");
    hf_fails("Gemma2ForCausalLM", ",\"use_bidirectional_attention\":true", PGD_EUNSUPPORTED,
             "use_bidirectional_attention");
}

static void test_model_traits_hf_gemma3(void **state)
{
    (void)state;
    model_config c = hf("Gemma3ForCausalLM", "");
    check_kinds(&c, "sssssfss", 4096, 0);
    assert_true(c.norm_plus_one && c.post_norms && c.scales_embed && c.qk_norm);
    assert_true(c.attn_soft_cap == 0.0f && c.final_soft_cap == 0.0f);
    assert_true(c.rope_theta == 1e6 && c.rope_local_theta == 1e4);
    assert_int_equal(c.rope_scaling, ROPE_SCALING_NONE);
    /* The older spelling: a pattern and two bases. */
    c = hf("Gemma3ForCausalLM",
           ",\"sliding_window\":24,\"sliding_window_pattern\":3,\"rope_theta\":5e5,"
           "\"rope_local_base_freq\":2e4,\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":8}");
    check_kinds(&c, "ssfssfss", 24, 0);
    assert_true(c.rope_theta == 5e5 && c.rope_local_theta == 2e4 && c.rope_factor == 8.0);
    assert_int_equal(c.rope_scaling, ROPE_SCALING_LINEAR);
    /* The newer one. */
#define ROPE(local, global) \
    ",\"rope_parameters\":{\"sliding_attention\":{" local "},\"full_attention\":{" global "}}"
    c = hf("Gemma3ForCausalLM",
           ",\"sliding_window\":24" TYPES REST ROPE("\"rope_type\":\"default\",\"rope_theta\":3e4",
                                                    "\"rope_type\":\"linear\",\"factor\":4.0,"
                                                    "\"rope_theta\":7e5"));
    check_kinds(&c, "fsffsfff", 24, 0);
    assert_true(c.rope_theta == 7e5 && c.rope_local_theta == 3e4 && c.rope_factor == 4.0);
    c = hf("Gemma3ForCausalLM", ROPE("\"rope_type\":\"default\"", "\"rope_type\":\"default\""));
    assert_true(c.rope_theta == 1e6 && c.rope_local_theta == 1e4);
    hf_fails("Gemma3ForCausalLM", ROPE("\"rope_type\":\"linear\",\"factor\":4", ""),
             PGD_EUNSUPPORTED, "scaling of sliding layers");
    hf_fails("Gemma3ForCausalLM", ",\"rope_parameters\":{\"other\":{}}", PGD_EUNSUPPORTED,
             "\"other\"");
    hf_fails("Gemma3ForCausalLM", ROPE("\"rope_theta\":0.5", ""), PGD_ERANGE, "sliding layers");
    hf_fails("Gemma3ForCausalLM", ",\"rope_parameters\":[{}]", PGD_EFORMAT, "rope_parameters");
}

static void test_model_traits_hf_llama4(void **state)
{
    (void)state;
    model_config c = hf("Llama4ForCausalLM", "");
    check_kinds(&c, "cccfcccf", 0, 8192);
    assert_true(c.qk_l2_norm && !c.qk_norm && !c.tied_head);
    assert_int_equal(c.rope, ROPE_ADJACENT);
    assert_true(c.rope_theta == 500000.0 && c.norm_eps == 1e-5f);
    assert_true(c.temperature_floor == 8192 && c.temperature_scale == 0.1);
    for (int32_t i = 0; i < 8; i++)
        assert_int_equal(c.layer_has_rope[i], i % 4 != 3);
    c = hf("Llama4ForCausalLM", ",\"attention_chunk_size\":24,\"no_rope_layers\":[0,1,1,1,0,1,1,1],"
                                "\"use_qk_norm\":false,\"attn_temperature_tuning\":4,"
                                "\"floor_scale\":16,\"attn_scale\":0.3");
    check_kinds(&c, "fcccfccc", 0, 24);
    assert_false(c.qk_l2_norm);
    assert_true(c.temperature_floor == 16 && c.temperature_scale == 0.3);
    c = hf("Llama4ForCausalLM", ",\"attention_chunk_size\":null,\"attn_temperature_tuning\":false,"
                                "\"no_rope_layers\":[]");
    check_kinds(&c, "ffffffff", 0, 0);
    assert_int_equal(c.temperature_floor, 0);
    assert_false(c.layer_has_rope[3]); /* an empty list counts as none */
    hf_fails("Llama4ForCausalLM", ",\"floor_scale\":0", PGD_ERANGE, "floor_scale");
    hf_fails("Llama4ForCausalLM", ",\"attn_scale\":-1", PGD_ERANGE, "temperature");
    hf_fails("Llama4ForCausalLM", ",\"attention_chunk_size\":-1", PGD_ERANGE,
             "attention_chunk_size");
    hf_fails("Llama4ForCausalLM",
             ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":2,"
             "\"high_freq_factor\":1}",
             PGD_EFORMAT, "high frequency factor");
}

/* --- GGUF ------------------------------------------------------------------------------------- */

static void begin_gguf(builder *b, const char *arch, uint32_t n_layers)
{
    static const char *const u32_keys[] = {"block_count",          "context_length",
                                           "embedding_length",     "feed_forward_length",
                                           "attention.head_count", "attention.head_count_kv",
                                           "attention.key_length"};
    const uint32_t values[] = {n_layers, 1024, 64, 128, 4, 2, 32};
    char key[96];
    builder_begin(b);
    builder_kv_string(b, "general.architecture", arch);
    for (size_t i = 0; i < PGD_ARRAY_LEN(values); i++) {
        (void)snprintf(key, sizeof(key), "%s.%s", arch, u32_keys[i]);
        builder_kv_u32(b, key, values[i]);
    }
    (void)snprintf(key, sizeof(key), "%s.attention.value_length", arch);
    builder_kv_u32(b, key, 32);
    (void)snprintf(key, sizeof(key), "%s.attention.layer_norm_rms_epsilon", arch);
    builder_kv_f32(b, key, 1e-6f);
}

static pgd_err end_gguf(model_config *out, builder *b, pgd_why *why)
{
    model_file *f;
    builder_tensor(b, "token_embd.weight", DTYPE_F32, 16, 64);
    builder_end(b);
    builder_write(path, b->data, b->n_bytes);
    builder_free(b);
    pgd_err err = model_file_open(&f, path, why);
    if (err == PGD_OK) {
        *out = *model_file_get_config(f);
        model_file_close(f);
    }
    return err;
}

static model_config gguf_ok(builder *b)
{
    model_config c = {0};
    pgd_why why = {{0}};
    if (end_gguf(&c, b, &why) != PGD_OK)
        fail_msg("%s", why.text);
    return c;
}

static void test_model_traits_gguf_gemma(void **state)
{
    (void)state;
    builder b;
    begin_gguf(&b, "gemma2", 6);
    builder_kv_u32(&b, "gemma2.attention.sliding_window", 24);
    model_config c = gguf_ok(&b);
    check_kinds(&c, "sfsfsf", 24, 0);
    assert_true(c.post_norms && c.scales_embed && !c.norm_plus_one && !c.qk_norm);
    assert_int_equal(c.rope, ROPE_HALVES);
    assert_int_equal(c.act, FFN_ACT_GELU_TANH);
    assert_true(c.attn_soft_cap == 50.0f && c.final_soft_cap == 30.0f);
    assert_true(fabs(c.attn_scale - 1 / sqrt(32.0)) < 1e-15);

    begin_gguf(&b, "gemma2", 46); /* the 27B model */
    builder_kv_f32(&b, "gemma2.attn_logit_softcapping", 20);
    builder_kv_f32(&b, "gemma2.final_logit_softcapping", 10);
    c = gguf_ok(&b);
    assert_true(c.attn_scale == 0.25 && c.attn_soft_cap == 20.0f && c.final_soft_cap == 10.0f);
    assert_int_equal(c.sliding_window, 4096); /* files older than the key */

    begin_gguf(&b, "gemma3", 8);
    builder_kv_u32(&b, "gemma3.attention.sliding_window", 24);
    builder_kv_f32(&b, "gemma3.rope.freq_base", 1e6f);
    builder_kv_string(&b, "gemma3.rope.scaling.type", "linear");
    builder_kv_f32(&b, "gemma3.rope.scaling.factor", 8);
    c = gguf_ok(&b);
    check_kinds(&c, "sssssfss", 24, 0);
    assert_true(c.rope_theta == 1e6 && c.rope_local_theta == 1e4 && c.rope_factor == 8.0);
    assert_true(c.qk_norm && c.attn_soft_cap == 0.0f && c.final_soft_cap == 0.0f);
}

static void test_model_traits_gguf_patterns(void **state)
{
    (void)state;
    builder b;
    pgd_why why = {{0}};
    model_config c;
    begin_gguf(&b, "llama", 3);
    builder_kv_u32(&b, "llama.attention.sliding_window", 24);
    c = gguf_ok(&b);
    check_kinds(&c, "sss", 24, 0);

    begin_gguf(&b, "gemma3", 5);
    builder_kv_u32(&b, "gemma3.attention.sliding_window", 24);
    builder_kv_u32(&b, "gemma3.attention.sliding_window_pattern", 2);
    builder_kv_f32(&b, "gemma3.rope.freq_base_swa", 3e4f);
    builder_kv_f32(&b, "gemma3.attention.scale", 0.5f);
    c = gguf_ok(&b);
    check_kinds(&c, "sfsfs", 24, 0);
    assert_true(c.rope_local_theta == 3e4 && c.attn_scale == 0.5);

    const uint8_t flags[3] = {1, 0, 0};
    begin_gguf(&b, "gemma3", 3);
    builder_kv_u32(&b, "gemma3.attention.sliding_window", 24);
    builder_kv_array(&b, "gemma3.attention.sliding_window_pattern", GGUF_BOOL, 3);
    builder_put(&b, flags, 3);
    c = gguf_ok(&b);
    check_kinds(&c, "sff", 24, 0);

    begin_gguf(&b, "gemma3", 3);
    builder_kv_u32(&b, "gemma3.attention.sliding_window", 24);
    builder_kv_array(&b, "gemma3.attention.sliding_window_pattern", GGUF_BOOL, 2);
    builder_put(&b, flags, 2);
    pgd_err err = end_gguf(&c, &b, &why);
    check_refusal(err, PGD_EFORMAT, &why, "sliding_window_pattern");
}

/* Keys say what differs from the published models; here with a layer that has a router. */
static void test_model_traits_gguf_llama4(void **state)
{
    (void)state;
    builder b;
    for (int32_t k = 0; k < 3; k++) {
        begin_gguf(&b, "llama4", 5);
        builder_kv_u32(&b, "llama4.expert_count", k == 2 ? 128 : 4);
        builder_kv_u32(&b, "llama4.expert_used_count", 1);
        builder_kv_u32(&b, "llama4.expert_feed_forward_length", 32);
        if (k == 1)
            builder_kv_u32(&b, "llama4.attention.sliding_window", 24);
        if (k == 2)
            builder_kv_u32(&b, "llama4.attention.sliding_window", 0);
        builder_tensor(&b, "blk.1.ffn_gate_inp.weight", DTYPE_F32, 4, 64);
        model_config c = gguf_ok(&b);
        check_kinds(&c, k == 2 ? "fffff" : "cccfc", 0, k == 0 ? 8192 : k == 1 ? 24 : 0);
        assert_int_equal(c.layer_has_rope[3], k == 2);
        assert_int_equal(c.qk_l2_norm, k != 2); /* the model with 128 experts has none */
        assert_true(c.temperature_floor == 8192 && c.temperature_scale == 0.1);
        assert_true(c.layer_has_experts[1] && !c.layer_has_experts[0]);
        assert_true(c.expert_ffn_dim == 32 && c.shared_ffn_dim == 32 && c.ffn_dim == 128);
        assert_true(c.expert_scales_input && c.expert_gate == EXPERT_GATE_SIGMOID);
        assert_int_equal(c.rope, ROPE_ADJACENT);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_traits_hf_windows),
        cmocka_unit_test(test_model_traits_hf_within_another),
        cmocka_unit_test(test_model_traits_hf_gemma2),
        cmocka_unit_test(test_model_traits_hf_gemma3),
        cmocka_unit_test(test_model_traits_hf_llama4),
        cmocka_unit_test(test_model_traits_gguf_llama4),
        cmocka_unit_test(test_model_traits_gguf_gemma),
        cmocka_unit_test(test_model_traits_gguf_patterns),
    };
    return cmocka_run_group_tests(tests, make_model_dir, remove_model_dir);
}
