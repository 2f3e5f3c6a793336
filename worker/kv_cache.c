/* One allocation for all slots: the kernel hands out zeroed pages as they are first written, so
 * that a large pool costs nothing before it is used. */
#include "worker/kv_cache.h"

#include <inttypes.h>

#include "common/mem.h"

struct kv_cache {
    kv_layout layout;
    kv_page_layout pages_of[PGD_MAX_KV_GROUPS];
    size_t slot_at[PGD_MAX_KV_LAYERS]; /* bytes from the start */
    int32_t n_blocks;
    size_t n_bytes;
    uint8_t *data;
};

static pgd_err check_pages(const kv_cache *kv, pgd_why *why)
{
    for (int32_t g = 0; g < kv->layout.n_groups; g++) {
        const kv_page_layout *page = &kv->pages_of[g];
        if (!kv_page_layout_is_valid(page))
            return pgd_fail(why, PGD_EINVAL,
                            "expected a block size that is a multiple of 16 up to %d, a head size "
                            "up to %d, F32, F16 or BF16, got block size %" PRId32
                            ", head size %" PRId32 ", %s, at KV group %" PRId32,
                            KV_PAGE_MAX_BLOCK_SIZE, KV_PAGE_MAX_HEAD_DIM, page->block_size,
                            page->head_dim, dtype_name(page->type), g);
    }
    return PGD_OK;
}

/* False on overflow. */
static bool lay_out(kv_cache *kv)
{
    for (int32_t s = 0; s < kv->layout.n_slots; s++) {
        size_t slot_bytes;
        kv->slot_at[s] = kv->n_bytes;
        if (!mem_mul(&slot_bytes, (size_t)kv->layout.page_bytes[s], (size_t)kv->n_blocks) ||
            !mem_add(&kv->n_bytes, kv->n_bytes, slot_bytes))
            return false;
    }
    return true;
}

pgd_err kv_cache_create(kv_cache **out, const kv_page_layout *page, const kv_layout *layout,
                        int32_t n_blocks, pgd_why *why)
{
    *out = NULL;
    kv_cache *kv = mem_calloc(1, sizeof(*kv));
    if (!kv)
        return PGD_ENOMEM;
    kv->layout = *layout;
    kv->n_blocks = n_blocks;
    for (int32_t g = 0; g < layout->n_groups; g++) {
        kv->pages_of[g] = *page;
        kv->pages_of[g].block_size = layout->groups[g].block_size;
    }
    pgd_err err = check_pages(kv, why);
    if (err != PGD_OK) {
        kv_cache_destroy(kv);
        return err;
    }
    for (int32_t i = 0; i < layout->n_layers; i++)
        PGD_ASSERT(kv_page_bytes(kv_cache_get_page_layout(kv, i)) ==
                   layout->page_bytes[layout->layers[i].slot]);
    if (lay_out(kv))
        kv->data = mem_alloc_aligned(kv->n_bytes, 64);
    if (!kv->data) {
        size_t n_bytes = kv->n_bytes;
        kv->n_bytes = 0;
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
    mem_free_aligned(kv->data, kv->n_bytes);
    mem_free(kv);
}

void *kv_cache_get_pages(const kv_cache *kv, int32_t layer)
{
    PGD_ASSERT(layer >= 0 && layer < kv->layout.n_layers);
    return kv->data + kv->slot_at[kv->layout.layers[layer].slot];
}

void *kv_cache_get_slot(const kv_cache *kv, int32_t slot, size_t *page_bytes)
{
    PGD_ASSERT(slot >= 0 && slot < kv->layout.n_slots);
    *page_bytes = (size_t)kv->layout.page_bytes[slot];
    return kv->data + kv->slot_at[slot];
}

const kv_page_layout *kv_cache_get_page_layout(const kv_cache *kv, int32_t layer)
{
    return &kv->pages_of[kv_cache_group_of(kv, layer)];
}

int32_t kv_cache_group_of(const kv_cache *kv, int32_t layer)
{
    PGD_ASSERT(layer >= 0 && layer < kv->layout.n_layers);
    return kv->layout.layers[layer].group;
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
    for (int32_t s = 0; s < kv->layout.n_slots && n_ids > 0; s++) {
        kv_zero_args args = {.pages = kv->data + kv->slot_at[s],
                             .page_bytes = (size_t)kv->layout.page_bytes[s],
                             .blocks = ids,
                             .n_zero = n_ids};
        PGD_TRY(ops->kv_zero(&args, ctx));
    }
    return PGD_OK;
}
