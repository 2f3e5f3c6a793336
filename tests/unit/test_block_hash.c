/* Block hashes: the serialisation against an independent SHA-256 of hand-made bytes, chaining,
 * traces H11 and H12. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/core/request.h"
#include "engine/kv/block_hash.h"

static const uint8_t SEED[32] = {1, 2, 3};

static block_hasher *new_hasher(const uint8_t seed[32])
{
    block_hasher *h;
    assert_int_equal(block_hasher_create(&h, seed), PGD_OK);
    return h;
}

static bool is_equal(const block_hash *a, const block_hash *b)
{
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

static void expect_hash_of(const uint8_t *bytes, size_t n_bytes, const block_hash *got)
{
    hash_sha256_ctx *sha;
    uint8_t want[32];
    assert_int_equal(hash_sha256_create(&sha), PGD_OK);
    hash_sha256_begin(sha);
    hash_sha256_update(sha, bytes, n_bytes);
    hash_sha256_end(sha, want);
    assert_memory_equal(got->bytes, want, sizeof want);
    hash_sha256_destroy(sha);
}

static void test_block_hash_serialisation(void **state)
{
    (void)state;
    block_hasher *h = new_hasher(SEED);
    const token_id tokens[3] = {1, -1, 0x01020304};
    const uint8_t extra[2] = {0xaa, 0xbb};
    block_hash got;
    block_hasher_hash(&got, h, NULL, tokens, 3, extra, sizeof extra);

    uint8_t bytes[32 + 4 + 12 + 4 + 2] = {0};
    memcpy(bytes, SEED, 32);
    const uint8_t rest[] = {3,    0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff,
                            0xff, 4, 3, 2, 1, 2, 0, 0, 0,    0xaa, 0xbb};
    memcpy(bytes + 32, rest, sizeof rest);
    expect_hash_of(bytes, sizeof bytes, &got);
    block_hasher_destroy(h);
}

static void test_block_hash_long_block(void **state)
{
    (void)state;
    /* More tokens than are fed to the hash at a time. */
    enum { N = 200 };
    block_hasher *h = new_hasher(SEED);
    token_id tokens[N];
    uint8_t bytes[32 + 4 + 4 * N + 4] = {0};
    memcpy(bytes, SEED, 32);
    bytes[32] = N;
    for (int i = 0; i < N; i++) {
        tokens[i] = 3 * i;
        bytes[36 + 4 * i] = (uint8_t)(3 * i);
        bytes[37 + 4 * i] = (uint8_t)((3 * i) >> 8);
    }
    block_hash got;
    block_hasher_hash(&got, h, NULL, tokens, N, NULL, 0);
    expect_hash_of(bytes, sizeof bytes, &got);
    block_hasher_destroy(h);
}

static void test_block_hash_chain(void **state)
{
    (void)state;
    const uint8_t other_seed[32] = {9};
    block_hasher *h = new_hasher(SEED);
    block_hasher *h2 = new_hasher(other_seed);
    const token_id a[4] = {1, 2, 3, 4};
    const token_id b[4] = {32, 1, 3, 4}; /* +31, -1: collides under a polynomial hash */
    block_hash first;
    block_hash second;
    block_hash x;
    block_hasher_hash(&first, h, NULL, a, 4, NULL, 0);
    block_hasher_hash(&second, h, &first, a, 4, NULL, 0);
    assert_false(is_equal(&first, &second));
    block_hasher_hash(&x, h, NULL, b, 4, NULL, 0);
    assert_false(is_equal(&first, &x));
    block_hasher_hash(&x, h2, NULL, a, 4, NULL, 0);
    assert_false(is_equal(&first, &x));
    block_hasher_hash(&x, h, NULL, a, 4, NULL, 0);
    assert_true(is_equal(&first, &x));
    block_hasher_destroy(h);
    block_hasher_destroy(h2);
}

static request *new_request(block_hasher *h, const char *salt)
{
    token_id prompt[59];
    for (int i = 0; i < 59; i++)
        prompt[i] = 100 + i;
    request_opts opts = {.id = 1,
                         .prompt = prompt,
                         .n_prompt_tokens = 59,
                         .max_tokens = 10,
                         .max_model_len = 1000,
                         .cache_salt = salt,
                         .block_size = 16,
                         .hasher = h};
    request *r;
    assert_int_equal(request_create(&r, &opts), PGD_OK);
    assert_int_equal(r->n_block_hashes, 3);
    return r;
}

