/* What an engine does with frames from its worker: the real worker_life and scheduler, over a link,
 * a process and a clock that this file implements. The input is a sequence of moves: frames
 * (plausible ones with wrong numbers and damaged bytes among them, or of the wrong type), deaths,
 * lost pipes, full queues, time that passes, requests that come and go. Whatever the worker does,
 * the engine's own books must stay right: the scheduler's integrity holds after every move, and at
 * the end every request has been released once. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/random.h>

#include "common/clock.h"
#include "common/mem.h"
#include "engine/core/scheduler_internal.h"
#include "engine/core/worker_host.h"
#include "engine/core/worker_life.h"
#include "engine/core/worker_link.h"
#include "tests/fuzz/fuzz_input.h"

#define MAX_SEQS     4
#define MAX_LEN      64
#define BLOCK_SIZE   16
#define VOCAB_SIZE   40
#define MAX_REQUESTS 32
#define MAX_QUEUED   8 /* frames on their way */
#define DEPTH        2

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);
int LLVMFuzzerInitialize(int *argc, char ***argv);

typedef struct frame {
    void *data;
    size_t n_bytes;
} frame;

struct worker_link {
    uint32_t epoch;
    bool is_attached;
    bool is_lost;
    frame queue[MAX_QUEUED];
    int n_queued;
    frame last; /* handed out by recv or take_held */
    frame held[WORKER_LINK_MAX_HELD];
    int n_held;
};

typedef struct rig {
    fuzz_input in;
    uint64_t now_us;
    worker_host host;
    bool is_alive;
    int n_lives;
    attach_terms terms;
    worker_link *link; /* of the life at hand, or NULL */
    pgd_err send_err;
    bool ring_is_full; /* no room for a result's events */
    bool has_failed;
    worker_life *life;
    scheduler *sched;
    block_hasher *hasher;
    config cfg;
    uint64_t n_requests;
    int n_released[MAX_REQUESTS];
    int n_finished[MAX_REQUESTS];
} rig;

static rig r;

/* --- clock, process and link ------------------------------------------------------------------ */

/* The same nonce in every run, so that an input does the same in every run. */
ssize_t getrandom(void *out, size_t n_bytes, unsigned flags)
{
    (void)flags;
    memset(out, 0x5a, n_bytes);
    return (ssize_t)n_bytes;
}

uint64_t clock_now_us(void)
{
    return ++r.now_us;
}

uint64_t clock_now_ns(void)
{
    return clock_now_us() * 1000;
}

int64_t clock_wall_s(void)
{
    return 0;
}

static pgd_err host_start(worker_host *h, worker_link **link, worker_link_opts *opts, pgd_why *why)
{
    (void)h;
    PGD_ASSERT(!r.is_alive);
    r.n_lives++;
    if (fuzz_below(&r.in, 32) == 31)
        return pgd_fail(why, fuzz_u8(&r.in) % 2 != 0 ? PGD_EIO : PGD_ENOENT, "no process today");
    PGD_TRY(worker_link_open(link, opts, why));
    r.is_alive = true;
    return PGD_OK;
}

static bool host_poll(worker_host *h)
{
    (void)h;
    return !r.is_alive;
}

static void host_kill(worker_host *h)
{
    (void)h;
    r.is_alive = false;
}

static int host_get_fds(const worker_host *h, int fds[WORKER_HOST_MAX_FDS])
{
    (void)h;
    (void)fds;
    return 0;
}

static int64_t host_get_pid(const worker_host *h)
{
    (void)h;
    return r.is_alive ? 1 : 0;
}

static const char *host_get_epitaph(const worker_host *h)
{
    (void)h;
    PGD_ASSERT(!r.is_alive);
    return "ended";
}

static int host_get_signal(const worker_host *h)
{
    (void)h;
    return r.n_lives % 2 != 0 ? 9 : 0;
}

static const char *host_get_last_words(const worker_host *h)
{
    (void)h;
    return "";
}

static void host_destroy(worker_host *h)
{
    (void)h;
    PGD_ASSERT(!r.is_alive);
}

static const worker_host_vtbl host_vtbl = {.start = host_start,
                                           .poll = host_poll,
                                           .kill = host_kill,
                                           .get_fds = host_get_fds,
                                           .get_pid = host_get_pid,
                                           .get_epitaph = host_get_epitaph,
                                           .get_signal = host_get_signal,
                                           .get_last_words = host_get_last_words,
                                           .destroy = host_destroy};

