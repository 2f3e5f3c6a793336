/* Layers to groups: trace H27, rules GR1 to GR4, GR6 to GR8. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "engine/kv/kv_groups.h"

#define BLOCK 16
#define BYTES 64 /* of a token; a page, M in the traces, has BLOCK * BYTES */

static kv_groups groups;
static kv_layer_spec layers[PGD_MAX_KV_LAYERS];
static int32_t n_layers;

static void add(int32_t n, attention_kind kind, int32_t window, int32_t token_bytes)
{
    for (int32_t i = 0; i < n; i++)
        layers[n_layers++] = (kv_layer_spec){kind, window, token_bytes};
}

/* A layer for each letter: F full, S a window of 32, s one of 64, C a chunk of 32, X cross. */
static void set_layers(const char *kinds)
{
    n_layers = 0;
    for (const char *k = kinds; *k != 0; k++) {
        attention_kind kind = *k == 'F'   ? ATTENTION_FULL
                              : *k == 'C' ? ATTENTION_CHUNKED
                              : *k == 'X' ? ATTENTION_CROSS
                                          : ATTENTION_SLIDING;
        add(1, kind, *k == 's' ? 64 : *k == 'S' || *k == 'C' ? 32 : 0, BYTES);
    }
}

static pgd_err init(bool is_hybrid, pgd_why *why)
{
    kv_groups_opts opts = {.block_size = BLOCK, .is_hybrid = is_hybrid};
    for (int32_t i = 0; i < n_layers; i++)
        if (layers[i].kind == ATTENTION_CROSS)
            opts.max_encoder_tokens = 100;
    return kv_groups_init(&groups, layers, n_layers, &opts, why);
}

static void make(const char *kinds)
{
    pgd_why why = {0};
    set_layers(kinds);
    if (init(true, &why) != PGD_OK)
        fail_msg("%s: %s", kinds, why.text);
}

/* As the traces write it: layers from 1 on, "1,2/3,5" groups or slots one after the other. */
static void expect_lists(const char *want, bool by_group)
{
    char got[1024] = "";
    int32_t n = by_group ? groups.layout.n_groups : groups.layout.n_slots;
    for (int32_t k = 0; k < n; k++) {
        const char *comma = "";
        (void)strcat(got, k > 0 ? "/" : "");
        for (int32_t i = 0; i < n_layers; i++) {
            const kv_layer_place *p = &groups.layout.layers[i];
            char number[16];
            if ((by_group ? p->group : p->slot) != k)
                continue;
            (void)snprintf(number, sizeof number, "%s%d", comma, i + 1);
            (void)strcat(got, number);
            comma = ",";
        }
    }
    assert_string_equal(got, want);
}

static int32_t n_blocks_of(int32_t n_layer_pages)
{
    return n_layer_pages * BLOCK * BYTES / (int32_t)kv_layout_block_bytes(&groups.layout);
}

static void test_kv_groups_h27(void **state)
{
    (void)state;
    make("FFSSSS");
    expect_lists("1,2/3,5/4,6", true);
    expect_lists("1,3,4/2,5,6", false);
    assert_int_equal(n_blocks_of(2 * 32), 32);
    make("FS");
    expect_lists("1/2", true);
    expect_lists("1,2", false);
    assert_int_equal(n_blocks_of(2 * 32), 64);
    layers[1].window = 1;
    assert_int_equal(init(false, NULL), PGD_OK);
    expect_lists("1,2", true);
    expect_lists("1/2", false);
    assert_int_equal(n_blocks_of(2 * 32), 32);
    assert_int_equal(groups.layout.groups[0].kind, ATTENTION_FULL);
    assert_int_equal(groups.layout.groups[0].window, 1);
    make("FFFSSSSSSS");
    expect_lists("1,2,3/4,7,10/5,8/6,9", true);
    expect_lists("1,4,5,6/2,7,8,9/3,10", false);
    assert_int_equal(n_blocks_of(3 * 32), 32);
    assert_int_equal(groups.n_padding, 2);
    assert_int_equal(groups.n_layers_of[1], 3);
    assert_int_equal(groups.n_layers_of[3], 2);
}

