/* Delta debugging: leave out runs of operations, half of them first, then ever shorter ones; then
 * lower one number at a time towards the simplest. Repeated until nothing changes. Each candidate
 * runs in a child, so that a candidate may abort, and each must fail with the same words, so that one
 * bug does not turn into another on the way. */
#include "tests/sim/sim_shrink.h"

#include <string.h>

#include "common/clock.h"
#include "tests/sim/sim_run.h"

typedef struct shrinker {
    sim_trace *best;
    sim_verdict *verdict;
    uint64_t deadline_us;
    int32_t n_runs;
} shrinker;

static sim_trace candidate;

static void run_trace(void *arg)
{
    sim_totals totals = {0};
    sim_run(arg, &totals);
}

void sim_shrink_try(sim_verdict *v, const sim_trace *t)
{
    sim_catch(v, run_trace, (void *)t, 20);
}

/* Keeps the candidate if it fails in the same way. */
static bool adopt(shrinker *s)
{
    sim_verdict v;
    if (clock_now_us() > s->deadline_us || !sim_trace_is_valid(&candidate))
        return false;
    s->n_runs++;
    sim_shrink_try(&v, &candidate);
    if (!v.is_failed || strcmp(v.key, s->verdict->key) != 0)
        return false;
    *s->best = candidate;
    *s->verdict = v;
    return true;
}

static bool leave_out(shrinker *s, int32_t first, int32_t n)
{
    candidate.config = s->best->config;
    candidate.n_ops = s->best->n_ops - n;
    memcpy(candidate.ops, s->best->ops, (size_t)first * sizeof candidate.ops[0]);
    memcpy(candidate.ops + first, s->best->ops + first + n,
           (size_t)(s->best->n_ops - first - n) * sizeof candidate.ops[0]);
    return adopt(s);
}

static bool drop_ops(shrinker *s)
{
    bool is_changed = false;
    for (int32_t n = PGD_MAX(s->best->n_ops / 2, 1); n >= 1; n /= 2) {
        /* From the end: what comes late is rarely needed. */
        for (int32_t first = s->best->n_ops - n; first >= 0;) {
            if (leave_out(s, first, PGD_MIN(n, s->best->n_ops - first)))
                is_changed = true;
            first = PGD_MIN(first - n, s->best->n_ops - n);
            if (first < 0 && first > -n && s->best->n_ops > 0)
                first = 0;
        }
    }
    return is_changed;
}

/* Tries the value itself, then ever closer to what it was. offset: of an int32_t in a sim_trace. */
static bool lower(shrinker *s, size_t offset, int32_t simplest)
{
    bool is_changed = false;
    int32_t now;
    memcpy(&now, (char *)s->best + offset, sizeof now);
    for (int32_t value = simplest; value != now;) {
        candidate = *s->best;
        memcpy((char *)&candidate + offset, &value, sizeof value);
        if (adopt(s)) {
            is_changed = true;
            break;
        }
        int32_t closer = value + (now - value) / 2;
        if (closer == value)
            break;
        value = closer;
    }
    return is_changed;
}

static bool simplify(shrinker *s)
{
    static const struct {
        size_t offset;
        int32_t simplest;
    } of_request[] =
        {
            {offsetof(sim_request, n_scores), 0},   {offsetof(sim_request, skip_lookup), 0},
            {offsetof(sim_request, salt), 0},       {offsetof(sim_request, error_at), 0},
            {offsetof(sim_request, priority), 0},   {offsetof(sim_request, ignore_eos), 0},
            {offsetof(sim_request, max_tokens), 1}, {offsetof(sim_request, n_prompt), 1},
            {offsetof(sim_request, n_common), 0},   {offsetof(sim_request, document), 0},
            {offsetof(sim_request, n_encoder), 0},
        },
      of_config[] = {
          {offsetof(sim_config, long_prefill_token_threshold), 0},
          {offsetof(sim_config, watermark_percent), 0},
          {offsetof(sim_config, admit_partly), 0},
          {offsetof(sim_config, num_lookahead_tokens), 0},
          {offsetof(sim_config, enable_chunked_prefill), 1},
          {offsetof(sim_config, policy), 0},
          {offsetof(sim_config, use_eagle), 0},
          {offsetof(sim_config, n_tier_blocks), 0},
          {offsetof(sim_config, n_disk_blocks), 0},
          {offsetof(sim_config, n_ranks), 1},
          {offsetof(sim_config, tier_uses_arc), 0},
          {offsetof(sim_config, tier_threshold), 0},
          {offsetof(sim_config, tier_step_blocks), 0},
          {offsetof(sim_config, tier_delay), 0},
          {offsetof(sim_config, tier_faults), 0},
          {offsetof(sim_config, is_cut), 0},
          {offsetof(sim_config, is_async), 0},
          {offsetof(sim_config, depth), 1},
          {offsetof(sim_config, max_drafts), 0},
          {offsetof(sim_config, max_num_seqs), 1},
          {offsetof(sim_config, max_num_batched_tokens), SIM_MAX_BATCH},
          {offsetof(sim_config, max_model_len), SIM_MAX_LEN},
          {offsetof(sim_config, n_blocks), 2},
          {offsetof(sim_config, max_queued_requests), SIM_MAX_REQUESTS},
      };
    bool is_changed = false;
    for (size_t i = 0; i < PGD_ARRAY_LEN(of_config); i++)
        is_changed |=
            lower(s, offsetof(sim_trace, config) + of_config[i].offset, of_config[i].simplest);
    for (int32_t k = 0; k < s->best->n_ops; k++) {
        size_t op = offsetof(sim_trace, ops) + (size_t)k * sizeof(sim_op);
        if (s->best->ops[k].kind == SIM_OP_ANSWER || s->best->ops[k].kind == SIM_OP_KILL)
            is_changed |= lower(s, op + offsetof(sim_op, arg), 0);
        if (s->best->ops[k].kind == SIM_OP_STEP && s->best->ops[k].n_only >= 0)
            is_changed |= lower(s, op + offsetof(sim_op, n_only), -1);
        for (size_t i = 0; s->best->ops[k].kind == SIM_OP_ADD && i < PGD_ARRAY_LEN(of_request); i++)
            is_changed |= lower(s, op + offsetof(sim_op, request) + of_request[i].offset,
                                of_request[i].simplest);
    }
    return is_changed;
}

int32_t sim_shrink(sim_trace *t, sim_verdict *v, int limit_s)
{
    shrinker s = {
        .best = t, .verdict = v, .deadline_us = clock_now_us() + (uint64_t)limit_s * 1000000};
    bool is_changed = true;
    while (is_changed && clock_now_us() < s.deadline_us) {
        is_changed = drop_ops(&s);
        is_changed |= simplify(&s);
    }
    return s.n_runs;
}
