/* Joins the offload tiers to the scheduler: a kv_connector over the host tier's manager and, if there
 * is one, the disk tier behind it (rules OC, TR).
 *
 *   published ─► queue ─► STORE of the next step ─► host ─► written to disk, if there is room to queue
 *   match: behind the local prefix, the longest one whose blocks the tiers have
 *          host                  ─► HIT, the load goes out with the step that gave it blocks
 *          being stored, loaded for somebody else, or on its way up from disk
 *                                ─► ASK_AGAIN; a report of the worker or a wake of the disk tier
 *                                   will follow, and with it another answer
 *          on disk               ─► brought up, ASK_AGAIN
 *          quicker to compute    ─► NONE (offload_cost.h)
 *
 * Stores go by blocks, not by requests: a block that is handed out again while it is queued goes out
 * with that very step, one whose store is under way makes that step wait for it (FLUSH), and no
 * request ever waits for a store. What is not a hit is computed; so every request gets on: it has
 * blocks brought up from disk once for each admission, waits for others a bounded number of times,
 * and for ten seconds at most, should a disk hang. Blocks brought up stay until it was admitted or has ended.
 * Hits are pinned when their load begins; between match and that nothing is evicted, since both
 * happen in the making of one step.
 * Owns:    the manager; everything is sized at create, about 100 bytes for each device block and
 *          200 for each block of the tier
 * Limits:  1 <= n_ranks <= 64; max_num_seqs < 2^19
 * Thread:  core
 */
#ifndef ENGINE_OFFLOAD_OFFLOAD_CONNECTOR_H
#define ENGINE_OFFLOAD_OFFLOAD_CONNECTOR_H

#include "engine/core/kv_connector.h"
#include "engine/kv/kv_group_ops.h"
#include "engine/offload/disk_tier.h"
#include "engine/offload/offload_manager.h"
#include "engine/offload/offload_stats.h"

typedef struct offload_connector offload_connector;

typedef struct offload_connector_opts {
    offload_manager_opts host; /* copied */
    uint64_t block_bytes;      /* of the host tier's blocks, all ranks; for the numbers */
    /* A block is stored once so many requests have asked for it; 0 or 1: always, 0 without counting
     * (OF11). */
    int32_t store_threshold;
    disk_tier *disk; /* borrow until destroy or clear; NULL = none */
    /* As the scheduler has them. */
    int32_t n_device_blocks;
    int32_t max_num_seqs;
    int32_t max_model_len;
    int32_t hash_block_size;
    int32_t n_groups;
    const kv_group_spec *groups; /* [n_groups], copied */
    bool use_eagle;
    int32_t n_ranks;
    /* Blocks that the transfers of one step have together at most; 0 = KV_TRANSFER_MAX_BLOCKS, and at
     * most that. */
    int32_t max_step_blocks;
} offload_connector_opts;

/* Errors: PGD_EINVAL, PGD_ENOMEM */
PGD_MUST_USE pgd_err offload_connector_create(offload_connector **out,
                                              const offload_connector_opts *opts);
/* After the scheduler, and after the disk tier, whose jobs end unheard. NULL does nothing. */
void offload_connector_destroy(offload_connector *c);

/* For scheduler_opts. Borrow until destroy. */
const kv_connector *offload_connector_get_ops(const offload_connector *c);
/* To be filled from a medium before the first step, and listed; borrow until destroy. */
offload_manager *offload_connector_get_manager(offload_connector *c);
/* The tiers are empty from now on. For the time between two workers: after reset, nothing of any
 * device is under way. Jobs of the disk tier that there was must have ended, unheard; disk: the one
 * from now on, or NULL. */
void offload_connector_clear(offload_connector *c, disk_tier *disk);
/* The disk tier has called wake. Also done with each report and each step. */
void offload_connector_pump(offload_connector *c);
void offload_connector_get_stats(offload_stats *out, const offload_connector *c);
/* Integrity, O(blocks); aborts with the values on a fault. */
void offload_connector_check(const offload_connector *c);

#endif
