/* Invariant I1 with offload tiers (issue 5): the real scheduler, connector, tiers, messages and model
 * runner with its copy threads, in one process. Random workloads in a device pool of a few dozen
 * blocks must give the tokens and log probabilities, bit for bit, of each prompt alone in a large
 * pool without tiers: with both policies, host and disk, hybrid models, two steps in flight, aborts,
 * preemption, a worker that ends in the middle of transfers, an engine that starts again on what its
 * tiers have kept.
 *
 * PGD_OFFLOAD_WORKLOADS: how many (default 24); PGD_OFFLOAD_SEED: the first one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ftw.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/model/dtype.h"
#include "engine/core/core_offload.h"
#include "engine/core/scheduler.h"
#include "worker/step_runner.h"

enum {
    BLOCK_SIZE = 16,
    MAX_LEN = 320,
    MAX_OUT = 20,
    N_LOGPROBS = 2,
    N_PROMPTS = 7,   /* distinct ones of a workload */
    N_REQUESTS = 18, /* of a workload */
    MAX_RUNNING = 6,
    MAX_DONE = 4096,
    STUCK_US = 30 * 1000 * 1000
};

static const char *const models[] = {"llama31-tiny", "gemma3-tiny", "gptoss-tiny", "llama4-tiny",
                                     "qwen3-swa-tiny"};
static uint8_t hash_seed[HASH_SHA256_BYTES];
static char disk_dir[64];

typedef struct answer {
    int32_t n_tokens;
    token_id tokens[MAX_OUT];
    token_logprob logprobs[MAX_OUT][N_LOGPROBS + 1];
} answer;

typedef struct prompt {
    int32_t n_tokens;
    token_id tokens[MAX_LEN];
    answer want;
} prompt;

/* One client's request; it is sent again, from the start, when the engine starts again. */
typedef struct client {
    const prompt *prompt;
    int32_t n_out;
    int32_t priority;
    int32_t start; /* turn in which it comes */
    int32_t end;   /* turn in which it is aborted; 0 = never */
    uint64_t id;   /* of its request; 0 = none */
    bool is_finished;
    bool is_aborted;
    answer got;
} client;

typedef struct frame {
    uint64_t *data;
    size_t n_bytes;
} frame;

typedef struct setup {
    const char *model;
    dtype kv_dtype;
    int32_t chunk;
    int32_t n_blocks;
    int32_t depth;
    bool is_priority;
    int64_t host_blocks; /* 0 = no tiers */
    int64_t disk_blocks;
    bool is_persistent;
    const char *policy;
} setup;

typedef struct totals {
    uint64_t n_external;
    uint64_t n_preemptions;
    uint64_t n_kills;
    uint64_t n_restarts;
    uint64_t n_aborts;
    uint64_t n_tokens;
} totals;

typedef struct rig {
    setup how;
    config cfg;
    core_sizes sizes;
    worker_facts facts;
    core_offload *offload;
    char region_path[CONTROL_PATH_BYTES];
    int wake_fd;
    scheduler *sched;
    block_hasher *hasher;
    step_runner *runner;
    wire_limits limits;
    wire_scratch scratch;
    frame frames[2]; /* oldest first */
    int32_t n_frames;
    client *clients;
    int32_t n_clients;
    uint64_t next_id;
    uint64_t rng;
    totals *total;
    pthread_mutex_t lock; /* of done */
    int32_t n_done;
    kv_transfer_done done[MAX_DONE];
} rig;

static uint64_t draw(uint64_t *rng, uint64_t n)
{
    *rng = hash_u64(*rng + 0x9e3779b97f4a7c15ull);
    return *rng % n;
}

static bool on_transfer(void *arg, const kv_transfer_done *done)
{
    rig *g = arg;
    pthread_mutex_lock(&g->lock);
    bool ok = g->n_done < MAX_DONE;
    if (ok)
        g->done[g->n_done++] = *done;
    pthread_mutex_unlock(&g->lock);
    return ok;
}

/* --- scheduler's callbacks -------------------------------------------------------------------- */

