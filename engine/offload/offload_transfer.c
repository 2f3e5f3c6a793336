/* Transfers between device and host.
 *
 * A step's message, in the order that the worker keeps whatever it is made up in:
 *   1. a store of the blocks that are handed out again in this step, and a flush of it
 *   2. flushes of stores under way whose source is handed out again
 *   3. loads of requests that were given blocks
 *   4. a store of what else is queued
 * What does not fit into the message waits, but for 1, which is not stored then.
 *
 * Jobs are lists through the blocks themselves: a host block is written by one store at a time, a
 * device block filled by one load. */
#include "engine/offload/offload_connector_internal.h"

#define SLOT_BITS 20

/* --- jobs -------------------------------------------------------------------------------------- */

static offload_job *begin_job(offload_connector *c, int32_t first_slot, int32_t n_slots)
{
    for (int32_t i = first_slot; i < first_slot + n_slots; i++) {
        offload_job *job = &c->jobs[i];
        if (job->id != 0 || list_is_linked(&job->node))
            continue;
        *job = (offload_job){.id = ++c->serial << SLOT_BITS | (uint64_t)i, .first = -1};
        return job;
    }
    return NULL;
}

static bool is_load(const offload_connector *c, const offload_job *job)
{
    return job - c->jobs < c->opts.max_num_seqs;
}

/* --- loads ------------------------------------------------------------------------------------- */

static void add_to_load(offload_connector *c, offload_job *job, int32_t *last,
                        const offload_item *item, block_id device)
{
    int32_t id;
    bool is_there = offload_manager_prepare_load(&id, c->manager, &item->key, 1);
    PGD_ASSERTF(is_there && device > 0, "block %d of group %d is to be loaded to %d", item->idx,
                item->key.group_id, device);
    offload_manager_end_watch(c->manager, &item->key);
    c->medium[id].n_loading++;
    offload_device_block *b = &c->device[device];
    b->load_medium = id;
    b->load_end = item->end;
    b->load_next = -1;
    *(*last < 0 ? &job->first : &c->device[*last].load_next) = device;
    *last = device;
    job->n_blocks++;
}

static void begin_load(offload_connector *c, request *r, const block_ids_msg *table,
                       int32_t n_local, int32_t n_external)
{
    offload_job *job = begin_job(c, 0, c->opts.max_num_seqs);
    PGD_ASSERTF(job != NULL, "%d loads are under way", c->opts.max_num_seqs);
    job->r = r;
    job->n_local = n_local;
    job->n_valid = n_local + n_external;
    int32_t n_items = offload__list_items(c, r, n_local, job->n_valid);
    int32_t last = -1;
    for (int32_t i = 0; i < n_items; i++) {
        const offload_item *item = &c->items[i];
        add_to_load(c, job, &last, item, table->ids[item->key.group_id][item->idx]);
    }
    job->n_good = job->n_blocks;
    c->n_load_blocks += job->n_blocks;
    list_append(&c->to_send, &job->node);
}

void offload__allocated(void *arg, request *r, const block_ids_msg *table, int32_t n_local_tokens,
                        int32_t n_external_tokens)
{
    offload_connector *c = arg;
    if (n_external_tokens > 0)
        begin_load(c, r, table, n_local_tokens, n_external_tokens);
    offload__end_promotion(c, r);
    r->tier.answer = 0;
    if (n_external_tokens == 0) /* it runs; later it may wait again */
        r->tier = (request_tier){0};
}

/* Lets go of the host blocks, and of the one that was found to be bad for good. */
static void end_load(offload_connector *c, offload_job *job)
{
    int32_t n = 0;
    offload_key bad;
    for (int32_t d = job->first; d >= 0; d = c->device[d].load_next, n++) {
        const offload_device_block *b = &c->device[d];
        offload_key key = offload__key_at(c, b->load_medium);
        c->medium[b->load_medium].n_loading--;
        offload_manager_complete_load(c->manager, &key, 1, offload_manager_generation(c->manager));
        if (n != job->n_good)
            continue;
        job->n_valid = PGD_MAX(b->load_end - c->groups[key.group_id].block_size, job->n_local);
        bad = key;
    }
    if (job->n_good < job->n_blocks)
        offload_manager_forget(c->manager, &bad, 1);
    c->n_load_blocks -= job->n_blocks;
    c->n_changes++;
    job->id = 0;
}

