/* Makes one step (rules SC). There is no prefill or decode phase: every request gets tokens so that
 * num_computed catches up with what is known or pending, running requests first, then the waiting
 * queue.
 *
 * Index into the running list while it shrinks under the loop: a victim before or at position i
 * moves the rest down, so i follows it (by list position, whatever was scheduled).
 *
 * A victim that already has a share in this step is un-scheduled: its share leaves the record and
 * its blocks that only this step would have written are un-published. Nobody can have hit them:
 * hits happen at admission only, and after the first admission of a step nothing is preempted any
 * more (has_admission). */
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/thread.h"
#include "engine/core/scheduler_internal.h"

/* Requests between two stages of asking for memory. */
#define STAGE_GAP  12
#define LOOK_AHEAD ((2 + KV_PREFETCH_STAGES) * STAGE_GAP)

static_assert((KV_PREFETCH_STAGES - 1) * STAGE_GAP < 64, "bits of look_ahead's");

typedef enum admission {
    ADMITTED,        /* runs, or waits for its load */
    ADMISSION_LATER, /* the connector does not know yet: others may go first */
    ADMISSION_NO_ROOM,
    ADMISSION_STOP
} admission;

typedef enum slots {
    SLOTS_MADE,
    SLOTS_LATER, /* once a load has ended */
    SLOTS_NONE   /* it was preempted */
} slots;

static bool is_allowed(const scheduler *s, const request *r)
{
    if (s->step.only == NULL)
        return true;
    for (int32_t i = 0; i < s->step.n_only; i++) {
        if (s->step.only[i] == r->id)
            return true;
    }
    return false;
}

static bool is_in_step(const scheduler *s, const request *r)
{
    const step_record *record = s->step.record;
    return r->entry_idx < record->n_entries && record->entries[r->entry_idx].r == r;
}

/* Counts the prompt tokens that a share computes; sign -1 takes them back. */
static void count_prompt_tokens(scheduler *s, const request *r, const step_entry *e, int32_t sign)
{
    int32_t end = PGD_MIN(e->n_computed + e->n_tokens, r->n_prompt_tokens);
    if (end <= e->n_computed)
        return;
    int32_t n_again = PGD_MAX(PGD_MIN(end, e->n_prompt_seen) - e->n_computed, 0);
    s->stats.n_prompt_recomputed_tokens += (uint64_t)(sign * n_again);
    s->stats.n_prompt_computed_tokens += (uint64_t)(sign * (end - e->n_computed - n_again));
}

/* Gives the request its share of the step, of which the last n_drafts tokens are drafts. SC9:
 * num_computed advances before the step has run, so that the next one can be scheduled. */
static void add_entry(scheduler *s, request *r, int32_t n_tokens, int32_t n_drafts)
{
    step_record *record = s->step.record;
    PGD_ASSERTF(record->n_entries < s->opts.max_num_seqs, "%d requests in one step",
                record->n_entries);
    PGD_ASSERTF(n_tokens > 0 && n_tokens <= s->step.budget, "request %llu gets %d of %d tokens",
                (unsigned long long)r->id, n_tokens, s->step.budget);
    r->entry_idx = record->n_entries++;
    step_entry *e = &record->entries[r->entry_idx];
    int32_t n_end = r->num_computed_tokens + n_tokens;
    int32_t n_prompt_left = r->n_prompt_tokens - 1 - r->num_computed_tokens;
    *e = (step_entry){.r = r,
                      .request_id = r->id,
                      .epoch = r->epoch,
                      .n_tokens = n_tokens,
                      .n_drafts = n_drafts,
                      .n_computed = r->num_computed_tokens,
                      .n_prompt_seen = r->n_prompt_seen,
                      .is_sampled = n_end >= r->n_tokens + r->n_output_placeholders};
    if (n_prompt_left > 0 && r->prompt_logprobs != NULL) {
        e->n_prompt_results = PGD_MIN(n_tokens, n_prompt_left);
        record->n_with_prompt_results++;
    }
    count_prompt_tokens(s, r, e, 1);
    s->step.budget -= n_tokens;
    record->n_sampled += e->is_sampled;
    r->n_prompt_seen = PGD_MAX(r->n_prompt_seen, PGD_MIN(n_end, r->n_prompt_tokens));
    r->num_computed_tokens = n_end;
    r->n_draft_tokens = 0;
    if (e->is_sampled && s->opts.async) {
        r->n_output_placeholders += 1 + n_drafts;
        r->n_draft_tokens = s->opts.num_speculative_tokens;
    }
    r->n_in_flight++;
    r->n_in_flight_tokens += n_tokens;
}

