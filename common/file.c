/* Only regular files are opened: a FIFO or a device given as a model would hang or never end. */
#include "common/file.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"

static pgd_err open_regular(int *fd, size_t *n_bytes, const char *path, pgd_why *why)
{
    struct stat st;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*fd < 0)
        return pgd_fail(why, errno == ENOENT || errno == ENOTDIR ? PGD_ENOENT : PGD_EIO,
                        "cannot open %s: %s", path, strerror(errno));
    if (fstat(*fd, &st) != 0) {
        pgd_fail(why, PGD_EIO, "cannot read %s: %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        pgd_fail(why, PGD_EIO, "expected a regular file, got %s, at %s",
                 S_ISDIR(st.st_mode) ? "a directory" : "something else", path);
    } else {
        *n_bytes = (size_t)st.st_size;
        return PGD_OK;
    }
    close(*fd);
    return PGD_EIO;
}

pgd_err file_map_open(file_map *out, const char *path, pgd_why *why)
{
    int fd;
    size_t n_bytes;
    memset(out, 0, sizeof(*out));
    PGD_TRY(open_regular(&fd, &n_bytes, path, why));
    if (n_bytes > 0) {
        void *p = mmap(NULL, n_bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) {
            pgd_err err = pgd_fail(why, PGD_EIO, "cannot map %s: %s", path, strerror(errno));
            close(fd);
            return err;
        }
        out->data = p;
        out->n_bytes = n_bytes;
    }
    close(fd);
    return PGD_OK;
}

void file_map_close(file_map *map)
{
    if (map->data != NULL)
        munmap((void *)(uintptr_t)map->data, map->n_bytes);
    memset(map, 0, sizeof(*map));
}

pgd_err file_read(char **out, size_t *n_bytes, const char *path, size_t max_bytes, pgd_why *why)
{
    int fd;
    size_t size;
    PGD_TRY(open_regular(&fd, &size, path, why));
    char *data = NULL;
    pgd_err err = PGD_OK;
    size_t used = 0;
    if (size > max_bytes) {
        err = pgd_fail(why, PGD_ERANGE, "expected at most %zu bytes, got %zu, at %s", max_bytes,
                       size, path);
        goto fail;
    }
    data = mem_alloc(size + 1);
    if (data == NULL) {
        err = pgd_fail(why, PGD_ENOMEM, "out of memory reading %s (%zu bytes)", path, size);
        goto fail;
    }
    while (used < size) {
        ssize_t n = read(fd, data + used, size - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            err = pgd_fail(why, PGD_EIO, "cannot read %s: %s", path, strerror(errno));
            goto fail;
        }
        if (n == 0)
            break;
        used += (size_t)n;
    }
    data[used] = '\0';
    *out = data;
    *n_bytes = used;
    close(fd);
    return PGD_OK;
fail:
    mem_free(data);
    close(fd);
    return err;
}

size_t file_read_proc(char *out, size_t cap, const char *path)
{
    FILE *f = fopen(path, "re");
    size_t n = f != NULL ? fread(out, 1, cap - 1, f) : 0;
    if (f != NULL)
        (void)fclose(f);
    out[n] = '\0';
    return n;
}

bool file_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

bool file_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool file_join(char *out, size_t cap, const char *dir, const char *name)
{
    int n = snprintf(out, cap, "%s/%s", dir, name);
    return n >= 0 && (size_t)n < cap;
}
