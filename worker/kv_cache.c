/* One allocation for all layer slots: the kernel hands out zeroed pages as they are first written,
 * so that a large pool costs nothing before it is used. */
#include "worker/kv_cache.h"

#include <inttypes.h>

#include "common/mem.h"

struct kv_cache {
    kv_page_layout layout;
    int32_t n_slots;
    int32_t n_blocks;
    size_t slot_bytes;
    size_t n_bytes;
    uint8_t *pages;
};

pgd_err kv_cache_create(kv_cache **out, const kv_page_layout *layout, int32_t n_slots,
                        int32_t n_blocks, pgd_why *why)
{
    *out = NULL;
    if (!kv_page_layout_is_valid(layout) || n_slots < 1 || n_blocks < 1 ||
        (int64_t)n_blocks * layout->block_size > INT32_MAX)
        return pgd_fail(why, PGD_EINVAL,
                        "expected a block size that is a multiple of 16 up to %d, a head size up "
                        "to %d, F32, F16 "
                        "or BF16, and fewer than 2^31 slots, got block size %" PRId32
                        ", head size %" PRId32 ", %s, %" PRId32 " blocks",
                        KV_PAGE_MAX_BLOCK_SIZE, KV_PAGE_MAX_HEAD_DIM, layout->block_size,
                        layout->head_dim, dtype_name(layout->type), n_blocks);
    kv_cache *kv = mem_calloc(1, sizeof(*kv));
    if (!kv)
        return PGD_ENOMEM;
    kv->layout = *layout;
    kv->n_slots = n_slots;
    kv->n_blocks = n_blocks;
    if (mem_mul(&kv->slot_bytes, kv_page_bytes(layout), (size_t)n_blocks) &&
        mem_mul(&kv->n_bytes, kv->slot_bytes, (size_t)n_slots))
        kv->pages = mem_alloc_aligned(kv->n_bytes, 64);
    if (!kv->pages) {
        size_t n_bytes = kv->n_bytes;
        kv_cache_destroy(kv);
        return pgd_fail(why, PGD_ENOMEM,
                        "expected %zu bytes for the KV cache (%" PRId32
                        " blocks), got none; lower --kv-cache-memory",
                        n_bytes, n_blocks);
    }
    *out = kv;
    return PGD_OK;
}

void kv_cache_destroy(kv_cache *kv)
{
    if (!kv)
        return;
    mem_free_aligned(kv->pages, kv->n_bytes);
    mem_free(kv);
}

void *kv_cache_get_pages(const kv_cache *kv, int32_t slot)
{
    PGD_ASSERT(slot >= 0 && slot < kv->n_slots);
    return kv->pages + (size_t)slot * kv->slot_bytes;
}

const kv_page_layout *kv_cache_get_layout(const kv_cache *kv)
{
    return &kv->layout;
}

int32_t kv_cache_n_blocks(const kv_cache *kv)
{
    return kv->n_blocks;
}

size_t kv_cache_bytes(const kv_cache *kv)
{
    return kv->n_bytes;
}

pgd_err kv_cache_zero(kv_cache *kv, const block_id *ids, int32_t n_ids, const kernel_ops *ops,
                      kernel_ctx *ctx)
{
    for (int32_t slot = 0; slot < kv->n_slots && n_ids > 0; slot++) {
        kv_zero_args args = {.pages = kv_cache_get_pages(kv, slot),
                             .page_bytes = kv_page_bytes(&kv->layout),
                             .blocks = ids,
                             .n_zero = n_ids};
        PGD_TRY(ops->kv_zero(&args, ctx));
    }
    return PGD_OK;
}
