/* The offload tiers of a replica: made when the first worker has told its layers, kept over the
 * workers' lives, emptied when a later worker's numbers would differ.
 *
 * Owns:    the host tier's memory, the disk tier, the connector
 * Thread:  core, but for create and destroy
 */
#ifndef ENGINE_CORE_CORE_OFFLOAD_H
#define ENGINE_CORE_CORE_OFFLOAD_H

#include "config/config.h"
#include "engine/core/core_sizes.h"
#include "engine/core/kv_connector.h"
#include "engine/core/worker_life.h"
#include "engine/kv/kv_events.h"
#include "engine/offload/offload_stats.h"

typedef struct core_offload core_offload;

typedef struct core_offload_opts {
    const config *cfg;        /* borrow until destroy */
    const core_sizes *sizes;  /* likewise */
    const char *model_path;   /* likewise; NULL = none */
    const uint8_t *hash_seed; /* [32], likewise */
    kv_events *events;        /* told what the tiers hold; likewise; NULL = nobody asks */
    void (*beat)(void);       /* called while making the tiers takes long; NULL = nobody waits */
    int wake_fd;              /* likewise; written when a transfer to or from disk has ended */
} core_offload_opts;

/* As far as it can be told before a worker is there. *out is NULL without kv_offload_memory. Errors:
 * PGD_EINVAL (the worker may be on another host), PGD_ERANGE (more than the machine has), PGD_ENOMEM */
PGD_MUST_USE pgd_err core_offload_create(core_offload **out, const core_offload_opts *opts,
                                         pgd_why *why);
/* After the scheduler. NULL does nothing. */
void core_offload_destroy(core_offload *o);

/* A worker has loaded: makes the tiers, or empties them if they are not for its numbers, and tells in
 * *kv where they are. Errors: PGD_ERANGE (less than a block), PGD_ENOMEM, PGD_EIO, PGD_EINVAL */
PGD_MUST_USE pgd_err core_offload_begin_life(core_offload *o, kv_config_msg *kv,
                                             const worker_facts *facts, pgd_why *why);
/* For the scheduler. Borrow until destroy; NULL without tiers. After the first begin_life. */
const kv_connector *core_offload_get_connector(const core_offload *o);

/* The tiers forget everything. False and no change while transfers are under way: ask again. True
 * without tiers. */
PGD_MUST_USE bool core_offload_reset(core_offload *o);
/* In each turn: within about a second the events tell what has come to disk and gone from there. */
void core_offload_turn(core_offload *o);
/* Nothing waits to be moved from one tier to the next; true without tiers. */
bool core_offload_is_quiet(const core_offload *o);
/* Zeros without tiers. */
void core_offload_get_stats(offload_stats *out, const core_offload *o);

#endif