static void drop_append(scheduler *s, uint64_t request_id)
{
    int32_t i = 0;
    while (i < s->step.n_appends && s->appends[i].request_id != request_id)
        i++;
    if (i == s->step.n_appends)
        return;
    s->step.n_appends--;
    for (; i < s->step.n_appends; i++)
        s->appends[i] = s->appends[i + 1];
}

/* Takes back what add_entry did; the drafts are gone. */
static void unschedule(scheduler *s, request *r)
{
    step_record *record = s->step.record;
    int32_t idx = r->entry_idx;
    const step_entry e = record->entries[idx];
    PGD_ASSERTF(!s->step.has_admission && idx < s->step.n_cached,
                "request %llu was admitted in this step", (unsigned long long)r->id);
    count_prompt_tokens(s, r, &e, -1);
    s->step.budget += e.n_tokens;
    record->n_sampled -= e.is_sampled;
    record->n_with_prompt_results -= e.n_prompt_results > 0;
    r->n_prompt_seen = e.n_prompt_seen;
    r->num_computed_tokens = e.n_computed;
    if (e.is_sampled && s->opts.async)
        r->n_output_placeholders -= 1 + e.n_drafts;
    r->n_in_flight--;
    r->n_in_flight_tokens -= e.n_tokens;
    record->n_entries--;
    s->step.n_cached--;
    for (int32_t i = idx; i < record->n_entries; i++) {
        record->entries[i] = record->entries[i + 1];
        record->entries[i].r->entry_idx = i;
        s->cached_msgs[i] = s->cached_msgs[i + 1];
    }
    drop_append(s, r->id);
}

/* SC4. Late results of the steps in flight are still wanted: the epoch does not change here. */
static void preempt(scheduler *s, request *r)
{
    if (is_in_step(s, r))
        unschedule(s, r);
    scheduler__remove_running(s, r);
    scheduler__drop_progress(s, r, r->num_computed_tokens);
    r->status = REQUEST_PREEMPTED;
    r->num_preemptions++;
    r->preempted_step = s->step.step_id;
    s->preempted_ids[s->step.n_preempted++] = r->id;
    s->stats.n_preemptions++;
    request_queue_push_front(s->waiting, r);
}

/* SC3: the newest one, or the one that comes last by priority. */
static request *choose_victim(const scheduler *s)
{
    request *victim = s->running[s->n_running - 1];
    if (s->opts.policy == SCHEDULER_FCFS)
        return victim;
    for (int32_t i = 0; i < s->n_running; i++) {
        if (request_queue_is_before(victim, s->running[i]))
            victim = s->running[i];
    }
    return victim;
}

/* Tokens to compute for a running request now (SC2 a-d); 0 or less = skip it. Its last token is
 * never computed; that bound also stops an async request whose last token is still in flight
 * (SC2a). */
static int32_t count_running_tokens(const scheduler *s, const request *r)
{
    int32_t n = r->n_tokens + r->n_draft_tokens + r->n_output_placeholders - r->num_computed_tokens;
    if (s->opts.long_prefill_token_threshold > 0)
        n = PGD_MIN(n, s->opts.long_prefill_token_threshold);
    n = PGD_MIN(n, s->step.budget);
    return PGD_MIN(n, scheduler__limit(s, r) - 1 - r->num_computed_tokens);
}

/* has_new: the next append is filled. */
static void record_running(scheduler *s, request *r, int32_t n, bool has_new)
{
    int32_t n_known = r->n_tokens + r->n_output_placeholders;
    int32_t n_drafts = PGD_MAX(r->num_computed_tokens + n - n_known, 0);
    cached_request_msg *msg = &s->cached_msgs[s->step.n_cached++];
    msg->request_id = r->id;
    msg->n_computed_tokens = r->num_computed_tokens;
    msg->n_scheduled_tokens = n;
    msg->n_draft_tokens = n_drafts;
    msg->first_draft_token = 0;
    s->appends[s->step.n_appends].request_id = r->id;
    s->step.n_appends += has_new;
    add_entry(s, r, n, n_drafts);
}

