/* A directory, a region and disk tiers between them, for tests: the content of a block follows from
 * its number, so that whoever reads it knows what it must be. */
#ifndef TESTS_UNIT_DISK_RIG_H
#define TESTS_UNIT_DISK_RIG_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "engine/offload/disk_tier.h"

enum {
    DISK_RIG_RANKS = 2,
    DISK_RIG_SHARD_BYTES = 5000,
    DISK_RIG_FILE_BYTES = 4096 + 12288,
    DISK_RIG_PATH_BYTES = 256
};

static inline void disk_rig_region_of(kv_region *out, const kv_region_shape *shape)
{
    uint8_t fingerprint[HASH_SHA256_BYTES] = {0};
    int fd = memfd_create("disk_rig", MFD_CLOEXEC);
    PGD_ASSERT(fd >= 0);
    PGD_ASSERT(kv_region_format(out, fd, shape, fingerprint, NULL) == PGD_OK);
    close(fd);
}

static inline void disk_rig_region(kv_region *out, int32_t n_blocks)
{
    kv_region_shape shape = {
        .n_blocks = n_blocks, .n_ranks = DISK_RIG_RANKS, .shard_bytes = DISK_RIG_SHARD_BYTES};
    disk_rig_region_of(out, &shape);
}

static inline offload_key disk_rig_key(int32_t number)
{
    offload_key key = {.group_id = number % 3};
    for (int i = 0; i < HASH_SHA256_BYTES / 8; i++) {
        uint64_t word = hash_u64((uint64_t)number * 8 + (uint64_t)i + 1);
        memcpy(key.hash.bytes + 8 * i, &word, sizeof(word));
    }
    return key;
}

static inline uint64_t disk_rig_word(int32_t number, int32_t rank, size_t i)
{
    return hash_u64((uint64_t)number << 32 | (uint64_t)rank << 28 | i);
}

static inline void disk_rig_fill(const kv_region *r, int32_t block, int32_t number)
{
    for (int32_t rank = 0; rank < DISK_RIG_RANKS; rank++) {
        uint64_t *words = kv_region_get_shard(r, block, rank);
        for (size_t i = 0; i < DISK_RIG_SHARD_BYTES / 8; i++)
            words[i] = disk_rig_word(number, rank, i);
        kv_region_seal(r, block, rank, hash_u64((uint64_t)number),
                       kv_region_get_shard(r, block, rank));
    }
}

static inline void disk_rig_wipe(const kv_region *r, int32_t block)
{
    for (int32_t rank = 0; rank < DISK_RIG_RANKS; rank++) {
        memset(kv_region_get_shard(r, block, rank), 0xEE, DISK_RIG_SHARD_BYTES);
        memset(kv_region_get_header(r, block, rank), 0, sizeof(kv_region_header));
    }
}

static inline bool disk_rig_holds(const kv_region *r, int32_t block, int32_t number)
{
    for (int32_t rank = 0; rank < DISK_RIG_RANKS; rank++) {
        const uint64_t *words = kv_region_get_shard(r, block, rank);
        for (size_t i = 0; i < DISK_RIG_SHARD_BYTES / 8; i++)
            if (words[i] != disk_rig_word(number, rank, i))
                return false;
        if (!kv_region_holds(r, block, rank, hash_u64((uint64_t)number), words))
            return false;
    }
    return true;
}

static inline disk_tier_opts disk_rig_opts(const char *dir, const kv_region *r, int32_t max_files)
{
    disk_tier_opts opts = {.dir = dir,
                           .max_bytes = (uint64_t)max_files * DISK_RIG_FILE_BYTES,
                           .fingerprint = {1, 2, 3},
                           .region = r,
                           .rest_ms = 300};
    return opts;
}

