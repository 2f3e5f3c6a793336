/* Batches written and read back, values of every width, and what is cut or changed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "engine/kv/kv_event_pack.h"
#include "engine/kv/kv_event_unpack.h"

static block_hash hash_of(uint64_t name)
{
    block_hash h;
    memset(&h, 0xee, sizeof h);
    for (int i = 0; i < 8; i++)
        h.bytes[24 + i] = (uint8_t)(name >> (56 - 8 * i));
    return h;
}

static const uint64_t names[] = {
    0, 0x7f, 0x80, 0xff, 0x100, 0xffff, 0x10000, UINT32_MAX, UINT64_C(1) << 32, UINT64_MAX};
#define N_NAMES ((int32_t)PGD_ARRAY_LEN(names))

/* A batch with one of each; the caller frees. */
static uint8_t *write_sample(size_t *n_bytes)
{
    static block_hash hashes[N_NAMES];
    static token_id tokens[N_NAMES * 2];
    kv_event_pack p;
    const uint8_t extra[] = {3, 2, 0, 0, 0, 'a', 'b', 2, 1, 0, 0, 0, 'x', 0xff, 0xff, 0xff, 0xff};
    block_hash parent = hash_of(77);
    kv_event_pack_init(&p);
    for (int32_t i = 0; i < N_NAMES; i++) {
        hashes[i] = hash_of(names[i]);
        tokens[2 * i] = i;
        tokens[2 * i + 1] = 1 << (3 * i);
    }
    kv_cache_event ev = {.kind = KV_CACHE_STORED,
                         .medium = KV_MEDIUM_DEVICE,
                         .group_id = 3,
                         .n_hashes = N_NAMES,
                         .hashes = hashes,
                         .attention = "sliding window",
                         .window = 4096,
                         .block_size = 2,
                         .parent = &parent,
                         .n_tokens = 2 * N_NAMES,
                         .tokens = tokens,
                         .extra_bytes = sizeof extra,
                         .extra = extra};
    kv_event_pack_stored(&p, &ev, 0, N_NAMES);
    kv_event_pack_stored(&p, &ev, 4, 6); /* a part has its own parent and no extra */
    for (int32_t i = 0; i < N_NAMES; i++)
        kv_event_pack_removed(&p, KV_MEDIUM_HOST, i >= 7, names[i]);
    kv_event_pack_cleared(&p);
    kv_event_pack_removed(&p, KV_MEDIUM_DISK, 0, 5);
    uint8_t *batch = mem_alloc(kv_event_pack_n_bytes(&p));
    assert_non_null(batch);
    size_t n_most = kv_event_pack_n_bytes(&p);
    *n_bytes = kv_event_pack_write(batch, &p, 12.5, 0);
    assert_true(*n_bytes <= n_most);
    kv_event_pack_deinit(&p);
    return batch;
}

static kv_unpacked_event next_of(kv_event_unpack *u)
{
    kv_unpacked_event ev;
    pgd_why why = {0};
    assert_true(u->n_left > 0);
    if (kv_event_unpack_next(&ev, u, &why) != PGD_OK)
        fail_msg("%s", why.text);
    return ev;
}

static void expect_text(kv_event_text t, const char *want)
{
    assert_int_equal(t.n_bytes, strlen(want));
    assert_memory_equal(t.text, want, t.n_bytes);
}

static void expect_names(kv_event_numbers n, int32_t first, int32_t end)
{
    uint64_t name;
    assert_int_equal(n.n, end - first);
    for (int32_t i = first; i < end; i++) {
        assert_true(kv_event_unpack_next_number(&name, &n));
        assert_true(name == names[i]);
    }
    assert_false(kv_event_unpack_next_number(&name, &n));
}

