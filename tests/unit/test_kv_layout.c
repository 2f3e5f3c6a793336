/* What the two sides hold a KV layout against, and where attention begins. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "proto/kv_layout.h"

/* Full, window of 32, window of 32, and the encoder's; blocks of 16 and 32. */
static const kv_layer_spec specs[4] = {{ATTENTION_FULL, 0, 100},
                                       {ATTENTION_SLIDING, 32, 100},
                                       {ATTENTION_SLIDING, 32, 50},
                                       {ATTENTION_CROSS, 0, 100}};
static const kv_layout good = {.n_groups = 4,
                               .groups = {{ATTENTION_FULL, 0, 16},
                                          {ATTENTION_SLIDING, 32, 16},
                                          {ATTENTION_SLIDING, 32, 32},
                                          {ATTENTION_CROSS, 0, 16}},
                               .n_layers = 4,
                               .layers = {{0, 0}, {1, 0}, {2, 0}, {3, 0}},
                               .n_slots = 1,
                               .page_bytes = {1600}};

static kv_layout bad;

static void refuse(int32_t n_blocks, const char *text)
{
    pgd_why why = {0};
    assert_int_equal(kv_layout_check(&bad, specs, 4, n_blocks, &why), PGD_EPROTO);
    if (strstr(why.text, text) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", text, why.text);
    bad = good;
}

static void test_kv_layout_check(void **state)
{
    (void)state;
    assert_int_equal(kv_layout_check(&good, specs, 4, 1000, NULL), PGD_OK);
    bad = good;
    refuse(INT32_MAX / 16, "at group 2");
    bad.layers[1].group = 4;
    refuse(10, "KV layer 1: expected one of 4 groups and 1 slots, got group 4 and slot 0");
    bad.layers[3].slot = 1;
    refuse(10, "got group 3 and slot 1");
    bad.layers[2].group = 1;
    refuse(10, "KV layer 2: expected pages of 800 bytes (16 tokens of 50), got 1600 at slot 0");
    bad.page_bytes[0]++;
    refuse(10, "KV layer 0: expected pages of 1600 bytes");
    bad.layers[0].group = 1;
    refuse(10, "expected a group for full attention, window 0, got group 1: sliding window");
    bad.groups[1].window = 33;
    refuse(10, "KV layer 1: expected a group for sliding window attention, window 32");
    bad.layers[1].group = 0;
    refuse(10, "KV layer 1: expected a place of its own, got group 0 and slot 0");
    bad.layers[3].group = 0; /* a full group keeps the decoder's tokens, not the encoder's */
    refuse(10, "KV layer 3: expected a group for cross attention");
    bad.n_layers = 3;
    refuse(10, "expected places for 4 layers, got 3");
    /* A full group may hold what needs less. */
    bad.layers[1] = (kv_layer_place){0, 1};
    bad.n_slots = 2;
    bad.page_bytes[1] = 1600;
    assert_int_equal(kv_layout_check(&bad, specs, 4, 10, NULL), PGD_OK);
    assert_int_equal(kv_layout_block_bytes(&bad), 3200);
}

static void test_kv_layout_check_specs(void **state)
{
    (void)state;
    kv_layer_spec s[4];
    memcpy(s, specs, sizeof s);
    assert_int_equal(kv_layout_check_specs(s, 4, 1, NULL), PGD_OK);
    assert_int_equal(kv_layout_check_specs(s, 4, 0, NULL), PGD_EPROTO);
    assert_int_equal(kv_layout_check_specs(s, 3, 0, NULL), PGD_OK);
    assert_int_equal(kv_layout_check_specs(s, 3, 1, NULL), PGD_EPROTO);
    s[0].window = 1;
    assert_int_equal(kv_layout_check_specs(s, 3, 0, NULL), PGD_EPROTO);
    s[0] = (kv_layer_spec){ATTENTION_CHUNKED, 0, 100};
    assert_int_equal(kv_layout_check_specs(s, 3, 0, NULL), PGD_EPROTO);
}

static void test_kv_layout_limits(void **state)
{
    (void)state;
    wire_limits l = {.max_num_seqs = 1,
                     .max_num_batched_tokens = 1,
                     .max_model_len = 64,
                     .vocab_size = 1,
                     .n_blocks = 2,
                     .max_encoder_tokens = 100};
    kv_layout_fill_limits(&l, &good);
    assert_int_equal(wire_limits_derive(&l, NULL), PGD_OK);
    assert_int_equal(l.n_groups, 4);
    assert_int_equal(l.block_sizes[2], 32);
    assert_int_equal(l.cross_groups, 1u << 3);
    assert_int_equal(l.max_blocks_per_request, 99 / 16 + 2);
}

static void test_kv_layout_first_position(void **state)
{
    (void)state;
    assert_int_equal(kv_layout_first_position(ATTENTION_FULL, 32, 100), 0);
    assert_int_equal(kv_layout_first_position(ATTENTION_CROSS, 0, 100), 0);
    assert_int_equal(kv_layout_first_position(ATTENTION_SLIDING, 32, 31), 0);
    assert_int_equal(kv_layout_first_position(ATTENTION_SLIDING, 32, 32), 1);
    assert_int_equal(kv_layout_first_position(ATTENTION_SLIDING, 1, 32), 32);
    assert_int_equal(kv_layout_first_position(ATTENTION_SLIDING, INT32_MAX, INT32_MAX), 1);
    assert_int_equal(kv_layout_first_position(ATTENTION_CHUNKED, 32, 31), 0);
    assert_int_equal(kv_layout_first_position(ATTENTION_CHUNKED, 32, 32), 32);
    assert_int_equal(kv_layout_first_position(ATTENTION_CHUNKED, 32, 95), 64);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_layout_check),
        cmocka_unit_test(test_kv_layout_check_specs),
        cmocka_unit_test(test_kv_layout_limits),
        cmocka_unit_test(test_kv_layout_first_position),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
