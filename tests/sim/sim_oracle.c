/* Each check states a rule as it reads, by brute force, and none shares code with the engine beyond
 * the question whether a hash is published. */
#include "tests/sim/sim_oracle.h"

#include <string.h>

static bool is_cached_kind(const sim_group *group)
{
    return group->kind != ATTENTION_CROSS;
}

/* Tokens of which every hit is a multiple. */
static int32_t alignment_of(const sim_config *c)
{
    int32_t lcm = c->block_size;
    for (int32_t g = 0; g < c->n_groups; g++) {
        int32_t step = lcm;
        while (is_cached_kind(&c->groups[g]) && lcm % c->groups[g].block_size != 0)
            lcm += step;
    }
    return lcm;
}

/* Block i of the group is known by the hash of its last hash block. */
static bool is_published(const sim_state *s, int32_t g, const block_hash *hashes, int32_t n_hashes,
                         int32_t i)
{
    int32_t n_per_block = s->config->groups[g].block_size / s->config->block_size;
    int32_t h = (i + 1) * n_per_block - 1;
    return h < n_hashes && block_pool_lookup(kv_manager_get_pool(s->sched->kv), &hashes[h], g) >= 0;
}

static bool is_dropping(const sim_config *c, int32_t g)
{
    bool is_any_marked = false;
    for (int32_t i = 0; i < c->n_groups; i++)
        is_any_marked = is_any_marked || c->groups[i].is_eagle != 0;
    return c->use_eagle != 0 && (c->groups[g].is_eagle != 0 || !is_any_marked);
}

/* A prefix of n tokens can be reused by the group when the next position finds all that it reads;
 * for a draft head that continues hidden states the block behind it must be there too. */
static bool is_hit_of(const sim_state *s, const request *r, int32_t g, int32_t n)
{
    const sim_group *group = &s->config->groups[g];
    int32_t n_known = PGD_MIN(r->n_block_hashes * s->config->block_size, r->n_tokens - 1);
    int32_t end = n / group->block_size + is_dropping(s->config, g);
    if (n > n_known || end * group->block_size > n_known)
        return false;
    for (int32_t i = sim_first_read(group, n) / group->block_size; i < end; i++) {
        if (!is_published(s, g, r->block_hashes, r->n_block_hashes, i))
            return false;
    }
    return true;
}

static bool is_hit(const sim_state *s, const request *r, int32_t n)
{
    for (int32_t g = 0; g < s->config->n_groups; g++) {
        if (is_cached_kind(&s->config->groups[g]) && !is_hit_of(s, r, g, n))
            return false;
    }
    return n <= r->n_block_hashes * s->config->block_size;
}

void sim_oracle_check_lookup(sim_state *s)
{
    const request *r = request_queue_peek(s->sched->waiting);
    if (r == NULL || r->kv_row >= 0)
        return;
    int32_t step = alignment_of(s->config);
    int32_t n = (r->n_tokens - 1) / step * step;
    bool is_on = s->config->enable_prefix_caching && !r->skip_prefix_lookup;
    while (n > 0 && (!is_on || !is_hit(s, r, n)))
        n -= step;
    const kv_hit *hit = kv_manager_lookup(s->sched->kv, r);
    SIM_CHECK(s, hit->n_tokens == n, "request %d hits %d tokens, expected %d", (int)r->id,
              hit->n_tokens, n);
    for (int32_t g = 0; g < s->config->n_groups; g++) {
        int32_t bs = s->config->groups[g].block_size;
        n = is_on && is_cached_kind(&s->config->groups[g]) ? (r->n_tokens - 1) / bs * bs : 0;
        while (n > 0 && !is_hit_of(s, r, g, n))
            n -= bs;
        int32_t n_found = kv_manager_lookup_group(&hit, s->sched->kv, r, g);
        SIM_CHECK(s, n_found == n, "request %d hits %d tokens in group %d, expected %d", (int)r->id,
                  n_found, g, n);
    }
}

void sim_oracle_remember(sim_state *s, const request *r)
{
    sim_past *past = &s->past[s->next_past];
    s->next_past = (s->next_past + 1) % SIM_N_PAST;
    past->n_hashes = r->n_block_hashes;
    if (r->n_block_hashes > 0)
        memcpy(past->hashes, r->block_hashes, (size_t)r->n_block_hashes * sizeof *r->block_hashes);
}

