/* Two rings for each direction: jobs, and the blocks of all of them. The main thread adds at the end,
 * the direction's thread takes from the front, and what lies between stays as it is, so that the
 * thread reads it without the lock.
 *
 *   jobs     | ended | running | waiting ... |        n_ended <= n_added, both only grow
 *   blocks   |       | its blocks | ...      |
 *
 * A job leaves the rings before its end is told: whoever is told may use its id and blocks again at
 * once. Which device blocks are under way is counted, since a transfer that meets another one in the
 * same block would put a wrong content under a right name: such a message is refused.
 * Rejected: one thread for both directions, which makes a load wait for the stores of a long prompt.
 */
#include "worker/kv_transfer.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include <sys/resource.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/thread.h"
#include "proto/kv_region.h"

#define TELL_AGAIN_NS 1000000
#define STORE_NICE    10 /* few wait for a store, and a step that does leaves its CPUs meanwhile */

typedef struct block_ref {
    uint64_t tag;
    block_id device;
    int32_t medium;
} block_ref;

typedef struct transfer_job {
    uint64_t id;
    uint64_t first; /* of its blocks, counted from the start of all */
    int32_t n_blocks;
    copy_event ready; /* the compute that comes before it */
} transfer_job;

typedef struct direction {
    kv_transfer *t;
    copy_stream stream;
    pthread_t thread;
    bool is_started;
    pthread_cond_t work;
    transfer_job jobs[KV_TRANSFER_MAX_PENDING];
    uint64_t n_added, n_ended; /* jobs; guarded by mutex */
    block_ref *blocks;         /* [n_blocks] of the pool */
    uint64_t end_block;        /* main thread */
    uint64_t n_ended_blocks;   /* guarded by mutex */
    int32_t *n_under_way;      /* [n_blocks], guarded by mutex: transfers of each device block */
    uint8_t *staging;          /* [depth, shard_bytes] */
    copy_event copied[COPY_MAX_DEPTH];
    int32_t n_events; /* made: of jobs, then copied */
} direction;

struct kv_transfer {
    kv_transfer_opts opts;
    kv_transfer_slot slots[PGD_MAX_KV_LAYERS];
    kv_region region;
    int32_t n_blocks; /* of the pool, null block included */
    pthread_mutex_t mutex;
    pthread_cond_t ended;
    atomic_bool is_stopping;
    atomic_bool has_failed; /* the device */
    direction store, load;
};

/* --- copies: the thread of a direction -------------------------------------------------------- */

static const block_ref *ref_at(const direction *d, uint64_t idx)
{
    return &d->blocks[idx % (uint64_t)d->t->n_blocks];
}

static uint8_t *stage_of(const direction *d, int32_t place)
{
    return d->staging + (size_t)place * (size_t)d->t->region.shape.shard_bytes;
}

/* Between a block's pages on the device and the bytes of a shard. */
static pgd_err copy_pages(direction *d, block_id block, uint8_t *stage)
{
    const kv_transfer *t = d->t;
    copy_device *device = t->opts.device;
    size_t at = 0;
    for (int32_t s = 0; s < t->opts.n_slots; s++) {
        size_t n_bytes = t->slots[s].page_bytes;
        uint8_t *page = t->slots[s].pages + (size_t)block * n_bytes;
        bool is_store = d->stream == COPY_STREAM_STORE;
        PGD_TRY(device->vtbl->copy(device, d->stream, is_store ? stage + at : page,
                                   is_store ? page : stage + at, n_bytes));
        at += n_bytes;
    }
    return PGD_OK;
}

static bool note_failure(direction *d, pgd_err err)
{
    if (err != PGD_OK && !atomic_exchange(&d->t->has_failed, true))
        log_error("worker", "copies of KV blocks failed: %s", pgd_err_text(err));
    return err == PGD_OK;
}

/* False when the block, and with it those behind, cannot be moved. */
static bool begin_block(direction *d, const block_ref *ref, int32_t place)
{
    const kv_transfer *t = d->t;
    copy_device *device = t->opts.device;
    uint8_t *stage = stage_of(d, place);
    if (d->stream == COPY_STREAM_LOAD) {
        memcpy(stage, kv_region_get_shard(&t->region, ref->medium, t->opts.rank),
               (size_t)t->region.shape.shard_bytes);
        if (!kv_region_holds(&t->region, ref->medium, t->opts.rank, ref->tag, stage)) {
            log_debug("worker", "medium block %" PRId32 " does not hold what it should",
                      ref->medium);
            return false;
        }
    }
    pgd_err err = copy_pages(d, ref->device, stage);
    if (err == PGD_OK)
        err = device->vtbl->record(device, &d->copied[place], d->stream);
    return note_failure(d, err);
}

