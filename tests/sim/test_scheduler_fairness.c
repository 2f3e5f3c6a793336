/* Progress under overload: nobody waits for ever, and what the admission gate is worth.
 *
 * A workload draws a pool that barely holds one longest request to three of them, and requests that
 * arrive faster than they can be served; KV groups, policy, pipelining, drafts and chunking vary. The
 * same workload runs with the full-sequence gate, without it, and with a watermark; the numbers of
 * preemptions are printed side by side. Checked in every run:
 *
 *   the oldest    Of requests that count alike (FCFS, or one priority class) the oldest unfinished
 *                 one has a share of every step, but for max_wait steps: those in which its last
 *                 results are out, and one that preempts, which admits nobody.
 *   each class    Under the priority policy the first by (priority, arrival) may have to wait while
 *                 requests that were admitted before it use up the budget (SC2 goes by place in the
 *                 running list): no longer than they have tokens left.
 *   all           Once arrivals stop every request finishes within as many steps as all of them
 *                 have tokens, plus max_wait each: as if they ran one by one, a token a step.
 *
 * PGD_SIM_WORKLOADS and PGD_SIM_SEED change the amount and the first seed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/hash.h"
#include "common/mem.h"
#include "engine/core/scheduler_internal.h"

#if PGD_DEBUG
#    define DEFAULT_WORKLOADS 60
#else
#    define DEFAULT_WORKLOADS 1000
#endif
#define MAX_REQUESTS 80
#define MAX_LEN      256
#define BLOCK_SIZE   8

typedef struct arrival {
    int32_t step;
    int32_t n_prompt;
    int32_t n_common; /* with all others */
    int32_t max_tokens;
    int32_t priority;
} arrival;

typedef struct workload {
    uint64_t seed;
    scheduler_opts opts;
    kv_group_spec groups[3];
    const char *model;
    int32_t depth;
    int32_t n_classes;
    int32_t n_arrivals;
    arrival arrivals[MAX_REQUESTS];
} workload;

typedef struct totals {
    uint64_t n_steps, n_preemptions, n_recomputed, n_tokens;
    int32_t max_wait; /* of the first one, in steps */
} totals;

typedef enum variant { GATE, NO_GATE, WATERMARK, N_VARIANTS } variant;

static const char *const variant_names[N_VARIANTS] = {"gate", "no gate", "gate, watermark 0.1"};

static workload w;
static scheduler *sched;
static block_hasher *hasher;
static bool is_finished[MAX_REQUESTS];
static uint64_t rng;

static int32_t rnd(int32_t n)
{
    rng = hash_u64(rng + 0x9e3779b97f4a7c15u);
    return (int32_t)((rng >> 11) % (uint64_t)n);
}

static void on_token(void *arg, request *r, token_id token, const token_logprob *logprobs,
                     int32_t n_logprobs)
{
    (void)arg;
    (void)r;
    (void)token;
    (void)logprobs;
    (void)n_logprobs;
}

static void on_finished(void *arg, request *r, request_error error)
{
    (void)arg;
    assert_int_equal(error, REQUEST_ERROR_NONE);
    assert_int_equal(r->status, REQUEST_FINISHED_LENGTH_CAPPED);
    assert_false(is_finished[r->id]);
    is_finished[r->id] = true;
}

static void on_release(void *arg, request *r)
{
    (void)arg;
    request_destroy(r);
}

/* --- workloads -------------------------------------------------------------------------------- */

static void add_group(attention_kind kind, int32_t block_size, int32_t window)
{
    w.groups[w.opts.n_groups++] =
        (kv_group_spec){.ops = kv_group_ops_of(kind), .block_size = block_size, .window = window};
}

