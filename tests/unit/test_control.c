/* Control messages on the wire: round trips with every field set, hostile frames, bad texts. */
#include "common/log.h"
#include "proto/control.h"
#include "tests/unit/proto_samples.h"

#define DEFINE(name, type)                                                                        \
    static pgd_err any_##name(void *out, wire_scratch *scratch, const void *data, size_t n_bytes, \
                              const wire_limits *limits, pgd_why *why)                            \
    {                                                                                             \
        (void)scratch;                                                                            \
        (void)limits;                                                                             \
        return control_decode_##name(out, data, n_bytes, why);                                    \
    }                                                                                             \
    static void check_##name(const name##_msg *in)                                                \
    {                                                                                             \
        name##_msg out;                                                                           \
        pgd_why why = {0};                                                                        \
        frame f = frame_encode(type, &control_##name##_record, in);                               \
        if (control_decode_##name(&out, f.data, f.n_bytes, &why) != PGD_OK)                       \
            fail_msg("%s", why.text);                                                             \
        assert_memory_equal(in, &out, sizeof out);                                                \
        check_frame_hostile(f, type, &control_##name##_record, any_##name, NULL, NULL);           \
        free(f.data);                                                                             \
    }
CONTROL_MESSAGES(DEFINE)

/* Zeroed with memset, so that padding compares equal. */
#define ZEROED(T, x) \
    T x;             \
    memset(&(x), 0, sizeof(x))

static void test_control_hello(void **state)
{
    (void)state;
    ZEROED(hello_msg, m);
    m.protocol_version = WIRE_VERSION;
    m.rank = 3;
    m.pid = 123456;
    for (int i = 0; i < CONTROL_PROOF_BYTES; i++)
        m.proof[i] = (uint8_t)(250 + i);
    snprintf(m.version, sizeof m.version, "0.1.0");
    snprintf(m.device, sizeof m.device, "cpu");
    snprintf(m.device_name, sizeof m.device_name, "a processor, 2 threads");
    m.memory_total_bytes = 1ull << 40;
    m.memory_free_bytes = UINT64_MAX;
    check_hello(&m);
}

static void test_control_attach(void **state)
{
    (void)state;
    ZEROED(challenge_msg, challenge);
    memset(challenge.nonce, 0x5a, sizeof challenge.nonce);
    check_challenge(&challenge);
    ZEROED(attach_msg, m);
    memset(m.nonce, 0xa5, sizeof m.nonce);
    memset(m.proof, 0xff, sizeof m.proof);
    m.max_frame_bytes = INT32_MAX;
    check_attach(&m);
    static const uint32_t refused[] = {0, CONTROL_MIN_FRAME_BYTES - 1, (uint32_t)INT32_MAX + 1,
                                       UINT32_MAX};
    for (size_t i = 0; i < PGD_ARRAY_LEN(refused); i++) {
        attach_msg out;
        m.max_frame_bytes = refused[i];
        frame f = frame_encode(WIRE_ATTACH, &control_attach_record, &m);
        assert_int_equal(control_decode_attach(&out, f.data, f.n_bytes, NULL), PGD_EPROTO);
        free(f.data);
    }
}

static void test_control_load(void **state)
{
    (void)state;
    ZEROED(load_msg, m);
    memset(m.model_path, 'x', sizeof m.model_path - 1); /* as long as it may be */
    m.kv_dtype = 30;
    m.block_size = 16;
    m.max_model_len = 4096;
    m.max_num_seqs = 64;
    m.max_num_batched_tokens = 256;
    m.max_logprobs = 20;
    m.n_threads = 2;
    m.pin_threads = 1;
    m.sim_step_us = 1000;
    m.sim_token_us = UINT32_MAX;
    m.sim_vocab_size = 512;
    snprintf(m.sim_kv_layers, sizeof m.sim_kv_layers, "full,sliding:64");
    check_load(&m);
}

static void test_control_small(void **state)
{
    (void)state;
    ZEROED(load_progress_msg, progress);
    progress.done_bytes = 5;
    progress.total_bytes = 1ull << 50;
    check_load_progress(&progress);
    ZEROED(load_done_msg, done);
    done.weight_bytes = 100;
    done.memory_free_bytes = 200;
    done.n_kv_layers = 3;
    done.kv_layers[0] = (kv_layer_spec){ATTENTION_FULL, 0, 300};
    done.kv_layers[1] = (kv_layer_spec){ATTENTION_CHUNKED, INT32_MAX, INT32_MAX};
    done.kv_layers[2] = (kv_layer_spec){ATTENTION_CROSS, 0, 1};
    done.max_encoder_tokens = 1024;
    done.vocab_size = 1000;
    memset(done.model_fingerprint, 0xa5, sizeof done.model_fingerprint);
    done.load_us = 77;
    snprintf(done.numerics, sizeof done.numerics, "cpu avx2 numerics=1 gcc 12.2.0");
    check_load_done(&done);
    ZEROED(kv_config_msg, kv);
    kv.n_blocks = 1000;
    kv.max_model_len = 2048;
    kv.layout.n_groups = 2;
    kv.layout.groups[0] = (kv_group_layout){ATTENTION_FULL, 5, 1};
    kv.layout.groups[1] = (kv_group_layout){ATTENTION_SLIDING, 64, KV_LAYOUT_MAX_BLOCK_SIZE};
    kv.layout.n_layers = 3;
    kv.layout.layers[1] = (kv_layer_place){PGD_MAX_KV_GROUPS - 1, PGD_MAX_KV_LAYERS - 1};
    kv.layout.layers[2] = (kv_layer_place){1, 0};
    kv.layout.n_slots = 2;
    kv.layout.page_bytes[0] = UINT64_MAX;
    kv.layout.page_bytes[1] = 7;
    snprintf(kv.offload_path, sizeof kv.offload_path, "/proc/17/fd/9");
    kv.offload_blocks = INT32_MAX;
    kv.offload_n_ranks = 1024;
    check_kv_config(&kv);
    ZEROED(kv_ready_msg, ready);
    ready.kv_bytes = 1ull << 33;
    check_kv_ready(&ready);
    ZEROED(heartbeat_msg, beat);
    beat.progress = 99;
    beat.last_step_id = 100;
    check_heartbeat(&beat);
    ZEROED(transfers_done_msg, transfers);
    transfers.n_done = 2;
    transfers.done[0] = (kv_transfer_done){UINT64_MAX, INT32_MAX, UINT32_MAX, UINT64_MAX};
    transfers.done[1] = (kv_transfer_done){1, 0, 2, 3};
    check_transfers_done(&transfers);
    transfers.n_done = CONTROL_MAX_DONE; /* a larger frame than others of this table */
    transfers_done_msg again;
    frame f = frame_encode(WIRE_TRANSFERS_DONE, &control_transfers_done_record, &transfers);
    assert_int_equal(control_decode_transfers_done(&again, f.data, f.n_bytes, NULL), PGD_OK);
    assert_int_equal(again.n_done, CONTROL_MAX_DONE);
    free(f.data);
    transfers.n_done = 0;
    f = frame_encode(WIRE_TRANSFERS_DONE, &control_transfers_done_record, &transfers);
    assert_int_equal(control_decode_transfers_done(&again, f.data, f.n_bytes, NULL), PGD_EPROTO);
    free(f.data);
    ZEROED(log_level_msg, level);
    level.level = LOG_TRACE;
    check_log_level(&level);
    level.level = LOG_TRACE + 1;
    log_level_msg other;
    f = frame_encode(WIRE_LOG_LEVEL, &control_log_level_record, &level);
    assert_int_equal(control_decode_log_level(&other, f.data, f.n_bytes, NULL), PGD_EPROTO);
    free(f.data);
    ZEROED(error_msg, error);
    error.err = PGD_EFORMAT;
    error.is_fatal = 2;
    snprintf(error.text, sizeof error.text, "expected GGUF, got PNG");
    check_error(&error);
}

static void test_control_refuses(void **state)
{
    (void)state;
    ZEROED(error_msg, m);
    error_msg out;
    pgd_why why = {0};
    snprintf(m.text, sizeof m.text, "abc");
    m.is_fatal = 3;
    frame f = frame_encode(WIRE_ERROR, &control_error_record, &m);
    assert_int_equal(control_decode_error(&out, f.data, f.n_bytes, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "error.is_fatal: expected 0..2, got 3, at byte 28"));
    free(f.data);
    m.is_fatal = 1;
    f = frame_encode(WIRE_ERROR, &control_error_record, &m);
    f.data[f.n_bytes - 2] = 0; /* a NUL inside the text */
    assert_int_equal(control_decode_error(&out, f.data, f.n_bytes, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "without NUL"));
    f.data[f.n_bytes - 2] = 'b';
    hello_msg hello;
    assert_int_equal(control_decode_hello(&hello, f.data, f.n_bytes, &why), PGD_EPROTO);
    assert_string_equal(why.text, "frame: expected message hello, got error");
    f.data[4] = WIRE_VERSION + 1;
    assert_int_equal(control_decode_error(&out, f.data, f.n_bytes, &why), PGD_EUNSUPPORTED);
    assert_non_null(strstr(why.text, "expected protocol version 6, got 7"));
    free(f.data);
}

static void test_control_pong(void **state)
{
    (void)state;
    heartbeat_msg beat = {.progress = 3, .last_step_id = 4};
    heartbeat_msg out;
    frame f = frame_encode(WIRE_PONG, &control_heartbeat_record, &beat);
    assert_int_equal(control_decode_pong(&out, f.data, f.n_bytes, NULL), PGD_OK);
    assert_int_equal(out.last_step_id, 4);
    assert_int_equal(control_decode_heartbeat(&out, f.data, f.n_bytes, NULL), PGD_EPROTO);
    free(f.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_control_hello), cmocka_unit_test(test_control_load),
        cmocka_unit_test(test_control_small), cmocka_unit_test(test_control_refuses),
        cmocka_unit_test(test_control_pong),  cmocka_unit_test(test_control_attach),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
