/* The simulated worker under a scheduler, in one process: neither speculation nor groups of layers
 * with windows may change a token.
 *
 * Both ways of handing drafts over are tried: kept by the worker while up to three steps are in
 * flight, and sent back by the engine. The worker itself checks positions, tables and contents;
 * the tokens are held against sim_runner_next_token. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "common/hash.h"
#include "common/mem.h"
#include "engine/core/scheduler.h"
#include "engine/kv/kv_groups.h"
#include "worker/sim_layers.h"
#include "worker/sim_runner.h"

#define VOCAB        300
#define MAX_LEN      120
#define MAX_REQUESTS 60
#define N_RUNS       60

typedef struct expected {
    token_id tokens[MAX_LEN + 1];
    int32_t n_prompt;
    int32_t n_got; /* prompt included */
    int32_t limit;
    token_id stop_id; /* -1 = none */
    sampling_params params;
    bool is_finished;
} expected;

/* A message whose tables and drafts the scheduler may change before it is run. */
typedef struct kept_step {
    scheduler_output out;
    new_request_msg new_requests[16];
    cached_request_msg cached_requests[16];
    block_append_msg appends[16];
    uint64_t ids[2][64];
    token_id tokens[16][MAX_LEN];
    token_id drafts[16 * PGD_MAX_DRAFT_TOKENS];
    block_id blocks[32][PGD_MAX_KV_GROUPS][MAX_LEN];
    block_id to_zero[MAX_LEN];
} kept_step;

static expected reqs[MAX_REQUESTS];
static uint64_t n_reqs;
static scheduler *sched;
static block_hasher *hasher; /* NULL = caching off */
static step_runner *runner;
static kept_step steps[SCHEDULER_MAX_STEPS_IN_FLIGHT];
static int32_t n_steps;
static kv_groups groups;
static uint64_t rng;
static scheduler_stats seen; /* over all runs */

static int32_t rnd(int32_t n)
{
    rng = hash_u64(rng + 0x9e3779b97f4a7c15u);
    return (int32_t)((rng >> 11) % (uint64_t)n);
}

static void on_token(void *arg, request *r, token_id token, const token_logprob *logprobs,
                     int32_t n_logprobs)
{
    expected *e = &reqs[r->id];
    (void)arg;
    token_id want = sim_runner_next_token(e->tokens, e->n_got, e->n_prompt, &e->params, VOCAB);
    if (token != want)
        fail_msg("request %llu, token %d: expected %d, got %d", (unsigned long long)r->id, e->n_got,
                 want, token);
    assert_int_equal(n_logprobs, e->params.n_logprobs + 1);
    if (n_logprobs > 0)
        assert_int_equal(logprobs[0].id, token);
    e->tokens[e->n_got++] = token;
    assert_true(e->n_got <= e->limit);
}

static void on_finished(void *arg, request *r, request_error error)
{
    expected *e = &reqs[r->id];
    (void)arg;
    assert_int_equal(error, REQUEST_ERROR_NONE);
    assert_true(e->n_got == e->limit || e->tokens[e->n_got - 1] == e->stop_id);
    e->is_finished = true;
}

static void on_release(void *arg, request *r)
{
    (void)arg;
    request_destroy(r);
}

static void keep_ids(const uint64_t **ids, int32_t n, uint64_t *copy)
{
    memcpy(copy, *ids, (size_t)n * sizeof *copy);
    *ids = copy;
}

static void keep_blocks(block_ids_msg *b, block_id copy[][MAX_LEN])
{
    for (int32_t g = 0; g < groups.layout.n_groups; g++) {
        if (b->n_blocks[g] > 0)
            memcpy(copy[g], b->ids[g], (size_t)b->n_blocks[g] * sizeof **copy);
        b->ids[g] = copy[g];
    }
}