static void draw_groups(void)
{
    static const char *const names[] = {"full", "full + sliding", "full + two sliding",
                                        "full + chunked"};
    int32_t model = rnd(4);
    w.model = names[model];
    add_group(ATTENTION_FULL, BLOCK_SIZE, 0);
    if (model == 1 || model == 2)
        add_group(ATTENTION_SLIDING, BLOCK_SIZE, 9 + rnd(60));
    if (model == 2)
        add_group(ATTENTION_SLIDING, 2 * BLOCK_SIZE, 9 + rnd(60));
    if (model == 3)
        add_group(ATTENTION_CHUNKED, BLOCK_SIZE, 16 * (1 + rnd(4)));
}

static bool fits_longest(int32_t n_blocks)
{
    scheduler_opts opts = w.opts;
    opts.n_blocks = n_blocks;
    assert_int_equal(scheduler_create(&sched, &opts), PGD_OK);
    bool fits = scheduler_can_ever_fit(sched, opts.max_model_len);
    scheduler_destroy(sched);
    return fits;
}

static void draw_pool(void)
{
    int32_t n_least = 2;
    int32_t n_most = 2 + 4 * (MAX_LEN / BLOCK_SIZE);
    while (n_least < n_most) {
        int32_t middle = (n_least + n_most) / 2;
        if (fits_longest(middle))
            n_most = middle;
        else
            n_least = middle + 1;
    }
    w.opts.n_blocks = n_least + rnd(2 * n_least);
}

static void draw_arrivals(void)
{
    int32_t step = 0;
    w.n_arrivals = 30 + rnd(MAX_REQUESTS - 30);
    int32_t rate = 1 + rnd(8);
    for (int32_t i = 0; i < w.n_arrivals; i++) {
        arrival *a = &w.arrivals[i];
        step += rnd(rate);
        a->step = step;
        a->n_prompt = 1 + rnd(rnd(4) == 0 ? w.opts.max_model_len - 1 : 60);
        a->n_common = rnd(2) * rnd(a->n_prompt + 1);
        a->max_tokens = 1 + rnd(100);
        a->priority = rnd(w.n_classes);
    }
}

static void draw_workload(uint64_t seed)
{
    static const uint8_t hash_seed[32] = {8};
    memset(&w, 0, sizeof w);
    rng = w.seed = seed;
    w.n_classes = rnd(2) == 0 ? 1 : 3;
    w.depth = 1 + rnd(2);
    int32_t n_drafts = rnd(3) == 0 ? 1 + rnd(4) : 0;
    w.opts = (scheduler_opts){
        .max_num_seqs = 2 + rnd(15),
        .max_num_batched_tokens = 8 + rnd(60),
        .long_prefill_token_threshold = rnd(3) == 0 ? 4 + rnd(30) : 0,
        .max_model_len = 100 + rnd(MAX_LEN - 100),
        .max_queued_requests = MAX_REQUESTS,
        .policy = w.n_classes > 1 || rnd(2) == 0 ? SCHEDULER_PRIORITY : SCHEDULER_FCFS,
        .enable_chunked_prefill = true,
        .enable_prefix_caching = rnd(3) > 0,
        .async = w.depth > 1 || rnd(2) == 0,
        .max_steps_in_flight = w.depth,
        .num_speculative_tokens = n_drafts,
        .num_lookahead_tokens = rnd(2) * n_drafts,
        .block_size = BLOCK_SIZE,
        .groups = w.groups,
        .hash_seed = hash_seed,
        .on_token = on_token,
        .on_finished = on_finished,
        .on_release = on_release,
    };
    draw_groups();
    draw_pool();
    draw_arrivals();
}

/* --- a run ------------------------------------------------------------------------------------ */

static int32_t limit_of(int32_t id)
{
    return PGD_MIN(w.arrivals[id].n_prompt + w.arrivals[id].max_tokens, w.opts.max_model_len);
}

