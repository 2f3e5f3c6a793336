/* The core thread's side, and the life of the threads.
 *
 *   core ── jobs (ring, semaphore) ──► readers, writers ── done (ring) ──► core
 *
 * Readers only read, so that a burst of writes never holds up a request; writers read first too
 * when there is something to be read. The keeper looks through the directory at the start, then
 * follows what other engines do to it, and repairs what dead ones left.
 *
 * On the core's calls: two rings, a semaphore's post, and the index, which is read without a lock.
 *
 * Stamps are given out here, in the order of the core's calls, so that the order of eviction is the
 * order of use whatever the threads do. They say which use was later and nothing else. Wall time is
 * only where they begin, since files keep them from one start to the next: from there they go by the
 * monotonic clock, and ahead of every stamp that was seen in a file. So a clock that is set, forward
 * or back, makes nobody's blocks older than others', and one engine's no older than another's. */
#include "engine/offload/disk_tier.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include <sys/eventfd.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "engine/offload/disk_tier_internal.h"

enum {
    DEFAULT_THREADS = 2,
    DEFAULT_JOBS = 256,
    DEFAULT_REMOVALS = 1 << 14,
    MAX_JOBS = 1 << 20,
    DEFAULT_REST_MS = 10000,
    DEFAULT_STUCK_MS = 2000,
    END_LIMIT_S = 5
};

#define MAX_INDEX_FILES (UINT64_C(1) << 26)

static uint64_t load(const _Atomic uint64_t *v)
{
    return atomic_load_explicit(v, memory_order_relaxed);
}

static pgd_err check_opts(const disk_tier *d, pgd_why *why)
{
    const disk_tier_opts *o = &d->opts;
    if (o->n_threads < 1 || 2 * o->n_threads + 1 > DISK_TIER_MAX_THREADS || o->max_jobs < 1 ||
        o->max_jobs > MAX_JOBS || o->max_removals < 1 || o->max_removals > MAX_JOBS ||
        o->rest_ms < 1)
        return pgd_fail(why, PGD_EINVAL, "threads %d, jobs %d, removals %d, rest %d ms",
                        o->n_threads, o->max_jobs, o->max_removals, o->rest_ms);
    if (o->max_bytes < d->file_bytes)
        return pgd_fail(why, PGD_EINVAL,
                        "expected room for at least one KV block of %llu bytes on disk, got %llu",
                        (unsigned long long)d->file_bytes, (unsigned long long)o->max_bytes);
    return PGD_OK;
}

static void set_opts(disk_tier *d, const disk_tier_opts *opts)
{
    const kv_region_shape *shape = &opts->region->shape;
    d->opts = *opts;
    d->opts.n_threads = opts->n_threads != 0 ? opts->n_threads : DEFAULT_THREADS;
    d->opts.max_jobs = opts->max_jobs != 0 ? opts->max_jobs : DEFAULT_JOBS;
    d->opts.max_removals = opts->max_removals != 0 ? opts->max_removals : DEFAULT_REMOVALS;
    d->opts.rest_ms = opts->rest_ms != 0 ? opts->rest_ms : DEFAULT_REST_MS;
    d->opts.stuck_ms = opts->stuck_ms != 0 ? opts->stuck_ms : DEFAULT_STUCK_MS;
    d->opts.dir = d->path;
    memcpy(d->kind.fingerprint, opts->fingerprint, HASH_SHA256_BYTES);
    d->kind.n_ranks = shape->n_ranks;
    d->kind.shard_bytes = shape->shard_bytes;
    d->model = disk_block_model(opts->fingerprint);
    d->header_bytes = disk_block_header_bytes(&d->kind);
    d->payload_bytes = disk_block_payload_bytes(&d->kind);
    d->file_bytes = d->header_bytes + d->payload_bytes;
}

static void init_sync(disk_tier *d)
{
    pthread_rwlockattr_t attr;
    pthread_condattr_t clock;
    pthread_rwlockattr_init(&attr);
    /* Threads with work all the time would keep the keeper out. */
    pthread_rwlockattr_setkind_np(&attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&d->dir_lock, &attr);
    pthread_rwlockattr_destroy(&attr);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&d->ended, &clock);
    pthread_condattr_destroy(&clock);
    pthread_cond_init(&d->turn_ended, NULL);
    pthread_mutex_init(&d->reads.m, NULL);
    pthread_mutex_init(&d->writes.m, NULL);
    pthread_mutex_init(&d->done_m, NULL);
    pthread_mutex_init(&d->evict_m, NULL);
    pthread_mutex_init(&d->warn_m, NULL);
    pthread_mutex_init(&d->threads_m, NULL);
    sem_init(&d->reads.n_jobs, 0, 0);
    sem_init(&d->writes.n_jobs, 0, 0);
}