/* A child, or a worker that an operator started. */
static pgd_err make_host(worker_host **out, bool is_child)
{
    r.host = (worker_host){.vtbl = &host_vtbl,
                           .may_be_absent = !is_child,
                           .url = is_child ? "" : "ipc:///nowhere",
                           .gone_reason = is_child ? RESTART_EXIT : RESTART_CLOSED,
                           .gone_early = "went early",
                           .gone = "went"};
    *out = &r.host;
    return PGD_OK;
}

pgd_err worker_spawn_create(worker_host **out, const config *cfg, const char *device, pgd_why *why)
{
    (void)cfg;
    (void)device;
    (void)why;
    return make_host(out, true);
}

pgd_err worker_attach_create(worker_host **out, const config *cfg, pgd_why *why)
{
    (void)cfg;
    (void)why;
    return make_host(out, false);
}

pgd_err worker_link_open(worker_link **out, const worker_link_opts *opts, pgd_why *why)
{
    (void)why;
    PGD_ASSERT(r.link == NULL); /* one incarnation at a time */
    r.link = calloc(1, sizeof(*r.link));
    if (r.link == NULL)
        abort();
    r.link->epoch = opts->worker_epoch;
    *out = r.link;
    return PGD_OK;
}

void worker_link_close(worker_link *l)
{
    if (l == NULL)
        return;
    PGD_ASSERT(!r.is_alive);
    for (int i = 0; i < l->n_queued; i++)
        free(l->queue[i].data);
    for (int i = 0; i < l->n_held; i++)
        free(l->held[i].data);
    free(l->last.data);
    free(l);
    r.link = NULL;
}

const char *worker_link_get_url(const worker_link *l)
{
    (void)l;
    return "ipc:///nowhere";
}

/* What the engine sends must be what a worker accepts. */
pgd_err worker_link_send(worker_link *l, wire_type type, const wire_record *rec, const void *msg)
{
    static uint64_t room[1 << 14];
    wire_scratch scratch = {.data = (uint8_t *)room, .cap_bytes = sizeof(room)};
    wire_limits limits = {.max_num_seqs = MAX_SEQS,
                          .max_num_batched_tokens = MAX_LEN,
                          .max_model_len = MAX_LEN,
                          .vocab_size = VOCAB_SIZE,
                          .n_blocks = 1 << 20,
                          .max_encoder_tokens =
                              worker_life_get_facts(r.life)->kv.groups.max_encoder_tokens,
                          .max_logprobs = PGD_MAX_LOGPROBS};
    const kv_layout *layout = &worker_life_get_facts(r.life)->kv.groups.layout;
    pgd_why why = {{0}};
    pgd_err err = r.send_err;
    r.send_err = PGD_OK;
    if (err != PGD_OK)
        return err;
    size_t n_bytes = wire_frame_bytes(rec, msg);
    void *data = malloc(n_bytes);
    if (data == NULL)
        abort();
    kv_layout_fill_limits(&limits, layout);
    wire_encode(data, n_bytes, type, l->epoch, rec, msg);
    if (type == WIRE_STEP) {
        scheduler_output m;
        PGD_ASSERTF(wire_limits_derive(&limits, &why) == PGD_OK, "%s", why.text);
        err = scheduler_output_decode(&m, &scratch, data, n_bytes, &limits, &why);
        PGD_ASSERTF(err == PGD_OK, "%s", why.text);
    } else if (type == WIRE_LOAD) {
        load_msg m;
        PGD_ASSERTF(control_decode_load(&m, data, n_bytes, &why) == PGD_OK, "%s", why.text);
    } else if (type == WIRE_ATTACH) {
        attach_msg m;
        PGD_ASSERTF(control_decode_attach(&m, data, n_bytes, &why) == PGD_OK, "%s", why.text);
        r.terms.worker_epoch = l->epoch;
        r.terms.max_frame_bytes = m.max_frame_bytes;
        memcpy(r.terms.engine_nonce, m.nonce, sizeof(m.nonce));
        PGD_ASSERT(attach_check(m.proof, &r.host.key, ATTACH_ENGINE, &r.terms, &why) == PGD_OK);
        l->is_attached = true;
    } else if (type == WIRE_KV_CONFIG) {
        kv_config_msg m;
        PGD_ASSERTF(control_decode_kv_config(&m, data, n_bytes, &why) == PGD_OK, "%s", why.text);
        PGD_ASSERT(memcmp(&m.layout, layout, sizeof(*layout)) == 0);
    } else if (type == WIRE_SHUTDOWN) {
        r.is_alive = false;
    }
    free(data);
    return PGD_OK;
}

