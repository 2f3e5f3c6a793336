/* Loads and stores of KV blocks between the pool of this device and an offload tier, beside the
 * steps (rules OC9, OC10; proto/README.md "Transfers").
 *
 *   main thread     kv_transfer_begin_step ──► store queue ──► thread "kv-store" ──► on_done
 *                                         └──► load queue  ──► thread "kv-load"  ──► on_done
 *
 * Each direction is a queue, a thread and a stream of the copy_device: first in, first out. What the
 * compute stream has been given before a transfer is taken up is done before its first byte moves: a
 * store reads what was written, a load does not overwrite what is still read. Both go through staging
 * buffers of the worker's own: a checksum is that of what was computed, whoever else writes into the
 * region, and what is loaded is held against it there; only blocks that are right reach the device.
 * Owns:    the mapping of the region, queues, threads; sized at create, nothing is allocated later
 * Limits:  KV_TRANSFER_MAX_PENDING transfers of each direction
 * Thread:  worker, but for on_done
 */
#ifndef WORKER_KV_TRANSFER_H
#define WORKER_KV_TRANSFER_H

#include "proto/control.h"
#include "proto/scheduler_output.h"
#include "worker/copy_device.h"

typedef struct kv_transfer kv_transfer;

/* Where the pages of a slot lie on the device: [n_blocks][page_bytes]. */
typedef struct kv_transfer_slot {
    uint8_t *pages;
    size_t page_bytes;
} kv_transfer_slot;

/* A transfer has ended; its blocks and its id are free. Called by the thread of its direction; two
 * may call at a time. False: not now, it is called again soon, with the same. */
typedef bool (*kv_transfer_done_fn)(void *arg, const kv_transfer_done *done);

typedef struct kv_transfer_opts {
    copy_device *device;           /* borrow until destroy */
    const kv_transfer_slot *slots; /* [n_slots], copied; the pages are a borrow until destroy */
    int32_t n_slots;
    const kv_config_msg *config; /* the tier and n_blocks; borrow for the call */
    int32_t rank;
    uint64_t *progress; /* counted up atomically with each block; borrow until destroy */
    kv_transfer_done_fn on_done;
    void *arg;
} kv_transfer_opts;

/* Maps the region and starts the threads; *out is NULL when the message has no tier. Errors: PGD_EPROTO (the message's numbers), those of
 * kv_region_open (with the path, the reason and what to do), PGD_ENOMEM */
PGD_MUST_USE pgd_err kv_transfer_create(kv_transfer **out, const kv_transfer_opts *opts,
                                        pgd_why *why);
/* No on_done is called from then on: what is under way ends with the block at hand. NULL is
 * allowed. */
void kv_transfer_stop(kv_transfer *t);
/* Stops it too. */
void kv_transfer_destroy(kv_transfer *t);

/* Takes up the transfers of a step: stores, then waits for those that a flush names, then loads.
 * Call it before anything of the step is given to the compute stream, zeroing included. Without a
 * tier (NULL) a step may have none.
 * Errors:  PGD_EPROTO: the message breaks the rules of proto/README.md; some of it may have been
 *          taken up. PGD_EDEVICE */
PGD_MUST_USE pgd_err kv_transfer_begin_step(kv_transfer *t, const scheduler_output *in,
                                            pgd_why *why);

#endif
