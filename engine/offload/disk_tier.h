/* The disk tier: KV blocks of the host tier's region in files, one per block (rules TR).
 *
 * It exchanges with the region only. Whether a block is on disk is answered from an index in
 * memory; threads of its own do all work on files and report by a queue. What goes wrong out there
 * (a full or failing disk, a torn, foreign or removed file) is a miss for the caller, and one
 * warning per kind in a while. On a file system that is full before max_bytes is reached new blocks
 * take the place of old ones, until there is space again. Engines share a directory: each learns
 * within about a second what the others wrote and removed, and all files together stay within
 * max_bytes, whatever model they are of; those of models that no living engine serves go first, then
 * the least recently used.
 * Owns:    directory handle, index, threads
 * Limits:  64 engines share a directory; max_bytes holds at least one block; each engine keeps all
 *          files together within its own max_bytes, so the largest counts while several write
 * Thread:  create and destroy: any; the rest: core (no allocation, lock or file system call)
 */
#ifndef ENGINE_OFFLOAD_DISK_TIER_H
#define ENGINE_OFFLOAD_DISK_TIER_H

#include "common/hash.h"
#include "engine/offload/offload_policy.h"
#include "proto/kv_region.h"

typedef struct disk_tier disk_tier;

typedef struct disk_tier_opts {
    const char *dir;                        /* made when absent (0700), its parent is not; copied */
    uint64_t max_bytes;                     /* of all files, whoever wrote them */
    uint8_t fingerprint[HASH_SHA256_BYTES]; /* only files of equal fingerprint are read */
    const kv_region *region;                /* mapped; borrowed until destroy */
    int32_t n_threads;                      /* for each direction; 0 = 2 */
    int32_t max_jobs;                       /* queued or under way in each direction; 0 = 256 */
    int32_t max_removals;                   /* likewise; 0 = 16384 */
    int32_t rest_ms;  /* how long a direction rests after a fault of the disk; 0 = 10 s */
    int32_t stuck_ms; /* after how long without an answer a direction is stuck; 0 = 2 s */
    /* There is something for next_done. Called from the tier's threads; may be NULL. */
    void (*wake)(void *arg);
    void *arg;
} disk_tier_opts;

/* The directory is looked through in the background: until that is done every lookup misses and
 * nothing is written. Errors: PGD_EINVAL (options), PGD_EIO (the directory cannot be made, belongs
 * to somebody else, may be written by others, holds other things), PGD_EBUSY, PGD_ENOMEM. */
PGD_MUST_USE pgd_err disk_tier_create(disk_tier **out, const disk_tier_opts *opts, pgd_why *why);
/* Jobs that have not begun are dropped, those under way are waited for, a few seconds at most.
 * False: threads hang in the file system and are left behind with their memory; the region is then
 * to stay mapped until the process ends. NULL does nothing. */
bool disk_tier_destroy(disk_tier *d);

/* Seems to be on disk; another engine may have removed it since, then the read fails. */
bool disk_tier_lookup(const disk_tier *d, const offload_key *key);
/* Reads are out (or writes), and for a while none has come back: a file system that hangs, or another
 * engine that does while it holds the account. Whoever waits should not. */
bool disk_tier_is_stuck(const disk_tier *d, bool is_read);
/* Up to max_keys keys that seem to be on disk, in no order: a kv_tier_list_fn for
 * kv_events_set_tier; d is a disk_tier. */
int32_t disk_tier_list(offload_key *out, const void *d, int32_t max_keys, int32_t *cursor);
/* Changes when the answers of disk_tier_list do, whichever engine was it. */
uint64_t disk_tier_version(const disk_tier *d);
/* Somebody wants these, wherever they lie now. The first key ends up as the most recent. Absent
 * keys are ignored. */
void disk_tier_touch(disk_tier *d, const offload_key *keys, int32_t n_keys);

/* Takes a job unless there are max_jobs in this direction or it rests after a fault, or (a write)
 * the directory has not been looked through: false then, and nothing happens. Every job taken is
 * answered by next_done. Until then the medium block and the headers of its shards stay as they are
 * (write), or belong to the tier (read). A read gives the headers that the block was written with,
 * held against its contents; when it fails, headers and contents may not fit each other. A write of
 * a key that is on disk already does nothing, well. */
PGD_MUST_USE bool disk_tier_write(disk_tier *d, const offload_key *key, int32_t medium_block,
                                  uint64_t cookie);
PGD_MUST_USE bool disk_tier_read(disk_tier *d, const offload_key *key, int32_t medium_block,
                                 uint64_t cookie);

/* Removes the file of that key, whoever wrote it: its content is not to be trusted. In order with writes
 * of the key: one taken before leaves nothing behind, one taken later is kept. A read under way may
 * still bring it, and until the job is done lookup may find it. Not refused for a rest or while the
 * directory is looked through: false only with max_removals out. Answered by next_done: ok when no file
 * of that name is left, whenever this process ends then (a crash of the machine may bring it back).
 * What was taken is carried out before destroy ends. */
PGD_MUST_USE bool disk_tier_remove(disk_tier *d, const offload_key *key, uint64_t cookie);

/* Removes the files of the own fingerprint, whoever wrote them, in the background: until that is done
 * every lookup misses and nothing is written. No job may be out. */
void disk_tier_clear(disk_tier *d);

typedef struct disk_tier_done {
    uint64_t cookie;
    uint64_t n_bytes; /* moved; 0 when not ok, or when the write found the key on disk */
    uint64_t us;      /* spent on the files, without the time in the queue */
    bool is_read;
    bool is_removal;
    bool ok;
} disk_tier_done;

/* False when nothing has finished since. In no particular order. */
bool disk_tier_next_done(disk_tier *d, disk_tier_done *out);

typedef struct disk_tier_stats {
    bool is_ready;       /* the directory has been looked through */
    uint64_t n_files;    /* of the own fingerprint, as far as is known */
    uint64_t n_foreign;  /* of others */
    uint64_t used_bytes; /* of all files, as counted by all engines together */
    uint64_t n_reads;    /* that succeeded; n_writes too */
    uint64_t n_writes;
    uint64_t n_read_bytes;
    uint64_t n_written_bytes;
    uint64_t read_us; /* summed over threads */
    uint64_t write_us;
    uint64_t n_failed_reads;  /* missing and bad files included */
    uint64_t n_failed_writes; /* found no room, or the disk failed */
    uint64_t n_bad_files;     /* torn, corrupt or foreign: removed */
    uint64_t n_evicted;       /* files that this engine removed for room */
    uint64_t n_removed;       /* by disk_tier_remove, those that were there */
    uint64_t n_failed_removals;
    int32_t n_queued_reads; /* not finished yet */
    int32_t n_queued_writes;
    int32_t n_queued_removals;
} disk_tier_stats;

void disk_tier_get_stats(disk_tier_stats *out, const disk_tier *d);

#endif
