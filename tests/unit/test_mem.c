/* Arena, checked sizes, strbuf growth, SHA-256 against published vectors (FIPS 180-4). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/arena.h"
#include "common/hash.h"
#include "common/mem.h"
#include "common/strbuf.h"

static void test_mem_sizes(void **state)
{
    (void)state;
    size_t v;
    assert_true(mem_mul(&v, (size_t)1 << 31, (size_t)1 << 31));
    assert_false(mem_mul(&v, (size_t)1 << 32, (size_t)1 << 32));
    assert_int_equal(v, 0);
    assert_false(mem_add(&v, SIZE_MAX, 1));
    assert_null(mem_realloc_array(NULL, SIZE_MAX / 2, 3));
    for (size_t n = 1; n < ((size_t)8 << 20); n = n * 3 + 1) {
        uint8_t *p = mem_alloc_aligned(n, 64);
        assert_true(p != NULL && ((uintptr_t)p & 63) == 0 && p[0] == 0 && p[n - 1] == 0);
        memset(p, 1, n);
        mem_free_aligned(p, n);
    }
}

static void test_mem_arena_is_bounded(void **state)
{
    (void)state;
    arena *a;
    assert_int_equal(arena_create(&a, 100000), PGD_OK);
    size_t used = 0;
    for (size_t n = 1; n < 200; n++) {
        uint8_t *p = arena_alloc(a, n);
        assert_true(p != NULL && ((uintptr_t)p & 15) == 0);
        memset(p, 0xAB, n);
        used += (n + 15) & ~(size_t)15;
        assert_int_equal(arena_used_bytes(a), used);
    }
    assert_null(arena_alloc(a, 100001 - used));
    assert_non_null(arena_alloc(a, (100000 - used) & ~(size_t)15));
    assert_null(arena_alloc(a, 32));
    assert_null(arena_alloc(a, SIZE_MAX));
    assert_null(arena_calloc(a, SIZE_MAX, 2));
    arena_destroy(a);
}

static void test_mem_sha256_vectors(void **state)
{
    (void)state;
    static const uint8_t abc[4] = {0xba, 0x78, 0x16, 0xbf}, empty[4] = {0xe3, 0xb0, 0xc4, 0x42},
                         million_a[4] = {0xcd, 0xc7, 0x6e, 0x5c};
    uint8_t out[HASH_SHA256_BYTES];
    hash_sha256_ctx *ctx;
    assert_int_equal(hash_sha256_create(&ctx), PGD_OK);
    hash_sha256_begin(ctx);
    hash_sha256_update(ctx, "abc", 3);
    hash_sha256_end(ctx, out);
    assert_memory_equal(out, abc, 4);
    hash_sha256_begin(ctx);
    hash_sha256_end(ctx, out);
    assert_memory_equal(out, empty, 4);
    hash_sha256_begin(ctx);
    for (int i = 0; i < 1000000; i++)
        hash_sha256_update(ctx, "a", 1);
    hash_sha256_end(ctx, out);
    assert_memory_equal(out, million_a, 4);
    hash_sha256_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mem_sizes),
        cmocka_unit_test(test_mem_arena_is_bounded),
        cmocka_unit_test(test_mem_sha256_vectors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
