/* The core thread: one poll(), one turn.
 *
 *   commands → worker (frames, deaths, restarts) → schedule and send, up to DEPTH steps out
 *   → state, stats, events → poll
 *
 * Hand-off to io: a ring of commands in, a ring of events out. Every request that was accepted
 * keeps one place of the event ring for its FINISHED event (STATE_RESERVE covers the state events,
 * and the answer of a cache reset, of which one is under way at a time), so the core thread can
 * always end a request and never waits for io. Only tokens wait: results are held back until there
 * is room (can_take_result).
 *
 * Requests wait in `pending` until the KV pool is known and the scheduler exists; from then on the
 * scheduler holds them, over restarts too. `live` knows them all, for drain and for giving up.
 *
 * One file although long: both sides work on one struct, and who may touch which field is the point
 * of it.
 */
#include "engine/core/core_loop.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/hash_map.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/ring.h"
#include "common/thread.h"
#include "engine/core/core_events.h"
#include "engine/core/core_offload.h"
#include "engine/core/core_scheduler.h"
#include "engine/core/poison.h"
#include "engine/core/stats.h"
#include "engine/core/step_notes.h"
#include "engine/core/worker_life.h"

#define DEPTH           CORE_STEPS_IN_FLIGHT
#define STATE_RESERVE   4
#define RESET_RESERVE   1
#define BLOCKED_MS      2 /* how often a full event ring is looked at again */
#define COMMAND_WAIT_US 50
#define LAST_STORES_US  2000000

static const double step_bounds[] = {1,   8,    16,   32,   64,   128,  256,
                                     512, 1024, 2048, 4096, 8192, 16384};

typedef enum command_kind {
    COMMAND_SUBMIT,
    COMMAND_ABORT,
    COMMAND_RESET_CACHE,
    COMMAND_DRAIN
} command_kind;

typedef struct command {
    command_kind kind;
    request *r;            /* SUBMIT: owned */
    uint64_t request_id;   /* ABORT */
    request_status status; /* ABORT: how it counts */
    uint32_t drain_s;      /* DRAIN */
    bool with_tiers;       /* RESET_CACHE */
} command;

struct core_loop {
    core_loop_opts opts;
    core_sizes sizes;
    ring *commands;
    ring *events;
    stats_cell *stats;
    kv_residency *residency;   /* NULL unless kv_cache_metrics */
    core_events *cache_events; /* NULL unless kv_events_url */
    int wake_fd;
    pthread_t thread;

    /* io thread only */
    int32_t n_open; /* accepted, FINISHED not yet polled */
    bool is_started;
    bool is_draining_io;
    bool is_resetting; /* CACHE_RESET not yet polled */

    atomic_bool is_failed;  /* written by core */
    atomic_bool is_stopped; /* written by core, last of all */

    /* core thread only, from start to stop */
    worker_life *life;
    scheduler *sched;      /* NULL until the pool is known */
    core_offload *offload; /* NULL without tiers */
    poison *poison;
    hash_map *live; /* every request that has not finished */
    uint64_t *live_ids;
    request **pending; /* [max_held], a queue */
    int32_t n_pending;
    step_notes *notes;
    core_state state; /* as last told */
    core_state wanted_state;
    core_refusal refusal; /* of the request that is being finished */
    bool has_new_events;
    bool was_lost;
    bool is_draining;
    bool is_done;
    uint64_t drain_end_us;
    uint64_t idle_since_us; /* while draining: no request is left; 0 = some are */
    uint64_t next_beat_us;
    uint64_t n_steps;
    histogram step_tokens;
    char why[512];
    char fail_text[512];
};

/* --- events ----------------------------------------------------------------------------------- */

static size_t n_free_events(const core_loop *c)
{
    return ring_capacity(c->events) - ring_n_used(c->events);
}

static void push_event(core_loop *c, core_event *e)
{
    e->time_us = clock_now_us();
    bool ok = ring_push(c->events, e);
    PGD_ASSERTF(ok, "core: the event ring of %zu is full", ring_capacity(c->events));
    c->has_new_events = true;
}

