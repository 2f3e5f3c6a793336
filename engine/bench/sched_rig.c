/* Prompts are chunked by one block per step, so that a whole crowd is admitted in one step whatever
 * its number, and their lengths differ within a block, so that in each later step an equal share of
 * the requests fills a block.
 *
 * A prompt's first tokens are the same whenever the request of that index comes, the rest is new each
 * time; to have them in the cache the crowd is computed once before. */
#include "engine/bench/sched_rig.h"

#include <string.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/mem.h"
#include "engine/core/scheduler.h"

#define BLOCK        SCHED_RIG_BLOCK_SIZE
#define PROMPT       256
#define MAX_PROMPT   (PROMPT + BLOCK)
#define MAX_LEN      (SCHED_RIG_LONG_PROMPT + BLOCK)
#define WARM_STEPS   (2 * BLOCK)
#define N_VOCAB      (1 << 17)
#define EOS          (N_VOCAB - 1)
#define WINDOW       256 /* of all groups but the first */
#define IN_FLIGHT    2
#define FILLERS      1024
#define FILLER_MAX   512 /* blocks of one, in each group */
#define CACHES_BYTES ((size_t)64 << 20)

static_assert(PROMPT + BLOCK + SCHED_RIG_MAX_STEPS + 2 * WARM_STEPS < MAX_LEN, "room to decode");

static const uint8_t SEED[HASH_SHA256_BYTES] = {1};

typedef struct frame {
    uint64_t *data; /* 8-byte aligned */
    size_t n_bytes;
    size_t cap_bytes;
} frame;

/* What the worker's rows know that a result needs. */
typedef struct rig_row {
    int32_t n_prompt;
    uint32_t epoch;
} rig_row;

struct sched_rig {
    sched_rig_opts opts;
    scheduler *sched;
    block_hasher *hasher;
    wire_limits limits;
    wire_scratch step_scratch;
    wire_scratch result_scratch;
    frame step_frame;
    frame result_frames[IN_FLIGHT]; /* oldest first */
    int32_t n_out;
    rig_row *rows; /* [max_running + 1], by request id - first_id */
    uint64_t first_id;
    uint64_t next_id;
    request_result_msg *results; /* [max_running] */
    token_id *prompt;            /* [MAX_LEN] */
    uint64_t n_tokens;           /* sampled */
    uint8_t *caches;             /* [CACHES_BYTES], to be read between admissions */
    uint64_t sink;
};

static void on_token(void *arg, request *r, token_id token, const token_logprob *logprobs,
                     int32_t n_logprobs)
{
    sched_rig *g = arg;
    (void)r, (void)token, (void)logprobs, (void)n_logprobs;
    g->n_tokens++;
}

static void on_finished(void *arg, request *r, request_error error)
{
    (void)arg, (void)r, (void)error;
}

static void on_release(void *arg, request *r)
{
    (void)arg;
    request_destroy(r);
}

int32_t sched_rig_n_blocks_for(int32_t n_running, int32_t n_steps, int32_t n_groups)
{
    int64_t n_each = PGD_CEIL_DIV(MAX_PROMPT + n_steps + 2 * WARM_STEPS, BLOCK);
    int64_t n = PGD_MAX(n_running * n_each, (int64_t)MAX_LEN / BLOCK) * n_groups + 1;
    return n < INT32_MAX ? (int32_t)n : INT32_MAX;
}

static pgd_err make_limits(sched_rig *g)
{
    g->limits = (wire_limits){.max_num_seqs = g->opts.max_running,
                              .max_num_batched_tokens = WIRE_MAX_BATCHED_TOKENS,
                              .max_model_len = MAX_LEN,
                              .vocab_size = N_VOCAB,
                              .n_blocks = g->opts.n_blocks,
                              .n_groups = g->opts.n_groups};
    for (int32_t i = 0; i < g->opts.n_groups; i++)
        g->limits.block_sizes[i] = BLOCK;
    PGD_TRY(wire_limits_derive(&g->limits, NULL));
    g->step_scratch.cap_bytes = scheduler_output_scratch_bytes(&g->limits);
    g->step_scratch.data = mem_alloc(g->step_scratch.cap_bytes);
    g->result_scratch.cap_bytes = step_result_scratch_bytes(&g->limits);
    g->result_scratch.data = mem_alloc(g->result_scratch.cap_bytes);
    return g->step_scratch.data != NULL && g->result_scratch.data != NULL ? PGD_OK : PGD_ENOMEM;
}

