/* The directory as a whole: whose it is, who uses it, how much is in it.
 *
 * Locks are those of open file descriptions (F_OFD_SETLK): they end with the process however it
 * ends, and two tiers of one process exclude each other too. Byte 0 of the accounts guards the
 * account; the first byte of a slot says that its engine lives. The account is read and written,
 * not mapped: a file that is cut short under a mapping would kill the process.
 *
 * Rejected: one folder per model (who evicts for whom?), and an index in shared memory (the core
 * thread would wait for page faults on a file). */
#include "engine/offload/disk_dir.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"
#include "engine/offload/disk_dir_internal.h"

#define MAGIC UINT64_C(0x5354434144474150) /* "PAGDACTS" */

typedef struct account {
    uint64_t magic;
    uint64_t used_bytes;
    uint64_t checksum;
} account;

typedef struct slot_record {
    uint64_t model;
    uint64_t nonce; /* of this life: part of the names of its temporary files */
} slot_record;

enum { SLOTS_AT = 64 };

static off_t slot_at(int32_t slot)
{
    return SLOTS_AT + (off_t)slot * (off_t)sizeof(slot_record);
}

static int lock_byte(int fd, int command, short type, off_t at)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
    while (fcntl(fd, command, &lock) != 0)
        if (errno != EINTR)
            return errno;
    return 0;
}

