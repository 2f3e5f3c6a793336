/* The state machine of the header. A death is handled in two moves: lose() kills, whatever the
 * reason; bury() closes the link and goes on once the process is reaped (or the connection closed),
 * so that two incarnations never live side by side and the message can tell how it ended.
 *
 * The watches, all on awake time: a step is out and progress stands still
 * (worker_stall_timeout_s); the oldest step is out, or loading stands still, for step_timeout_s;
 * nothing at all is heard, or an idle worker leaves a ping unanswered.
 * One file although long: it is one state machine, and each message handler is a transition of it.
 */
#include "engine/core/worker_life.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <poll.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/file.h"
#include "common/log.h"
#include "common/mem.h"
#include "engine/core/worker_host.h"
#include "engine/core/worker_link.h"

#define MAX_TURN_US       1000000u
#define TICK_MS           500
#define HELD_MS           2         /* how often a full event ring is looked at again */
#define STARTING_US       30000000u /* spawn to hello */
#define SILENCE_EXTRA_US  2000000u  /* beyond the stall timeout, for the heartbeat's own period */
#define CLOSED_US         500000u   /* from the end of the messages to the end of the process */
#define MIN_REFUSED_US    500000u   /* doubled up to 8 s */
#define MAX_DOUBLINGS     4
#define EXIT_WAIT_MS      2000
#define MAX_FRAMES        64 /* in one turn */
#define MAX_CONTROL_BYTES (1u << 16)
#define MAX_LEVELS_OUT    2 /* in its queue, which is for steps */

struct worker_life {
    worker_life_opts opts;
    worker_life_state state;
    worker_host *host;
    worker_link *link;
    worker_facts facts;
    char model_path[CONTROL_PATH_BYTES];
    load_done_msg first_load; /* of the first life; later ones must agree */
    kv_config_msg kv;
    wire_limits limits;
    wire_scratch scratch;

    uint32_t epoch;
    attach_terms terms; /* of this life */
    bool is_challenged;
    bool is_met;        /* said a good hello in this life */
    int32_t n_refusals; /* attempts in a row that met nobody */
    char refusal[1024]; /* why the last one did not */
    bool is_fatal;      /* do not restart */
    bool was_ready;     /* in this life or an earlier one */
    restart_reason reason;
    char reason_text[1024];

    uint64_t last_turn_us; /* monotonic */
    uint64_t awake_us;     /* what the marks below are in */
    uint64_t start_mark;
    uint64_t heard_mark;
    uint64_t progress_mark;
    uint64_t ping_mark;
    uint64_t backoff_mark;
    uint64_t ready_mark;
    uint64_t closed_mark; /* 0 = its messages are open */
    bool ping_is_out;
    bool has_more;   /* frames that the last turn left in the link */
    log_level level; /* ours, as last seen */
    bool level_has_changed;
    bool level_is_due;
    int32_t n_levels_out; /* at most; since its main thread was heard of */
    uint64_t progress;
    uint64_t sent_marks[WORKER_LIFE_MAX_STEPS]; /* oldest first */
    int32_t n_out;
};

/* --- create ----------------------------------------------------------------------------------- */

/* Limits that no frame of this configuration exceeds, before model and pool are known. */
static wire_limits frame_limits(const core_sizes *z)
{
    wire_limits l = {.max_num_seqs = z->max_num_seqs,
                     .max_num_batched_tokens = z->max_num_batched_tokens,
                     .max_encoder_tokens = z->max_encoder_tokens,
                     .max_model_len = z->max_model_len,
                     .vocab_size = 1,     /* not in any size */
                     .n_blocks = 1 << 24, /* more than any pool that this must serve */
                     .n_groups = PGD_MAX_KV_GROUPS,
                     .max_logprobs = z->max_logprobs};
    for (int g = 0; g < PGD_MAX_KV_GROUPS; g++)
        l.block_sizes[g] = z->block_size; /* the smallest one that a group can get */
    PGD_ASSERT(wire_limits_derive(&l, NULL) == PGD_OK);
    return l;
}

/* NNG takes no larger limit for a message. */
static pgd_err check_frames(const core_sizes *z, pgd_why *why)
{
    wire_limits limits = frame_limits(z);
    size_t n_bytes = PGD_MAX(scheduler_output_max_frame_bytes(&limits),
                             step_result_max_frame_bytes(&limits) + MAX_CONTROL_BYTES);
    if (n_bytes <= INT32_MAX)
        return PGD_OK;
    return pgd_fail(why, PGD_EINVAL,
                    "max_num_seqs=%d with max_model_len=%d makes messages to the worker of up to "
                    "%zu MB, more than 2047 MB: lower one of them",
                    z->max_num_seqs, z->max_model_len, n_bytes >> 20);
}

