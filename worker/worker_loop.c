/* A strict sequence: each phase accepts only the message that belongs to it (and ping, shutdown and
 * log_level at any time).
 *
 * A failure in load or in the KV configuration that has to do with the model or the numbers cannot
 * be helped by another start (is_fatal 2); a device that fails, and anything while stepping, may be
 * (is_fatal 1).
 */
#include "worker/worker_loop.h"

#include <stdio.h>
#include <string.h>

#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"

#define PROGRESS_PERIOD_US 50000

typedef struct worker_state {
    const worker_loop_opts *opts;
    uint64_t progress_sent_us;
    bool is_told; /* the failure that ends the loop: the engine logs it */
    load_msg load;
    load_done_msg done;
    kv_config_msg kv;
    wire_limits limits;
    wire_scratch scratch;
} worker_state;

static pgd_err send_msg(worker_state *s, wire_type type, const wire_record *rec, const void *msg)
{
    return engine_link_send(s->opts->link, type, rec, msg, true);
}

static pgd_err tell_error(worker_state *s, pgd_err err, uint8_t is_fatal, const pgd_why *why)
{
    error_msg m = {.err = (int32_t)err, .is_fatal = is_fatal};
    snprintf(m.text, sizeof m.text, "%s", pgd_why_text(why, err));
    s->is_told = send_msg(s, WIRE_ERROR, &control_error_record, &m) == PGD_OK;
    return err;
}

static pgd_err answer_ping(worker_state *s)
{
    heartbeat_msg m = {.progress = __atomic_load_n(&s->opts->runner->progress, __ATOMIC_RELAXED),
                       .last_step_id = *s->opts->last_step_id};
    return send_msg(s, WIRE_PONG, &control_heartbeat_record, &m);
}

static pgd_err take_log_level(worker_state *s, const engine_frame *f, pgd_why *why)
{
    log_level_msg m;
    pgd_err err = control_decode_log_level(&m, f->data, f->n_bytes, why);
    if (err != PGD_OK)
        return tell_error(s, err, 1, why);
    log_set_level((log_level)m.level);
    log_info("worker", "log_level=%s, as the engine's", log_level_name((log_level)m.level));
    return PGD_OK;
}

/* The next frame that is neither ping nor log_level. *is_shutdown: the engine asks for the end. */
static pgd_err next_frame(worker_state *s, engine_frame *f, bool *is_shutdown, pgd_why *why)
{
    *is_shutdown = false;
    for (;;) {
        pgd_err err = engine_link_recv(s->opts->link, f, why);
        if (err == PGD_EUNSUPPORTED || err == PGD_EPROTO)
            return tell_error(s, err, err == PGD_EUNSUPPORTED ? 2 : 1, why);
        if (err != PGD_OK)
            return err;
        if (f->type == WIRE_PING) {
            PGD_TRY(answer_ping(s));
            continue;
        }
        if (f->type == WIRE_LOG_LEVEL) {
            PGD_TRY(take_log_level(s, f, why));
            continue;
        }
        *is_shutdown = f->type == WIRE_SHUTDOWN;
        return PGD_OK;
    }
}

static void on_progress(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    worker_state *s = arg;
    uint64_t now = clock_now_us();
    load_progress_msg m = {done_bytes, total_bytes};
    if (done_bytes < total_bytes && now - s->progress_sent_us < PROGRESS_PERIOD_US)
        return;
    s->progress_sent_us = now;
    /* Never wait for a progress bar. */
    (void)!engine_link_send(s->opts->link, WIRE_LOAD_PROGRESS, &control_load_progress_record, &m,
                            false);
}

/* From a copy thread, which tries again later when the engine's queue is full. */
static bool on_transfer(void *arg, const kv_transfer_done *done)
{
    transfers_done_msg m = {.n_done = 1, .done = {*done}};
    pgd_err err =
        engine_link_send(arg, WIRE_TRANSFERS_DONE, &control_transfers_done_record, &m, false);
    return err != PGD_EAGAIN && err != PGD_ENOMEM;
}

static pgd_err say_hello(worker_state *s)
{
    hello_msg m = {
        .protocol_version = WIRE_VERSION, .rank = s->opts->rank, .pid = (uint64_t)getpid()};
    memcpy(m.proof, s->opts->proof, sizeof m.proof);
    snprintf(m.version, sizeof m.version, "%s", PGD_VERSION_STRING);
    snprintf(m.device, sizeof m.device, "%s", s->opts->device);
    s->opts->runner->vtbl->describe(s->opts->runner, &m);
    return send_msg(s, WIRE_HELLO, &control_hello_record, &m);
}

static pgd_err do_load(worker_state *s, const engine_frame *f, pgd_why *why)
{
    uint64_t start_us = clock_now_us();
    step_runner *r = s->opts->runner;
    pgd_err err = control_decode_load(&s->load, f->data, f->n_bytes, why);
    if (err == PGD_OK)
        err = r->vtbl->load(r, &s->load, &s->done, on_progress, s, why);
    if (err != PGD_OK)
        return tell_error(s, err, err == PGD_EDEVICE ? 1 : 2, why);
    s->done.load_us = clock_now_us() - start_us;
    return send_msg(s, WIRE_LOAD_DONE, &control_load_done_record, &s->done);
}

