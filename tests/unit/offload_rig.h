/* A scheduler with the offload connector, a worker whose blocks are what they hold, and a disk tier in
 * memory (in place of engine/offload/disk_tier), all driven by hand.
 *
 * A block's content is the tag of its key, or one of the words below. Copies happen when their message
 * comes (eager: a store that is sent too early copies what is not yet there) or as late as they may
 * (lazy: one that is not flushed in time copies what was written since).
 * Thread:  one test at a time
 */
#ifndef TESTS_UNIT_OFFLOAD_RIG_H
#define TESTS_UNIT_OFFLOAD_RIG_H

#include "engine/offload/offload_connector_internal.h"
#include "tests/unit/scheduler_fixture.h"

#define RIG_BLOCKS       256
#define RIG_HOST         256
#define RIG_JOBS         64
#define RIG_DISK         512
#define RIG_JOBS_ON_DISK (OFFLOAD_REMOVALS + 64)

#define RIG_PARTIAL 1
#define RIG_POISON  2
#define RIG_UNKNOWN 3 /* full, of tokens that the engine has not seen yet */

typedef struct rig_job {
    kv_transfer_kind kind;
    uint64_t id; /* 0 = free */
    int32_t n_blocks;
    bool is_copied;
    int32_t n_told; /* ranks */
    uint64_t
        step_id; /* whose message brought it: it is told of after the results of those before */
    block_id device[RIG_BLOCKS];
    int32_t medium[RIG_BLOCKS];
    uint64_t tags[RIG_BLOCKS];
} rig_job;

struct disk_tier {
    int32_t n_files;
    offload_key files[RIG_DISK];
    uint64_t contents[RIG_DISK];
    int32_t n_jobs;
    struct {
        offload_key key;
        int32_t medium;
        uint64_t cookie;
        bool is_read;
        bool is_removal;
    } jobs[RIG_JOBS_ON_DISK];
    int32_t max_jobs; /* without removals */
    int32_t n_removals;
    bool fails; /* reads do */
    bool refuses_removal;
    bool is_frozen;
    bool is_stuck; /* says so */
    int n_reads, n_writes, n_clears;
};

typedef struct rig_outcome {
    bool fails[FIX_MAX_REQS]; /* by place in the step */
} rig_outcome;

typedef struct rig {
    fix f;
    offload_connector *c;
    offload_manager *m;
    kv_connector ops;
    bool is_eager;
    int32_t n_ranks;
    int32_t n_groups;
    kv_group_spec groups[PGD_MAX_KV_GROUPS];
    uint64_t device[RIG_BLOCKS];
    uint64_t host[RIG_HOST];
    rig_job jobs[RIG_JOBS];
    uint64_t fail_id; /* its next step fails; UINT64_MAX = none */
    rig_outcome outcomes[SCHEDULER_MAX_STEPS_IN_FLIGHT];
    int32_t n_outcomes;
    int n_loads, n_stores, n_flushes;
    uint64_t n_loaded_blocks;
    disk_tier disk;
} rig;

static rig g;

/* --- the disk tier ------------------------------------------------------------------------------- */

static int32_t rig_file(const disk_tier *d, const offload_key *key)
{
    for (int32_t i = 0; i < d->n_files; i++) {
        if (d->files[i].group_id == key->group_id &&
            memcmp(&d->files[i].hash, &key->hash, sizeof key->hash) == 0)
            return i;
    }
    return -1;
}

bool disk_tier_lookup(const disk_tier *d, const offload_key *key)
{
    return rig_file(d, key) >= 0;
}

bool disk_tier_is_stuck(const disk_tier *d, bool is_read)
{
    return is_read && d->is_stuck;
}

void disk_tier_touch(disk_tier *d, const offload_key *keys, int32_t n_keys)
{
    (void)d, (void)keys, (void)n_keys;
}