static void test_kv_groups_one_group(void **state)
{
    (void)state;
    n_layers = 0;
    assert_int_equal(init(true, NULL), PGD_OK);
    assert_int_equal(groups.layout.n_groups, 0);
    make("SSSS");
    expect_lists("1,2,3,4", true);
    expect_lists("1/2/3/4", false);
    assert_int_equal(groups.layout.groups[0].kind, ATTENTION_SLIDING);
    assert_int_equal(groups.layout.groups[0].window, 32);
    assert_int_equal(groups.n_padding, 0);
    /* One kind, unequal sizes: a slot of its own size for each, which need not divide each other. */
    layers[1].token_bytes = 3 * BYTES / 2;
    assert_int_equal(init(true, NULL), PGD_OK);
    expect_lists("1,2,3,4", true);
    assert_int_equal(groups.layout.page_bytes[1], 3 * BLOCK * BYTES / 2);
    assert_int_equal(groups.layout.page_bytes[2], BLOCK * BYTES);
    assert_int_equal(kv_layout_block_bytes(&groups.layout), 9 * BLOCK * BYTES / 2);
}

static void test_kv_groups_page_size(void **state)
{
    (void)state;
    set_layers("FSS");
    layers[0].token_bytes = 4 * BYTES;
    assert_int_equal(init(true, NULL), PGD_OK);
    assert_int_equal(groups.layout.groups[0].block_size, BLOCK);
    assert_int_equal(groups.layout.groups[1].block_size, 4 * BLOCK);
    assert_int_equal(groups.layout.page_bytes[0], 4 * BLOCK * BYTES);
    /* Equal attention, unequal pages: two groups when there are others. */
    set_layers("FFS");
    layers[0].token_bytes = 2 * BYTES;
    assert_int_equal(init(true, NULL), PGD_OK);
    expect_lists("1/2/3", true);
    assert_int_equal(groups.layout.groups[1].block_size, 2 * BLOCK);
    pgd_why why = {0};
    layers[0].token_bytes = 5 * BYTES / 2;
    assert_int_equal(init(true, &why), PGD_EUNSUPPORTED);
    assert_non_null(strstr(why.text, "got 64 and 160 bytes"));
    assert_int_equal(init(false, NULL), PGD_OK); /* one kind then */
    layers[0].token_bytes = BYTES * (KV_LAYOUT_MAX_BLOCK_SIZE / BLOCK + 1);
    assert_int_equal(init(true, &why), PGD_EUNSUPPORTED);
}

/* GR3: the smaller count, or the larger one if that is less than one and a half times as much. */
static void test_kv_groups_group_size(void **state)
{
    (void)state;
    struct {
        const char *kinds;
        int32_t n_slots, n_groups, n_padding;
    } const cases[] = {
        {"FFFFFFFFFFFFSSSSSSSSSSSSS", 13, 2, 1}, /* 12 + 13 */
        {"FFSSS", 2, 3, 1},                      /* exactly 1.5 */
        {"FFFSSSS", 4, 2, 1},
        {"FFSSSSssssss", 2, 6, 0},
        {"FCCC", 1, 4, 0},
        {"FFXX", 2, 2, 0},
        {"FSSSSSSS", 1, 8, 0},
        {"FSSSSSSSS", 2, 5, 1},             /* 1 would make nine groups */
        {"FFFFFFFFFFFFFFFFFFFFS", 3, 8, 3}, /* 20 + 1 */
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        make(cases[i].kinds);
        assert_int_equal(groups.layout.n_slots, cases[i].n_slots);
        assert_int_equal(groups.layout.n_groups, cases[i].n_groups);
        assert_int_equal(groups.n_padding, cases[i].n_padding);
    }
}

