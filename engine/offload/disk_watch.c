/* inotify on each folder. Names say all (a block's folder follows from its name), so that which
 * watch an event is of need not be known. */
#include "engine/offload/disk_watch.h"

#include <stdio.h>

#include <sys/inotify.h>
#include <unistd.h>

#include "common/mem.h"
#include "engine/offload/disk_block.h"

#define COMES_OR_GOES (IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE)
#define IS_LOST       (IN_Q_OVERFLOW | IN_IGNORED | IN_UNMOUNT | IN_MOVE_SELF)

struct disk_watch {
    int fd;
    _Alignas(struct inotify_event) char events[16384];
};

static bool add_folders(const disk_watch *w, const char *path)
{
    char folder[4096];
    for (int i = 0; i < DISK_BLOCK_N_FOLDERS; i++) {
        int n = snprintf(folder, sizeof(folder), "%s/%02x", path, (unsigned)i);
        if (n < 0 || n >= (int)sizeof(folder) ||
            inotify_add_watch(w->fd, folder,
                              COMES_OR_GOES | IN_MOVE_SELF | IN_ONLYDIR | IN_DONT_FOLLOW) < 0)
            return false;
    }
    return true;
}

pgd_err disk_watch_open(disk_watch **out, const char *path)
{
    disk_watch *w = mem_calloc(1, sizeof(*w));
    if (w == NULL)
        return PGD_ENOMEM;
    w->fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (w->fd < 0 || !add_folders(w, path)) {
        disk_watch_close(w);
        return PGD_EIO;
    }
    *out = w;
    return PGD_OK;
}

void disk_watch_close(disk_watch *w)
{
    if (w == NULL)
        return;
    if (w->fd >= 0)
        close(w->fd);
    mem_free(w);
}

int disk_watch_get_fd(const disk_watch *w)
{
    return w->fd;
}

bool disk_watch_drain(disk_watch *w, disk_watch_fn fn, void *arg)
{
    ssize_t n;
    while ((n = read(w->fd, w->events, sizeof(w->events))) > 0) {
        const struct inotify_event *e;
        for (const char *at = w->events; at < w->events + n; at += sizeof(*e) + e->len) {
            e = (const struct inotify_event *)(const void *)at;
            if ((e->mask & IS_LOST) != 0)
                return false;
            if (e->len > 0)
                fn(arg, e->name, (e->mask & IN_MOVED_TO) != 0);
        }
    }
    return true;
}
