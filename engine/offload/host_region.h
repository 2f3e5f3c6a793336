/* The host tier's memory, shared with the worker, and the index in it that tells a later engine what
 * it holds.
 *
 * A tier ends with its engine unless it persists: then it is a file in /dev/shm, named by the secret
 * of the block hashes, which one engine has at a time and the next one takes up as far as the
 * fingerprint is the same. An entry of the index is valid only while its block is whole: set when a
 * store is complete, cleared before the block is used again. So it may be cut off at any moment; what
 * a dying worker wrote into a block shows in the block's checksum.
 * Owns:    file, mapping
 * Thread:  core
 */
#ifndef ENGINE_OFFLOAD_HOST_REGION_H
#define ENGINE_OFFLOAD_HOST_REGION_H

#include "engine/offload/offload_manager.h"
#include "proto/kv_region.h"

#define HOST_REGION_SHM_DIR "/dev/shm"

typedef struct host_region host_region;

typedef struct host_region_opts {
    kv_region_shape shape;
    uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES]; /* of what the blocks depend on */
    int32_t n_groups;                                 /* of KV layers */
    const uint8_t *seed; /* [32], the tier persists; NULL = not. Borrow for the call */
    bool is_named;   /* for a worker that cannot see our descriptors; one that persists always is */
    const char *dir; /* of named files, on tmpfs; borrow for the call */
    void (*beat)(void); /* called at least every second or so while space is taken; NULL = none */
} host_region_opts;

/* Whether a machine or cgroup of total_bytes and a directory for named files (NULL = none is needed) can hold
 * a tier of n_bytes at all. Errors: PGD_ERANGE, PGD_EIO */
PGD_MUST_USE pgd_err host_region_check_room(uint64_t n_bytes, uint64_t total_bytes, const char *dir,
                                            pgd_why *why);

/* A file that should persist and cannot be had is a line in the log and a tier that ends with this
 * engine. Errors: PGD_EINVAL (shape), PGD_ENOMEM (space), PGD_EIO */
PGD_MUST_USE pgd_err host_region_create(host_region **out, const host_region_opts *opts,
                                        pgd_why *why);
/* For an engine without a tier that persists: one line of the log when such a tier of this seed [32]
 * is in dir. It stays: it may be that of another engine, which is being restarted. */
void host_region_tell_unused(const char *dir, const uint8_t *seed);
/* Nobody may use its memory any more, nor a manager tell it anything. */
void host_region_destroy(host_region *r);
/* The same when threads may use its memory until the process ends: that stays. */
void host_region_abandon(host_region *r);

/* Fills an empty manager of the same capacity with what the index tells, most recent last; the
 * number of blocks. PGD_ENOMEM */
PGD_MUST_USE pgd_err host_region_restore(int32_t *n_blocks, host_region *r, offload_manager *m);
bool host_region_has_fingerprint(const host_region *r,
                                 const uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES]);
/* Empties the index too; the manager's reset is the caller's. No disk tier may use the memory. */
void host_region_set_fingerprint(host_region *r,
                                 const uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES]);

/* A manager's callbacks of the same names; arg: the host_region. */
void host_region_on_stored(void *arg, const offload_key *keys, const int32_t *medium_ids,
                           int32_t n_keys);
void host_region_on_removed(void *arg, const offload_key *keys, const int32_t *medium_ids,
                            int32_t n_keys);
void host_region_on_touched(void *arg, int32_t medium_id);
void host_region_on_reset(void *arg);

/* Where the worker finds it. Borrow until destroy. */
const char *host_region_get_path(const host_region *r);
/* Borrow until destroy. */
const kv_region *host_region_get_memory(const host_region *r);
bool host_region_is_persistent(const host_region *r);

#endif