static void free_all(disk_tier *d)
{
    disk_dir_close(d->dir);
    disk_index_destroy(d->index);
    ring_destroy(d->reads.jobs);
    ring_destroy(d->writes.jobs);
    ring_destroy(d->done);
    sem_destroy(&d->reads.n_jobs);
    sem_destroy(&d->writes.n_jobs);
    pthread_mutex_destroy(&d->reads.m);
    pthread_mutex_destroy(&d->writes.m);
    pthread_mutex_destroy(&d->done_m);
    pthread_mutex_destroy(&d->evict_m);
    pthread_mutex_destroy(&d->warn_m);
    pthread_mutex_destroy(&d->threads_m);
    pthread_cond_destroy(&d->ended);
    pthread_cond_destroy(&d->turn_ended);
    pthread_rwlock_destroy(&d->dir_lock);
    if (d->wake_fd >= 0)
        close(d->wake_fd);
    mem_free(d->path);
    mem_free(d);
}

/* The own blocks that fit, and as many small ones of other models again. */
static int32_t max_index_files(const disk_tier *d)
{
    uint64_t n = 2 * (d->opts.max_bytes / d->file_bytes) + 1024;
    return (int32_t)PGD_MIN(n, MAX_INDEX_FILES);
}

static pgd_err make_parts(disk_tier *d)
{
    size_t max_jobs = (size_t)d->opts.max_jobs;
    size_t max_removals = (size_t)d->opts.max_removals;
    PGD_TRY(ring_create(&d->reads.jobs, sizeof(disk_tier_job), max_jobs));
    PGD_TRY(ring_create(&d->writes.jobs, sizeof(disk_tier_job), max_jobs + max_removals));
    PGD_TRY(ring_create(&d->done, sizeof(disk_tier_done), 2 * max_jobs + max_removals));
    PGD_TRY(disk_index_create(&d->index, max_index_files(d), d->model));
    d->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return d->wake_fd >= 0 ? PGD_OK : PGD_ENOMEM;
}

typedef struct thread_args {
    disk_tier *d;
    thread_fn fn;
} thread_args;

static void run(void *arg)
{
    thread_args args = *(thread_args *)arg;
    disk_tier *d = args.d;
    mem_free(arg);
    args.fn(d);
    pthread_mutex_lock(&d->threads_m);
    d->n_running--;
    pthread_cond_signal(&d->ended);
    pthread_mutex_unlock(&d->threads_m);
}

static pgd_err start(disk_tier *d, const char *name, thread_fn fn)
{
    thread_args *args = mem_alloc(sizeof(*args));
    if (args == NULL)
        return PGD_ENOMEM;
    *args = (thread_args){d, fn};
    pthread_mutex_lock(&d->threads_m);
    d->n_running++;
    pthread_mutex_unlock(&d->threads_m);
    pgd_err err = thread_start(&d->threads[d->n_threads], name, run, args);
    if (err == PGD_OK) {
        d->n_threads++;
        return PGD_OK;
    }
    mem_free(args);
    pthread_mutex_lock(&d->threads_m);
    d->n_running--;
    pthread_mutex_unlock(&d->threads_m);
    return err;
}

static pgd_err start_all(disk_tier *d)
{
    PGD_TRY(start(d, "disk-keep", disk_tier__run_keeper));
    for (int32_t i = 0; i < d->opts.n_threads; i++) {
        PGD_TRY(start(d, "disk-read", disk_tier__run_reads));
        PGD_TRY(start(d, "disk-write", disk_tier__run_writes));
    }
    return PGD_OK;
}