static void hand_out(worker_link *l, frame f, worker_frame *out)
{
    wire_header h;
    challenge_msg challenge;
    free(l->last.data);
    l->last = f;
    PGD_ASSERT(wire_decode_header(&h, f.data, f.n_bytes, NULL) == PGD_OK);
    *out = (worker_frame){h.type, f.data, f.n_bytes};
    if (!l->is_attached && control_decode_challenge(&challenge, f.data, f.n_bytes, NULL) == PGD_OK)
        memcpy(r.terms.worker_nonce, challenge.nonce, sizeof(challenge.nonce));
}

pgd_err worker_link_recv(worker_link *l, worker_frame *out, pgd_why *why)
{
    while (l->n_queued > 0) {
        wire_header h;
        frame f = l->queue[0];
        l->n_queued--;
        memmove(l->queue, l->queue + 1, (size_t)l->n_queued * sizeof(frame));
        pgd_err err = wire_decode_header(&h, f.data, f.n_bytes, why);
        if (err == PGD_OK && (h.worker_epoch == l->epoch || h.type == WIRE_CHALLENGE)) {
            hand_out(l, f, out);
            return PGD_OK;
        }
        free(f.data);
        if (err != PGD_OK)
            return err;
    }
    return PGD_EAGAIN;
}

bool worker_link_hold(worker_link *l)
{
    if (l->n_held == WORKER_LINK_MAX_HELD)
        return false;
    l->held[l->n_held++] = l->last;
    l->last = (frame){NULL, 0};
    return true;
}

bool worker_link_take_held(worker_link *l, worker_frame *out)
{
    if (l->n_held == 0)
        return false;
    frame f = l->held[0];
    l->n_held--;
    memmove(l->held, l->held + 1, (size_t)l->n_held * sizeof(frame));
    hand_out(l, f, out);
    return true;
}

int32_t worker_link_n_held(const worker_link *l)
{
    return l->n_held;
}

bool worker_link_is_up(const worker_link *l)
{
    (void)l;
    return !r.host.may_be_absent || fuzz_below(&r.in, 16) != 15;
}

bool worker_link_is_lost(const worker_link *l)
{
    return l->is_lost;
}

/* --- what the core loop does ------------------------------------------------------------------ */

static void on_token(void *arg, request *req, token_id token, const token_logprob *logprobs,
                     int32_t n_logprobs)
{
    (void)arg;
    (void)req;
    PGD_ASSERTF(token >= 0 && token < VOCAB_SIZE, "token %d", token);
    for (int32_t i = 0; i < n_logprobs; i++)
        PGD_ASSERTF(logprobs[i].id >= 0 && logprobs[i].id < VOCAB_SIZE, "token %d", logprobs[i].id);
}

static void on_finished(void *arg, request *req, request_error error)
{
    (void)arg;
    (void)error;
    PGD_ASSERT(r.n_finished[req->id]++ == 0 && r.n_released[req->id] == 0);
}

static void on_release(void *arg, request *req)
{
    (void)arg;
    PGD_ASSERT(r.n_released[req->id]++ == 0);
    request_destroy(req);
}

static pgd_err on_ready(void *arg, const worker_facts *facts, pgd_why *why)
{
    static const uint8_t seed[32] = {5};
    (void)arg;
    if (r.sched != NULL)
        return PGD_OK;
    kv_group_spec groups[PGD_MAX_KV_GROUPS];
    for (int32_t g = 0; g < facts->kv.groups.layout.n_groups; g++)
        groups[g] = kv_groups_spec(&facts->kv.groups, g);
    scheduler_opts o = {.max_num_seqs = MAX_SEQS,
                        .max_num_batched_tokens = MAX_LEN,
                        .max_model_len = facts->max_model_len,
                        .max_queued_requests = MAX_REQUESTS,
                        .enable_chunked_prefill = true,
                        .enable_prefix_caching = true,
                        .async = true,
                        .n_blocks = facts->kv.n_blocks,
                        .block_size = BLOCK_SIZE,
                        .n_groups = facts->kv.groups.layout.n_groups,
                        .groups = groups,
                        .hash_seed = seed,
                        .on_token = on_token,
                        .on_finished = on_finished,
                        .on_release = on_release};
    pgd_err err = facts->vocab_size == VOCAB_SIZE ? scheduler_create(&r.sched, &o) : PGD_EINVAL;
    return err == PGD_OK ? PGD_OK : pgd_fail(why, err, "no scheduler");
}