static client *find_client(rig *g, uint64_t id)
{
    for (int32_t i = 0; i < g->n_clients; i++) {
        if (g->clients[i].id == id)
            return &g->clients[i];
    }
    return NULL;
}

static void on_token(void *arg, request *r, token_id token, const token_logprob *logprobs,
                     int32_t n_logprobs)
{
    answer *a = &find_client(arg, r->id)->got;
    assert_int_equal(n_logprobs, N_LOGPROBS + 1);
    assert_true(a->n_tokens < MAX_OUT);
    memcpy(a->logprobs[a->n_tokens], logprobs, sizeof a->logprobs[0]);
    a->tokens[a->n_tokens++] = token;
}

static void on_finished(void *arg, request *r, request_error error)
{
    client *c = find_client(arg, r->id);
    assert_int_equal(error, REQUEST_ERROR_NONE);
    c->is_finished = true;
}

static void on_release(void *arg, request *r)
{
    (void)arg;
    request_destroy(r);
}

/* --- worker ----------------------------------------------------------------------------------- */

static void start_worker(rig *g)
{
    load_msg load = {.kv_dtype = g->how.kv_dtype,
                     .block_size = BLOCK_SIZE,
                     .max_model_len = MAX_LEN,
                     .max_num_seqs = MAX_RUNNING,
                     .max_num_batched_tokens = g->how.chunk,
                     .max_logprobs = N_LOGPROBS,
                     .n_threads = 1};
    load_done_msg done;
    kv_ready_msg ready;
    pgd_why why = {{0}};
    kv_groups_opts opts = {.block_size = BLOCK_SIZE, .is_hybrid = true};
    (void)snprintf(load.model_path, sizeof load.model_path, "tests/data/models/%s", g->how.model);
    if (model_runner_create(&g->runner, "cpu", &why) != PGD_OK ||
        g->runner->vtbl->load(g->runner, &load, &done, NULL, NULL, &why) != PGD_OK ||
        kv_groups_init(&g->facts.kv.groups, done.kv_layers, done.n_kv_layers, &opts, &why) !=
            PGD_OK)
        fail_msg("%s: %s", g->how.model, why.text);
    const kv_layout *layout = &g->facts.kv.groups.layout;
    g->facts.kv.n_blocks = g->how.n_blocks * layout->n_groups + 1;
    g->facts.vocab_size = done.vocab_size;
    g->facts.max_model_len = MAX_LEN;
    memcpy(g->facts.numerics, done.numerics, sizeof g->facts.numerics);
    memcpy(g->facts.model_fingerprint, done.model_fingerprint, sizeof g->facts.model_fingerprint);
    kv_config_msg kv = {
        .n_blocks = g->facts.kv.n_blocks, .max_model_len = MAX_LEN, .layout = *layout};
    if (g->how.host_blocks > 0) {
        if (g->offload == NULL) {
            g->cfg.kv_offload_memory =
                g->how.host_blocks * (int64_t)(kv_layout_block_bytes(layout) + 4096 + 80) + 16384;
            g->cfg.kv_offload_disk =
                g->how.disk_blocks * (int64_t)(kv_layout_block_bytes(layout) + 8192);
            core_offload_opts tier = {.cfg = &g->cfg,
                                      .sizes = &g->sizes,
                                      .model_path = NULL,
                                      .hash_seed = hash_seed,
                                      .wake_fd = g->wake_fd};
            if (core_offload_create(&g->offload, &tier, &why) != PGD_OK)
                fail_msg("%s", why.text);
        }
        if (core_offload_begin_life(g->offload, &kv, &g->facts, &why) != PGD_OK)
            fail_msg("%s", why.text);
        memcpy(g->region_path, kv.offload_path, sizeof g->region_path);
    }
    g->runner->on_transfer = on_transfer;
    g->runner->on_transfer_arg = g;
    if (g->runner->vtbl->init_kv(g->runner, &kv, &ready, &why) != PGD_OK)
        fail_msg("%s", why.text);
}

