/* A worker with an offload tier, by messages alone: the real loop and runners over a link that this
 * file implements, the test is the engine. What was stored, overwritten and loaded into other blocks
 * gives the same bits as what was never moved; what cannot be right is said. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/hash.h"
#include "common/log.h"
#include "common/model/dtype.h"
#include "common/thread.h"
#include "engine/kv/kv_groups.h"
#include "proto/kv_region.h"
#include "worker/sim_runner.h"
#include "worker/worker_loop.h"

enum {
    EPOCH = 3,
    BLOCK_SIZE = 16,
    N_BLOCKS = 400,
    N_MEDIUM = 64,
    MAX_LEN = 160,
    N_PROMPT = 100,
    N_MOVED = 64, /* tokens: whole blocks in every group */
    N_OUT = 12,
    N_LOGPROBS = 2,
    MAX_QUEUED = 64,
    MAX_MOVED_BLOCKS = PGD_MAX_KV_GROUPS * N_MOVED / BLOCK_SIZE
};

typedef struct frame {
    void *data;
    size_t n_bytes;
    wire_type type;
} frame;

typedef struct frame_queue {
    frame frames[MAX_QUEUED];
    int n_in, n_out;
} frame_queue;

struct engine_link {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    frame_queue to_worker, to_engine;
    frame last; /* the worker's */
    bool is_full;
};

typedef struct rig {
    engine_link link;
    step_runner *runner;
    pthread_t thread;
    pgd_err err; /* of the loop */
    load_done_msg done;
    kv_groups groups;
    wire_limits limits;
    wire_scratch scratch;
    int fd;
    kv_region region;
    uint64_t step_id;
    frame got; /* the last one taken */
    int n_done;
    kv_transfer_done transfers[MAX_QUEUED];
} rig;

/* --- the link ---------------------------------------------------------------------------------- */

static void put(engine_link *l, frame_queue *q, wire_type type, const wire_record *rec,
                const void *msg)
{
    frame f = {.n_bytes = wire_frame_bytes(rec, msg), .type = type};
    f.data = malloc(f.n_bytes);
    wire_encode(f.data, f.n_bytes, type, EPOCH, rec, msg);
    pthread_mutex_lock(&l->mutex);
    PGD_ASSERT(q->n_in - q->n_out < MAX_QUEUED);
    q->frames[q->n_in++ % MAX_QUEUED] = f;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mutex);
}

static frame take(engine_link *l, frame_queue *q)
{
    pthread_mutex_lock(&l->mutex);
    while (q->n_in == q->n_out)
        pthread_cond_wait(&l->changed, &l->mutex);
    frame f = q->frames[q->n_out++ % MAX_QUEUED];
    pthread_mutex_unlock(&l->mutex);
    return f;
}

pgd_err engine_link_send(engine_link *l, wire_type type, const wire_record *rec, const void *msg,
                         bool wait)
{
    pthread_mutex_lock(&l->mutex);
    bool is_full = l->is_full && !wait;
    pthread_mutex_unlock(&l->mutex);
    if (is_full)
        return PGD_EAGAIN;
    put(l, &l->to_engine, type, rec, msg);
    return PGD_OK;
}

pgd_err engine_link_recv(engine_link *l, engine_frame *out, pgd_why *why)
{
    (void)why;
    free(l->last.data);
    l->last = take(l, &l->to_worker);
    *out = (engine_frame){l->last.type, EPOCH, l->last.data, l->last.n_bytes};
    return PGD_OK;
}

static void set_full(engine_link *l, bool is_full)
{
    pthread_mutex_lock(&l->mutex);
    l->is_full = is_full;
    pthread_mutex_unlock(&l->mutex);
}

/* --- the engine's side ------------------------------------------------------------------------- */

/* The next frame of this type; transfers that end meanwhile are noted. */
static void await(rig *r, wire_type type)
{
    for (;;) {
        free(r->got.data);
        r->got = take(&r->link, &r->link.to_engine);
        if (r->got.type == WIRE_TRANSFERS_DONE) {
            transfers_done_msg m;
            assert_int_equal(control_decode_transfers_done(&m, r->got.data, r->got.n_bytes, NULL),
                             PGD_OK);
            for (int32_t i = 0; i < m.n_done; i++)
                r->transfers[r->n_done++ % MAX_QUEUED] = m.done[i];
        }
        if (r->got.type == type)
            return;
        if (r->got.type == WIRE_ERROR) {
            error_msg m;
            assert_int_equal(control_decode_error(&m, r->got.data, r->got.n_bytes, NULL), PGD_OK);
            fail_msg("worker: %s", m.text);
        }
    }
}