/* What is being removed is neither read nor written. */
static bool rig_disk_add(disk_tier *d, const offload_key *key, int32_t medium, uint64_t cookie,
                         bool is_read)
{
    for (int32_t i = 0; i < d->n_jobs; i++) {
        if (d->jobs[i].is_removal && memcmp(&d->jobs[i].key, key, sizeof *key) == 0)
            fail_msg("%s of a block that is being removed", is_read ? "read" : "write");
    }
    if (d->n_jobs - d->n_removals >= d->max_jobs)
        return false;
    d->jobs[d->n_jobs].key = *key;
    d->jobs[d->n_jobs].medium = medium;
    d->jobs[d->n_jobs].cookie = cookie;
    d->jobs[d->n_jobs].is_removal = false;
    d->jobs[d->n_jobs++].is_read = is_read;
    return true;
}

bool disk_tier_remove(disk_tier *d, const offload_key *key, uint64_t cookie)
{
    assert_true(d->n_jobs < RIG_JOBS_ON_DISK);
    d->jobs[d->n_jobs].key = *key;
    d->jobs[d->n_jobs].cookie = cookie;
    d->jobs[d->n_jobs].is_read = false;
    d->jobs[d->n_jobs++].is_removal = true;
    d->n_removals++;
    return true;
}

void disk_tier_clear(disk_tier *d)
{
    assert_int_equal(d->n_jobs, 0);
    d->n_files = 0;
    d->n_clears++;
}

bool disk_tier_write(disk_tier *d, const offload_key *key, int32_t medium_block, uint64_t cookie)
{
    return rig_disk_add(d, key, medium_block, cookie, false);
}

bool disk_tier_read(disk_tier *d, const offload_key *key, int32_t medium_block, uint64_t cookie)
{
    return rig_disk_add(d, key, medium_block, cookie, true);
}

bool disk_tier_next_done(disk_tier *d, disk_tier_done *out)
{
    if (d->n_jobs == 0 || d->is_frozen)
        return false;
    int32_t file = rig_file(d, &d->jobs[0].key);
    *out = (disk_tier_done){.cookie = d->jobs[0].cookie,
                            .is_read = d->jobs[0].is_read,
                            .is_removal = d->jobs[0].is_removal,
                            .ok = true};
    if (d->jobs[0].is_removal) {
        d->n_removals--;
        out->ok = !d->refuses_removal;
        if (out->ok && file >= 0) {
            d->files[file] = d->files[--d->n_files];
            d->contents[file] = d->contents[d->n_files];
        }
    } else if (d->jobs[0].is_read) {
        d->n_reads++;
        out->ok = file >= 0 && !d->fails;
        if (out->ok)
            g.host[d->jobs[0].medium] = d->contents[file];
        else
            g.host[d->jobs[0].medium] = 0;
    } else if (file < 0 && d->n_files < RIG_DISK) {
        d->n_writes++;
        d->files[d->n_files] = d->jobs[0].key;
        d->contents[d->n_files++] = g.host[d->jobs[0].medium];
    }
    memmove(d->jobs, d->jobs + 1, (size_t)--d->n_jobs * sizeof *d->jobs);
    return true;
}

void disk_tier_get_stats(disk_tier_stats *out, const disk_tier *d)
{
    *out = (disk_tier_stats){.n_files = (uint64_t)d->n_files};
}

/* --- the worker ---------------------------------------------------------------------------------- */

static void rig_copy(rig_job *job)
{
    for (int32_t i = 0; !job->is_copied && i < job->n_blocks; i++) {
        uint64_t *device = &g.device[job->device[i]], *host = &g.host[job->medium[i]];
        if (job->kind == KV_TRANSFER_STORE) {
            if (*device != job->tags[i] && *device != RIG_POISON)
                fail_msg("block %d holds %llx, not %llx", job->device[i],
                         (unsigned long long)*device, (unsigned long long)job->tags[i]);
            *host = *device;
        } else {
            if (*host != job->tags[i])
                fail_msg("host block %d holds %llx, not %llx", job->medium[i],
                         (unsigned long long)*host, (unsigned long long)job->tags[i]);
            *device = *host;
        }
    }
    job->is_copied = true;
}

