/* The file is filled under a lock, and an empty one counts as missing: so engines that start together
 * agree, and one that is killed between making and filling it leaves nothing that stops the next. */
#include "engine/hash_seed.h"

#include <errno.h>
#include <string.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/log.h"

#define OPTION "kv_hash_seed_file"

/* *n_bytes: how many there are, at most 32. */
static pgd_err read_seed(uint8_t out[HASH_SHA256_BYTES], size_t *n_bytes, int fd, const char *path,
                         pgd_why *why)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return pgd_fail(why, PGD_EIO, OPTION ": cannot read %s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return pgd_fail(why, PGD_EINVAL,
                        OPTION ": expected a regular file, got something else, at %s", path);
    ssize_t n = pread(fd, out, HASH_SHA256_BYTES, 0);
    if (n < 0)
        return pgd_fail(why, PGD_EIO, OPTION ": cannot read %s: %s", path, strerror(errno));
    *n_bytes = (size_t)n;
    if (n > 0 && n < HASH_SHA256_BYTES)
        return pgd_fail(why, PGD_EINVAL,
                        OPTION
                        ": expected %d bytes, got %zd, at %s; one that is removed is made anew",
                        HASH_SHA256_BYTES, n, path);
    return PGD_OK;
}

static void warn_if_open(int fd, const char *path)
{
    struct stat st;
    if (fstat(fd, &st) == 0 && (st.st_mode & 037) != 0)
        log_warn("engine",
                 "others may read or change the secret of the block hashes in %s; run chmod 600 on "
                 "it",
                 path);
}

/* Whoever has the lock first draws it. */
static pgd_err fill(uint8_t out[HASH_SHA256_BYTES], int fd, const char *path, pgd_why *why)
{
    uint8_t fresh[HASH_SHA256_BYTES];
    size_t n_bytes;
    int rc;
    do
        rc = flock(fd, LOCK_EX);
    while (rc != 0 && errno == EINTR);
    if (rc != 0)
        return pgd_fail(why, PGD_EIO, OPTION ": cannot lock %s: %s", path, strerror(errno));
    PGD_TRY(read_seed(out, &n_bytes, fd, path, why));
    if (n_bytes > 0)
        return PGD_OK;
    if (getrandom(fresh, sizeof fresh, 0) != (ssize_t)sizeof fresh)
        return pgd_fail(why, PGD_EIO, "no random numbers from the system");
    ssize_t n = pwrite(fd, fresh, sizeof fresh, 0);
    if (n != (ssize_t)sizeof fresh) {
        int err = n < 0 ? errno : ENOSPC;
        (void)!ftruncate(fd, 0);
        return pgd_fail(why, PGD_EIO, OPTION ": cannot write %s: %s", path, strerror(err));
    }
    memcpy(out, fresh, sizeof fresh);
    return PGD_OK;
}

pgd_err hash_seed_load(uint8_t out[HASH_SHA256_BYTES], const char *path, pgd_why *why)
{
    size_t n_bytes = 0;
    pgd_err err = PGD_OK;
    if (path[0] == '\0')
        return getrandom(out, HASH_SHA256_BYTES, 0) == HASH_SHA256_BYTES
                   ? PGD_OK
                   : pgd_fail(why, PGD_EIO, "no random numbers from the system");
    /* One that is there need not be writable. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno != ENOENT)
        return pgd_fail(why, PGD_EIO, OPTION ": cannot read %s: %s", path, strerror(errno));
    if (fd >= 0) {
        err = read_seed(out, &n_bytes, fd, path, why);
        if (n_bytes > 0)
            warn_if_open(fd, path);
        close(fd);
    }
    if (err != PGD_OK || n_bytes > 0)
        return err;
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0600);
    if (fd < 0)
        return pgd_fail(why, PGD_EIO, OPTION ": cannot make %s: %s", path, strerror(errno));
    err = fill(out, fd, path, why);
    warn_if_open(fd, path);
    close(fd);
    return err;
}