static const kv_transfer_done *await_done(rig *r, uint64_t job_id)
{
    for (int i = 0;; i++) {
        while (i >= r->n_done)
            await(r, WIRE_TRANSFERS_DONE);
        if (r->transfers[i % MAX_QUEUED].job_id == job_id)
            return &r->transfers[i % MAX_QUEUED];
    }
}

static void await_error(rig *r, uint8_t is_fatal, const char *part)
{
    error_msg m;
    await(r, WIRE_ERROR);
    assert_int_equal(control_decode_error(&m, r->got.data, r->got.n_bytes, NULL), PGD_OK);
    assert_int_equal(m.is_fatal, is_fatal);
    if (strstr(m.text, part) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", part, m.text);
}

static void send_step(rig *r, scheduler_output *out)
{
    out->step_id = ++r->step_id;
    out->n_groups = r->groups.layout.n_groups;
    put(&r->link, &r->link.to_worker, WIRE_STEP, &scheduler_output_record, out);
}

static void step(rig *r, step_result *result, scheduler_output *out)
{
    pgd_why why = {{0}};
    send_step(r, out);
    await(r, WIRE_RESULT);
    if (step_result_decode(result, &r->scratch, r->got.data, r->got.n_bytes, &r->limits, &why) !=
        PGD_OK)
        fail_msg("%s", why.text);
    assert_int_equal(result->step_id, r->step_id);
}

/* --- life --------------------------------------------------------------------------------------- */

static void run_worker(void *arg)
{
    rig *r = arg;
    pgd_why why = {{0}};
    uint64_t last_step_id = 0;
    worker_loop_opts opts = {
        .link = &r->link, .runner = r->runner, .device = "sim", .last_step_id = &last_step_id};
    r->err = worker_loop_run(&opts, &why);
}

/* model: NULL = the simulated worker. Up to load_done; the layers are grouped. */
static void rig_load(rig *r, const char *model)
{
    pgd_why why = {{0}};
    memset(r, 0, sizeof *r);
    pthread_mutex_init(&r->link.mutex, NULL);
    pthread_cond_init(&r->link.changed, NULL);
    r->fd = memfd_create("region", MFD_CLOEXEC);
    if ((model != NULL ? model_runner_create(&r->runner, "cpu", &why)
                       : sim_runner_create(&r->runner, &why)) != PGD_OK)
        fail_msg("%s", why.text);
    assert_int_equal(thread_start(&r->thread, "worker", run_worker, r), PGD_OK);
    await(r, WIRE_HELLO);
    load_msg load = {.kv_dtype = DTYPE_F16,
                     .block_size = BLOCK_SIZE,
                     .max_model_len = MAX_LEN,
                     .max_num_seqs = 2,
                     .max_num_batched_tokens = MAX_LEN,
                     .max_logprobs = N_LOGPROBS,
                     .n_threads = 1,
                     .sim_vocab_size = 500,
                     .sim_kv_layers = "full,sliding:20"};
    if (model != NULL)
        snprintf(load.model_path, sizeof load.model_path, "tests/data/models/%s", model);
    put(&r->link, &r->link.to_worker, WIRE_LOAD, &control_load_record, &load);
    await(r, WIRE_LOAD_DONE);
    assert_int_equal(control_decode_load_done(&r->done, r->got.data, r->got.n_bytes, &why), PGD_OK);
    const kv_groups_opts opts = {.block_size = BLOCK_SIZE, .is_hybrid = true};
    assert_int_equal(
        kv_groups_init(&r->groups, r->done.kv_layers, r->done.n_kv_layers, &opts, &why), PGD_OK);
    r->limits = (wire_limits){.max_num_seqs = 2,
                              .max_num_batched_tokens = MAX_LEN,
                              .max_model_len = MAX_LEN,
                              .vocab_size = r->done.vocab_size,
                              .n_blocks = N_BLOCKS,
                              .max_logprobs = N_LOGPROBS};
    kv_layout_fill_limits(&r->limits, &r->groups.layout);
    assert_int_equal(wire_limits_derive(&r->limits, &why), PGD_OK);
    r->scratch.cap_bytes = step_result_scratch_bytes(&r->limits);
    r->scratch.data = malloc(r->scratch.cap_bytes);
}

static kv_config_msg make_config(const rig *r, bool has_tier)
{
    kv_config_msg m = {.n_blocks = N_BLOCKS, .max_model_len = MAX_LEN, .layout = r->groups.layout};
    if (!has_tier)
        return m;
    m.offload_blocks = N_MEDIUM;
    m.offload_n_ranks = 1;
    snprintf(m.offload_path, sizeof m.offload_path, "/proc/%d/fd/%d", (int)getpid(), r->fd);
    return m;
}

static void configure(rig *r, const kv_config_msg *m)
{
    put(&r->link, &r->link.to_worker, WIRE_KV_CONFIG, &control_kv_config_record, m);
}

static void rig_open(rig *r, const char *model)
{
    static const uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES];
    pgd_why why = {{0}};
    rig_load(r, model);
    kv_region_shape shape = {N_MEDIUM, 1, kv_layout_block_bytes(&r->groups.layout)};
    if (kv_region_format(&r->region, r->fd, &shape, fingerprint, &why) != PGD_OK)
        fail_msg("%s", why.text);
    kv_config_msg m = make_config(r, true);
    configure(r, &m);
    await(r, WIRE_KV_READY);
}

