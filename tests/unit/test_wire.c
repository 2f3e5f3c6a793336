/* The frame header, the limits, messages without a body, and the codec's refusals that no message's
 * own test shows. */
#include "tests/unit/proto_samples.h"

static void test_wire_header(void **state)
{
    (void)state;
    frame f = frame_encode(WIRE_SHUTDOWN, NULL, NULL);
    wire_header h;
    pgd_why why = {0};
    assert_int_equal(f.n_bytes, WIRE_HEADER_BYTES);
    assert_memory_equal(
        f.data,
        "PGDW\x06\x00\x0d\x00\x07\x00\x00\x00\x00\x00\x00\x00\x18\x00\x00\x00\x00\x00\x00\x00", 24);
    assert_int_equal(wire_decode_header(&h, f.data, f.n_bytes, &why), PGD_OK);
    assert_int_equal(h.type, WIRE_SHUTDOWN);
    assert_int_equal(h.worker_epoch, 7);
    assert_int_equal(wire_decode(NULL, NULL, f.data, f.n_bytes, WIRE_SHUTDOWN, NULL, NULL, &why),
                     PGD_OK);
    for (size_t n = 0; n < f.n_bytes; n++)
        assert_int_equal(wire_decode_header(&h, f.data, n, &why), PGD_EPROTO);
    f.data[4] = 2;
    assert_int_equal(wire_decode_header(&h, f.data, f.n_bytes, &why), PGD_EUNSUPPORTED);
    assert_non_null(strstr(why.text, "expected protocol version 6, got 2"));
    assert_int_equal(h.version, 2);
    f.data[4] = WIRE_VERSION;
    f.data[6] = 0;
    assert_int_equal(wire_decode_header(&h, f.data, f.n_bytes, &why), PGD_EPROTO);
    f.data[6] = WIRE_TYPE_LAST + 1;
    assert_int_equal(wire_decode_header(&h, f.data, f.n_bytes, &why), PGD_EPROTO);
    f.data[6] = WIRE_SHUTDOWN;
    f.data[12] = 1;
    assert_int_equal(wire_decode_header(&h, f.data, f.n_bytes, &why), PGD_EPROTO);
    f.data[12] = 0;
    f.data[16] = 25;
    assert_int_equal(wire_decode_header(&h, f.data, f.n_bytes, &why), PGD_EPROTO);
    free(f.data);
}

static void test_wire_trailing_bytes(void **state)
{
    (void)state;
    uint64_t buf[4] = {0};
    pgd_why why = {0};
    wire_encode(buf, WIRE_HEADER_BYTES, WIRE_PING, 1, NULL, NULL);
    ((uint8_t *)buf)[16] = 32;
    assert_int_equal(wire_decode(NULL, NULL, buf, 32, WIRE_PING, NULL, NULL, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "expected the end of message ping at byte 24, got 32"));
}

static void test_wire_misaligned(void **state)
{
    (void)state;
    uint64_t buf[4];
    uint8_t *at = (uint8_t *)buf + 1;
    uint8_t made[WIRE_HEADER_BYTES];
    wire_encode(made, sizeof made, WIRE_PING, 1, NULL, NULL);
    memcpy(at, made, sizeof made);
    assert_int_equal(wire_decode(NULL, NULL, at, sizeof made, WIRE_PING, NULL, NULL, NULL),
                     PGD_EINVAL);
}

