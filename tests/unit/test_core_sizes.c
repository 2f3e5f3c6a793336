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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_core_sizes_defaults),
        cmocka_unit_test(test_core_sizes_refuses),
        cmocka_unit_test(test_core_sizes_kv),
    };
    log_init("test", LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