static bool rig_may_tell(const rig_job *job)
{
    return job->id != 0 &&
           (g.f.s->n_records == 0 || scheduler__record_at(g.f.s, 0)->step_id >= job->step_id);
}

static rig_job *rig_find(uint64_t id)
{
    for (int i = 0; i < RIG_JOBS; i++) {
        if (g.jobs[i].id == id)
            return &g.jobs[i];
    }
    return NULL;
}

static void rig_take_job(const kv_transfer_msg *msg)
{
    rig_job *job = rig_find(0);
    assert_non_null(job);
    *job = (rig_job){.kind = msg->kind,
                     .id = msg->job_id,
                     .n_blocks = msg->n_blocks,
                     .step_id = g.f.out.step_id};
    assert_true(msg->n_blocks > 0 && msg->n_blocks <= RIG_BLOCKS);
    for (int32_t i = 0; i < msg->n_blocks; i++) {
        job->device[i] = msg->device_blocks[i];
        job->medium[i] = msg->medium_blocks[i];
        job->tags[i] = msg->tags[i];
        if (msg->kind == KV_TRANSFER_LOAD && !g.is_eager)
            g.device[job->device[i]] = 0;
    }
    g.n_loads += msg->kind == KV_TRANSFER_LOAD;
    g.n_stores += msg->kind == KV_TRANSFER_STORE;
    g.n_loaded_blocks += msg->kind == KV_TRANSFER_LOAD ? (uint64_t)msg->n_blocks : 0;
    if (g.is_eager)
        rig_copy(job);
}

static void rig_take_message(const scheduler_output *out)
{
    for (int32_t i = 0; i < out->n_transfers; i++) {
        if (out->transfers[i].kind == KV_TRANSFER_STORE)
            rig_take_job(&out->transfers[i]);
    }
    for (int32_t i = 0; i < out->n_transfers; i++) {
        rig_job *job = rig_find(out->transfers[i].job_id);
        if (out->transfers[i].kind != KV_TRANSFER_FLUSH)
            continue;
        g.n_flushes++;
        assert_int_equal(out->transfers[i].n_blocks, 0);
        if (job != NULL)
            rig_copy(job);
    }
    for (int32_t i = 0; i < out->n_transfers; i++) {
        if (out->transfers[i].kind == KV_TRANSFER_LOAD)
            rig_take_job(&out->transfers[i]);
    }
}

static uint64_t rig_tag(const request *r, int32_t group, int32_t idx)
{
    int32_t last = (idx + 1) * (g.groups[group].block_size / g.f.block_size) - 1;
    if (last >= r->n_block_hashes)
        return RIG_UNKNOWN;
    offload_key key = {.hash = r->block_hashes[last], .group_id = group};
    return offload_key_tag(&key);
}

/* Reads what the request has, writes what it computes; true when it has read or made nonsense. */
static bool rig_compute(const step_entry *e)
{
    block_ids_msg table;
    bool fails = e->request_id == g.fail_id;
    kv_manager_get_table(&table, g.f.s->kv, e->r);
    for (int32_t k = 0; k < g.n_groups; k++) {
        int32_t bs = g.groups[k].block_size;
        int32_t end = e->n_computed + e->n_tokens;
        if (g.groups[k].ops->is_of_encoder)
            continue;
        for (int32_t i = kv_group_ops_skipped_blocks(&g.groups[k], e->n_computed);
             i < e->n_computed / bs; i++) {
            uint64_t want = rig_tag(e->r, k, i), got = g.device[table.ids[k][i]];
            fails = fails || got == RIG_POISON;
            if (got != want && got != RIG_POISON && got != RIG_UNKNOWN)
                fail_msg("request %d reads %llx in block %d of group %d, not %llx", (int)e->r->id,
                         (unsigned long long)got, i, k, (unsigned long long)want);
        }
        for (int32_t i = e->n_computed / bs; i * bs < end; i++)
            g.device[table.ids[k][i]] = (i + 1) * bs <= end ? rig_tag(e->r, k, i) : RIG_PARTIAL;
    }
    for (int32_t k = 0; fails && k < g.n_groups; k++) {
        int32_t bs = g.groups[k].block_size;
        int32_t n = g.groups[k].ops->is_of_encoder ? 0 : e->n_computed + e->n_tokens;
        for (int32_t i = e->n_computed / bs; i * bs < n; i++)
            g.device[table.ids[k][i]] = RIG_POISON;
    }
    return fails;
}