static void rig_close(rig *r)
{
    thread_join(r->thread);
    for (int k = 0; k < 2; k++) {
        frame_queue *q = k == 0 ? &r->link.to_worker : &r->link.to_engine;
        while (q->n_out < q->n_in)
            free(q->frames[q->n_out++ % MAX_QUEUED].data);
    }
    r->runner->vtbl->destroy(r->runner);
    free(r->link.last.data);
    free(r->got.data);
    free(r->scratch.data);
    kv_region_unmap(&r->region);
    close(r->fd);
}

static void rig_shut(rig *r)
{
    put(&r->link, &r->link.to_worker, WIRE_SHUTDOWN, NULL, NULL);
    rig_close(r);
    assert_int_equal(r->err, PGD_OK);
}

/* --- requests ----------------------------------------------------------------------------------- */

typedef struct answer {
    token_id tokens[N_OUT];
    token_logprob logprobs[N_OUT][N_LOGPROBS + 1];
} answer;

typedef struct tables {
    block_id ids[PGD_MAX_KV_GROUPS][MAX_LEN / BLOCK_SIZE + 1];
    block_ids_msg msg;
} tables;

/* Blocks of all groups from `first` on. */
static void make_tables(tables *t, const rig *r, block_id first)
{
    for (int32_t g = 0; g < r->groups.layout.n_groups; g++) {
        int32_t n = PGD_CEIL_DIV(N_PROMPT + N_OUT, r->groups.layout.groups[g].block_size);
        t->msg.n_blocks[g] = n;
        t->msg.ids[g] = t->ids[g];
        for (int32_t i = 0; i < n; i++)
            t->ids[g][i] = first++;
    }
    assert_true(first <= N_BLOCKS);
}

static void take_token(answer *a, int32_t i, const step_result *result)
{
    assert_int_equal(result->n_results, 1);
    assert_int_equal(result->results[0].n_tokens, 1);
    assert_int_equal(result->n_logprobs, N_LOGPROBS + 1);
    a->tokens[i] = result->results[0].tokens[0];
    memcpy(a->logprobs[i], result->logprobs, sizeof a->logprobs[i]);
}

/* A request alone, whose first n_computed tokens are in its blocks. */
static answer generate(rig *r, uint64_t seed, const tables *t, int32_t n_computed)
{
    static uint64_t id;
    answer a;
    token_id prompt[N_PROMPT];
    step_result result;
    for (int32_t i = 0; i < N_PROMPT; i++)
        prompt[i] = (token_id)(hash_u64(seed * 1000 + (uint64_t)i) % (uint64_t)r->done.vocab_size);
    new_request_msg n = {.request_id = ++id,
                         .request_epoch = 1,
                         .n_prompt_tokens = N_PROMPT,
                         .n_tokens = N_PROMPT,
                         .tokens = prompt,
                         .n_computed_tokens = n_computed,
                         .n_scheduled_tokens = N_PROMPT - n_computed,
                         .params = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = N_LOGPROBS},
                         .blocks = t->msg};
    scheduler_output out = {
        .n_new = 1, .new_requests = &n, .total_scheduled_tokens = n.n_scheduled_tokens};
    step(r, &result, &out);
    take_token(&a, 0, &result);
    for (int32_t i = 1; i < N_OUT; i++) {
        cached_request_msg c = {
            .request_id = id, .n_computed_tokens = N_PROMPT + i - 1, .n_scheduled_tokens = 1};
        out = (scheduler_output){.n_cached = 1, .cached_requests = &c, .total_scheduled_tokens = 1};
        step(r, &result, &out);
        take_token(&a, i, &result);
    }
    out = (scheduler_output){.n_finished = 1, .finished_ids = &id};
    step(r, &result, &out);
    return a;
}