static pgd_err make_scheduler(sched_rig *g)
{
    kv_group_spec groups[PGD_MAX_KV_GROUPS];
    for (int32_t i = 0; i < g->opts.n_groups; i++)
        groups[i] =
            (kv_group_spec){.ops = kv_group_ops_of(i == 0 ? ATTENTION_FULL : ATTENTION_SLIDING),
                            .block_size = BLOCK,
                            .window = i == 0 ? 0 : WINDOW};
    scheduler_opts opts = {.max_num_seqs = g->opts.max_running,
                           .max_num_batched_tokens = WIRE_MAX_BATCHED_TOKENS,
                           .long_prefill_token_threshold = BLOCK,
                           .max_model_len = MAX_LEN,
                           .max_queued_requests = g->opts.max_running,
                           .enable_chunked_prefill = true,
                           .enable_prefix_caching = true,
                           .async = true,
                           .n_blocks = g->opts.n_blocks,
                           .block_size = BLOCK,
                           .n_groups = g->opts.n_groups,
                           .groups = groups,
                           .hash_seed = SEED,
                           .on_token = on_token,
                           .on_finished = on_finished,
                           .on_release = on_release,
                           .arg = g};
    return scheduler_create(&g->sched, &opts);
}

static pgd_err make_parts(sched_rig *g)
{
    size_t n = (size_t)g->opts.max_running;
    PGD_TRY(make_limits(g));
    PGD_TRY(make_scheduler(g));
    PGD_TRY(block_hasher_create(&g->hasher, SEED));
    g->rows = mem_calloc(n + 1, sizeof *g->rows);
    g->results = mem_calloc(n, sizeof *g->results);
    g->prompt = mem_calloc(MAX_LEN, sizeof *g->prompt);
    g->caches = mem_calloc(1, CACHES_BYTES);
    if (g->rows == NULL || g->results == NULL || g->prompt == NULL || g->caches == NULL)
        return PGD_ENOMEM;
    memset(g->caches, 1, CACHES_BYTES);
    return PGD_OK;
}

pgd_err sched_rig_create(sched_rig **out, const sched_rig_opts *opts)
{
    *out = NULL;
    if (opts->max_running < 1 || opts->n_groups < 1 || opts->n_groups > PGD_MAX_KV_GROUPS ||
        opts->n_blocks < sched_rig_n_blocks_for(1, BLOCK, opts->n_groups))
        return PGD_EINVAL;
    sched_rig *g = mem_calloc(1, sizeof *g);
    if (g == NULL)
        return PGD_ENOMEM;
    g->opts = *opts;
    g->opts.max_running = PGD_MAX(opts->max_running, FILLERS);
    g->next_id = 1;
    pgd_err err = make_parts(g);
    if (err != PGD_OK) {
        sched_rig_destroy(g);
        return err;
    }
    *out = g;
    return PGD_OK;
}

void sched_rig_destroy(sched_rig *g)
{
    if (g == NULL)
        return;
    scheduler_destroy(g->sched);
    block_hasher_destroy(g->hasher);
    mem_free(g->step_scratch.data);
    mem_free(g->result_scratch.data);
    mem_free(g->step_frame.data);
    for (int i = 0; i < IN_FLIGHT; i++)
        mem_free(g->result_frames[i].data);
    mem_free(g->rows);
    mem_free(g->results);
    mem_free(g->prompt);
    mem_free(g->caches);
    mem_free(g);
}

/* --- one step --------------------------------------------------------------------------------- */

static pgd_err encode(frame *f, wire_type type, const wire_record *rec, const void *msg)
{
    f->n_bytes = wire_frame_bytes(rec, msg);
    if (f->n_bytes > f->cap_bytes) {
        mem_free(f->data);
        f->cap_bytes = 2 * f->n_bytes;
        f->data = mem_alloc(f->cap_bytes);
        if (f->data == NULL) {
            f->cap_bytes = 0;
            return PGD_ENOMEM;
        }
    }
    wire_encode(f->data, f->n_bytes, type, 1, rec, msg);
    return PGD_OK;
}

static void add_result(sched_rig *g, step_result *result, uint64_t id)
{
    request_result_msg *r = &g->results[result->n_results++];
    r->request_id = id;
    r->request_epoch = g->rows[id - g->first_id].epoch;
    r->n_tokens = 1;
    r->tokens[0] = (token_id)(id % EOS);
}