static bool is_ready(const request *r)
{
    return r->status == REQUEST_WAITING || r->status == REQUEST_PREEMPTED;
}

static request *newer_holder(request *a, request *b)
{
    if (b->kv_row < 0)
        return a;
    if (a == NULL || b->arrival_us > a->arrival_us ||
        (b->arrival_us == a->arrival_us && b->id > a->id))
        return b;
    return a;
}

/* Of those that wait with blocks that were loaded for them, the newest one that must not be served
 * before r: r would only preempt itself for it and be admitted again ahead of it, for ever. */
static request *find_idle_holder(const scheduler *s, const request *r)
{
    bool is_fcfs = s->opts.policy == SCHEDULER_FCFS;
    request *newest = NULL;
    for (request *w = NULL; (w = request_queue_next(s->waiting, w)) != NULL;) {
        if (is_ready(w) && (is_fcfs || w->priority >= r->priority))
            newest = newer_holder(newest, w);
    }
    return newest;
}

/* Finds room for a running request, at the cost of others if need be; *has_new: in blocks that fill the
 * next append. A request that would have to
 * go itself stays and waits while loads hold blocks, which end without it: it would only
 * compute again what it has, and meet the next load. */
static slots make_slots(bool *has_new, scheduler *s, request *r, int32_t n, int32_t *idx)
{
    block_ids_msg *blocks = &s->appends[s->step.n_appends].blocks;
    kv_alloc alloc = {
        .n_new_tokens = n,
        .n_lookahead_tokens = s->opts.num_lookahead_tokens,
        .n_in_flight_tokens = r->n_in_flight_tokens,
    };
    *has_new = false;
    if (kv_manager_is_quiet(s->kv, r, n, s->opts.num_lookahead_tokens))
        return SLOTS_MADE;
    while (!kv_manager_allocate(blocks, s->kv, r, &alloc)) {
        request *victim = choose_victim(s);
        request *holder = victim == r ? find_idle_holder(s, r) : NULL;
        if (holder != NULL) {
            scheduler__drop_progress(s, holder, holder->num_computed_tokens);
            continue;
        }
        if (victim == r && s->n_loading > 0)
            return SLOTS_LATER;
        if (victim->running_idx < *idx)
            --*idx;
        preempt(s, victim);
        if (victim == r)
            return SLOTS_NONE;
        blocks = &s->appends[s->step.n_appends].blocks;
    }
    for (int32_t g = 0; g < s->opts.n_groups; g++)
        *has_new = *has_new || blocks->n_blocks[g] > 0;
    return SLOTS_MADE;
}

/* Asks for the memory of requests behind position i, which may be before the first: of all of them
 * their own; of those whose rows will change what that touches, in stages, since where one thing lies
 * stands in another. Bit b of *changing: the row of the request b positions before the newest one that
 * was looked at changes. */
static void look_ahead(const scheduler *s, int32_t i, uint64_t *changing)
{
    int32_t idx = i + LOOK_AHEAD;
    if (idx < s->n_running)
        PGD_PREFETCH(s->running[idx]);
    *changing <<= 1;
    idx -= 2 * STAGE_GAP;
    if (idx >= 0 && idx < s->n_running)
        *changing |= !kv_manager_is_quiet(s->kv, s->running[idx], 1, s->opts.num_lookahead_tokens);
    for (int32_t stage = 0; stage < KV_PREFETCH_STAGES; stage++, idx -= STAGE_GAP) {
        if ((*changing >> (stage * STAGE_GAP) & 1) != 0 && idx < s->n_running)
            kv_manager_prefetch(s->kv, s->running[idx], stage);
    }
}

static void schedule_running(scheduler *s)
{
    uint64_t changing = 0;
    for (int32_t i = -LOOK_AHEAD; i < s->n_running && s->step.budget > 0; i++) {
        look_ahead(s, i, &changing);
        if (i < 0)
            continue;
        request *r = s->running[i];
        int32_t n = count_running_tokens(s, r);
        if (n <= 0)
            continue;
        bool has_new;
        slots made = make_slots(&has_new, s, r, n, &i);
        if (made == SLOTS_NONE)
            return;
        if (made == SLOTS_MADE)
            record_running(s, r, n, has_new);
        else
            s->step.is_short = true;
    }
}