typedef struct moved {
    block_id devices[MAX_MOVED_BLOCKS];
    int32_t mediums[MAX_MOVED_BLOCKS];
    uint64_t tags[MAX_MOVED_BLOCKS];
    kv_transfer_msg msg;
} moved;

/* The blocks of the first N_MOVED tokens, of all groups, in the order in which they end. */
static void make_moved(moved *m, const rig *r, kv_transfer_kind kind, uint64_t id, const tables *t)
{
    m->msg = (kv_transfer_msg){id, kind, 0, m->devices, m->mediums, m->tags};
    for (int32_t end = 1; end <= N_MOVED; end++) {
        for (int32_t g = 0; g < r->groups.layout.n_groups; g++) {
            int32_t block_size = r->groups.layout.groups[g].block_size;
            int32_t i = m->msg.n_blocks;
            if (end % block_size != 0)
                continue;
            m->devices[i] = t->ids[g][end / block_size - 1];
            m->mediums[i] = N_MEDIUM - 1 - i;
            m->tags[i] = 7000 + (uint64_t)i;
            m->msg.n_blocks++;
        }
    }
    assert_true(m->msg.n_blocks >= N_MOVED / 1024 + 1 && m->msg.n_blocks <= N_MEDIUM);
}

static const kv_transfer_done *transfer(rig *r, const kv_transfer_msg *m)
{
    step_result result;
    scheduler_output out = {.n_transfers = 1, .transfers = m};
    step(r, &result, &out);
    return await_done(r, m->job_id);
}

/* --- tests --------------------------------------------------------------------------------------- */

static void check_moves(const char *model)
{
    static rig r;
    tables first, second;
    moved m;
    rig_open(&r, model);
    make_tables(&first, &r, 1);
    make_tables(&second, &r, N_BLOCKS / 2);
    answer want = generate(&r, 1, &first, 0);
    make_moved(&m, &r, KV_TRANSFER_STORE, 10, &first);
    const kv_transfer_done *done = transfer(&r, &m.msg);
    assert_int_equal(done->n_good, m.msg.n_blocks);
    assert_int_equal(done->n_bytes,
                     (uint64_t)m.msg.n_blocks * kv_layout_block_bytes(&r.groups.layout));
    answer other = generate(&r, 2, &first, 0); /* in the same blocks */
    assert_memory_not_equal(&other, &want, sizeof want);
    make_moved(&m, &r, KV_TRANSFER_LOAD, 11, &second);
    assert_int_equal(transfer(&r, &m.msg)->n_good, m.msg.n_blocks);
    answer got = generate(&r, 1, &second, N_MOVED);
    assert_memory_equal(&got, &want, sizeof want);
    if (model != NULL) { /* the simulated worker would say that this is wrong */
        got = generate(&r, 1, &first, N_MOVED);
        assert_memory_not_equal(&got, &want, sizeof want);
    }
    /* Damage in one block, another content than expected in a later one. */
    int32_t bad = m.msg.n_blocks / 2;
    *(uint8_t *)kv_region_get_shard(&r.region, m.mediums[bad], 0) ^= 1;
    m.tags[m.msg.n_blocks - 1]++;
    m.msg.job_id = 12;
    assert_int_equal(transfer(&r, &m.msg)->n_good, bad);
    rig_shut(&r);
}

static void test_worker_offload_sim(void **state)
{
    (void)state;
    check_moves(NULL);
}

static void test_worker_offload_model(void **state)
{
    (void)state;
    check_moves("mistral-tiny/mistral-tiny.f32.gguf");
}

static void test_worker_offload_hybrid(void **state)
{
    (void)state;
    check_moves("gemma3-tiny");
    check_moves("llama4-tiny");
}

