/* Property test: scheduler and KV manager under random workloads, against a simulated worker with a
 * shadow of the KV memory.
 *
 * Every run draws a configuration (policy, async, depth, caching, chunking, pool and batch sizes,
 * drafts) and then acts at random: requests arrive with shared prefixes and salts, are aborted,
 * steps are scheduled and answered late, the worker dies, the prefix cache is reset, a poison hunt
 * lets only a few run. Checked all the time: what the worker finds in its blocks, the tokens of
 * every request against the only right ones, exactly one finish and one release each, queue and
 * block integrity, never stuck; at the end: all done, no block lost. PGD_SIM_STEPS and PGD_SIM_SEED
 * change the amount and the first seed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "common/mem.h"
#include "engine/core/scheduler_internal.h"
#include "tests/sim/sim_worker.h"

#if PGD_DEBUG
#    define DEFAULT_STEPS 50000
#else
#    define DEFAULT_STEPS 200000
#endif
#define RUN_STEPS    500
#define MAX_REQUESTS 2000
#define N_DOCUMENTS  4

typedef struct spec {
    uint64_t salt; /* 0 = none */
    token_id prompt[SIM_MAX_LEN];
    int32_t n_prompt;
    int32_t limit;    /* tokens in all */
    int32_t n_scores; /* prompt logprobs per token, 0 = none */
    bool ignore_eos;
    uint64_t chain; /* of all tokens so far */
    int32_t n_tokens;
    token_id last;
    bool is_aborted;
    bool is_errored;
    int32_t n_finished;
    int32_t n_released;
} spec;

typedef struct totals {
    uint64_t n_steps, n_tokens, n_preemptions, n_late_appended, n_late_dropped, n_hit_positions,
        n_resets, n_aborts, n_errors, n_full_waits, n_drafts_accepted, n_requests, n_narrowed,
        n_scored, n_scored_again;
} totals;

static spec specs[MAX_REQUESTS];
static totals total;
static uint64_t rng_state;
static uint64_t run_seed;
static int32_t run_step;
static char run_config[256];

static scheduler *sched;
static scheduler_opts opts;
static sim_worker worker;
static block_hasher *hasher;
static uint64_t n_requests;
static int32_t depth;
static sim_step steps[SCHEDULER_MAX_STEPS_IN_FLIGHT];
static int32_t first_step;
static int32_t n_steps;

#define CHECK(cond, ...)                                                                    \
    do {                                                                                    \
        if (!(cond)) {                                                                      \
            print_error("seed %llu step %d (%s): ", (unsigned long long)run_seed, run_step, \
                        run_config);                                                        \
            print_error(__VA_ARGS__);                                                       \
            print_error("\n");                                                              \
            fail();                                                                         \
        }                                                                                   \
    } while (0)

static int rnd(int n)
{
    rng_state = hash_u64(rng_state + 0x9e3779b97f4a7c15ull);
    return (int)((rng_state >> 11) % (uint64_t)n);
}

static bool chance(int percent)
{
    return rnd(100) < percent;
}

static int rnd_cb(void *arg, int n)
{
    (void)arg;
    return rnd(n);
}

static uint64_t salt_of(uint64_t id)
{
    return specs[id].salt;
}

/* With the first token every entry of the prompt is there, whatever happened in between. */
static void check_scores(request *r, const spec *q)
{
    token_logprob *scores = request_take_prompt_logprobs(r);
    bool is_first = q->n_tokens == q->n_prompt;
    CHECK((scores != NULL) == (is_first && q->n_scores > 0),
          "request %llu: prompt logprobs %d at token %d of prompt %d", (unsigned long long)r->id,
          scores != NULL, q->n_tokens, q->n_prompt);
    if (scores == NULL)
        return;
    uint64_t chain = sim_chain_start(q->salt);
    for (int32_t pos = 1; pos < q->n_prompt; pos++) {
        chain = sim_chain_next(chain, q->prompt[pos - 1]);
        for (int32_t k = 0; k < q->n_scores; k++) {
            token_logprob want = sim_score(chain, q->prompt[pos], k);
            const token_logprob *got = &scores[pos * q->n_scores + k];
            CHECK(got->id == want.id && got->logprob == want.logprob,
                  "request %llu: entry %d of prompt token %d", (unsigned long long)r->id, k, pos);
        }
    }
    total.n_scored++;
    total.n_scored_again += r->epoch > 1;
    mem_free(scores);
}