void sim_oracle_check_eviction(const sim_state *s)
{
    if (!s->config->enable_prefix_caching || s->has_errors)
        return;
    for (int32_t p = 0; p < SIM_N_PAST; p++) {
        const sim_past *past = &s->past[p];
        for (int32_t g = 0; g < s->config->n_groups; g++) {
            if (s->config->groups[g].kind != ATTENTION_FULL)
                continue;
            int32_t n = past->n_hashes * s->config->block_size / s->config->groups[g].block_size;
            bool was_published = true;
            for (int32_t i = 0; i < n; i++) {
                bool is_now = is_published(s, g, past->hashes, past->n_hashes, i);
                SIM_CHECK(s, was_published || !is_now,
                          "block %d of a finished request is kept, the one before it is not, "
                          "group %d",
                          i, g);
                was_published = is_now;
            }
        }
    }
}

void sim_oracle_check_published(const sim_state *s)
{
    if (!s->config->enable_prefix_caching || s->has_errors)
        return;
    int32_t step = alignment_of(s->config);
    /* Without async, what a result brought waits for the next step. */
    int32_t n_late = s->config->is_async != 0 ? 0 : s->config->max_drafts + 1;
    for (int32_t k = 0; k < s->sched->n_running; k++) {
        const request *r = s->sched->running[k];
        int32_t n =
            PGD_MIN(r->num_computed_tokens - r->n_output_placeholders, r->n_tokens - n_late);
        n = PGD_MIN(n, r->n_block_hashes * s->config->block_size) / step * step;
        for (int32_t g = 0; g < s->config->n_groups && n > 0; g++) {
            const sim_group *group = &s->config->groups[g];
            int32_t last = n / group->block_size - 1;
            int32_t n_ahead = PGD_MAX(n, r->num_computed_tokens);
            if (!is_cached_kind(group) || sim_first_read(group, n_ahead) / group->block_size > last)
                continue;
            SIM_CHECK(s, is_published(s, g, r->block_hashes, r->n_block_hashes, last),
                      "request %d at %d of %d: block %d of group %d is not findable", (int)r->id,
                      r->num_computed_tokens, r->n_tokens, last, g);
        }
    }
}

void sim_oracle_check_windows(const sim_state *s, const scheduler_output *out)
{
    for (int32_t k = 0; k < out->n_cached; k++) {
        const request *r = scheduler_find(s->sched, out->cached_requests[k].request_id);
        block_ids_msg tables;
        kv_manager_get_table(&tables, s->sched->kv, r);
        int32_t n_confirmed = r->num_computed_tokens - r->n_in_flight_tokens;
        for (int32_t g = 0; g < s->config->n_groups; g++) {
            const sim_group *group = &s->config->groups[g];
            int32_t n_skipped = sim_first_read(group, n_confirmed) / group->block_size;
            for (int32_t i = 0; i < n_skipped; i++)
                SIM_CHECK(s, tables.ids[g][i] == 0,
                          "request %d at %d still holds block %d, entry %d of group %d", (int)r->id,
                          n_confirmed, tables.ids[g][i], i, g);
            s->total->n_null_entries += (uint64_t)n_skipped;
        }
    }
}

/* Blocks of one request at a time: those of the window, and those of what is scheduled and not known
 * to be done (SM9). */
static int32_t n_live_blocks(const sim_config *c, const sim_group *group)
{
    int32_t n_at_once = c->max_num_batched_tokens;
    if (c->long_prefill_token_threshold > 0)
        n_at_once = PGD_MIN(n_at_once, c->long_prefill_token_threshold);
    int32_t n = n_at_once * c->depth + c->num_lookahead_tokens;
    n = PGD_MIN(n, c->max_model_len) + group->window;
    if (group->kind == ATTENTION_SLIDING)
        return PGD_CEIL_DIV(PGD_MIN(n - 1, c->max_model_len), group->block_size) + 1;
    if (group->kind == ATTENTION_CHUNKED)
        return PGD_CEIL_DIV(PGD_MIN(n, c->max_model_len), group->block_size) +
               (group->window % group->block_size != 0);
    return INT32_MAX;
}

