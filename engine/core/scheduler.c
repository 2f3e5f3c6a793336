/* Life of requests inside the scheduler: they come in, are found, finish, and leave at one point.
 *
 *   add ──► waiting queue ──► running list ──► finished ──► released
 *                 ▲                │  (blocks go back here)   (nothing of it is in flight)
 *                 └── preempted ◄──┘
 *
 * A request is in exactly one of waiting queue and running list until it finishes; after that only
 * step records and the list of held ones refer to it. The map by id holds the unfinished ones.
 * scheduler_schedule.c makes steps, scheduler_update.c applies their results, scheduler_load.c
 * knows of blocks that come from or go to elsewhere. */
#include "engine/core/scheduler.h"

#include "common/mem.h"
#include "common/thread.h"
#include "engine/core/scheduler_internal.h"

static pgd_err check_opts(const scheduler_opts *o)
{
    if (o->max_num_seqs < 1 || o->max_num_batched_tokens < 1 || o->max_model_len < 2 ||
        o->max_queued_requests < 1 || o->max_encoder_tokens < 0)
        return PGD_EINVAL;
    if (o->long_prefill_token_threshold < 0 || o->num_lookahead_tokens < 0 || o->block_size < 1 ||
        o->n_blocks < 2 || o->num_speculative_tokens < 0 ||
        o->num_speculative_tokens > PGD_MAX_DRAFT_TOKENS)
        return PGD_EINVAL;
    if (o->max_steps_in_flight < 0 || o->max_steps_in_flight > SCHEDULER_MAX_STEPS_IN_FLIGHT)
        return PGD_EINVAL;
    if (!(o->watermark >= 0.0 && o->watermark < 1.0))
        return PGD_EINVAL;
    if (o->enable_prefix_caching && o->hash_seed == NULL)
        return PGD_EINVAL;
    if (o->on_token == NULL || o->on_finished == NULL || o->on_release == NULL)
        return PGD_EINVAL;
    if (o->n_groups < 1 || o->n_groups > PGD_MAX_KV_GROUPS ||
        (o->groups == NULL && o->n_groups > 1))
        return PGD_EINVAL;
    return PGD_OK;
}

static pgd_err create_arrays(scheduler *s)
{
    size_t n = (size_t)s->opts.max_num_seqs;
    s->running = mem_calloc(n, sizeof *s->running);
    s->victims = mem_calloc(n, sizeof *s->victims);
    s->new_msgs = mem_calloc(n, sizeof *s->new_msgs);
    s->encoder_inputs = mem_calloc(n, sizeof *s->encoder_inputs);
    s->cached_msgs = mem_calloc(n, sizeof *s->cached_msgs);
    s->appends = mem_calloc(n + 1, sizeof *s->appends);
    if (!s->opts.async)
        s->draft_tokens = mem_calloc(n * PGD_MAX_DRAFT_TOKENS, sizeof *s->draft_tokens);
    s->preempted_ids = mem_calloc(n, sizeof *s->preempted_ids);
    s->finished_ids = mem_calloc(n, sizeof *s->finished_ids);
    s->sent_finished_ids = mem_calloc(n, sizeof *s->sent_finished_ids);
    s->result_of_entry = mem_calloc(n, sizeof *s->result_of_entry);
    s->prompt_of_entry = mem_calloc(n, sizeof *s->prompt_of_entry);
    bool is_complete = s->running != NULL && s->victims != NULL && s->encoder_inputs != NULL &&
                       s->new_msgs != NULL && s->cached_msgs != NULL && s->appends != NULL &&
                       s->preempted_ids != NULL && s->finished_ids != NULL &&
                       s->sent_finished_ids != NULL && s->result_of_entry != NULL &&
                       s->prompt_of_entry != NULL && (s->opts.async || s->draft_tokens != NULL);
    for (int i = 0; i < SCHEDULER_MAX_STEPS_IN_FLIGHT; i++) {
        s->records[i].entries = mem_calloc(n, sizeof *s->records[i].entries);
        is_complete = is_complete && s->records[i].entries != NULL;
    }
    return is_complete ? PGD_OK : PGD_ENOMEM;
}

