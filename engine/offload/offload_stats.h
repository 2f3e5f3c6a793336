/* What the offload tiers of a replica hold and did, as /metrics and `paged status` show it. Filled by
 * the connector and the tiers, published with core_stats.
 *
 * Counters are of the engine's life, over all its workers; those of the device's own cache are
 * scheduler_stats'.
 * Thread:  a value
 */
#ifndef ENGINE_OFFLOAD_OFFLOAD_STATS_H
#define ENGINE_OFFLOAD_OFFLOAD_STATS_H

#include "common/err.h"

/* Blocks on their way into a tier, or out of it: the host tier from and to the device, the disk tier
 * from and to the host tier. */
typedef struct offload_flow {
    uint64_t n_bytes;  /* moved, of blocks that arrived whole */
    uint64_t us;       /* that moving took, without the time in queues */
    uint64_t n_failed; /* blocks that did not arrive */
    uint64_t n_queued; /* blocks waiting or under way */
} offload_flow;

typedef struct offload_tier_stats {
    uint64_t size_bytes; /* most that it holds; 0 before there is one */
    uint64_t used_bytes;
    uint64_t n_evicted;         /* blocks given up for room */
    uint64_t n_distrusted;      /* blocks given up because their content was not to be trusted */
    uint64_t n_queued_removals; /* of those, waiting to be gone from disk or on their way */
    offload_flow store;         /* into the tier */
    offload_flow load;          /* out of it */
} offload_tier_stats;

typedef struct offload_stats {
    offload_tier_stats host;
    offload_tier_stats disk;
} offload_stats;

#endif