/* The flushed blocks are overwritten by the very step that stores them, while it computes. */
static void check_flush(const char *model)
{
    static rig r;
    tables first, second;
    moved m;
    step_result result;
    token_id prompt[N_PROMPT] = {0};
    rig_open(&r, model);
    make_tables(&first, &r, 1);
    make_tables(&second, &r, N_BLOCKS / 2);
    answer want = generate(&r, 1, &first, 0);
    make_moved(&m, &r, KV_TRANSFER_STORE, 10, &first);
    const kv_transfer_msg transfers[2] = {{.job_id = 10, .kind = KV_TRANSFER_FLUSH}, m.msg};
    new_request_msg n = {.request_id = 1000,
                         .n_prompt_tokens = N_PROMPT,
                         .n_tokens = N_PROMPT,
                         .tokens = prompt,
                         .n_scheduled_tokens = N_PROMPT,
                         .params = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1},
                         .blocks = first.msg};
    scheduler_output out = {.n_new = 1,
                            .new_requests = &n,
                            .total_scheduled_tokens = N_PROMPT,
                            .n_transfers = 2,
                            .transfers = transfers,
                            .n_blocks_to_zero = 1,
                            .blocks_to_zero = first.ids[0]};
    step(&r, &result, &out);
    assert_int_equal(await_done(&r, 10)->n_good, m.msg.n_blocks);
    make_moved(&m, &r, KV_TRANSFER_LOAD, 11, &second);
    assert_int_equal(transfer(&r, &m.msg)->n_good, m.msg.n_blocks);
    answer got = generate(&r, 1, &second, N_MOVED);
    assert_memory_equal(&got, &want, sizeof want);
    rig_shut(&r);
}

static void test_worker_offload_flush(void **state)
{
    (void)state;
    check_flush(NULL);
    check_flush("mistral-tiny/mistral-tiny.f32.gguf");
    check_flush("gemma3-tiny");
}

/* An engine that takes no messages for a while; then the end, with transfers under way. */
static void test_worker_offload_slow_engine(void **state)
{
    (void)state;
    static rig r;
    tables t;
    moved m;
    rig_open(&r, NULL);
    make_tables(&t, &r, 1);
    make_moved(&m, &r, KV_TRANSFER_STORE, 1, &t);
    set_full(&r.link, true);
    step_result result;
    scheduler_output out = {.n_transfers = 1, .transfers = &m.msg};
    step(&r, &result, &out);
    kv_transfer_msg flush = {.job_id = 1, .kind = KV_TRANSFER_FLUSH};
    out.transfers = &flush;
    step(&r, &result, &out);
    assert_int_equal(r.n_done, 0);
    set_full(&r.link, false);
    assert_int_equal(await_done(&r, 1)->n_good, m.msg.n_blocks);
    for (uint64_t id = 2; id < 10; id++) {
        m.msg.job_id = id;
        out.transfers = &m.msg;
        step(&r, &result, &out);
    }
    rig_shut(&r);
}

static void test_worker_offload_refusals(void **state)
{
    (void)state;
    static rig r;
    tables t;
    moved m;
    rig_load(&r, NULL); /* no tier */
    kv_config_msg config = make_config(&r, false);
    configure(&r, &config);
    await(&r, WIRE_KV_READY);
    make_tables(&t, &r, 1);
    make_moved(&m, &r, KV_TRANSFER_STORE, 1, &t);
    scheduler_output out = {.n_transfers = 1, .transfers = &m.msg};
    send_step(&r, &out);
    await_error(&r, 1, "no transfers without an offload tier");
    rig_close(&r);
    assert_int_equal(r.err, PGD_EPROTO);

    rig_open(&r, NULL);
    m.mediums[1] = N_MEDIUM;
    send_step(&r, &out);
    await_error(&r, 1, "a medium block 0..63, got");
    rig_close(&r);

    static const struct {
        const char *path;
        int32_t n_blocks, n_ranks;
        const char *part;
    } cases[] = {
        {"/nowhere/region", N_MEDIUM, 1, "tier at /nowhere/region: KV region: No such file"},
        {"/dev/null", N_MEDIUM, 1, "expected a file of"},
        {"", N_MEDIUM, 0, "expected a path, blocks and ranks of an offload tier or none"},
        {"", 0, 1, "expected a path, blocks and ranks of an offload tier or none"},
        {"/dev/null", 0, 1, "expected a path, blocks and ranks of an offload tier or none"},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        rig_load(&r, NULL);
        config = make_config(&r, false);
        snprintf(config.offload_path, sizeof config.offload_path, "%s", cases[i].path);
        config.offload_blocks = cases[i].n_blocks;
        config.offload_n_ranks = cases[i].n_ranks;
        configure(&r, &config);
        await_error(&r, 2, cases[i].part);
        rig_close(&r);
    }
}

int main(void)
{
    log_set_level(LOG_WARN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_worker_offload_sim),
        cmocka_unit_test(test_worker_offload_model),
        cmocka_unit_test(test_worker_offload_hybrid),
        cmocka_unit_test(test_worker_offload_flush),
        cmocka_unit_test(test_worker_offload_slow_engine),
        cmocka_unit_test(test_worker_offload_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
