/* What the files of disk_tier share.
 *
 * Thread:  as said at each field
 */
#ifndef ENGINE_OFFLOAD_DISK_TIER_INTERNAL_H
#define ENGINE_OFFLOAD_DISK_TIER_INTERNAL_H

#include <stdatomic.h>

#include <semaphore.h>

#include "common/log.h"
#include "common/ring.h"
#include "common/thread.h"
#include "engine/offload/disk_dir.h"
#include "engine/offload/disk_index.h"
#include "engine/offload/disk_tier.h"
#include "engine/offload/disk_watch.h"

enum { DISK_TIER_MAX_VICTIMS = 512, DISK_TIER_MAX_THREADS = 32 };

typedef struct disk_tier_job {
    offload_key key;
    int32_t medium_block;
    bool is_read;
    bool is_removal;
    uint64_t cookie;
    uint64_t stamp_us; /* of a write */
} disk_tier_job;

/* A job of the writes that a thread is at, or waits to be at: those of one key go one after the
 * other. */
typedef struct disk_tier_turn {
    offload_key key;
    uint64_t number; /* in the order in which they were taken; 0 = none */
} disk_tier_turn;

/* One direction; removals are among the writes. */
typedef struct disk_tier_queue {
    ring *jobs;
    sem_t n_jobs;                    /* may count some that another thread has taken */
    pthread_mutex_t m;               /* among the threads that pop */
    _Atomic uint64_t rests_until_us; /* 0 = does not rest */
    int32_t n_out;                   /* taken and not given by next_done, no removals; core */
    uint64_t
        answer_us; /* of those that are out: the last one given, or the first one taken; core */
    _Atomic uint64_t n_ok, n_failed; /* statistics, as the next two */
    _Atomic uint64_t n_bytes, us;
} disk_tier_queue;

/* Kinds of faults, each with a warning of its own in a while. */
typedef enum disk_tier_fault {
    DISK_TIER_FULL,
    DISK_TIER_DENIED,
    DISK_TIER_GONE,
    DISK_TIER_FAILED,
    DISK_TIER_BAD_FILE,
    DISK_TIER_N_FAULTS
} disk_tier_fault;

struct disk_tier {
    /* Constant after create. */
    char *path;
    disk_tier_opts opts; /* defaults filled in */
    disk_block_kind kind;
    uint64_t model;
    size_t header_bytes, payload_bytes;
    uint64_t file_bytes;
    int wake_fd; /* of the keeper */

    disk_index *index;
    pthread_rwlock_t dir_lock; /* read: who uses dir; write: the keeper, who replaces it */
    disk_dir *dir;             /* NULL while it is lost */

    disk_tier_queue reads, writes;
    ring *done;
    pthread_mutex_t done_m;    /* among the threads that push */
    uint64_t last_stamp_us;    /* core */
    _Atomic uint64_t ahead_us; /* of the monotonic clock, where stamps are */
    int32_t n_removals_out;    /* core */
    _Atomic uint64_t n_removed, n_failed_removals;

    disk_tier_turn turns[DISK_TIER_MAX_THREADS]; /* by thread; guarded by writes.m, as the next */
    uint64_t n_turns;
    int32_t n_writers;
    pthread_cond_t turn_ended;

    pthread_mutex_t evict_m; /* guards the next three */
    disk_index_file victims[DISK_TIER_MAX_VICTIMS];
    int32_t n_victims, next_victim;
    _Atomic uint64_t n_evicted, n_bad_files;
    _Atomic uint64_t used_bytes; /* the account, as it was seen last */

    _Atomic uint64_t fits_bytes, squeezed_until_us; /* until then fits_bytes is the bound */
    atomic_bool is_squeezed;                        /* has been told */
    _Atomic uint32_t n_in_vain; /* writes in a row that found no space though files were given up */

    pthread_mutex_t warn_m; /* guards limits */
    log_limit limits[DISK_TIER_N_FAULTS];

    atomic_bool stop, is_ready;
    atomic_bool is_clearing;   /* the keeper is to remove the own files */
    atomic_bool needs_recount; /* the account is unknown, or counts what is not there */

    pthread_mutex_t threads_m; /* guards n_running */
    pthread_cond_t ended;
    int32_t n_running;
    int32_t n_threads; /* started; create and destroy, as the next */
    pthread_t threads[DISK_TIER_MAX_THREADS];
};

/* A file carries it: stamps from now on are later. */
void disk_tier__note_stamp(disk_tier *d, uint64_t stamp_us);
/* disk_tier_room.c, called with dir_lock held. Makes room by one file. False: there is none to give up,
 * or *err. */
bool disk_tier__evict(disk_tier *d, int *err);
/* As disk_dir_begin, with others given up for it. */
PGD_MUST_USE int disk_tier__begin_file(disk_tier *d, disk_dir_temp *temp);
bool disk_tier__is_out_of_space(int err);
/* A write found no space: what is there is the bound for a while. False: that is too little. */
bool disk_tier__squeeze(disk_tier *d, int err);
void disk_tier__note_success(disk_tier *d);
/* A fault of the disk, to be told once in a while. */
void disk_tier__warn(disk_tier *d, int err, const char *what);
void disk_tier__warn_lost(disk_tier *d, const char *why);
void disk_tier__warn_bad_file(disk_tier *d, const disk_block_id *id);
disk_block_id disk_tier__id(const disk_tier *d, const offload_key *key);
/* Bodies of threads; arg: the disk_tier. */
void disk_tier__run_reads(void *arg);
void disk_tier__run_writes(void *arg);
void disk_tier__run_keeper(void *arg);
void disk_tier__wake_keeper(disk_tier *d);

#endif
