/* The files of the directory. What changes the sum of their lengths happens under the lock, so that
 * a recount, which holds it, finds every file at its final length. Data is written without the lock.
 *
 * Nothing is synced: a block that a crash of the machine tore fails its checksum, which is a miss,
 * and a flush per block would cost more than the block is worth. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/offload/disk_dir_internal.h"

/* The year 2400, about: file systems keep later times badly, and nobody here writes them. */
#define MAX_STAMP_S INT64_C(13600000000)

/* A time that is none of ours is the oldest of all. */
static uint64_t stamp_of(const struct stat *st)
{
    int64_t s = st->st_mtim.tv_sec;
    return s < 0 || s > MAX_STAMP_S ? 0
                                    : (uint64_t)s * 1000000 + (uint64_t)st->st_mtim.tv_nsec / 1000;
}

static void times_of(struct timespec times[2], uint64_t stamp_us)
{
    times[0].tv_sec = 0;
    times[0].tv_nsec = UTIME_OMIT;
    times[1].tv_sec = (time_t)(stamp_us / 1000000);
    times[1].tv_nsec = (long)(stamp_us % 1000000) * 1000;
}

/* Not every file system knows direct I/O. */
static int open_at(int folder_fd, const char *name, int flags, bool direct)
{
    int fd = -1;
    flags |= O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
    if (direct)
        fd = openat(folder_fd, name, flags | O_DIRECT, 0600);
    if (fd < 0 && (!direct || errno == EINVAL))
        fd = openat(folder_fd, name, flags, 0600);
    return fd;
}

static int make_temp(disk_dir_temp *temp, disk_dir *d, bool direct)
{
    int folder_fd;
    int err = disk_dir__open_folder(&folder_fd, d, DISK_DIR_TEMPS, true);
    if (err != 0)
        return err;
    (void)snprintf(temp->name, sizeof(temp->name), "%" PRId32 "-%016" PRIx64 "-%" PRIu64, d->slot,
                   d->nonce, d->n_temps++);
    temp->fd = open_at(folder_fd, temp->name, O_WRONLY | O_CREAT | O_EXCL, direct);
    if (temp->fd < 0)
        err = errno;
    else if (ftruncate(temp->fd, (off_t)temp->n_bytes) != 0) {
        err = errno;
        close(temp->fd);
        temp->fd = -1;
        (void)unlinkat(folder_fd, temp->name, 0);
    }
    close(folder_fd);
    return err;
}

int disk_dir_begin(disk_dir_temp *out, disk_dir *d, uint64_t n_bytes, uint64_t max_bytes,
                   bool direct)
{
    int err = disk_dir__lock(d);
    if (err != 0)
        return err;
    out->n_bytes = n_bytes;
    out->fd = -1;
    if (!d->is_counted)
        err = EUCLEAN;
    else if (n_bytes > max_bytes || d->used_bytes > max_bytes - n_bytes)
        err = ENOBUFS;
    else
        err = disk_dir__set_used(d, d->used_bytes + n_bytes);
    if (err == 0) {
        err = make_temp(out, d, direct);
        if (err != 0)
            disk_dir__release(d, n_bytes);
    }
    disk_dir__unlock(d);
    return err;
}

/* With the lock held: the file is gone, or was already. */
static void drop_temp(disk_dir *d, const disk_dir_temp *temp, int temps_fd)
{
    if (unlinkat(temps_fd, temp->name, 0) == 0 || errno == ENOENT)
        disk_dir__release(d, temp->n_bytes);
}