static void push_finished(core_loop *c, const request *r, request_status status,
                          request_error error, core_refusal refusal)
{
    core_event e = {.kind = CORE_EVENT_FINISHED,
                    .request_id = r->id,
                    .status = status,
                    .error = error,
                    .refusal = refusal,
                    .stop_token = r->stop_token,
                    .num_cached_tokens = PGD_MAX(r->num_cached_tokens, 0),
                    .num_host_tokens = r->num_host_tokens,
                    .num_disk_tokens = r->num_disk_tokens,
                    .num_preemptions = r->num_preemptions,
                    .scheduled_us = r->scheduled_us};
    push_event(c, &e);
    (void)!hash_map_remove(c->live, r->id);
}

static void on_token(void *arg, request *r, token_id token, const token_logprob *logprobs,
                     int32_t n_logprobs)
{
    core_loop *c = arg;
    core_event e = {.kind = CORE_EVENT_TOKEN,
                    .request_id = r->id,
                    .token = token,
                    .n_logprobs = n_logprobs,
                    .prompt_logprobs = request_take_prompt_logprobs(r),
                    .stop_token = -1,
                    .num_cached_tokens = PGD_MAX(r->num_cached_tokens, 0),
                    .num_host_tokens = r->num_host_tokens,
                    .num_disk_tokens = r->num_disk_tokens,
                    .num_preemptions = r->num_preemptions,
                    .scheduled_us = r->scheduled_us};
    PGD_ASSERT(n_logprobs <= (int32_t)PGD_ARRAY_LEN(e.logprobs));
    if (n_logprobs > 0)
        memcpy(e.logprobs, logprobs, (size_t)n_logprobs * sizeof *logprobs);
    push_event(c, &e);
}

static void on_finished(void *arg, request *r, request_error error)
{
    core_loop *c = arg;
    push_finished(c, r, r->status, error, c->refusal);
    poison_forget(c->poison, r->id);
}

static void on_release(void *arg, request *r)
{
    (void)arg;
    request_destroy(r);
}

static void publish(core_loop *c)
{
    const worker_facts *f = worker_life_get_facts(c->life);
    core_stats s;
    memset(&s, 0, sizeof s);
    s.state = c->state;
    if (c->sched != NULL)
        scheduler_get_stats(c->sched, &s.scheduler);
    s.scheduler.n_waiting += c->n_pending;
    s.n_steps = c->n_steps;
    s.step_tokens = c->step_tokens;
    s.last_progress_us = clock_now_us();
    s.load_done_bytes = f->load_done_bytes;
    s.load_total_bytes = f->load_total_bytes;
    s.n_worker_restarts = restart_policy_n_restarts(&f->restarts);
    memcpy(s.n_restarts_by_reason, f->restarts.n_restarts, sizeof s.n_restarts_by_reason);
    s.worker_pid = (uint64_t)worker_life_get_pid(c->life);
    if (s.worker_pid == 0 && worker_life_get_state(c->life) == WORKER_LIFE_READY)
        s.worker_pid = f->pid; /* an attached one, as it says itself */
    s.n_kv_blocks = f->kv.n_blocks > 0 ? f->kv.n_blocks - 1 : 0;
    s.max_model_len = f->max_model_len;
    s.max_pool_len = f->kv.max_len;
    s.n_full_length = f->kv.n_full_length;
    s.n_kv_groups = f->kv.groups.layout.n_groups;
    for (int32_t g = 0; g < s.n_kv_groups; g++)
        s.kv_groups[g] =
            (core_kv_group){f->kv.groups.layout.groups[g], f->kv.groups.n_layers_of[g]};
    core_offload_get_stats(&s.offload, c->offload);
    s.n_queued_commands = (int32_t)ring_n_used(c->commands);
    s.kv_bytes = f->kv_bytes;
    core_events_get_stats(c->cache_events, &s.kv_events);
    s.load_us = f->load_us;
    s.spawn_us = f->spawn_us;
    s.fail_err = f->fatal_err;
    snprintf(s.device, sizeof s.device, "%s", c->sizes.device);
    snprintf(s.device_name, sizeof s.device_name, "%s", f->device_name);
    if (c->state == CORE_RECOVERING || c->state == CORE_STARTING)
        worker_life_describe_wait(c->life, s.why, sizeof s.why);
    /* After a failure it stays: who hears of that may look only when all has stopped. */
    if (s.why[0] == 0 && (c->state == CORE_RECOVERING || atomic_load(&c->is_failed)))
        snprintf(s.why, sizeof s.why, "%s", c->why);
    stats_publish(c->stats, &s);
}

/* The state is told when there is room beyond what finished requests need; otherwise at a later
 * turn. */
