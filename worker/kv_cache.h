/* The paged KV cache of one worker: pages of every layer slot, and nothing about who uses them.
 *
 * A slot is one array [n_blocks] of pages, shared by one layer of each group (proto/kv_layout.h);
 * with one group slot and layer are the same. Layers are KV layers throughout. Memory is touched
 * when first written.
 * Owns:    the pages
 * Thread:  the worker's main thread
 */
#ifndef WORKER_KV_CACHE_H
#define WORKER_KV_CACHE_H

#include "kernels/ops.h"
#include "proto/kv_layout.h"

typedef struct kv_cache kv_cache;

/* page: what a layer's page holds; its block size is the group's. The layout was checked by
 * kv_layout_check for layers with these pages, and is copied. PGD_EINVAL for pages that the kernels
 * do not take, PGD_ENOMEM with the bytes that were asked for. */
PGD_MUST_USE pgd_err kv_cache_create(kv_cache **out, const kv_page_layout *page,
                                     const kv_layout *layout, int32_t n_blocks, pgd_why *why);
void kv_cache_destroy(kv_cache *kv);

/* Pages of a layer, how one lies in memory, and the group whose table leads to them; borrows until
 * destroy. */
void *kv_cache_get_pages(const kv_cache *kv, int32_t layer);
/* Pages of a slot, [n_blocks][page_bytes]. */
void *kv_cache_get_slot(const kv_cache *kv, int32_t slot, size_t *page_bytes);
const kv_page_layout *kv_cache_get_page_layout(const kv_cache *kv, int32_t layer);
int32_t kv_cache_group_of(const kv_cache *kv, int32_t layer);
int32_t kv_cache_n_blocks(const kv_cache *kv);
size_t kv_cache_bytes(const kv_cache *kv);
/* Zeroes these blocks in every slot; ids have been checked. */
PGD_MUST_USE pgd_err kv_cache_zero(kv_cache *kv, const block_id *ids, int32_t n_ids,
                                   const kernel_ops *ops, kernel_ctx *ctx);

#endif