static void on_token(void *arg, request *r, token_id token, const token_logprob *logprobs,
                     int32_t n_logprobs)
{
    (void)arg, (void)logprobs, (void)n_logprobs;
    spec *q = &specs[r->id];
    CHECK(q->n_finished == 0 && q->n_tokens < q->limit, "request %llu gets token %d of %d",
          (unsigned long long)r->id, q->n_tokens + 1, q->limit);
    check_scores(r, q);
    token_id want = sim_sample(q->chain);
    CHECK(token == want, "request %llu: token %d at %d, expected %d", (unsigned long long)r->id,
          token, q->n_tokens, want);
    q->chain = sim_chain_next(q->chain, token);
    q->n_tokens++;
    q->last = token;
    total.n_tokens++;
    total.n_late_appended += r->status == REQUEST_PREEMPTED;
    CHECK(r->n_tokens == q->n_tokens, "request %llu has %d tokens, expected %d",
          (unsigned long long)r->id, r->n_tokens, q->n_tokens);
}

static void on_finished(void *arg, request *r, request_error error)
{
    (void)arg;
    spec *q = &specs[r->id];
    q->n_finished++;
    CHECK(q->n_finished == 1, "request %llu finished twice", (unsigned long long)r->id);
    bool is_stop = q->n_tokens > q->n_prompt && q->last == SIM_EOS && !q->ignore_eos;
    request_status want = is_stop ? REQUEST_FINISHED_STOPPED : REQUEST_FINISHED_LENGTH_CAPPED;
    if (r->status == REQUEST_FINISHED_ABORTED) {
        CHECK(q->is_aborted, "request %llu was not aborted", (unsigned long long)r->id);
    } else if (r->status == REQUEST_FINISHED_ERROR) {
        CHECK(error == REQUEST_ERROR_NAN_LOGITS && worker.error_per_million > 0,
              "request %llu has no error", (unsigned long long)r->id);
        q->is_errored = true;
        total.n_errors++;
    } else {
        CHECK(r->status == want && (is_stop || q->n_tokens == q->limit),
              "request %llu: status %d with %d of %d tokens", (unsigned long long)r->id, r->status,
              q->n_tokens, q->limit);
    }
}

static void on_release(void *arg, request *r)
{
    (void)arg;
    spec *q = &specs[r->id];
    q->n_released++;
    CHECK(q->n_released == 1 && q->n_finished == 1 && r->n_in_flight == 0 && r->kv_row < 0,
          "request %llu: released %d times, finished %d, %d in flight, row %d",
          (unsigned long long)r->id, q->n_released, q->n_finished, r->n_in_flight, r->kv_row);
    request_destroy(r);
}

static void draw_config(void)
{
    static const uint8_t seed[32] = {42};
    static const int32_t block_sizes[] = {1, 2, 4, 8, 16};
    int32_t bs = block_sizes[rnd(5)];
    /* Short pools: from barely one longest request to four of them. */
    int32_t max_len = 24 + rnd(SIM_MAX_LEN - 24);
    int32_t n_full = (max_len + bs - 1) / bs;
    bool is_sync_pipe = chance(25);
    opts = (scheduler_opts){
        .max_num_seqs = 1 + rnd(SIM_MAX_SEQS),
        .max_num_batched_tokens = 8 + rnd(120),
        .long_prefill_token_threshold = chance(30) ? 1 + rnd(20) : 0,
        .max_model_len = max_len,
        .max_queued_requests = 8 + rnd(32),
        .policy = chance(50) ? SCHEDULER_PRIORITY : SCHEDULER_FCFS,
        .enable_chunked_prefill = chance(80),
        .enable_prefix_caching = chance(75),
        .async = chance(60),
        .num_lookahead_tokens = chance(10) ? rnd(4) : 0,
        .watermark = chance(20) ? 0.1 : 0.0,
        .n_blocks = 1 + n_full + rnd(3 * n_full),
        .block_size = bs,
        .n_groups = 1,
        .hash_seed = seed,
        .on_token = on_token,
        .on_finished = on_finished,
        .on_release = on_release,
    };
    depth = opts.async || is_sync_pipe ? 1 + rnd(3) : 1;
    sim_worker_init(&worker, opts.max_num_seqs, opts.n_blocks, bs);
    worker.random = rnd_cb;
    worker.max_drafts = !opts.async && chance(50) ? 1 + rnd(5) : 0;
    worker.error_per_million = chance(20) ? 500 : 0;
    snprintf(run_config, sizeof run_config,
             "%s, async %d, depth %d, cache %d, chunked %d, threshold %d, seqs %d, batch %d, len "
             "%d, bs %d, blocks %d, "
             "drafts %d, lookahead %d",
             opts.policy == SCHEDULER_PRIORITY ? "priority" : "fcfs", opts.async, depth,
             opts.enable_prefix_caching, opts.enable_chunked_prefill,
             opts.long_prefill_token_threshold, opts.max_num_seqs, opts.max_num_batched_tokens,
             max_len, bs, opts.n_blocks, worker.max_drafts, opts.num_lookahead_tokens);
    assert_int_equal(scheduler_create(&sched, &opts), PGD_OK);
    assert_int_equal(block_hasher_create(&hasher, seed), PGD_OK);
    n_requests = 0;
    first_step = 0;
    n_steps = 0;
}

