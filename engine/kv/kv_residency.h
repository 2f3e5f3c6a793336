/* How long KV blocks stay in the prefix cache, measured on a sample of them.
 *
 *   handed out ──gap──► used by a hit ──gap──► used by a hit ──idle──► evicted
 *   └────────────────────────────── lifetime ───────────────────────────────┘
 *
 * Evicted: handed out again while it still had its hash. A block that ends otherwise (never cached,
 * un-published, the cache reset) is in no histogram. Whether a block is in the sample is drawn each
 * time it is handed out; the others cost one bit to look at.
 * Owns:    its arrays, 16 bytes and a bit for each block
 * Thread:  core; create, destroy and read: any
 * Source:  names and meaning as in vLLM's kv_block_* metrics
 */
#ifndef ENGINE_KV_KV_RESIDENCY_H
#define ENGINE_KV_KV_RESIDENCY_H

#include "engine/histogram.h"

typedef struct kv_residency kv_residency;

typedef struct kv_residency_stats {
    histogram lifetime_s;
    histogram idle_s;
    histogram reuse_gap_s;
} kv_residency_stats;

/* sample: share of the blocks, in (0, 1]. now_us: monotonic. Errors: PGD_EINVAL, PGD_ENOMEM */
PGD_MUST_USE pgd_err kv_residency_create(kv_residency **out, double sample,
                                         uint64_t (*now_us)(void));
void kv_residency_destroy(kv_residency *k);
/* Before anything is noted, once. Errors: PGD_ENOMEM */
PGD_MUST_USE pgd_err kv_residency_set_pool(kv_residency *k, int32_t n_blocks);
/* The block had a hash and is about to be handed out again. */
void kv_residency_note_evicted(kv_residency *k, block_id id);
/* Blocks were handed out, evicted ones among them. */
void kv_residency_note_given(kv_residency *k, const block_id *ids, int32_t n_ids);
/* Blocks were hit; block 0, the null block, is skipped. */
void kv_residency_note_used(kv_residency *k, const block_id *ids, int32_t n_ids);
/* A consistent snapshot. */
void kv_residency_read(const kv_residency *k, kv_residency_stats *out);

#endif