static bool can_take_result(void *arg)
{
    (void)arg;
    return !r.ring_is_full;
}

static pgd_err on_result(void *arg, const step_result *result, pgd_why *why)
{
    (void)arg;
    pgd_err err = scheduler_update(r.sched, result);
    return err == PGD_OK ? PGD_OK : pgd_fail(why, err, "does not fit");
}

/* Job ids below 64 are taken for known. */
static pgd_err on_transfers(void *arg, int32_t rank, const kv_transfer_done *done, int32_t n_done,
                            pgd_why *why)
{
    (void)arg;
    PGD_ASSERT(rank == 0 && n_done >= 1 && n_done <= CONTROL_MAX_DONE && r.sched != NULL);
    return done[0].job_id < 64 ? PGD_OK : pgd_fail(why, PGD_EPROTO, "unknown transfer");
}

static poison_verdict on_lost(void *arg, const char *why)
{
    (void)arg;
    PGD_ASSERT(why[0] != '\0' && !r.is_alive);
    if (r.sched != NULL)
        scheduler_reset_worker(r.sched);
    return (poison_verdict)(fuzz_u8(&r.in) % (POISON_FOUND + 1));
}

static void on_failed(void *arg, const char *why)
{
    (void)arg;
    PGD_ASSERT(why[0] != '\0' && !r.has_failed);
    r.has_failed = true;
}

/* --- frames of the worker --------------------------------------------------------------------- */

static frame encode(wire_type type, const wire_record *rec, const void *msg)
{
    frame f = {.n_bytes = wire_frame_bytes(rec, msg)};
    f.data = malloc(f.n_bytes);
    if (f.data == NULL)
        abort();
    wire_encode(f.data, f.n_bytes, type, r.link->epoch, rec, msg);
    return f;
}

static frame build_challenge(uint8_t odd)
{
    challenge_msg m;
    memset(m.nonce, odd, sizeof(m.nonce));
    return encode(WIRE_CHALLENGE, &control_challenge_record, &m);
}

static frame build_hello(uint8_t odd)
{
    hello_msg m = {.protocol_version = WIRE_VERSION, .device = "sim"};
    if (attach_prove(m.proof, &r.host.key, ATTACH_WORKER, &r.terms) != PGD_OK)
        abort();
    if (odd == 255)
        m.proof[3] ^= 1;
    if (odd == 254)
        m.protocol_version++;
    return encode(WIRE_HELLO, &control_hello_record, &m);
}

static frame build_load_done(uint8_t odd)
{
    load_done_msg m = {.memory_free_bytes = 4 * 9 * 4096 * BLOCK_SIZE,
                       .n_kv_layers = 1 + odd % 3,
                       .kv_layers = {{ATTENTION_FULL, 0, 4096},
                                     {ATTENTION_SLIDING, 20, 4096},
                                     {ATTENTION_CHUNKED, 24, 2048}},
                       .vocab_size = VOCAB_SIZE};
    uint32_t extreme = odd >= 250 ? fuzz_u32(&r.in) : 0;
    if (odd >= 240) {
        int32_t *fields[] = {&m.kv_layers[0].kind, &m.kv_layers[1].window,
                             &m.kv_layers[2].token_bytes, &m.max_encoder_tokens, &m.vocab_size};
        int32_t *field = fields[fuzz_below(&r.in, (int32_t)PGD_ARRAY_LEN(fields))];
        *field = fuzz_bend(&r.in, odd, *field);
    } else if (odd >= 230) {
        m.kv_layers[0].token_bytes = (int32_t)(extreme % INT32_MAX) + odd % 2;
        m.memory_free_bytes = odd % 3 != 0 ? UINT64_MAX - extreme : extreme;
    }
    return encode(WIRE_LOAD_DONE, &control_load_done_record, &m);
}

