/* The keeper: makes the index agree with the directory, and the directory with its bound.
 *
 * At the start, and whenever the directory was lost, it looks through everything with the account
 * locked, which makes the account exact. After that it hears of each change by inotify; without
 * that, or when events were lost, it looks through again. Once a second it removes what dead engines
 * left half-written, gives up files above the own bound, and sees whether the directory is still
 * the one of that name; now and then it writes stamps into files, for the next start and for other
 * engines. */
#include <errno.h>
#include <inttypes.h>

#include <poll.h>
#include <unistd.h>

#include "common/clock.h"
#include "engine/offload/disk_tier_internal.h"

#define TICK_MS           1000
#define CALM_MS           50 /* between two looks at what others do */
#define SAVE_TICKS        16
#define SAVE_BY_US        UINT64_C(60000000)
#define LAST_SAVE_BY_US   UINT64_C(1000000)
#define MAX_SAVES         512
#define RECOUNT_PERIOD_US UINT64_C(60000000)
#define SCAN_SHARE        20 /* looks without inotify take at most this part of a thread */

typedef struct keeper {
    disk_tier *d;
    disk_watch *watch;  /* NULL: look instead */
    bool has_missed;    /* events were lost */
    int32_t n_left_out; /* files that found no room in the index, in the last look */
    int32_t n_at_look;  /* files in the index then */
    int32_t save_pos;
    int32_t n_ticks;
    int32_t n_ticks_above; /* in a row: the account says more than there seems to be */
    uint64_t next_scan_us; /* without a watch */
    uint64_t last_recount_us;
    disk_index_file files[MAX_SAVES];
} keeper;

void disk_tier__wake_keeper(disk_tier *d)
{
    uint64_t one = 1;
    if (d->wake_fd >= 0)
        (void)!write(d->wake_fd, &one, sizeof(one));
}

static bool is_stopped(const disk_tier *d)
{
    return atomic_load_explicit(&d->stop, memory_order_relaxed);
}

static bool is_clearing(const disk_tier *d)
{
    return atomic_load_explicit(&d->is_clearing, memory_order_acquire);
}

static void note_file(void *arg, const disk_block_id *id, uint64_t stamp_us)
{
    keeper *k = arg;
    disk_index_file file = {*id, stamp_us};
    disk_tier__note_stamp(k->d, stamp_us);
    if (!disk_index_put(k->d->index, &file, stamp_us))
        k->n_left_out++;
}

static int32_t n_indexed(const keeper *k)
{
    return disk_index_n_own(k->d->index) + disk_index_n_foreign(k->d->index);
}

static void look_through(keeper *k, bool recount)
{
    disk_tier *d = k->d;
    uint64_t start_us = clock_now_us();
    k->n_left_out = 0;
    if (recount) {
        atomic_store_explicit(&d->needs_recount, false, memory_order_relaxed);
        k->last_recount_us = start_us;
        k->n_ticks_above = 0;
    }
    disk_index_begin_sweep(d->index);
    int err = disk_dir_scan(d->dir, note_file, k, recount, &d->stop);
    if (err != 0) {
        if (err != ECANCELED)
            disk_tier__warn(d, err, "look through the directory");
        return;
    }
    disk_index_end_sweep(d->index);
    k->n_at_look = n_indexed(k);
    uint64_t end_us = clock_now_us();
    k->next_scan_us = end_us + PGD_MAX(SCAN_SHARE * (end_us - start_us), TICK_MS * UINT64_C(1000));
    atomic_store_explicit(&d->used_bytes, disk_dir_used_bytes(d->dir), memory_order_relaxed);
    if (!atomic_exchange_explicit(&d->is_ready, true, memory_order_acq_rel))
        log_info("disk",
                 "ready dir=%s files=%d foreign=%d used_bytes=%" PRIu64 " max_bytes=%" PRIu64
                 " ms=%" PRIu64,
                 d->path, disk_index_n_own(d->index), disk_index_n_foreign(d->index),
                 disk_dir_used_bytes(d->dir), d->opts.max_bytes, (end_us - start_us) / 1000);
}

/* Watches first, so that nothing falls between. */
static void start_over(keeper *k, bool recount)
{
    disk_watch_close(k->watch);
    k->watch = NULL;
    k->has_missed = false;
    int err = disk_dir_make_folders(k->d->dir);
    if (err != 0) {
        disk_tier__warn(k->d, err, "make a folder");
        return;
    }
    if (disk_watch_open(&k->watch, k->d->path) != PGD_OK)
        log_debug("disk", "no inotify: looks at the directory instead dir=%s", k->d->path);
    look_through(k, recount);
}

static void reopen(keeper *k)
{
    disk_tier *d = k->d;
    pgd_why why = {{0}};
    atomic_store_explicit(&d->is_ready, false, memory_order_relaxed);
    disk_watch_close(k->watch);
    k->watch = NULL;
    pthread_rwlock_wrlock(&d->dir_lock);
    disk_dir_close(d->dir);
    d->dir = NULL;
    disk_index_reset(d->index);
    pgd_err err = disk_dir_open(&d->dir, d->path, d->model, &why);
    pthread_rwlock_unlock(&d->dir_lock);
    if (err != PGD_OK) {
        disk_tier__warn_lost(d, why.text);
        return;
    }
    log_info("disk", "the directory was replaced: starts over dir=%s", d->path);
}

/* Own doings are in the index already and cost no more than that here. What others did may have been
 * undone since, so that the file has the last word. */