static void keep_step(kept_step *k, const scheduler_output *out)
{
    k->out = *out;
    for (int32_t i = 0; i < out->n_new; i++) {
        new_request_msg *n = &k->new_requests[i];
        *n = out->new_requests[i];
        memcpy(k->tokens[i], n->tokens, (size_t)n->n_tokens * sizeof *n->tokens);
        n->tokens = k->tokens[i];
        keep_blocks(&n->blocks, k->blocks[i]);
    }
    for (int32_t i = 0; i < out->n_cached; i++)
        k->cached_requests[i] = out->cached_requests[i];
    for (int32_t i = 0; i < out->n_draft_tokens; i++)
        k->drafts[i] = out->draft_tokens[i];
    k->out.draft_tokens = k->drafts;
    for (int32_t i = 0; i < out->n_appends; i++) {
        k->appends[i] = out->appends[i];
        keep_blocks(&k->appends[i].blocks, k->blocks[16 + i]);
    }
    keep_ids(&k->out.finished_ids, out->n_finished, k->ids[0]);
    keep_ids(&k->out.preempted_ids, out->n_preempted, k->ids[1]);
    memcpy(k->to_zero, out->blocks_to_zero, (size_t)out->n_blocks_to_zero * sizeof *k->to_zero);
    k->out.blocks_to_zero = k->to_zero;
    k->out.new_requests = k->new_requests;
    k->out.cached_requests = k->cached_requests;
    k->out.appends = k->appends;
}

static void answer(void)
{
    step_result result;
    pgd_why why = {0};
    if (runner->vtbl->step(runner, &steps[0].out, &result, &why) != PGD_OK)
        fail_msg("%s", why.text);
    assert_int_equal(scheduler_update(sched, &result), PGD_OK);
    n_steps--;
    for (int32_t i = 0; i < n_steps; i++)
        keep_step(&steps[i], &steps[i + 1].out);
}

static void add_request(const scheduler_opts *o)
{
    expected *e = &reqs[n_reqs];
    request *r;
    int32_t max_tokens = 1 + rnd(60);
    memset(e, 0, sizeof *e);
    e->n_prompt = e->n_got = 1 + rnd(PGD_MIN(o->max_model_len - 1, 50));
    e->limit = PGD_MIN(e->n_prompt + max_tokens, o->max_model_len);
    for (int32_t i = 0; i < e->n_prompt; i++)
        e->tokens[i] = i < 40 ? i : rnd(VOCAB);
    e->stop_id = rnd(2) == 0 ? rnd(VOCAB) : -1;
    e->params = (sampling_params){.temperature = (float)rnd(2),
                                  .seed = (uint64_t)rnd(1000),
                                  .n_logprobs = rnd(3) - 1,
                                  .stop_ids = &e->stop_id,
                                  .n_stop_ids = e->stop_id >= 0,
                                  .min_tokens = rnd(2) * rnd(10)};
    request_opts q = {.id = n_reqs++,
                      .prompt = e->tokens,
                      .n_prompt_tokens = e->n_prompt,
                      .max_tokens = max_tokens,
                      .max_model_len = o->max_model_len,
                      .params = e->params,
                      .priority = rnd(3),
                      .arrival_us = n_reqs,
                      .block_size = o->block_size,
                      .hasher = hasher};
    assert_int_equal(request_create(&r, &q), PGD_OK);
    if (scheduler_add_request(sched, r) != SCHEDULER_ADDED) {
        n_reqs--;
        request_destroy(r);
    }
}

static void on_progress(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    (void)arg;
    (void)done_bytes;
    (void)total_bytes;
}

/* Full and windowed layers, pages of unequal size, windows that are no multiple of a block. */
static const char *const layer_lists[] = {
    "full",
    "full,sliding:20",
    "sliding:17,full*2,sliding:17",
    "full,chunked:24",
    "chunked:21,sliding:9,full",
    "sliding:30",
};