static void tell_state(core_loop *c)
{
    if (c->state == c->wanted_state ||
        n_free_events(c) <= (size_t)c->sizes.max_held + RESET_RESERVE + STATE_RESERVE / 2)
        return;
    c->state = c->wanted_state;
    publish(c); /* whoever hears of the state finds it, and its reason, in the stats */
    core_event e = {.kind = CORE_EVENT_STATE, .state = c->state};
    push_event(c, &e);
    log_info("core", "state=%s", core_state_name(c->state));
}

static core_state derive_state(const core_loop *c)
{
    worker_life_state life = worker_life_get_state(c->life);
    if (life == WORKER_LIFE_FAILED)
        return CORE_FAILED;
    if (c->is_draining)
        return CORE_DRAINING;
    if (life == WORKER_LIFE_READY)
        return CORE_READY;
    if (c->was_lost || (life == WORKER_LIFE_DYING && !worker_life_is_waiting(c->life)))
        return CORE_RECOVERING;
    return life == WORKER_LIFE_LOADING || life == WORKER_LIFE_PREPARING ? CORE_LOADING
                                                                        : CORE_STARTING;
}

/* --- requests --------------------------------------------------------------------------------- */

static void refuse(core_loop *c, request *r, core_refusal refusal)
{
    push_finished(c, r, REQUEST_FINISHED_ERROR, REQUEST_ERROR_NONE, refusal);
    request_destroy(r);
}

static void hand_over(core_loop *c, request *r)
{
    /* The limit may have been lowered to the pool after the request was made. */
    r->max_total_tokens =
        PGD_MIN(r->max_total_tokens, PGD_MAX(c->sizes.max_model_len, r->n_prompt_tokens + 1));
    switch (scheduler_add_request(c->sched, r)) {
    case SCHEDULER_ADDED:
        break;
    case SCHEDULER_QUEUE_FULL:
        refuse(c, r, CORE_REFUSAL_QUEUE_FULL);
        break;
    case SCHEDULER_NEVER_FITS:
        refuse(c, r, CORE_REFUSAL_NEVER_FITS);
        break;
    }
}

static void take_submit(core_loop *c, request *r)
{
    bool ok = hash_map_put(c->live, r->id, (uintptr_t)r);
    PGD_ASSERTF(ok, "core: more than %d live requests", c->sizes.max_held);
    if (worker_life_get_state(c->life) == WORKER_LIFE_FAILED)
        refuse(c, r, CORE_REFUSAL_WORKER);
    else if (c->sched == NULL)
        c->pending[c->n_pending++] = r;
    else
        hand_over(c, r);
}

/* Ends a live request wherever it is. */
static void finish_live(core_loop *c, uint64_t id, request_status status, core_refusal refusal)
{
    for (int32_t i = 0; i < c->n_pending; i++) {
        request *r = c->pending[i];
        if (r->id != id)
            continue;
        memmove(&c->pending[i], &c->pending[i + 1],
                (size_t)(c->n_pending - i - 1) * sizeof(c->pending[0]));
        c->n_pending--;
        push_finished(c, r, status, REQUEST_ERROR_NONE, refusal);
        request_destroy(r);
        return;
    }
    if (c->sched == NULL)
        return;
    c->refusal = refusal;
    (void)scheduler_finish_request(c->sched, id, status);
    c->refusal = CORE_REFUSAL_NONE;
}

static void finish_all(core_loop *c, request_status status, core_refusal refusal)
{
    size_t pos = 0;
    size_t n = 0;
    while (hash_map_next(c->live, &pos, &c->live_ids[n], NULL))
        n++;
    for (size_t i = 0; i < n; i++)
        finish_live(c, c->live_ids[i], status, refusal);
}

static request *find_request(void *arg, uint64_t id)
{
    core_loop *c = arg;
    return scheduler_find(c->sched, id);
}

/* --- the worker's life ------------------------------------------------------------------------ */

static pgd_err make_scheduler(core_loop *c, const worker_facts *facts, pgd_why *why)
{
    scheduler_opts base = {.hash_seed = c->opts.hash_seed,
                           .kv_events = core_events_get_ring(c->cache_events),
                           .kv_residency = c->residency,
                           .connector = core_offload_get_connector(c->offload),
                           .on_token = on_token,
                           .on_finished = on_finished,
                           .on_release = on_release,
                           .arg = c};
    return core_scheduler_create(&c->sched, &base, c->opts.cfg, &c->sizes, &facts->kv, why);
}