static void add_request(void)
{
    if (n_requests == MAX_REQUESTS)
        return;
    uint64_t id = n_requests++;
    spec *q = &specs[id];
    memset(q, 0, sizeof *q);
    q->salt = chance(20) ? 1 + (uint64_t)rnd(2) : 0;
    int32_t max_prompt = chance(70) ? 40 : SIM_MAX_LEN;
    q->n_prompt = 1 + rnd(PGD_MIN(opts.max_model_len - 1, max_prompt));
    int document = rnd(N_DOCUMENTS);
    int32_t n_common = chance(80) ? 1 + rnd(q->n_prompt) : 0;
    for (int32_t i = 0; i < q->n_prompt; i++)
        q->prompt[i] = i < n_common
                           ? (token_id)(hash_u64((uint64_t)(document * 1000 + i)) % SIM_VOCAB)
                           : rnd(SIM_VOCAB);
    int32_t max_tokens = 1 + rnd(chance(50) ? 6 : 60);
    q->limit = PGD_MIN(q->n_prompt + max_tokens, opts.max_model_len);
    q->ignore_eos = chance(50);
    q->chain = sim_chain_start(q->salt);
    for (int32_t i = 0; i < q->n_prompt; i++)
        q->chain = sim_chain_next(q->chain, q->prompt[i]);
    q->n_tokens = q->n_prompt;
    const token_id eos = SIM_EOS;
    char salt[2] = {(char)('0' + q->salt), '\0'};
    request_opts r_opts = {.id = id,
                           .prompt = q->prompt,
                           .n_prompt_tokens = q->n_prompt,
                           .max_tokens = max_tokens,
                           .max_model_len = opts.max_model_len,
                           .eos_ids = &eos,
                           .n_eos_ids = !q->ignore_eos,
                           .priority = rnd(3),
                           .arrival_us = id,
                           .cache_salt = q->salt != 0 ? salt : NULL,
                           .block_size = opts.block_size,
                           .skip_prefix_lookup = chance(5),
                           .hasher = opts.enable_prefix_caching ? hasher : NULL};
    q->n_scores = chance(20) ? 1 + rnd(SIM_MAX_SCORES) : 0;
    r_opts.params.n_prompt_logprobs_per_token = q->n_scores;
    request *r;
    assert_int_equal(request_create(&r, &r_opts), PGD_OK);
    scheduler_add answer = scheduler_add_request(sched, r);
    if (answer == SCHEDULER_ADDED) {
        total.n_requests++;
        return;
    }
    scheduler_stats stats;
    scheduler_get_stats(sched, &stats);
    if (answer == SCHEDULER_QUEUE_FULL) {
        CHECK(stats.n_running + stats.n_waiting == opts.max_queued_requests,
              "refused with %d of %d requests", stats.n_running + stats.n_waiting,
              opts.max_queued_requests);
    } else {
        int32_t n_slots = PGD_MIN(q->limit - 1 + opts.num_lookahead_tokens, opts.max_model_len);
        CHECK((n_slots + opts.block_size - 1) / opts.block_size > opts.n_blocks - 1 ||
                  (!opts.enable_chunked_prefill && q->limit - 1 > opts.max_num_batched_tokens),
              "request of %d tokens refused", q->limit);
    }
    request_destroy(r);
    q->n_finished = q->n_released = 1;
}

static void abort_request(void)
{
    if (n_requests == 0)
        return;
    uint64_t id = n_requests - 1 - (uint64_t)rnd((int)PGD_MIN(n_requests, 40u));
    bool is_live = specs[id].n_finished == 0;
    specs[id].is_aborted = true;
    bool was_found = scheduler_finish_request(sched, id, REQUEST_FINISHED_ABORTED);
    CHECK(was_found == is_live, "abort of request %llu found %d, live %d", (unsigned long long)id,
          was_found, is_live);
    total.n_aborts += was_found;
}