/* Wherever its transfers are; what it has not told of by now is never heard. */
static void end_worker(rig *g)
{
    g->runner->vtbl->stop(g->runner);
    g->runner->vtbl->destroy(g->runner);
    g->runner = NULL;
    for (int32_t i = 0; i < g->n_frames; i++)
        mem_free(g->frames[i].data);
    g->n_frames = 0;
    g->n_done = 0;
}

/* --- engine ----------------------------------------------------------------------------------- */

static void start_engine(rig *g)
{
    start_worker(g);
    kv_group_spec specs[PGD_MAX_KV_GROUPS];
    int32_t n_groups = g->facts.kv.groups.layout.n_groups;
    for (int32_t i = 0; i < n_groups; i++)
        specs[i] = kv_groups_spec(&g->facts.kv.groups, i);
    scheduler_opts o = {.max_num_seqs = MAX_RUNNING,
                        .max_num_batched_tokens = g->how.chunk,
                        .max_model_len = MAX_LEN,
                        .max_queued_requests = N_REQUESTS,
                        .policy = g->how.is_priority ? SCHEDULER_PRIORITY : SCHEDULER_FCFS,
                        .enable_chunked_prefill = true,
                        .enable_prefix_caching = true,
                        .async = true,
                        .max_steps_in_flight = g->how.depth,
                        .admit_partly = draw(&g->rng, 4) != 0,
                        .n_blocks = g->facts.kv.n_blocks,
                        .block_size = BLOCK_SIZE,
                        .n_groups = n_groups,
                        .groups = specs,
                        .hash_seed = hash_seed,
                        .connector =
                            g->offload != NULL ? core_offload_get_connector(g->offload) : NULL,
                        .on_token = on_token,
                        .on_finished = on_finished,
                        .on_release = on_release,
                        .arg = g};
    assert_int_equal(scheduler_create(&g->sched, &o), PGD_OK);
    g->limits = (wire_limits){.max_num_seqs = MAX_RUNNING,
                              .max_num_batched_tokens = g->how.chunk,
                              .max_model_len = MAX_LEN,
                              .vocab_size = g->facts.vocab_size,
                              .n_blocks = g->facts.kv.n_blocks,
                              .max_logprobs = N_LOGPROBS};
    kv_layout_fill_limits(&g->limits, &g->facts.kv.groups.layout);
    assert_int_equal(wire_limits_derive(&g->limits, NULL), PGD_OK);
    g->scratch.cap_bytes = scheduler_output_scratch_bytes(&g->limits);
    g->scratch.data = mem_alloc(g->scratch.cap_bytes);
}

static void end_engine(rig *g)
{
    scheduler_stats stats;
    scheduler_get_stats(g->sched, &stats);
    g->total->n_external += stats.n_external_hit_tokens;
    g->total->n_preemptions += stats.n_preemptions;
    end_worker(g);
    scheduler_destroy(g->sched);
    core_offload_destroy(g->offload);
    g->offload = NULL;
    mem_free(g->scratch.data);
}

static void rig_open(rig *g, const setup *how, client *clients, int32_t n_clients, uint64_t seed,
                     totals *total)
{
    memset(g, 0, sizeof *g);
    g->how = *how;
    g->clients = clients;
    g->n_clients = n_clients;
    g->next_id = 1;
    g->rng = seed;
    g->total = total;
    pthread_mutex_init(&g->lock, NULL);
    g->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    config_init(&g->cfg);
    (void)snprintf(g->cfg.kv_offload_policy, sizeof g->cfg.kv_offload_policy, "%s",
                   how->policy != NULL ? how->policy : "lru");
    g->cfg.kv_offload_persist = how->is_persistent;
    if (how->disk_blocks > 0)
        (void)snprintf(g->cfg.kv_offload_dir, sizeof g->cfg.kv_offload_dir, "%s", disk_dir);
    g->sizes = (core_sizes){.kv_dtype = how->kv_dtype,
                            .max_num_seqs = MAX_RUNNING,
                            .max_num_batched_tokens = how->chunk,
                            .block_size = BLOCK_SIZE,
                            .max_logprobs = N_LOGPROBS,
                            .max_model_len = MAX_LEN,
                            .max_held = N_REQUESTS};
    assert_int_equal(block_hasher_create(&g->hasher, hash_seed), PGD_OK);
    start_engine(g);
}