static bool end_block(direction *d, const block_ref *ref, int32_t place)
{
    const kv_transfer *t = d->t;
    copy_device *device = t->opts.device;
    if (!note_failure(d, device->vtbl->sync(device, &d->copied[place])))
        return false;
    if (d->stream == COPY_STREAM_STORE) {
        const uint8_t *stage = stage_of(d, place);
        memcpy(kv_region_get_shard(&t->region, ref->medium, t->opts.rank), stage,
               (size_t)t->region.shape.shard_bytes);
        kv_region_seal(&t->region, ref->medium, t->opts.rank, ref->tag, stage);
    }
    (void)__atomic_fetch_add(t->opts.progress, 1, __ATOMIC_RELAXED);
    return true;
}

/* Leading blocks that were moved. Up to depth of them are under way at a time. */
static int32_t move_blocks(direction *d, const transfer_job *job)
{
    copy_device *device = d->t->opts.device;
    int32_t n_begun = 0;
    int32_t n_moved = 0;
    bool is_good = note_failure(d, device->vtbl->wait(device, d->stream, &job->ready));
    while (n_moved < job->n_blocks) {
        if (is_good && n_begun < job->n_blocks && n_begun - n_moved < device->depth &&
            !atomic_load_explicit(&d->t->is_stopping, memory_order_relaxed)) {
            is_good =
                begin_block(d, ref_at(d, job->first + (uint64_t)n_begun), n_begun % device->depth);
            n_begun += is_good;
        } else if (n_moved < n_begun && end_block(d, ref_at(d, job->first + (uint64_t)n_moved),
                                                  n_moved % device->depth)) {
            n_moved++;
        } else {
            break;
        }
    }
    return n_moved;
}

static kv_transfer_done run_job(direction *d, const transfer_job *job)
{
    uint64_t start_us = clock_now_us();
    int32_t n_moved = move_blocks(d, job);
    bool is_partial = d->stream == COPY_STREAM_LOAD || n_moved == job->n_blocks;
    return (kv_transfer_done){.job_id = job->id,
                              .n_good = is_partial ? n_moved : 0,
                              .us = (uint32_t)PGD_MIN(clock_now_us() - start_us, UINT32_MAX),
                              .n_bytes = (uint64_t)n_moved * d->t->region.shape.shard_bytes};
}

static void end_job(direction *d, const transfer_job *job)
{
    kv_transfer *t = d->t;
    pthread_mutex_lock(&t->mutex);
    for (int32_t i = 0; i < job->n_blocks; i++)
        d->n_under_way[ref_at(d, job->first + (uint64_t)i)->device]--;
    d->n_ended_blocks += (uint64_t)job->n_blocks;
    d->n_ended++;
    pthread_cond_broadcast(&t->ended);
    pthread_mutex_unlock(&t->mutex);
}

static void tell(direction *d, const kv_transfer_done *done)
{
    const kv_transfer *t = d->t;
    while (!atomic_load(&t->is_stopping) && !t->opts.on_done(t->opts.arg, done))
        nanosleep(&(struct timespec){.tv_nsec = TELL_AGAIN_NS}, NULL);
}

/* NULL: the end. */
static const transfer_job *next_job(direction *d)
{
    kv_transfer *t = d->t;
    pthread_mutex_lock(&t->mutex);
    while (d->n_ended == d->n_added && !atomic_load(&t->is_stopping))
        pthread_cond_wait(&d->work, &t->mutex);
    const transfer_job *job = &d->jobs[d->n_ended % KV_TRANSFER_MAX_PENDING];
    pthread_mutex_unlock(&t->mutex);
    return atomic_load(&t->is_stopping) ? NULL : job;
}

static void run(void *arg)
{
    direction *d = arg;
    const transfer_job *job;
    if (d->stream == COPY_STREAM_STORE)
        (void)setpriority(PRIO_PROCESS, (id_t)gettid(), STORE_NICE);
    while ((job = next_job(d)) != NULL) {
        kv_transfer_done done = run_job(d, job);
        end_job(d, job);
        tell(d, &done);
    }
}