/* Of the oldest step out that has no answer queued yet: as a good worker would answer. */
static frame build_result(uint8_t odd)
{
    static request_result_msg results[MAX_SEQS + 1];
    static token_logprob logprobs[MAX_SEQS * 3];
    fuzz_input *in = &r.in;
    step_result m = {.results = results, .logprobs = logprobs};
    int32_t n_steps = r.sched != NULL ? r.sched->n_records : 0;
    const step_record *record =
        n_steps > 0 ? scheduler__record_at(r.sched, odd >= 224 && odd < 240 ? n_steps - 1 : 0)
                    : NULL;
    m.step_id = record != NULL ? record->step_id : fuzz_u8(in);
    for (int32_t i = 0; record != NULL && i < record->n_entries; i++) {
        const step_entry *e = &record->entries[i];
        if (!e->is_sampled && odd != 223)
            continue;
        uint8_t token = fuzz_u8(in);
        request_result_msg *res = &results[m.n_results++];
        *res = (request_result_msg){.request_id = e->request_id,
                                    .request_epoch = e->epoch,
                                    .n_tokens = 1,
                                    .tokens = {token % VOCAB_SIZE}};
        if (token >= 250) {
            res->error = REQUEST_ERROR_NAN_LOGITS;
            res->n_tokens = 0;
        } else if (token >= 200) {
            res->n_logprobs_per_token = 1 + token % 3;
            res->first_logprob = m.n_logprobs;
            for (int32_t k = 0; k < res->n_logprobs_per_token; k++)
                logprobs[m.n_logprobs++] = (token_logprob){token % VOCAB_SIZE + k, -1};
        }
    }
    if (odd >= 240 && m.n_results > 0) {
        request_result_msg *res = &results[fuzz_below(in, m.n_results)];
        int32_t epoch = (int32_t)res->request_epoch;
        int32_t id = (int32_t)res->request_id;
        int32_t *fields[] = {&epoch,
                             &id,
                             &res->n_tokens,
                             &res->tokens[0],
                             &res->n_drafts,
                             &res->n_logprobs_per_token,
                             &res->first_logprob};
        int32_t *field = fields[fuzz_below(in, (int32_t)PGD_ARRAY_LEN(fields))];
        *field = fuzz_bend(in, odd, *field);
        res->request_epoch = (uint32_t)epoch;
        res->request_id = (uint64_t)(int64_t)id;
        /* The encoder trusts counts: those that would lead it out of the arrays are damaged later. */
        res->n_tokens = PGD_MAX(PGD_MIN(res->n_tokens, PGD_MAX_DRAFT_TOKENS + 1), 0);
        res->n_drafts = PGD_MAX(PGD_MIN(res->n_drafts, PGD_MAX_DRAFT_TOKENS), 0);
    }
    return encode(WIRE_RESULT, &step_result_record, &m);
}

static frame build_other(uint8_t kind)
{
    heartbeat_msg beat = {.progress = fuzz_u8(&r.in)};
    load_progress_msg progress = {.done_bytes = kind, .total_bytes = 100};
    error_msg error = {.err = (int32_t)kind - 100, .is_fatal = kind % 3, .text = "told"};
    kv_ready_msg ready = {.kv_bytes = 1};
    transfers_done_msg done = {.n_done = 1 + kind % 3, .done = {{.job_id = kind}}};
    switch (kind % 8) {
    case 0:
        return encode(WIRE_PONG, &control_heartbeat_record, &beat);
    case 1:
        return encode(WIRE_LOAD_PROGRESS, &control_load_progress_record, &progress);
    case 2:
        return encode(WIRE_ERROR, &control_error_record, &error);
    case 3:
        return encode(WIRE_KV_READY, &control_kv_ready_record, &ready);
    case 4:
        return encode(WIRE_SHUTDOWN, NULL, NULL);
    case 5:
        return encode(WIRE_TRANSFERS_DONE, &control_transfers_done_record, &done);
    default:
        return encode(WIRE_HEARTBEAT, &control_heartbeat_record, &beat);
    }
}

/* The frame that this state waits for. */
static frame build_expected(uint8_t odd)
{
    switch (worker_life_get_state(r.life)) {
    case WORKER_LIFE_STARTING:
        return r.link->is_attached ? build_hello(odd) : build_challenge(odd);
    case WORKER_LIFE_LOADING:
        return build_load_done(odd);
    case WORKER_LIFE_PREPARING:
        return build_other(3);
    default:
        return build_result(odd);
    }
}

static void push_frame(uint8_t move)
{
    if (r.link == NULL || r.link->n_queued == MAX_QUEUED)
        return;
    uint8_t odd = fuzz_u8(&r.in);
    frame f = move < 128 ? build_expected(odd) : build_other(odd);
    for (int i = 0; move >= 120 && move < 128 && i <= move - 120; i++)
        ((uint8_t *)f.data)[fuzz_u32(&r.in) % f.n_bytes] ^= fuzz_u8(&r.in);
    r.link->queue[r.link->n_queued++] = f;
}