pgd_err disk_tier_create(disk_tier **out, const disk_tier_opts *opts, pgd_why *why)
{
    disk_tier *d = mem_calloc(1, sizeof(*d));
    if (d == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for the disk tier");
    d->wake_fd = -1;
    disk_tier__note_stamp(d, (uint64_t)PGD_MAX(clock_wall_us(), 0));
    init_sync(d);
    d->path = mem_strdup(opts->dir);
    set_opts(d, opts);
    pgd_err err = d->path != NULL ? check_opts(d, why) : PGD_ENOMEM;
    if (err == PGD_OK) {
        err = make_parts(d);
        if (err != PGD_OK)
            (void)pgd_fail(why, err, "out of memory for an index of %d files", max_index_files(d));
    }
    if (err == PGD_OK)
        err = disk_dir_open(&d->dir, d->path, d->model, why);
    if (err == PGD_OK) {
        err = start_all(d);
        if (err != PGD_OK)
            (void)pgd_fail(why, err, "cannot start threads for the disk tier");
    }
    if (err != PGD_OK) {
        (void)disk_tier_destroy(d);
        return err;
    }
    *out = d;
    return PGD_OK;
}

static bool wait_for_end(disk_tier *d)
{
    struct timespec end;
    int rc = 0;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += END_LIMIT_S;
    pthread_mutex_lock(&d->threads_m);
    while (d->n_running > 0 && rc == 0)
        rc = pthread_cond_timedwait(&d->ended, &d->threads_m, &end);
    bool is_ended = d->n_running == 0;
    pthread_mutex_unlock(&d->threads_m);
    return is_ended;
}

bool disk_tier_destroy(disk_tier *d)
{
    if (d == NULL)
        return true;
    atomic_store(&d->stop, true);
    disk_tier__wake_keeper(d);
    for (int32_t i = 0; i < d->opts.n_threads; i++) {
        sem_post(&d->reads.n_jobs);
        sem_post(&d->writes.n_jobs);
    }
    if (!wait_for_end(d)) {
        for (int32_t i = 0; i < d->n_threads; i++)
            pthread_detach(d->threads[i]);
        log_warn("disk", "the file system hangs: left it behind dir=%s", d->path);
        return false;
    }
    for (int32_t i = 0; i < d->n_threads; i++)
        thread_join(d->threads[i]);
    free_all(d);
    return true;
}

disk_block_id disk_tier__id(const disk_tier *d, const offload_key *key)
{
    return (disk_block_id){.key = *key, .model = d->model};
}

static bool rests(const disk_tier_queue *q)
{
    uint64_t until_us = atomic_load_explicit(&q->rests_until_us, memory_order_relaxed);
    return until_us != 0 && clock_now_us() < until_us;
}

static bool is_clearing(const disk_tier *d)
{
    return atomic_load_explicit(&d->is_clearing, memory_order_acquire);
}

bool disk_tier_lookup(const disk_tier *d, const offload_key *key)
{
    disk_block_id id = disk_tier__id(d, key);
    return disk_index_find(d->index, &id) && !rests(&d->reads) && !is_clearing(d);
}

void disk_tier_clear(disk_tier *d)
{
    PGD_ASSERTF(d->reads.n_out + d->writes.n_out + d->n_removals_out == 0,
                "%d reads, %d writes and %d removals are out", d->reads.n_out, d->writes.n_out,
                d->n_removals_out);
    atomic_store_explicit(&d->is_clearing, true, memory_order_release);
    disk_tier__wake_keeper(d);
}

int32_t disk_tier_list(offload_key *out, const void *tier, int32_t max_keys, int32_t *cursor)
{
    const disk_tier *d = tier;
    return disk_index_list(out, d->index, max_keys, cursor);
}

uint64_t disk_tier_version(const disk_tier *d)
{
    return disk_index_version(d->index);
}

void disk_tier__note_stamp(disk_tier *d, uint64_t stamp_us)
{
    uint64_t now_us = clock_now_us();
    uint64_t ahead_us = load(&d->ahead_us);
    while (stamp_us > now_us && stamp_us - now_us > ahead_us &&
           !atomic_compare_exchange_weak_explicit(&d->ahead_us, &ahead_us, stamp_us - now_us,
                                                  memory_order_relaxed, memory_order_relaxed))
        ;
}

/* The last of n new stamps: later than all before. */
static uint64_t take_stamps(disk_tier *d, int32_t n)
{
    uint64_t now_us = clock_now_us() + load(&d->ahead_us);
    d->last_stamp_us = PGD_MAX(now_us, d->last_stamp_us + (uint64_t)n);
    return d->last_stamp_us;
}

void disk_tier_touch(disk_tier *d, const offload_key *keys, int32_t n_keys)
{
    uint64_t stamp_us = take_stamps(d, n_keys);
    for (int32_t i = 0; i < n_keys; i++) {
        disk_block_id id = disk_tier__id(d, &keys[i]);
        disk_index_touch(d->index, &id, stamp_us - (uint64_t)i);
    }
}

static bool submit(disk_tier *d, disk_tier_queue *q, const disk_tier_job *job)
{
    PGD_ASSERTF(job->medium_block >= 0 && job->medium_block < d->opts.region->shape.n_blocks,
                "medium block %d of %d", job->medium_block, d->opts.region->shape.n_blocks);
    if (q->n_out >= d->opts.max_jobs || rests(q))
        return false;
    PGD_ASSERT(ring_push(q->jobs, job));
    if (q->n_out++ == 0)
        q->answer_us = clock_now_us();
    sem_post(&q->n_jobs);
    return true;
}

bool disk_tier_write(disk_tier *d, const offload_key *key, int32_t medium_block, uint64_t cookie)
{
    disk_tier_job job = {.key = *key, .medium_block = medium_block, .cookie = cookie};
    job.stamp_us = take_stamps(d, 1);
    return atomic_load_explicit(&d->is_ready, memory_order_acquire) && !is_clearing(d) &&
           submit(d, &d->writes, &job);
}

bool disk_tier_read(disk_tier *d, const offload_key *key, int32_t medium_block, uint64_t cookie)
{
    disk_tier_job job = {
        .key = *key, .medium_block = medium_block, .cookie = cookie, .is_read = true};
    disk_tier_touch(d, key, 1);
    return submit(d, &d->reads, &job);
}

bool disk_tier_remove(disk_tier *d, const offload_key *key, uint64_t cookie)
{
    disk_tier_job job = {.key = *key, .cookie = cookie, .is_removal = true};
    if (d->n_removals_out >= d->opts.max_removals)
        return false;
    PGD_ASSERT(ring_push(d->writes.jobs, &job));
    d->n_removals_out++;
    sem_post(&d->writes.n_jobs);
    return true;
}

bool disk_tier_next_done(disk_tier *d, disk_tier_done *out)
{
    if (!ring_pop(d->done, out))
        return false;
    int32_t *n_out = out->is_removal ? &d->n_removals_out
                     : out->is_read  ? &d->reads.n_out
                                     : &d->writes.n_out;
    (*n_out)--;
    if (!out->is_removal)
        (out->is_read ? &d->reads : &d->writes)->answer_us = clock_now_us();
    return true;
}

bool disk_tier_is_stuck(const disk_tier *d, bool is_read)
{
    const disk_tier_queue *q = is_read ? &d->reads : &d->writes;
    return q->n_out > 0 && clock_now_us() - q->answer_us > (uint64_t)d->opts.stuck_ms * 1000;
}

void disk_tier_get_stats(disk_tier_stats *out, const disk_tier *d)
{
    *out = (disk_tier_stats){.is_ready = atomic_load_explicit(&d->is_ready, memory_order_relaxed),
                             .n_files = (uint64_t)disk_index_n_own(d->index),
                             .n_foreign = (uint64_t)disk_index_n_foreign(d->index),
                             .used_bytes = load(&d->used_bytes),
                             .n_reads = load(&d->reads.n_ok),
                             .n_writes = load(&d->writes.n_ok),
                             .n_read_bytes = load(&d->reads.n_bytes),
                             .n_written_bytes = load(&d->writes.n_bytes),
                             .read_us = load(&d->reads.us),
                             .write_us = load(&d->writes.us),
                             .n_failed_reads = load(&d->reads.n_failed),
                             .n_failed_writes = load(&d->writes.n_failed),
                             .n_bad_files = load(&d->n_bad_files),
                             .n_evicted = load(&d->n_evicted),
                             .n_removed = load(&d->n_removed),
                             .n_failed_removals = load(&d->n_failed_removals),
                             .n_queued_reads = d->reads.n_out,
                             .n_queued_writes = d->writes.n_out,
                             .n_queued_removals = d->n_removals_out};
}
