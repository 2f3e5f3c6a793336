/* Room for new files: within the bound, and within what the file system has.
 *
 * A file system may be full before the bound is reached, by others' files. What is there then is what
 * fits: for a while that is the bound, and a new block takes the place of old ones as at any bound.
 * When the while is over a file is tried beyond it; that costs one failed write, and works whatever
 * the limit is (a quota says nothing about itself beforehand). Where giving up files makes no room,
 * since somebody else takes it or a snapshot keeps it, few are given up: after two for one block
 * writes rest, longer each time. */
#include <errno.h>

#include "common/clock.h"
#include "engine/offload/disk_tier_internal.h"

/* The least recently used of those that nobody living wants, or of all; with evict_m held. */
static bool next_victim(disk_tier *d, disk_index_file *out)
{
    uint64_t live[DISK_DIR_MAX_ENGINES];
    if (d->next_victim == d->n_victims) {
        int32_t n_live = disk_dir_live_models(live, d->dir);
        d->n_victims = disk_index_oldest(d->victims, d->index, DISK_TIER_MAX_VICTIMS, live, n_live);
        d->next_victim = 0;
    }
    if (d->next_victim == d->n_victims)
        return false;
    *out = d->victims[d->next_victim++];
    return true;
}

bool disk_tier__evict(disk_tier *d, int *err)
{
    disk_index_file file;
    bool is_done = false;
    *err = 0;
    pthread_mutex_lock(&d->evict_m);
    while (!is_done && *err == 0 && next_victim(d, &file)) {
        if (disk_index_stamp(d->index, &file.id) != file.stamp_us)
            continue; /* wanted since, or gone */
        int rc = disk_dir_remove(d->dir, &file.id, &file.stamp_us);
        if (rc == ESTALE) { /* another engine wants it */
            disk_tier__note_stamp(d, file.stamp_us);
            (void)disk_index_put(d->index, &file, file.stamp_us);
        } else if (rc == 0 || rc == ENOENT) {
            (void)disk_index_remove(d->index, &file.id);
            is_done = rc == 0;
        } else {
            *err = rc;
        }
    }
    pthread_mutex_unlock(&d->evict_m);
    if (is_done)
        atomic_fetch_add_explicit(&d->n_evicted, 1, memory_order_relaxed);
    return is_done;
}

static uint64_t bound_of(const disk_tier *d)
{
    uint64_t until_us = atomic_load_explicit(&d->squeezed_until_us, memory_order_acquire);
    uint64_t fits_bytes = atomic_load_explicit(&d->fits_bytes, memory_order_relaxed);
    return clock_now_us() < until_us ? PGD_MIN(fits_bytes, d->opts.max_bytes) : d->opts.max_bytes;
}

int disk_tier__begin_file(disk_tier *d, disk_dir_temp *temp)
{
    int err = disk_dir_begin(temp, d->dir, d->file_bytes, bound_of(d), true);
    while (err == ENOBUFS) {
        if (!disk_tier__evict(d, &err)) {
            if (err != 0)
                return err;
            /* Counted, but nowhere to be seen. */
            atomic_store_explicit(&d->needs_recount, true, memory_order_relaxed);
            disk_tier__wake_keeper(d);
            return ENOBUFS;
        }
        err = disk_dir_begin(temp, d->dir, d->file_bytes, bound_of(d), true);
    }
    if (err == EUCLEAN) {
        atomic_store_explicit(&d->needs_recount, true, memory_order_relaxed);
        disk_tier__wake_keeper(d);
        return ENOBUFS;
    }
    return err;
}

bool disk_tier__is_out_of_space(int err)
{
    return err == ENOSPC || err == EDQUOT;
}

bool disk_tier__squeeze(disk_tier *d, int err)
{
    uint64_t used_bytes = disk_dir_used_bytes(d->dir);
    if (used_bytes < d->file_bytes ||
        disk_index_n_own(d->index) + disk_index_n_foreign(d->index) == 0)
        return false;
    atomic_store_explicit(&d->fits_bytes, used_bytes, memory_order_relaxed);
    atomic_store_explicit(&d->squeezed_until_us, clock_now_us() + (uint64_t)d->opts.rest_ms * 1000,
                          memory_order_release);
    if (!atomic_exchange_explicit(&d->is_squeezed, true, memory_order_relaxed))
        disk_tier__warn(d, err, "write a block without giving up others");
    return true;
}

void disk_tier__note_success(disk_tier *d)
{
    atomic_store_explicit(&d->n_in_vain, 0, memory_order_relaxed);
    if (clock_now_us() >= atomic_load_explicit(&d->squeezed_until_us, memory_order_relaxed))
        atomic_store_explicit(&d->is_squeezed, false, memory_order_relaxed);
}