/* --- a step: the main thread ------------------------------------------------------------------ */

/* Position among all jobs of the direction; false: it is not under way. */
static bool find_job(uint64_t *idx, const direction *d, uint64_t job_id)
{
    for (*idx = d->n_ended; *idx < d->n_added; (*idx)++)
        if (d->jobs[*idx % KV_TRANSFER_MAX_PENDING].id == job_id)
            return true;
    return false;
}

static pgd_err check_job(const direction *d, const kv_transfer_msg *m, pgd_why *why)
{
    const kv_transfer *t = d->t;
    uint64_t idx;
    if (find_job(&idx, &t->store, m->job_id) || find_job(&idx, &t->load, m->job_id))
        return pgd_fail(why, PGD_EPROTO,
                        "transfer %" PRIu64 ": expected a new id, got one that is under way",
                        m->job_id);
    uint64_t n_blocks = d->end_block - d->n_ended_blocks + (uint64_t)m->n_blocks;
    if (d->n_added - d->n_ended == KV_TRANSFER_MAX_PENDING || n_blocks > (uint64_t)t->n_blocks)
        return pgd_fail(why, PGD_EPROTO,
                        "transfer %" PRIu64 ": expected at most %d transfers with %" PRId32
                        " blocks in a direction, got one more with %" PRIu64,
                        m->job_id, KV_TRANSFER_MAX_PENDING, t->n_blocks, n_blocks);
    return PGD_OK;
}

static pgd_err check_block(const direction *d, const kv_transfer_msg *m, int32_t i, pgd_why *why)
{
    const kv_transfer *t = d->t;
    block_id block = m->device_blocks[i];
    if (block < 1 || block >= t->n_blocks || m->medium_blocks[i] < 0 ||
        m->medium_blocks[i] >= t->region.shape.n_blocks)
        return pgd_fail(why, PGD_EPROTO,
                        "transfer %" PRIu64 ": expected a device block 1..%" PRId32
                        " and a medium block 0..%" PRId32 ", got %" PRId32 " and %" PRId32,
                        m->job_id, t->n_blocks - 1, t->region.shape.n_blocks - 1, block,
                        m->medium_blocks[i]);
    bool is_taken = t->load.n_under_way[block] > 0 ||
                    (d->stream == COPY_STREAM_LOAD && t->store.n_under_way[block] > 0);
    if (is_taken)
        return pgd_fail(why, PGD_EPROTO,
                        "transfer %" PRIu64 ": expected a block that no other one moves, got "
                        "device block %" PRId32,
                        m->job_id, block);
    return PGD_OK;
}

/* All of it or nothing. */
static pgd_err add_blocks(direction *d, const kv_transfer_msg *m, pgd_why *why)
{
    for (int32_t i = 0; i < m->n_blocks; i++) {
        pgd_err err = check_block(d, m, i, why);
        if (err != PGD_OK) {
            while (i-- > 0)
                d->n_under_way[m->device_blocks[i]]--;
            return err;
        }
        d->n_under_way[m->device_blocks[i]]++;
    }
    for (int32_t i = 0; i < m->n_blocks; i++)
        d->blocks[(d->end_block + (uint64_t)i) % (uint64_t)d->t->n_blocks] =
            (block_ref){m->tags[i], m->device_blocks[i], m->medium_blocks[i]};
    return PGD_OK;
}

static pgd_err add_job(direction *d, const kv_transfer_msg *m, pgd_why *why)
{
    copy_device *device = d->t->opts.device;
    PGD_TRY(check_job(d, m, why));
    transfer_job *job = &d->jobs[d->n_added % KV_TRANSFER_MAX_PENDING];
    PGD_TRY(device->vtbl->record(device, &job->ready, COPY_STREAM_COMPUTE));
    PGD_TRY(add_blocks(d, m, why));
    job->id = m->job_id;
    job->first = d->end_block;
    job->n_blocks = m->n_blocks;
    d->end_block += (uint64_t)m->n_blocks;
    d->n_added++;
    pthread_cond_signal(&d->work);
    return PGD_OK;
}