/* Of the file, for the fingerprint above. */
static inline void disk_rig_path(char out[DISK_RIG_PATH_BYTES], const char *dir, int32_t number)
{
    offload_key key = disk_rig_key(number);
    size_t n = (size_t)snprintf(out, DISK_RIG_PATH_BYTES, "%s/%02x/%016llx-", dir,
                                key.hash.bytes[0], 0x030201ULL);
    for (int i = 0; i < HASH_SHA256_BYTES; i++)
        n += (size_t)snprintf(out + n, DISK_RIG_PATH_BYTES - n, "%02x", key.hash.bytes[i]);
    (void)snprintf(out + n, DISK_RIG_PATH_BYTES - n, "-%08x", (unsigned)key.group_id);
}

static inline disk_tier_stats disk_rig_stats(const disk_tier *d)
{
    disk_tier_stats stats;
    disk_tier_get_stats(&stats, d);
    return stats;
}

static inline void disk_rig_wait_ready(const disk_tier *d)
{
    for (int i = 0; i < 20000 && !disk_rig_stats(d).is_ready; i++)
        usleep(1000);
    PGD_ASSERT(disk_rig_stats(d).is_ready);
}

static inline disk_tier *disk_rig_open(const disk_tier_opts *opts)
{
    disk_tier *d;
    pgd_why why = {{0}};
    pgd_err err = disk_tier_create(&d, opts, &why);
    PGD_ASSERTF(err == PGD_OK, "%s", why.text);
    disk_rig_wait_ready(d);
    return d;
}

static inline disk_tier_done disk_rig_wait_done(disk_tier *d)
{
    disk_tier_done done;
    uint64_t end_us = clock_now_us() + 20000000;
    while (!disk_tier_next_done(d, &done)) {
        PGD_ASSERT(clock_now_us() < end_us);
        usleep(100);
    }
    return done;
}

/* Through block 0 of the region. */
static inline bool disk_rig_write(disk_tier *d, const kv_region *r, int32_t number)
{
    offload_key key = disk_rig_key(number);
    disk_rig_fill(r, 0, number);
    if (!disk_tier_write(d, &key, 0, (uint64_t)number))
        return false;
    disk_tier_done done = disk_rig_wait_done(d);
    PGD_ASSERT(done.cookie == (uint64_t)number && !done.is_read);
    return done.ok;
}

/* Through block 1; what was read is right, or it failed. */
static inline bool disk_rig_read(disk_tier *d, const kv_region *r, int32_t number)
{
    offload_key key = disk_rig_key(number);
    disk_rig_wipe(r, 1);
    if (!disk_tier_read(d, &key, 1, (uint64_t)number))
        return false;
    disk_tier_done done = disk_rig_wait_done(d);
    PGD_ASSERT(done.cookie == (uint64_t)number && done.is_read);
    PGD_ASSERT(!done.ok || disk_rig_holds(r, 1, number));
    return done.ok;
}

static inline bool disk_rig_remove(disk_tier *d, int32_t number)
{
    offload_key key = disk_rig_key(number);
    if (!disk_tier_remove(d, &key, (uint64_t)number))
        return false;
    disk_tier_done done = disk_rig_wait_done(d);
    PGD_ASSERT(done.cookie == (uint64_t)number && done.is_removal);
    return done.ok;
}

static inline bool disk_rig_has(const disk_tier *d, int32_t number)
{
    offload_key key = disk_rig_key(number);
    return disk_tier_lookup(d, &key);
}

static inline void disk_rig_touch(disk_tier *d, int32_t number)
{
    offload_key key = disk_rig_key(number);
    disk_tier_touch(d, &key, 1);
}

static inline int disk_rig_remove_one(const char *path, const struct stat *st, int type,
                                      struct FTW *ftw)
{
    (void)st;
    (void)type;
    return ftw->level == 0 ? 0 : remove(path);
}

