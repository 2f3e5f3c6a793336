/* A real worker may submit a step's transfers as soon as its message is there, and order them with
 * events alone: some steps are submitted early here, others when they begin, so that an event that
 * is not waited for shows as a copy that comes too soon. */
#include "tests/sim/sim_streams.h"

#include <stdlib.h>
#include <string.h>

/* As long as a load of this block is under way. */
#define UNDER_LOAD 0x10adull

#define FAULT(s, ...)                                            \
    do {                                                         \
        if ((s)->fault[0] == '\0')                               \
            snprintf((s)->fault, sizeof(s)->fault, __VA_ARGS__); \
    } while (0)

static uint64_t draw(const sim_streams *s, uint64_t job_id, uint64_t what)
{
    uint64_t seed = hash_u64((uint64_t)s->config->tier_seed * 64 + (uint64_t)s->rank);
    return hash_u64(hash_u64(seed + job_id) + what) >> 8;
}

/* Mostly at once or soon, now and then long. */
static uint64_t draw_delay(const sim_streams *s, uint64_t job_id, uint64_t what)
{
    uint64_t d = draw(s, job_id, what);
    uint64_t longest = d % 4 == 0 ? (uint64_t)s->config->tier_delay : 3;
    return (d >> 8) % (longest + 1);
}

static bool chance(const sim_streams *s, uint64_t job_id, uint64_t what, int32_t percent)
{
    return (int32_t)(draw(s, job_id, what) % 100) < percent;
}

void sim_streams_init(sim_streams *s, const sim_config *config, sim_medium *medium,
                      const sim_device *device, int32_t rank)
{
    memset(s, 0, sizeof *s);
    s->config = config;
    s->medium = medium;
    s->device = *device;
    s->rank = rank;
}

/* --- a stream ------------------------------------------------------------------------------------ */

static sim_job *job_at(sim_stream *stream, int32_t i)
{
    return &stream->jobs[(stream->first + i) % SIM_MAX_JOBS];
}

static sim_job *find_job(sim_stream *stream, uint64_t job_id)
{
    for (int32_t i = 0; i < stream->n_jobs; i++) {
        if (job_at(stream, i)->id == job_id)
            return job_at(stream, i);
    }
    return NULL;
}

static void submit_job(sim_streams *s, const kv_transfer_msg *msg, uint64_t step_id,
                       uint64_t after_step)
{
    sim_stream *stream = msg->kind == KV_TRANSFER_LOAD ? &s->loads : &s->stores;
    if (stream->n_jobs == SIM_MAX_JOBS || msg->n_blocks < 1 || find_job(stream, msg->job_id)) {
        FAULT(s, "job %d of %d blocks behind %d others", (int)msg->job_id, msg->n_blocks,
              stream->n_jobs);
        return;
    }
    sim_job *job = job_at(stream, stream->n_jobs++);
    *job = (sim_job){.id = msg->job_id,
                     .step_id = step_id,
                     .after_step = after_step,
                     .n_right = msg->n_blocks,
                     .n_copies = msg->n_blocks,
                     .copies = calloc((size_t)msg->n_blocks, sizeof *job->copies)};
    if (job->copies == NULL)
        abort();
    for (int32_t k = 0; k < msg->n_blocks; k++)
        job->copies[k] = (sim_copy){
            .device = msg->device_blocks[k], .medium = msg->medium_blocks[k], .tag = msg->tags[k]};
    if (chance(s, job->id, 1, s->config->tier_faults))
        job->n_right =
            stream == &s->loads ? (int32_t)(draw(s, job->id, 2) % (uint64_t)msg->n_blocks) : 0;
}