/* What a worker would answer: a token for each request that is at the end of its tokens. */
static void answer(step_result *result, sched_rig *g, const scheduler_output *in)
{
    *result = (step_result){.step_id = in->step_id, .results = g->results};
    for (int32_t i = 0; i < in->n_new; i++) {
        const new_request_msg *m = &in->new_requests[i];
        g->rows[m->request_id - g->first_id] = (rig_row){m->n_prompt_tokens, m->request_epoch};
        if (m->n_computed_tokens + m->n_scheduled_tokens >= m->n_prompt_tokens)
            add_result(g, result, m->request_id);
    }
    for (int32_t i = 0; i < in->n_cached; i++) {
        const cached_request_msg *m = &in->cached_requests[i];
        if (m->n_computed_tokens + m->n_scheduled_tokens >=
            g->rows[m->request_id - g->first_id].n_prompt)
            add_result(g, result, m->request_id);
    }
}

static double us_between(uint64_t from_ns, uint64_t to_ns)
{
    return (double)(to_ns - from_ns) / 1e3;
}

/* Takes the oldest result that is out. */
static pgd_err finish_step(sched_rig_step *t, sched_rig *g)
{
    step_result result;
    frame *f = &g->result_frames[0];
    uint64_t start = clock_now_ns();
    PGD_TRY(step_result_decode(&result, &g->result_scratch, f->data, f->n_bytes, &g->limits, NULL));
    uint64_t decoded = clock_now_ns();
    PGD_TRY(scheduler_update(g->sched, &result));
    uint64_t end = clock_now_ns();
    t->result_us += us_between(start, decoded);
    t->update_us += us_between(decoded, end);
    frame first = g->result_frames[0];
    for (int i = 1; i < IN_FLIGHT; i++)
        g->result_frames[i - 1] = g->result_frames[i];
    g->result_frames[IN_FLIGHT - 1] = first;
    g->n_out--;
    return PGD_OK;
}

/* Starts a step and finishes the one before it; adds the times to *t. */
static pgd_err step(sched_rig_step *t, sched_rig *g)
{
    scheduler_output out;
    scheduler_output in;
    step_result result;
    uint64_t start = clock_now_ns();
    bool is_step = scheduler_schedule(g->sched, &out, NULL, 0);
    uint64_t scheduled = clock_now_ns();
    if (!is_step)
        return g->n_out > 0 ? finish_step(t, g) : PGD_OK;
    PGD_TRY(encode(&g->step_frame, WIRE_STEP, &scheduler_output_record, &out));
    uint64_t encoded = clock_now_ns();
    PGD_TRY(scheduler_output_decode(&in, &g->step_scratch, g->step_frame.data,
                                    g->step_frame.n_bytes, &g->limits, NULL));
    uint64_t decoded = clock_now_ns();
    answer(&result, g, &in);
    uint64_t answered = clock_now_ns();
    PGD_TRY(encode(&g->result_frames[g->n_out], WIRE_RESULT, &step_result_record, &result));
    uint64_t returned = clock_now_ns();
    g->n_out++;
    t->schedule_us += us_between(start, scheduled);
    t->encode_us += us_between(scheduled, encoded);
    t->decode_us += us_between(encoded, decoded);
    t->result_us += us_between(answered, returned);
    return g->n_out == IN_FLIGHT ? finish_step(t, g) : PGD_OK;
}

/* No step is out afterwards. */
static pgd_err settle(sched_rig *g)
{
    sched_rig_step t = {0};
    while (g->n_out > 0)
        PGD_TRY(finish_step(&t, g));
    return PGD_OK;
}

/* --- requests --------------------------------------------------------------------------------- */

static token_id token_of(uint64_t which, int32_t pos)
{
    return (token_id)(hash_u64(which * 0x9E3779B97F4A7C15ULL + (uint64_t)pos) % N_VOCAB);
}

/* Tokens of prompt `which`; from n_common on they depend on the request's id too. */
static pgd_err make_request(request **out, sched_rig *g, uint64_t which, int32_t n_prompt,
                            int32_t n_common, int32_t max_tokens)
{
    uint64_t id = g->next_id++;
    for (int32_t i = 0; i < n_prompt; i++)
        g->prompt[i] = token_of(i < n_common ? which : (id << 20) + which, i);
    static const token_id eos = EOS;
    request_opts opts = {.id = id,
                         .prompt = g->prompt,
                         .n_prompt_tokens = n_prompt,
                         .max_tokens = max_tokens,
                         .max_model_len = MAX_LEN,
                         .eos_ids = &eos,
                         .n_eos_ids = 1,
                         .block_size = BLOCK,
                         .hasher = g->hasher};
    opts.params = (sampling_params){.temperature = 1, .top_p = 1, .repetition_penalty = 1};
    opts.params.n_logprobs = -1;
    return request_create(out, &opts);
}