static pgd_err on_loaded(void *arg, kv_config_msg *kv, const worker_facts *facts, pgd_why *why)
{
    core_loop *c = arg;
    return core_offload_begin_life(c->offload, kv, facts, why);
}

static pgd_err on_ready(void *arg, const worker_facts *facts, pgd_why *why)
{
    core_loop *c = arg;
    if (c->sched != NULL)
        return PGD_OK;
    c->sizes.max_model_len = facts->max_model_len;
    PGD_TRY(make_scheduler(c, facts, why));
    core_events_start(c->cache_events);
    for (int32_t i = 0; i < c->n_pending; i++)
        hand_over(c, c->pending[i]);
    c->n_pending = 0;
    return PGD_OK;
}

static bool can_take_result(void *arg)
{
    core_loop *c = arg;
    return n_free_events(c) >= (size_t)c->sizes.max_held + STATE_RESERVE + RESET_RESERVE +
                                   (size_t)c->sizes.max_num_seqs * (PGD_MAX_DRAFT_TOKENS + 1);
}

static pgd_err on_result(void *arg, const step_result *result, pgd_why *why)
{
    core_loop *c = arg;
    pgd_err err = scheduler_update(c->sched, result);
    if (err != PGD_OK)
        return pgd_fail(why, err, "result of step %llu does not fit the oldest step out",
                        (unsigned long long)result->step_id);
    c->n_steps++;
    const step_note *done = step_notes_take(c->notes);
    int32_t n_only;
    histogram_add(&c->step_tokens, done->n_tokens);
    if (poison_get_only(c->poison, &n_only) != NULL)
        for (int32_t i = 0; i < done->n_requests; i++)
            poison_note_progress(c->poison, done->ids[i],
                                 done->n_computed[i] + done->n_scheduled[i]);
    return PGD_OK;
}

static pgd_err on_transfers(void *arg, int32_t rank, const kv_transfer_done *done, int32_t n_done,
                            pgd_why *why)
{
    core_loop *c = arg;
    pgd_err err = scheduler_transfers_done(c->sched, rank, done, n_done);
    return err == PGD_OK ? PGD_OK
                         : pgd_fail(why, err, "it tells of transfers that nobody asked for");
}

static poison_verdict on_lost(void *arg, const char *why)
{
    core_loop *c = arg;
    uint64_t culprit;
    c->was_lost = true;
    snprintf(c->why, sizeof c->why, "%s", why);
    if (c->sched == NULL)
        return POISON_UNKNOWN;
    const poison_suspect *suspects;
    int32_t n_suspects = step_notes_gather(c->notes, &suspects);
    step_notes_reset(c->notes);
    scheduler_reset_worker(c->sched);
    poison_verdict verdict = poison_note_death(c->poison, suspects, n_suspects, &culprit);
    if (verdict == POISON_FOUND) {
        log_error("core", "request %llu ended %d workers without getting further: it is failed",
                  (unsigned long long)culprit, find_request(c, culprit)->n_strikes);
        finish_live(c, culprit, REQUEST_FINISHED_ERROR, CORE_REFUSAL_POISON);
    }
    return verdict;
}

static void on_failed(void *arg, const char *why)
{
    core_loop *c = arg;
    snprintf(c->why, sizeof c->why, "%s", why);
    atomic_store(&c->is_failed, true);
    finish_all(c, REQUEST_FINISHED_ERROR, CORE_REFUSAL_WORKER);
}

/* --- steps ------------------------------------------------------------------------------------ */

static void dispatch(core_loop *c)
{
    while (c->sched != NULL && worker_life_get_state(c->life) == WORKER_LIFE_READY &&
           step_notes_n_steps(c->notes) < DEPTH && scheduler_has_work(c->sched)) {
        scheduler_output out;
        int32_t n_only;
        const uint64_t *only = poison_get_only(c->poison, &n_only);
        if (!scheduler_schedule(c->sched, &out, only, n_only))
            return;
        log_debug("core", "step=%llu new=%d cached=%d tokens=%d finished=%d preempted=%d",
                  (unsigned long long)out.step_id, out.n_new, out.n_cached,
                  out.total_scheduled_tokens, out.n_finished, out.n_preempted);
        step_notes_add(c->notes, &out);
        if (!worker_life_send_step(c->life, &out))
            return;
    }
}

/* --- turn ------------------------------------------------------------------------------------- */

