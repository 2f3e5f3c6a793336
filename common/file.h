/* Files: read-only maps, whole reads, small helpers.
 *
 * Thread:  any
 */
#ifndef COMMON_FILE_H
#define COMMON_FILE_H

#include "common/err.h"

typedef struct file_map {
    const uint8_t *data; /* page aligned; NULL when n_bytes == 0 */
    size_t n_bytes;
} file_map;

/* Maps a regular file read-only and shared. The why names the path. */
PGD_MUST_USE pgd_err file_map_open(file_map *out, const char *path, pgd_why *why);
void file_map_close(file_map *map);

/* Reads a whole regular file of at most max_bytes; *out is NUL-terminated, free with mem_free. */
PGD_MUST_USE pgd_err file_read(char **out, size_t *n_bytes, const char *path, size_t max_bytes,
                               pgd_why *why);
/* The first bytes of a file of /proc, which has no size, NUL-terminated; the number of them, 0 when
 * it cannot be read. */
size_t file_read_proc(char *out, size_t cap, const char *path);
bool file_exists(const char *path);
bool file_is_dir(const char *path);
/* dir + "/" + name into out[cap]; false when it does not fit. */
bool file_join(char *out, size_t cap, const char *dir, const char *name);

#endif