static void record_new(scheduler *s, request *r, int32_t n)
{
    new_request_msg *msg = &s->new_msgs[s->step.n_new++];
    msg->request_id = r->id;
    msg->request_epoch = r->epoch;
    msg->n_prompt_tokens = r->n_prompt_tokens;
    msg->n_tokens = r->n_tokens;
    msg->tokens = r->tokens;
    msg->n_computed_tokens = r->num_computed_tokens;
    msg->n_scheduled_tokens = n;
    msg->params = r->params;
    msg->n_encoder_tokens = r->n_encoder_tokens;
    msg->encoder_tokens = r->encoder_tokens;
    if (r->n_encoder_tokens > 0) {
        s->encoder_inputs[s->step.n_encoder_inputs++] =
            (encoder_input_msg){.request_id = r->id, .n_tokens = r->n_encoder_tokens};
        s->step.encoder_budget -= r->n_encoder_tokens;
        *(r->n_prompt_seen == 0 ? &s->stats.n_prompt_computed_tokens
                                : &s->stats.n_prompt_recomputed_tokens) +=
            (uint64_t)r->n_encoder_tokens;
    }
    kv_manager_get_table(&msg->blocks, s->kv, r);
    add_entry(s, r, n, 0);
}

static void count_first_admission(scheduler *s, request *r, int32_t n_cached)
{
    r->num_cached_tokens = n_cached;
    r->num_disk_tokens = r->n_disk_tokens;
    r->num_host_tokens = r->n_external_tokens - r->n_disk_tokens;
    s->stats.n_external_hit_tokens += (uint64_t)r->n_external_tokens;
    s->stats.n_disk_hit_tokens += (uint64_t)r->n_disk_tokens;
    if (s->has_connector && !r->skip_prefix_lookup)
        s->stats.n_external_queries_tokens +=
            (uint64_t)(r->n_tokens - n_cached + r->n_external_tokens);
    r->n_prompt_seen = n_cached;
    s->stats.n_prompt_tokens += (uint64_t)r->n_prompt_tokens + (uint64_t)r->n_encoder_tokens;
    if (s->opts.enable_prefix_caching && !r->skip_prefix_lookup) {
        s->stats.n_prefix_queries_tokens += (uint64_t)r->n_tokens;
        s->stats.n_prefix_hit_tokens += (uint64_t)(n_cached - r->n_external_tokens);
    }
}

/* n_computed_tokens: those that were loaded included. */
static void admit(scheduler *s, request *r, int32_t n_computed_tokens)
{
    request_queue_remove(s->waiting, r);
    r->status = REQUEST_RUNNING;
    r->epoch++;
    r->num_computed_tokens = n_computed_tokens;
    if (request_n_output_tokens(r) == 0)
        r->scheduled_us = clock_now_us();
    if (r->num_cached_tokens < 0)
        count_first_admission(s, r, r->num_computed_tokens);
    r->running_idx = s->n_running;
    s->running[s->n_running++] = r;
    scheduler__tell_allocated(s, r, n_computed_tokens, 0);
}

/* SC5 b-g for the head of the queue. */
static admission try_admit(scheduler *s, request *r)
{
    if (s->n_running >= s->opts.max_num_seqs)
        return ADMISSION_NO_ROOM;
    /* SC5d: its input goes through the encoder in the step of its admission, whole. */
    if (r->n_encoder_tokens > s->step.encoder_budget)
        return ADMISSION_STOP;
    const kv_hit *hit = NULL;
    kv_match match = {.kind = KV_MATCH_NONE};
    int32_t n_local = r->num_computed_tokens;
    if (r->kv_row < 0) { /* else it was loaded */
        hit = kv_manager_lookup(s->kv, r);
        n_local += hit->n_tokens;
        match = scheduler__match(s, r, n_local);
    }
    if (match.kind == KV_MATCH_ASK_AGAIN)
        return ADMISSION_LATER;
    bool is_load = match.kind == KV_MATCH_HIT;
    int32_t n = is_load ? 0 : r->n_tokens - n_local;
    if (s->opts.long_prefill_token_threshold > 0)
        n = PGD_MIN(n, s->opts.long_prefill_token_threshold);
    if (!s->opts.enable_chunked_prefill && n > s->step.budget)
        return ADMISSION_STOP;
    n = PGD_MIN(n, s->step.budget);
    kv_alloc alloc = {
        .n_new_tokens = n,
        .hit = hit,
        .n_external_tokens = match.n_tokens,
        .n_lookahead_tokens = r->num_computed_tokens == 0 ? 0 : s->opts.num_lookahead_tokens,
        .n_spare_blocks = scheduler__watermark(s),
        .is_admission = true,
        .must_fit_whole = !s->opts.admit_partly,
    };
    if (!kv_manager_allocate(NULL, s->kv, r, &alloc))
        return ADMISSION_NO_ROOM;
    s->step.has_admission = true;
    if (is_load) {
        scheduler__start_load(s, r, n_local, &match);
    } else {
        admit(s, r, n_local);
        record_new(s, r, n);
    }
    return ADMITTED;
}