void sim_streams_submit(sim_streams *s, const scheduler_output *out)
{
    if (out->step_id != s->submitted_id + 1)
        return;
    s->submitted_id = out->step_id;
    /* What earlier steps compute is there to be stored then, and nobody reads any more what a load
     * replaces. */
    uint64_t event = out->step_id - 1;
    for (int32_t i = 0; i < out->n_transfers; i++) {
        if (out->transfers[i].kind == KV_TRANSFER_STORE)
            submit_job(s, &out->transfers[i], out->step_id, event);
    }
    for (int32_t i = 0; i < out->n_transfers; i++) {
        sim_job *job = find_job(&s->stores, out->transfers[i].job_id);
        if (out->transfers[i].kind == KV_TRANSFER_FLUSH && job != NULL && job->flushed_in == 0)
            job->flushed_in = out->step_id;
    }
    for (int32_t i = 0; i < out->n_transfers; i++) {
        if (out->transfers[i].kind == KV_TRANSFER_LOAD)
            submit_job(s, &out->transfers[i], out->step_id, event);
    }
}

/* --- copies --------------------------------------------------------------------------------------- */

static uint64_t *slots_of(const sim_streams *s, block_id id)
{
    return s->device.shadow + (size_t)id * (size_t)s->medium->max_block_size;
}

static void load_block(sim_streams *s, sim_job *job, int32_t k)
{
    const sim_copy *c = &job->copies[k];
    uint64_t *slots = slots_of(s, c->device);
    bool is_good = sim_medium_read(slots, s->medium, c->medium, s->rank, c->tag);
    s->device.owner[c->device] = (int8_t)sim_medium_group_of(s->medium, c->tag);
    if (!is_good || k >= job->n_right) {
        job->n_right = PGD_MIN(job->n_right, k);
        slots[0] ^= UNDER_LOAD;
    }
}

static void store_block(sim_streams *s, const sim_job *job, int32_t k)
{
    const sim_copy *c = &job->copies[k];
    if (k >= job->n_right)
        sim_medium_tear(s->medium, c->medium, s->rank, draw(s, job->id, 3));
    else
        sim_medium_write(s->medium, c->medium, s->rank, c->tag, slots_of(s, c->device));
}

static void copy_until(sim_streams *s, sim_stream *stream, sim_job *job, uint64_t moment)
{
    for (int32_t k = 0; k < job->n_copies; k++) {
        sim_copy *c = &job->copies[k];
        if (c->is_done || c->at > moment)
            continue;
        c->is_done = true;
        if (stream == &s->loads)
            load_block(s, job, k);
        else
            store_block(s, job, k);
    }
}

/* A load may fill a block from which a store is to be flushed. */
static bool may_begin(sim_streams *s, const sim_stream *stream, const sim_job *job)
{
    for (int32_t i = 0; i < s->stores.n_jobs && stream == &s->loads; i++) {
        uint64_t step_id = job_at(&s->stores, i)->flushed_in;
        if (step_id != 0 && step_id <= job->step_id)
            return false;
    }
    return s->n_steps_done >= job->after_step;
}

static void begin_job(sim_streams *s, sim_job *job)
{
    uint64_t n_moments = draw_delay(s, job->id, 4);
    job->has_begun = true;
    job->ends_at = s->now + n_moments;
    for (int32_t k = 0; k < job->n_copies; k++)
        job->copies[k].at = s->now + draw(s, job->id, 5 + (uint64_t)k) % (n_moments + 1);
}

/* Applied transfers count as users of device blocks; all of them are users of medium blocks. */
static void use_blocks(sim_streams *s, const sim_stream *stream, const sim_job *job, int by)
{
    int8_t *n_users = stream == &s->loads ? s->device.n_loading : s->device.n_storing;
    for (int32_t k = 0; k < job->n_copies; k++)
        n_users[job->copies[k].device] = (int8_t)(n_users[job->copies[k].device] + by);
}

