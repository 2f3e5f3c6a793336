/* The core loop with real workers (`paged-worker --device sim`): streams, kills, stalls, poison,
 * drain.
 *
 * What every test of tokens compares with is sim_runner_next_token, which knows nothing of batches,
 * blocks or restarts; the worker itself checks each block table and each position
 * (worker/sim_runner.h).
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/log.h"
#include "engine/core/core_loop.h"
#include "tests/unit/open_fds.h"
#include "worker/sim_runner.h"

#define MAX_REQUESTS 64
#define MAX_OUTPUT   512

typedef struct expected {
    uint64_t id;
    token_id tokens[2048]; /* prompt, then what must come */
    int32_t n_prompt;
    int32_t n_max;
    int32_t n_got;
    int32_t n_logprobs;
    bool is_finished;
    core_event end;
    sampling_params params;
} expected;

typedef struct rig {
    config cfg;
    core_loop *core;
    core_state state;
    int n_states[CORE_STOPPED + 1];
    expected reqs[MAX_REQUESTS];
    int n_reqs;
    int n_finished;
    uint64_t rng;
    int wakes; /* from the core thread */
    uint8_t seed[32];
    char dir[64];
    block_hasher *hasher; /* so that the prefix cache is at work */
} rig;

static void wake(void *arg)
{
    __atomic_fetch_add((int *)arg, 1, __ATOMIC_RELAXED);
}

static uint32_t rnd(rig *r, uint32_t n)
{
    r->rng = r->rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(r->rng >> 33) % n;
}

/* --- rig -------------------------------------------------------------------------------------- */