static void follow(void *arg, const char *name, bool has_come)
{
    keeper *k = arg;
    disk_index *x = k->d->index;
    disk_block_id id;
    uint64_t stamp_us;
    if (!disk_block_parse_name(&id, name) || disk_index_find(x, &id) == has_come)
        return;
    int err = disk_dir_stamp(&stamp_us, k->d->dir, &id);
    if (err == 0 && has_come)
        note_file(k, &id, stamp_us);
    else if (err == ENOENT && !has_come)
        (void)disk_index_remove(x, &id);
}

static void listen(keeper *k)
{
    if (k->watch != NULL && !disk_watch_drain(k->watch, follow, k))
        k->has_missed = true;
}

static void save_stamps(keeper *k, uint64_t by_us)
{
    disk_tier *d = k->d;
    int32_t n = disk_index_unsaved(k->files, d->index, MAX_SAVES, by_us, &k->save_pos);
    for (int32_t i = 0; i < n; i++)
        disk_dir_save_stamp(d->dir, &k->files[i].id, k->files[i].stamp_us);
}

static void remove_own(void *arg, const disk_block_id *id, uint64_t stamp_us)
{
    disk_tier *d = arg;
    uint64_t any_us = UINT64_MAX;
    (void)stamp_us;
    if (id->model != d->model)
        return;
    int err = disk_dir_remove(d->dir, id, &any_us);
    if (err != 0 && err != ENOENT)
        disk_tier__warn(d, err, "remove a block");
    (void)disk_index_remove(d->index, id);
}

/* By the directory, not by the index: files that found no room in it go too. */
static void clear(disk_tier *d)
{
    int err = disk_dir_scan(d->dir, remove_own, d, false, &d->stop);
    if (err != 0 && err != ECANCELED)
        disk_tier__warn(d, err, "look through the directory");
    atomic_store_explicit(&d->is_clearing, false, memory_order_release);
}

/* Leaks are possible where an engine was killed between two steps, or somebody removed files by
 * hand. Where all files are alike it can be seen. */
static bool seems_too_high(keeper *k)
{
    const disk_tier *d = k->d;
    uint64_t seen = (uint64_t)disk_index_n_own(d->index) * d->file_bytes;
    bool is_above = disk_index_n_foreign(d->index) == 0 && k->n_left_out == 0 &&
                    disk_dir_used_bytes(d->dir) > seen + PGD_MAX(4 * d->file_bytes, seen / 64);
    k->n_ticks_above = is_above ? k->n_ticks_above + 1 : 0;
    return k->n_ticks_above >= 3 && clock_now_us() - k->last_recount_us > RECOUNT_PERIOD_US;
}

static bool has_room_for_left_out(const keeper *k)
{
    return k->n_left_out > 0 && n_indexed(k) < k->n_at_look / 8 * 7;
}

static void keep_bound(keeper *k)
{
    disk_tier *d = k->d;
    int err = 0;
    while (!is_stopped(d) && disk_dir_used_bytes(d->dir) > d->opts.max_bytes &&
           disk_tier__evict(d, &err))
        ;
    if (err != 0)
        disk_tier__warn(d, err, "remove a block");
    atomic_store_explicit(&d->used_bytes, disk_dir_used_bytes(d->dir), memory_order_relaxed);
}

/* Once a second, and when woken. */
static void tick(keeper *k)
{
    disk_tier *d = k->d;
    if (d->dir == NULL || disk_dir_is_lost(d->dir, d->path))
        reopen(k);
    if (d->dir == NULL)
        return;
    bool is_ready = atomic_load_explicit(&d->is_ready, memory_order_relaxed);
    bool recount = !is_ready || seems_too_high(k) ||
                   (atomic_load_explicit(&d->needs_recount, memory_order_relaxed) &&
                    clock_now_us() - k->last_recount_us > TICK_MS * UINT64_C(1000));
    listen(k);
    if (!is_ready || k->has_missed)
        start_over(k, recount);
    else if (recount || has_room_for_left_out(k) ||
             (k->watch == NULL && clock_now_us() >= k->next_scan_us))
        look_through(k, recount);
    if (!atomic_load_explicit(&d->is_ready, memory_order_relaxed))
        return;
    if (is_clearing(d))
        clear(d);
    int err = disk_dir_sweep(d->dir);
    if (err != 0)
        disk_tier__warn(d, err, "look through temporary files");
    keep_bound(k);
    if (++k->n_ticks % SAVE_TICKS == 0)
        save_stamps(k, SAVE_BY_US);
}

/* Until something happens in the directory, somebody wakes us, or end_us. */
static void wait_for_work(keeper *k, uint64_t end_us)
{
    uint64_t now_us = clock_now_us();
    struct pollfd fds[] = {
        {.fd = k->d->wake_fd, .events = POLLIN},
        {.fd = k->watch != NULL ? disk_watch_get_fd(k->watch) : -1, .events = POLLIN}};
    uint64_t n;
    (void)poll(fds, 2, now_us < end_us ? (int)((end_us - now_us) / 1000) + 1 : 0);
    (void)!read(k->d->wake_fd, &n, sizeof(n));
}

void disk_tier__run_keeper(void *arg)
{
    keeper k = {.d = arg};
    disk_tier *d = arg;
    while (!is_stopped(d)) {
        tick(&k);
        uint64_t end_us = clock_now_us() + TICK_MS * UINT64_C(1000);
        while (!is_stopped(d) && !k.has_missed && !is_clearing(d) && clock_now_us() < end_us) {
            wait_for_work(&k, end_us);
            listen(&k);
            /* Many changes are looked at together. */
            struct pollfd stop = {.fd = d->wake_fd, .events = POLLIN};
            (void)poll(&stop, 1, CALM_MS);
        }
    }
    if (d->dir != NULL && atomic_load_explicit(&d->is_ready, memory_order_relaxed))
        save_stamps(&k, LAST_SAVE_BY_US);
    disk_watch_close(k.watch);
}