static void add_request(int32_t id)
{
    const arrival *a = &w.arrivals[id];
    token_id prompt[MAX_LEN];
    request *r;
    for (int32_t i = 0; i < a->n_prompt; i++)
        prompt[i] = i < a->n_common ? i : 1000 * (id + 1) + i;
    request_opts opts = {.id = (uint64_t)id,
                         .prompt = prompt,
                         .n_prompt_tokens = a->n_prompt,
                         .max_tokens = a->max_tokens,
                         .max_model_len = w.opts.max_model_len,
                         .priority = a->priority,
                         .arrival_us = (uint64_t)id,
                         .block_size = BLOCK_SIZE,
                         .hasher = hasher};
    assert_int_equal(request_create(&r, &opts), PGD_OK);
    assert_int_equal(scheduler_add_request(sched, r), SCHEDULER_ADDED);
}

/* Some drafts are right. */
static void answer(void)
{
    static request_result_msg results[MAX_REQUESTS];
    const step_record *record = scheduler__record_at(sched, 0);
    step_result result = {.step_id = record->step_id, .results = results};
    for (int32_t i = 0; i < record->n_entries; i++) {
        const step_entry *e = &record->entries[i];
        if (!e->is_sampled)
            continue;
        request_result_msg *res = &results[result.n_results++];
        memset(res, 0, sizeof *res);
        res->request_id = e->request_id;
        res->request_epoch = e->epoch;
        res->n_tokens = 1 + rnd(e->n_drafts + 1);
        res->n_drafts = w.opts.num_speculative_tokens;
    }
    assert_int_equal(scheduler_update(sched, &result), PGD_OK);
}

/* The request that everybody else has to give way to, of those that have arrived. */
static int32_t find_first(int32_t n_arrived)
{
    int32_t first = -1;
    for (int32_t id = 0; id < n_arrived; id++) {
        if (is_finished[id])
            continue;
        if (first < 0 || (w.opts.policy == SCHEDULER_PRIORITY &&
                          w.arrivals[id].priority < w.arrivals[first].priority))
            first = id;
    }
    return first;
}

/* Steps that the first one may have to wait because of what was admitted before it. */
static int32_t n_steps_ahead(const request *r)
{
    int32_t n = 0;
    for (int32_t i = 0; i < sched->n_running && sched->running[i] != r; i++)
        n += limit_of((int32_t)sched->running[i]->id);
    return n;
}

static bool has_share(const scheduler_output *out, int32_t id)
{
    for (int32_t i = 0; i < out->n_new; i++) {
        if (out->new_requests[i].request_id == (uint64_t)id)
            return true;
    }
    for (int32_t i = 0; i < out->n_cached; i++) {
        if (out->cached_requests[i].request_id == (uint64_t)id)
            return true;
    }
    return false;
}

/* The request that is first, how long it has waited, and how long it may. */
typedef struct watch {
    int32_t first;
    int32_t n_waited;
    int32_t n_allowed;
} watch;

static void watch_step(watch *v, totals *t, const scheduler_output *out, int32_t n_arrived,
                       int32_t max_wait)
{
    int32_t first = find_first(n_arrived);
    if (first < 0)
        return;
    if (first != v->first || has_share(out, first))
        *v = (watch){.first = first, .n_allowed = max_wait};
    if (has_share(out, first))
        return;
    if (v->n_waited++ == 0 && w.n_classes > 1)
        v->n_allowed += n_steps_ahead(scheduler_find(sched, (uint64_t)first));
    t->max_wait = PGD_MAX(t->max_wait, v->n_waited);
    if (v->n_waited > v->n_allowed)
        fail_msg("seed %llu (%s, %s): request %d is the first and waits for %d steps, at most %d",
                 (unsigned long long)w.seed, w.model,
                 w.opts.policy == SCHEDULER_PRIORITY ? "priority" : "fcfs", first, v->n_waited,
                 v->n_allowed);
}

