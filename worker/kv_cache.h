/* The paged KV cache of one worker: pages of every layer slot, and nothing about who uses them.
 *
 * Layer slot j of every group shares one array [n_blocks] of pages; with one group slot and layer
 * are the same. Memory is touched when first written.
 * Owns:    the pages
 * Thread:  the worker's main thread
 */
#ifndef WORKER_KV_CACHE_H
#define WORKER_KV_CACHE_H

#include "common/err.h"
#include "kernels/ops.h"

typedef struct kv_cache kv_cache;

/* PGD_EINVAL for a bad layout or count, PGD_ENOMEM with the bytes that were asked for. */
PGD_MUST_USE pgd_err kv_cache_create(kv_cache **out, const kv_page_layout *layout, int32_t n_slots,
                                     int32_t n_blocks, pgd_why *why);
void kv_cache_destroy(kv_cache *kv);

/* Pages of one layer slot; borrow until destroy. */
void *kv_cache_get_pages(const kv_cache *kv, int32_t slot);
const kv_page_layout *kv_cache_get_layout(const kv_cache *kv);
int32_t kv_cache_n_blocks(const kv_cache *kv);
size_t kv_cache_bytes(const kv_cache *kv);
/* Zeroes these blocks in every slot; ids have been checked. */
PGD_MUST_USE pgd_err kv_cache_zero(kv_cache *kv, const block_id *ids, int32_t n_ids,
                                   const kernel_ops *ops, kernel_ctx *ctx);

#endif