bool sim_oracle_fits(const sim_config *c, int32_t n_total_tokens, int32_t n_encoder)
{
    /* The last token is never computed. */
    int32_t n_computed = PGD_MIN(n_total_tokens, c->max_model_len) - 1;
    int32_t n_slots = PGD_MIN(n_computed + c->num_lookahead_tokens, c->max_model_len);
    int32_t n_blocks = 0;
    for (int32_t g = 0; g < c->n_groups; g++) {
        const sim_group *group = &c->groups[g];
        int32_t n_tokens = group->kind == ATTENTION_CROSS ? n_encoder : n_slots;
        n_blocks += PGD_MIN(PGD_CEIL_DIV(n_tokens, group->block_size), n_live_blocks(c, group));
    }
    int32_t n_at_once = n_computed;
    if (c->long_prefill_token_threshold > 0)
        n_at_once = PGD_MIN(n_at_once, c->long_prefill_token_threshold);
    return n_blocks <= c->n_blocks - 1 && n_encoder <= sim_max_encoder(c) &&
           (c->max_encoder_tokens == 0 || n_encoder <= c->max_encoder_tokens) &&
           (c->enable_chunked_prefill || n_at_once <= c->max_num_batched_tokens);
}

void sim_oracle_take_snapshot(sim_snapshot *snapshot, const sim_state *s)
{
    snapshot->n_running = s->sched->n_running;
    for (int32_t i = 0; i < snapshot->n_running; i++)
        snapshot->running[i] = s->sched->running[i]->id;
    snapshot->n_waiting = 0;
    for (request *r = NULL; (r = request_queue_next(s->sched->waiting, r)) != NULL;)
        snapshot->waiting[snapshot->n_waiting++] = r->id;
}

static bool is_scheduled(const scheduler_output *out, uint64_t id)
{
    for (int32_t i = 0; i < out->n_cached; i++) {
        if (out->cached_requests[i].request_id == id)
            return true;
    }
    return false;
}

static bool is_admitted(const scheduler_output *out, uint64_t id)
{
    for (int32_t i = 0; i < out->n_new; i++) {
        if (out->new_requests[i].request_id == id)
            return true;
    }
    return false;
}

/* While loads or sends hold blocks, the one that would have to give way under the priority policy
 * may wait where it is. */
static bool could_run(const sim_state *s, const request *r)
{
    if (s->config->policy == SCHEDULER_PRIORITY &&
        (s->sched->n_loading > 0 || !list_is_empty(&s->sched->held)))
        return false;
    int32_t n = r->n_tokens + r->n_draft_tokens + r->n_output_placeholders;
    n = PGD_MIN(n, s->lives[r->id].limit - 1);
    return r->status == REQUEST_RUNNING && n > r->num_computed_tokens;
}

/* Of two that wait: who ran before goes ahead, then who came first; under the priority policy each
 * priority is a queue of its own. Among those that ran before fcfs goes by the time they stopped. */
static bool is_ahead(const sim_state *s, const sim_life *a, const sim_life *b)
{
    bool a_ran = a->admitted_in != 0;
    bool b_ran = b->admitted_in != 0;
    if (s->config->policy == SCHEDULER_PRIORITY && a->request->priority != b->request->priority)
        return a->request->priority < b->request->priority;
    if (a_ran != b_ran)
        return a_ran;
    if (a_ran && s->config->policy == SCHEDULER_FCFS)
        return false;
    return a->request->id < b->request->id;
}