/* Tokens of one request that can be scheduled and not yet known to be done, and the slots kept for
 * what comes behind them. */
static int32_t max_unfinished_tokens(const scheduler_opts *o)
{
    int64_t n = o->max_num_batched_tokens;
    if (o->long_prefill_token_threshold > 0)
        n = PGD_MIN(n, (int64_t)o->long_prefill_token_threshold);
    n = n * o->max_steps_in_flight + o->num_lookahead_tokens;
    return (int32_t)PGD_MIN(n, (int64_t)o->max_model_len);
}

static pgd_err create_parts(scheduler *s)
{
    const scheduler_opts *o = &s->opts;
    PGD_TRY(create_arrays(s));
    PGD_TRY(hash_map_create(&s->requests, (size_t)o->max_queued_requests));
    PGD_TRY(request_queue_create(
        &s->waiting, o->policy == SCHEDULER_PRIORITY ? REQUEST_QUEUE_PRIORITY : REQUEST_QUEUE_FCFS,
        o->max_queued_requests));
    if (o->enable_prefix_caching)
        PGD_TRY(block_hasher_create(&s->hasher, o->hash_seed));
    const kv_group_spec full = {.ops = kv_group_ops_of(ATTENTION_FULL),
                                .block_size = o->block_size};
    kv_manager_opts kv_opts = {
        .n_blocks = o->n_blocks,
        .groups = o->groups != NULL ? o->groups : &full,
        .n_groups = o->n_groups,
        .enable_caching = o->enable_prefix_caching,
        .use_eagle = o->use_eagle,
        .events = o->kv_events,
        .residency = o->kv_residency,
        .listener =
            s->has_connector && s->connector.blocks.published != NULL ? &s->connector.blocks : NULL,
        .hash_block_size = o->block_size,
        .max_holders = o->max_num_seqs,
        .max_model_len = o->max_model_len,
        .max_unfinished_tokens = max_unfinished_tokens(o),
    };
    return kv_manager_create(&s->kv, &kv_opts);
}

pgd_err scheduler_create(scheduler **out, const scheduler_opts *opts)
{
    *out = NULL;
    PGD_TRY(check_opts(opts));
    scheduler *s = mem_calloc(1, sizeof *s);
    if (s == NULL)
        return PGD_ENOMEM;
    s->opts = *opts;
    if (s->opts.max_steps_in_flight == 0)
        s->opts.max_steps_in_flight = SCHEDULER_MAX_STEPS_IN_FLIGHT;
    if (s->opts.max_encoder_tokens == 0)
        s->opts.max_encoder_tokens = INT32_MAX;
    s->next_step_id = 1;
    list_init(&s->set_aside);
    list_init(&s->held);
    s->has_connector = opts->connector != NULL;
    if (s->has_connector)
        s->connector = *opts->connector;
    pgd_err err = create_parts(s);
    s->opts.hash_seed = NULL; /* these were borrows */
    s->opts.connector = NULL;
    s->opts.groups = NULL;
    if (err != PGD_OK) {
        scheduler_destroy(s);
        return err;
    }
    *out = s;
    return PGD_OK;
}

void scheduler__release_if_done(scheduler *s, request *r)
{
    if (request_is_finished(r) && r->n_in_flight == 0 && !r->is_held)
        s->opts.on_release(s->opts.arg, r);
}

/* Forgets every step in flight; finished requests that were waiting for theirs are released. */
static void forget_steps(scheduler *s)
{
    for (int32_t i = 0; i < s->n_records; i++) {
        step_record *record = scheduler__record_at(s, i);
        for (int32_t e = 0; e < record->n_entries; e++) {
            request *r = record->entries[e].r;
            r->n_in_flight--;
            scheduler__release_if_done(s, r);
        }
        record->n_entries = 0;
    }
    s->n_records = 0;
}