static pgd_err add(sched_rig *g, request *r)
{
    if (scheduler_add_request(g->sched, r) == SCHEDULER_ADDED)
        return PGD_OK;
    request_destroy(r);
    return PGD_EINVAL;
}

static pgd_err end_all(sched_rig *g, uint64_t first_id)
{
    PGD_TRY(settle(g));
    for (uint64_t id = first_id; id < g->next_id; id++)
        (void)scheduler_finish_request(g->sched, id, REQUEST_FINISHED_ABORTED);
    sched_rig_step t = {0};
    while (scheduler_has_work(g->sched)) /* the finished ids go out */
        PGD_TRY(step(&t, g));
    return settle(g);
}

/* Steps until each of the n_running requests from first_id on has a token. */
static pgd_err start_crowd(sched_rig *g, int32_t n_running, double hit_rate, int32_t n_steps)
{
    int32_t n_common = (int32_t)(hit_rate * MAX_PROMPT + 0.5);
    g->first_id = g->next_id;
    for (int32_t i = 0; i < n_running; i++) {
        request *r;
        PGD_TRY(make_request(&r, g, (uint64_t)i + 1, PROMPT + 1 + i % BLOCK, n_common,
                             n_steps + 2 * WARM_STEPS));
        PGD_TRY(add(g, r));
    }
    sched_rig_step t = {0};
    g->n_tokens = 0;
    for (int i = 0; g->n_tokens < (uint64_t)n_running; i++) {
        if (i > 2 * MAX_PROMPT)
            return PGD_EINVAL;
        PGD_TRY(step(&t, g));
    }
    return PGD_OK;
}

static pgd_err measure(sched_rig_run *run, sched_rig *g, int32_t n_running, int32_t n_steps)
{
    sched_rig_step t = {0};
    for (int i = 0; i < WARM_STEPS; i++)
        PGD_TRY(step(&t, g));
    uint64_t n_allocations = mem_n_allocations();
    uint64_t n_tokens = g->n_tokens;
    int32_t n_each = n_running >= BLOCK ? 1 : BLOCK; /* steps of a sample */
    int32_t n_done = 0;
    while (n_done < n_steps) {
        t = (sched_rig_step){0};
        for (int32_t i = 0; i < n_each; i++)
            PGD_TRY(step(&t, g));
        n_done += n_each;
        t.schedule_us /= n_each;
        t.encode_us /= n_each;
        t.decode_us /= n_each;
        t.result_us /= n_each;
        t.update_us /= n_each;
        t.total_us = t.schedule_us + t.encode_us + t.decode_us + t.update_us;
        if (run->n_samples < run->max_samples)
            run->samples[run->n_samples++] = t;
    }
    run->allocations_per_step = (double)(mem_n_allocations() - n_allocations) / n_done;
    /* Each step gave each request its token: nothing was preempted, nobody ended early. */
    return g->n_tokens - n_tokens == (uint64_t)n_running * (uint64_t)n_done ? PGD_OK : PGD_EINVAL;
}

pgd_err sched_rig_decode(sched_rig_run *run, sched_rig *g, int32_t n_running, double hit_rate,
                         int32_t n_steps)
{
    scheduler_stats before;
    scheduler_stats after;
    run->n_samples = 0;
    if (n_running < 1 || n_running > g->opts.max_running || n_steps < 1 ||
        n_steps > SCHED_RIG_MAX_STEPS ||
        sched_rig_n_blocks_for(n_running, n_steps, g->opts.n_groups) > g->opts.n_blocks)
        return PGD_EINVAL;
    if (hit_rate > 0) {
        PGD_TRY(start_crowd(g, n_running, hit_rate, n_steps));
        PGD_TRY(end_all(g, g->first_id));
    }
    scheduler_get_stats(g->sched, &before);
    PGD_TRY(start_crowd(g, n_running, hit_rate, n_steps));
    scheduler_get_stats(g->sched, &after);
    run->hit_rate = (double)(after.n_prefix_hit_tokens - before.n_prefix_hit_tokens) /
                    (double)(after.n_prefix_queries_tokens - before.n_prefix_queries_tokens);
    PGD_TRY(measure(run, g, n_running, n_steps));
    return end_all(g, g->first_id);
}