static void rig_config(rig *r)
{
    char *slash;
    memset(r, 0, sizeof *r);
    r->rng = 42;
    config_init(&r->cfg);
    snprintf(r->cfg.device, sizeof r->cfg.device, "sim");
    snprintf(r->cfg.log_level, sizeof r->cfg.log_level, "warn");
    snprintf(r->dir, sizeof r->dir, "/tmp/paged-test-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->cfg.runtime_dir, sizeof r->cfg.runtime_dir, "%s", r->dir);
    /* this is BUILD/tests/unit/test_core_loop */
    ssize_t n = readlink("/proc/self/exe", r->cfg.worker_path, sizeof r->cfg.worker_path - 32);
    assert_true(n > 0);
    r->cfg.worker_path[n] = 0;
    for (int up = 0; up < 3; up++) {
        slash = strrchr(r->cfg.worker_path, '/');
        assert_non_null(slash);
        *slash = 0;
    }
    strcat(r->cfg.worker_path, "/bin/paged-worker");
    if (access(r->cfg.worker_path, X_OK) != 0)
        fail_msg("%s is missing: run make first", r->cfg.worker_path);
    r->cfg.sim_step_us = 1000;
    r->cfg.sim_vocab_size = 1000;
    r->cfg.max_num_seqs = 16;
    r->cfg.max_num_batched_tokens = 64;
    r->cfg.max_model_len = 1024;
    r->cfg.num_kv_blocks = 257;
    assert_int_equal(block_hasher_create(&r->hasher, r->seed), PGD_OK);
}

static void rig_start(rig *r)
{
    pgd_why why = {0};
    core_loop_opts opts = {
        .cfg = &r->cfg, .hash_seed = r->seed, .wake = wake, .wake_arg = &r->wakes};
    if (core_loop_create(&r->core, &opts, &why) != PGD_OK ||
        core_loop_start(r->core, &why) != PGD_OK)
        fail_msg("%s", why.text);
}

static expected *find(rig *r, uint64_t id)
{
    for (int i = 0; i < r->n_reqs; i++)
        if (r->reqs[i].id == id)
            return &r->reqs[i];
    fail_msg("event of unknown request %llu", (unsigned long long)id);
    return NULL;
}

static void take_token(expected *e, const core_event *ev)
{
    assert_false(e->is_finished);
    int32_t at = e->n_prompt + e->n_got++;
    assert_true(at < (int32_t)PGD_ARRAY_LEN(e->tokens));
    if (ev->token != e->tokens[at])
        fail_msg("request %llu output %d: expected token %d, got %d", (unsigned long long)e->id,
                 e->n_got - 1, e->tokens[at], ev->token);
    assert_int_equal(ev->n_logprobs, e->params.n_logprobs + 1);
    if (ev->n_logprobs > 0)
        assert_int_equal(ev->logprobs[0].id, ev->token);
}

static void drain_events(rig *r)
{
    core_event ev;
    while (core_loop_poll(r->core, &ev)) {
        if (ev.kind == CORE_EVENT_STATE) {
            r->state = ev.state;
            r->n_states[ev.state]++;
        } else if (ev.kind == CORE_EVENT_TOKEN) {
            take_token(find(r, ev.request_id), &ev);
        } else {
            expected *e = find(r, ev.request_id);
            assert_false(e->is_finished);
            e->is_finished = true;
            e->end = ev;
            r->n_finished++;
        }
    }
}

#define WAIT_FOR(r, seconds, cond)                                        \
    do {                                                                  \
        uint64_t end_us_ = clock_now_us() + (uint64_t)((seconds)*1e6);    \
        while (drain_events(r), !(cond)) {                                \
            if (clock_now_us() > end_us_)                                 \
                fail_msg("waited %g s for %s", (double)(seconds), #cond); \
            usleep(500);                                                  \
        }                                                                 \
    } while (0)

static void rig_stop(rig *r)
{
    char cmd[128];
    core_loop_stop(r->core, 0);
    drain_events(r);
    assert_int_equal(r->state, CORE_STOPPED);
    assert_int_equal(r->n_finished, r->n_reqs);
    core_loop_destroy(r->core);
    block_hasher_destroy(r->hasher);
    /* no socket is left behind */
    snprintf(cmd, sizeof cmd, "rmdir %s", r->dir);
    assert_int_equal(system(cmd), 0);
}

/* Makes the request and works out what must come. */
static expected *make(rig *r, request **out, int32_t n_prompt, int32_t n_max, float temperature,
                      int32_t n_logprobs)
{
    expected *e = &r->reqs[r->n_reqs];
    assert_true(r->n_reqs < MAX_REQUESTS && n_prompt + n_max <= (int32_t)PGD_ARRAY_LEN(e->tokens));
    memset(e, 0, sizeof *e);
    e->id = 100 + (uint64_t)r->n_reqs;
    e->n_prompt = n_prompt;
    e->n_max = n_max;
    bool is_shared = rnd(r, 2) == 0; /* half of the prompts begin alike */
    for (int32_t i = 0; i < n_prompt; i++)
        e->tokens[i] = is_shared && i < 70 ? i : (token_id)rnd(r, 900);
    e->params = (sampling_params){.temperature = temperature,
                                  .top_p = 1,
                                  .repetition_penalty = 1,
                                  .seed = rnd(r, 1000000),
                                  .n_logprobs = n_logprobs};
    request_opts o = {.id = e->id,
                      .prompt = e->tokens,
                      .n_prompt_tokens = n_prompt,
                      .max_tokens = n_max,
                      .max_model_len = 1024,
                      .params = e->params,
                      .arrival_us = clock_now_us(),
                      .block_size = 16,
                      .hasher = r->hasher};
    assert_int_equal(request_create(out, &o), PGD_OK);
    for (int32_t i = 0; i < n_max; i++)
        e->tokens[n_prompt + i] =
            sim_runner_next_token(e->tokens, n_prompt + i, n_prompt, &e->params, 1000);
    return e;
}

static expected *submit(rig *r, int32_t n_prompt, int32_t n_max)
{
    request *q;
    expected *e = make(r, &q, n_prompt, n_max, (float)rnd(r, 2), (int32_t)rnd(r, 4) - 1);
    assert_int_equal(core_loop_submit(r->core, q), CORE_REFUSAL_NONE);
    r->n_reqs++;
    return e;
}

static void expect_complete(const expected *e)
{
    if (e->end.status != REQUEST_FINISHED_LENGTH_CAPPED || e->n_got != e->n_max)
        fail_msg(
            "request %llu: expected %d tokens and status %d, got %d and status %d (refusal %d)",
            (unsigned long long)e->id, e->n_max, REQUEST_FINISHED_LENGTH_CAPPED, e->n_got,
            e->end.status, e->end.refusal);
}

static void expect_all_complete(const rig *r)
{
    for (int i = 0; i < r->n_reqs; i++)
        expect_complete(&r->reqs[i]);
}

static pid_t worker_pid(rig *r)
{
    core_stats s;
    core_loop_get_stats(r->core, &s);
    return (pid_t)s.worker_pid;
}

static uint64_t n_restarts(rig *r)
{
    core_stats s;
    core_loop_get_stats(r->core, &s);
    return s.n_worker_restarts;
}

/* --- tests ------------------------------------------------------------------------------------ */

static rig rig_;

static void test_core_loop_serves(void **state)
{
    (void)state;
    rig *r = &rig_;
    core_stats s;
    rig_config(r);
    rig_start(r);
    for (int i = 0; i < 12; i++) /* some before the worker is ready */
        submit(r, 1 + (int)rnd(r, 200), 1 + (int)rnd(r, 40));
    WAIT_FOR(r, 10, r->state == CORE_READY);
    for (int i = 0; i < 28; i++)
        submit(r, 1 + (int)rnd(r, 200), 1 + (int)rnd(r, 40));
    WAIT_FOR(r, 60, r->n_finished == r->n_reqs);
    expect_all_complete(r);
    WAIT_FOR(r, 5, (core_loop_get_stats(r->core, &s), s.scheduler.n_running == 0));
    assert_int_equal(s.state, CORE_READY);
    assert_int_equal(s.n_kv_blocks, 256);
    assert_int_equal(s.max_model_len, 1024);
    assert_int_equal(s.scheduler.n_blocks_free, 256);
    assert_int_equal(s.n_worker_restarts, 0);
    assert_true(s.n_steps > 0 && s.worker_pid > 0 && s.kv_bytes > 0);
    assert_string_equal(s.device_name, "simulated");
    assert_true(clock_now_us() - s.last_progress_us < 2000000);
    assert_true(__atomic_load_n(&r->wakes, __ATOMIC_RELAXED) > 0);
    rig_stop(r);
}

/* Few blocks: requests are preempted again and again. */
static void test_core_loop_preempts(void **state)
{
    (void)state;
    rig *r = &rig_;
    core_stats s;
    rig_config(r);
    r->cfg.num_kv_blocks = 33;
    r->cfg.max_model_len = 500;
    r->cfg.sim_step_us = 200;
    rig_start(r);
    for (int i = 0; i < 40; i++)
        submit(r, 1 + (int)rnd(r, 60), 40 + (int)rnd(r, 60));
    WAIT_FOR(r, 60, r->n_finished == r->n_reqs);
    expect_all_complete(r);
    core_loop_get_stats(r->core, &s);
    assert_true(s.scheduler.n_preemptions > 0);
    rig_stop(r);
}

static void test_core_loop_survives_kills(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_config(r);
    r->cfg.sim_step_us = 2000;
    rig_start(r);
    for (int i = 0; i < 24; i++)
        submit(r, 1 + (int)rnd(r, 150), 60 + (int)rnd(r, 100));
    WAIT_FOR(r, 10, r->state == CORE_READY);
    int n_fds = n_open_fds();
    for (int kill_no = 0; kill_no < 6; kill_no++) {
        int n_got = 0;
        for (int i = 0; i < r->n_reqs; i++)
            n_got += r->reqs[i].n_got;
        int n_now = n_got;
        int n_more = 5 + (int)rnd(r, 120);
        /* in mid-stream: after some more tokens */
        WAIT_FOR(r, 30,
                 (n_now = 0, ({
                      for (int i = 0; i < r->n_reqs; i++)
                          n_now += r->reqs[i].n_got;
                  }),
                  n_now >= n_got + n_more || r->n_finished == r->n_reqs));
        pid_t pid = worker_pid(r);
        if (pid > 0)
            assert_int_equal(kill(pid, SIGKILL), 0);
        WAIT_FOR(r, 20, worker_pid(r) != pid && worker_pid(r) != 0);
    }
    WAIT_FOR(r, 60, r->n_finished == r->n_reqs);
    expect_all_complete(r);
    assert_int_equal(n_restarts(r), 6);
    assert_true(r->n_states[CORE_RECOVERING] >= 1);
    WAIT_FOR(r, 5, n_open_fds() <= n_fds); /* NNG closes in its own time */
    rig_stop(r);
}

/* Kills that come at any moment, also while a new worker starts: nobody's request fails. */
static void test_core_loop_survives_random_kills(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_config(r);
    r->cfg.sim_step_us = 1000;
    snprintf(r->cfg.sim_kv_layers, sizeof r->cfg.sim_kv_layers, "full,sliding:100");
    rig_start(r);
    for (int i = 0; i < 20; i++)
        submit(r, 1 + (int)rnd(r, 50), 100 + (int)rnd(r, 200));
    for (int kill_no = 0; kill_no < 5; kill_no++) {
        uint64_t end_us = clock_now_us() + 30000 + rnd(r, 400000);
        while (clock_now_us() < end_us) {
            drain_events(r);
            usleep(1000);
        }
        pid_t pid = worker_pid(r);
        if (pid > 0)
            (void)kill(pid, SIGKILL);
    }
    WAIT_FOR(r, 90, r->n_finished == r->n_reqs);
    expect_all_complete(r);
    rig_stop(r);
}

static void test_core_loop_stalled_worker(void **state)
{
    (void)state;
    rig *r = &rig_;
    core_stats s;
    rig_config(r);
    r->cfg.worker_stall_timeout_s = 1;
    r->cfg.sim_step_us = 2000;
    rig_start(r);
    for (int i = 0; i < 8; i++)
        submit(r, 20, 200);
    WAIT_FOR(r, 10, r->reqs[0].n_got > 10);
    pid_t pid = worker_pid(r);
    assert_int_equal(kill(pid, SIGSTOP), 0);
    WAIT_FOR(r, 15, r->n_states[CORE_RECOVERING] == 1);
    core_loop_get_stats(r->core, &s);
    if (strstr(s.why, "no progress") == NULL && strstr(s.why, "stopped reading") == NULL)
        fail_msg("why is \"%s\"", s.why);
    WAIT_FOR(r, 30, r->n_finished == r->n_reqs);
    expect_all_complete(r);
    assert_int_equal(kill(pid, 0), -1); /* the stopped one is gone */
    /* and an idle one that stops is seen as well */
    pid = worker_pid(r);
    assert_int_equal(kill(pid, SIGSTOP), 0);
    WAIT_FOR(r, 15, worker_pid(r) != pid && r->state == CORE_READY);
    assert_int_equal(n_restarts(r), 2);
    rig_stop(r);
}

/* A slow step is no stall: the worker's progress counter moves. */
static void test_core_loop_slow_step(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_config(r);
    r->cfg.worker_stall_timeout_s = 1;
    r->cfg.sim_step_us = 2500000;
    rig_start(r);
    submit(r, 5, 2);
    WAIT_FOR(r, 20, r->n_finished == 1);
    expect_all_complete(r);
    assert_int_equal(n_restarts(r), 0);
    rig_stop(r);
}

static void test_core_loop_step_timeout(void **state)
{
    (void)state;
    rig *r = &rig_;
    core_stats s;
    rig_config(r);
    r->cfg.step_timeout_s = 1;
    r->cfg.sim_step_us = 60000000;
    rig_start(r);
    submit(r, 5, 2);
    /* Look while it is so: the next worker, whose step ends in the same way, comes at once. */
    WAIT_FOR(r, 20,
             (core_loop_get_stats(r->core, &s),
              strstr(s.why, "did not finish a step within 1 s") != NULL));
    rig_stop(r);
    assert_int_equal(r->reqs[0].end.status, REQUEST_FINISHED_ABORTED);
}

static void test_core_loop_poison(void **state)
{
    (void)state;
    rig *r = &rig_;
    request *q;
    assert_int_equal(setenv("PAGED_SIM_FAULTS", "kill:99999", 1), 0);
    rig_config(r);
    r->cfg.sim_vocab_size = 100000; /* so that no output is the killer */
    rig_start(r);
    for (int i = 0; i < 9; i++) {
        bool is_poison = i == 4;
        expected *e = make(r, &q, 30 + i, 60, 0, -1);
        request_destroy(q);
        if (is_poison)
            e->tokens[20] = 99999;
        for (int32_t k = 0; k < e->n_max; k++)
            e->tokens[e->n_prompt + k] =
                sim_runner_next_token(e->tokens, e->n_prompt + k, e->n_prompt, &e->params, 100000);
        request_opts o = {.id = e->id,
                          .prompt = e->tokens,
                          .n_prompt_tokens = e->n_prompt,
                          .max_tokens = 60,
                          .max_model_len = 1024,
                          .params = e->params,
                          .block_size = 16,
                          .hasher = r->hasher};
        assert_int_equal(request_create(&q, &o), PGD_OK);
        assert_int_equal(core_loop_submit(r->core, q), CORE_REFUSAL_NONE);
        r->n_reqs++;
    }
    WAIT_FOR(r, 90, r->n_finished == r->n_reqs);
    for (int i = 0; i < r->n_reqs; i++) {
        if (i != 4)
            expect_complete(&r->reqs[i]);
    }
    assert_int_equal(r->reqs[4].end.status, REQUEST_FINISHED_ERROR);
    assert_int_equal(r->reqs[4].end.refusal, CORE_REFUSAL_POISON);
    assert_int_not_equal(r->state, CORE_FAILED);
    rig_stop(r);
    unsetenv("PAGED_SIM_FAULTS");
}

/* Poison requests one after the other, with nobody else there: each is found, and the restarts do
 * not run out. */
static void test_core_loop_poison_alone(void **state)
{
    (void)state;
    rig *r = &rig_;
    assert_int_equal(setenv("PAGED_SIM_FAULTS", "kill:7", 1), 0);
    rig_config(r);
    rig_start(r);
    request *q;
    for (int i = 0; i < 3; i++) {
        expected *e = make(r, &q, 3, 4, 0, -1);
        memcpy(q->tokens, (token_id[]){7, 7, 7}, 3 * sizeof(token_id));
        assert_int_equal(core_loop_submit(r->core, q), CORE_REFUSAL_NONE);
        r->n_reqs++;
        WAIT_FOR(r, 30, e->is_finished);
        assert_int_equal(e->end.refusal, CORE_REFUSAL_POISON);
    }
    WAIT_FOR(r, 5, n_restarts(r) == 12);
    unsetenv("PAGED_SIM_FAULTS");
    rig_stop(r);
}

static void test_core_loop_request_error(void **state)
{
    (void)state;
    rig *r = &rig_;
    request *q;
    assert_int_equal(setenv("PAGED_SIM_FAULTS", "nan:950", 1), 0);
    rig_config(r);
    rig_start(r);
    WAIT_FOR(r, 10, r->state == CORE_READY);
    unsetenv("PAGED_SIM_FAULTS");
    expected *e = make(r, &q, 3, 4, 0, -1);
    q->tokens[1] = 950;
    assert_int_equal(core_loop_submit(r->core, q), CORE_REFUSAL_NONE);
    r->n_reqs++;
    WAIT_FOR(r, 10, e->is_finished);
    assert_int_equal(e->end.status, REQUEST_FINISHED_ERROR);
    assert_int_equal(e->end.error, REQUEST_ERROR_NAN_LOGITS);
    assert_int_equal(e->end.refusal, CORE_REFUSAL_NONE);
    submit(r, 20, 20); /* the worker goes on */
    WAIT_FOR(r, 10, r->n_finished == 2);
    expect_complete(&r->reqs[1]);
    assert_int_equal(n_restarts(r), 0);
    rig_stop(r);
}

static void test_core_loop_abort(void **state)
{
    (void)state;
    rig *r = &rig_;
    core_stats s;
    rig_config(r);
    r->cfg.max_num_seqs = 2;
    r->cfg.sim_step_us = 5000;
    rig_start(r);
    for (int i = 0; i < 4; i++)
        submit(r, 10, 400);
    core_loop_abort(r->core, r->reqs[3].id); /* waits for the worker */
    core_loop_abort(r->core, 999);           /* unknown */
    WAIT_FOR(r, 10, r->reqs[0].n_got > 5 && r->reqs[3].is_finished);
    core_loop_abort(r->core, r->reqs[0].id); /* runs */
    core_loop_abort(r->core, r->reqs[2].id); /* waits for a place */
    core_loop_abort(r->core, r->reqs[2].id);
    uint64_t start_us = clock_now_us();
    WAIT_FOR(r, 2, r->n_finished == 3);
    assert_true(clock_now_us() - start_us < 500000);
    for (int i = 0; i < 4; i++)
        if (i != 1)
            assert_int_equal(r->reqs[i].end.status, REQUEST_FINISHED_ABORTED);
    WAIT_FOR(r, 10, r->n_finished == 4);
    expect_complete(&r->reqs[1]);
    WAIT_FOR(r, 5,
             (core_loop_get_stats(r->core, &s),
              s.scheduler.n_blocks_free == s.scheduler.n_blocks_total));
    rig_stop(r);
}

static void test_core_loop_refusals(void **state)
{
    (void)state;
    rig *r = &rig_;
    request *q;
    rig_config(r);
    r->cfg.max_queued_requests = 6;
    r->cfg.num_kv_blocks = 17; /* 256 tokens */
    r->cfg.max_model_len = 1024;
    r->cfg.sim_step_us = 20000;
    rig_start(r);
    submit(r, 400, 10); /* can never fit; known once the pool is */
    for (int i = 0; i < 5; i++)
        submit(r, 10, 20);
    make(r, &q, 10, 20, 0, -1);
    assert_int_equal(core_loop_submit(r->core, q), CORE_REFUSAL_QUEUE_FULL);
    request_destroy(q);
    WAIT_FOR(r, 20, r->reqs[0].is_finished);
    assert_int_equal(r->reqs[0].end.refusal, CORE_REFUSAL_NEVER_FITS);
    submit(r, 10, 20); /* there is room again */
    WAIT_FOR(r, 20, r->n_finished == r->n_reqs);
    for (int i = 1; i < r->n_reqs; i++)
        expect_complete(&r->reqs[i]);
    rig_stop(r);
}

/* io does not poll: tokens wait in the worker's socket, nothing is lost, the worker is not taken
 * for dead. */
static void test_core_loop_slow_reader(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_config(r);
    r->cfg.worker_stall_timeout_s = 1;
    r->cfg.max_num_seqs = 2;
    r->cfg.max_queued_requests = 4;
    r->cfg.sim_step_us = 0;
    rig_start(r);
    WAIT_FOR(r, 10, r->state == CORE_READY);
    submit(r, 5, 500);
    submit(r, 6, 500);
    sleep(5);
    core_stats s;
    core_loop_get_stats(r->core, &s);
    assert_true(s.n_steps < 490); /* held back */
    assert_true(clock_now_us() - s.last_progress_us < 1000000);
    WAIT_FOR(r, 20, r->n_finished == 2);
    expect_all_complete(r);
    assert_int_equal(n_restarts(r), 0);
    rig_stop(r);
}

static void test_core_loop_drain(void **state)
{
    (void)state;
    rig *r = &rig_;
    request *q;
    rig_config(r);
    r->cfg.sim_step_us = 3000;
    rig_start(r);
    WAIT_FOR(r, 10, r->state == CORE_READY);
    submit(r, 10, 50);
    submit(r, 10, 60);
    pid_t pid = worker_pid(r);
    core_loop_drain(r->core, 20);
    make(r, &q, 10, 20, 0, -1);
    assert_int_equal(core_loop_submit(r->core, q), CORE_REFUSAL_DRAINING);
    request_destroy(q);
    WAIT_FOR(r, 20, r->state == CORE_STOPPED);
    expect_all_complete(r);
    assert_int_equal(r->n_states[CORE_DRAINING], 1);
    assert_int_equal(kill(pid, 0), -1);
    core_loop_abort(r->core, 100); /* after the end: nothing happens */
    rig_stop(r);

    rig_config(r);
    r->cfg.sim_step_us = 20000;
    rig_start(r);
    submit(r, 10, 500);
    uint64_t start_us = clock_now_us();
    core_loop_drain(r->core, 1);
    WAIT_FOR(r, 20, r->state == CORE_STOPPED);
    assert_true(clock_now_us() - start_us > 900000 && clock_now_us() - start_us < 5000000);
    assert_int_equal(r->reqs[0].end.status, REQUEST_FINISHED_ABORTED);
    rig_stop(r);
}

static void expect_failed(rig *r, const char *part)
{
    request *q;
    core_stats s;
    assert_int_equal(r->reqs[0].end.status, REQUEST_FINISHED_ERROR);
    assert_int_equal(r->reqs[0].end.refusal, CORE_REFUSAL_WORKER);
    core_loop_get_stats(r->core, &s);
    assert_int_equal(s.state, CORE_FAILED);
    if (strstr(s.why, part) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", part, s.why);
    make(r, &q, 10, 20, 0, -1);
    assert_int_equal(core_loop_submit(r->core, q), CORE_REFUSAL_WORKER);
    request_destroy(q);
}

static void test_core_loop_no_worker(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_config(r);
    snprintf(r->cfg.worker_path, sizeof r->cfg.worker_path, "/nonexistent/paged-worker");
    rig_start(r);
    submit(r, 10, 20);
    WAIT_FOR(r, 5, r->state == CORE_FAILED);
    expect_failed(r, "/nonexistent/paged-worker: No such file");
    rig_stop(r);
}

static void test_core_loop_gives_up(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_config(r);
    snprintf(r->cfg.worker_path, sizeof r->cfg.worker_path, "/bin/false");
    rig_start(r);
    submit(r, 10, 20);
    uint64_t start_us = clock_now_us();
    WAIT_FOR(r, 40, r->state == CORE_FAILED);
    assert_true(clock_now_us() - start_us > 15000000); /* 0 + 0.5 + 1 + 2 + 4 + 8 s */
    expect_failed(r, "exited with status 1");
    assert_int_equal(n_restarts(r), 6);
    rig_stop(r);
}

/* What restarting cannot help ends it at once, with the worker's words. */
static void test_core_loop_fatal_load(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_config(r);
    r->cfg.sim_vocab_size = 0;
    rig_start(r);
    submit(r, 10, 20);
    WAIT_FOR(r, 5, r->state == CORE_FAILED);
    expect_failed(r, "expected sim_vocab_size >= 1, got 0");
    assert_int_equal(n_restarts(r), 0);
    rig_stop(r);

    rig_config(r); /* while it drains the end comes at once: the words are still there */
    r->cfg.sim_vocab_size = 0;
    rig_start(r);
    submit(r, 10, 20);
    core_loop_drain(r->core, 20);
    WAIT_FOR(r, 5, r->state == CORE_STOPPED);
    core_stats s;
    core_loop_get_stats(r->core, &s);
    assert_int_equal(r->n_states[CORE_FAILED], 1);
    assert_non_null(strstr(s.why, "expected sim_vocab_size >= 1, got 0"));
    rig_stop(r);
}

/* This program as an engine that will be killed: says its worker's pid on stdout. */
PGD_NORETURN static void run_doomed_engine(const char *dir)
{
    rig *r = &rig_;
    rig_config(r);
    (void)rmdir(r->dir);
    snprintf(r->cfg.runtime_dir, sizeof r->cfg.runtime_dir, "%s", dir);
    rig_start(r);
    submit(r, 10, 500);
    WAIT_FOR(r, 10, r->reqs[0].n_got > 3);
    printf("%ld\n", (long)worker_pid(r));
    fflush(stdout);
    for (;;)
        pause();
}

/* The engine dies without a word: its worker goes too. */
static void test_core_loop_engine_killed(void **state)
{
    (void)state;
    int fds[2];
    long pid = 0;
    char cmd[128];
    rig_config(&rig_);
    assert_int_equal(pipe(fds), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(fds[1], STDOUT_FILENO);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl("/proc/self/exe", "test_core_loop", "--doomed-engine", rig_.dir, (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    FILE *from_child = fdopen(fds[0], "r");
    assert_non_null(from_child);
    assert_int_equal(fscanf(from_child, "%ld", &pid), 1);
    fclose(from_child);
    assert_true(pid > 0 && kill((pid_t)pid, 0) == 0);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    /* It is nobody's child here; whoever reaps orphans may take a moment. */
    bool is_gone = false;
    for (int i = 0; i < 400 && !is_gone; i++) {
        char path[64];
        char text[256] = "";
        snprintf(path, sizeof path, "/proc/%ld/stat", pid);
        FILE *f = fopen(path, "r");
        is_gone = f == NULL || fgets(text, sizeof text, f) == NULL || strstr(text, ") Z") != NULL ||
                  strstr(text, ") X") != NULL;
        if (f != NULL)
            fclose(f);
        usleep(10000);
    }
    assert_true(is_gone);
    /* The dead engine's socket is swept by the next one. */
    rig *r = &rig_;
    char dir[sizeof r->dir];
    memcpy(dir, r->dir, sizeof dir);
    block_hasher_destroy(r->hasher);
    rig_config(r);
    assert_int_equal(rmdir(r->dir), 0);
    memcpy(r->dir, dir, sizeof dir);
    memcpy(r->cfg.runtime_dir, dir, sizeof dir);
    snprintf(cmd, sizeof cmd, "ls %s/worker-*.sock > /dev/null", dir);
    assert_int_equal(system(cmd), 0);
    rig_start(r);
    WAIT_FOR(r, 10, r->state == CORE_READY);
    rig_stop(r);
}

int main(int argc, char **argv)
{
    log_init("test", LOG_WARN);
    if (argc == 3 && strcmp(argv[1], "--doomed-engine") == 0)
        run_doomed_engine(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_core_loop_serves),
        cmocka_unit_test(test_core_loop_preempts),
        cmocka_unit_test(test_core_loop_survives_kills),
        cmocka_unit_test(test_core_loop_survives_random_kills),
        cmocka_unit_test(test_core_loop_stalled_worker),
        cmocka_unit_test(test_core_loop_slow_step),
        cmocka_unit_test(test_core_loop_step_timeout),
        cmocka_unit_test(test_core_loop_poison),
        cmocka_unit_test(test_core_loop_poison_alone),
        cmocka_unit_test(test_core_loop_request_error),
        cmocka_unit_test(test_core_loop_abort),
        cmocka_unit_test(test_core_loop_refusals),
        cmocka_unit_test(test_core_loop_slow_reader),
        cmocka_unit_test(test_core_loop_drain),
        cmocka_unit_test(test_core_loop_no_worker),
        cmocka_unit_test(test_core_loop_gives_up),
        cmocka_unit_test(test_core_loop_fatal_load),
        cmocka_unit_test(test_core_loop_engine_killed),
    };
    if (getenv("CMOCKA_FILTER") != NULL)
        cmocka_set_test_filter(getenv("CMOCKA_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