void scheduler_destroy(scheduler *s)
{
    if (s == NULL)
        return;
    forget_steps(s);
    while (!list_is_empty(&s->held)) {
        request *r = LIST_ENTRY(s->held.next, request, queue_node);
        list_remove(&r->queue_node);
        s->opts.on_release(s->opts.arg, r);
    }
    size_t pos = 0;
    uint64_t id;
    uintptr_t value;
    while (s->requests != NULL && hash_map_next(s->requests, &pos, &id, &value))
        s->opts.on_release(s->opts.arg, (request *)value);
    hash_map_destroy(s->requests);
    request_queue_destroy(s->waiting);
    kv_manager_destroy(s->kv);
    block_hasher_destroy(s->hasher);
    for (int i = 0; i < SCHEDULER_MAX_STEPS_IN_FLIGHT; i++)
        mem_free(s->records[i].entries);
    mem_free(s->running);
    mem_free(s->victims);
    mem_free(s->new_msgs);
    mem_free(s->encoder_inputs);
    mem_free(s->cached_msgs);
    mem_free(s->draft_tokens);
    mem_free(s->appends);
    mem_free(s->preempted_ids);
    mem_free(s->finished_ids);
    mem_free(s->sent_finished_ids);
    mem_free(s->result_of_entry);
    mem_free(s->prompt_of_entry);
    mem_free(s);
}

static bool can_ever_fit(const scheduler *s, int32_t n_total_tokens, int32_t n_encoder_tokens)
{
    /* The last token is returned, never computed. */
    int64_t n_computed = (int64_t)PGD_MIN(n_total_tokens, s->opts.max_model_len) - 1;
    int64_t n_slots =
        PGD_MIN(n_computed + s->opts.num_lookahead_tokens, (int64_t)s->opts.max_model_len);
    int32_t n_usable = block_pool_n_blocks(kv_manager_get_pool(s->kv)) - 1;
    if (n_slots > 0 &&
        kv_manager_n_blocks_for(s->kv, (int32_t)n_slots, n_encoder_tokens) > n_usable)
        return false;
    /* Without chunks a whole prompt, or what is recomputed after a preemption, must fit in one
     * step. */
    int64_t n_at_once = n_computed;
    if (s->opts.long_prefill_token_threshold > 0)
        n_at_once = PGD_MIN(n_at_once, (int64_t)s->opts.long_prefill_token_threshold);
    return s->opts.enable_chunked_prefill || n_at_once <= s->opts.max_num_batched_tokens;
}

bool scheduler_can_ever_fit(const scheduler *s, int32_t n_total_tokens)
{
    return can_ever_fit(s, n_total_tokens, 0);
}

scheduler_add scheduler_add_request(scheduler *s, request *r)
{
    thread_assert(THREAD_CORE);
    PGD_ASSERTF(!request_is_finished(r) && r->kv_row < 0 && r->running_idx < 0 &&
                    r->n_in_flight == 0,
                "request %llu is not new (status %d)", (unsigned long long)r->id, r->status);
    PGD_ASSERTF(r->hash_block_size == 0 || !s->opts.enable_prefix_caching ||
                    r->hash_block_size == s->opts.block_size,
                "request %llu is hashed in blocks of %d, the pool has %d",
                (unsigned long long)r->id, r->hash_block_size, s->opts.block_size);
    if (r->n_prompt_tokens >= s->opts.max_model_len ||
        r->n_encoder_tokens > kv_manager_max_encoder_tokens(s->kv) ||
        r->n_encoder_tokens > s->opts.max_encoder_tokens ||
        !can_ever_fit(s, scheduler__limit(s, r), r->n_encoder_tokens))
        return SCHEDULER_NEVER_FITS;
    PGD_ASSERTF(scheduler_find(s, r->id) == NULL, "request id %llu is in use",
                (unsigned long long)r->id);
    if (hash_map_n_entries(s->requests) >= (size_t)s->opts.max_queued_requests ||
        !hash_map_put(s->requests, r->id, (uintptr_t)r))
        return SCHEDULER_QUEUE_FULL;
    request_queue_push(s->waiting, r);
    return SCHEDULER_ADDED;
}

request *scheduler_find(const scheduler *s, uint64_t request_id)
{
    uintptr_t value;
    return hash_map_get(s->requests, request_id, &value) ? (request *)value : NULL;
}

