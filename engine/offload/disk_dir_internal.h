/* What the files of disk_dir share: the account, which is read and written under the lock.
 *
 * Thread:  as disk_dir
 */
#ifndef ENGINE_OFFLOAD_DISK_DIR_INTERNAL_H
#define ENGINE_OFFLOAD_DISK_DIR_INTERNAL_H

#include <pthread.h>

#include "engine/offload/disk_dir.h"

#define DISK_DIR_ACCOUNTS "accounts"
#define DISK_DIR_TEMPS    "tmp"

struct disk_dir {
    int root_fd;
    int accounts_fd;
    int32_t slot; /* -1 = none yet */
    uint64_t nonce;
    uint64_t model;
    pthread_mutex_t m; /* among threads, as the lock in the file is among processes */
    uint64_t n_temps;  /* guarded by m, as are the next two */
    uint64_t used_bytes;
    bool is_counted;             /* used_bytes is what the file said */
    _Atomic uint64_t seen_bytes; /* used_bytes, for anybody */
};

/* Waits for the lock and reads the account. */
PGD_MUST_USE int disk_dir__lock(disk_dir *d);
void disk_dir__unlock(disk_dir *d);
/* Both with the lock held. */
PGD_MUST_USE int disk_dir__set_used(disk_dir *d, uint64_t n_bytes);
/* Frees space; a failure leaves the account too high, which the next recount repairs. */
void disk_dir__release(disk_dir *d, uint64_t n_bytes);
/* Does the engine live that wrote such a temporary file? */
bool disk_dir__is_alive(disk_dir *d, int32_t slot, uint64_t nonce);
/* A folder of the directory; make: when absent. */
PGD_MUST_USE int disk_dir__open_folder(int *fd, disk_dir *d, const char *name, bool make);

#endif
