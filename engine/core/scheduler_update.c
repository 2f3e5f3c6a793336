/* Applies the result of the oldest step in flight (rules UP).
 *
 * What a late result means is decided by the epoch that its step recorded, never by counters:
 *   request finished meanwhile       dropped
 *   epoch older than the request's   dropped: it was admitted again and recomputes those tokens
 *   same epoch, RUNNING              appended, counters settled
 *   same epoch, PREEMPTED or loading appended; there are no counters to settle
 *
 * The whole result is checked before anything changes, so that a faulty worker cannot leave half a
 * step behind. */
#include <string.h>

#include "common/mem.h"
#include "common/thread.h"
#include "engine/core/scheduler_internal.h"

static bool is_valid(const step_result *result, const request_result_msg *res, const step_entry *e)
{
    if (res->request_epoch != e->epoch)
        return false;
    if (res->error != REQUEST_ERROR_NONE)
        return true;
    int32_t max_tokens = e->is_sampled ? e->n_drafts + 1 : 0;
    if (res->n_tokens < (e->is_sampled ? 1 : 0) || res->n_tokens > max_tokens)
        return false;
    if (res->n_drafts < 0 || res->n_drafts > PGD_MAX_DRAFT_TOKENS)
        return false;
    int64_t n_logprobs = (int64_t)res->n_tokens * res->n_logprobs_per_token;
    return res->n_logprobs_per_token >= 0 && res->first_logprob >= 0 &&
           res->first_logprob + n_logprobs <= result->n_logprobs;
}

/* Entry of the request, -1 if it has no share in the step. Results come in the order of the message
 * nearly always, so the search starts at the hint. */
static int32_t find_entry(const step_record *record, uint64_t request_id, int32_t hint)
{
    for (int32_t i = hint; i < record->n_entries; i++) {
        if (record->entries[i].request_id == request_id)
            return i;
    }
    for (int32_t i = 0; i < hint; i++) {
        if (record->entries[i].request_id == request_id)
            return i;
    }
    return -1;
}

/* Fills result_of_entry (-1 = none). False when the result does not fit the step. */
static bool match_results(scheduler *s, const step_record *record, const step_result *result)
{
    int32_t n_sampled = 0;
    int32_t hint = 0;
    memset(s->result_of_entry, -1, (size_t)record->n_entries * sizeof *s->result_of_entry);
    for (int32_t k = 0; k < result->n_results; k++) {
        const request_result_msg *res = &result->results[k];
        int32_t i = find_entry(record, res->request_id, hint);
        if (i < 0 || s->result_of_entry[i] >= 0 || !is_valid(result, res, &record->entries[i]))
            return false;
        s->result_of_entry[i] = k;
        n_sampled += record->entries[i].is_sampled;
        hint = i + 1;
    }
    return n_sampled == record->n_sampled;
}

static bool is_valid_prompt(const step_result *result, const prompt_result_msg *p,
                            const step_entry *e)
{
    int64_t n_logprobs = (int64_t)p->n_tokens * p->n_logprobs_per_token;
    /* The request's own count may be gone by now: finished, or taken after an earlier epoch. */
    bool is_count_right = request_is_finished(e->r) || e->r->prompt_logprobs == NULL ||
                          p->n_logprobs_per_token == e->r->params.n_prompt_logprobs_per_token;
    return p->request_epoch == e->epoch && p->n_tokens == e->n_prompt_results && p->n_tokens > 0 &&
           p->first_token == e->n_computed + 1 && is_count_right && p->n_logprobs_per_token > 0 &&
           p->first_logprob >= 0 && p->first_logprob + n_logprobs <= result->n_prompt_logprobs;
}

/* Fills prompt_of_entry (-1 = none) if any entry has prompt results, after match_results. Requests that
 * fail in the step have none. */
static bool match_prompt_results(scheduler *s, const step_record *record, const step_result *result)
{
    int32_t hint = 0;
    if (record->n_with_prompt_results == 0)
        return result->n_prompt_results == 0;
    memset(s->prompt_of_entry, -1, (size_t)record->n_entries * sizeof *s->prompt_of_entry);
    for (int32_t k = 0; k < result->n_prompt_results; k++) {
        const prompt_result_msg *p = &result->prompt_results[k];
        int32_t i = find_entry(record, p->request_id, hint);
        if (i < 0 || s->prompt_of_entry[i] >= 0 || !is_valid_prompt(result, p, &record->entries[i]))
            return false;
        s->prompt_of_entry[i] = k;
        hint = i + 1;
    }
    for (int32_t i = 0; i < record->n_entries; i++) {
        int32_t k = s->result_of_entry[i];
        bool has_failed = k >= 0 && result->results[k].error != REQUEST_ERROR_NONE;
        if (record->entries[i].n_prompt_results > 0 && !has_failed && s->prompt_of_entry[i] < 0)
            return false;
    }
    return true;
}

