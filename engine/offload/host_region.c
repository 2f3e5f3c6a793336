/* Three kinds of file:
 *
 *   memfd                        gone with its last user; found by the worker under /proc/PID/fd
 *   paged-kv-UID-tmp-PID-N       the same with a name, for a worker that may not look there: removed at
 *                                the end, or by the next engine of this user when nobody holds its lock
 *   paged-kv-UID-HASH            persists
 *
 * Named ones are locked (flock) while an engine has them; the kernel lets go of the lock however the
 * engine ends. Their space is taken at once: to find /dev/shm full later is death. */
#include "engine/offload/host_region.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "common/hash.h"
#include "common/log.h"
#include "common/mem.h"

enum { ENTRY_FREE = 0, ENTRY_VALID = 0x1e575 };

#define MAX_PATH_BYTES 512
#define RESERVE_BYTES  ((size_t)256 << 20) /* at a time: a second at the very most */

struct host_region {
    kv_region memory;
    int fd;
    int32_t n_groups;
    bool is_persistent;
    bool is_temporary; /* has a name that goes with us */
    uint64_t stamp;    /* the highest that an entry has */
    char path[MAX_PATH_BYTES];
};

static_assert(sizeof(block_hash) + sizeof(int32_t) <= KV_REGION_KEY_BYTES, "an entry holds a key");

/* --- room ------------------------------------------------------------------------------------- */

pgd_err host_region_check_room(uint64_t n_bytes, uint64_t total_bytes, const char *dir,
                               pgd_why *why)
{
    struct statvfs fs;
    if (n_bytes > total_bytes)
        return pgd_fail(why, PGD_ERANGE,
                        "kv_offload_memory: expected at most %llu MB, the memory of this machine "
                        "or the limit of this service, got %llu MB",
                        (unsigned long long)(total_bytes >> 20),
                        (unsigned long long)(n_bytes >> 20));
    if (dir == NULL)
        return PGD_OK;
    if (statvfs(dir, &fs) != 0)
        return pgd_fail(why, PGD_EIO, "kv_offload_memory: cannot use %s: %s", dir, strerror(errno));
    uint64_t dir_bytes = (uint64_t)fs.f_blocks * fs.f_frsize;
    if (n_bytes > dir_bytes)
        return pgd_fail(why, PGD_ERANGE,
                        "kv_offload_memory: expected at most %llu MB, the size of %s, got %llu MB; "
                        "mount -o remount,size=... %s makes it larger",
                        (unsigned long long)(dir_bytes >> 20), dir,
                        (unsigned long long)(n_bytes >> 20), dir);
    return PGD_OK;
}

/* --- files ------------------------------------------------------------------------------------ */

static int lock(int fd)
{
    int rc;
    do
        rc = flock(fd, LOCK_EX | LOCK_NB);
    while (rc != 0 && errno == EINTR);
    return rc;
}