static void end_first(sim_streams *s, sim_stream *stream)
{
    sim_job *job = job_at(stream, 0);
    bool is_load = stream == &s->loads;
    copy_until(s, stream, job, UINT64_MAX);
    if (job->is_applied)
        use_blocks(s, stream, job, -1);
    for (int32_t k = 0; k < job->n_copies; k++)
        sim_medium_release(s->medium, is_load ? SIM_USER_LOAD : SIM_USER_STORE,
                           job->copies[k].medium, s->rank);
    sim_done *done = &s->done[(s->first_done + s->n_done++) % (int32_t)PGD_ARRAY_LEN(s->done)];
    *done = (sim_done){.job_id = job->id,
                       .n_good = job->n_right,
                       .told_at = s->now + draw_delay(s, job->id, 4444)};
    s->n_stored += !is_load;
    s->n_failed += job->n_right < job->n_copies;
    free(job->copies);
    job->copies = NULL;
    stream->first = (stream->first + 1) % SIM_MAX_JOBS;
    stream->n_jobs--;
}

static void go_on(sim_streams *s, sim_stream *stream)
{
    while (stream->n_jobs > 0) {
        sim_job *job = job_at(stream, 0);
        if (!job->has_begun && !may_begin(s, stream, job))
            return;
        if (!job->has_begun)
            begin_job(s, job);
        copy_until(s, stream, job, s->now);
        if (job->ends_at > s->now)
            return;
        end_first(s, stream);
    }
}

void sim_streams_tick(sim_streams *s)
{
    s->now++;
    go_on(s, &s->stores);
    go_on(s, &s->loads);
}

/* --- with the steps ------------------------------------------------------------------------------- */

void sim_streams_flush(sim_streams *s, const scheduler_output *out)
{
    for (int32_t i = 0; i < out->n_transfers; i++) {
        const kv_transfer_msg *msg = &out->transfers[i];
        if (msg->kind != KV_TRANSFER_FLUSH)
            continue;
        s->n_flushed += find_job(&s->stores, msg->job_id) != NULL;
        while (find_job(&s->stores, msg->job_id) != NULL)
            end_first(s, &s->stores);
    }
}

static void apply_stream(sim_streams *s, sim_stream *stream, uint64_t step_id)
{
    for (int32_t i = 0; i < stream->n_jobs; i++) {
        sim_job *job = job_at(stream, i);
        if (job->step_id != step_id)
            continue;
        job->is_applied = true;
        use_blocks(s, stream, job, 1);
    }
}

void sim_streams_apply(sim_streams *s, const scheduler_output *out)
{
    apply_stream(s, &s->stores, out->step_id);
    apply_stream(s, &s->loads, out->step_id);
}

/* --- ends ------------------------------------------------------------------------------------------ */

bool sim_streams_next_told(sim_streams *s, sim_done *out)
{
    if (s->n_done == 0 || s->done[s->first_done].told_at > s->now)
        return false;
    *out = s->done[s->first_done];
    s->first_done = (s->first_done + 1) % (int32_t)PGD_ARRAY_LEN(s->done);
    s->n_done--;
    return true;
}

bool sim_streams_is_busy(const sim_streams *s)
{
    return s->n_done + s->loads.n_jobs + s->stores.n_jobs > 0;
}

void sim_streams_reset(sim_streams *s, uint64_t next_step_id)
{
    for (int32_t i = 0; i < s->stores.n_jobs; i++) {
        sim_job *job = job_at(&s->stores, i);
        for (int32_t k = 0; k < job->n_copies && job->has_begun; k++) {
            uint64_t luck = draw(s, job->id, 6666 + (uint64_t)k);
            if (!job->copies[k].is_done && luck % 2 == 0)
                sim_medium_tear(s->medium, job->copies[k].medium, s->rank, luck);
        }
    }
    for (sim_stream *stream = &s->loads; stream != NULL;
         stream = stream == &s->loads ? &s->stores : NULL) {
        for (int32_t i = 0; i < stream->n_jobs; i++)
            free(job_at(stream, i)->copies);
        stream->n_jobs = 0;
    }
    s->n_done = 0;
    s->n_steps_done = s->submitted_id = next_step_id - 1;
}