/* Under the priority policy: takes one strictly lower request out if that leads to room for r. */
static bool preempt_for(scheduler *s, const request *r)
{
    if (s->opts.policy != SCHEDULER_PRIORITY || s->step.has_admission || r->kv_row >= 0)
        return false;
    int32_t n_victims = 0;
    for (int32_t i = 0; i < s->n_running; i++) {
        if (s->running[i]->priority > r->priority)
            s->victims[n_victims++] = s->running[i];
    }
    if (n_victims == 0)
        return false;
    int32_t n_spare = n_victims < s->n_running ? scheduler__watermark(s) : 0;
    const kv_hit *hit = kv_manager_lookup(s->kv, r);
    if (!kv_manager_would_fit(s->kv, r, hit, s->victims, n_victims, n_spare))
        return false;
    preempt(s, choose_victim(s));
    return true;
}

/* Nothing that happens by itself will give blocks back. */
static bool is_at_rest(const scheduler *s)
{
    return s->n_running == 0 && s->n_records == 0 && s->n_loading == 0;
}

/* When nothing runs, loads or is in flight, only waiting requests can hold the blocks that the head
 * lacks: the newest of them gives its blocks back. */
static bool release_holder(scheduler *s, const request *head)
{
    if (!is_at_rest(s))
        return false;
    request *newest = NULL;
    for (request *r = NULL; (r = request_queue_next(s->waiting, r)) != NULL;) {
        if (r != head)
            newest = newer_holder(newest, r);
    }
    for (list_node *n = s->set_aside.next; n != &s->set_aside; n = n->next)
        newest = newer_holder(newest, LIST_ENTRY(n, request, queue_node));
    if (newest == NULL)
        return false;
    scheduler__drop_progress(s, newest, newest->num_computed_tokens);
    return true;
}

static void put_aside(scheduler *s, request *r)
{
    request_queue_remove(s->waiting, r);
    list_append(&s->set_aside, &r->queue_node);
}

static void schedule_waiting(scheduler *s)
{
    while (s->step.budget > 0) {
        request *r = request_queue_peek(s->waiting);
        if (r == NULL)
            break;
        if (!is_ready(r) || !is_allowed(s, r)) {
            put_aside(s, r);
            continue;
        }
        /* Back in this very step would be a loop: it gave way to somebody. */
        if (r->preempted_step == s->step.step_id)
            break;
        admission a;
        while ((a = try_admit(s, r)) == ADMISSION_NO_ROOM) {
            if (!preempt_for(s, r) && !release_holder(s, r))
                break;
        }
        PGD_ASSERTF(a != ADMISSION_NO_ROOM || !is_at_rest(s),
                    "request %llu of %d tokens cannot start although nothing runs",
                    (unsigned long long)r->id, r->n_tokens);
        if (a == ADMISSION_LATER)
            put_aside(s, r);
        else if (a != ADMITTED)
            break;
    }
    while (!list_is_empty(&s->set_aside)) {
        request *r = LIST_ENTRY(s->set_aside.prev, request, queue_node);
        list_remove(&r->queue_node);
        request_queue_push_front(s->waiting, r);
    }
}

/* Requests that are not to run give their place to those that are, newest first so that they keep
 * their order. */
static void preempt_excluded(scheduler *s)
{
    for (int32_t i = s->n_running - 1; i >= 0; i--) {
        if (!is_allowed(s, s->running[i]))
            preempt(s, s->running[i]);
    }
}

/* AS2: the worker makes drafts behind the tokens of a step; a request that sits this step out has
 * none for the next. */
