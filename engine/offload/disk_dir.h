/* The directory that the disk tiers of several engines share: its files, and the account of the
 * space that all of them take.
 *
 *   <dir>/accounts    used bytes; a slot per engine, locked while it lives
 *   <dir>/tmp/        files that are being written
 *   <dir>/00 .. ff/   blocks, named as disk_block has it
 *
 * The account is never below the sum of the files' lengths, at any moment and wherever a process is
 * killed: a file has its full length in the account before it exists, and leaves it after it is
 * gone. A scan that recounts makes it exact, in the presence of other engines too.
 * Functions give 0 or an errno.
 * Owns:    descriptors; the slot
 * Limits:  DISK_DIR_MAX_ENGINES at a time
 * Thread:  any but core: they wait for locks that other processes hold, and for the disk
 */
#ifndef ENGINE_OFFLOAD_DISK_DIR_H
#define ENGINE_OFFLOAD_DISK_DIR_H

#include <stdatomic.h>

#include "engine/offload/disk_block.h"

enum { DISK_DIR_MAX_ENGINES = 64 };

typedef struct disk_dir disk_dir;

/* Makes what is missing, parents excepted. Errors: PGD_EIO (it cannot be made or used, belongs to
 * somebody else, others may write in it, it holds other things), PGD_EBUSY, PGD_ENOMEM */
PGD_MUST_USE pgd_err disk_dir_open(disk_dir **out, const char *path, uint64_t model, pgd_why *why);
void disk_dir_close(disk_dir *d);
/* Somebody has removed or replaced it, or its accounts. */
bool disk_dir_is_lost(const disk_dir *d, const char *path);

typedef struct disk_dir_temp {
    int fd;
    uint64_t n_bytes;
    char name[64];
} disk_dir_temp;

/* A file to be written, of n_bytes from its start. ENOBUFS: there is no room for it within
 * max_bytes. direct: without the page cache, where the file system can. */
PGD_MUST_USE int disk_dir_begin(disk_dir_temp *out, disk_dir *d, uint64_t n_bytes,
                                uint64_t max_bytes, bool direct);
/* Gives it its name, and closes it in any case. EEXIST: somebody else was first, which is as good.
 * EISDIR: a folder that is not empty has the name. */
PGD_MUST_USE int disk_dir_publish(disk_dir *d, disk_dir_temp *temp, const disk_block_id *id,
                                  uint64_t stamp_us);
void disk_dir_discard(disk_dir *d, disk_dir_temp *temp);

/* For reading. ELOOP, EISDIR, ...: something else has its name, or a file that we may not read. */
PGD_MUST_USE int disk_dir_open_file(int *fd, uint64_t *n_bytes, disk_dir *d,
                                    const disk_block_id *id, bool direct);
/* ESTALE: it carries a later stamp, *stamp_us then, so that another engine wants it. UINT64_MAX
 * removes it anyhow. */
PGD_MUST_USE int disk_dir_remove(disk_dir *d, const disk_block_id *id, uint64_t *stamp_us);
/* The stamp that a file carries: its time of modification. ENOENT: it is not there. */
PGD_MUST_USE int disk_dir_stamp(uint64_t *stamp_us, disk_dir *d, const disk_block_id *id);
void disk_dir_save_stamp(disk_dir *d, const disk_block_id *id, uint64_t stamp_us);

typedef void (*disk_dir_file_fn)(void *arg, const disk_block_id *id, uint64_t stamp_us);
/* Tells all blocks. recount: nobody writes meanwhile; the account is exact afterwards, and what
 * dead engines had not finished is gone. ECANCELED: *stop became true. */
PGD_MUST_USE int disk_dir_scan(disk_dir *d, disk_dir_file_fn fn, void *arg, bool recount,
                               const atomic_bool *stop);
/* Removes what dead engines had not finished. */
PGD_MUST_USE int disk_dir_sweep(disk_dir *d);

/* Of the engines that live, the own one included; out: [DISK_DIR_MAX_ENGINES]. */
int32_t disk_dir_live_models(uint64_t *out, disk_dir *d);
/* As this engine saw the account last. */
uint64_t disk_dir_used_bytes(const disk_dir *d);
/* The directory has all its folders (again). */
PGD_MUST_USE int disk_dir_make_folders(disk_dir *d);

#endif
