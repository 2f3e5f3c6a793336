/* Pages by layer: slots that groups share, pages of a group's own block size, zeroing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "worker/kv_cache.h"

#define N_BLOCKS 5

static const kv_page_layout page = {.type = DTYPE_F16, .n_kv_heads = 2, .head_dim = 4};
enum { TOKEN_BYTES = 2 * 2 * 2 * 4 };

/* Layers 0 and 2 in one group, 1 in another, over two slots. */
static kv_layout two_groups(int32_t block_size, int32_t other_block_size)
{
    return (kv_layout){
        .n_groups = 2,
        .groups = {{ATTENTION_FULL, 0, block_size}, {ATTENTION_SLIDING, 32, other_block_size}},
        .n_layers = 3,
        .layers = {{0, 0}, {1, 0}, {0, 1}},
        .n_slots = 2,
        .page_bytes = {(uint64_t)TOKEN_BYTES * 16, (uint64_t)TOKEN_BYTES * 16}};
}

static void test_kv_cache_places(void **state)
{
    (void)state;
    kv_cache *kv;
    kv_layout layout = two_groups(16, 16);
    assert_int_equal(kv_cache_create(&kv, &page, &layout, N_BLOCKS, NULL), PGD_OK);
    uint8_t *slot = kv_cache_get_pages(kv, 0);
    assert_ptr_equal(kv_cache_get_pages(kv, 1), slot);
    assert_ptr_equal(kv_cache_get_pages(kv, 2), slot + N_BLOCKS * TOKEN_BYTES * 16);
    assert_int_equal(kv_cache_group_of(kv, 1), 1);
    assert_int_equal(kv_cache_group_of(kv, 2), 0);
    assert_int_equal(kv_cache_n_blocks(kv), N_BLOCKS);
    assert_int_equal(kv_cache_bytes(kv), 2 * N_BLOCKS * TOKEN_BYTES * 16);
    memset(slot, 0xff, kv_cache_bytes(kv));
    const block_id ids[] = {3, 1};
    const kernel_ops *ops;
    kernel_ctx ctx = {0};
    assert_int_equal(ops_cpu_get(&ops, CPU_ISA_REF), PGD_OK);
    assert_int_equal(kv_cache_zero(kv, ids, 2, ops, &ctx), PGD_OK);
    for (size_t i = 0; i < kv_cache_bytes(kv); i++) {
        size_t block = i / (TOKEN_BYTES * 16) % N_BLOCKS;
        assert_int_equal(slot[i], block == 1 || block == 3 ? 0 : 0xff);
    }
    kv_cache_destroy(kv);
}

/* Layers of unequal pages, each in a slot of its own; and one group of longer blocks. */
static void test_kv_cache_block_sizes(void **state)
{
    (void)state;
    kv_cache *kv;
    kv_layout layout = two_groups(16, 32);
    layout.n_slots = 3;
    layout.layers[1] = (kv_layer_place){1, 2};
    layout.page_bytes[2] = (uint64_t)TOKEN_BYTES * 32;
    assert_int_equal(kv_cache_create(&kv, &page, &layout, N_BLOCKS, NULL), PGD_OK);
    assert_int_equal(kv_cache_get_page_layout(kv, 0)->block_size, 16);
    assert_int_equal(kv_cache_get_page_layout(kv, 1)->block_size, 32);
    assert_int_equal(kv_cache_get_page_layout(kv, 1)->head_dim, 4);
    assert_int_equal(kv_cache_bytes(kv), N_BLOCKS * TOKEN_BYTES * (16 + 16 + 32));
    memset(kv_cache_get_pages(kv, 1), 0xff, N_BLOCKS * TOKEN_BYTES * 32); /* it is all there */
    kv_cache_destroy(kv);
}

static void test_kv_cache_refuses(void **state)
{
    (void)state;
    kv_cache *kv;
    pgd_why why = {{0}};
    static const int32_t sizes[] = {24, KV_PAGE_MAX_BLOCK_SIZE + 16};
    for (size_t i = 0; i < PGD_ARRAY_LEN(sizes); i++) {
        kv_layout layout = two_groups(16, sizes[i]);
        assert_int_equal(kv_cache_create(&kv, &page, &layout, N_BLOCKS, &why), PGD_EINVAL);
        assert_non_null(strstr(why.text, "at KV group 1"));
        assert_null(kv);
    }
    kv_layout huge = {.n_groups = 1,
                      .groups = {{ATTENTION_FULL, 0, 256}},
                      .n_layers = PGD_MAX_KV_LAYERS,
                      .n_slots = PGD_MAX_KV_LAYERS};
    kv_page_layout large = {.type = DTYPE_F32, .n_kv_heads = 4096, .head_dim = 512};
    for (int32_t i = 0; i < PGD_MAX_KV_LAYERS; i++) {
        huge.layers[i].slot = i;
        huge.page_bytes[i] = 2ull * 4 * 4096 * 512 * 256;
    }
    assert_int_equal(kv_cache_create(&kv, &large, &huge, INT32_MAX / 256, &why), PGD_ENOMEM);
    assert_non_null(strstr(why.text, "--kv-cache-memory"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_cache_places),
        cmocka_unit_test(test_kv_cache_block_sizes),
        cmocka_unit_test(test_kv_cache_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