static bool rig_schedule(void)
{
    if (!fix_schedule(&g.f))
        return false;
    offload_connector_check(g.c);
    rig_take_message(&g.f.out);
    const step_record *record = scheduler__record_at(g.f.s, g.f.s->n_records - 1);
    rig_outcome *o = &g.outcomes[g.n_outcomes++];
    for (int32_t i = 0; i < record->n_entries; i++)
        o->fails[i] = rig_compute(&record->entries[i]);
    g.fail_id = UINT64_MAX;
    return true;
}

static void rig_answer(void)
{
    static request_result_msg results[FIX_MAX_REQS];
    const step_record *record = scheduler__record_at(g.f.s, 0);
    step_result result = {.step_id = record->step_id, .results = results};
    for (int32_t i = 0; i < record->n_entries; i++) {
        const step_entry *e = &record->entries[i];
        request_result_msg *res = &results[result.n_results];
        bool fails = g.outcomes[0].fails[i];
        if (!e->is_sampled && !fails)
            continue;
        *res = (request_result_msg){.request_id = e->request_id, .request_epoch = e->epoch};
        res->error = fails ? REQUEST_ERROR_NAN_LOGITS : REQUEST_ERROR_NONE;
        res->n_tokens = !fails;
        res->tokens[0] = 7;
        result.n_results++;
    }
    memmove(g.outcomes, g.outcomes + 1, (size_t)--g.n_outcomes * sizeof g.outcomes[0]);
    assert_int_equal(scheduler_update(g.f.s, &result), PGD_OK);
    scheduler_check(g.f.s);
}

static bool rig_step(void)
{
    bool is_step = rig_schedule();
    if (is_step)
        rig_answer();
    return is_step;
}

/* A rank reports; n_good -1 = all. */
static void rig_tell(rig_job *job, int32_t rank, int32_t n_good)
{
    kv_transfer_done done = {.job_id = job->id, .n_good = n_good < 0 ? job->n_blocks : n_good};
    rig_copy(job);
    for (int32_t i = done.n_good; i < job->n_blocks && job->kind == KV_TRANSFER_LOAD; i++)
        g.device[job->device[i]] = 0;
    if (++job->n_told == g.n_ranks)
        job->id = 0;
    assert_int_equal(scheduler_transfers_done(g.f.s, rank, &done, 1), PGD_OK);
    offload_connector_check(g.c);
}

static inline rig_job *rig_find_kind(kv_transfer_kind kind)
{
    for (int i = 0; i < RIG_JOBS; i++) {
        if (g.jobs[i].id != 0 && g.jobs[i].kind == kind)
            return &g.jobs[i];
    }
    return NULL;
}

/* All that is under way ends well. */
static void rig_settle(void)
{
    for (int i = 0; i < RIG_JOBS; i++) {
        while (rig_may_tell(&g.jobs[i]))
            rig_tell(&g.jobs[i], g.jobs[i].n_told, -1);
    }
    offload_connector_pump(g.c);
}