/* Groups the layers, and makes the pool as tight as it may be: one request must fit. */
static void choose_groups(scheduler_opts *o, kv_group_spec *specs, const char *layers)
{
    static kv_layer_spec list[PGD_MAX_KV_LAYERS];
    int32_t n_layers;
    const kv_groups_opts opts = {.block_size = o->block_size, .is_hybrid = true};
    assert_int_equal(sim_layers_parse(list, &n_layers, layers, NULL), PGD_OK);
    assert_int_equal(kv_groups_init(&groups, list, n_layers, &opts, NULL), PGD_OK);
    const kv_groups_load load = {
        .max_unfinished_tokens = PGD_MIN(o->max_num_batched_tokens * SCHEDULER_MAX_STEPS_IN_FLIGHT +
                                             o->num_lookahead_tokens,
                                         o->max_model_len),
        .max_model_len = o->max_model_len};
    int32_t n_full = (int32_t)kv_groups_n_blocks_for(&groups, o->max_model_len, &load);
    o->n_blocks = 1 + n_full + rnd(2 * n_full);
    o->n_groups = groups.layout.n_groups;
    o->groups = specs;
    for (int32_t g = 0; g < o->n_groups; g++)
        specs[g] = kv_groups_spec(&groups, g);
}

static void start_worker(const scheduler_opts *o, int32_t n_drafts, int32_t accept,
                         const char *layers)
{
    load_msg load = {.block_size = o->block_size,
                     .max_model_len = o->max_model_len,
                     .max_num_seqs = o->max_num_seqs,
                     .max_num_batched_tokens = o->max_num_batched_tokens,
                     .max_logprobs = 3,
                     .sim_vocab_size = VOCAB,
                     .sim_draft_tokens = n_drafts,
                     .sim_draft_accept = accept};
    static load_done_msg done;
    kv_ready_msg ready;
    pgd_why why = {0};
    assert_int_equal(sim_runner_create(&runner, &why), PGD_OK);
    (void)snprintf(load.sim_kv_layers, sizeof load.sim_kv_layers, "%s", layers);
    assert_int_equal(runner->vtbl->load(runner, &load, &done, on_progress, NULL, &why), PGD_OK);
    kv_config_msg kv = {
        .n_blocks = o->n_blocks, .max_model_len = o->max_model_len, .layout = groups.layout};
    assert_int_equal(runner->vtbl->init_kv(runner, &kv, &ready, &why), PGD_OK);
}

static void add_stats(void)
{
    scheduler_stats s;
    scheduler_get_stats(sched, &s);
    seen.n_preemptions += s.n_preemptions;
    seen.n_prefix_hit_tokens += s.n_prefix_hit_tokens;
    seen.n_drafts += s.n_drafts;
    seen.n_draft_tokens += s.n_draft_tokens;
    seen.n_accepted_tokens += s.n_accepted_tokens;
    uint64_t n_accepted = 0;
    for (int32_t i = 0; i < PGD_MAX_DRAFT_TOKENS; i++) {
        n_accepted += s.n_accepted_per_pos[i];
        assert_true(i == 0 || s.n_accepted_per_pos[i] <= s.n_accepted_per_pos[i - 1]);
    }
    assert_int_equal(n_accepted, s.n_accepted_tokens);
    assert_true(s.n_accepted_tokens <= s.n_draft_tokens);
}

static void run(bool is_async)
{
    static const uint8_t seed[32] = {3};
    int32_t n_drafts = rnd(8);
    const char *layers = layer_lists[rnd((int32_t)PGD_ARRAY_LEN(layer_lists))];
    kv_group_spec specs[PGD_MAX_KV_GROUPS];
    scheduler_opts o = {.max_num_seqs = 1 + rnd(16),
                        .max_num_batched_tokens = 4 + rnd(60),
                        .max_model_len = MAX_LEN - rnd(60),
                        .max_queued_requests = 32,
                        .policy = rnd(2) == 0 ? SCHEDULER_FCFS : SCHEDULER_PRIORITY,
                        .enable_chunked_prefill = true,
                        .enable_prefix_caching = rnd(3) > 0,
                        .hash_seed = seed,
                        .async = is_async,
                        .num_speculative_tokens = n_drafts,
                        .num_lookahead_tokens = n_drafts,
                        .block_size = 8,
                        .on_token = on_token,
                        .on_finished = on_finished,
                        .on_release = on_release};
    int32_t depth = is_async ? 1 + rnd(3) : 1;
    int32_t n_to_come = 20 + rnd(MAX_REQUESTS - 20);
    n_reqs = 0;
    n_steps = 0;
    hasher = NULL;
    if (o.enable_prefix_caching)
        assert_int_equal(block_hasher_create(&hasher, seed), PGD_OK);
    choose_groups(&o, specs, layers);
    start_worker(&o, n_drafts, rnd(3) == 0 ? 100 * rnd(2) : rnd(101), layers);
    assert_int_equal(scheduler_create(&sched, &o), PGD_OK);
    while (n_to_come > 0 || scheduler_has_work(sched)) {
        scheduler_output out;
        if (n_to_come > 0 && rnd(3) == 0) {
            add_request(&o);
            n_to_come--;
        }
        if (n_steps < depth && scheduler_schedule(sched, &out, NULL, 0))
            keep_step(&steps[n_steps++], &out);
        else if (n_steps > 0)
            answer();
        scheduler_check(sched);
    }
    while (n_steps > 0)
        answer();
    for (uint64_t id = 0; id < n_reqs; id++)
        assert_true(reqs[id].is_finished);
    add_stats();
    scheduler_destroy(sched);
    block_hasher_destroy(hasher);
    runner->vtbl->destroy(runner);
}