/* Absolute: a worker that we did not start is elsewhere. */
static pgd_err set_model_path(worker_life *w, const char *path, pgd_why *why)
{
    char dir[CONTROL_PATH_BYTES];
    bool fits = true;
    if (path == NULL || path[0] == 0 || path[0] == '/')
        snprintf(w->model_path, sizeof w->model_path, "%s", path != NULL ? path : "");
    else
        fits = getcwd(dir, sizeof dir) != NULL &&
               file_join(w->model_path, sizeof w->model_path, dir, path);
    return fits ? PGD_OK
                : pgd_fail(why, PGD_EINVAL,
                           "model: expected an absolute path of at most %d bytes, "
                           "got a longer one, at %s",
                           CONTROL_PATH_BYTES - 1, path);
}

pgd_err worker_life_create(worker_life **out, const worker_life_opts *opts, pgd_why *why)
{
    worker_life *w = mem_calloc(1, sizeof *w);
    if (w == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    w->opts = *opts;
    w->facts.max_model_len = opts->sizes.max_model_len;
    w->level = log_get_level();
    pgd_err err = check_frames(&opts->sizes, why);
    if (err == PGD_OK)
        err = set_model_path(w, opts->model_path, why);
    if (err == PGD_OK)
        err = opts->cfg->worker[0] != 0
                  ? worker_attach_create(&w->host, opts->cfg, why)
                  : worker_spawn_create(&w->host, opts->cfg, opts->sizes.device, why);
    if (err != PGD_OK) {
        worker_life_destroy(w);
        return err;
    }
    *out = w;
    return PGD_OK;
}

void worker_life_destroy(worker_life *w)
{
    if (w == NULL)
        return;
    worker_link_close(w->link);
    if (w->host != NULL)
        w->host->vtbl->destroy(w->host);
    mem_free(w->scratch.data);
    mem_free(w);
}

/* --- death ------------------------------------------------------------------------------------ */

PGD_PRINTF(3, 4)
static void lose(worker_life *w, restart_reason reason, const char *fmt, ...);

static void lose(worker_life *w, restart_reason reason, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(w->reason_text, sizeof w->reason_text, fmt, args);
    va_end(args);
    w->reason = reason;
    w->n_out = 0;
    w->ping_is_out = false;
    w->closed_mark = 0;
    w->state = WORKER_LIFE_DYING;
    w->host->vtbl->kill(w->host);
}

static void give_up(worker_life *w, const char *why)
{
    w->state = WORKER_LIFE_FAILED;
    w->opts.on_failed(w->opts.arg, why);
}

/* What killed it is told when it was not us; its last words when it has not told the engine. */
static void describe_end(worker_life *w, char *out, size_t cap)
{
    if (w->is_fatal)
        snprintf(out, cap, "%s", w->reason_text);
    else if (w->reason == RESTART_EXIT || w->reason == RESTART_SIGNAL)
        snprintf(out, cap, "worker %s: %s", w->reason_text, w->host->vtbl->get_epitaph(w->host));
    else
        snprintf(out, cap, "worker %s%s", w->reason_text,
                 w->reason == RESTART_ERROR ? "" : w->host->vtbl->get_last_words(w->host));
}

/* Nobody was met, so nothing was lost: try again later. Told once, not at every try. */
static void wait_longer(worker_life *w)
{
    if (strcmp(w->refusal, w->reason_text) != 0)
        log_warn("core", "the worker at %s %s; trying again", w->host->url, w->reason_text);
    snprintf(w->refusal, sizeof w->refusal, "%s", w->reason_text);
    w->backoff_mark = w->awake_us + (MIN_REFUSED_US << PGD_MIN(w->n_refusals, MAX_DOUBLINGS));
    w->n_refusals++;
    w->state = WORKER_LIFE_BACKOFF;
}

/* The life has ended for good. */
static void bury(worker_life *w)
{
    char text[2048];
    char last[1024];
    uint64_t wait_us;
    restart_policy *restarts = &w->facts.restarts;
    worker_link_close(w->link);
    w->link = NULL;
    if (!w->is_met && !w->is_fatal && w->host->may_be_absent) {
        wait_longer(w);
        return;
    }
    if (w->reason == RESTART_EXIT && w->host->vtbl->get_signal(w->host) != 0)
        w->reason = RESTART_SIGNAL;
    describe_end(w, text, sizeof text);
    poison_verdict verdict = w->opts.on_lost(w->opts.arg, text);
    if (w->is_fatal) {
        give_up(w, text);
    } else if (restart_policy_note_death(restarts, &wait_us, w->reason, verdict)) {
        w->backoff_mark = w->awake_us + wait_us;
        w->state = WORKER_LIFE_BACKOFF;
        log_warn("core", "%s; restart %llu in %.1f s", text,
                 (unsigned long long)restart_policy_n_restarts(restarts), (double)wait_us / 1e6);
    } else {
        snprintf(last, sizeof last, "%.1000s", text);
        snprintf(text, sizeof text, "%d restarts without an acknowledged step; the last %s",
                 restarts->n_barren, last);
        give_up(w, text);
    }
}

/* --- start ------------------------------------------------------------------------------------ */

static void start(worker_life *w)
{
    pgd_why why = {0};
    w->epoch++;
    w->state = WORKER_LIFE_STARTING;
    w->start_mark = w->heard_mark = w->progress_mark = w->awake_us;
    w->closed_mark = 0;
    w->facts.load_done_bytes = 0;
    w->facts.load_total_bytes = 0;
    w->is_challenged = false;
    w->is_met = false;
    wire_limits limits = frame_limits(&w->opts.sizes);
    worker_link_opts link = {.worker_epoch = w->epoch,
                             .max_recv_bytes =
                                 step_result_max_frame_bytes(&limits) + MAX_CONTROL_BYTES,
                             .wake_fd = w->opts.wake_fd};
    if (w->host->may_be_absent && w->n_refusals == 0)
        log_info("core", "waiting for the worker at %s", w->host->url);
    pgd_err err = w->host->vtbl->start(w->host, &w->link, &link, &why);
    if (err == PGD_OK) {
        log_debug("core", "worker pid=%lld epoch=%u url=%s", (long long)worker_life_get_pid(w),
                  w->epoch, worker_link_get_url(w->link));
        return;
    }
    /* A program that was there before is being replaced, and comes back. */
    w->is_fatal = err == PGD_ENOENT && !w->was_ready;
    if (w->is_fatal)
        w->facts.fatal_err = PGD_EINVAL; /* worker_path */
    lose(w, RESTART_START, w->is_fatal ? "%s" : "did not start: %s", pgd_why_text(&why, err));
}

/* --- messages --------------------------------------------------------------------------------- */

static pgd_err send_or_lose(worker_life *w, wire_type type, const wire_record *rec, const void *msg)
{
    pgd_err err = worker_link_send(w->link, type, rec, msg);
    if (err == PGD_EAGAIN)
        lose(w, RESTART_STALL, "stopped reading its messages");
    else if (err != PGD_OK)
        lose(w, RESTART_CLOSED, "cannot be sent messages: %s", pgd_err_text(err));
    return err;
}

/* Of the engine's log, for the worker's. */
static void tell_level(worker_life *w)
{
    log_level_msg m = {.level = (uint8_t)w->level};
    if (w->level_is_due && w->n_levels_out < MAX_LEVELS_OUT &&
        worker_link_send(w->link, WIRE_LOG_LEVEL, &control_log_level_record, &m) == PGD_OK) {
        w->level_is_due = false;
        w->n_levels_out++;
    }
}

static pgd_err take_challenge(worker_life *w, const worker_frame *f, pgd_why *why)
{
    challenge_msg m;
    attach_msg attach = {0};
    wire_limits limits = frame_limits(&w->opts.sizes);
    size_t max_frame = PGD_MAX(scheduler_output_max_frame_bytes(&limits), MAX_CONTROL_BYTES);
    PGD_TRY(control_decode_challenge(&m, f->data, f->n_bytes, why));
    w->terms = (attach_terms){.worker_epoch = w->epoch, .max_frame_bytes = (uint32_t)max_frame};
    PGD_TRY(attach_draw_nonce(w->terms.engine_nonce, why));
    memcpy(w->terms.worker_nonce, m.nonce, sizeof m.nonce);
    memcpy(attach.nonce, w->terms.engine_nonce, sizeof attach.nonce);
    attach.max_frame_bytes = w->terms.max_frame_bytes;
    PGD_TRY(attach_prove(attach.proof, &w->host->key, ATTACH_ENGINE, &w->terms));
    w->is_challenged = true;
    (void)!send_or_lose(w, WIRE_ATTACH, &control_attach_record, &attach);
    return PGD_OK;
}

static pgd_err take_hello(worker_life *w, const worker_frame *f, pgd_why *why)
{
    hello_msg m;
    load_msg load = {0};
    const core_sizes *z = &w->opts.sizes;
    const config *cfg = w->opts.cfg;
    PGD_TRY(control_decode_hello(&m, f->data, f->n_bytes, why));
    PGD_TRY(attach_check(m.proof, &w->host->key, ATTACH_WORKER, &w->terms, why));
    w->is_met = true;
    w->n_refusals = 0;
    w->refusal[0] = 0;
    if (m.protocol_version != WIRE_VERSION || strcmp(m.device, z->device) != 0)
        return pgd_fail(why, PGD_EPROTO, "hello: expected protocol %d and device %s, got %u and %s",
                        WIRE_VERSION, z->device, m.protocol_version, m.device);
    w->facts.pid = m.pid;
    snprintf(w->facts.device_name, sizeof w->facts.device_name, "%s", m.device_name);
    w->facts.spawn_us = w->awake_us - w->start_mark;
    snprintf(load.model_path, sizeof load.model_path, "%s", w->model_path);
    load.kv_dtype = (int32_t)z->kv_dtype;
    load.block_size = z->block_size;
    load.max_model_len = z->max_model_len;
    load.max_num_seqs = z->max_num_seqs;
    load.max_num_batched_tokens = z->max_num_batched_tokens;
    load.max_encoder_tokens = z->max_encoder_tokens;
    load.max_logprobs = z->max_logprobs;
    load.n_threads = (int32_t)cfg->threads;
    load.pin_threads = 1;
    load.sim_step_us = (uint32_t)cfg->sim_step_us;
    load.sim_token_us = (uint32_t)cfg->sim_token_us;
    load.sim_vocab_size = (int32_t)cfg->sim_vocab_size;
    load.sim_draft_tokens = (int32_t)cfg->sim_draft_tokens;
    load.sim_draft_accept = (int32_t)cfg->sim_draft_accept;
    snprintf(load.sim_kv_layers, sizeof load.sim_kv_layers, "%s", cfg->sim_kv_layers);
    w->level_is_due = w->level_has_changed;
    w->n_levels_out = 0;
    tell_level(w);
    w->state = WORKER_LIFE_LOADING;
    w->progress_mark = w->awake_us;
    (void)!send_or_lose(w, WIRE_LOAD, &control_load_record, &load);
    return PGD_OK;
}

static pgd_err size_buffers(worker_life *w, pgd_why *why)
{
    const core_sizes *z = &w->opts.sizes;
    w->limits = (wire_limits){.max_num_seqs = z->max_num_seqs,
                              .max_num_batched_tokens = z->max_num_batched_tokens,
                              .max_model_len = z->max_model_len,
                              .vocab_size = w->facts.vocab_size,
                              .n_blocks = w->facts.kv.n_blocks,
                              .max_encoder_tokens = w->facts.kv.groups.max_encoder_tokens,
                              .max_logprobs = z->max_logprobs};
    kv_layout_fill_limits(&w->limits, &w->facts.kv.groups.layout);
    PGD_TRY(wire_limits_derive(&w->limits, why));
    w->scratch.cap_bytes = step_result_scratch_bytes(&w->limits);
    w->scratch.data = mem_alloc(w->scratch.cap_bytes);
    return w->scratch.data != NULL ? PGD_OK
                                   : pgd_fail(why, PGD_ENOMEM, "out of memory for step results");
}

static bool is_same_model(const load_done_msg *a, const load_done_msg *b)
{
    return a->vocab_size == b->vocab_size && a->max_encoder_tokens == b->max_encoder_tokens &&
           a->n_kv_layers == b->n_kv_layers &&
           memcmp(a->kv_layers, b->kv_layers, (size_t)a->n_kv_layers * sizeof a->kv_layers[0]) ==
               0 &&
           memcmp(a->model_fingerprint, b->model_fingerprint, sizeof a->model_fingerprint) == 0;
}

/* The first life decides the pool; a later one must be the same model with the same KV layers. */
static pgd_err take_load_done(worker_life *w, const worker_frame *f, pgd_why *why)
{
    load_done_msg m;
    load_done_msg *first = &w->first_load;
    PGD_TRY(control_decode_load_done(&m, f->data, f->n_bytes, why));
    w->facts.weight_bytes = m.weight_bytes;
    w->facts.load_us = m.load_us;
    snprintf(w->facts.numerics, sizeof w->facts.numerics, "%s", m.numerics);
    if (w->facts.kv.n_blocks == 0) {
        core_sizes *z = &w->opts.sizes;
        *first = m;
        if (w->opts.model_fingerprint != NULL &&
            memcmp(m.model_fingerprint, w->opts.model_fingerprint, sizeof m.model_fingerprint) != 0)
            return pgd_fail(why, PGD_EPROTO, "the worker has another model at %s than this engine",
                            w->model_path);
        w->is_fatal = true; /* a pool that does not fit now will not fit next time */
        PGD_TRY(core_sizes_fit_kv(&w->facts.kv, z, w->opts.cfg, &m, why));
        w->facts.vocab_size = m.vocab_size;
        w->facts.max_model_len = z->max_model_len;
        PGD_TRY(size_buffers(w, why));
        w->is_fatal = false;
        w->kv = (kv_config_msg){.n_blocks = w->facts.kv.n_blocks,
                                .max_model_len = z->max_model_len,
                                .layout = w->facts.kv.groups.layout};
    } else if (!is_same_model(&m, first)) {
        w->is_fatal = true;
        return pgd_fail(why, PGD_EPROTO,
                        "the model changed while paged was running (%s): restart paged",
                        w->opts.model_path != NULL ? w->opts.model_path : "sim");
    }
    memcpy(w->facts.model_fingerprint, m.model_fingerprint, sizeof w->facts.model_fingerprint);
    if (w->opts.on_loaded != NULL) {
        w->is_fatal = true;
        PGD_TRY(w->opts.on_loaded(w->opts.arg, &w->kv, &w->facts, why));
        w->is_fatal = false;
    }
    w->state = WORKER_LIFE_PREPARING;
    w->progress_mark = w->awake_us;
    (void)!send_or_lose(w, WIRE_KV_CONFIG, &control_kv_config_record, &w->kv);
    return PGD_OK;
}

static pgd_err take_kv_ready(worker_life *w, const worker_frame *f, pgd_why *why)
{
    kv_ready_msg m;
    PGD_TRY(control_decode_kv_ready(&m, f->data, f->n_bytes, why));
    w->facts.kv_bytes = m.kv_bytes;
    pgd_err err = w->opts.on_ready(w->opts.arg, &w->facts, why);
    if (err != PGD_OK) {
        w->is_fatal = true;
        return err;
    }
    w->state = WORKER_LIFE_READY;
    w->was_ready = true;
    w->ready_mark = w->awake_us;
    log_info("core", "worker ready pid=%llu device=\"%s\" spawn=%.3fs load=%.3fs ready=%.3fs",
             (unsigned long long)w->facts.pid, w->facts.device_name,
             (double)w->facts.spawn_us / 1e6, (double)w->facts.load_us / 1e6,
             (double)(w->awake_us - w->start_mark) / 1e6);
    return PGD_OK;
}

static pgd_err take_result(worker_life *w, const worker_frame *f, pgd_why *why)
{
    step_result r;
    mem_forbid();
    pgd_err err = step_result_decode(&r, &w->scratch, f->data, f->n_bytes, &w->limits, why);
    mem_permit();
    PGD_TRY(err);
    if (w->n_out == 0)
        return pgd_fail(why, PGD_EPROTO, "expected no result, got one of step %llu",
                        (unsigned long long)r.step_id);
    PGD_TRY(w->opts.on_result(w->opts.arg, &r, why));
    w->n_out--;
    memmove(&w->sent_marks[0], &w->sent_marks[1], (size_t)w->n_out * sizeof w->sent_marks[0]);
    w->progress_mark = w->awake_us;
    restart_policy_note_step(&w->facts.restarts);
    return PGD_OK;
}

static pgd_err take_transfers(worker_life *w, const worker_frame *f, pgd_why *why)
{
    transfers_done_msg m;
    mem_forbid();
    pgd_err err = control_decode_transfers_done(&m, f->data, f->n_bytes, why);
    mem_permit();
    PGD_TRY(err);
    return w->opts.on_transfers(w->opts.arg, 0, m.done, m.n_done, why);
}

static pgd_err take_heartbeat(worker_life *w, const worker_frame *f, pgd_why *why)
{
    heartbeat_msg m;
    if (f->type == WIRE_PONG) {
        PGD_TRY(control_decode_pong(&m, f->data, f->n_bytes, why));
        w->ping_is_out = false;
        if (w->state == WORKER_LIFE_READY)
            restart_policy_note_pong(&w->facts.restarts, w->awake_us - w->ready_mark);
        return PGD_OK;
    }
    PGD_TRY(control_decode_heartbeat(&m, f->data, f->n_bytes, why));
    if (m.progress != w->progress)
        w->progress_mark = w->awake_us;
    w->progress = m.progress;
    return PGD_OK;
}

static pgd_err take_load_progress(worker_life *w, const worker_frame *f, pgd_why *why)
{
    load_progress_msg m;
    PGD_TRY(control_decode_load_progress(&m, f->data, f->n_bytes, why));
    w->facts.load_done_bytes = m.done_bytes;
    w->facts.load_total_bytes = m.total_bytes;
    w->progress_mark = w->awake_us;
    return PGD_OK;
}

static pgd_err take_error(worker_life *w, const worker_frame *f, pgd_why *why)
{
    error_msg m;
    PGD_TRY(control_decode_error(&m, f->data, f->n_bytes, why));
    if (m.is_fatal == 0) {
        log_warn("core", "worker: %s", m.text);
        return PGD_OK;
    }
    /* A model that was served before is sound: what is wrong now may pass. */
    w->is_fatal = m.is_fatal == 2 && !w->was_ready;
    if (w->is_fatal)
        w->facts.fatal_err = (pgd_err)m.err;
    return pgd_fail(why, PGD_EPROTO, "%s", m.text);
}

static pgd_err take_frame(worker_life *w, const worker_frame *f, pgd_why *why)
{
    if (f->type == WIRE_LOAD_DONE || f->type == WIRE_KV_READY || f->type == WIRE_RESULT ||
        f->type == WIRE_PONG)
        w->n_levels_out = 0; /* it reads what it is sent */
    if (f->type == WIRE_ERROR)
        return take_error(w, f, why);
    if (f->type == WIRE_CHALLENGE && w->state == WORKER_LIFE_STARTING && !w->is_challenged)
        return take_challenge(w, f, why);
    if (f->type == WIRE_HELLO && w->state == WORKER_LIFE_STARTING && w->is_challenged)
        return take_hello(w, f, why);
    if ((f->type == WIRE_HEARTBEAT || f->type == WIRE_PONG) && w->state != WORKER_LIFE_STARTING)
        return take_heartbeat(w, f, why);
    if (f->type == WIRE_LOAD_PROGRESS && w->state == WORKER_LIFE_LOADING)
        return take_load_progress(w, f, why);
    if (f->type == WIRE_LOAD_DONE && w->state == WORKER_LIFE_LOADING)
        return take_load_done(w, f, why);
    if (f->type == WIRE_KV_READY && w->state == WORKER_LIFE_PREPARING)
        return take_kv_ready(w, f, why);
    if (f->type == WIRE_RESULT && w->state == WORKER_LIFE_READY)
        return take_result(w, f, why);
    if (f->type == WIRE_TRANSFERS_DONE && w->state == WORKER_LIFE_READY &&
        w->opts.on_transfers != NULL)
        return take_transfers(w, f, why);
    return pgd_fail(why, PGD_EPROTO, "message %s is out of turn", wire_type_name(f->type));
}

static void tell_refusal(worker_life *w, pgd_err err, const char *text)
{
    error_msg m = {.err = (int32_t)err, .is_fatal = 1};
    snprintf(m.text, sizeof m.text, "%s", text);
    (void)!worker_link_send(w->link, WIRE_ERROR, &control_error_record, &m);
}

static void take_or_lose(worker_life *w, const worker_frame *f)
{
    pgd_why why = {0};
    pgd_err err = take_frame(w, f, &why);
    if (w->is_fatal && w->facts.fatal_err == PGD_OK)
        w->facts.fatal_err = err;
    if (err != PGD_OK && f->type != WIRE_ERROR)
        tell_refusal(w, err, pgd_why_text(&why, err));
    if (err != PGD_OK && w->state != WORKER_LIFE_DYING)
        lose(w, f->type == WIRE_ERROR ? RESTART_ERROR : RESTART_PROTOCOL,
             w->is_fatal ? "%s" : "failed: %s", pgd_why_text(&why, err));
}

/* Results that make more events than there is room for are held; everything else is acted on at
 * once. After a loss frames are received all the same, and dropped. */
static void drain_frames(worker_life *w)
{
    worker_frame f;
    w->has_more = false;
    while (w->state == WORKER_LIFE_READY && w->opts.can_take_result(w->opts.arg) &&
           worker_link_take_held(w->link, &f))
        take_or_lose(w, &f);
    for (int i = 0; i < MAX_FRAMES; i++) {
        pgd_why why = {0};
        pgd_err err = worker_link_recv(w->link, &f, &why);
        if (err == PGD_EAGAIN)
            return;
        w->heard_mark = w->awake_us;
        if (w->state == WORKER_LIFE_DYING)
            continue;
        if (err == PGD_EUNSUPPORTED && w->state == WORKER_LIFE_STARTING) {
            w->is_fatal = true;
            w->facts.fatal_err = err;
            tell_refusal(w, err, why.text);
        }
        if (err != PGD_OK)
            lose(w, RESTART_PROTOCOL, w->is_fatal ? "%s" : "failed: %s", pgd_why_text(&why, err));
        else if (f.type != WIRE_RESULT ||
                 (worker_link_n_held(w->link) == 0 && w->opts.can_take_result(w->opts.arg)))
            take_or_lose(w, &f);
        else if (!worker_link_hold(w->link))
            lose(w, RESTART_PROTOCOL, "sent more results than there were steps");
    }
    w->has_more = true;
}

/* --- watches ---------------------------------------------------------------------------------- */

/* Nothing is out: a ping now and then must come back. */
static void watch_idle(worker_life *w, uint64_t stall_us)
{
    uint64_t since_ping_us = w->awake_us - w->ping_mark;
    if (w->ping_is_out && since_ping_us > stall_us) {
        lose(w, RESTART_STALL, "did not answer a ping for %.1f s", (double)since_ping_us / 1e6);
    } else if (!w->ping_is_out && since_ping_us > stall_us / 2 &&
               send_or_lose(w, WIRE_PING, NULL, NULL) == PGD_OK) {
        w->ping_is_out = true;
        w->ping_mark = w->awake_us;
    }
}

static bool is_absent(const worker_life *w)
{
    return w->state == WORKER_LIFE_STARTING && w->host->may_be_absent &&
           !worker_link_is_up(w->link);
}

static void watch(worker_life *w)
{
    uint64_t stall_us = (uint64_t)w->opts.cfg->worker_stall_timeout_s * 1000000;
    uint64_t step_us = (uint64_t)w->opts.cfg->step_timeout_s * 1000000;
    uint64_t now = w->awake_us;
    if (is_absent(w)) {
        w->start_mark = w->heard_mark = now;
        return;
    }
    if (w->state == WORKER_LIFE_STARTING) {
        if (now - w->start_mark > STARTING_US)
            lose(w, RESTART_START, "did not say hello within %u s", STARTING_US / 1000000);
        return;
    }
    /* Steps whose results are held are not the worker's any more. */
    int32_t n_held = PGD_MIN(worker_link_n_held(w->link), w->n_out);
    if (n_held < w->n_out) {
        uint64_t sent = w->sent_marks[n_held];
        uint64_t moved = PGD_MAX(w->progress_mark, sent);
        if (now - moved > stall_us)
            lose(w, RESTART_STALL, "made no progress for %.1f s with a step out",
                 (double)(now - moved) / 1e6);
        else if (now - sent > step_us)
            lose(w, RESTART_STEP_TIMEOUT, "did not finish a step within %.0f s",
                 (double)step_us / 1e6);
    } else if (w->state == WORKER_LIFE_READY) {
        watch_idle(w, stall_us);
    } else if (now - w->progress_mark > step_us) {
        lose(w, RESTART_STALL, "got no further with loading for %.0f s", (double)step_us / 1e6);
    }
    if (w->state != WORKER_LIFE_DYING && now - w->heard_mark > stall_us + SILENCE_EXTRA_US)
        lose(w, RESTART_SILENCE, "was silent for %.1f s", (double)(now - w->heard_mark) / 1e6);
}

/* The messages of a process that dies end a moment before it does: how it ended says more. */
static void watch_closed(worker_life *w)
{
    if (w->closed_mark == 0)
        w->closed_mark = w->awake_us;
    else if (w->awake_us - w->closed_mark >= CLOSED_US)
        lose(w, RESTART_CLOSED, "closed its messages");
}

static bool has_process(const worker_life *w)
{
    return w->state >= WORKER_LIFE_STARTING && w->state <= WORKER_LIFE_READY;
}

/* An operator's own --log-level holds until ours changes. */
static void watch_level(worker_life *w)
{
    log_level level = log_get_level();
    if (level != w->level) {
        w->level = level;
        w->level_has_changed = w->level_is_due = true;
    }
    if (w->state >= WORKER_LIFE_LOADING && w->state <= WORKER_LIFE_READY)
        tell_level(w);
}

void worker_life_turn(worker_life *w)
{
    uint64_t now = clock_now_us();
    if (w->last_turn_us != 0)
        w->awake_us += PGD_MIN(now - w->last_turn_us, MAX_TURN_US);
    w->last_turn_us = now;
    bool is_gone = w->host->vtbl->poll(w->host);
    if (w->link != NULL)
        drain_frames(w);
    if (has_process(w)) {
        if (is_gone)
            lose(w, w->host->gone_reason, "%s",
                 w->is_challenged ? w->host->gone : w->host->gone_early);
        else if (worker_link_is_lost(w->link))
            watch_closed(w);
        else
            watch(w);
        watch_level(w);
    }
    if (w->state == WORKER_LIFE_DYING && w->host->vtbl->poll(w->host))
        bury(w);
    if (w->state == WORKER_LIFE_NONE ||
        (w->state == WORKER_LIFE_BACKOFF && w->awake_us >= w->backoff_mark))
        start(w);
}

bool worker_life_send_step(worker_life *w, const scheduler_output *out)
{
    PGD_ASSERTF(w->state == WORKER_LIFE_READY && w->n_out < WORKER_LIFE_MAX_STEPS,
                "worker: %d steps out in state %d", w->n_out, (int)w->state);
    if (send_or_lose(w, WIRE_STEP, &scheduler_output_record, out) != PGD_OK)
        return false;
    if (w->n_out == 0)
        w->progress_mark = w->awake_us;
    w->ping_is_out = false;
    w->ping_mark = w->awake_us;
    w->sent_marks[w->n_out++] = w->awake_us;
    return true;
}

/* --- the rest --------------------------------------------------------------------------------- */

int worker_life_get_fds(const worker_life *w, int fds[WORKER_LIFE_MAX_FDS])
{
    static_assert(WORKER_LIFE_MAX_FDS >= WORKER_HOST_MAX_FDS, "room for its descriptors");
    return w->host->vtbl->get_fds(w->host, fds);
}

int worker_life_timeout_ms(const worker_life *w)
{
    if (w->link != NULL && worker_link_n_held(w->link) > 0)
        return HELD_MS;
    if (w->link != NULL && w->has_more)
        return 0;
    if (w->state == WORKER_LIFE_DYING || w->closed_mark != 0)
        return 10; /* reaped soon; covers systems without pidfds */
    if (w->state == WORKER_LIFE_BACKOFF)
        return (int)PGD_MIN((w->backoff_mark - PGD_MIN(w->awake_us, w->backoff_mark)) / 1000 + 1,
                            TICK_MS);
    return TICK_MS;
}

worker_life_state worker_life_get_state(const worker_life *w)
{
    return w->state;
}

const worker_facts *worker_life_get_facts(const worker_life *w)
{
    return &w->facts;
}

bool worker_life_is_waiting(const worker_life *w)
{
    return w->host->may_be_absent && !w->is_met && w->state <= WORKER_LIFE_BACKOFF;
}

void worker_life_describe_wait(const worker_life *w, char *out, size_t cap)
{
    out[0] = 0;
    if (worker_life_is_waiting(w))
        snprintf(out, cap, "waiting for the worker at %s%s%s", w->host->url,
                 w->refusal[0] != 0 ? "; at the last try it " : "", w->refusal);
    else if (w->state == WORKER_LIFE_DYING)
        snprintf(out, cap, "%s", w->reason_text);
}

int64_t worker_life_get_pid(const worker_life *w)
{
    return w->host->vtbl->get_pid(w->host);
}

void worker_life_stop(worker_life *w)
{
    const worker_host_vtbl *host = w->host->vtbl;
    bool asked = has_process(w) && w->state != WORKER_LIFE_STARTING &&
                 worker_link_send(w->link, WIRE_SHUTDOWN, NULL, NULL) == PGD_OK;
    uint64_t end_us = clock_now_us() + (asked ? EXIT_WAIT_MS * 1000u : 0);
    while (!host->poll(w->host)) {
        int fds[WORKER_HOST_MAX_FDS];
        struct pollfd p[WORKER_HOST_MAX_FDS];
        int n = host->get_fds(w->host, fds);
        for (int i = 0; i < n; i++)
            p[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
        if (clock_now_us() >= end_us)
            host->kill(w->host);
        (void)poll(p, (nfds_t)n, 20);
    }
    /* Dead by now, so that nothing more comes into the socket. */
    worker_link_close(w->link);
    w->link = NULL;
    w->state = WORKER_LIFE_NONE;
}
