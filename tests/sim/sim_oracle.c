/* Each check states a rule as it reads, by brute force, and none shares code with the engine beyond
 * the question whether a hash is published. */
#include "tests/sim/sim_oracle.h"

#include <string.h>

static bool is_cached_kind(const sim_group *group)
{
    return group->kind != ATTENTION_CROSS;
}

static int32_t common_multiple(const sim_config *c)
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

/* A prefix of n tokens can be reused when the next position finds all that it reads. */
static bool is_hit(const sim_state *s, const request *r, int32_t n)
{
    for (int32_t g = 0; g < s->config->n_groups; g++) {
        const sim_group *group = &s->config->groups[g];
        if (!is_cached_kind(group))
            continue;
        for (int32_t i = sim_first_read(group, n) / group->block_size; i < n / group->block_size;
             i++) {
            if (!is_published(s, g, r->block_hashes, r->n_block_hashes, i))
                return false;
        }
    }
    return true;
}

void sim_oracle_check_lookup(sim_state *s)
{
    const request *r = request_queue_peek(s->sched->waiting);
    if (r == NULL || r->kv_row >= 0)
        return;
    int32_t step = common_multiple(s->config);
    int32_t n = (r->n_tokens - 1) / step * step;
    bool is_on = s->config->enable_prefix_caching && !r->skip_prefix_lookup;
    while (n > 0 && (!is_on || !is_hit(s, r, n)))
        n -= step;
    const kv_hit *hit = kv_manager_lookup(s->sched->kv, r);
    SIM_CHECK(s, hit->n_tokens == n, "request %d hits %d tokens, expected %d", (int)r->id,
              hit->n_tokens, n);
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

bool sim_oracle_fits(const sim_config *c, int32_t n_total_tokens, int32_t n_encoder)
{
    /* The last token is never computed. */
    int32_t n_computed = PGD_MIN(n_total_tokens, c->max_model_len) - 1;
    int32_t n_slots = PGD_MIN(n_computed + c->num_lookahead_tokens, c->max_model_len);
    int32_t n_per_step = c->max_num_batched_tokens;
    if (c->long_prefill_token_threshold > 0)
        n_per_step = PGD_MIN(n_per_step, c->long_prefill_token_threshold);
    int32_t n_unfinished =
        PGD_MIN(n_per_step * c->depth + c->num_lookahead_tokens, c->max_model_len);
    int32_t n_blocks = 0;
    for (int32_t g = 0; g < c->n_groups; g++) {
        const sim_group *group = &c->groups[g];
        int32_t n_needed = PGD_CEIL_DIV(n_slots, group->block_size);
        /* A window's blocks come back while those of unfinished steps are needed at once (SM9). */
        int32_t n_live = group->window + n_unfinished;
        if (group->kind == ATTENTION_SLIDING)
            n_needed =
                PGD_MIN(n_needed,
                        PGD_CEIL_DIV(PGD_MIN(n_live - 1, c->max_model_len), group->block_size) + 1);
        else if (group->kind == ATTENTION_CHUNKED)
            n_needed = PGD_MIN(n_needed,
                               PGD_CEIL_DIV(PGD_MIN(n_live, c->max_model_len), group->block_size) +
                                   (group->window % group->block_size != 0));
        else if (group->kind == ATTENTION_CROSS)
            n_needed = PGD_CEIL_DIV(n_encoder, group->block_size);
        n_blocks += n_needed;
    }
    int32_t n_at_once = n_computed;
    if (c->long_prefill_token_threshold > 0)
        n_at_once = PGD_MIN(n_at_once, c->long_prefill_token_threshold);
    return n_blocks <= c->n_blocks - 1 &&
           (c->enable_chunked_prefill || n_at_once <= c->max_num_batched_tokens);
}

void sim_oracle_take_snapshot(sim_snapshot *snapshot, const sim_state *s)
{
    snapshot->n_ids = s->sched->n_running;
    for (int32_t i = 0; i < snapshot->n_ids; i++)
        snapshot->ids[i] = s->sched->running[i]->id;
}

static bool is_scheduled(const scheduler_output *out, uint64_t id)
{
    for (int32_t i = 0; i < out->n_cached; i++) {
        if (out->cached_requests[i].request_id == id)
            return true;
    }
    return false;
}

static bool could_run(const sim_state *s, const request *r)
{
    int32_t n = r->n_tokens + r->n_draft_tokens + r->n_output_placeholders;
    n = PGD_MIN(n, s->lives[r->id].limit - 1);
    return r->status == REQUEST_RUNNING && n > r->num_computed_tokens;
}

void sim_oracle_check_order(const sim_state *s, const sim_snapshot *before,
                            const scheduler_output *out)
{
    bool is_later_scheduled = false;
    for (int32_t i = before->n_ids - 1; i >= 0; i--) {
        if (is_scheduled(out, before->ids[i])) {
            is_later_scheduled = true;
            continue;
        }
        const request *r = scheduler_find(s->sched, before->ids[i]);
        SIM_CHECK(s, !is_later_scheduled || r->running_idx < 0 || !could_run(s, r),
                  "request %d could run but was passed over", (int)r->id);
    }
}