int32_t scheduler__watermark(const scheduler *s)
{
    return s->n_running > 0 ? (int32_t)(s->opts.watermark * s->opts.n_blocks) : 0;
}

void scheduler__remove_running(scheduler *s, request *r)
{
    int32_t idx = r->running_idx;
    PGD_ASSERTF(idx >= 0 && idx < s->n_running && s->running[idx] == r,
                "request %llu is not at %d of %d running", (unsigned long long)r->id, idx,
                s->n_running);
    s->n_running--;
    for (int32_t i = idx; i < s->n_running; i++) {
        s->running[i] = s->running[i + 1];
        s->running[i]->running_idx = i;
    }
    r->running_idx = -1;
}

void scheduler__drop_progress(scheduler *s, request *r, int32_t n_valid_tokens)
{
    kv_manager_free(s->kv, r, n_valid_tokens);
    r->num_computed_tokens = 0;
    r->n_output_placeholders = 0;
    r->n_in_flight_tokens = 0;
    r->n_draft_tokens = 0;
    r->n_held_drafts = 0;
    r->n_external_tokens = 0;
    r->n_disk_tokens = 0;
}

void scheduler__finish(scheduler *s, request *r, request_status was, request_status status,
                       request_error error, int32_t n_valid_tokens)
{
    if (was == REQUEST_RUNNING) {
        PGD_ASSERTF(s->n_finished_ids < s->opts.max_num_seqs, "%d finished ids wait for a step",
                    s->n_finished_ids);
        s->finished_ids[s->n_finished_ids++] = r->id;
    } else {
        request_queue_remove(s->waiting, r);
    }
    if (!scheduler__hold(s, r, was))
        kv_manager_free(s->kv, r, n_valid_tokens);
    r->status = status;
    bool was_known = hash_map_remove(s->requests, r->id);
    PGD_ASSERTF(was_known, "request %llu finished twice", (unsigned long long)r->id);
    s->opts.on_finished(s->opts.arg, r, error);
    scheduler__release_if_done(s, r);
}

bool scheduler_finish_request(scheduler *s, uint64_t request_id, request_status status)
{
    thread_assert(THREAD_CORE);
    PGD_ASSERTF(status == REQUEST_FINISHED_ABORTED || status == REQUEST_FINISHED_ERROR ||
                    status == REQUEST_FINISHED_STOPPED,
                "request %llu cannot be finished with status %d from outside",
                (unsigned long long)request_id, status);
    request *r = scheduler_find(s, request_id);
    if (r == NULL)
        return false;
    request_status was = r->status;
    if (was == REQUEST_RUNNING)
        scheduler__remove_running(s, r);
    scheduler__finish(s, r, was, status, REQUEST_ERROR_NONE, r->num_computed_tokens);
    return true;
}

bool scheduler_has_work(const scheduler *s)
{
    return s->n_running > 0 || request_queue_n_requests(s->waiting) > 0 || s->n_finished_ids > 0 ||
           !list_is_empty(&s->held) ||
           (s->has_connector && s->connector.has_work(s->connector.arg));
}

void scheduler_reset_worker(scheduler *s)
{
    thread_assert(THREAD_CORE);
    forget_steps(s);
    scheduler__reset_connector(s);
    s->n_finished_ids = 0;
    /* What was dispatched may never have been written: nothing stays findable. All at once, so that
     * the events tell it in one word. */
    kv_manager_forget_cache(s->kv);
    for (request *r = NULL; (r = request_queue_next(s->waiting, r)) != NULL;)
        scheduler__drop_progress(s, r, 0);
    while (s->n_running > 0) {
        request *r = s->running[s->n_running - 1];
        scheduler__remove_running(s, r);
        scheduler__drop_progress(s, r, 0);
        r->status = REQUEST_PREEMPTED;
        request_queue_push_front(s->waiting, r);
    }
    const block_pool *pool = kv_manager_get_pool(s->kv);
    PGD_ASSERTF(block_pool_n_free(pool) == block_pool_n_blocks(pool) - 1,
                "%d blocks are free after every request gave up its own", block_pool_n_free(pool));
}

int32_t scheduler_n_steps_in_flight(const scheduler *s)
{
    return s->n_records;
}