static void rig_close(rig *g)
{
    end_engine(g);
    if (g->how.is_persistent)
        (void)unlink(g->region_path);
    block_hasher_destroy(g->hasher);
    close(g->wake_fd);
    pthread_mutex_destroy(&g->lock);
}

/* --- one turn --------------------------------------------------------------------------------- */

/* Half of the prompts are sampled, with a seed of their own. */
static void add(rig *g, client *c)
{
    request *r;
    bool is_sampled = c->prompt->tokens[0] % 2 != 0;
    request_opts opts = {.id = g->next_id++,
                         .prompt = c->prompt->tokens,
                         .n_prompt_tokens = c->prompt->n_tokens,
                         .max_tokens = c->n_out,
                         .max_model_len = MAX_LEN,
                         .params = {.temperature = is_sampled ? 0.8F : 0,
                                    .seed = 7,
                                    .top_p = 1,
                                    .repetition_penalty = 1,
                                    .n_logprobs = N_LOGPROBS},
                         .priority = c->priority,
                         .arrival_us = (uint64_t)c->start,
                         .block_size = BLOCK_SIZE,
                         .hasher = g->hasher};
    assert_int_equal(request_create(&r, &opts), PGD_OK);
    c->id = r->id;
    memset(&c->got, 0, sizeof c->got);
    assert_int_equal(scheduler_add_request(g->sched, r), SCHEDULER_ADDED);
}

static void deliver_transfers(rig *g)
{
    static kv_transfer_done done[MAX_DONE];
    pthread_mutex_lock(&g->lock);
    int32_t n = g->n_done;
    memcpy(done, g->done, (size_t)n * sizeof *done);
    g->n_done = 0;
    pthread_mutex_unlock(&g->lock);
    if (n > 0)
        assert_int_equal(scheduler_transfers_done(g->sched, 0, done, n), PGD_OK);
}

static bool send_step(rig *g)
{
    scheduler_output out;
    if (g->n_frames == g->how.depth || !scheduler_has_work(g->sched) ||
        !scheduler_schedule(g->sched, &out, NULL, 0))
        return false;
    frame *f = &g->frames[g->n_frames++];
    f->n_bytes = wire_frame_bytes(&scheduler_output_record, &out);
    f->data = mem_alloc(f->n_bytes);
    wire_encode(f->data, f->n_bytes, WIRE_STEP, 1, &scheduler_output_record, &out);
    return true;
}

static bool run_step(rig *g)
{
    scheduler_output in;
    step_result result;
    pgd_why why = {{0}};
    if (g->n_frames == 0)
        return false;
    frame f = g->frames[0];
    g->frames[0] = g->frames[--g->n_frames];
    if (scheduler_output_decode(&in, &g->scratch, f.data, f.n_bytes, &g->limits, &why) != PGD_OK ||
        g->runner->vtbl->step(g->runner, &in, &result, &why) != PGD_OK)
        fail_msg("%s", why.text);
    assert_int_equal(scheduler_update(g->sched, &result), PGD_OK);
    mem_free(f.data);
    return true;
}

static void restart_engine(rig *g)
{
    end_engine(g);
    start_engine(g);
    for (int32_t i = 0; i < g->n_clients; i++) {
        if (g->clients[i].id != 0 && !g->clients[i].is_finished)
            add(g, &g->clients[i]);
    }
    g->total->n_restarts++;
}

static void kill_worker(rig *g)
{
    end_worker(g);
    scheduler_reset_worker(g->sched);
    start_worker(g);
    g->total->n_kills++;
}

static int32_t come_and_go(rig *g, int32_t turn)
{
    int32_t n_open = 0;
    for (int32_t i = 0; i < g->n_clients; i++) {
        client *c = &g->clients[i];
        if (c->id == 0 && turn >= c->start)
            add(g, c);
        if (c->id != 0 && !c->is_finished && c->end > 0 && turn >= c->end) {
            c->is_aborted = true;
            assert_true(scheduler_finish_request(g->sched, c->id, REQUEST_FINISHED_ABORTED));
            g->total->n_aborts++;
        }
        n_open += !c->is_finished;
    }
    return n_open;
}

