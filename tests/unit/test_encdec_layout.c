/* Encoder-decoder models on disk: what config.json and generation_config.json say, tensor names, and
 * which tensors must be there. */
#include <math.h>

#include "common/model/encdec_layout.h"
#include "common/model/model_file.h"
#include "common/model/model_hf_names.h"
#include "tests/unit/model_dir.h"

#define BART_DIR "tests/data/models/bart-tiny"

#define SIZES                                                                                  \
    "\"d_model\":48,\"vocab_size\":32,\"decoder_layers\":3,\"decoder_attention_heads\":2,"     \
    "\"decoder_ffn_dim\":96,\"encoder_layers\":2,\"encoder_attention_heads\":3,\"encoder_ffn_" \
    "dim\""                                                                                    \
    ":80"
#define START ",\"decoder_start_token_id\":2"

static pgd_err read_config(model_config *out, const char *members, const char *generation,
                           pgd_why *why)
{
    char text[2048];
    model_file *f;
    pgd_err config_err;
    (void)snprintf(text, sizeof(text),
                   "{\"architectures\":[\"BartForConditionalGeneration\"]%s," SIZES "}", members);
    builder_write_text(dir, "config.json", text);
    if (generation != NULL) {
        builder_write_text(dir, "generation_config.json", generation);
    } else {
        char file[128];
        (void)snprintf(file, sizeof(file), "%s/generation_config.json", dir);
        assert_int_equal(remove(file), 0);
    }
    builder_write_safetensors(dir, "model.safetensors",
                              "{\"final_logits_bias\":{\"dtype\":\"F16\",\"shape\":[2,2],"
                              "\"data_offsets\":[0,8]}}",
                              8);
    assert_int_equal(model_file_open_listing(&f, dir, &config_err, why, why), PGD_OK);
    if (config_err == PGD_OK)
        *out = *model_file_get_config(f);
    model_file_close(f);
    return config_err;
}

static model_config read_bart(const char *members, const char *generation)
{
    model_config c = {0};
    pgd_why why = {{0}};
    if (read_config(&c, members, generation, &why) != PGD_OK)
        fail_msg("%s %s: %s", members, generation, why.text);
    return c;
}

static void refuses(const char *members, const char *generation, pgd_err wanted_err,
                    const char *wanted)
{
    model_config c;
    pgd_why why = {{0}};
    pgd_err err = read_config(&c, members, generation, &why);
    check_refusal(err, wanted_err, &why, wanted);
}

static void test_encdec_layout_reads_a_config(void **state)
{
    (void)state;
    model_config c = read_bart(START, "{}");
    assert_true(c.is_encoder_decoder && c.tied_head && c.encdec.has_logits_bias);
    assert_string_equal(c.arch, "bart");
    assert_int_equal(c.dim, 48);
    assert_int_equal(c.n_layers, 3);
    assert_int_equal(c.n_heads, 2);
    assert_int_equal(c.n_kv_heads, 2);
    assert_int_equal(c.head_dim, 24);
    assert_int_equal(c.ffn_dim, 96);
    assert_int_equal(c.max_context, 1024);
    assert_int_equal(c.encdec.n_layers, 2);
    assert_int_equal(c.encdec.n_heads, 3);
    assert_int_equal(c.encdec.head_dim, 16);
    assert_int_equal(c.encdec.ffn_dim, 80);
    assert_int_equal(c.encdec.max_source, 1024);
    assert_int_equal(c.encdec.position_offset, 2);
    assert_int_equal(c.act, FFN_ACT_GELU);
    assert_true(c.encdec.embed_scale == 1.0f);
    c = read_bart(START ",\"scale_embedding\":true,\"activation_function\":\"relu\","
                        "\"max_position_embeddings\":64",
                  "{}");
    assert_true(fabs((double)c.encdec.embed_scale - sqrt(48)) < 1e-6);
    assert_int_equal(c.act, FFN_ACT_RELU);
    assert_int_equal(c.encdec.max_source, 64);
    refuses(START ",\"d_model\":50", "{}", PGD_EFORMAT, "encoder_attention_heads");
    refuses(START ",\"activation_function\":\"x\"", "{}", PGD_EUNSUPPORTED, "\"x\"");
    refuses(START ",\"tie_word_embeddings\":false", "{}", PGD_EUNSUPPORTED, "tie_word_embeddings");
    refuses(START ",\"encoder_layers\":0", "{}", PGD_ERANGE, "encoder layers");
    refuses(START ",\"max_position_embeddings\":2000000", "{}", PGD_ERANGE, "encoder positions");
    refuses(START ",\"encoder_ffn_dim\":null", "{}", PGD_EFORMAT, "encoder_ffn_dim");
}