static void test_block_hash_h11_salt(void **state)
{
    (void)state;
    block_hasher *h = new_hasher(SEED);
    request *s1 = new_request(h, "s1");
    request *s1_again = new_request(h, "s1");
    request *s2 = new_request(h, "s2");
    request *none = new_request(h, NULL);
    for (int i = 0; i < 3; i++) {
        assert_true(is_equal(&s1->block_hashes[i], &s1_again->block_hashes[i]));
        assert_false(is_equal(&s1->block_hashes[i], &s2->block_hashes[i]));
        assert_false(is_equal(&s1->block_hashes[i], &none->block_hashes[i]));
    }
    /* The salt is an extra of block 0 alone. */
    block_hash want;
    uint8_t extra[16];
    size_t n_bytes = block_hash_write_extra(extra, sizeof extra, NULL, NULL, 0, "s1");
    assert_int_equal(n_bytes, 1 + 4 + 2);
    assert_memory_equal(extra, "\x03\x02\0\0\0s1", 7);
    block_hasher_hash(&want, h, NULL, s1->tokens, 16, extra, n_bytes);
    assert_true(is_equal(&want, &s1->block_hashes[0]));
    block_hasher_hash(&want, h, &s1->block_hashes[0], s1->tokens + 16, 16, NULL, 0);
    assert_true(is_equal(&want, &s1->block_hashes[1]));
    request_destroy(s1);
    request_destroy(s1_again);
    request_destroy(s2);
    request_destroy(none);
    block_hasher_destroy(h);
}

static const block_hash_mm_item ITEMS[2] = {{"h1", 0, 5}, {"h2", 10, 5}};

static void expect_keys(int32_t first, int32_t end, const block_hash_mm_key *want, int32_t n_want,
                        int32_t want_next)
{
    block_hash_mm_key keys[2];
    int32_t next = 0;
    assert_int_equal(block_hash_mm_keys(keys, &next, ITEMS, 2, first, end), n_want);
    assert_int_equal(next, want_next);
    for (int32_t i = 0; i < n_want; i++) {
        assert_string_equal(keys[i].content_id, want[i].content_id);
        assert_int_equal(keys[i].offset, want[i].offset);
    }
}

static void test_block_hash_h12_multimodal_keys(void **state)
{
    (void)state;
    expect_keys(0, 5, (const block_hash_mm_key[]){{"h1", 0}}, 1, 1);
    expect_keys(3, 8, (const block_hash_mm_key[]){{"h1", -3}}, 1, 1);
    expect_keys(6, 10, NULL, 0, 1);
    expect_keys(0, 15, (const block_hash_mm_key[]){{"h1", 0}, {"h2", 10}}, 2, 2);
    /* An item that goes on beyond the block is looked at again for the next one. */
    expect_keys(0, 4, (const block_hash_mm_key[]){{"h1", 0}}, 1, 0);
    block_hash_mm_key key;
    int32_t next = 0;
    for (int32_t block = 0; block < 4; block++) {
        int32_t n_keys = block_hash_mm_keys(&key, &next, ITEMS, 2, 4 * block, 4 * block + 4);
        const int32_t offsets[] = {0, -4, 2, -2};
        assert_int_equal(n_keys, 1);
        assert_int_equal(key.offset, offsets[block]);
    }
}

static void test_block_hash_extra_bytes(void **state)
{
    (void)state;
    const block_hash_mm_key keys[1] = {{"im", -3}};
    const uint8_t want[] = {1,   1,    0,    0,    0,    'L', 2, 2, 0, 0, 0,  'i',
                            'm', 0xfd, 0xff, 0xff, 0xff, 3,   1, 0, 0, 0, 's'};
    uint8_t got[64];
    assert_int_equal(block_hash_write_extra(NULL, 0, "L", keys, 1, "s"), sizeof want);
    assert_int_equal(block_hash_write_extra(got, sizeof got, "L", keys, 1, "s"), sizeof want);
    assert_memory_equal(got, want, sizeof want);
    /* Nothing beyond the room given. */
    memset(got, 0x55, sizeof got);
    assert_int_equal(block_hash_write_extra(got, 3, "L", keys, 1, "s"), sizeof want);
    assert_memory_equal(got, want, 3);
    assert_int_equal(got[3], 0x55);
    assert_int_equal(block_hash_write_extra(got, sizeof got, NULL, NULL, 0, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block_hash_serialisation),
        cmocka_unit_test(test_block_hash_long_block),
        cmocka_unit_test(test_block_hash_chain),
        cmocka_unit_test(test_block_hash_h11_salt),
        cmocka_unit_test(test_block_hash_h12_multimodal_keys),
        cmocka_unit_test(test_block_hash_extra_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