void scheduler_pump_events(scheduler *s)
{
    kv_manager_pump_events(s->kv);
}

bool scheduler_reset_prefix_cache(scheduler *s)
{
    thread_assert(THREAD_CORE);
    return kv_manager_reset_cache(s->kv);
}

void scheduler_get_stats(const scheduler *s, scheduler_stats *out)
{
    const block_pool *pool = kv_manager_get_pool(s->kv);
    *out = s->stats;
    out->n_running = s->n_running;
    out->num_speculative_tokens = s->opts.num_speculative_tokens;
    out->n_waiting = request_queue_n_requests(s->waiting);
    out->n_loading = s->n_loading;
    out->n_blocks_total = block_pool_n_blocks(pool) - 1;
    out->n_blocks_free = block_pool_n_free(pool);
    out->n_blocks_cached = block_pool_n_free_cached(pool);
}

static void check_request(const scheduler *s, const request *r)
{
    PGD_ASSERTF(scheduler_find(s, r->id) == r && !request_is_finished(r),
                "request %llu with status %d is held", (unsigned long long)r->id, r->status);
    PGD_ASSERTF(r->num_computed_tokens >= 0 && r->num_computed_tokens < scheduler__limit(s, r) &&
                    r->n_tokens < scheduler__limit(s, r),
                "request %llu: %d computed of %d tokens, at most %d", (unsigned long long)r->id,
                r->num_computed_tokens, r->n_tokens, scheduler__limit(s, r));
    /* What finished steps computed is less than what is known: the last token is always still to be
     * computed. */
    int32_t n_confirmed = r->num_computed_tokens - r->n_in_flight_tokens;
    PGD_ASSERTF(r->n_in_flight_tokens >= 0 && n_confirmed >= 0 && n_confirmed < r->n_tokens,
                "request %llu: %d computed, %d of them in flight, %d tokens",
                (unsigned long long)r->id, r->num_computed_tokens, r->n_in_flight_tokens,
                r->n_tokens);
}

static void check_held(const scheduler *s, int32_t n_loading)
{
    int32_t n_held = 0;
    for (const list_node *n = s->held.next; n != &s->held; n = n->next, n_held++) {
        const request *r = LIST_ENTRY(n, request, queue_node);
        PGD_ASSERTF(request_is_finished(r) && r->is_held && r->kv_row >= 0,
                    "request %llu is held: status %d, row %d", (unsigned long long)r->id, r->status,
                    r->kv_row);
    }
    PGD_ASSERTF(n_loading <= s->n_loading && s->n_loading <= n_loading + n_held,
                "%d loads in flight, %d requests wait for one, %d are held", s->n_loading,
                n_loading, n_held);
}

void scheduler_check(const scheduler *s)
{
    int32_t n_waiting = 0;
    int32_t n_loading = 0;
    for (request *r = NULL; (r = request_queue_next(s->waiting, r)) != NULL; n_waiting++) {
        check_request(s, r);
        PGD_ASSERTF(r->status != REQUEST_RUNNING && r->running_idx < 0,
                    "request %llu runs and waits", (unsigned long long)r->id);
        n_loading += r->status == REQUEST_WAITING_FOR_REMOTE_KVS;
    }
    for (int32_t i = 0; i < s->n_running; i++) {
        const request *r = s->running[i];
        check_request(s, r);
        PGD_ASSERTF(r->status == REQUEST_RUNNING && r->running_idx == i && r->kv_row >= 0,
                    "request %llu at %d of running: status %d, index %d, row %d",
                    (unsigned long long)r->id, i, r->status, r->running_idx, r->kv_row);
    }
    check_held(s, n_loading);
    PGD_ASSERTF((size_t)n_waiting + (size_t)s->n_running == hash_map_n_entries(s->requests) &&
                    n_waiting == request_queue_n_requests(s->waiting) &&
                    s->n_running <= s->opts.max_num_seqs && list_is_empty(&s->set_aside),
                "%d waiting, %d running, %zu known", n_waiting, s->n_running,
                hash_map_n_entries(s->requests));
    kv_manager_check(s->kv);
}