/* Until all have ended. faults: a worker or the engine ends now and then. */
static void run(rig *g, bool has_faults)
{
    uint64_t moved_us = clock_now_us();
    for (int32_t turn = 1; come_and_go(g, turn) > 0; turn++) {
        if (has_faults && draw(&g->rng, 60) == 0)
            kill_worker(g);
        if (has_faults && g->how.host_blocks > 0 && draw(&g->rng, 120) == 0)
            restart_engine(g);
        if (draw(&g->rng, 3) != 0)
            deliver_transfers(g);
        bool has_moved = send_step(g);
        if (!has_moved || draw(&g->rng, 2) == 0)
            has_moved = run_step(g) || has_moved;
        if (has_moved)
            moved_us = clock_now_us();
        else
            usleep(20);
        if (clock_now_us() - moved_us > STUCK_US)
            fail_msg("nothing moves any more in turn %d", turn);
    }
    scheduler_check(g->sched);
}

/* --- workloads -------------------------------------------------------------------------------- */

static void reference(prompt *p, const char *model, dtype kv_dtype)
{
    static rig g;
    totals total = {0};
    client c = {.prompt = p, .n_out = PGD_MIN(MAX_OUT, MAX_LEN - p->n_tokens), .start = 1};
    setup how = {.model = model, .kv_dtype = kv_dtype, .chunk = 64, .n_blocks = 40, .depth = 1};
    rig_open(&g, &how, &c, 1, 1, &total);
    run(&g, false);
    rig_close(&g);
    p->want = c.got;
}

/* The first tokens of one of three texts; or an earlier prompt, its answer, and something new: the
 * next turn of a conversation. */
static void make_prompt(prompt *all, int32_t idx, int32_t vocab_size, uint64_t *rng)
{
    prompt *p = &all[idx];
    int32_t n_new = 1 + (int32_t)draw(rng, 60);
    const prompt *before = idx > 0 ? &all[draw(rng, (uint64_t)idx)] : NULL;
    if (before != NULL && draw(rng, 2) == 0 &&
        before->n_tokens + before->want.n_tokens + n_new < MAX_LEN) {
        memcpy(p->tokens, before->tokens, sizeof p->tokens);
        memcpy(p->tokens + before->n_tokens, before->want.tokens,
               (size_t)before->want.n_tokens * sizeof *p->tokens);
        p->n_tokens = before->n_tokens + before->want.n_tokens;
    } else {
        uint64_t text = draw(rng, 3);
        p->n_tokens = (int32_t)draw(rng, MAX_LEN - 80);
        for (int32_t i = 0; i < p->n_tokens; i++)
            p->tokens[i] =
                (token_id)(hash_u64(text * 1000003 + (uint64_t)i) % (uint64_t)vocab_size);
    }
    for (int32_t i = 0; i < n_new; i++)
        p->tokens[p->n_tokens++] = (token_id)draw(rng, (uint64_t)vocab_size);
}

static void check_answer(const client *c, uint64_t seed, int32_t idx)
{
    const answer *want = &c->prompt->want;
    int32_t n = PGD_MIN(c->n_out, want->n_tokens);
    if (!c->is_aborted && c->got.n_tokens != n)
        fail_msg("workload %llu, request %d: %d tokens, expected %d", (unsigned long long)seed, idx,
                 c->got.n_tokens, n);
    for (int32_t i = 0; i < c->got.n_tokens; i++) {
        if (c->got.tokens[i] != want->tokens[i] ||
            memcmp(c->got.logprobs[i], want->logprobs[i], sizeof want->logprobs[i]) != 0)
            fail_msg("workload %llu, request %d, output token %d: %d (%a), expected %d (%a)",
                     (unsigned long long)seed, idx, i, c->got.tokens[i],
                     (double)c->got.logprobs[i][0].logprob, want->tokens[i],
                     (double)want->logprobs[i][0].logprob);
    }
}

