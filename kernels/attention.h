/* Attention of a step's query rows over the paged KV cache of one layer, causal or not,
 * grouped-query heads.
 *
 * For row t of sequence s at position p, and head h, whose KV head is h / (n_heads / n_kv_heads):
 *
 *   z_j          = cap(scale * sum_i q[t, h, i] * K[j, i])
 *                  over the keys j in [first(p), p];
 *                  with n_keys over all j in [0, n_keys[s]), whatever the position
 *   first(p)     = max(0, window > 0 ? p - window + 1 : 0, chunk > 0 ? p / chunk * chunk : 0)
 *   cap(z)       = soft_cap > 0 ? soft_cap * tanh(z / soft_cap) : z
 *   m            = max_j z_j, with sinks also of sinks[h]
 *   out[t, h, :] = sum_j exp(z_j - m) * V[j, :]
 *                  / (sum_j exp(z_j - m) + (sinks ? exp(sinks[h] - m) : 0))
 *
 * Rows of sequence s are [query_start[s], query_start[s + 1]), in position order; the last one is
 * at position n_context[s] - 1. With n_keys (an encoder's own attention, cross attention) rows have
 * no positions and n_context is not read. Key j of sequence s lies in page block_table[seq_row[s] *
 * block_table_stride + j / block_size] at offset j % block_size. The K and V of every row of the
 * step are already in the pages.
 *
 * Order of sums (I1): keys are cut into splits of ATTENTION_SPLIT keys anchored at position 0, also
 * with a window or chunks. Inside a split the order depends on positions alone; the partial results
 * (maximum, sum, weighted V) of a row and head are folded in ascending order of splits. So the bits
 * of a row and head depend on its own q, K and V alone, not on the batch, on how the prompt was
 * cut, or on the number of threads. Neighbouring rows and heads may share loads. Keys after p or before
 * first(p) take no part in any sum or maximum: stale NaN in unused slots has no effect.
 *
 * Shapes:  q [n_rows, n_heads, head_dim] with q_stride; out [n_rows, n_heads, head_dim] with
 *          out_stride; query_start [n_seqs + 1]; n_context, seq_row, n_keys [n_seqs]; block_table [rows,
 *          block_table_stride]; sinks [n_heads] or NULL
 * Types:   q, out f32; pages of kv.type; sums in f32 (ref: f64)
 * Limits:  n_heads % kv.n_kv_heads == 0; kv_page_layout_is_valid; soft_cap, window, chunk >= 0;
 *          n_keys NULL, or each >= 1 and window and chunk 0; out may not alias q; table entries of
 *          the keys used are valid block ids (the caller has checked); exp of very negative values may flush to 0
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (limits)
 * Source:  Milakov & Gimelshein 2018 (online softmax), Dao 2022 (FlashAttention), Kwon et al.
 *          2023 (paged attention)
 */
#ifndef KERNELS_ATTENTION_H
#define KERNELS_ATTENTION_H

#include "kernels/kernel_ctx.h"
#include "kernels/kv_page.h"

PGD_BEGIN_C

#define ATTENTION_SPLIT 128

typedef struct attention_args {
    float *out;
    int64_t out_stride;
    const float *q;
    int64_t q_stride;
    int32_t n_heads;
    const void *pages;
    kv_page_layout kv;
    int32_t n_seqs;
    const int32_t *query_start;
    const int32_t *n_context;
    const int32_t *n_keys; /* NULL: causal */
    const int32_t *seq_row;
    const block_id *block_table;
    int64_t block_table_stride;
    float scale;
    int32_t window; /* tokens, the row's own included; 0 = none */
    int32_t chunk;  /* tokens of a chunk that attends to itself alone; 0 = none */
    float soft_cap;
    const float *sinks;
} attention_args;

/* What the workspace is sized by. */
typedef struct attention_limits {
    int32_t max_rows;
    int32_t max_seqs;
    int32_t max_context; /* keys of a row */
    int32_t n_heads;
    kv_page_layout kv;
    int32_t n_threads;
} attention_limits;

pgd_err attention_ref(const attention_args *args, kernel_ctx *ctx);
size_t attention_ref_workspace_bytes(const attention_limits *limits);

/* Share one driver and its workspace; sums in f32. PGD_EINVAL also when the workspace is too small. */
pgd_err attention_avx2(const attention_args *args, kernel_ctx *ctx);
pgd_err attention_avx512(const attention_args *args, kernel_ctx *ctx);
size_t attention_simd_workspace_bytes(const attention_limits *limits);

PGD_END_C
#endif