static void run_all(bool is_async)
{
    memset(&seen, 0, sizeof seen);
    for (rng = 1; rng <= N_RUNS; rng++) {
        uint64_t seed = rng;
        run(is_async);
        rng = seed;
    }
    print_message("%llu drafts, %llu tokens in them, %llu accepted, %llu preemptions\n",
                  (unsigned long long)seen.n_drafts, (unsigned long long)seen.n_draft_tokens,
                  (unsigned long long)seen.n_accepted_tokens,
                  (unsigned long long)seen.n_preemptions);
    assert_true(seen.n_drafts > 1000 && seen.n_accepted_tokens > 1000);
    assert_true(seen.n_draft_tokens > seen.n_accepted_tokens + 1000);
    assert_true(seen.n_preemptions > 100 && seen.n_prefix_hit_tokens > 1000);
}

static void test_sim_runner_keeps_its_drafts(void **state)
{
    (void)state;
    run_all(true);
}

static void test_sim_runner_is_given_its_drafts(void **state)
{
    (void)state;
    run_all(false);
}

static void test_sim_runner_layers(void **state)
{
    (void)state;
    static kv_layer_spec list[PGD_MAX_KV_LAYERS];
    int32_t n;
    pgd_why why = {0};
    assert_int_equal(sim_layers_parse(list, &n, "", NULL), PGD_OK);
    assert_int_equal(n, 1);
    assert_int_equal(list[0].kind, ATTENTION_FULL);
    assert_int_equal(list[0].token_bytes, SIM_LAYERS_TOKEN_BYTES);
    assert_int_equal(sim_layers_parse(list, &n, "sliding:64*2,full*3,chunked:7", NULL), PGD_OK);
    assert_int_equal(n, 3);
    assert_int_equal(list[0].kind, ATTENTION_SLIDING);
    assert_int_equal(list[0].window, 64);
    assert_int_equal(list[0].token_bytes, 2 * SIM_LAYERS_TOKEN_BYTES);
    assert_int_equal(list[1].token_bytes, 3 * SIM_LAYERS_TOKEN_BYTES);
    assert_int_equal(list[2].window, 7);
    static const char *const refused[] = {"half",       "full:3",
                                          "sliding",    "sliding:",
                                          "sliding:0",  "full,",
                                          ",full",      "full full",
                                          "full*0",     "full*1025",
                                          "sliding:-1", "chunked:2147483648",
                                          "full*",      "sliding:99999999999999999999",
                                          "full*2:3"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(refused); i++)
        if (sim_layers_parse(list, &n, refused[i], &why) != PGD_EINVAL)
            fail_msg("%s was taken", refused[i]);
    char many[8 * PGD_MAX_KV_LAYERS] = "full";
    for (int i = 1; i <= PGD_MAX_KV_LAYERS; i++) {
        assert_int_equal(sim_layers_parse(list, &n, many, &why), PGD_OK);
        (void)strcat(many, ",full");
    }
    assert_int_equal(sim_layers_parse(list, &n, many, &why), PGD_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sim_runner_layers),
        cmocka_unit_test(test_sim_runner_keeps_its_drafts),
        cmocka_unit_test(test_sim_runner_is_given_its_drafts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