static void workload(uint64_t seed, totals *total)
{
    static rig g;
    static prompt prompts[N_PROMPTS];
    client clients[N_REQUESTS];
    uint64_t rng = hash_u64(seed);
    setup how = {.model = models[seed % PGD_ARRAY_LEN(models)],
                 .kv_dtype = draw(&rng, 2) == 0 ? DTYPE_F16 : DTYPE_F32,
                 .chunk = 16 + (int32_t)draw(&rng, 100),
                 .n_blocks = 21 + (int32_t)draw(&rng, 12),
                 .depth = 1 + (int32_t)draw(&rng, 2),
                 .is_priority = draw(&rng, 2) == 0,
                 .host_blocks = 1 + (int64_t)draw(&rng, draw(&rng, 2) == 0 ? 20 : 300),
                 .disk_blocks = draw(&rng, 2) == 0 ? 1 + (int64_t)draw(&rng, 400) : 0,
                 .is_persistent = draw(&rng, 2) == 0,
                 .policy = draw(&rng, 2) == 0 ? "arc" : "lru"};
    bool has_faults = draw(&rng, 3) != 0;
    for (int32_t i = 0; i < N_PROMPTS; i++) {
        memset(&prompts[i], 0, sizeof prompts[i]);
        make_prompt(prompts, i, 256, &rng);
        reference(&prompts[i], how.model, how.kv_dtype);
    }
    for (int32_t i = 0; i < N_REQUESTS; i++) {
        const prompt *p = &prompts[draw(&rng, N_PROMPTS)];
        clients[i] = (client){.prompt = p,
                              .n_out = 1 + (int32_t)draw(&rng, (uint64_t)p->want.n_tokens),
                              .priority = (int32_t)draw(&rng, 3),
                              .start = 1 + (int32_t)draw(&rng, 80)};
        if (draw(&rng, 6) == 0)
            clients[i].end = clients[i].start + 1 + (int32_t)draw(&rng, 40);
    }
    rig_open(&g, &how, clients, N_REQUESTS, seed, total);
    run(&g, has_faults);
    rig_close(&g);
    for (int32_t i = 0; i < N_REQUESTS; i++) {
        check_answer(&clients[i], seed, i);
        total->n_tokens += (uint64_t)clients[i].got.n_tokens;
    }
}

static uint64_t from_env(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL ? strtoull(text, NULL, 10) : otherwise;
}

static void test_same_bits_as_without_tiers(void **state)
{
    (void)state;
    uint64_t first = from_env("PGD_OFFLOAD_SEED", 1);
    uint64_t n = from_env("PGD_OFFLOAD_WORKLOADS", 24);
    totals t = {0};
    for (uint64_t i = 0; i < n; i++)
        workload(first + i, &t);
    print_message("%llu workloads: %llu tokens, %llu tokens loaded, %llu preemptions, %llu workers "
                  "ended, %llu engines restarted, %llu aborts\n",
                  (unsigned long long)n, (unsigned long long)t.n_tokens,
                  (unsigned long long)t.n_external, (unsigned long long)t.n_preemptions,
                  (unsigned long long)t.n_kills, (unsigned long long)t.n_restarts,
                  (unsigned long long)t.n_aborts);
    assert_true(n < 10 || (t.n_external > 0 && t.n_preemptions > 0 && t.n_kills > 0 &&
                           t.n_restarts > 0 && t.n_aborts > 0));
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st, (void)flag, (void)ftw;
    return remove(path);
}

static int set_up(void **state)
{
    (void)state;
    log_init("test", LOG_ERROR);
    uint64_t pid = (uint64_t)getpid(); /* persistent tiers are named by the seed */
    memcpy(hash_seed, &pid, sizeof pid);
    (void)snprintf(disk_dir, sizeof disk_dir, "/tmp/offload-exact.XXXXXX");
    return mkdtemp(disk_dir) == NULL;
}

static int tear_down(void **state)
{
    (void)state;
    return nftw(disk_dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_bits_as_without_tiers)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