/* --- moves ------------------------------------------------------------------------------------ */

static void add_request(void)
{
    static const token_id eos = 1;
    fuzz_input *in = &r.in;
    token_id prompt[MAX_LEN];
    request *req;
    uint8_t kind = fuzz_u8(in);
    if (r.sched == NULL || r.n_requests == MAX_REQUESTS)
        return;
    request_opts opts = {.id = r.n_requests,
                         .prompt = prompt,
                         .n_prompt_tokens = 1 + kind % 40,
                         .max_tokens = 1 + fuzz_below(in, 24),
                         .max_model_len = r.sched->opts.max_model_len,
                         .eos_ids = &eos,
                         .n_eos_ids = 1,
                         .block_size = BLOCK_SIZE,
                         .hasher = r.hasher};
    opts.params.top_p = 1;
    opts.params.repetition_penalty = 1;
    opts.params.n_logprobs = kind >= 128 ? 2 : -1;
    for (int32_t i = 0; i < opts.n_prompt_tokens; i++)
        prompt[i] = i < 20 ? i : kind % VOCAB_SIZE;
    if (request_create(&req, &opts) != PGD_OK)
        return;
    if (scheduler_add_request(r.sched, req) == SCHEDULER_ADDED)
        r.n_requests++;
    else
        request_destroy(req);
}

static void send_step(void)
{
    scheduler_output out;
    if (worker_life_get_state(r.life) == WORKER_LIFE_READY &&
        scheduler_n_steps_in_flight(r.sched) < DEPTH && scheduler_schedule(r.sched, &out, NULL, 0))
        (void)worker_life_send_step(r.life, &out);
}

static void make_move(uint8_t move)
{
    fuzz_input *in = &r.in;
    if (move < 160) {
        push_frame(move);
    } else if (move < 200) {
        send_step();
    } else if (move < 220) {
        add_request();
    } else if (move < 226) {
        if (r.sched != NULL)
            (void)scheduler_finish_request(r.sched, fuzz_u8(in), REQUEST_FINISHED_ABORTED);
    } else if (move < 232) {
        r.now_us += (uint64_t)fuzz_u8(in) * 100000;
    } else if (move < 236) {
        r.is_alive = false;
    } else if (move < 240) {
        if (r.link != NULL)
            r.link->is_lost = true;
    } else if (move < 248) {
        r.send_err = move % 2 != 0 ? PGD_EAGAIN : PGD_ECLOSED;
    } else {
        r.ring_is_full = move % 2 != 0;
    }
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fuzz_quiet();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static const uint8_t seed[32] = {5};
    pgd_why why = {{0}};
    memset(&r, 0, sizeof(r));
    r.in = (fuzz_input){data, n_bytes, 0};
    config_init(&r.cfg);
    if (fuzz_u8(&r.in) % 8 == 7)
        (void)snprintf(r.cfg.worker, sizeof(r.cfg.worker), "ipc:///nowhere");
    worker_life_opts opts = {.cfg = &r.cfg,
                             .sizes = {.device = "sim",
                                       .kv_dtype = DTYPE_F16,
                                       .max_num_seqs = MAX_SEQS,
                                       .max_num_batched_tokens = MAX_LEN,
                                       .block_size = BLOCK_SIZE,
                                       .max_logprobs = 5,
                                       .max_model_len = MAX_LEN,
                                       .max_held = MAX_REQUESTS},
                             .on_ready = on_ready,
                             .can_take_result = can_take_result,
                             .on_result = on_result,
                             .on_transfers = on_transfers,
                             .on_lost = on_lost,
                             .on_failed = on_failed};
    if (block_hasher_create(&r.hasher, seed) != PGD_OK ||
        worker_life_create(&r.life, &opts, &why) != PGD_OK)
        PGD_PANIC("%s", why.text);
    while (fuzz_more(&r.in)) {
        make_move(fuzz_u8(&r.in));
        worker_life_turn(r.life);
        if (r.sched != NULL)
            scheduler_check(r.sched);
        PGD_ASSERT(worker_life_timeout_ms(r.life) >= 0);
    }
    worker_life_stop(r.life);
    worker_life_destroy(r.life);
    if (r.sched != NULL)
        scheduler_destroy(r.sched);
    for (uint64_t i = 0; i < r.n_requests; i++)
        PGD_ASSERTF(r.n_released[i] == 1, "request %d was released %d times", (int)i,
                    r.n_released[i]);
    block_hasher_destroy(r.hasher);
    return 0;
}
