/* A job is one transfer: made when blocks are allocated or a request ends, sent with the next step,
 * reported by the worker, told to the scheduler. */
#include "tests/sim/sim_tier.h"

#include <string.h>

void sim_tier_init(sim_tier *t, const sim_config *config, const sim_request *const *requests,
                   int32_t alignment, bool can_store)
{
    t->config = config;
    t->requests = requests;
    t->sched = NULL;
    t->alignment = alignment;
    t->can_store = can_store;
    t->n_ids = 0;
    t->n_put_off = 0;
    t->n_loads = t->n_failed_loads = t->n_stores = 0;
    memset(t->n_asked, 0, sizeof t->n_asked);
    memset(t->load_step, 0, sizeof t->load_step);
    for (int i = 0; i < SIM_MAX_JOBS; i++)
        t->jobs[i].state = SIM_JOB_NONE;
}

const sim_job *sim_tier_find(const sim_tier *t, uint64_t job_id)
{
    for (int i = 0; i < SIM_MAX_JOBS; i++) {
        if (t->jobs[i].state != SIM_JOB_NONE && t->jobs[i].id == job_id)
            return &t->jobs[i];
    }
    return NULL;
}

static sim_job *find_free(sim_tier *t)
{
    for (int i = 0; i < SIM_MAX_JOBS; i++) {
        if (t->jobs[i].state == SIM_JOB_NONE)
            return &t->jobs[i];
    }
    return NULL;
}

static kv_match match(void *arg, const request *r, int32_t n_local_tokens)
{
    sim_tier *t = arg;
    const sim_request *q = t->requests[r->id];
    int32_t n_have = PGD_MIN(q->n_external, r->n_tokens - 1) / t->alignment * t->alignment;
    if (n_have <= n_local_tokens || find_free(t) == NULL)
        return (kv_match){.kind = KV_MATCH_NONE};
    if (t->n_asked[r->id] < q->n_asks) {
        t->n_asked[r->id]++;
        t->n_put_off++;
        return (kv_match){.kind = KV_MATCH_ASK_AGAIN};
    }
    return (kv_match){
        .kind = KV_MATCH_HIT, .n_tokens = n_have - n_local_tokens, .is_async = q->load_delay > 0};
}

/* Blocks of positions [first, end), with the contents that belong there. */
static void fill_job(sim_tier *t, sim_job *job, const block_ids_msg *table, int32_t first,
                     int32_t end)
{
    const sim_request *q = t->requests[job->r->id];
    uint64_t chain[SIM_MAX_LEN + 1];
    chain[0] = sim_chain_start(q->salt);
    for (int32_t i = 0; i < end; i++)
        chain[i + 1] = sim_chain_next(chain[i], job->r->tokens[i]);
    job->n_blocks = 0;
    job->n_contents = 0;
    for (int32_t g = 0; g < t->config->n_groups; g++) {
        int32_t bs = t->config->groups[g].block_size;
        if (t->config->groups[g].kind == ATTENTION_CROSS)
            continue;
        for (int32_t i = first / bs; i < end / bs; i++) {
            if (table->ids[g][i] == 0)
                continue;
            int32_t k = job->n_blocks++;
            job->blocks[k] = table->ids[g][i];
            job->group[k] = (int8_t)g;
            job->medium[k] = job->n_contents;
            job->is_valid[k] = (i + 1) * bs <= job->n_valid_tokens;
            for (int32_t pos = i * bs; pos < (i + 1) * bs; pos++)
                job->contents[job->n_contents++] = sim_chain_content(chain[pos + 1], g);
        }
    }
}

static sim_job *make_job(sim_tier *t, kv_transfer_kind kind, request *r)
{
    sim_job *job = find_free(t);
    job->state = SIM_JOB_NEW;
    job->id = ++t->n_ids;
    job->kind = kind;
    job->r = r;
    job->is_async = true;
    return job;
}

