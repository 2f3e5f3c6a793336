/* Which blocks are on disk, and when each was last wanted: the disk tier's memory of its directory.
 *
 * Blocks of every model are in it, since all share the space; the key of another model's block is
 * never looked up. A stamp says when a block was last wanted, in microseconds: disk_tier has the clock.
 * Owns:    everything, sized at create
 * Limits:  max_files 1 .. 2^30
 * Thread:  find, touch, list and version: one thread of the owner's, which never waits; the others:
 *          any, one at a time by a lock
 */
#ifndef ENGINE_OFFLOAD_DISK_INDEX_H
#define ENGINE_OFFLOAD_DISK_INDEX_H

#include "engine/offload/disk_block.h"

typedef struct disk_index disk_index;

typedef struct disk_index_file {
    disk_block_id id;
    uint64_t stamp_us;
} disk_index_file;

/* model: the own one, for the counts. Errors: PGD_EINVAL, PGD_ENOMEM */
PGD_MUST_USE pgd_err disk_index_create(disk_index **out, int32_t max_files, uint64_t model);
void disk_index_destroy(disk_index *x);

bool disk_index_find(const disk_index *x, const disk_block_id *id);
/* Raises the stamp, if it is there. */
void disk_index_touch(disk_index *x, const disk_block_id *id, uint64_t stamp_us);

/* Up to max_keys own keys from position *cursor (0 at first) on; *cursor moves behind them, to -1 at
 * the end. Looks at no more than max_keys places. */
int32_t disk_index_list(offload_key *out, const disk_index *x, int32_t max_keys, int32_t *cursor);
/* Changes with every file that comes or goes. */
uint64_t disk_index_version(const disk_index *x);

/* saved_us: the stamp that the file itself carries. One that is there gets the later stamp. False:
 * no room. */
bool disk_index_put(disk_index *x, const disk_index_file *file, uint64_t saved_us);
bool disk_index_remove(disk_index *x, const disk_block_id *id);
/* 0 = not there */
uint64_t disk_index_stamp(disk_index *x, const disk_block_id *id);
void disk_index_reset(disk_index *x);

/* What put does not name between begin and end of a sweep is forgotten at its end. */
void disk_index_begin_sweep(disk_index *x);
void disk_index_end_sweep(disk_index *x);

/* The first n files to give up, first to go first: those of models not in live, then by stamp.
 * Returns how many there are. O(files). */
int32_t disk_index_oldest(disk_index_file *out, disk_index *x, int32_t n, const uint64_t *live,
                          int32_t n_live);
/* Up to n files that were touched more than by_us after the stamp that their file carries; they
 * count as saved from now on. *pos goes on where the last call ended, and wraps. */
int32_t disk_index_unsaved(disk_index_file *out, disk_index *x, int32_t n, uint64_t by_us,
                           int32_t *pos);

int32_t disk_index_n_own(const disk_index *x);
int32_t disk_index_n_foreign(const disk_index *x);

#endif
