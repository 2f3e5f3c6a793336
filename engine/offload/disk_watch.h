/* What other processes do in the folders of the disk tier's directory: files that come and go.
 *
 * Owns:    an inotify descriptor
 * Thread:  one at a time, any but core
 */
#ifndef ENGINE_OFFLOAD_DISK_WATCH_H
#define ENGINE_OFFLOAD_DISK_WATCH_H

#include "common/err.h"

typedef struct disk_watch disk_watch;

/* Errors: PGD_EIO (no inotify here, or no more watches), PGD_ENOMEM */
PGD_MUST_USE pgd_err disk_watch_open(disk_watch **out, const char *path);
void disk_watch_close(disk_watch *w);
/* Readable when there is something to drain. Borrow until close. */
int disk_watch_get_fd(const disk_watch *w);
typedef void (*disk_watch_fn)(void *arg, const char *name, bool has_come);
/* Calls fn for each name that came or went, without waiting. False: some were lost, or a folder is
 * gone; open another and look through the directory. */
PGD_MUST_USE bool disk_watch_drain(disk_watch *w, disk_watch_fn fn, void *arg);

#endif