static void flush_job(kv_transfer *t, uint64_t job_id)
{
    uint64_t idx;
    if (!find_job(&idx, &t->store, job_id))
        return;
    while (t->store.n_ended <= idx && !atomic_load(&t->is_stopping))
        pthread_cond_wait(&t->ended, &t->mutex);
}

static pgd_err check_zeroed(const kv_transfer *t, const scheduler_output *in, pgd_why *why)
{
    for (int32_t i = 0; i < in->n_blocks_to_zero; i++) {
        block_id block = in->blocks_to_zero[i];
        if (block >= 0 && block < t->n_blocks &&
            (t->store.n_under_way[block] > 0 || t->load.n_under_way[block] > 0))
            return pgd_fail(why, PGD_EPROTO,
                            "step %" PRIu64 ": expected blocks to zero that no transfer moves, "
                            "got %" PRId32,
                            in->step_id, block);
    }
    return PGD_OK;
}

static pgd_err take_up(kv_transfer *t, const scheduler_output *in, pgd_why *why)
{
    for (int32_t i = 0; i < in->n_transfers; i++)
        if (in->transfers[i].kind == KV_TRANSFER_STORE)
            PGD_TRY(add_job(&t->store, &in->transfers[i], why));
    for (int32_t i = 0; i < in->n_transfers; i++)
        if (in->transfers[i].kind == KV_TRANSFER_FLUSH)
            flush_job(t, in->transfers[i].job_id);
    for (int32_t i = 0; i < in->n_transfers; i++)
        if (in->transfers[i].kind == KV_TRANSFER_LOAD)
            PGD_TRY(add_job(&t->load, &in->transfers[i], why));
    return check_zeroed(t, in, why);
}

pgd_err kv_transfer_begin_step(kv_transfer *t, const scheduler_output *in, pgd_why *why)
{
    if (t == NULL && in->n_transfers > 0)
        return pgd_fail(why, PGD_EPROTO,
                        "step %" PRIu64 ": expected no transfers without an offload tier, got "
                        "%" PRId32,
                        in->step_id, in->n_transfers);
    if (t == NULL)
        return PGD_OK;
    if (atomic_load(&t->has_failed))
        return pgd_fail(why, PGD_EDEVICE, "copies of KV blocks failed");
    if (in->n_transfers == 0 && in->n_blocks_to_zero == 0)
        return PGD_OK;
    pthread_mutex_lock(&t->mutex);
    pgd_err err = take_up(t, in, why);
    pthread_mutex_unlock(&t->mutex);
    return err;
}

/* --- life ------------------------------------------------------------------------------------- */

static pgd_err map_region(kv_transfer *t, const kv_config_msg *m, pgd_why *why)
{
    kv_region_shape shape = {m->offload_blocks, m->offload_n_ranks,
                             kv_layout_block_bytes(&m->layout)};
    pgd_why reason = {{0}};
    if (t->opts.rank >= m->offload_n_ranks)
        return pgd_fail(why, PGD_EPROTO,
                        "KV offload tier: expected shards for rank %" PRId32 ", got %" PRId32,
                        t->opts.rank, m->offload_n_ranks);
    pgd_err err = kv_region_open(&t->region, m->offload_path, &shape, &reason);
    if (err == PGD_OK)
        return PGD_OK;
    return pgd_fail(why, err,
                    "cannot use the KV offload tier at %.200s: %s; engine and worker must run on "
                    "one host, as one user and from one build, or without --kv-offload-memory",
                    m->offload_path, pgd_why_text(&reason, err));
}

static pgd_err init_direction(direction *d, kv_transfer *t, copy_stream stream)
{
    copy_device *device = t->opts.device;
    size_t n_bytes;
    d->t = t;
    d->stream = stream;
    d->blocks = mem_calloc((size_t)t->n_blocks, sizeof(*d->blocks));
    d->n_under_way = mem_calloc((size_t)t->n_blocks, sizeof(*d->n_under_way));
    if (d->blocks == NULL || d->n_under_way == NULL)
        return PGD_ENOMEM;
    if (mem_mul(&n_bytes, (size_t)t->region.shape.shard_bytes, (size_t)device->depth))
        d->staging = mem_alloc_aligned(n_bytes, 64);
    if (d->staging == NULL)
        return PGD_ENOMEM;
    for (int32_t i = 0; i < KV_TRANSFER_MAX_PENDING + device->depth; i++, d->n_events++)
        PGD_TRY(device->vtbl->event_init(device, i < KV_TRANSFER_MAX_PENDING
                                                     ? &d->jobs[i].ready
                                                     : &d->copied[i - KV_TRANSFER_MAX_PENDING]));
    return PGD_OK;
}