static inline void disk_rig_empty_dir(const char *dir)
{
    (void)nftw(dir, disk_rig_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* dir: a template that ends in XXXXXX. */
static inline void disk_rig_make_dir(char *dir)
{
    PGD_ASSERT(mkdtemp(dir) != NULL);
}

static inline void disk_rig_remove_dir(const char *dir)
{
    disk_rig_empty_dir(dir);
    (void)rmdir(dir);
}

typedef struct disk_rig_sum {
    uint64_t n_bytes;
    uint64_t account; /* UINT64_MAX: not to be read */
    int n_blocks, n_temps;
    bool modes_are_right;
} disk_rig_sum;

static inline void disk_rig_sum_folder(disk_rig_sum *sum, int root_fd, const char *folder)
{
    struct stat st;
    int fd = openat(root_fd, folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (dir == NULL)
        return;
    if (fstat(fd, &st) != 0 || (st.st_mode & 0777) != 0700)
        sum->modes_are_right = false;
    for (const struct dirent *e; (e = readdir(dir)) != NULL;) {
        if (e->d_name[0] == '.' || fstatat(fd, e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0 ||
            !S_ISREG(st.st_mode))
            continue;
        sum->n_bytes += (uint64_t)PGD_MAX(st.st_size, st.st_blocks * 512);
        if ((st.st_mode & 0777) != 0600)
            sum->modes_are_right = false;
        if (strcmp(folder, "tmp") == 0)
            sum->n_temps++;
        else
            sum->n_blocks++;
    }
    closedir(dir);
}

/* All files, while nobody may change their sum: with the lock of the accounts. */
static inline disk_rig_sum disk_rig_sum_files(const char *dir)
{
    disk_rig_sum sum = {.modes_are_right = true};
    char folder[4];
    int root_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int fd = openat(root_fd, "accounts", O_RDWR | O_CLOEXEC);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    uint64_t record[2];
    PGD_ASSERT(fd >= 0);
    while (fcntl(fd, F_OFD_SETLKW, &lock) != 0)
        PGD_ASSERT(errno == EINTR);
    disk_rig_sum_folder(&sum, root_fd, "tmp");
    for (int i = 0; i < 256; i++) {
        (void)snprintf(folder, sizeof(folder), "%02x", (unsigned)i);
        disk_rig_sum_folder(&sum, root_fd, folder);
    }
    sum.account = pread(fd, record, sizeof(record), 0) == sizeof(record) ? record[1] : UINT64_MAX;
    close(fd);
    close(root_fd);
    return sum;
}

/* Writes, reads and touches at random and checks all that is read. */
static inline void disk_rig_load(const char *dir, int32_t max_files, uint64_t seed, int n_ops)
{
    enum { N_BLOCKS = 16, N_KEYS = 120 };
    kv_region r;
    disk_rig_region(&r, N_BLOCKS);
    disk_tier_opts opts = disk_rig_opts(dir, &r, max_files);
    disk_tier *d = disk_rig_open(&opts);
    int32_t at[N_BLOCKS]; /* the number that is under way through this block, or -1 */
    memset(at, -1, sizeof(at));
    uint64_t x = seed;
    for (int op = 0; op < n_ops; op++) {
        x = hash_u64(x + 1);
        int32_t number = (int32_t)(x % N_KEYS);
        int32_t block = (int32_t)(x >> 32) & (N_BLOCKS - 1);
        offload_key key = disk_rig_key(number);
        disk_tier_done done;
        while (disk_tier_next_done(d, &done)) {
            int32_t b = (int32_t)done.cookie;
            PGD_ASSERT(!done.is_read || !done.ok || disk_rig_holds(&r, b, at[b]));
            at[b] = -1;
        }
        if (at[block] >= 0) {
            usleep(100);
        } else if (disk_tier_lookup(d, &key)) {
            if (disk_tier_read(d, &key, block, (uint64_t)block))
                at[block] = number;
        } else {
            disk_rig_fill(&r, block, number);
            if (disk_tier_write(d, &key, block, (uint64_t)block))
                at[block] = number;
        }
        disk_tier_touch(d, &key, 1);
    }
    PGD_ASSERT(disk_tier_destroy(d));
    kv_region_unmap(&r);
}

#endif