static pgd_err open_memfd(host_region *r, pgd_why *why)
{
    r->fd = memfd_create("paged-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (r->fd < 0)
        return pgd_fail(why, PGD_EIO, "kv_offload_memory: no shared memory: %s", strerror(errno));
    snprintf(r->path, sizeof r->path, "/proc/%ld/fd/%d", (long)getpid(), r->fd);
    return PGD_OK;
}

/* Temporary ones whose engines ended without removing them. */
static void sweep(const char *dir)
{
    char prefix[64];
    int n = snprintf(prefix, sizeof prefix, "paged-kv-%lu-tmp-", (unsigned long)geteuid());
    DIR *d = opendir(dir);
    if (d == NULL)
        return;
    for (struct dirent *e = readdir(d); e != NULL; e = readdir(d)) {
        if (strncmp(e->d_name, prefix, (size_t)n) != 0)
            continue;
        int fd = openat(dirfd(d), e->d_name, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
        if (fd < 0)
            continue;
        if (lock(fd) == 0)
            (void)unlinkat(dirfd(d), e->d_name, 0);
        close(fd);
    }
    closedir(d);
}

/* Somebody's sweep may take the name away between open and lock. */
static pgd_err open_temporary(host_region *r, const char *dir, pgd_why *why)
{
    struct stat st = {0};
    sweep(dir);
    for (int i = 0; i < 100 && st.st_nlink == 0; i++) {
        if (r->fd >= 0)
            close(r->fd);
        snprintf(r->path, sizeof r->path, "%s/paged-kv-%lu-tmp-%ld-%d", dir,
                 (unsigned long)geteuid(), (long)getpid(), i);
        r->fd = open(r->path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (r->fd < 0 && errno != EEXIST)
            break;
        if (r->fd >= 0 && (lock(r->fd) != 0 || fstat(r->fd, &st) != 0))
            st.st_nlink = 0;
    }
    r->is_temporary = st.st_nlink > 0;
    return r->is_temporary ? PGD_OK
                           : pgd_fail(why, PGD_EIO, "kv_offload_memory: cannot make %s: %s",
                                      r->path, strerror(errno));
}

/* Why the file is not for us, or NULL. */
static const char *try_persistent(host_region *r)
{
    struct stat st = {0};
    for (int i = 0; i < 100 && st.st_nlink == 0; i++) {
        if (r->fd >= 0)
            close(r->fd);
        r->fd = open(r->path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600);
        if (r->fd < 0)
            return strerror(errno);
        if (lock(r->fd) != 0)
            return errno == EWOULDBLOCK ? "another engine has it" : strerror(errno);
        if (fstat(r->fd, &st) != 0)
            return strerror(errno);
    }
    if (!S_ISREG(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 077) != 0 ||
        st.st_nlink != 1)
        return "it is not a file of this user alone";
    return NULL;
}

/* The name tells nothing of the secret. */
static bool name_persistent(char out[MAX_PATH_BYTES], const char *dir, const uint8_t *seed)
{
    static const char LABEL[] = "paged host tier";
    uint8_t name[HASH_SHA256_BYTES];
    if (!hash_hmac_sha256(name, seed, HASH_SHA256_BYTES, LABEL, sizeof LABEL - 1))
        return false;
    int n = snprintf(out, MAX_PATH_BYTES, "%s/paged-kv-%lu-", dir, (unsigned long)geteuid());
    for (int i = 0; i < 16 && n + 3 < MAX_PATH_BYTES; i++)
        n += snprintf(out + n, MAX_PATH_BYTES - (size_t)n, "%02x", name[i]);
    return true;
}

static bool open_persistent(host_region *r, const char *dir, const uint8_t *seed)
{
    if (!name_persistent(r->path, dir, seed))
        return false;
    const char *fault = try_persistent(r);
    r->is_persistent = fault == NULL;
    if (fault == NULL)
        return true;
    log_warn("offload", "kv_offload_persist: this tier ends with the engine: %s: %s", r->path,
             fault);
    if (r->fd >= 0)
        close(r->fd);
    r->fd = -1;
    return false;
}

/* Its file system has a limit of its own. */
static bool is_limited(const host_region *r)
{
    return r->is_persistent || r->is_temporary;
}

bool host_region_has_fingerprint(const host_region *r,
                                 const uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES])
{
    return memcmp(kv_region_get_fingerprint(&r->memory), fingerprint,
                  KV_REGION_FINGERPRINT_BYTES) == 0;
}

/* What is in the file stays when it is of our shape and fingerprint. */
static pgd_err map(host_region *r, const host_region_opts *o, pgd_why *why)
{
    struct stat st;
    pgd_why fault = {0};
    if (r->is_persistent && fstat(r->fd, &st) == 0 && st.st_size > 0) {
        pgd_err err = kv_region_map(&r->memory, r->fd, &o->shape, &fault);
        if (err == PGD_OK && host_region_has_fingerprint(r, o->fingerprint))
            return PGD_OK;
        log_warn("offload", "the host tier at %s is emptied: %s", r->path,
                 err == PGD_OK ? "model, options, version or worker have changed" : fault.text);
        kv_region_unmap(&r->memory);
    }
    PGD_TRY(kv_region_format(&r->memory, r->fd, &o->shape, o->fingerprint, why));
    /* Who can open it could cut it short, and kill us. */
    if (!is_limited(r))
        (void)fcntl(r->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    return PGD_OK;
}

/* Zeroing that many pages takes long: somebody may wait for a sign of life. */
static pgd_err reserve(const host_region *r, const host_region_opts *o, pgd_why *why)
{
    size_t n_bytes = r->memory.n_bytes;
    for (size_t at = 0; at < n_bytes; at += RESERVE_BYTES) {
        size_t n = PGD_MIN(RESERVE_BYTES, n_bytes - at);
        int err;
        do
            err = posix_fallocate(r->fd, (off_t)at, (off_t)n);
        while (err == EINTR);
        if (err != 0)
            return pgd_fail(why, err == ENOSPC ? PGD_ENOMEM : PGD_EIO,
                            "kv_offload_memory: cannot take %zu bytes for %s: %s", n_bytes, r->path,
                            strerror(err));
        if (o->beat != NULL)
            o->beat();
    }
    return PGD_OK;
}

static pgd_err make_memory(host_region *r, const host_region_opts *o, pgd_why *why)
{
    pgd_err err = map(r, o, why);
    if (err == PGD_OK && is_limited(r))
        err = reserve(r, o, why);
    if (err != PGD_OK && r->is_persistent)
        (void)!ftruncate(r->fd, 0); /* what it took so far would stay taken */
    return err;
}

pgd_err host_region_create(host_region **out, const host_region_opts *opts, pgd_why *why)
{
    host_region *r = mem_calloc(1, sizeof *r);
    if (r == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    r->fd = -1;
    r->n_groups = opts->n_groups;
    pgd_err err = PGD_OK;
    if (opts->seed == NULL || !open_persistent(r, opts->dir, opts->seed))
        err = opts->is_named ? open_temporary(r, opts->dir, why) : open_memfd(r, why);
    if (err == PGD_OK)
        err = make_memory(r, opts, why);
    if (err != PGD_OK) {
        host_region_destroy(r);
        return err;
    }
    *out = r;
    return PGD_OK;
}

void host_region_tell_unused(const char *dir, const uint8_t *seed)
{
    char path[MAX_PATH_BYTES];
    struct stat st;
    if (name_persistent(path, dir, seed) && lstat(path, &st) == 0 && S_ISREG(st.st_mode) &&
        st.st_uid == geteuid() && st.st_blocks > 0)
        log_info("offload",
                 "%s holds %llu MB of memory for a start with kv_offload_persist, which this is "
                 "not; remove it to have them back",
                 path, (unsigned long long)st.st_blocks * 512 >> 20);
}

void host_region_abandon(host_region *r)
{
    if (r->is_temporary)
        (void)unlink(r->path);
}

void host_region_destroy(host_region *r)
{
    if (r == NULL)
        return;
    kv_region_unmap(&r->memory);
    host_region_abandon(r);
    if (r->fd >= 0)
        close(r->fd);
    mem_free(r);
}

/* --- index ------------------------------------------------------------------------------------ */

static kv_region_entry *entry_of(const host_region *r, int32_t medium_id)
{
    return kv_region_get_entry(&r->memory, medium_id);
}

/* This process may be killed between any two writes: the compiler must keep their order. */
static void set_state(kv_region_entry *e, uint32_t state)
{
    __atomic_store_n(&e->state, state, __ATOMIC_RELEASE);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

static void clear_all(host_region *r)
{
    for (int32_t i = 0; i < r->memory.shape.n_blocks; i++)
        if (entry_of(r, i)->state != ENTRY_FREE) /* pages that were never written stay so */
            set_state(entry_of(r, i), ENTRY_FREE);
}

void host_region_on_stored(void *arg, const offload_key *keys, const int32_t *medium_ids,
                           int32_t n_keys)
{
    host_region *r = arg;
    for (int32_t i = 0; i < n_keys; i++) {
        kv_region_entry *e = entry_of(r, medium_ids[i]);
        set_state(e, ENTRY_FREE);
        memcpy(e->key, keys[i].hash.bytes, sizeof keys[i].hash.bytes);
        memcpy(e->key + sizeof keys[i].hash.bytes, &keys[i].group_id, sizeof keys[i].group_id);
        e->stamp = ++r->stamp;
        set_state(e, ENTRY_VALID);
    }
}

void host_region_on_removed(void *arg, const offload_key *keys, const int32_t *medium_ids,
                            int32_t n_keys)
{
    host_region *r = arg;
    (void)keys;
    for (int32_t i = 0; i < n_keys; i++)
        set_state(entry_of(r, medium_ids[i]), ENTRY_FREE);
}

void host_region_on_touched(void *arg, int32_t medium_id)
{
    host_region *r = arg;
    entry_of(r, medium_id)->stamp = ++r->stamp;
}

void host_region_on_reset(void *arg)
{
    clear_all(arg);
}

void host_region_set_fingerprint(host_region *r,
                                 const uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES])
{
    clear_all(r);
    kv_region_set_fingerprint(&r->memory, fingerprint);
}

/* --- restore ---------------------------------------------------------------------------------- */

typedef struct found_block {
    uint64_t stamp;
    int32_t medium_id;
} found_block;

static int by_stamp(const void *a, const void *b)
{
    uint64_t x = ((const found_block *)a)->stamp, y = ((const found_block *)b)->stamp;
    return (x > y) - (x < y);
}

/* The file is outside data: a key that nobody computed is never asked for, and what is loaded is
 * held against its checksum. */
static bool read_entry(offload_key *key, uint64_t *stamp, const host_region *r, int32_t medium_id)
{
    const kv_region_entry *e = entry_of(r, medium_id);
    memcpy(key->hash.bytes, e->key, sizeof key->hash.bytes);
    memcpy(&key->group_id, e->key + sizeof key->hash.bytes, sizeof key->group_id);
    *stamp = e->stamp;
    return e->state == ENTRY_VALID && key->group_id >= 0 && key->group_id < r->n_groups;
}

pgd_err host_region_restore(int32_t *n_blocks, host_region *r, offload_manager *m)
{
    int32_t capacity = r->memory.shape.n_blocks;
    int32_t n = 0;
    *n_blocks = 0;
    PGD_ASSERTF(offload_manager_capacity(m) == capacity, "%d blocks for a manager of %d", capacity,
                offload_manager_capacity(m));
    found_block *found = mem_calloc((size_t)capacity, sizeof *found);
    offload_key *keys = mem_calloc((size_t)capacity, sizeof *keys);
    int32_t *ids = mem_calloc((size_t)capacity, sizeof *ids);
    pgd_err err = found != NULL && keys != NULL && ids != NULL ? PGD_OK : PGD_ENOMEM;
    for (int32_t i = 0; i < capacity && err == PGD_OK; i++) {
        if (read_entry(&keys[0], &found[n].stamp, r, i))
            found[n++].medium_id = i;
        else if (entry_of(r, i)->state != ENTRY_FREE)
            set_state(entry_of(r, i), ENTRY_FREE);
    }
    if (n > 0) {
        qsort(found, (size_t)n, sizeof *found, by_stamp);
        r->stamp = found[n - 1].stamp;
        for (int32_t i = 0; i < n; i++) {
            ids[i] = found[i].medium_id;
            (void)read_entry(&keys[i], &found[i].stamp, r, ids[i]);
        }
        offload_manager_restore(m, keys, ids, n);
        *n_blocks = offload_manager_n_blocks(m);
        for (int32_t i = 0; i < n; i++)
            if (ids[i] < 0)
                set_state(entry_of(r, found[i].medium_id), ENTRY_FREE);
    }
    mem_free(found);
    mem_free(keys);
    mem_free(ids);
    return err;
}

/* --- facts ------------------------------------------------------------------------------------ */

const char *host_region_get_path(const host_region *r)
{
    return r->path;
}

const kv_region *host_region_get_memory(const host_region *r)
{
    return &r->memory;
}

bool host_region_is_persistent(const host_region *r)
{
    return r->is_persistent;
}