static int move_temp(disk_dir *d, const disk_dir_temp *temp, int temps_fd, const disk_block_id *id)
{
    char folder[DISK_BLOCK_FOLDER_BYTES];
    char name[DISK_BLOCK_NAME_BYTES];
    struct stat st;
    int folder_fd;
    disk_block_folder(folder, id);
    disk_block_name(name, id);
    int err = disk_dir__open_folder(&folder_fd, d, folder, true);
    if (err != 0)
        return err;
    bool is_taken = fstatat(folder_fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0;
    if (is_taken && S_ISDIR(st.st_mode))
        (void)unlinkat(folder_fd, name, AT_REMOVEDIR);
    if (is_taken && S_ISREG(st.st_mode))
        err = EEXIST;
    else if (renameat(temps_fd, temp->name, folder_fd, name) != 0)
        err = errno;
    close(folder_fd);
    return err;
}

int disk_dir_publish(disk_dir *d, disk_dir_temp *temp, const disk_block_id *id, uint64_t stamp_us)
{
    struct timespec times[2];
    int temps_fd;
    times_of(times, stamp_us);
    (void)futimens(temp->fd, times);
    close(temp->fd);
    temp->fd = -1;
    int err = disk_dir__lock(d);
    if (err != 0)
        return err;
    err = disk_dir__open_folder(&temps_fd, d, DISK_DIR_TEMPS, false);
    if (err == 0) {
        err = move_temp(d, temp, temps_fd, id);
        if (err != 0)
            drop_temp(d, temp, temps_fd);
        close(temps_fd);
    } else if (err == ENOENT) {
        disk_dir__release(d, temp->n_bytes);
    }
    disk_dir__unlock(d);
    return err;
}

void disk_dir_discard(disk_dir *d, disk_dir_temp *temp)
{
    int temps_fd;
    close(temp->fd);
    temp->fd = -1;
    if (disk_dir__lock(d) != 0)
        return; /* a recount finds it */
    if (disk_dir__open_folder(&temps_fd, d, DISK_DIR_TEMPS, false) == 0) {
        drop_temp(d, temp, temps_fd);
        close(temps_fd);
    }
    disk_dir__unlock(d);
}

static int open_folder_of(int *fd, char name[DISK_BLOCK_NAME_BYTES], disk_dir *d,
                          const disk_block_id *id)
{
    char folder[DISK_BLOCK_FOLDER_BYTES];
    disk_block_folder(folder, id);
    disk_block_name(name, id);
    return disk_dir__open_folder(fd, d, folder, false);
}

int disk_dir_open_file(int *fd, uint64_t *n_bytes, disk_dir *d, const disk_block_id *id,
                       bool direct)
{
    char name[DISK_BLOCK_NAME_BYTES];
    struct stat st;
    int folder_fd;
    int err = open_folder_of(&folder_fd, name, d, id);
    if (err != 0)
        return err;
    *fd = open_at(folder_fd, name, O_RDONLY, direct);
    if (*fd < 0)
        err = errno == EACCES || errno == EPERM ? EISDIR : errno; /* not what we made */
    else if (fstat(*fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        err = EISDIR;
        close(*fd);
    } else {
        *n_bytes = (uint64_t)st.st_size;
    }
    close(folder_fd);
    return err;
}

static int remove_at(disk_dir *d, int folder_fd, const char *name, uint64_t *stamp_us)
{
    struct stat st;
    if (fstatat(folder_fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return errno;
    if (S_ISREG(st.st_mode) && stamp_of(&st) > *stamp_us) {
        *stamp_us = stamp_of(&st);
        return ESTALE;
    }
    if (unlinkat(folder_fd, name, S_ISDIR(st.st_mode) ? AT_REMOVEDIR : 0) != 0)
        return errno;
    if (S_ISREG(st.st_mode))
        disk_dir__release(d, (uint64_t)st.st_size);
    return 0;
}

int disk_dir_remove(disk_dir *d, const disk_block_id *id, uint64_t *stamp_us)
{
    char name[DISK_BLOCK_NAME_BYTES];
    int folder_fd;
    int err = disk_dir__lock(d);
    if (err != 0)
        return err;
    err = open_folder_of(&folder_fd, name, d, id);
    if (err == 0) {
        err = remove_at(d, folder_fd, name, stamp_us);
        close(folder_fd);
    }
    disk_dir__unlock(d);
    return err;
}

int disk_dir_stamp(uint64_t *stamp_us, disk_dir *d, const disk_block_id *id)
{
    char name[DISK_BLOCK_NAME_BYTES];
    struct stat st;
    int folder_fd;
    int err = open_folder_of(&folder_fd, name, d, id);
    if (err != 0)
        return err;
    if (fstatat(folder_fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        err = errno;
    else if (!S_ISREG(st.st_mode))
        err = ENOENT;
    else
        *stamp_us = stamp_of(&st);
    close(folder_fd);
    return err;
}

void disk_dir_save_stamp(disk_dir *d, const disk_block_id *id, uint64_t stamp_us)
{
    char name[DISK_BLOCK_NAME_BYTES];
    struct timespec times[2];
    int folder_fd;
    times_of(times, stamp_us);
    if (open_folder_of(&folder_fd, name, d, id) != 0)
        return;
    (void)utimensat(folder_fd, name, times, AT_SYMLINK_NOFOLLOW);
    close(folder_fd);
}

/* What a walk over one folder does with a regular file. */
typedef struct visitor {
    disk_dir *d;
    disk_dir_file_fn fn; /* NULL in the folder of temporary files */
    void *arg;
    const atomic_bool *stop; /* may be NULL */
    uint64_t n_bytes;        /* of all that stays */
} visitor;

static void visit_temp(visitor *v, int folder_fd, const char *name, const struct stat *st)
{
    int32_t slot;
    uint64_t nonce;
    uint64_t n;
    int end = 0;
    if (sscanf(name, "%" SCNd32 "-%16" SCNx64 "-%" SCNu64 "%n", &slot, &nonce, &n, &end) != 3 ||
        name[end] != '\0')
        return;
    if (disk_dir__is_alive(v->d, slot, nonce) || unlinkat(folder_fd, name, 0) != 0)
        v->n_bytes += (uint64_t)st->st_size;
    else
        disk_dir__release(v->d, (uint64_t)st->st_size);
}

static void visit(visitor *v, int folder_fd, const char *name)
{
    struct stat st;
    disk_block_id id;
    if (name[0] == '.' || (v->fn != NULL && !disk_block_parse_name(&id, name)) ||
        fstatat(folder_fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(st.st_mode))
        return;
    if (v->fn == NULL) {
        visit_temp(v, folder_fd, name, &st);
        return;
    }
    v->n_bytes += (uint64_t)st.st_size;
    v->fn(v->arg, &id, stamp_of(&st));
}

static int walk(visitor *v, const char *folder)
{
    int fd;
    int err = disk_dir__open_folder(&fd, v->d, folder, false);
    if (err == ENOENT)
        return 0;
    DIR *dir = err == 0 ? fdopendir(fd) : NULL;
    if (dir == NULL) {
        if (err == 0) {
            err = errno;
            close(fd);
        }
        return err;
    }
    for (const struct dirent *e; (e = readdir(dir)) != NULL;) {
        if (v->stop != NULL && atomic_load_explicit(v->stop, memory_order_relaxed)) {
            err = ECANCELED;
            break;
        }
        visit(v, dirfd(dir), e->d_name);
    }
    closedir(dir);
    return err;
}

static int walk_blocks(visitor *v)
{
    char folder[DISK_BLOCK_FOLDER_BYTES];
    int err = 0;
    for (int i = 0; err == 0 && i < DISK_BLOCK_N_FOLDERS; i++) {
        (void)snprintf(folder, sizeof(folder), "%02x", (unsigned)i);
        err = walk(v, folder);
    }
    return err;
}

int disk_dir_scan(disk_dir *d, disk_dir_file_fn fn, void *arg, bool recount,
                  const atomic_bool *stop)
{
    visitor blocks = {.d = d, .fn = fn, .arg = arg, .stop = stop};
    visitor temps = {.d = d, .stop = stop};
    if (!recount)
        return walk_blocks(&blocks);
    int err = disk_dir__lock(d);
    if (err != 0)
        return err;
    err = walk(&temps, DISK_DIR_TEMPS);
    if (err == 0)
        err = walk_blocks(&blocks);
    if (err == 0)
        err = disk_dir__set_used(d, temps.n_bytes + blocks.n_bytes);
    disk_dir__unlock(d);
    return err;
}

int disk_dir_sweep(disk_dir *d)
{
    visitor temps = {.d = d};
    int err = disk_dir__lock(d);
    if (err != 0)
        return err;
    err = walk(&temps, DISK_DIR_TEMPS);
    disk_dir__unlock(d);
    return err;
}