/* Held by somebody else. A failure counts as yes: nothing is then taken from the living. */
static bool is_locked(const disk_dir *d, int32_t slot)
{
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot_at(slot), .l_len = 1};
    return fcntl(d->accounts_fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

static uint64_t checksum_of(const account *a)
{
    return hash_xxh3(a, offsetof(account, checksum), 0);
}

int disk_dir__lock(disk_dir *d)
{
    account a;
    pthread_mutex_lock(&d->m);
    int err = lock_byte(d->accounts_fd, F_OFD_SETLKW, F_WRLCK, 0);
    if (err != 0) {
        pthread_mutex_unlock(&d->m);
        return err;
    }
    d->is_counted = pread(d->accounts_fd, &a, sizeof(a), 0) == sizeof(a) && a.magic == MAGIC &&
                    a.checksum == checksum_of(&a);
    d->used_bytes = d->is_counted ? a.used_bytes : UINT64_MAX;
    atomic_store_explicit(&d->seen_bytes, d->is_counted ? a.used_bytes : 0, memory_order_relaxed);
    return 0;
}

void disk_dir__unlock(disk_dir *d)
{
    (void)lock_byte(d->accounts_fd, F_OFD_SETLK, F_UNLCK, 0);
    pthread_mutex_unlock(&d->m);
}

int disk_dir__set_used(disk_dir *d, uint64_t n_bytes)
{
    account a = {.magic = MAGIC, .used_bytes = n_bytes};
    a.checksum = checksum_of(&a);
    ssize_t n = pwrite(d->accounts_fd, &a, sizeof(a), 0);
    if (n != sizeof(a))
        return n < 0 ? errno : ENOSPC;
    d->used_bytes = n_bytes;
    d->is_counted = true;
    atomic_store_explicit(&d->seen_bytes, n_bytes, memory_order_relaxed);
    return 0;
}

void disk_dir__release(disk_dir *d, uint64_t n_bytes)
{
    if (d->is_counted)
        (void)!disk_dir__set_used(d, d->used_bytes - PGD_MIN(n_bytes, d->used_bytes));
}

bool disk_dir__is_alive(disk_dir *d, int32_t slot, uint64_t nonce)
{
    slot_record record;
    if (slot == d->slot)
        return nonce == d->nonce;
    return slot >= 0 && slot < DISK_DIR_MAX_ENGINES && is_locked(d, slot) &&
           (pread(d->accounts_fd, &record, sizeof(record), slot_at(slot)) != sizeof(record) ||
            record.nonce == nonce);
}

int disk_dir__open_folder(int *fd, disk_dir *d, const char *name, bool make)
{
    int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    *fd = openat(d->root_fd, name, flags);
    if (*fd < 0 && errno == ENOENT && make && mkdirat(d->root_fd, name, 0700) == 0)
        *fd = openat(d->root_fd, name, flags);
    return *fd < 0 ? errno : 0;
}

int disk_dir_make_folders(disk_dir *d)
{
    char name[DISK_BLOCK_FOLDER_BYTES];
    if (mkdirat(d->root_fd, DISK_DIR_TEMPS, 0700) != 0 && errno != EEXIST)
        return errno;
    for (int i = 0; i < DISK_BLOCK_N_FOLDERS; i++) {
        (void)snprintf(name, sizeof(name), "%02x", (unsigned)i);
        if (mkdirat(d->root_fd, name, 0700) != 0 && errno != EEXIST)
            return errno;
    }
    return 0;
}

static bool is_own_name(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || strcmp(name, "lost+found") == 0 ||
           strcmp(name, DISK_DIR_ACCOUNTS) == 0 || strcmp(name, DISK_DIR_TEMPS) == 0 ||
           (strlen(name) == 2 && strspn(name, "0123456789abcdef") == 2);
}

/* Files of the user's are not to lie among those that come and go here. */
static pgd_err check_holds_nothing_else(int root_fd, const char *path, pgd_why *why)
{
    int fd = openat(root_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    pgd_err err = PGD_OK;
    if (dir == NULL) {
        err = pgd_fail(why, PGD_EIO, "cannot read the directory %s: %s", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return err;
    }
    for (const struct dirent *e; err == PGD_OK && (e = readdir(dir)) != NULL;)
        if (!is_own_name(e->d_name))
            err = pgd_fail(
                why, PGD_EIO,
                "expected an empty directory or one of paged's, got one that holds \"%s\", "
                "at %s: name another, or a new one within it",
                e->d_name, path);
    closedir(dir);
    return err;
}

static pgd_err check_owner(int fd, const char *path, pgd_why *why)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return pgd_fail(why, PGD_EIO, "cannot use %s: %s", path, strerror(errno));
    if (st.st_uid != geteuid())
        return pgd_fail(why, PGD_EIO,
                        "expected a directory of user %u, got one of user %u, at %s: what others "
                        "write there would be taken for KV blocks",
                        (unsigned)geteuid(), (unsigned)st.st_uid, path);
    if ((st.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return pgd_fail(why, PGD_EIO,
                        "expected a directory that only its owner may write, got mode %03o, at %s: "
                        "chmod go-w it",
                        (unsigned)(st.st_mode & 0777), path);
    return PGD_OK;
}

static pgd_err open_root(disk_dir *d, const char *path, pgd_why *why)
{
    if (mkdir(path, 0700) != 0 && errno != EEXIST)
        return pgd_fail(why, PGD_EIO, "cannot make the directory %s: %s", path, strerror(errno));
    d->root_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (d->root_fd < 0)
        return pgd_fail(why, PGD_EIO, "cannot open the directory %s: %s", path, strerror(errno));
    return check_owner(d->root_fd, path, why);
}

static pgd_err open_accounts(disk_dir *d, const char *path, pgd_why *why)
{
    struct stat st;
    int flags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    d->accounts_fd = openat(d->root_fd, DISK_DIR_ACCOUNTS, flags);
    if (d->accounts_fd < 0 && errno == ENOENT) {
        PGD_TRY(check_holds_nothing_else(d->root_fd, path, why));
        d->accounts_fd = openat(d->root_fd, DISK_DIR_ACCOUNTS, flags | O_CREAT, 0600);
    }
    if (d->accounts_fd < 0)
        return pgd_fail(why, PGD_EIO, "cannot open %s/%s: %s", path, DISK_DIR_ACCOUNTS,
                        strerror(errno));
    if (fstat(d->accounts_fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_uid != geteuid())
        return pgd_fail(why, PGD_EIO, "expected a regular file of the own user at %s/%s", path,
                        DISK_DIR_ACCOUNTS);
    return PGD_OK;
}

/* Without the lock of the account, which another engine may hold for as long as it counts. Who asks
 * between the two steps whether a temporary file of this slot is a dead engine's may hear no. */
static pgd_err take_slot(disk_dir *d, const char *path, pgd_why *why)
{
    slot_record record = {.model = d->model, .nonce = d->nonce};
    int err = EAGAIN;
    for (int32_t i = 0; i < DISK_DIR_MAX_ENGINES && (err == EAGAIN || err == EACCES); i++) {
        err = lock_byte(d->accounts_fd, F_OFD_SETLK, F_WRLCK, slot_at(i));
        if (err == 0)
            d->slot = i;
    }
    if (err == EAGAIN || err == EACCES)
        return pgd_fail(why, PGD_EBUSY,
                        "expected at most %d engines at one time, got another, at %s",
                        DISK_DIR_MAX_ENGINES, path);
    if (err != 0)
        return pgd_fail(why, PGD_EIO, "cannot lock %s/%s: %s", path, DISK_DIR_ACCOUNTS,
                        strerror(err));
    if (pwrite(d->accounts_fd, &record, sizeof(record), slot_at(d->slot)) != sizeof(record))
        return pgd_fail(why, PGD_EIO, "cannot write %s/%s: %s", path, DISK_DIR_ACCOUNTS,
                        strerror(errno));
    return PGD_OK;
}

static pgd_err make_all_folders(disk_dir *d, const char *path, pgd_why *why)
{
    int err = disk_dir_make_folders(d);
    if (err != 0)
        return pgd_fail(why, PGD_EIO, "cannot make a folder in %s: %s", path, strerror(err));
    return PGD_OK;
}

pgd_err disk_dir_open(disk_dir **out, const char *path, uint64_t model, pgd_why *why)
{
    disk_dir *d = mem_calloc(1, sizeof(*d));
    if (d == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory opening %s", path);
    d->root_fd = d->accounts_fd = -1;
    d->slot = -1;
    d->model = model;
    pthread_mutex_init(&d->m, NULL);
    pgd_err err = PGD_OK;
    if (getrandom(&d->nonce, sizeof(d->nonce), 0) != sizeof(d->nonce))
        err = pgd_fail(why, PGD_EIO, "no random numbers: %s", strerror(errno));
    if (err == PGD_OK)
        err = open_root(d, path, why);
    if (err == PGD_OK)
        err = open_accounts(d, path, why);
    if (err == PGD_OK)
        err = take_slot(d, path, why);
    if (err == PGD_OK)
        err = make_all_folders(d, path, why);
    if (err != PGD_OK) {
        disk_dir_close(d);
        return err;
    }
    *out = d;
    return PGD_OK;
}

void disk_dir_close(disk_dir *d)
{
    if (d == NULL)
        return;
    if (d->accounts_fd >= 0)
        close(d->accounts_fd);
    if (d->root_fd >= 0)
        close(d->root_fd);
    pthread_mutex_destroy(&d->m);
    mem_free(d);
}

bool disk_dir_is_lost(const disk_dir *d, const char *path)
{
    struct stat root;
    struct stat accounts;
    struct stat named;
    return fstat(d->root_fd, &root) != 0 || root.st_nlink == 0 ||
           fstat(d->accounts_fd, &accounts) != 0 || accounts.st_nlink == 0 ||
           stat(path, &named) != 0 || named.st_ino != root.st_ino || named.st_dev != root.st_dev;
}

int32_t disk_dir_live_models(uint64_t *out, disk_dir *d)
{
    slot_record record;
    int32_t n = 0;
    out[n++] = d->model;
    for (int32_t i = 0; i < DISK_DIR_MAX_ENGINES; i++)
        if (i != d->slot && is_locked(d, i) &&
            pread(d->accounts_fd, &record, sizeof(record), slot_at(i)) == sizeof(record))
            out[n++] = record.model;
    return n;
}

uint64_t disk_dir_used_bytes(const disk_dir *d)
{
    return atomic_load_explicit(&d->seen_bytes, memory_order_relaxed);
}