static void run(totals *t, variant which)
{
    scheduler_opts opts = w.opts;
    int32_t max_wait = w.depth + 1;
    int32_t n_arrived = 0;
    int64_t n_left = INT64_MAX; /* steps, once the last one has arrived */
    int32_t n_turns = 0;
    watch v = {.first = -1};
    rng = w.seed;
    opts.admit_partly = which == NO_GATE;
    opts.watermark = which == WATERMARK ? 0.1 : 0;
    memset(is_finished, 0, sizeof is_finished);
    if (opts.enable_prefix_caching)
        assert_int_equal(block_hasher_create(&hasher, opts.hash_seed), PGD_OK);
    assert_int_equal(scheduler_create(&sched, &opts), PGD_OK);
    while (n_arrived < w.n_arrivals || scheduler_has_work(sched) || sched->n_records > 0) {
        while (n_arrived < w.n_arrivals && w.arrivals[n_arrived].step <= n_turns)
            add_request(n_arrived++);
        if (n_arrived == w.n_arrivals && n_left == INT64_MAX) {
            n_left = 0;
            for (int32_t id = 0; id < w.n_arrivals; id++)
                n_left += is_finished[id] ? 0 : limit_of(id) + max_wait;
        }
        scheduler_output out;
        if (sched->n_records < w.depth && scheduler_schedule(sched, &out, NULL, 0)) {
            t->n_steps++;
            watch_step(&v, t, &out, n_arrived, max_wait);
            if (n_left != INT64_MAX && n_left-- <= 0)
                fail_msg("seed %llu (%s): not done in time", (unsigned long long)w.seed, w.model);
            if (sched->n_records < w.depth)
                continue;
        }
        n_turns++;
        if (sched->n_records > 0)
            answer();
        PGD_DASSERT((scheduler_check(sched), true));
    }
    for (int32_t id = 0; id < w.n_arrivals; id++)
        assert_true(is_finished[id]);
    scheduler_stats stats;
    scheduler_get_stats(sched, &stats);
    assert_int_equal(stats.n_blocks_free, opts.n_blocks - 1);
    t->n_preemptions += stats.n_preemptions;
    t->n_recomputed += stats.n_prompt_recomputed_tokens;
    t->n_tokens += stats.n_generated_tokens;
    scheduler_destroy(sched);
    block_hasher_destroy(hasher);
    hasher = NULL;
}

static uint64_t number_from_env(const char *name, uint64_t fallback)
{
    const char *text = getenv(name);
    return text != NULL ? strtoull(text, NULL, 10) : fallback;
}

static void test_scheduler_fairness_nobody_waits_for_ever(void **state)
{
    (void)state;
    totals all[2][N_VARIANTS] = {0};
    uint64_t n_workloads = number_from_env("PGD_SIM_WORKLOADS", DEFAULT_WORKLOADS);
    uint64_t seed = number_from_env("PGD_SIM_SEED", 1);
    for (uint64_t i = 0; i < n_workloads; i++) {
        draw_workload(seed + i);
        for (variant which = GATE; which < N_VARIANTS; which++)
            run(&all[w.opts.policy][which], which);
    }
    print_message(
        "%llu workloads: preemptions, prompt tokens computed again, steps, longest wait of "
        "the first\n",
        (unsigned long long)n_workloads);
    for (int policy = SCHEDULER_FCFS; policy <= SCHEDULER_PRIORITY; policy++) {
        for (variant which = GATE; which < N_VARIANTS; which++) {
            const totals *t = &all[policy][which];
            print_message("  %-8s %-20s %8llu %9llu %9llu %4d\n",
                          policy == SCHEDULER_FCFS ? "fcfs" : "priority", variant_names[which],
                          (unsigned long long)t->n_preemptions, (unsigned long long)t->n_recomputed,
                          (unsigned long long)t->n_steps, t->max_wait);
        }
        /* The same work whatever the gates, and overload it is. */
        assert_int_equal(all[policy][GATE].n_tokens, all[policy][NO_GATE].n_tokens);
        if (n_workloads >= DEFAULT_WORKLOADS) {
            assert_true(all[policy][GATE].n_preemptions > n_workloads);
            assert_true(all[policy][GATE].n_preemptions < all[policy][NO_GATE].n_preemptions);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler_fairness_nobody_waits_for_ever),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