static bool schedule(const uint64_t *only, int32_t n_only)
{
    scheduler_output out;
    if (!scheduler_schedule(sched, &out, only, n_only))
        return false;
    CHECK(out.total_scheduled_tokens <= opts.max_num_batched_tokens &&
              out.n_new + out.n_cached <= opts.max_num_seqs,
          "%d tokens, %d new, %d continuing", out.total_scheduled_tokens, out.n_new, out.n_cached);
    for (int32_t i = 0; i < out.n_new && only != NULL; i++) {
        bool is_listed = false;
        for (int32_t k = 0; k < n_only; k++)
            is_listed = is_listed || only[k] == out.new_requests[i].request_id;
        CHECK(is_listed, "request %llu runs but is not listed",
              (unsigned long long)out.new_requests[i].request_id);
    }
    sim_step_copy(&steps[(first_step + n_steps++) % SCHEDULER_MAX_STEPS_IN_FLIGHT], &out, salt_of);
    total.n_steps++;
    return true;
}

static void answer(void)
{
    static request_result_msg results[SIM_MAX_SEQS];
    step_result result;
    const sim_step *step = &steps[first_step];
    sim_worker_run(&result, results, &worker, step);
    CHECK(worker.fault[0] == '\0', "%s", worker.fault);
    for (int32_t i = 0; i < step->n_shares; i++)
        CHECK(step->shares[i].n_computed + step->shares[i].n_scheduled <
                  specs[step->shares[i].id].limit,
              "request %llu computes its last token", (unsigned long long)step->shares[i].id);
    if (chance(10)) { /* any order */
        for (int32_t i = result.n_results - 1; i > 0; i--) {
            int32_t k = rnd(i + 1);
            request_result_msg swap = results[i];
            results[i] = results[k];
            results[k] = swap;
        }
    }
    if (chance(10)) {
        for (int32_t i = result.n_prompt_results - 1; i > 0; i--) {
            int32_t k = rnd(i + 1);
            prompt_result_msg swap = worker.prompts[i];
            worker.prompts[i] = worker.prompts[k];
            worker.prompts[k] = swap;
        }
    }
    for (int32_t i = 0; i < result.n_results; i++) {
        const request *r = scheduler_find(sched, results[i].request_id);
        total.n_late_dropped += r != NULL && r->epoch != results[i].request_epoch;
        total.n_drafts_accepted += (uint64_t)PGD_MAX(results[i].n_tokens - 1, 0);
    }
    first_step = (first_step + 1) % SCHEDULER_MAX_STEPS_IN_FLIGHT;
    n_steps--;
    CHECK(scheduler_update(sched, &result) == PGD_OK, "result of step %llu is refused",
          (unsigned long long)step->step_id);
}

static void kill_worker(void)
{
    n_steps = 0;
    scheduler_reset_worker(sched);
    sim_worker_reset(&worker);
    scheduler_stats stats;
    scheduler_get_stats(sched, &stats);
    CHECK(stats.n_blocks_free == opts.n_blocks - 1 && stats.n_blocks_cached == 0 &&
              stats.n_running == 0,
          "after a reset: %d free, %d cached, %d running", stats.n_blocks_free,
          stats.n_blocks_cached, stats.n_running);
    total.n_resets++;
}

/* A poison hunt: for a few steps only some requests may run. */
static void narrow(void)
{
    uint64_t only[8];
    int32_t n_only = rnd(8);
    for (int32_t i = 0; i < n_only; i++)
        only[i] = n_requests > 0 ? (uint64_t)rnd((int)n_requests) : 0;
    for (int turn = 0; turn < 6; turn++) {
        if (n_steps < depth)
            schedule(only, n_only);
        if (n_steps > 0 && chance(60))
            answer();
        scheduler_check(sched);
    }
    total.n_narrowed++;
}

static void turn(bool is_quiet)
{
    if (!is_quiet) {
        if (chance(30))
            add_request();
        if (chance(3))
            abort_request();
        if (rnd(1000) < 3)
            kill_worker();
        if (rnd(1000) < 5)
            narrow();
        if (rnd(1000) < 5)
            scheduler_reset_prefix_cache(sched);
    }
    bool is_step = false;
    if (n_steps < depth && (n_steps == 0 || chance(70)))
        is_step = schedule(NULL, 0);
    CHECK(is_step || n_steps > 0 || !scheduler_has_work(sched),
          "stuck: nothing in flight, nothing to send, work left");
    total.n_full_waits += !is_step && n_steps > 0;
    if (n_steps > 0 && (!is_step || chance(50)))
        answer();
    scheduler_check(sched);
}