/* generation_config.json, when there, says alone which tokens are forced. */
static void test_encdec_layout_reads_forced_tokens(void **state)
{
    (void)state;
#define FORCED ",\"forced_bos_token_id\":5,\"forced_eos_token_id\":6"
    model_config c = read_bart(START FORCED, "{}");
    assert_int_equal(c.encdec.start_id, 2);
    assert_int_equal(c.encdec.forced_bos_id, -1);
    assert_int_equal(c.encdec.forced_eos_id, -1);
    c = read_bart(START FORCED, NULL);
    assert_int_equal(c.encdec.forced_bos_id, 5);
    assert_int_equal(c.encdec.forced_eos_id, 6);
    c = read_bart(START FORCED, "{\"decoder_start_token_id\":7,\"forced_bos_token_id\":8}");
    assert_int_equal(c.encdec.start_id, 7);
    assert_int_equal(c.encdec.forced_bos_id, 8);
    assert_int_equal(c.encdec.forced_eos_id, -1);
    c = read_bart(",\"bos_token_id\":3", "{}");
    assert_int_equal(c.encdec.start_id, 3);
    assert_string_equal(c.encdec.ignored, "");
    c = read_bart(START ",\"num_beams\":1",
                  "{\"num_beams\":4,\"early_stopping\":true,\"no_repeat_ngram_size\":0}");
    assert_string_equal(c.encdec.ignored, "num_beams, early_stopping");
    refuses("", "{}", PGD_EFORMAT, "decoder_start_token_id");
    refuses(START, "{\"forced_eos_token_id\":[2]}", PGD_ERANGE, "forced_eos_token_id");
    refuses(",\"decoder_start_token_id\":32", "{}", PGD_ERANGE, "decoder_start_token_id");
}

static void test_encdec_layout_maps_names(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {"model.shared.weight", "token_embd.weight"},
        {"shared.weight", "token_embd.weight"},
        {"final_logits_bias", "output.bias"},
        {"model.encoder.embed_positions.weight", "enc.position_embd.weight"},
        {"decoder.layernorm_embedding.bias", "dec.token_embd_norm.bias"},
        {"model.decoder.layers.11.encoder_attn.out_proj.bias", "dec.blk.11.cross_attn_output.bias"},
        {"model.encoder.layers.0.fc2.weight", "enc.blk.0.ffn_down.weight"},
        {"model.encoder.layers.0.fc3.weight", "model.encoder.layers.0.fc3.weight"},
        {"model.encoder.layers.fc1.weight", "model.encoder.layers.fc1.weight"},
        {"model.encoder.layers.1fc1.weight", "model.encoder.layers.1fc1.weight"},
        {"other", "other"},
    };
    char out[64];
    for (size_t i = 0; i < PGD_ARRAY_LEN(pairs); i++) {
        assert_true(model_hf_names_map_encdec(out, sizeof(out), pairs[i][0]));
        assert_string_equal(out, pairs[i][1]);
    }
    assert_false(model_hf_names_map_encdec(out, 8, "model.encoder.embed_positions.weight"));
    assert_false(model_hf_names_map_encdec(out, 17, "model.shared.weight"));
}

static void test_encdec_layout_lists_what_it_has(void **state)
{
    (void)state;
    model_file *f;
    pgd_why why = {{0}};
    assert_int_equal(model_file_open(&f, BART_DIR, &why), PGD_OK);
    if (model_file_check_runnable(f, &why) != PGD_OK)
        fail_msg("%s", why.text);
    model_config c = *model_file_get_config(f);
    model_layout_iter iter = {0};
    model_layout_tensor t;
    int32_t n = 0;
    for (; model_layout_next(&t, &iter, &c); n++) {
        assert_true(model_layout_has_tensor(&c, t.name));
        assert_non_null(model_file_get_tensor(f, t.name));
    }
    assert_int_equal(n, model_file_n_tensors(f));
    assert_true(model_layout_has_tensor(&c, "enc.blk.1.attn_q.weight"));
    assert_false(model_layout_has_tensor(&c, "enc.blk.2.attn_q.weight"));
    assert_true(model_layout_has_tensor(&c, "dec.blk.2.attn_q.weight"));
    assert_false(model_layout_has_tensor(&c, "enc.blk.0.cross_attn_q.weight"));
    assert_false(model_layout_has_tensor(&c, "enc.blk.00.attn_q.weight"));
    assert_false(model_layout_has_tensor(&c, "dec.blk.99999999999999999999.attn_q.weight"));
    assert_false(model_layout_has_tensor(&c, "blk.0.attn_q.weight"));
    assert_true(model_layout_may_ignore(&c, "enc.token_embd.weight"));
    assert_false(model_layout_may_ignore(&c, "enc.blk.0.x.weight"));
    c.encdec.has_logits_bias = false;
    iter = (model_layout_iter){0};
    for (n = 0; model_layout_next(&t, &iter, &c);)
        n++;
    assert_int_equal(n, model_file_n_tensors(f) - 1);
    assert_false(model_layout_has_tensor(&c, "output.bias"));
    model_file_close(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_encdec_layout_reads_a_config),
        cmocka_unit_test(test_encdec_layout_reads_forced_tokens),
        cmocka_unit_test(test_encdec_layout_maps_names),
        cmocka_unit_test(test_encdec_layout_lists_what_it_has),
    };
    return cmocka_run_group_tests(tests, make_model_dir, remove_model_dir);
}