static void test_kv_event_pack_round_trip(void **state)
{
    (void)state;
    size_t n_bytes;
    uint8_t *batch = write_sample(&n_bytes);
    kv_event_unpack u;
    uint64_t token;
    assert_int_equal(kv_event_unpack_begin(&u, batch, n_bytes, NULL), PGD_OK);
    assert_true(u.ts == 12.5);
    assert_int_equal(u.n_left, 6);
    kv_unpacked_event ev = next_of(&u);
    assert_int_equal(ev.tag, KV_EVENT_TAG_STORED);
    expect_names(ev.names, 0, N_NAMES);
    assert_true(ev.has_parent && ev.parent == 77);
    assert_int_equal(ev.tokens.n, 2 * N_NAMES);
    for (int32_t i = 0; kv_event_unpack_next_number(&token, &ev.tokens); i++)
        assert_int_equal(token, i % 2 == 0 ? i / 2 : 1 << (3 * (i / 2)));
    assert_int_equal(ev.block_size, 2);
    assert_true(ev.has_group && ev.group == 3);
    assert_int_equal(ev.window, 4096);
    expect_text(ev.medium, "GPU");
    expect_text(ev.attention, "sliding_window");
    ev = next_of(&u);
    expect_names(ev.names, 4, 6);
    assert_true(ev.parent == names[3]);
    assert_int_equal(ev.tokens.n, 4);
    ev = next_of(&u);
    assert_int_equal(ev.tag, KV_EVENT_TAG_REMOVED);
    expect_names(ev.names, 0, 7);
    expect_text(ev.medium, "CPU");
    assert_true(ev.has_group && ev.group == 0);
    ev = next_of(&u);
    expect_names(ev.names, 7, N_NAMES);
    assert_int_equal(ev.group, 1);
    ev = next_of(&u);
    assert_int_equal(ev.tag, KV_EVENT_TAG_CLEARED);
    ev = next_of(&u);
    expect_text(ev.medium, "DISK");
    assert_int_equal(u.n_left, 0);
    mem_free(batch);
}

/* Reads all of it; whether it is of the right form. */
static bool read_all(const uint8_t *batch, size_t n_bytes)
{
    kv_event_unpack u;
    kv_unpacked_event ev;
    uint64_t number;
    uint32_t n = 0;
    if (kv_event_unpack_begin(&u, batch, n_bytes, NULL) != PGD_OK)
        return false;
    while (u.n_left > 0) {
        if (kv_event_unpack_next(&ev, &u, NULL) != PGD_OK)
            return false;
        while (kv_event_unpack_next_number(&number, &ev.names) ||
               kv_event_unpack_next_number(&number, &ev.tokens))
            n++;
    }
    return n > 0;
}

static void test_kv_event_unpack_takes_anything(void **state)
{
    (void)state;
    size_t n_bytes;
    uint8_t *batch = write_sample(&n_bytes);
    uint64_t rng = 3;
    assert_true(read_all(batch, n_bytes));
    /* Cut, in a block of memory that ends there. */
    for (size_t n = 0; n + 5 < n_bytes; n++) {
        uint8_t *cut = malloc(n + 1);
        assert_non_null(cut);
        memcpy(cut, batch, n);
        assert_false(read_all(cut, n));
        free(cut);
    }
    for (int32_t i = 0; i < 100000; i++) {
        uint8_t was[4];
        size_t at[4];
        for (int32_t k = 0; k < 4; k++) {
            rng = hash_u64(rng + 1);
            at[k] = (size_t)(rng >> 8) % n_bytes;
            was[k] = batch[at[k]];
            batch[at[k]] = (uint8_t)rng;
        }
        (void)read_all(batch, n_bytes);
        for (int32_t k = 3; k >= 0; k--)
            batch[at[k]] = was[k];
    }
    /* Arrays within arrays do not eat the stack. */
    uint8_t deep[4096];
    memset(deep, 0x91, sizeof deep);
    memcpy(deep, "\x92\xcb\0\0\0\0\0\0\0\0\x91\x92\xa1x", 14);
    assert_false(read_all(deep, sizeof deep));
    mem_free(batch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_event_pack_round_trip),
        cmocka_unit_test(test_kv_event_unpack_takes_anything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
