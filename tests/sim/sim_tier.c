/* A job is one transfer: made when blocks are allocated or a request ends, sent with the next step,
 * reported by the worker, told to the scheduler. */
#include "tests/sim/sim_tier.h"

#include <string.h>

void sim_tier_init(sim_tier *t, const sim_config *config, const sim_request *const *requests,
                   sim_medium *medium, int32_t alignment, bool can_store)
{
    t->medium = medium;
    t->config = config;
    t->requests = requests;
    t->sched = NULL;
    t->alignment = alignment;
    t->can_store = can_store;
    t->n_ids = 0;
    memset(t->n_asked, 0, sizeof t->n_asked);
    for (int i = 0; i < SIM_TIER_JOBS; i++)
        t->jobs[i].state = SIM_TIER_FREE;
}

static sim_tier_job *find_free(sim_tier *t)
{
    for (int i = 0; i < SIM_TIER_JOBS; i++) {
        if (t->jobs[i].state == SIM_TIER_FREE)
            return &t->jobs[i];
    }
    return NULL;
}

static kv_match match(void *arg, request *r, int32_t n_local_tokens)
{
    sim_tier *t = arg;
    const sim_request *q = t->requests[r->id];
    int32_t n_have = PGD_MIN(q->n_external, r->n_tokens - 1) / t->alignment * t->alignment;
    if (n_have <= n_local_tokens || find_free(t) == NULL)
        return (kv_match){.kind = KV_MATCH_NONE};
    if (t->n_asked[r->id] < q->n_asks) {
        t->n_asked[r->id]++;
        return (kv_match){.kind = KV_MATCH_ASK_AGAIN};
    }
    return (kv_match){.kind = KV_MATCH_HIT, .n_tokens = n_have - n_local_tokens, .is_async = true};
}

static void add_block(sim_tier *t, sim_tier_job *job, block_id id, int32_t g, int32_t end,
                      const uint64_t *chain)
{
    uint64_t slots[SIM_MAX_LEN];
    int32_t bs = t->config->groups[g].block_size;
    int32_t k = job->n_blocks++;
    job->blocks[k] = id;
    job->medium[k] = (int32_t)(job - t->jobs) * SIM_TIER_JOB_BLOCKS + k;
    job->tags[k] = hash_u64(hash_u64(chain[end] + (uint64_t)g) + job->id);
    job->ends[k] = end;
    sim_medium_know(t->medium, job->tags[k], g, chain, end);
    if (job->kind != KV_TRANSFER_LOAD)
        return;
    for (int32_t i = 0; i < bs; i++)
        slots[i] = sim_chain_content(chain[end - bs + i + 1], g);
    for (int32_t rank = 0; rank < t->config->n_ranks; rank++)
        sim_medium_write(t->medium, job->medium[k], rank, job->tags[k], slots);
}

/* Blocks of positions [first, end), with the contents that belong there. */
static void fill_job(sim_tier *t, sim_tier_job *job, const block_ids_msg *table, int32_t first,
                     int32_t end)
{
    uint64_t chain[SIM_MAX_LEN + 1];
    chain[0] = sim_chain_start(t->requests[job->r->id]->salt);
    for (int32_t i = 0; i < end; i++)
        chain[i + 1] = sim_chain_next(chain[i], job->r->tokens[i]);
    job->n_blocks = 0;
    for (int32_t pos = first + 1; pos <= end; pos++) {
        for (int32_t g = 0; g < t->config->n_groups; g++) {
            int32_t bs = t->config->groups[g].block_size;
            if (pos % bs == 0 && table->ids[g][pos / bs - 1] != 0)
                add_block(t, job, table->ids[g][pos / bs - 1], g, pos, chain);
        }
    }
}

static sim_tier_job *make_job(sim_tier *t, kv_transfer_kind kind, request *r)
{
    sim_tier_job *job = find_free(t);
    job->state = SIM_TIER_NEW;
    job->id = ++t->n_ids;
    job->kind = kind;
    job->r = r;
    job->n_told = 0;
    return job;
}

static void allocated(void *arg, request *r, const block_ids_msg *table, int32_t n_local_tokens,
                      int32_t n_external_tokens)
{
    sim_tier *t = arg;
    if (n_external_tokens == 0)
        return;
    sim_tier_job *job = make_job(t, KV_TRANSFER_LOAD, r);
    job->n_local_tokens = n_local_tokens;
    job->end = job->n_valid_tokens = n_local_tokens + n_external_tokens;
    fill_job(t, job, table, n_local_tokens, job->end);
    if (job->n_blocks == 0)
        job->state = SIM_TIER_DONE;
    t->n_asked[r->id] = 0;
}