bool offload__next_load(offload_connector *c, kv_loaded *out)
{
    if (list_is_empty(&c->to_tell))
        return false;
    offload_job *job = LIST_ENTRY(c->to_tell.next, offload_job, node);
    list_remove(&job->node);
    *out = (kv_loaded){.r = job->r, .n_valid_tokens = job->n_valid};
    return true;
}

/* --- the queue of blocks to be stored ---------------------------------------------------------- */

static void leave_queue(offload_connector *c, offload_device_block *b)
{
    list_remove(&b->queue);
    c->n_queued--;
}

void offload__published(void *arg, block_id id, const block_hash *hash, int32_t group_id)
{
    offload_connector *c = arg;
    offload_device_block *b = &c->device[id];
    if (list_is_linked(&b->queue))
        leave_queue(c, b);
    b->key = (offload_key){.hash = *hash, .group_id = group_id};
    b->seq = ++c->n_published;
    list_append(&c->queue, &b->queue);
    c->n_queued++;
}

void offload__unpublished(void *arg, block_id id)
{
    offload_connector *c = arg;
    if (list_is_linked(&c->device[id].queue))
        leave_queue(c, &c->device[id]);
}

void offload__reused(void *arg, block_id id)
{
    offload_connector *c = arg;
    offload_device_block *b = &c->device[id];
    if (list_is_linked(&b->queue)) {
        leave_queue(c, b);
        if (b->seq <= c->publish_limit) {
            c->urgent[c->n_urgent] = id;
            c->urgent_keys[c->n_urgent++] = b->key;
        }
    }
    if (b->store >= 0) {
        c->n_to_flush += !c->jobs[b->store].must_flush;
        c->jobs[b->store].must_flush = true;
        b->store = -1;
    }
}

/* --- stores ------------------------------------------------------------------------------------ */

static bool is_wanted(const offload_connector *c, const offload_key *key)
{
    return offload_manager_get_id(c->manager, key) < 0 &&
           (c->counter == NULL ||
            offload_counter_get(c->counter, key) >= (uint32_t)c->opts.store_threshold);
}

/* False when the tier has no room now. */
static bool add_to_store(offload_connector *c, offload_job *job, int32_t *last, block_id device,
                         const offload_key *key)
{
    offload_store store;
    if (!offload_manager_prepare_store(&store, c->manager, key, 1))
        return false;
    int32_t id = store.medium_ids[0];
    c->medium[id].store_device = device;
    c->medium[id].store_next = -1;
    *(*last < 0 ? &job->first : &c->medium[*last].store_next) = id;
    *last = id;
    job->n_blocks++;
    return true;
}

static int32_t n_room(const offload_connector *c)
{
    return c->opts.max_step_blocks - c->n_msg_blocks;
}

static void add_message(offload_connector *c, offload_job *job, kv_transfer_kind kind)
{
    c->messages[c->n_messages++] =
        (kv_transfer_msg){.job_id = job->id,
                          .kind = kind,
                          .n_blocks = job->n_blocks,
                          .device_blocks = c->msg_device + c->n_msg_blocks,
                          .medium_blocks = c->msg_medium + c->n_msg_blocks,
                          .tags = c->msg_tags + c->n_msg_blocks};
    job->is_sent = true;
}

static void add_block(offload_connector *c, block_id device, int32_t medium_id)
{
    offload_key key = offload__key_at(c, medium_id);
    c->msg_device[c->n_msg_blocks] = device;
    c->msg_medium[c->n_msg_blocks] = medium_id;
    c->msg_tags[c->n_msg_blocks++] = offload_key_tag(&key);
}

static void send_store(offload_connector *c, offload_job *job)
{
    job->n_good = job->n_blocks;
    c->n_store_blocks += job->n_blocks;
    add_message(c, job, KV_TRANSFER_STORE);
    for (int32_t m = job->first; m >= 0; m = c->medium[m].store_next)
        add_block(c, c->medium[m].store_device, m);
}