static void deinit_direction(direction *d)
{
    if (d->t == NULL)
        return;
    copy_device *device = d->t->opts.device;
    for (int32_t i = 0; i < d->n_events; i++)
        device->vtbl->event_deinit(device, i < KV_TRANSFER_MAX_PENDING
                                               ? &d->jobs[i].ready
                                               : &d->copied[i - KV_TRANSFER_MAX_PENDING]);
    mem_free_aligned(d->staging, (size_t)d->t->region.shape.shard_bytes * (size_t)device->depth);
    mem_free(d->n_under_way);
    mem_free(d->blocks);
}

static pgd_err start_direction(direction *d, const char *name)
{
    pgd_err err = thread_start(&d->thread, name, run, d);
    d->is_started = err == PGD_OK;
    return err;
}

static pgd_err create_parts(kv_transfer *t, const kv_config_msg *m, pgd_why *why)
{
    uint64_t shard_bytes = 0;
    for (int32_t s = 0; s < t->opts.n_slots; s++) {
        t->slots[s] = t->opts.slots[s];
        shard_bytes += t->slots[s].page_bytes;
    }
    t->opts.slots = NULL;
    t->opts.config = NULL;
    PGD_TRY(map_region(t, m, why));
    PGD_ASSERTF(shard_bytes == t->region.shape.shard_bytes,
                "KV transfer: slots of %llu bytes, shards of %llu", (unsigned long long)shard_bytes,
                (unsigned long long)t->region.shape.shard_bytes);
    pgd_err err = init_direction(&t->store, t, COPY_STREAM_STORE);
    if (err == PGD_OK)
        err = init_direction(&t->load, t, COPY_STREAM_LOAD);
    if (err == PGD_OK)
        err = start_direction(&t->store, "kv-store");
    if (err == PGD_OK)
        err = start_direction(&t->load, "kv-load");
    return err == PGD_OK ? PGD_OK : pgd_fail(why, err, "KV transfers: %s", pgd_err_text(err));
}

pgd_err kv_transfer_create(kv_transfer **out, const kv_transfer_opts *opts, pgd_why *why)
{
    *out = NULL;
    if (opts->config->offload_path[0] == '\0')
        return PGD_OK;
    PGD_ASSERT(opts->n_slots >= 1 && opts->n_slots <= PGD_MAX_KV_LAYERS &&
               opts->device->depth >= 1 && opts->device->depth <= COPY_MAX_DEPTH);
    kv_transfer *t = mem_calloc(1, sizeof(*t));
    if (t == NULL)
        return pgd_fail(why, PGD_ENOMEM, "KV transfers: out of memory");
    t->opts = *opts;
    t->n_blocks = opts->config->n_blocks;
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->ended, NULL);
    pthread_cond_init(&t->store.work, NULL);
    pthread_cond_init(&t->load.work, NULL);
    pgd_err err = create_parts(t, opts->config, why);
    if (err != PGD_OK) {
        kv_transfer_destroy(t);
        return err;
    }
    *out = t;
    return PGD_OK;
}

static void join(direction *d)
{
    if (d->is_started)
        thread_join(d->thread);
    d->is_started = false;
}

void kv_transfer_stop(kv_transfer *t)
{
    if (t == NULL)
        return;
    pthread_mutex_lock(&t->mutex);
    atomic_store(&t->is_stopping, true);
    pthread_cond_signal(&t->store.work);
    pthread_cond_signal(&t->load.work);
    pthread_mutex_unlock(&t->mutex);
    join(&t->store);
    join(&t->load);
}

void kv_transfer_destroy(kv_transfer *t)
{
    if (t == NULL)
        return;
    kv_transfer_stop(t);
    deinit_direction(&t->store);
    deinit_direction(&t->load);
    kv_region_unmap(&t->region);
    pthread_cond_destroy(&t->load.work);
    pthread_cond_destroy(&t->store.work);
    pthread_cond_destroy(&t->ended);
    pthread_mutex_destroy(&t->mutex);
    mem_free(t);
}
