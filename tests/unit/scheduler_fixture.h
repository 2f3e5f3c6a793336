/* A scheduler with recorded callbacks and hand-made answers, for the scheduler tests.
 *
 * Thread:  one test at a time
 */
#ifndef TESTS_UNIT_SCHEDULER_FIXTURE_H
#define TESTS_UNIT_SCHEDULER_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "engine/core/scheduler_internal.h"

#define FIX_EOS      50256
#define FIX_MAX_REQS 64
#define FIX_MAX_LEN  2048

typedef struct fix {
    scheduler *s;
    block_hasher *hasher;
    int32_t block_size;
    int32_t max_model_len;
    uint64_t next_id;
    scheduler_output out;
    /* by request id */
    token_id tokens[FIX_MAX_REQS][256];
    int n_tokens[FIX_MAX_REQS];
    int n_finished[FIX_MAX_REQS];
    request_status status[FIX_MAX_REQS];
    request_error error[FIX_MAX_REQS];
    token_id stop_token[FIX_MAX_REQS];
    int n_released[FIX_MAX_REQS];
    int n_logprobs_seen;
    token_logprob *prompt_logprobs[FIX_MAX_REQS]; /* taken with the first token; fix_deinit frees */
    float last_logprob;
} fix;

static inline void fix_on_token(void *arg, request *r, token_id token,
                                const token_logprob *logprobs, int32_t n_logprobs)
{
    fix *f = arg;
    if (f->n_tokens[r->id] == 0)
        f->prompt_logprobs[r->id] = request_take_prompt_logprobs(r);
    f->tokens[r->id][f->n_tokens[r->id]++] = token;
    if (n_logprobs > 0) {
        f->n_logprobs_seen += n_logprobs;
        f->last_logprob = logprobs[0].logprob;
    }
}

static inline void fix_on_finished(void *arg, request *r, request_error error)
{
    fix *f = arg;
    f->n_finished[r->id]++;
    f->status[r->id] = r->status;
    f->error[r->id] = error;
    f->stop_token[r->id] = r->stop_token;
}

static inline void fix_on_release(void *arg, request *r)
{
    fix *f = arg;
    f->n_released[r->id]++;
    request_destroy(r);
}

static inline scheduler_opts fix_opts(void)
{
    static const uint8_t seed[32] = {5};
    return (scheduler_opts){.max_num_seqs = 16,
                            .max_num_batched_tokens = 1024,
                            .max_model_len = FIX_MAX_LEN,
                            .max_queued_requests = 32,
                            .enable_chunked_prefill = true,
                            .enable_prefix_caching = true,
                            .n_blocks = 1000,
                            .block_size = 16,
                            .n_groups = 1,
                            .hash_seed = seed,
                            .on_token = fix_on_token,
                            .on_finished = fix_on_finished,
                            .on_release = fix_on_release};
}

static inline void fix_init(fix *f, scheduler_opts opts)
{
    memset(f, 0, sizeof *f);
    opts.arg = f;
    f->block_size = opts.block_size;
    f->max_model_len = opts.max_model_len;
    if (opts.enable_prefix_caching)
        assert_int_equal(block_hasher_create(&f->hasher, opts.hash_seed), PGD_OK);
    assert_int_equal(scheduler_create(&f->s, &opts), PGD_OK);
}

/* Every block is back, every request released exactly once. */
static inline void fix_deinit(fix *f)
{
    scheduler_check(f->s);
    scheduler_destroy(f->s);
    for (uint64_t id = 0; id < f->next_id; id++) {
        assert_int_equal(f->n_released[id], 1);
        assert_true(f->n_finished[id] <= 1);
        mem_free(f->prompt_logprobs[id]);
    }
    block_hasher_destroy(f->hasher);
}

typedef struct fix_req {
    int32_t n_prompt;
    int32_t n_common;   /* leading tokens that all requests share */
    int32_t max_tokens; /* 0 = 16 */
    int32_t priority;
    uint64_t arrival_us;
    token_id stop_id; /* 0 = none */
    int32_t min_tokens;
    bool ignore_eos;
    int32_t n_prompt_logprobs; /* per token */
} fix_req;

static inline request *fix_new(fix *f, fix_req q)
{
    static token_id prompt[FIX_MAX_LEN];
    const token_id eos = FIX_EOS;
    assert_true(f->next_id < FIX_MAX_REQS);
    for (int32_t i = 0; i < q.n_prompt; i++)
        prompt[i] = i < q.n_common ? i : 10000 * (token_id)(f->next_id + 1) + i;
    request_opts opts = {.id = f->next_id++,
                         .prompt = prompt,
                         .n_prompt_tokens = q.n_prompt,
                         .max_tokens = q.max_tokens > 0 ? q.max_tokens : 16,
                         .max_model_len = f->max_model_len,
                         .eos_ids = &eos,
                         .n_eos_ids = q.ignore_eos ? 0 : 1,
                         .priority = q.priority,
                         .arrival_us = q.arrival_us,
                         .block_size = f->block_size,
                         .hasher = f->hasher};
    opts.params.stop_ids = &q.stop_id;
    opts.params.n_stop_ids = q.stop_id != 0;
    opts.params.min_tokens = q.min_tokens;
    opts.params.n_prompt_logprobs_per_token = q.n_prompt_logprobs;
    request *r;
    assert_int_equal(request_create(&r, &opts), PGD_OK);
    return r;
}

static inline request *fix_add(fix *f, fix_req q)
{
    request *r = fix_new(f, q);
    assert_int_equal(scheduler_add_request(f->s, r), SCHEDULER_ADDED);
    return r;
}

#define FIX_ADD(f, ...) fix_add(f, (fix_req){__VA_ARGS__})