static void add_flush(offload_connector *c, const offload_job *job)
{
    c->messages[c->n_messages++] = (kv_transfer_msg){.job_id = job->id, .kind = KV_TRANSFER_FLUSH};
}

static offload_job *begin_store(offload_connector *c)
{
    return begin_job(c, c->opts.max_num_seqs, OFFLOAD_STORE_JOBS);
}

static void send_urgent(offload_connector *c)
{
    int32_t last = -1;
    offload_job *job = c->n_urgent > 0 ? begin_store(c) : NULL;
    for (int32_t i = 0; job != NULL && i < c->n_urgent && job->n_blocks < n_room(c); i++) {
        if (is_wanted(c, &c->urgent_keys[i]))
            (void)add_to_store(c, job, &last, c->urgent[i], &c->urgent_keys[i]);
    }
    c->n_urgent = 0;
    if (job == NULL)
        return;
    if (job->n_blocks == 0) {
        job->id = 0;
        return;
    }
    send_store(c, job);
    add_flush(c, job);
}

static void send_flushes(offload_connector *c)
{
    for (int32_t i = 0; c->n_to_flush > 0; i++) {
        offload_job *job = &c->jobs[c->opts.max_num_seqs + i];
        if (!job->must_flush)
            continue;
        job->must_flush = false;
        c->n_to_flush--;
        add_flush(c, job);
    }
}

static void send_loads(offload_connector *c)
{
    while (!list_is_empty(&c->to_send) && c->n_messages < KV_TRANSFER_MAX_JOBS - 1 &&
           c->n_loads < KV_TRANSFER_MAX_PENDING) {
        offload_job *job = LIST_ENTRY(c->to_send.next, offload_job, node);
        if (job->n_blocks > n_room(c))
            return;
        list_remove(&job->node);
        add_message(c, job, KV_TRANSFER_LOAD);
        for (int32_t d = job->first; d >= 0; d = c->device[d].load_next)
            add_block(c, d, c->device[d].load_medium);
        c->n_loads++;
    }
}

static offload_device_block *next_to_store(const offload_connector *c)
{
    if (list_is_empty(&c->queue))
        return NULL;
    offload_device_block *b = LIST_ENTRY(c->queue.next, offload_device_block, queue);
    return b->seq <= c->publish_limit ? b : NULL;
}

static void send_queued(offload_connector *c)
{
    if (next_to_store(c) == NULL || c->refused_change == c->n_changes)
        return;
    int32_t last = -1;
    offload_job *job = begin_store(c);
    bool is_refused = job == NULL;
    offload_device_block *b;
    while (!is_refused && (b = next_to_store(c)) != NULL && job->n_blocks < n_room(c)) {
        if (is_wanted(c, &b->key)) {
            is_refused = !add_to_store(c, job, &last, (block_id)(b - c->device), &b->key);
            if (is_refused)
                break;
            b->store = (int32_t)(job - c->jobs);
        }
        leave_queue(c, b);
    }
    c->refused_change = is_refused ? c->n_changes : UINT64_MAX;
    if (job == NULL)
        return;
    if (job->n_blocks == 0)
        job->id = 0;
    else
        send_store(c, job);
}

bool offload__build_step(void *arg, scheduler_output *out)
{
    offload_connector *c = arg;
    c->n_messages = 0;
    c->n_msg_blocks = 0;
    send_urgent(c);
    send_flushes(c);
    send_loads(c);
    send_queued(c);
    out->n_transfers = c->n_messages;
    out->transfers = c->messages;
    return c->n_messages > 0;
}

bool offload__has_work(void *arg)
{
    const offload_connector *c = arg;
    return (c->n_queued > 0 && c->refused_change != c->n_changes) ||
           (!list_is_empty(&c->to_send) && c->n_loads < KV_TRANSFER_MAX_PENDING);
}

