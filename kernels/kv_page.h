/* How one page of the paged KV cache (one layer, one block of tokens) lies in memory.
 *
 *   K part  [n_kv_heads][head_dim][block_size]   transposed: a dimension of consecutive keys is
 *                                                one vector
 *   V part  [n_kv_heads][block_size][head_dim]
 *
 * Pages of one layer are one array [n_blocks] of kv_page_bytes each; slot s lies in page
 * s / block_size.
 *
 * Types:   F32, F16 or BF16
 * Limits:  block_size a multiple of 16, at most KV_PAGE_MAX_BLOCK_SIZE; head_dim at most
 *          KV_PAGE_MAX_HEAD_DIM
 * Thread:  any
 */
#ifndef KERNELS_KV_PAGE_H
#define KERNELS_KV_PAGE_H

#include "common/model/dtype.h"

PGD_BEGIN_C

#define KV_PAGE_MAX_HEAD_DIM   512
#define KV_PAGE_MAX_BLOCK_SIZE 256

typedef struct kv_page_layout {
    dtype type;
    int32_t n_kv_heads;
    int32_t head_dim;
    int32_t block_size;
} kv_page_layout;

static inline bool kv_page_layout_is_valid(const kv_page_layout *kv)
{
    return (kv->type == DTYPE_F32 || kv->type == DTYPE_F16 || kv->type == DTYPE_BF16) &&
           kv->n_kv_heads >= 1 && kv->head_dim >= 1 && kv->head_dim <= KV_PAGE_MAX_HEAD_DIM &&
           kv->block_size >= 16 && kv->block_size <= KV_PAGE_MAX_BLOCK_SIZE &&
           kv->block_size % 16 == 0;
}

static inline size_t kv_page_elem_bytes(const kv_page_layout *kv)
{
    return kv->type == DTYPE_F32 ? 4 : 2;
}

/* Elements (not bytes) of the K part, equal to those of the V part. */
static inline size_t kv_page_part_elems(const kv_page_layout *kv)
{
    return (size_t)kv->n_kv_heads * (size_t)kv->head_dim * (size_t)kv->block_size;
}

static inline size_t kv_page_bytes(const kv_page_layout *kv)
{
    return 2 * kv_page_part_elems(kv) * kv_page_elem_bytes(kv);
}

/* Element offset in the page of K of head h, dimension 0, token offset 0: dimension d of token o is
 * at + d * block_size + o. */
static inline size_t kv_page_k_elem(const kv_page_layout *kv, int32_t h)
{
    return (size_t)h * (size_t)kv->head_dim * (size_t)kv->block_size;
}

/* Element offset in the page of V of head h: dimension d of token o is at + o * head_dim + d. */
static inline size_t kv_page_v_elem(const kv_page_layout *kv, int32_t h)
{
    return kv_page_part_elems(kv) + (size_t)h * (size_t)kv->head_dim * (size_t)kv->block_size;
}

PGD_END_C
#endif