static void allocated(void *arg, request *r, const block_ids_msg *table, int32_t n_local_tokens,
                      int32_t n_external_tokens)
{
    sim_tier *t = arg;
    const sim_request *q = t->requests[r->id];
    if (n_external_tokens == 0)
        return;
    int32_t end = n_local_tokens + n_external_tokens;
    sim_job *job = make_job(t, KV_TRANSFER_LOAD, r);
    job->is_async = q->load_delay > 0;
    job->delay = q->load_delay - 1;
    if (job->is_async)
        t->load_step[r->id] = t->sched->next_step_id;
    job->n_valid_tokens = end;
    if (job->is_async && q->n_loaded > 0)
        job->n_valid_tokens =
            PGD_MIN(PGD_MAX(q->n_loaded / t->alignment * t->alignment, n_local_tokens), end);
    fill_job(t, job, table, n_local_tokens, end);
    t->n_asked[r->id] = 0;
    t->n_loads++;
    t->n_failed_loads += job->n_valid_tokens < end;
}

static bool build_step(void *arg, scheduler_output *out)
{
    sim_tier *t = arg;
    bool is_pending = false;
    t->n_messages = 0;
    for (int i = 0; i < SIM_MAX_JOBS; i++) {
        sim_job *job = &t->jobs[i];
        is_pending = is_pending || job->state == SIM_JOB_NEW || job->state == SIM_JOB_SENT;
        if (job->state != SIM_JOB_NEW)
            continue;
        t->messages[t->n_messages++] = (kv_transfer_msg){.job_id = job->id,
                                                         .kind = job->kind,
                                                         .n_blocks = job->n_blocks,
                                                         .device_blocks = job->blocks,
                                                         .medium_blocks = job->medium};
        job->state = SIM_JOB_SENT;
    }
    out->n_transfers = t->n_messages;
    out->transfers = t->messages;
    return is_pending;
}

static void on_result(void *arg, const step_result *result)
{
    sim_tier *t = arg;
    for (int32_t i = 0; i < result->n_finished_transfers; i++) {
        sim_job *job = (sim_job *)sim_tier_find(t, result->finished_transfers[i]);
        job->state = job->is_async ? SIM_JOB_DONE : SIM_JOB_NONE;
    }
}

static bool next_event(void *arg, kv_event *out)
{
    sim_tier *t = arg;
    for (int i = 0; i < SIM_MAX_JOBS; i++) {
        sim_job *job = &t->jobs[i];
        if (job->state != SIM_JOB_DONE)
            continue;
        job->state = SIM_JOB_NONE;
        *out = (kv_event){.kind = job->kind == KV_TRANSFER_LOAD ? KV_EVENT_LOADED : KV_EVENT_SENT,
                          .r = job->r,
                          .n_valid_tokens = job->n_valid_tokens};
        return true;
    }
    return false;
}

static bool is_loading(const sim_tier *t, const request *r)
{
    for (int i = 0; i < SIM_MAX_JOBS; i++) {
        const sim_job *job = &t->jobs[i];
        if (job->state != SIM_JOB_NONE && job->kind == KV_TRANSFER_LOAD && job->is_async &&
            job->r == r)
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
    if (!t->can_store || q->store_delay == 0 || r->kv_row < 0 || is_loading(t, r) ||
        find_free(t) == NULL)
        return false;
    kv_manager_get_table(&table, t->sched->kv, r);
    sim_job *job = make_job(t, KV_TRANSFER_STORE, r);
    job->delay = q->store_delay - 1;
    job->n_valid_tokens = end;
    fill_job(t, job, &table, 0, end);
    t->n_stores++;
    return true;
}

static void reset(void *arg)
{
    sim_tier *t = arg;
    for (int i = 0; i < SIM_MAX_JOBS; i++)
        t->jobs[i].state = SIM_JOB_NONE;
}

kv_connector sim_tier_connector(sim_tier *t)
{
    return (kv_connector){.arg = t,
                          .match = match,
                          .allocated = allocated,
                          .build_step = build_step,
                          .on_result = on_result,
                          .next_event = next_event,
                          .finished = finished,
                          .reset = reset};
}