static void test_wire_limits(void **state)
{
    (void)state;
    wire_limits l = {.max_num_seqs = 2,
                     .max_num_batched_tokens = 8,
                     .max_model_len = 33,
                     .vocab_size = 10,
                     .n_blocks = 5,
                     .n_groups = 1,
                     .block_sizes = {16},
                     .max_logprobs = 20};
    assert_int_equal(wire_limits_derive(&l, NULL), PGD_OK);
    assert_int_equal(l.max_token_id, 9);
    assert_int_equal(l.max_block_id, 4);
    assert_int_equal(l.max_blocks_per_request, 4);
    assert_int_equal(l.max_result_logprobs, 42);
    assert_int_equal(l.max_logprobs_per_token, 21);
    assert_int_equal(l.max_prompt_logprobs, 168);
    pgd_why why = {0};
    l.n_groups = PGD_MAX_KV_GROUPS + 1;
    assert_int_equal(wire_limits_derive(&l, &why), PGD_ERANGE);
    assert_non_null(strstr(why.text, "n_groups=9"));
    l.n_groups = 3; /* the smallest block needs most */
    l.block_sizes[1] = 8;
    l.block_sizes[2] = 32;
    assert_int_equal(wire_limits_derive(&l, NULL), PGD_OK);
    assert_int_equal(l.max_blocks_per_request, 6);
    l.max_encoder_tokens = 81;
    assert_int_equal(wire_limits_derive(&l, NULL), PGD_OK);
    assert_int_equal(l.max_blocks_per_request, 12);
    l.max_encoder_tokens = 0;
    l.block_sizes[2] = 0;
    assert_int_equal(wire_limits_derive(&l, &why), PGD_ERANGE);
    assert_non_null(strstr(why.text, "block size, got 0, at group 2"));
    l.n_groups = 1;
    l.vocab_size = 0;
    assert_int_equal(wire_limits_derive(&l, NULL), PGD_ERANGE);
    l.vocab_size = 10;
    l.max_num_batched_tokens = WIRE_MAX_BATCHED_TOKENS;
    assert_int_equal(wire_limits_derive(&l, NULL), PGD_OK);
    assert_int_equal(l.max_prompt_logprobs, 21 << 20);
    l.max_num_batched_tokens++;
    assert_int_equal(wire_limits_derive(&l, NULL), PGD_ERANGE);
}

/* A scratch buffer that is too small is a refusal, not an overrun. */
static void test_wire_scratch_small(void **state)
{
    (void)state;
    static sample_arena arena;
    sample_arena_init(&arena, 11);
    cached_request_msg c[3] = {{.request_id = 1, .n_scheduled_tokens = 1},
                               {.request_id = 2, .n_scheduled_tokens = 1},
                               {.request_id = 3, .n_scheduled_tokens = 1}};
    block_append_msg appends[3] = {{.request_id = 1}, {.request_id = 2}, {.request_id = 3}};
    scheduler_output in = {.n_groups = arena.limits.n_groups,
                           .total_scheduled_tokens = 3,
                           .n_cached = 3,
                           .cached_requests = c,
                           .n_appends = 3,
                           .appends = appends};
    scheduler_output out;
    pgd_why why = {0};
    frame f = frame_encode(WIRE_STEP, &scheduler_output_record, &in);
    wire_scratch s = scratch_make(sizeof appends);
    assert_int_equal(scheduler_output_decode(&out, &s, f.data, f.n_bytes, &arena.limits, &why),
                     PGD_OK);
    s.cap_bytes--;
    assert_int_equal(scheduler_output_decode(&out, &s, f.data, f.n_bytes, &arena.limits, &why),
                     PGD_EPROTO);
    assert_non_null(strstr(why.text, "3 elements are more than this side has room for"));
    free(s.data);
    free(f.data);
}

static void test_wire_names(void **state)
{
    (void)state;
    assert_string_equal(wire_type_name(WIRE_HELLO), "hello");
    assert_string_equal(wire_type_name(WIRE_SHUTDOWN), "shutdown");
    assert_string_equal(wire_type_name((wire_type)0), "?");
    assert_string_equal(wire_type_name((wire_type)99), "?");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wire_header),        cmocka_unit_test(test_wire_trailing_bytes),
        cmocka_unit_test(test_wire_misaligned),    cmocka_unit_test(test_wire_limits),
        cmocka_unit_test(test_wire_scratch_small), cmocka_unit_test(test_wire_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