static void reset_cache(core_loop *c, bool with_tiers)
{
    core_event e = {.kind = CORE_EVENT_CACHE_RESET, .reset = CORE_RESET_DONE};
    if (c->sched != NULL && !scheduler_reset_prefix_cache(c->sched))
        e.reset = CORE_RESET_HELD;
    else if (c->sched != NULL && with_tiers && !core_offload_reset(c->offload))
        e.reset = CORE_RESET_MOVING;
    push_event(c, &e);
}

static void take_commands(core_loop *c)
{
    command cmd;
    while (ring_pop(c->commands, &cmd)) {
        switch (cmd.kind) {
        case COMMAND_SUBMIT:
            take_submit(c, cmd.r);
            break;
        case COMMAND_ABORT:
            finish_live(c, cmd.request_id, cmd.status, CORE_REFUSAL_NONE);
            break;
        case COMMAND_RESET_CACHE:
            reset_cache(c, cmd.with_tiers);
            break;
        case COMMAND_DRAIN: {
            uint64_t end_us = clock_now_us() + (uint64_t)cmd.drain_s * 1000000;
            c->drain_end_us = c->is_draining ? PGD_MIN(c->drain_end_us, end_us) : end_us;
            c->is_draining = true;
            break;
        }
        }
    }
}

/* What requests left behind may still go to the tiers, for a moment. */
static bool is_storing(core_loop *c)
{
    uint64_t now = clock_now_us();
    if (c->idle_since_us == 0)
        c->idle_since_us = now;
    return worker_life_get_state(c->life) == WORKER_LIFE_READY && now < c->drain_end_us &&
           now - c->idle_since_us < LAST_STORES_US && !core_offload_is_quiet(c->offload);
}

static void check_drain(core_loop *c)
{
    if (!c->is_draining)
        return;
    if (hash_map_n_entries(c->live) > 0 && clock_now_us() >= c->drain_end_us)
        finish_all(c, REQUEST_FINISHED_ABORTED, CORE_REFUSAL_NONE);
    c->is_done = hash_map_n_entries(c->live) == 0 && !is_storing(c);
}

static void wake_io(core_loop *c)
{
    if (!c->has_new_events)
        return;
    c->has_new_events = false;
    c->opts.wake(c->opts.wake_arg);
}

static void beat(core_loop *c)
{
    uint64_t now = clock_now_us();
    if (c->opts.beat == NULL || now < c->next_beat_us)
        return;
    c->next_beat_us = now + c->opts.beat_us;
    c->opts.beat();
}

static int beat_timeout_ms(const core_loop *c)
{
    uint64_t now = clock_now_us();
    return now < c->next_beat_us ? (int)PGD_MIN((c->next_beat_us - now) / 1000 + 1, 60000) : 0;
}