static bool build_step(void *arg, scheduler_output *out)
{
    sim_tier *t = arg;
    bool is_pending = false;
    t->n_messages = 0;
    for (int i = 0; i < SIM_TIER_JOBS; i++) {
        sim_tier_job *job = &t->jobs[i];
        is_pending = is_pending || job->state != SIM_TIER_FREE;
        if (job->state != SIM_TIER_NEW)
            continue;
        t->messages[t->n_messages++] = (kv_transfer_msg){.job_id = job->id,
                                                         .kind = job->kind,
                                                         .n_blocks = job->n_blocks,
                                                         .device_blocks = job->blocks,
                                                         .medium_blocks = job->medium,
                                                         .tags = job->tags};
        job->state = SIM_TIER_SENT;
    }
    out->n_transfers = t->n_messages;
    out->transfers = t->messages;
    return is_pending;
}

static void end_on_rank(sim_tier *t, sim_tier_job *job, int32_t n_good)
{
    if (n_good < job->n_blocks && job->kind == KV_TRANSFER_LOAD)
        job->n_valid_tokens = PGD_MIN(
            job->n_valid_tokens,
            PGD_MAX((job->ends[n_good] - 1) / t->alignment * t->alignment, job->n_local_tokens));
    if (++job->n_told == t->config->n_ranks)
        job->state = SIM_TIER_DONE;
}

static pgd_err on_transfers(void *arg, int32_t rank, const kv_transfer_done *done, int32_t n_done)
{
    sim_tier *t = arg;
    (void)rank;
    for (int32_t d = 0; d < n_done; d++) {
        for (int i = 0; i < SIM_TIER_JOBS; i++) {
            if (t->jobs[i].state == SIM_TIER_SENT && t->jobs[i].id == done[d].job_id)
                end_on_rank(t, &t->jobs[i], done[d].n_good);
        }
    }
    return PGD_OK;
}

static void on_step(void *arg, int32_t n_tokens, uint32_t forward_us)
{
    (void)arg, (void)n_tokens, (void)forward_us;
}

/* Its jobs are those of requests that the scheduler holds. */
static bool has_work(void *arg)
{
    (void)arg;
    return false;
}

/* The medium holds what a model computes, not what was computed. */
static void forget(void *arg, const request *r)
{
    (void)arg, (void)r;
}

static bool next_event(void *arg, kv_event *out)
{
    sim_tier *t = arg;
    for (int i = 0; i < SIM_TIER_JOBS; i++) {
        sim_tier_job *job = &t->jobs[i];
        if (job->state != SIM_TIER_DONE)
            continue;
        job->state = SIM_TIER_FREE;
        *out = (kv_event){.kind = job->kind == KV_TRANSFER_LOAD ? KV_EVENT_LOADED : KV_EVENT_SENT,
                          .r = job->r,
                          .n_valid_tokens = job->n_valid_tokens};
        return true;
    }
    return false;
}

static bool is_loading(const sim_tier *t, const request *r)
{
    for (int i = 0; i < SIM_TIER_JOBS; i++) {
        const sim_tier_job *job = &t->jobs[i];
        if (job->state != SIM_TIER_FREE && job->kind == KV_TRANSFER_LOAD && job->r == r)
            return true;
    }
    return false;
}

/* Full blocks of what is computed, or will be by steps that are out. */
static bool finished(void *arg, request *r)
{
    sim_tier *t = arg;
    const sim_request *q = t->requests[r->id];
    int32_t end = PGD_MIN(r->num_computed_tokens, r->n_tokens - 1);
    block_ids_msg table;
    if (!t->can_store || q->is_stored == 0 || r->kv_row < 0 || is_loading(t, r) ||
        find_free(t) == NULL)
        return false;
    kv_manager_get_table(&table, t->sched->kv, r);
    sim_tier_job *job = make_job(t, KV_TRANSFER_STORE, r);
    fill_job(t, job, &table, 0, end);
    if (job->n_blocks == 0)
        job->state = SIM_TIER_FREE;
    return job->n_blocks > 0;
}

static void reset(void *arg)
{
    sim_tier *t = arg;
    for (int i = 0; i < SIM_TIER_JOBS; i++)
        t->jobs[i].state = SIM_TIER_FREE;
}

kv_connector sim_tier_connector(sim_tier *t)
{
    return (kv_connector){.arg = t,
                          .match = match,
                          .allocated = allocated,
                          .build_step = build_step,
                          .on_transfers = on_transfers,
                          .on_step = on_step,
                          .has_work = has_work,
                          .forget = forget,
                          .next_event = next_event,
                          .finished = finished,
                          .reset = reset};
}