/* Leaves a hole that close_holes takes out after the loop over the step. */
static void finish(scheduler *s, request *r, request_status was, request_status status,
                   request_error error, int32_t n_valid_tokens)
{
    if (was == REQUEST_RUNNING) {
        s->first_hole = PGD_MIN(s->first_hole, r->running_idx);
        s->running[r->running_idx] = NULL;
        r->running_idx = -1;
    }
    scheduler__finish(s, r, was, status, error, n_valid_tokens);
}

static void close_holes(scheduler *s)
{
    if (s->first_hole >= s->n_running)
        return;
    int32_t n_kept = s->first_hole;
    for (int32_t i = n_kept; i < s->n_running; i++) {
        request *r = s->running[i];
        if (r == NULL)
            continue;
        r->running_idx = n_kept;
        s->running[n_kept++] = r;
    }
    s->n_running = n_kept;
}

/* Drafts that were not accepted were not computed either (UP3); returned tokens are pending no more
 * (AS3). */
static void settle_counters(scheduler *s, request *r, const step_entry *e, int32_t n_returned)
{
    int32_t n_rejected = e->n_drafts - (n_returned - 1);
    r->num_computed_tokens -= n_rejected;
    if (!s->opts.async)
        return;
    r->n_output_placeholders -= n_rejected + n_returned;
    PGD_ASSERTF(r->n_output_placeholders >= 0, "request %llu: %d placeholders after %d tokens",
                (unsigned long long)r->id, r->n_output_placeholders, n_returned);
}

/* Async: what was scheduled before its tokens were known becomes findable now. */
static int32_t n_publishable_tokens(const request *r)
{
    return PGD_MIN(r->num_computed_tokens - r->n_output_placeholders, r->n_tokens);
}

static void publish_known(scheduler *s, const request *r)
{
    if (s->opts.async)
        kv_manager_publish(s->kv, r, n_publishable_tokens(r));
}

/* Appends the tokens one by one; those behind the one that stops the request are cut (ST7). */
static bool append_tokens(scheduler *s, request *r, const step_result *result,
                          const request_result_msg *res)
{
    request_status was = r->status;
    for (int32_t t = 0; t < res->n_tokens; t++) {
        request_append_token(r, res->tokens[t], s->hasher);
        s->stats.n_generated_tokens++;
        const token_logprob *logprobs = NULL;
        if (res->n_logprobs_per_token > 0)
            logprobs = result->logprobs + res->first_logprob +
                       (size_t)t * (size_t)res->n_logprobs_per_token;
        s->opts.on_token(s->opts.arg, r, res->tokens[t], logprobs, res->n_logprobs_per_token);
        if (request_check_stop(r, s->opts.max_model_len)) {
            if (was == REQUEST_RUNNING)
                publish_known(s, r);
            finish(s, r, was, r->status, REQUEST_ERROR_NONE, r->num_computed_tokens);
            return false;
        }
    }
    return true;
}

/* Only drafts that there were count: with async the step was made before the worker told how many
 * it has. */
static void count_drafts(scheduler *s, const request *r, const step_entry *e, int32_t n_returned)
{
    int32_t n_accepted = n_returned - 1;
    int32_t n_drafts = e->n_drafts;
    if (s->opts.async)
        n_drafts = PGD_MAX(PGD_MIN(n_drafts, r->n_held_drafts), n_accepted);
    if (n_drafts == 0)
        return;
    s->stats.n_drafts++;
    s->stats.n_draft_tokens += (uint64_t)n_drafts;
    s->stats.n_accepted_tokens += (uint64_t)n_accepted;
    for (int32_t i = 0; i < n_accepted; i++)
        s->stats.n_accepted_per_pos[i]++;
}

static void keep_drafts(scheduler *s, request *r, const request_result_msg *res)
{
    if (s->opts.async) {
        r->n_held_drafts = res->n_drafts;
        return;
    }
    r->n_draft_tokens = res->n_drafts;
    for (int32_t i = 0; i < res->n_drafts; i++)
        r->draft_tokens[i] = res->drafts[i];
}

