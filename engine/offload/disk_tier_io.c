/* The threads that read, write and remove blocks.
 *
 * Jobs of one key in the queue of writes are done one after the other, in their order: a write that
 * was taken before a removal must not give its file a name after it. A thread that took the later one
 * waits until the earlier one is done. The reads of a key need not wait: files are opened by name,
 * and what is read from one that has lost its name is as it was.
 *
 * Direct I/O between file and region where the file system has it: the page cache would keep a
 * second copy of what the host tier holds, and measured no faster (reads 1.0 to 1.4 GB/s either
 * way on the disk this was tried on, but buffered writes are paid later by everybody). So a file is
 * whole pages, and its header page is written from a buffer of the thread's own. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "engine/offload/disk_tier_internal.h"

#define WARN_PERIOD_US UINT64_C(60000000)

enum { MAX_SQUEEZES = 2, MAX_REST_DOUBLINGS = 6 };

/* One thread's. */
typedef struct io_thread {
    disk_tier *d;
    disk_tier_turn *turn;     /* NULL: it only reads */
    uint8_t *header;          /* [d->header_bytes], a page's alignment */
    kv_region_header *shards; /* [n_ranks] */
} io_thread;

static disk_tier_fault fault_of(int err)
{
    switch (err) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return DISK_TIER_FULL;
    case EROFS:
    case EACCES:
    case EPERM:
        return DISK_TIER_DENIED;
    case ENOENT:
    case ENOTDIR:
    case ESTALE:
        return DISK_TIER_GONE;
    default:
        return DISK_TIER_FAILED;
    }
}

static bool may_warn(disk_tier *d, disk_tier_fault fault, uint64_t *n_suppressed)
{
    pthread_mutex_lock(&d->warn_m);
    bool pass = log_limit_pass(&d->limits[fault], WARN_PERIOD_US, n_suppressed);
    pthread_mutex_unlock(&d->warn_m);
    return pass;
}

void disk_tier__warn(disk_tier *d, int err, const char *what)
{
    uint64_t n = 0;
    if (may_warn(d, fault_of(err), &n))
        log_warn("disk", "cannot %s: %s dir=%s more_before=%" PRIu64, what, strerror(err), d->path,
                 n);
}

void disk_tier__warn_lost(disk_tier *d, const char *why)
{
    uint64_t n = 0;
    if (may_warn(d, DISK_TIER_GONE, &n))
        log_warn("disk", "lost its directory: %s more_before=%" PRIu64, why, n);
}

void disk_tier__warn_bad_file(disk_tier *d, const disk_block_id *id)
{
    char name[DISK_BLOCK_NAME_BYTES];
    uint64_t n = 0;
    atomic_fetch_add_explicit(&d->n_bad_files, 1, memory_order_relaxed);
    disk_block_name(name, id);
    if (may_warn(d, DISK_TIER_BAD_FILE, &n))
        log_warn("disk", "torn or foreign block removed dir=%s file=%s more_before=%" PRIu64,
                 d->path, name, n);
}

/* n_times: in a row that giving up blocks for it was of no use. */
static void let_rest(disk_tier *d, disk_tier_queue *q, int err, uint32_t n_times, const char *what)
{
    uint64_t rest_us = (uint64_t)d->opts.rest_ms * 1000 << PGD_MIN(n_times, MAX_REST_DOUBLINGS);
    atomic_store_explicit(&q->rests_until_us, clock_now_us() + rest_us, memory_order_relaxed);
    disk_tier__warn(d, err, what);
    if (fault_of(err) == DISK_TIER_GONE)
        disk_tier__wake_keeper(d);
}

/* All of it, or an errno; EBADMSG: the file ends too early. */
static int transfer(int fd, struct iovec *parts, int n_parts, bool is_read)
{
    off_t at = 0;
    while (n_parts > 0) {
        ssize_t n = is_read ? preadv(fd, parts, n_parts, at) : pwritev(fd, parts, n_parts, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EINVAL && (fcntl(fd, F_GETFL) & O_DIRECT) != 0) {
            /* Taken at open, refused now (file system, alignment of what is left). */
            if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_DIRECT) == 0)
                continue;
            return EINVAL;
        }
        if (n <= 0)
            return n < 0 ? errno : is_read ? EBADMSG : ENOSPC;
        at += n;
        for (; n_parts > 0 && (size_t)n >= parts->iov_len; parts++, n_parts--)
            n -= (ssize_t)parts->iov_len;
        if (n_parts > 0) {
            parts->iov_base = (uint8_t *)parts->iov_base + n;
            parts->iov_len -= (size_t)n;
        }
    }
    return 0;
}

static int transfer_block(io_thread *t, int fd, const disk_tier_job *job)
{
    disk_tier *d = t->d;
    struct iovec parts[] = {
        {t->header, d->header_bytes},
        {kv_region_get_shard(d->opts.region, job->medium_block, 0), d->payload_bytes}};
    return transfer(fd, parts, 2, job->is_read);
}

static void note_in_index(disk_tier *d, const disk_index_file *file)
{
    int err;
    while (!disk_index_put(d->index, file, file->stamp_us) && disk_tier__evict(d, &err))
        ;
}