void sim_oracle_check_order(const sim_state *s, const sim_snapshot *before,
                            const scheduler_output *out, bool has_only)
{
    bool is_later_scheduled = false;
    for (int32_t i = before->n_running - 1; i >= 0; i--) {
        uint64_t id = before->running[i];
        if (is_scheduled(out, id)) {
            is_later_scheduled = true;
            continue;
        }
        const request *r = scheduler_find(s->sched, id);
        SIM_CHECK(s, !is_later_scheduled || r->running_idx < 0 || !could_run(s, r),
                  "request %d could run but was passed over", (int)id);
    }
    for (int32_t i = 0; i < before->n_waiting && out->n_new > 0 && !has_only; i++) {
        uint64_t id = before->waiting[i];
        /* Those that the tier deals with go back to the head of the queue when it is done. */
        if (is_admitted(out, id) || s->watch.was_delayed[id])
            continue;
        for (int32_t k = 0; k < out->n_new; k++) {
            uint64_t new_id = out->new_requests[k].request_id;
            SIM_CHECK(
                s, s->watch.was_delayed[new_id] || !is_ahead(s, &s->lives[id], &s->lives[new_id]),
                "request %d was admitted, request %d waits ahead of it", (int)new_id, (int)id);
        }
    }
}

/* Blocks that the head would take, whole prompt included (AL5). */
static int32_t n_needed_by(const sim_state *s, const request *r, const kv_hit *hit)
{
    const block_pool *pool = kv_manager_get_pool(s->sched->kv);
    int32_t n_needed = 0;
    for (int32_t g = 0; g < s->config->n_groups; g++) {
        const sim_group *group = &s->config->groups[g];
        bool is_cross = group->kind == ATTENTION_CROSS;
        int32_t n_all =
            PGD_CEIL_DIV(is_cross ? r->n_encoder_tokens : r->n_tokens, group->block_size);
        int32_t n_had = is_cross ? 0 : hit->n_tokens / group->block_size;
        int32_t n_skipped = is_cross ? 0 : sim_first_read(group, hit->n_tokens) / group->block_size;
        int32_t n = n_all - n_had;
        for (int32_t i = n_skipped; i < n_had; i++)
            n += block_pool_ref_count(pool, hit->blocks[g][i]) == 0;
        n_needed += PGD_MIN(n, n_live_blocks(s->config, group));
    }
    return n_needed;
}

static bool has_windows(const sim_config *c)
{
    bool is_any = false;
    for (int32_t g = 0; g < c->n_groups; g++)
        is_any = is_any || n_live_blocks(c, &c->groups[g]) != INT32_MAX;
    return is_any;
}

void sim_oracle_check_head(const sim_state *s, const scheduler_output *out)
{
    const request *r = request_queue_peek(s->sched->waiting);
    if (s->config->admit_partly != 0)
        return; /* what follows is the gate's */
    int32_t n_free =
        block_pool_n_free(kv_manager_get_pool(s->sched->kv)) - kv_manager_n_promised(s->sched->kv);
    /* Where windows give blocks back, or slots are kept beyond the tokens, what a request takes in all
     * is an estimate. */
    bool is_exact = !has_windows(s->config) && s->config->num_lookahead_tokens == 0;
    SIM_CHECK(s, out->n_new == 0 || n_free >= 0 || !is_exact,
              "after an admission %d free blocks are missing for those admitted before", -n_free);
    int32_t n_left = s->config->max_num_batched_tokens - out->total_scheduled_tokens;
    int32_t n_encoder = 0;
    for (int32_t i = 0; i < out->n_encoder_inputs; i++)
        n_encoder += out->encoder_inputs[i].n_tokens;
    if (r != NULL && s->config->max_encoder_tokens > 0 &&
        n_encoder + r->n_encoder_tokens > s->config->max_encoder_tokens)
        return;
    if (r == NULL || r->kv_row >= 0 || s->config->n_tier_blocks > 0 || out->n_preempted > 0 ||
        n_left == 0 || s->sched->n_running == s->config->max_num_seqs)
        return;
    const kv_hit *hit = kv_manager_lookup(s->sched->kv, r);
    if (s->config->enable_chunked_prefill == 0 && r->n_tokens - hit->n_tokens > n_left)
        return;
    int32_t n_needed = n_needed_by(s, r, hit);
    int32_t n_spare = s->sched->n_running > 0
                          ? (int32_t)(s->config->watermark_percent / 100.0 * s->config->n_blocks)
                          : 0;
    SIM_CHECK(s, n_needed + n_spare > n_free,
              "request %d needs %d blocks and %d spare ones of %d, and was not admitted",
              (int)r->id, n_needed, n_spare, n_free);
}