static void keep_prompt_logprobs(request *r, const step_result *result, const prompt_result_msg *p)
{
    size_t n_per_token = (size_t)p->n_logprobs_per_token;
    if (r->prompt_logprobs == NULL)
        return;
    memcpy(r->prompt_logprobs + (size_t)p->first_token * n_per_token,
           result->prompt_logprobs + p->first_logprob,
           (size_t)p->n_tokens * n_per_token * sizeof *r->prompt_logprobs);
}

static void apply_entry(scheduler *s, const step_entry *e, const step_result *result,
                        const request_result_msg *res, const prompt_result_msg *prompt)
{
    request *r = e->r;
    bool has_failed = res != NULL && res->error != REQUEST_ERROR_NONE;
    r->n_in_flight--;
    /* Its keys and values are not to be trusted, not even those of earlier steps, nor once the request
     * is gone or admitted again: they may still be findable. */
    if (has_failed)
        scheduler__forget(s, r);
    if (request_is_finished(r)) {
        scheduler__release_if_done(s, r);
        return;
    }
    if (e->epoch != r->epoch)
        return;
    bool is_running = r->status == REQUEST_RUNNING;
    PGD_ASSERTF(
        is_running || r->status == REQUEST_PREEMPTED || r->status == REQUEST_WAITING_FOR_REMOTE_KVS,
        "request %llu has status %d and a step of its epoch", (unsigned long long)r->id, r->status);
    if (is_running)
        r->n_in_flight_tokens -= e->n_tokens;
    if (prompt != NULL)
        keep_prompt_logprobs(r, result, prompt);
    if (res == NULL)
        return;
    if (has_failed) {
        finish(s, r, r->status, REQUEST_FINISHED_ERROR, res->error, r->num_computed_tokens);
        return;
    }
    if (res->n_tokens == 0)
        return;
    if (is_running)
        settle_counters(s, r, e, res->n_tokens);
    count_drafts(s, r, e, res->n_tokens);
    if (!append_tokens(s, r, result, res) || !is_running)
        return;
    publish_known(s, r);
    keep_drafts(s, r, res);
}

/* What the entries behind i will touch: first the request, then the place of its next token. */
static void prefetch(const step_record *record, int32_t i)
{
    int32_t far = i + 2 * SCHEDULER_PREFETCH;
    int32_t near = i + SCHEDULER_PREFETCH;
    if (far < record->n_entries) {
        PGD_PREFETCH(record->entries[far].r);
        PGD_PREFETCH((const char *)record->entries[far].r + 64);
    }
    if (near < record->n_entries) {
        const request *r = record->entries[near].r;
        PGD_PREFETCH(r->tokens + r->n_tokens);
        if (r->n_tokens + 1 >= (r->n_block_hashes + 1) * r->hash_block_size)
            PGD_PREFETCH(r->block_hashes + r->n_block_hashes);
    }
}

static int32_t n_tokens_of(const step_record *record)
{
    int32_t n = 0;
    for (int32_t i = 0; i < record->n_entries; i++)
        n += record->entries[i].n_tokens;
    return n;
}

pgd_err scheduler_update(scheduler *s, const step_result *result)
{
    thread_assert(THREAD_CORE);
    if (s->n_records == 0)
        return PGD_EPROTO;
    const step_record *record = scheduler__record_at(s, 0);
    if (result->step_id != record->step_id || !match_results(s, record, result) ||
        !match_prompt_results(s, record, result))
        return PGD_EPROTO;
    mem_forbid();
    s->first_hole = INT32_MAX;
    if (s->has_connector)
        s->connector.on_step(s->connector.arg, n_tokens_of(record), result->forward_us);
    for (int32_t i = 0; i < record->n_entries; i++) {
        prefetch(record, i);
        int32_t k = s->result_of_entry[i];
        int32_t p = record->entries[i].n_prompt_results > 0 ? s->prompt_of_entry[i] : -1;
        apply_entry(s, &record->entries[i], result, k >= 0 ? &result->results[k] : NULL,
                    p >= 0 ? &result->prompt_results[p] : NULL);
    }
    close_holes(s);
    s->first_record = (s->first_record + 1) % SCHEDULER_MAX_STEPS_IN_FLIGHT;
    s->n_records--;
    PGD_DASSERT((scheduler_check(s), true));
    mem_permit();
    return PGD_OK;
}