static int try_write(io_thread *t, const disk_tier_job *job, const disk_block_id *id)
{
    disk_tier *d = t->d;
    disk_dir_temp temp;
    int err = disk_tier__begin_file(d, &temp);
    if (err != 0)
        return err;
    for (int32_t i = 0; i < d->kind.n_ranks; i++)
        t->shards[i] = *kv_region_get_header(d->opts.region, job->medium_block, i);
    disk_block_encode(t->header, &d->kind, &job->key, t->shards);
    err = transfer_block(t, temp.fd, job);
    if (err != 0) {
        disk_dir_discard(d->dir, &temp);
        return err;
    }
    return disk_dir_publish(d->dir, &temp, id, job->stamp_us);
}

static int write_block(io_thread *t, const disk_tier_job *job, const disk_block_id *id)
{
    disk_tier *d = t->d;
    if (d->dir == NULL)
        return ENOENT;
    int err = try_write(t, job, id);
    bool is_squeezed = false;
    for (int i = 0; i < MAX_SQUEEZES && disk_tier__is_out_of_space(err); i++) {
        if (!disk_tier__squeeze(d, err))
            break;
        is_squeezed = true;
        err = try_write(t, job, id);
    }
    if (is_squeezed && disk_tier__is_out_of_space(err))
        atomic_fetch_add_explicit(&d->n_in_vain, 1, memory_order_relaxed);
    if (err == 0 || err == EEXIST)
        note_in_index(d, &(disk_index_file){*id, job->stamp_us});
    if (err == 0)
        disk_tier__note_success(d);
    return err;
}

/* Header, contents and key fit each other. */
static bool is_good(io_thread *t, const disk_tier_job *job)
{
    disk_tier *d = t->d;
    const kv_region *r = d->opts.region;
    if (!disk_block_decode(t->shards, t->header, &d->kind, &job->key))
        return false;
    for (int32_t i = 0; i < d->kind.n_ranks; i++) {
        const void *shard = kv_region_get_shard(r, job->medium_block, i);
        if (kv_region_checksum(r, shard, t->shards[i].tag) != t->shards[i].checksum)
            return false;
    }
    for (int32_t i = 0; i < d->kind.n_ranks; i++)
        *kv_region_get_header(r, job->medium_block, i) = t->shards[i];
    return true;
}

/* EBADMSG: not what its name says. */
static int read_block(io_thread *t, const disk_tier_job *job, const disk_block_id *id)
{
    disk_tier *d = t->d;
    uint64_t n_bytes;
    int fd;
    if (d->dir == NULL)
        return ENOENT;
    int err = disk_dir_open_file(&fd, &n_bytes, d->dir, id, true);
    if (err == ELOOP || err == EISDIR || err == ENXIO)
        return EBADMSG;
    if (err != 0)
        return err;
    err = n_bytes == d->file_bytes ? transfer_block(t, fd, job) : EBADMSG;
    close(fd);
    /* Left behind by destroy, the region may be gone. */
    if (err == 0 && atomic_load_explicit(&d->stop, memory_order_relaxed))
        return ECANCELED;
    return err != 0 || is_good(t, job) ? err : EBADMSG;
}

static void count(disk_tier_queue *q, const disk_tier_done *done)
{
    atomic_fetch_add_explicit(done->ok ? &q->n_ok : &q->n_failed, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&q->n_bytes, done->n_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&q->us, done->us, memory_order_relaxed);
}

static void finish(disk_tier *d, const disk_tier_done *done)
{
    if (!done->is_removal)
        count(done->is_read ? &d->reads : &d->writes, done);
    pthread_mutex_lock(&d->done_m);
    PGD_ASSERT(ring_push(d->done, done)); /* it holds all that n_out allows */
    pthread_mutex_unlock(&d->done_m);
    if (d->opts.wake != NULL)
        d->opts.wake(d->opts.arg);
}

static int do_read(io_thread *t, const disk_tier_job *job, const disk_block_id *id)
{
    disk_tier *d = t->d;
    int err = read_block(t, job, id);
    if (err == 0 || err == ECANCELED)
        return err;
    (void)disk_index_remove(d->index, id);
    if (err == EBADMSG) {
        uint64_t any = UINT64_MAX;
        disk_tier__warn_bad_file(d, id);
        (void)!disk_dir_remove(d->dir, id, &any);
    } else if (err != ENOENT) {
        let_rest(d, &d->reads, err, 0, "read a block, none is read for a while");
    }
    return err;
}

static int do_write(io_thread *t, const disk_tier_job *job, const disk_block_id *id)
{
    int err = disk_index_find(t->d->index, id) ? EEXIST : write_block(t, job, id);
    if (err == EISDIR) /* of this block alone */
        disk_tier__warn(t->d, err, "write a block");
    else if (err != 0 && err != EEXIST && err != ENOBUFS)
        let_rest(t->d, &t->d->writes, err,
                 atomic_load_explicit(&t->d->n_in_vain, memory_order_relaxed),
                 "write a block, none is written for a while");
    return err;
}

