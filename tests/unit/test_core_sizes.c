/* Defaults by device, and the KV pool from configuration or memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "common/log.h"
#include "engine/core/core_sizes.h"

static config cfg_;
static model_config model_;
static core_sizes sizes_;

static void start(const char *device)
{
    config_init(&cfg_);
    snprintf(cfg_.device, sizeof cfg_.device, "%s", device);
    memset(&model_, 0, sizeof model_);
    model_.max_context = 8192;
    model_.main_dtype = DTYPE_Q4_K;
}

static void init(const model_config *model)
{
    pgd_why why = {0};
    if (core_sizes_init(&sizes_, &cfg_, model, &why) != PGD_OK)
        fail_msg("%s", why.text);
}

static void test_core_sizes_defaults(void **state)
{
    (void)state;
    start("auto");
    init(&model_);
    assert_string_equal(sizes_.device, "cpu");
    assert_int_equal(sizes_.max_num_seqs, 64);
    assert_int_equal(sizes_.max_num_batched_tokens, 256);
    assert_int_equal(sizes_.max_model_len, 8192);
    assert_int_equal(sizes_.kv_dtype, DTYPE_F16);
    assert_int_equal(sizes_.max_held, 512);
    model_.main_dtype = DTYPE_BF16;
    init(&model_);
    assert_int_equal(sizes_.kv_dtype, DTYPE_BF16);
    model_.main_dtype = DTYPE_F32;
    init(&model_);
    assert_int_equal(sizes_.kv_dtype, DTYPE_F32);
    start("sim");
    init(NULL);
    assert_int_equal(sizes_.max_num_seqs, 256);
    assert_int_equal(sizes_.max_num_batched_tokens, 2048);
    cfg_.max_num_seqs = 3;
    cfg_.max_num_batched_tokens = 17;
    cfg_.max_model_len = 100;
    init(NULL);
    assert_int_equal(sizes_.max_num_seqs, 3);
    assert_int_equal(sizes_.max_num_batched_tokens, 17);
    assert_int_equal(sizes_.max_model_len, 100);
}

static void test_core_sizes_refuses(void **state)
{
    (void)state;
    pgd_why why = {0};
    start("tpu");
    assert_int_equal(core_sizes_init(&sizes_, &cfg_, &model_, &why), PGD_EINVAL);
    assert_string_equal(why.text, "device: expected auto, cpu or sim, got tpu");
    start("cpu");
    assert_int_equal(core_sizes_init(&sizes_, &cfg_, NULL, &why), PGD_EINVAL);
    snprintf(cfg_.dtype_kv, sizeof cfg_.dtype_kv, "q4_0");
    assert_int_equal(core_sizes_init(&sizes_, &cfg_, &model_, &why), PGD_EINVAL);
    assert_non_null(strstr(why.text, "got q4_0"));
}

static core_kv kv_;

/* 10 layers of 2,000 bytes per block; n_sliding of them with a window of 64. */
static int32_t fit_layers(uint64_t free_bytes, int32_t n_sliding)
{
    static load_done_msg done;
    done.memory_free_bytes = free_bytes;
    done.n_kv_layers = 10;
    for (int32_t i = 0; i < 10; i++)
        done.kv_layers[i] = i < n_sliding ? (kv_layer_spec){ATTENTION_SLIDING, 64, 125}
                                          : (kv_layer_spec){ATTENTION_FULL, 0, 125};
    pgd_why why = {0};
    memset(&kv_, 0, sizeof kv_);
    pgd_err err = core_sizes_fit_kv(&kv_, &sizes_, &cfg_, &done, &why);
    if (err != PGD_OK) {
        assert_true(why.text[0] != 0);
        return (int32_t)err;
    }
    return kv_.n_blocks;
}

static int32_t fit(uint64_t free_bytes)
{
    return fit_layers(free_bytes, 0);
}

/* A block takes 20,000 bytes here. */
static void test_core_sizes_kv(void **state)
{
    (void)state;
    start("cpu");
    init(&model_);
    assert_int_equal(fit(8000000), 100); /* a quarter of the memory */
    assert_int_equal(sizes_.max_model_len, 99 * 16);
    init(&model_);
    assert_int_equal(fit(1ull << 40), 64 * 512 + 1); /* what 64 requests of 8192 can use */
    assert_int_equal(sizes_.max_model_len, 8192);
    cfg_.kv_cache_memory = 500000;
    assert_int_equal(fit(1ull << 40), 25);
    cfg_.num_kv_blocks = 7;
    init(&model_);
    assert_int_equal(fit(1ull << 40), 7);
    assert_int_equal(sizes_.max_model_len, 96);
    cfg_.max_model_len = 5000; /* given: kept, with a warning */
    init(&model_);
    assert_int_equal(fit(1ull << 40), 7);
    assert_int_equal(sizes_.max_model_len, 5000);
    cfg_.num_kv_blocks = 0;
    cfg_.kv_cache_memory = 0;
    assert_int_equal(fit(80000), PGD_ENOMEM);
}

/* 8 layers with a window and 2 without: groups of two layers, so a block takes 4,000 bytes. A request
 * holds a block per 16 tokens in one group, and ceil((63 + 2 * 32) / 16) + 1 = 9 at most in each of
 * the four others. */
static void test_core_sizes_kv_groups(void **state)
{
    (void)state;
    start("cpu");
    cfg_.max_num_batched_tokens = 32;
    cfg_.max_num_seqs = 2;
    init(&model_);
    assert_int_equal(sizes_.max_unfinished_tokens, 64);
    assert_int_equal(fit_layers(1ull << 40, 8), 2 * (512 + 4 * 9) + 1);
    assert_int_equal(kv_.groups.layout.n_groups, 5);
    assert_int_equal(kv_.max_len, 8192);
    assert_true(kv_.n_full_length == 2.0);
    cfg_.num_kv_blocks = 1 + 36 + 100;
    assert_int_equal(fit_layers(1ull << 40, 8), 137);
    assert_int_equal(sizes_.max_model_len, 1600); /* lowered */
    assert_int_equal(kv_.max_len, 1600);
    assert_true(kv_.n_full_length == 1.0);
    cfg_.max_model_len = 5000; /* kept */
    init(&model_);
    assert_int_equal(fit_layers(1ull << 40, 8), 137);
    assert_int_equal(sizes_.max_model_len, 5000);
    assert_int_equal(kv_.max_len, 1600);
    cfg_.num_kv_blocks = 5; /* not one block for each group */
    assert_int_equal(fit_layers(1ull << 40, 8), PGD_ENOMEM);
    cfg_.disable_hybrid_kv_cache_manager = true; /* one group; a block takes 20,000 bytes */
    cfg_.num_kv_blocks = 0;
    cfg_.max_model_len = 0;
    cfg_.kv_cache_memory = 137 * 4000;
    init(&model_);
    assert_int_equal(fit_layers(1ull << 40, 8), 27);
    assert_int_equal(kv_.groups.layout.n_groups, 1);
    assert_int_equal(sizes_.max_model_len, 26 * 16);
    start("cpu");
    cfg_.max_num_batched_tokens = 100;
    cfg_.long_prefill_token_threshold = 7;
    init(&model_);
    assert_int_equal(sizes_.max_unfinished_tokens, 14);
    cfg_.max_model_len = 10;
    init(&model_);
    assert_int_equal(sizes_.max_unfinished_tokens, 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_core_sizes_defaults),
        cmocka_unit_test(test_core_sizes_refuses),
        cmocka_unit_test(test_core_sizes_kv),
        cmocka_unit_test(test_core_sizes_kv_groups),
    };
    log_init("test", LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