/* Everybody runs to the end. */
static void rig_finish(void)
{
    for (int i = 0; scheduler_has_work(g.f.s); i++) {
        if (i > 3000)
            fail_msg("no end: %d running, %d waiting", g.f.s->n_running,
                     request_queue_n_requests(g.f.s->waiting));
        (void)rig_step();
        rig_settle();
    }
}

static inline void rig_lose_worker(void)
{
    scheduler_reset_worker(g.f.s);
    scheduler_check(g.f.s);
    offload_connector_check(g.c);
    memset(g.jobs, 0, sizeof g.jobs);
    memset(g.device, 0, sizeof g.device);
    g.n_outcomes = 0;
}

static void rig_published(void *arg, block_id id, const block_hash *hash, int32_t group_id)
{
    offload_key key = {.hash = *hash, .group_id = group_id};
    if (g.device[id] == RIG_UNKNOWN)
        g.device[id] = offload_key_tag(&key);
    offload__published(arg, id, hash, group_id);
}

typedef struct rig_opts {
    int32_t capacity;   /* of the host tier; 0 = 64 */
    int32_t n_blocks;   /* of the device, null block included; 0 = 40 */
    const char *policy; /* NULL = lru */
    bool is_eager;
    bool is_async;
    bool has_disk;
    bool use_eagle;
    int32_t n_ranks;  /* 0 = 1 */
    int32_t n_groups; /* 0 = one of full attention */
    const kv_group_spec *groups;
    int32_t store_threshold;
    int32_t max_step_blocks;
    int32_t max_num_seqs;
    scheduler_policy scheduling;
} rig_opts;

static void rig_init(rig_opts o)
{
    static const kv_group_spec full = {.ops = &kv_full_attention_ops, .block_size = 16};
    memset(&g, 0, sizeof g);
    scheduler_opts opts = fix_opts();
    g.n_groups = o.n_groups > 0 ? o.n_groups : 1;
    memcpy(g.groups, o.n_groups > 0 ? o.groups : &full, (size_t)g.n_groups * sizeof full);
    g.n_ranks = o.n_ranks > 0 ? o.n_ranks : 1;
    g.is_eager = o.is_eager;
    g.fail_id = UINT64_MAX;
    g.disk.max_jobs = 4;
    opts.n_blocks = o.n_blocks > 0 ? o.n_blocks : 40;
    opts.max_model_len = 400;
    opts.max_num_seqs = o.max_num_seqs > 0 ? o.max_num_seqs : opts.max_num_seqs;
    opts.async = o.is_async;
    opts.use_eagle = o.use_eagle;
    opts.policy = o.scheduling;
    opts.groups = g.groups;
    opts.n_groups = g.n_groups;
    offload_connector_opts co = {
        .host = {.capacity = o.capacity > 0 ? o.capacity : 64,
                 .policy = offload_policy_find(o.policy != NULL ? o.policy : "lru")},
        .disk = o.has_disk ? &g.disk : NULL,
        .n_device_blocks = opts.n_blocks,
        .max_num_seqs = opts.max_num_seqs,
        .max_model_len = opts.max_model_len,
        .hash_block_size = opts.block_size,
        .n_groups = g.n_groups,
        .groups = g.groups,
        .use_eagle = o.use_eagle,
        .n_ranks = g.n_ranks,
        .store_threshold = o.store_threshold,
        .max_step_blocks = o.max_step_blocks,
    };
    assert_int_equal(offload_connector_create(&g.c, &co), PGD_OK);
    g.m = offload_connector_get_manager(g.c);
    g.ops = *offload_connector_get_ops(g.c);
    g.ops.blocks.published = rig_published;
    opts.connector = &g.ops;
    fix_init(&g.f, opts);
}

#define RIG_INIT(...) rig_init((rig_opts){__VA_ARGS__})

static void rig_deinit(void)
{
    fix_deinit(&g.f);
    offload_connector_check(g.c);
    offload_connector_destroy(g.c);
}

#endif