static int do_removal(io_thread *t, const disk_block_id *id)
{
    disk_tier *d = t->d;
    uint64_t any = UINT64_MAX;
    int err = d->dir != NULL ? disk_dir_remove(d->dir, id, &any) : ESTALE;
    if (err == 0 || err == ENOENT) {
        atomic_fetch_add_explicit(&d->n_removed, err == 0, memory_order_relaxed);
        (void)disk_index_remove(d->index, id);
        return 0;
    }
    atomic_fetch_add_explicit(&d->n_failed_removals, 1, memory_order_relaxed);
    disk_tier__warn(d, err, "remove a block that is not to be trusted");
    return err;
}

static void do_job(io_thread *t, const disk_tier_job *job)
{
    disk_tier *d = t->d;
    disk_block_id id = disk_tier__id(d, &job->key);
    uint64_t start_us = clock_now_us();
    pthread_rwlock_rdlock(&d->dir_lock);
    int err = job->is_removal ? do_removal(t, &id)
              : job->is_read  ? do_read(t, job, &id)
                              : do_write(t, job, &id);
    if (d->dir != NULL)
        atomic_store_explicit(&d->used_bytes, disk_dir_used_bytes(d->dir), memory_order_relaxed);
    pthread_rwlock_unlock(&d->dir_lock);
    disk_tier_done done = {
        .cookie = job->cookie,
        .n_bytes = err == 0 && !job->is_removal ? d->kind.n_ranks * d->kind.shard_bytes : 0,
        .us = clock_now_us() - start_us,
        .is_read = job->is_read,
        .is_removal = job->is_removal,
        .ok = err == 0 || err == EEXIST};
    finish(d, &done);
}

static bool pop_read(disk_tier *d, disk_tier_job *job)
{
    pthread_mutex_lock(&d->reads.m);
    bool is_there = ring_pop(d->reads.jobs, job);
    pthread_mutex_unlock(&d->reads.m);
    return is_there;
}

/* With writes.m held. */
static bool must_wait(const disk_tier *d, const disk_tier_turn *turn)
{
    for (int i = 0; i < DISK_TIER_MAX_THREADS; i++) {
        const disk_tier_turn *other = &d->turns[i];
        if (other->number != 0 && other->number < turn->number &&
            other->key.group_id == turn->key.group_id &&
            memcmp(&other->key.hash, &turn->key.hash, sizeof(turn->key.hash)) == 0)
            return true;
    }
    return false;
}

/* Followed by end_turn. Who waits, waits for earlier ones only, so somebody always gets on. */
static bool pop_write(io_thread *t, disk_tier_job *job)
{
    disk_tier *d = t->d;
    pthread_mutex_lock(&d->writes.m);
    bool is_there = ring_pop(d->writes.jobs, job);
    if (is_there) {
        *t->turn = (disk_tier_turn){.key = job->key, .number = ++d->n_turns};
        while (must_wait(d, t->turn))
            pthread_cond_wait(&d->turn_ended, &d->writes.m);
    }
    pthread_mutex_unlock(&d->writes.m);
    return is_there;
}

static void end_turn(io_thread *t)
{
    disk_tier *d = t->d;
    pthread_mutex_lock(&d->writes.m);
    t->turn->number = 0;
    pthread_cond_broadcast(&d->turn_ended);
    pthread_mutex_unlock(&d->writes.m);
}

static bool do_next(io_thread *t)
{
    disk_tier_job job;
    if (pop_read(t->d, &job)) {
        do_job(t, &job);
        return true;
    }
    if (t->turn == NULL || !pop_write(t, &job))
        return false;
    do_job(t, &job);
    end_turn(t);
    return true;
}

/* Removals are still carried out at the end, writes are not. */
static void do_last_removals(io_thread *t)
{
    disk_tier_job job;
    while (t->turn != NULL && pop_write(t, &job)) {
        if (job.is_removal)
            do_job(t, &job);
        end_turn(t);
    }
}

static void run(disk_tier *d, disk_tier_queue *own, disk_tier_turn *turn)
{
    io_thread t = {.d = d, .turn = turn};
    t.header = mem_alloc_aligned(d->header_bytes, DISK_BLOCK_ALIGN);
    t.shards = mem_calloc((size_t)d->kind.n_ranks, sizeof(*t.shards));
    PGD_ASSERT(t.header != NULL && t.shards != NULL);
    while (!atomic_load_explicit(&d->stop, memory_order_relaxed)) {
        if (!do_next(&t))
            while (sem_wait(&own->n_jobs) != 0)
                ;
    }
    do_last_removals(&t);
    mem_free_aligned(t.header, d->header_bytes);
    mem_free(t.shards);
}

void disk_tier__run_reads(void *arg)
{
    disk_tier *d = arg;
    run(d, &d->reads, NULL);
}

void disk_tier__run_writes(void *arg)
{
    disk_tier *d = arg;
    pthread_mutex_lock(&d->writes.m);
    disk_tier_turn *turn = &d->turns[d->n_writers++];
    pthread_mutex_unlock(&d->writes.m);
    run(d, &d->writes, turn);
}