static void clear_stale_drafts(scheduler *s)
{
    if (!s->opts.async || s->opts.num_speculative_tokens == 0)
        return;
    for (int32_t i = 0; i < s->n_running; i++) {
        if (!is_in_step(s, s->running[i]))
            s->running[i]->n_draft_tokens = 0;
    }
}

/* With async the worker has them. */
static int32_t gather_drafts(scheduler *s)
{
    int32_t n_drafts = 0;
    for (int32_t i = 0; !s->opts.async && i < s->step.n_cached; i++) {
        cached_request_msg *msg = &s->cached_msgs[i];
        const request *r = s->step.record->entries[i].r;
        msg->first_draft_token = n_drafts;
        if (msg->n_draft_tokens > 0)
            memcpy(s->draft_tokens + n_drafts, r->draft_tokens,
                   (size_t)msg->n_draft_tokens * sizeof *s->draft_tokens);
        n_drafts += msg->n_draft_tokens;
    }
    return n_drafts;
}

static bool finish_step(scheduler *s, scheduler_output *out)
{
    const step_record *record = s->step.record;
    int32_t n_total = s->opts.max_num_batched_tokens - s->step.budget;
    PGD_ASSERTF(s->n_running <= s->opts.max_num_seqs &&
                    s->step.n_new + s->step.n_cached == record->n_entries &&
                    record->n_entries <= s->n_running,
                "%d new and %d continuing of %d running", s->step.n_new, s->step.n_cached,
                s->n_running);
    *out = (scheduler_output){
        .step_id = s->step.step_id,
        .total_scheduled_tokens = n_total,
        .n_groups = s->opts.n_groups,
        .n_new = s->step.n_new,
        .new_requests = s->new_msgs,
        .n_encoder_inputs = s->step.n_encoder_inputs,
        .encoder_inputs = s->encoder_inputs,
        .n_cached = s->step.n_cached,
        .cached_requests = s->cached_msgs,
        .n_draft_tokens = gather_drafts(s),
        .draft_tokens = s->draft_tokens,
        .n_appends = s->step.n_appends,
        .appends = s->appends,
        .n_finished = s->n_finished_ids,
        .finished_ids = s->finished_ids,
        .n_preempted = s->step.n_preempted,
        .preempted_ids = s->preempted_ids,
    };
    out->n_blocks_to_zero = kv_manager_take_blocks_to_zero(&out->blocks_to_zero, s->kv);
    if (s->n_running > 0)
        kv_manager_common_prefix(out->n_common_prefix_blocks, s->kv);
    bool must_send = s->has_connector && s->connector.build_step(s->connector.arg, out);
    clear_stale_drafts(s);
    if (n_total == 0 && out->n_finished == 0 && out->n_preempted == 0 &&
        out->n_blocks_to_zero == 0 && out->n_transfers == 0 && !must_send)
        return false;
    uint64_t *sent = s->finished_ids;
    s->finished_ids = s->sent_finished_ids;
    s->sent_finished_ids = sent;
    s->n_finished_ids = 0;
    s->n_records++;
    s->next_step_id++;
    return true;
}

bool scheduler_schedule(scheduler *s, scheduler_output *out, const uint64_t *only, int32_t n_only)
{
    thread_assert(THREAD_CORE);
    PGD_ASSERTF(s->n_records < s->opts.max_steps_in_flight, "%d steps are in flight", s->n_records);
    mem_forbid();
    scheduler__take_loaded(s);
    kv_manager_pump_events(s->kv);
    s->step = (step_draft){
        .step_id = s->next_step_id,
        .record = scheduler__record_at(s, s->n_records),
        .budget = s->opts.max_num_batched_tokens,
        .encoder_budget = s->opts.max_encoder_tokens,
        .only = only,
        .n_only = n_only,
    };
    s->step.record->step_id = s->next_step_id;
    s->step.record->n_entries = 0;
    s->step.record->n_sampled = 0;
    s->step.record->n_with_prompt_results = 0;
    if (only != NULL)
        preempt_excluded(s);
    int32_t n_excluded = s->step.n_preempted;
    schedule_running(s);
    if (s->step.n_preempted == n_excluded && !s->step.is_short)
        schedule_waiting(s);
    bool is_step = finish_step(s, out);
    mem_permit();
    return is_step;
}