static void test_kv_groups_kinds(void **state)
{
    (void)state;
    pgd_why why = {0};
    make("FSsCX");
    assert_int_equal(groups.layout.n_groups, 5);
    assert_int_equal(groups.layout.groups[3].kind, ATTENTION_CHUNKED);
    make("FSsCXXXX");
    assert_int_equal(init(false, NULL), PGD_OK); /* cross attention stays what it is */
    expect_lists("1,2,3,4/5,6,7,8", true);
    assert_int_equal(groups.layout.groups[0].window, 64);
    assert_int_equal(groups.layout.groups[1].kind, ATTENTION_CROSS);
    n_layers = 0;
    for (int32_t i = 0; i < PGD_MAX_KV_GROUPS; i++)
        add(1, ATTENTION_SLIDING, 1 + i, BYTES);
    assert_int_equal(init(true, NULL), PGD_OK);
    add(1, ATTENTION_SLIDING, 100, BYTES);
    assert_int_equal(init(true, &why), PGD_EUNSUPPORTED);
    assert_non_null(strstr(why.text, "at most 8 kinds"));
    assert_int_equal(init(false, NULL), PGD_OK);
    set_layers("FS");
    layers[0].window = 5;
    assert_int_equal(init(true, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "got 5 with full attention"));
    set_layers("FC");
    layers[1].window = 0;
    assert_int_equal(init(true, &why), PGD_EPROTO);
    kv_groups_opts opts = {.block_size = BLOCK, .max_encoder_tokens = 9, .is_hybrid = true};
    set_layers("F");
    assert_int_equal(kv_groups_init(&groups, layers, 1, &opts, &why), PGD_EPROTO);
    opts.max_encoder_tokens = 0;
    set_layers("FX");
    assert_int_equal(kv_groups_init(&groups, layers, 2, &opts, &why), PGD_EPROTO);
    set_layers("");
    add(PGD_MAX_KV_LAYERS, ATTENTION_FULL, 0, INT32_MAX); /* sums must not overflow */
    assert_int_equal(init(true, NULL), PGD_OK);
    assert_true(kv_layout_block_bytes(&groups.layout) == 512ull * 16 * INT32_MAX);
}

/* GR6, GR8. */
static void test_kv_groups_sizes(void **state)
{
    (void)state;
    kv_groups_load load = {.max_unfinished_tokens = 40, .max_model_len = 1000};
    make("FF");
    assert_int_equal(kv_groups_n_blocks_for(&groups, 0, &load), 0);
    assert_int_equal(kv_groups_n_blocks_for(&groups, 33, &load), 3);
    assert_int_equal(kv_groups_max_len(&groups, 11, &load), 160);
    assert_int_equal(kv_groups_max_len(&groups, 1, &load), 0);
    assert_int_equal(kv_groups_max_len(&groups, 1 << 20, &load), 1000);
    assert_true(kv_groups_concurrency(&groups, 1 + 2 * 63, &load) == 2.0);
    /* A window of 32 holds ceil((31 + 40) / 16) + 1 = 6 blocks at most. */
    make("FS");
    assert_int_equal(kv_groups_n_blocks_for(&groups, 33, &load), 6);
    assert_int_equal(kv_groups_n_blocks_for(&groups, 96, &load), 12);
    assert_int_equal(kv_groups_n_blocks_for(&groups, 97, &load), 13);
    assert_int_equal(kv_groups_n_blocks_for(&groups, 1000, &load), 63 + 6);
    assert_int_equal(kv_groups_max_len(&groups, 1 + 20, &load), 14 * 16);
    assert_int_equal(kv_groups_max_len(&groups, 1 + 8, &load), 4 * 16);
    /* With windows alone there is no end. */
    make("S");
    load.max_model_len = INT32_MAX;
    assert_int_equal(kv_groups_max_len(&groups, 1 + 6, &load), INT32_MAX);
    assert_int_equal(kv_groups_max_len(&groups, 1 + 5, &load), 80);
    /* A chunk of 32: ceil((32 + 40) / 16) blocks; the encoder's 100 tokens whatever the length. */
    make("C");
    assert_int_equal(kv_groups_n_blocks_for(&groups, 1 << 20, &load), 5);
    make("FX");
    assert_int_equal(kv_groups_n_blocks_for(&groups, 1, &load), 1 + 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_groups_h27),       cmocka_unit_test(test_kv_groups_one_group),
        cmocka_unit_test(test_kv_groups_page_size), cmocka_unit_test(test_kv_groups_group_size),
        cmocka_unit_test(test_kv_groups_kinds),     cmocka_unit_test(test_kv_groups_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
