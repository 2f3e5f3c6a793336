/* Messages for the tests of proto/: random ones inside the limits, and the checks that every frame
 * must pass.
 *
 * check_frame_hostile cuts the frame at every byte and changes every byte: a frame is refused, or
 * it decodes to a message that encodes to the very same bytes. Frames are copied to blocks of
 * exactly their size, so that a sanitizer sees a read beyond the end.
 */
#ifndef TESTS_UNIT_PROTO_SAMPLES_H
#define TESTS_UNIT_PROTO_SAMPLES_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/scheduler_output.h"
#include "proto/step_result.h"

typedef struct sample_rng {
    uint64_t x;
} sample_rng;

static inline uint64_t sample_u64(sample_rng *r)
{
    r->x += 0x9e3779b97f4a7c15u;
    uint64_t z = r->x;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* lo..hi, both included */
static inline int32_t sample_int(sample_rng *r, int32_t lo, int32_t hi)
{
    return lo + (int32_t)(sample_u64(r) % ((uint64_t)((int64_t)hi - lo) + 1));
}

typedef struct frame {
    uint8_t *data;
    size_t n_bytes;
} frame;

static inline frame frame_encode(wire_type type, const wire_record *rec, const void *msg)
{
    frame f = {.n_bytes = wire_frame_bytes(rec, msg)};
    f.data = malloc(f.n_bytes);
    assert_non_null(f.data);
    wire_encode(f.data, f.n_bytes, type, 7, rec, msg);
    return f;
}

static inline wire_scratch scratch_make(size_t n_bytes)
{
    wire_scratch s = {.data = malloc(n_bytes), .cap_bytes = n_bytes};
    assert_non_null(s.data);
    return s;
}

/* Decodes any message of one type into storage of its own. */
typedef pgd_err (*decode_fn)(void *out, wire_scratch *scratch, const void *data, size_t n_bytes,
                             const wire_limits *limits, pgd_why *why);

static inline void check_one(const uint8_t *data, size_t n_bytes, wire_type type,
                             const wire_record *rec, decode_fn decode, wire_scratch *scratch,
                             const wire_limits *limits, bool must_fail)
{
    union {
        scheduler_output step;
        uint8_t bytes[1 << 14];
    } msg;
    pgd_why why = {0};
    assert_true(rec->struct_bytes <= sizeof msg);
    pgd_err err = decode(&msg, scratch, data, n_bytes, limits, &why);
    if (err != PGD_OK) {
        assert_true(why.text[0] != 0);
        return;
    }
    assert_false(must_fail);
    wire_header h;
    assert_int_equal(wire_decode_header(&h, data, n_bytes, NULL), PGD_OK);
    frame again = {.n_bytes = wire_frame_bytes(rec, &msg)};
    assert_int_equal(again.n_bytes, n_bytes);
    again.data = malloc(n_bytes);
    wire_encode(again.data, n_bytes, type, h.worker_epoch, rec, &msg);
    assert_memory_equal(again.data, data, n_bytes);
    free(again.data);
}

static inline void check_frame_hostile(frame f, wire_type type, const wire_record *rec,
                                       decode_fn decode, wire_scratch *scratch,
                                       const wire_limits *limits)
{
    static const uint8_t values[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
    for (size_t n = 0; n < f.n_bytes; n++) {
        uint8_t *cut = malloc(n + 1);
        uint64_t n_bytes = n;
        memcpy(cut, f.data, n);
        check_one(cut, n, type, rec, decode, scratch, limits, true);
        /* The same with a header that owns up to it, so that the cut is met inside the record. */
        if (n >= WIRE_HEADER_BYTES) {
            memcpy(cut + 16, &n_bytes, 8);
            uint8_t *exact = malloc(n);
            memcpy(exact, cut, n);
            check_one(exact, n, type, rec, decode, scratch, limits, true);
            free(exact);
        }
        free(cut);
    }
    for (size_t i = 0; i < f.n_bytes; i++) {
        uint8_t was = f.data[i];
        for (size_t k = 0; k < sizeof values; k++) {
            f.data[i] = values[k];
            check_one(f.data, f.n_bytes, type, rec, decode, scratch, limits,
                      i < 4 && values[k] != was);
        }
        f.data[i] = (uint8_t)(was ^ (1u << (i % 8)));
        check_one(f.data, f.n_bytes, type, rec, decode, scratch, limits, i < 4);
        f.data[i] = was;
    }
}

/* --- random messages; arrays live in an arena of static size that each call starts anew ------- */

typedef struct sample_arena {
    sample_rng rng;
    wire_limits limits;
    size_t used;
    uint64_t words[1 << 16];
} sample_arena;

static inline void *sample_alloc(sample_arena *a, size_t n_bytes)
{
    size_t n_words = (n_bytes + 7) / 8;
    assert_true(a->used + n_words <= PGD_ARRAY_LEN(a->words));
    void *p = &a->words[a->used];
    a->used += n_words;
    return n_bytes > 0 ? p : NULL;
}

static inline void sample_arena_init(sample_arena *a, uint64_t seed)
{
    a->rng.x = seed;
    a->used = 0;
    a->limits = (wire_limits){.max_num_seqs = 12,
                              .max_num_batched_tokens = 64,
                              .max_model_len = 96,
                              .vocab_size = 300,
                              .n_blocks = 50,
                              .block_sizes = {8, 16, 12},
                              .n_groups = sample_int(&a->rng, 1, 3),
                              .max_encoder_tokens = 40,
                              .max_logprobs = 5};
    assert_int_equal(wire_limits_derive(&a->limits, NULL), PGD_OK);
}

static inline int32_t *sample_ints(sample_arena *a, int32_t n, int32_t hi)
{
    int32_t *p = sample_alloc(a, (size_t)n * 4);
    for (int32_t i = 0; i < n; i++)
        p[i] = sample_int(&a->rng, 0, hi);
    return p;
}

static inline uint64_t *sample_ids(sample_arena *a, int32_t n)
{
    uint64_t *p = sample_alloc(a, (size_t)n * 8);
    for (int32_t i = 0; i < n; i++)
        p[i] = sample_u64(&a->rng);
    return p;
}

static inline float sample_float(sample_arena *a, float lo, float hi)
{
    return lo + (hi - lo) * (float)(sample_u64(&a->rng) % 10001) / 10000.0f;
}

static inline sampling_params sample_params(sample_arena *a)
{
    sampling_params p = {.temperature = sample_float(a, 0, 2),
                         .top_p = sample_float(a, 0.1f, 1),
                         .min_p = sample_float(a, 0, 1),
                         .top_k = sample_int(&a->rng, 0, 50),
                         .repetition_penalty = sample_float(a, 0.5f, 2),
                         .presence_penalty = sample_float(a, -2, 2),
                         .frequency_penalty = sample_float(a, -2, 2),
                         .seed = sample_u64(&a->rng),
                         .choice_idx = sample_int(&a->rng, 0, 7),
                         .n_logprobs = sample_int(&a->rng, -1, a->limits.max_logprobs),
                         .n_prompt_logprobs_per_token =
                             sample_int(&a->rng, 0, a->limits.max_logprobs_per_token),
                         .min_tokens = sample_int(&a->rng, 0, 9),
                         .n_forced = sample_int(&a->rng, 0, SAMPLING_MAX_FORCED),
                         .n_stop_ids = sample_int(&a->rng, 0, 5),
                         .n_logit_bias = sample_int(&a->rng, 0, 4)};
    p.stop_ids = sample_ints(a, p.n_stop_ids, a->limits.max_token_id);
    logit_bias *bias = sample_alloc(a, (size_t)p.n_logit_bias * sizeof *bias);
    for (int32_t i = 0; i < p.n_logit_bias; i++)
        bias[i] = (logit_bias){sample_int(&a->rng, 0, a->limits.max_token_id),
                               sample_float(a, -100, 100)};
    p.logit_bias = bias;
    for (int32_t i = 0; i < p.n_forced; i++)
        p.forced[i] = (forced_token){sample_int(&a->rng, 0, 99),
                                     sample_int(&a->rng, 0, a->limits.max_token_id)};
    return p;
}

static inline void sample_blocks(sample_arena *a, block_ids_msg *b, int32_t n_min, int32_t n_max)
{
    for (int32_t g = 0; g < a->limits.n_groups; g++) {
        b->n_blocks[g] = sample_int(&a->rng, n_min, n_max);
        b->ids[g] = sample_ints(a, b->n_blocks[g], a->limits.max_block_id);
    }
}

static inline void sample_step(sample_arena *a, scheduler_output *out)
{
    sample_rng *r = &a->rng;
    const wire_limits *l = &a->limits;
    *out = (scheduler_output){.step_id = sample_u64(r),
                              .n_groups = l->n_groups,
                              .n_new = sample_int(r, 0, 4),
                              .n_cached = sample_int(r, 0, 6)};
    new_request_msg *news = sample_alloc(a, (size_t)out->n_new * sizeof *news);
    for (int32_t i = 0; i < out->n_new; i++) {
        int32_t n_tokens = sample_int(r, 1, 40);
        int32_t n_computed = sample_int(r, 0, n_tokens - 1);
        news[i] = (new_request_msg){.request_id = sample_u64(r),
                                    .request_epoch = (uint32_t)sample_u64(r),
                                    .n_prompt_tokens = sample_int(r, 1, n_tokens),
                                    .n_tokens = n_tokens,
                                    .tokens = sample_ints(a, n_tokens, l->max_token_id),
                                    .n_computed_tokens = n_computed,
                                    .n_scheduled_tokens =
                                        sample_int(r, 1, PGD_MIN(n_tokens - n_computed, 6)),
                                    .params = sample_params(a)};
        sample_blocks(a, &news[i].blocks, 5, 7);
        news[i].n_encoder_tokens = sample_int(r, 0, 3);
        news[i].encoder_tokens = sample_ints(a, news[i].n_encoder_tokens, l->max_token_id);
        out->total_scheduled_tokens += news[i].n_scheduled_tokens;
    }
    cached_request_msg *cached = sample_alloc(a, (size_t)out->n_cached * sizeof *cached);
    bool has_drafts = sample_int(r, 0, 1) != 0;
    block_append_msg *appends = sample_alloc(a, (size_t)out->n_cached * sizeof *appends);
    for (int32_t i = 0; i < out->n_cached; i++) {
        int32_t n_drafts = sample_int(r, 0, 3);
        cached[i] = (cached_request_msg){.request_id = sample_u64(r),
                                         .n_computed_tokens = sample_int(r, 1, 80),
                                         .n_scheduled_tokens = n_drafts + sample_int(r, 1, 2),
                                         .n_draft_tokens = n_drafts,
                                         .first_draft_token = out->n_draft_tokens};
        if (has_drafts)
            out->n_draft_tokens += n_drafts;
        if (sample_int(r, 0, 1)) {
            appends[out->n_appends] = (block_append_msg){.request_id = cached[i].request_id};
            sample_blocks(a, &appends[out->n_appends++].blocks, 0, 2);
        }
        out->total_scheduled_tokens += cached[i].n_scheduled_tokens;
    }
    out->draft_tokens = sample_ints(a, out->n_draft_tokens, l->max_token_id);
    kv_transfer_msg *transfers = sample_alloc(a, 2 * sizeof *transfers);
    out->n_transfers = sample_int(r, 0, 2);
    for (int32_t i = 0; i < out->n_transfers; i++) {
        int32_t kind = sample_int(r, KV_TRANSFER_LOAD, KV_TRANSFER_FLUSH);
        int32_t n = kind == KV_TRANSFER_FLUSH ? 0 : sample_int(r, 1, 3);
        int32_t *device_blocks = sample_ints(a, n, l->max_block_id - 1);
        for (int32_t k = 0; k < n; k++)
            device_blocks[k]++;
        transfers[i] = (kv_transfer_msg){.job_id = sample_u64(r),
                                         .kind = (kv_transfer_kind)kind,
                                         .n_blocks = n,
                                         .device_blocks = device_blocks,
                                         .medium_blocks = sample_ints(a, n, INT32_MAX - 1),
                                         .tags = sample_ids(a, n)};
    }
    encoder_input_msg *inputs = sample_alloc(a, 2 * sizeof *inputs);
    out->n_encoder_inputs = sample_int(r, 0, 2);
    for (int32_t i = 0; i < out->n_encoder_inputs; i++)
        inputs[i] = (encoder_input_msg){sample_u64(r), sample_int(r, 0, 9), sample_int(r, 1, 40)};
    out->new_requests = news;
    out->cached_requests = cached;
    out->appends = appends;
    out->transfers = transfers;
    out->encoder_inputs = inputs;
    out->n_finished = sample_int(r, 0, 3);
    out->finished_ids = sample_ids(a, out->n_finished);
    out->n_preempted = sample_int(r, 0, 2);
    out->preempted_ids = sample_ids(a, out->n_preempted);
    out->n_blocks_to_zero = sample_int(r, 0, 5);
    out->blocks_to_zero = sample_ints(a, out->n_blocks_to_zero, l->max_block_id);
    for (int32_t g = 0; g < l->n_groups; g++)
        out->n_common_prefix_blocks[g] = sample_int(r, 0, 4);
    out->grammar_bitmask_bytes = (size_t)sample_int(r, 0, 1) * 13;
    out->grammar_bitmask = sample_ints(a, out->grammar_bitmask_bytes ? 4 : 0, INT32_MAX - 1);
}

static inline void sample_result(sample_arena *a, step_result *out)
{
    sample_rng *r = &a->rng;
    const wire_limits *l = &a->limits;
    *out = (step_result){.step_id = sample_u64(r),
                         .n_results = sample_int(r, 0, 8),
                         .forward_us = (uint32_t)sample_u64(r),
                         .total_us = (uint32_t)sample_u64(r),
                         .idle_us = (uint32_t)sample_u64(r)};
    request_result_msg *results = sample_alloc(a, (size_t)out->n_results * sizeof *results);
    token_logprob *logprobs = sample_alloc(a, (size_t)l->max_result_logprobs * sizeof *logprobs);
    for (int32_t i = 0; i < out->n_results; i++) {
        request_result_msg *q = &results[i];
        *q = (request_result_msg){.request_id = sample_u64(r),
                                  .request_epoch = (uint32_t)sample_u64(r)};
        if (sample_int(r, 0, 5) == 0) {
            q->error = (request_error)sample_int(r, 1, 2);
            continue;
        }
        q->n_tokens = sample_int(r, 1, 2);
        for (int32_t t = 0; t < q->n_tokens; t++)
            q->tokens[t] = sample_int(r, 0, l->max_token_id);
        q->n_drafts = sample_int(r, 0, 3);
        for (int32_t t = 0; t < q->n_drafts; t++)
            q->drafts[t] = sample_int(r, 0, l->max_token_id);
        q->first_logprob = out->n_logprobs;
        q->n_logprobs_per_token = sample_int(r, 0, 3);
        for (int32_t k = 0; k < q->n_logprobs_per_token * q->n_tokens; k++)
            logprobs[out->n_logprobs++] =
                (token_logprob){sample_int(r, 0, l->max_token_id), -sample_float(a, 0, 30)};
    }
    out->results = results;
    out->logprobs = logprobs;
    out->n_prompt_results = sample_int(r, 0, 4);
    prompt_result_msg *prompts = sample_alloc(a, (size_t)out->n_prompt_results * sizeof *prompts);
    token_logprob *scores = sample_alloc(a, (size_t)l->max_prompt_logprobs * sizeof *scores);
    for (int32_t i = 0; i < out->n_prompt_results; i++) {
        prompt_result_msg *p = &prompts[i];
        *p =
            (prompt_result_msg){.request_id = sample_u64(r),
                                .request_epoch = (uint32_t)sample_u64(r),
                                .first_token = sample_int(r, 1, 60),
                                .n_tokens = sample_int(r, 1, l->max_num_batched_tokens / 4),
                                .n_logprobs_per_token = sample_int(r, 1, l->max_logprobs_per_token),
                                .first_logprob = out->n_prompt_logprobs};
        for (int32_t k = 0; k < p->n_logprobs_per_token * p->n_tokens; k++)
            scores[out->n_prompt_logprobs++] =
                (token_logprob){sample_int(r, 0, l->max_token_id), -sample_float(a, 0, 30)};
    }
    out->prompt_results = prompts;
    out->prompt_logprobs = scores;
}

#endif