static void read_caches_away(sched_rig *g)
{
    for (size_t i = 0; i < CACHES_BYTES; i += 64)
        g->sink += g->caches[i];
}

/* One request of the long prompt from its arrival to its first token, then it is ended. */
static pgd_err run_long(double *us, sched_rig *g)
{
    request *r;
    scheduler_output out;
    g->first_id = g->next_id;
    PGD_TRY(make_request(&r, g, 0, SCHED_RIG_LONG_PROMPT, SCHED_RIG_LONG_PROMPT, BLOCK));
    read_caches_away(g);
    uint64_t start = clock_now_ns();
    PGD_TRY(add(g, r));
    bool is_step = scheduler_schedule(g->sched, &out, NULL, 0);
    PGD_TRY(encode(&g->step_frame, WIRE_STEP, &scheduler_output_record, &out));
    *us = us_between(start, clock_now_ns());
    if (!is_step || out.n_new != 1)
        return PGD_EINVAL;
    step_result result;
    answer(&result, g, &out);
    PGD_TRY(scheduler_update(g->sched, &result));
    sched_rig_step t = {0};
    for (g->n_tokens = result.n_results > 0; g->n_tokens == 0;)
        PGD_TRY(step(&t, g));
    return end_all(g, g->first_id);
}

pgd_err sched_rig_admit(double *us, sched_rig *g, int32_t n)
{
    scheduler_stats before;
    scheduler_stats after;
    double first_us;
    if (n < 1)
        return PGD_EINVAL;
    PGD_TRY(run_long(&first_us, g));
    scheduler_get_stats(g->sched, &before);
    for (int32_t i = 0; i < n; i++)
        PGD_TRY(run_long(&us[i], g));
    scheduler_get_stats(g->sched, &after);
    uint64_t n_hit = after.n_prefix_hit_tokens - before.n_prefix_hit_tokens;
    return n_hit == (uint64_t)n * (SCHED_RIG_LONG_PROMPT - BLOCK) ? PGD_OK : PGD_EINVAL;
}

/* --- age -------------------------------------------------------------------------------------- */

/* A wave of requests that take one block each in turn, then end one after the other. Their hashes
 * are made up: only that no two are equal matters. */
static pgd_err run_wave(sched_rig *g, int32_t n_fillers, int32_t n_blocks)
{
    pgd_err err = PGD_OK;
    int32_t n_prompt = n_blocks * BLOCK;
    block_hash *hashes = mem_calloc((size_t)n_blocks, sizeof *hashes);
    if (hashes == NULL)
        return PGD_ENOMEM;
    g->first_id = g->next_id;
    memset(g->prompt, 0, (size_t)n_prompt * sizeof *g->prompt);
    for (int32_t i = 0; i < n_fillers && err == PGD_OK; i++) {
        request *r;
        request_opts opts = {.id = g->next_id++,
                             .prompt = g->prompt,
                             .n_prompt_tokens = n_prompt,
                             .prompt_hashes = hashes,
                             .max_tokens = 1,
                             .max_model_len = MAX_LEN,
                             .block_size = BLOCK,
                             .hasher = g->hasher};
        for (int32_t b = 0; b < n_blocks; b++) {
            uint64_t words[4] = {hash_u64((opts.id << 20) + (uint64_t)b), opts.id, (uint64_t)b};
            memcpy(hashes[b].bytes, words, sizeof words);
        }
        err = request_create(&r, &opts);
        if (err == PGD_OK)
            err = add(g, r);
    }
    mem_free(hashes);
    PGD_TRY(err);
    scheduler_output out;
    for (int32_t b = 0; b < n_blocks; b++) {
        if (!scheduler_schedule(g->sched, &out, NULL, 0) ||
            out.total_scheduled_tokens != n_fillers * BLOCK)
            return PGD_EINVAL;
        step_result result;
        answer(&result, g, &out);
        PGD_TRY(scheduler_update(g->sched, &result));
    }
    return end_all(g, g->first_id);
}

pgd_err sched_rig_age(sched_rig *g)
{
    int32_t n_left = (g->opts.n_blocks - 1) / g->opts.n_groups;
    while (n_left > 0) {
        int32_t n_fillers = PGD_MIN(FILLERS, n_left);
        int32_t n_blocks = PGD_MIN(n_left / n_fillers, FILLER_MAX);
        PGD_TRY(run_wave(g, n_fillers, n_blocks));
        n_left -= n_fillers * n_blocks;
    }
    return PGD_OK;
}