static void wait(core_loop *c)
{
    struct pollfd p[1 + WORKER_LIFE_MAX_FDS] = {{.fd = c->wake_fd, .events = POLLIN}};
    int fds[WORKER_LIFE_MAX_FDS];
    int timeout_ms = worker_life_timeout_ms(c->life);
    int n = worker_life_get_fds(c->life, fds);
    if (c->state != c->wanted_state)
        timeout_ms = PGD_MIN(timeout_ms, BLOCKED_MS);
    if (c->opts.beat != NULL)
        timeout_ms = PGD_MIN(timeout_ms, beat_timeout_ms(c));
    for (int i = 0; i < n; i++)
        p[1 + i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
    if (c->is_draining) {
        uint64_t now = clock_now_us();
        uint64_t left_ms = now < c->drain_end_us ? (c->drain_end_us - now) / 1000 + 1 : 0;
        timeout_ms = (int)PGD_MIN((uint64_t)timeout_ms, left_ms);
    }
    if (poll(p, (nfds_t)(1 + n), timeout_ms) < 0 && errno != EINTR)
        PGD_PANIC("core: poll failed: %s", strerror(errno));
    uint64_t count;
    if (p[0].revents != 0 && read(c->wake_fd, &count, sizeof count) < 0)
        PGD_ASSERTF(errno == EAGAIN, "core: eventfd: %s", strerror(errno));
}

static void turn(core_loop *c)
{
    take_commands(c);
    worker_life_turn(c->life);
    check_drain(c);
    dispatch(c);
    core_offload_turn(c->offload);
    core_events_turn(c->cache_events, c->sched);
    c->wanted_state = derive_state(c);
    tell_state(c);
    publish(c);
    wake_io(c);
    beat(c);
}

static void run(void *arg)
{
    core_loop *c = arg;
    thread_set_role(THREAD_CORE);
    for (turn(c); !c->is_done; turn(c))
        wait(c);
    worker_life_stop(c->life);
    if (c->sched != NULL)
        scheduler_reset_worker(c->sched); /* what was in flight is released */
    c->state = CORE_STOPPED;
    publish(c);
    core_event e = {.kind = CORE_EVENT_STATE, .state = CORE_STOPPED};
    push_event(c, &e);
    atomic_store(&c->is_stopped, true);
    wake_io(c);
}

/* --- io side ---------------------------------------------------------------------------------- */

static pgd_err make_arrays(core_loop *c)
{
    size_t n_held = (size_t)c->sizes.max_held;
    size_t n_seqs = (size_t)c->sizes.max_num_seqs;
    size_t n_events =
        n_held + STATE_RESERVE + RESET_RESERVE + n_seqs * (PGD_MAX_DRAFT_TOKENS + 1) * 2;
    PGD_TRY(ring_create(&c->commands, sizeof(command), 2 * n_held + 64));
    PGD_TRY(ring_create(&c->events, sizeof(core_event), n_events));
    PGD_TRY(stats_cell_create(&c->stats, sizeof(core_stats)));
    if (c->opts.cfg->kv_cache_metrics)
        PGD_TRY(
            kv_residency_create(&c->residency, c->opts.cfg->kv_cache_metrics_sample, clock_now_us));
    PGD_TRY(hash_map_create(&c->live, n_held));
    PGD_TRY(poison_create(&c->poison, (int32_t)(DEPTH * n_seqs), find_request, c));
    PGD_TRY(step_notes_create(&c->notes, DEPTH, c->sizes.max_num_seqs));
    c->live_ids = mem_calloc(n_held + 1, sizeof *c->live_ids);
    c->pending = mem_calloc(n_held, sizeof *c->pending);
    return c->live_ids != NULL && c->pending != NULL ? PGD_OK : PGD_ENOMEM;
}

static pgd_err make_parts(core_loop *c, pgd_why *why)
{
    PGD_TRY(core_sizes_init(&c->sizes, c->opts.cfg, c->opts.model, why));
    if (make_arrays(c) != PGD_OK)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for max_num_seqs=%d max_queued_requests=%d",
                        c->sizes.max_num_seqs, c->sizes.max_held);
    c->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (c->wake_fd < 0)
        return pgd_fail(why, PGD_EIO, "no eventfd: %s", strerror(errno));
    PGD_TRY(core_events_open(&c->cache_events, c->opts.cfg, c->wake_fd, why));
    core_offload_opts offload = {.cfg = c->opts.cfg,
                                 .sizes = &c->sizes,
                                 .model_path = c->opts.model_path,
                                 .hash_seed = c->opts.hash_seed,
                                 .events = core_events_get_ring(c->cache_events),
                                 .beat = c->opts.beat,
                                 .wake_fd = c->wake_fd};
    PGD_TRY(core_offload_create(&c->offload, &offload, why));
    worker_life_opts life = {.cfg = c->opts.cfg,
                             .model_path = c->opts.model_path,
                             .model_fingerprint = c->opts.model_fingerprint,
                             .sizes = c->sizes,
                             .wake_fd = c->wake_fd,
                             .on_loaded = c->offload != NULL ? on_loaded : NULL,
                             .on_transfers = c->offload != NULL ? on_transfers : NULL,
                             .on_ready = on_ready,
                             .can_take_result = can_take_result,
                             .on_result = on_result,
                             .on_lost = on_lost,
                             .on_failed = on_failed,
                             .arg = c};
    PGD_TRY(worker_life_create(&c->life, &life, why));
    publish(c); /* so that max_model_len is known from the start */
    return PGD_OK;
}