static pgd_err size_limits(worker_state *s, pgd_why *why)
{
    const kv_layout *layout = &s->kv.layout;
    if (s->kv.max_model_len > s->load.max_model_len)
        return pgd_fail(why, PGD_EPROTO, "kv_config: expected max_model_len of at most %d, got %d",
                        s->load.max_model_len, s->kv.max_model_len);
    if ((s->kv.offload_path[0] != 0) != (s->kv.offload_blocks > 0) ||
        (s->kv.offload_path[0] != 0) != (s->kv.offload_n_ranks > 0))
        return pgd_fail(why, PGD_EPROTO,
                        "kv_config: expected a path, blocks and ranks of an offload tier or none "
                        "of them, got \"%.100s\", %d and %d",
                        s->kv.offload_path, s->kv.offload_blocks, s->kv.offload_n_ranks);
    PGD_TRY(kv_layout_check(layout, s->done.kv_layers, s->done.n_kv_layers, s->kv.n_blocks, why));
    s->limits = (wire_limits){.max_num_seqs = s->load.max_num_seqs,
                              .max_num_batched_tokens = s->load.max_num_batched_tokens,
                              .max_model_len = s->kv.max_model_len,
                              .vocab_size = s->done.vocab_size,
                              .n_blocks = s->kv.n_blocks,
                              .max_encoder_tokens = s->done.max_encoder_tokens,
                              .max_logprobs = s->load.max_logprobs};
    kv_layout_fill_limits(&s->limits, layout);
    PGD_TRY(wire_limits_derive(&s->limits, why));
    s->scratch.cap_bytes = scheduler_output_scratch_bytes(&s->limits);
    s->scratch.data = mem_alloc(s->scratch.cap_bytes);
    if (s->scratch.data == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory: %zu bytes for decoded steps",
                        s->scratch.cap_bytes);
    return PGD_OK;
}

static pgd_err do_kv_config(worker_state *s, const engine_frame *f, pgd_why *why)
{
    kv_ready_msg ready = {0};
    step_runner *r = s->opts->runner;
    pgd_err err = control_decode_kv_config(&s->kv, f->data, f->n_bytes, why);
    if (err == PGD_OK)
        err = size_limits(s, why);
    r->on_transfer = on_transfer;
    r->on_transfer_arg = s->opts->link;
    r->rank = (int32_t)s->opts->rank;
    if (err == PGD_OK)
        err = r->vtbl->init_kv(r, &s->kv, &ready, why);
    if (err != PGD_OK)
        return tell_error(s, err, err == PGD_EDEVICE ? 1 : 2, why);
    return send_msg(s, WIRE_KV_READY, &control_kv_ready_record, &ready);
}

static pgd_err do_step(worker_state *s, const engine_frame *f, uint32_t idle_us, pgd_why *why)
{
    scheduler_output in;
    step_result out = {0};
    step_runner *r = s->opts->runner;
    uint64_t start_us = clock_now_us();
    mem_forbid();
    pgd_err err = scheduler_output_decode(&in, &s->scratch, f->data, f->n_bytes, &s->limits, why);
    if (err == PGD_OK) {
        log_debug("worker", "step=%llu new=%d cached=%d tokens=%d", (unsigned long long)in.step_id,
                  in.n_new, in.n_cached, in.total_scheduled_tokens);
        err = r->vtbl->step(r, &in, &out, why);
    }
    mem_permit();
    if (err != PGD_OK)
        return tell_error(s, err, 1, why);
    __atomic_store_n(s->opts->last_step_id, in.step_id, __ATOMIC_RELAXED);
    out.step_id = in.step_id;
    out.total_us = (uint32_t)PGD_MIN(clock_now_us() - start_us, UINT32_MAX);
    out.idle_us = idle_us;
    return send_msg(s, WIRE_RESULT, &step_result_record, &out);
}

static pgd_err refuse(worker_state *s, const char *expected, wire_type got, pgd_why *why)
{
    pgd_err err =
        pgd_fail(why, PGD_EPROTO, "expected message %s, got %s", expected, wire_type_name(got));
    return tell_error(s, err, 1, why);
}

static pgd_err run(worker_state *s, pgd_why *why)
{
    engine_frame f;
    bool is_shutdown;
    PGD_TRY(say_hello(s));
    PGD_TRY(next_frame(s, &f, &is_shutdown, why));
    if (is_shutdown)
        return PGD_OK;
    if (f.type == WIRE_ERROR) { /* the engine refuses us, and says why */
        error_msg m;
        PGD_TRY(control_decode_error(&m, f.data, f.n_bytes, why));
        return pgd_fail(why, PGD_EPROTO, "refused by the engine: %s", m.text);
    }
    if (f.type != WIRE_LOAD)
        return refuse(s, "load", f.type, why);
    PGD_TRY(do_load(s, &f, why));
    PGD_TRY(next_frame(s, &f, &is_shutdown, why));
    if (is_shutdown)
        return PGD_OK;
    if (f.type != WIRE_KV_CONFIG)
        return refuse(s, "kv_config", f.type, why);
    PGD_TRY(do_kv_config(s, &f, why));
    for (;;) {
        uint64_t wait_us = clock_now_us();
        PGD_TRY(next_frame(s, &f, &is_shutdown, why));
        if (is_shutdown)
            return PGD_OK;
        if (f.type != WIRE_STEP)
            return refuse(s, "step", f.type, why);
        PGD_TRY(do_step(s, &f, (uint32_t)PGD_MIN(clock_now_us() - wait_us, UINT32_MAX), why));
    }
}

pgd_err worker_loop_run(const worker_loop_opts *opts, pgd_why *why)
{
    worker_state s = {.opts = opts};
    pgd_err err = run(&s, why);
    opts->runner->vtbl->stop(opts->runner); /* the link is the caller's from here on */
    if (err != PGD_OK && !s.is_told)
        log_error("worker", "%s", pgd_why_text(why, err));
    mem_free(s.scratch.data);
    return err;
}