static void run(uint64_t seed)
{
    run_seed = seed;
    rng_state = seed;
    draw_config();
    for (run_step = 0; run_step < RUN_STEPS; run_step++)
        turn(false);
    /* Everything that was accepted comes to its end, in bounded time. */
    for (; scheduler_has_work(sched) || n_steps > 0; run_step++) {
        CHECK(run_step < RUN_STEPS + 60000, "does not come to an end");
        turn(true);
    }
    scheduler_stats stats;
    scheduler_get_stats(sched, &stats);
    CHECK(stats.n_blocks_free == opts.n_blocks - 1, "%d of %d blocks are free at the end",
          stats.n_blocks_free, opts.n_blocks - 1);
    total.n_preemptions += stats.n_preemptions;
    total.n_hit_positions += worker.n_hit_positions;
    for (uint64_t id = 0; id < n_requests; id++)
        CHECK(specs[id].n_finished == 1 && specs[id].n_released == 1,
              "request %llu: finished %d, released %d", (unsigned long long)id,
              specs[id].n_finished, specs[id].n_released);
    CHECK(stats.n_running == 0 && stats.n_waiting == 0, "%d running, %d waiting at the end",
          stats.n_running, stats.n_waiting);
    /* Each prompt token is cached or computed for the first time at most once. */
    CHECK(stats.n_prompt_computed_tokens + stats.n_prefix_hit_tokens <= stats.n_prompt_tokens,
          "%llu computed and %llu cached of %llu prompt tokens",
          (unsigned long long)stats.n_prompt_computed_tokens,
          (unsigned long long)stats.n_prefix_hit_tokens, (unsigned long long)stats.n_prompt_tokens);
    for (int i = 0; i < SIM_MAX_SEQS; i++)
        CHECK(!worker.rows[i].is_used, "the worker still has a row of request %llu",
              (unsigned long long)worker.rows[i].id);
    scheduler_destroy(sched);
    block_hasher_destroy(hasher);
    sim_worker_deinit(&worker);
}

static uint64_t number_from_env(const char *name, uint64_t fallback)
{
    const char *text = getenv(name);
    return text != NULL ? strtoull(text, NULL, 10) : fallback;
}

static void test_scheduler_property_random_workloads(void **state)
{
    (void)state;
    uint64_t want_steps = number_from_env("PGD_SIM_STEPS", DEFAULT_STEPS);
    uint64_t seed = number_from_env("PGD_SIM_SEED", 1);
    uint64_t n_runs = 0;
    for (; total.n_steps < want_steps; n_runs++)
        run(seed + n_runs);
    print_message(
        "%llu runs, %llu steps, %llu requests, %llu tokens, %llu preemptions, %llu late tokens "
        "appended, "
        "%llu dropped, %llu positions hit, %llu worker deaths, %llu aborts, %llu errors, %llu "
        "drafts accepted, "
        "%llu hunts, %llu prompts scored, %llu of them again\n",
        (unsigned long long)n_runs, (unsigned long long)total.n_steps,
        (unsigned long long)total.n_requests, (unsigned long long)total.n_tokens,
        (unsigned long long)total.n_preemptions, (unsigned long long)total.n_late_appended,
        (unsigned long long)total.n_late_dropped, (unsigned long long)total.n_hit_positions,
        (unsigned long long)total.n_resets, (unsigned long long)total.n_aborts,
        (unsigned long long)total.n_errors, (unsigned long long)total.n_drafts_accepted,
        (unsigned long long)total.n_narrowed, (unsigned long long)total.n_scored,
        (unsigned long long)total.n_scored_again);
    /* The workload must have gone through everything that it is meant to try. */
    assert_true(total.n_preemptions > 100);
    assert_true(total.n_late_appended > 10);
    assert_true(total.n_late_dropped > 0);
    assert_true(total.n_hit_positions > 1000);
    assert_true(total.n_resets > 5);
    assert_true(total.n_aborts > 50);
    assert_true(total.n_errors > 0);
    assert_true(total.n_drafts_accepted > 100);
    assert_true(total.n_narrowed > 5);
    assert_true(total.n_scored > 100);
    assert_true(total.n_scored_again > 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler_property_random_workloads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