pgd_err core_loop_create(core_loop **out, const core_loop_opts *opts, pgd_why *why)
{
    core_loop *c = mem_calloc(1, sizeof *c);
    if (c == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    c->opts = *opts;
    c->wake_fd = -1;
    histogram_init(&c->step_tokens, step_bounds, PGD_ARRAY_LEN(step_bounds));
    pgd_err err = make_parts(c, why);
    if (err != PGD_OK) {
        core_loop_destroy(c);
        return err;
    }
    *out = c;
    return PGD_OK;
}

pgd_err core_loop_start(core_loop *c, pgd_why *why)
{
    PGD_ASSERT(!c->is_started);
    pgd_err err = thread_start(&c->thread, "core", run, c);
    if (err != PGD_OK)
        return pgd_fail(why, err, "cannot start the core thread: %s", pgd_err_text(err));
    c->is_started = true;
    return PGD_OK;
}

static void wake_core(core_loop *c)
{
    uint64_t one = 1;
    ssize_t n = write(c->wake_fd, &one, sizeof one);
    (void)n; /* full means that a wake-up is pending */
}

/* The core thread takes commands without ever waiting for io, so a full ring empties within a turn.
 */
static void push_command(core_loop *c, const command *cmd)
{
    while (!ring_push(c->commands, cmd)) {
        wake_core(c);
        usleep(COMMAND_WAIT_US);
    }
    wake_core(c);
}

void core_loop_drain(core_loop *c, uint32_t drain_s)
{
    command cmd = {.kind = COMMAND_DRAIN, .drain_s = drain_s};
    c->is_draining_io = true;
    if (c->is_started)
        push_command(c, &cmd);
}

void core_loop_stop(core_loop *c, uint32_t drain_s)
{
    if (!c->is_started)
        return;
    core_loop_drain(c, drain_s);
    thread_join(c->thread);
    c->is_started = false;
}

void core_loop_destroy(core_loop *c)
{
    if (c == NULL)
        return;
    PGD_ASSERT(!c->is_started);
    command cmd;
    while (c->commands != NULL && ring_pop(c->commands, &cmd))
        if (cmd.kind == COMMAND_SUBMIT)
            request_destroy(cmd.r);
    core_event event;
    while (c->events != NULL && ring_pop(c->events, &event))
        mem_free(event.prompt_logprobs);
    scheduler_destroy(c->sched);
    core_offload_destroy(c->offload);
    core_events_close(c->cache_events);
    poison_destroy(c->poison);
    step_notes_destroy(c->notes);
    worker_life_destroy(c->life);
    ring_destroy(c->commands);
    ring_destroy(c->events);
    stats_cell_destroy(c->stats);
    kv_residency_destroy(c->residency);
    hash_map_destroy(c->live);
    mem_free(c->live_ids);
    mem_free(c->pending);
    if (c->wake_fd >= 0)
        close(c->wake_fd);
    mem_free(c);
}

core_refusal core_loop_submit(core_loop *c, request *r)
{
    command cmd = {.kind = COMMAND_SUBMIT, .r = r};
    if (c->is_draining_io)
        return CORE_REFUSAL_DRAINING;
    if (atomic_load(&c->is_failed))
        return CORE_REFUSAL_WORKER;
    if (c->n_open >= c->sizes.max_held || !ring_push(c->commands, &cmd))
        return CORE_REFUSAL_QUEUE_FULL;
    c->n_open++;
    wake_core(c);
    return CORE_REFUSAL_NONE;
}

static void end_request(core_loop *c, uint64_t request_id, request_status status)
{
    command cmd = {.kind = COMMAND_ABORT, .request_id = request_id, .status = status};
    if (c->is_started)
        push_command(c, &cmd);
}

void core_loop_abort(core_loop *c, uint64_t request_id)
{
    end_request(c, request_id, REQUEST_FINISHED_ABORTED);
}

void core_loop_end_at_stop(core_loop *c, uint64_t request_id)
{
    end_request(c, request_id, REQUEST_FINISHED_STOPPED);
}

bool core_loop_poll(core_loop *c, core_event *out)
{
    if (!ring_pop(c->events, out))
        return false;
    if (out->kind == CORE_EVENT_FINISHED)
        c->n_open--;
    if (out->kind == CORE_EVENT_CACHE_RESET)
        c->is_resetting = false;
    return true;
}

void core_loop_get_stats(const core_loop *c, core_stats *out)
{
    stats_read(c->stats, out);
}

const kv_residency *core_loop_get_residency(const core_loop *c)
{
    return c->residency;
}

bool core_loop_reset_prefix_cache(core_loop *c, bool with_tiers)
{
    command cmd = {.kind = COMMAND_RESET_CACHE, .with_tiers = with_tiers};
    if (!c->is_started || c->is_resetting)
        return false;
    c->is_resetting = true;
    push_command(c, &cmd);
    return true;
}