static void end_store(offload_connector *c, offload_job *job)
{
    bool ok = job->n_good == job->n_blocks;
    int32_t n = 0;
    for (int32_t m = job->first; m >= 0; m = c->medium[m].store_next) {
        offload_device_block *b = &c->device[c->medium[m].store_device];
        if (b->store == (int32_t)(job - c->jobs))
            b->store = -1;
        c->keys[n++] = offload__key_at(c, m);
    }
    offload_manager_complete_store(c->manager, c->keys, n, ok,
                                   offload_manager_generation(c->manager));
    for (int32_t m = job->first; ok && m >= 0; m = c->medium[m].store_next)
        offload__want_on_disk(c, m);
    c->n_to_flush -= job->must_flush;
    job->must_flush = false;
    c->n_store_blocks -= job->n_blocks;
    c->n_changes++;
    job->id = 0;
}

/* --- reports ----------------------------------------------------------------------------------- */

static offload_job *find_job(const offload_connector *c, int32_t rank, const kv_transfer_done *done)
{
    uint64_t slot = done->job_id & ((1U << SLOT_BITS) - 1);
    if (slot >= (uint64_t)(c->opts.max_num_seqs + OFFLOAD_STORE_JOBS))
        return NULL;
    offload_job *job = &c->jobs[slot];
    bool is_known = done->job_id != 0 && job->id == done->job_id && job->is_sent &&
                    (job->rank_mask >> rank & 1) == 0;
    bool is_good = done->n_good == 0 || done->n_good == job->n_blocks ||
                   (is_load(c, job) && done->n_good > 0 && done->n_good < job->n_blocks);
    return is_known && is_good ? job : NULL;
}

static void count(offload_connector *c, const offload_job *job, const kv_transfer_done *done)
{
    offload_flow *flow = is_load(c, job) ? &c->stats.host.load : &c->stats.host.store;
    flow->n_bytes += done->n_bytes;
    flow->us += done->us;
    flow->n_failed += (uint64_t)(job->n_blocks - done->n_good);
    if (is_load(c, job))
        offload_rate_note(&c->rates.us_per_load, done->us, (uint64_t)done->n_good);
}

static void take_report(offload_connector *c, int32_t rank, offload_job *job,
                        const kv_transfer_done *done)
{
    uint64_t all = ~0ULL >> (64 - c->opts.n_ranks);
    count(c, job, done);
    job->n_good = PGD_MIN(job->n_good, done->n_good);
    job->rank_mask |= 1ULL << rank;
    if (job->rank_mask != all)
        return;
    if (is_load(c, job)) {
        c->n_loads--;
        end_load(c, job);
        list_append(&c->to_tell, &job->node);
    } else {
        end_store(c, job);
    }
}

pgd_err offload__on_transfers(void *arg, int32_t rank, const kv_transfer_done *done, int32_t n_done)
{
    offload_connector *c = arg;
    if (rank < 0 || rank >= c->opts.n_ranks)
        return PGD_EPROTO;
    for (int32_t i = 0; i < n_done; i++) {
        if (find_job(c, rank, &done[i]) == NULL)
            return PGD_EPROTO;
        for (int32_t k = 0; k < i; k++) {
            if (done[k].job_id == done[i].job_id)
                return PGD_EPROTO;
        }
    }
    for (int32_t i = 0; i < n_done; i++)
        take_report(c, rank, find_job(c, rank, &done[i]), &done[i]);
    offload__pump_disk(c);
    return PGD_OK;
}

/* The worker is gone: loads bring nothing, their requests ask again; stores have failed. */
void offload__drop_jobs(offload_connector *c)
{
    for (int32_t i = 0; i < c->opts.max_num_seqs + OFFLOAD_STORE_JOBS; i++) {
        offload_job *job = &c->jobs[i];
        if (list_is_linked(&job->node))
            list_remove(&job->node);
        if (job->id == 0)
            continue;
        job->n_good = is_load(c, job) ? job->n_blocks : 0;
        if (is_load(c, job))
            end_load(c, job);
        else
            end_store(c, job);
    }
    while (!list_is_empty(&c->queue))
        leave_queue(c, LIST_ENTRY(c->queue.next, offload_device_block, queue));
    c->n_urgent = 0;
    c->n_loads = 0;
    c->refused_change = UINT64_MAX;
}