static inline bool fix_schedule(fix *f)
{
    bool is_step = scheduler_schedule(f->s, &f->out, NULL, 0);
    scheduler_check(f->s);
    return is_step;
}

/* Tokens that the last message gives to the request. */
static inline int32_t fix_scheduled(const fix *f, uint64_t id)
{
    for (int32_t i = 0; i < f->out.n_new; i++) {
        if (f->out.new_requests[i].request_id == id)
            return f->out.new_requests[i].n_scheduled_tokens;
    }
    for (int32_t i = 0; i < f->out.n_cached; i++) {
        if (f->out.cached_requests[i].request_id == id)
            return f->out.cached_requests[i].n_scheduled_tokens;
    }
    return 0;
}

/* Blocks that the last message appends to the request's first group. */
static inline int32_t fix_n_appended(const fix *f, uint64_t id)
{
    for (int32_t i = 0; i < f->out.n_appends; i++) {
        if (f->out.appends[i].request_id == id)
            return f->out.appends[i].blocks.n_blocks[0];
    }
    return 0;
}

static inline const new_request_msg *fix_new_msg(const fix *f, uint64_t id)
{
    for (int32_t i = 0; i < f->out.n_new; i++) {
        if (f->out.new_requests[i].request_id == id)
            return &f->out.new_requests[i];
    }
    return NULL;
}

static inline const cached_request_msg *fix_cached_msg(const fix *f, uint64_t id)
{
    for (int32_t i = 0; i < f->out.n_cached; i++) {
        if (f->out.cached_requests[i].request_id == id)
            return &f->out.cached_requests[i];
    }
    return NULL;
}

/* Entry k of prompt token t, as fix_answer makes it. */
static inline token_logprob fix_prompt_logprob(int32_t t, int32_t k)
{
    return (token_logprob){t + k, -(float)t - (float)k / 16};
}

/* What the step must bring of prompts. */
static inline void fix_fill_prompts(step_result *result, const step_record *record)
{
    static prompt_result_msg prompts[FIX_MAX_REQS];
    static token_logprob logprobs[1024 * (PGD_MAX_LOGPROBS + 1)];
    result->prompt_results = prompts;
    result->prompt_logprobs = logprobs;
    for (int32_t i = 0; i < record->n_entries; i++) {
        const step_entry *e = &record->entries[i];
        int32_t n_per_token = e->r->params.n_prompt_logprobs_per_token;
        if (e->n_prompt_results == 0)
            continue;
        prompts[result->n_prompt_results++] =
            (prompt_result_msg){.request_id = e->request_id,
                                .request_epoch = e->epoch,
                                .first_token = e->n_computed + 1,
                                .n_tokens = e->n_prompt_results,
                                .n_logprobs_per_token = n_per_token,
                                .first_logprob = result->n_prompt_logprobs};
        for (int32_t t = 0; t < e->n_prompt_results; t++)
            for (int32_t k = 0; k < n_per_token; k++)
                logprobs[result->n_prompt_logprobs++] =
                    fix_prompt_logprob(e->n_computed + 1 + t, k);
    }
}

/* Answers the oldest step in flight: each sampled request gets n tokens from `tokens` if it is
 * `id`, else the one token 7. Drafts, if any, are proposed for it too. */
static inline void fix_answer(fix *f, uint64_t id, const token_id *tokens, int32_t n_tokens,
                              const token_id *drafts, int32_t n_drafts)
{
    static request_result_msg results[FIX_MAX_REQS];
    const step_record *record = scheduler__record_at(f->s, 0);
    step_result result = {.step_id = record->step_id, .results = results};
    for (int32_t i = 0; i < record->n_entries; i++) {
        const step_entry *e = &record->entries[i];
        if (!e->is_sampled)
            continue;
        request_result_msg *res = &results[result.n_results++];
        memset(res, 0, sizeof *res);
        res->request_id = e->request_id;
        res->request_epoch = e->epoch;
        res->n_tokens = 1;
        res->tokens[0] = 7;
        if (e->request_id != id)
            continue;
        res->n_tokens = n_tokens;
        memcpy(res->tokens, tokens, (size_t)n_tokens * sizeof *tokens);
        res->n_drafts = n_drafts;
        if (n_drafts > 0)
            memcpy(res->drafts, drafts, (size_t)n_drafts * sizeof *drafts);
    }
    fix_fill_prompts(&result, record);
    assert_int_equal(scheduler_update(f->s, &result), PGD_OK);
    scheduler_check(f->s);
}

/* Answers with the token 7 for all. */
static inline void fix_answer_all(fix *f)
{
    fix_answer(f, UINT64_MAX, NULL, 0, NULL, 0);
}

#define FIX_ANSWER(f, id, ...)                         \
    fix_answer(f, id, (const token_id[]){__VA_ARGS__}, \
               (int32_t)PGD_ARRAY_LEN(((const token_id[]){__VA_ARGS__})), NULL, 0)

static inline void fix_step(fix *f)
{
    assert_true(fix_schedule(f));
    fix_answer_all(f);
}

static inline int32_t fix_n_free(const fix *f)
{
    scheduler_stats stats;
    scheduler_get_stats(f->s, &stats);
    return stats.n_blocks_free;
}

static inline void fix_expect_tokens(const fix *f, uint64_t id, const token_id *want, int n_want)
{
    assert_int_equal(f->n_tokens[id], n_want);
    for (int i = 0; i < n_want; i++)
        assert_int_equal(f->tokens[id][i], want[i]);
}

#define FIX_EXPECT_TOKENS(f, id, ...)                         \
    fix_expect_tokens(f, id, (const token_id[]){__VA_ARGS__}, \
                      (int)PGD_ARRAY_LEN(((const token_id[]){__VA_ARGS__})))

#endif
