/* Pools are small, from barely one longest request to four of them, so that preemption, eviction and
 * refused admissions are the rule. Prompts share the beginnings of a few documents. */
#include "tests/sim/sim_gen.h"

#include <string.h>

#include "common/hash.h"
#include "engine/core/scheduler.h"
#include "tests/sim/sim_oracle.h"

#define N_TURNS     400
#define N_DOCUMENTS 4

typedef enum model {
    MODEL_FULL,
    MODEL_SLIDING,
    MODEL_FULL_SLIDING,
    MODEL_FULL_TWO_SLIDING, /* of unequal block sizes */
    MODEL_FULL_CHUNKED,
    MODEL_MIXED, /* of three kinds */
    MODEL_CROSS, /* encoder-decoder */
    N_MODELS
} model;

static const char *const model_names[N_MODELS] = {
    "unitary", "sliding", "full+sliding", "full+two-sliding", "full+chunked", "mixed", "cross"};

/* The first configurations have no tiers, those behind them do. */
#define N_PLAIN   (N_MODELS * 16)
#define N_OFFLOAD (N_MODELS * 8)

typedef struct shape {
    model model;
    bool is_offload;
    bool uses_arc;
    bool has_disk;
    bool has_cache;
    bool has_drafts;
    bool has_priority;
    bool is_deep;
} shape;

static uint64_t rng_state;
static bool is_overload;

static int32_t rnd(int32_t n)
{
    rng_state = hash_u64(rng_state + 0x9e3779b97f4a7c15ull);
    return (int32_t)((rng_state >> 11) % (uint64_t)n);
}

static bool chance(int32_t percent)
{
    return rnd(100) < percent;
}

int32_t sim_gen_n_configs(void)
{
    return N_PLAIN + N_OFFLOAD;
}

int32_t sim_gen_first_offload(void)
{
    return N_PLAIN;
}

static shape shape_of(int32_t config_idx)
{
    int32_t k = config_idx - N_PLAIN;
    if (k >= 0)
        return (shape){.model = (model)(k / 8),
                       .is_offload = true,
                       .has_cache = true,
                       .uses_arc = (k & 1) != 0,
                       .has_disk = (k & 2) != 0,
                       .is_deep = (k & 4) != 0};
    return (shape){.model = (model)(config_idx / 16),
                   .has_cache = (config_idx & 1) != 0,
                   .has_drafts = (config_idx & 2) != 0,
                   .has_priority = (config_idx & 4) != 0,
                   .is_deep = (config_idx & 8) != 0};
}

const char *sim_gen_name(int32_t config_idx)
{
    static char name[64];
    shape f = shape_of(config_idx);
    if (f.is_offload)
        snprintf(name, sizeof name, "offload/%s/%s/%s/%s", model_names[f.model],
                 f.uses_arc ? "arc" : "lru", f.has_disk ? "disk" : "no-disk",
                 f.is_deep ? "depth2" : "depth1");
    else
        snprintf(name, sizeof name, "%s/%s/%s/%s/%s", model_names[f.model],
                 f.has_cache ? "cache" : "no-cache", f.has_drafts ? "drafts" : "no-drafts",
                 f.has_priority ? "priority" : "fcfs", f.is_deep ? "depth2" : "depth1");
    return name;
}

static void add_group(sim_config *c, attention_kind kind, int32_t n_hash_blocks, int32_t window)
{
    c->groups[c->n_groups++] = (sim_group){.kind = kind,
                                           .block_size = c->block_size * n_hash_blocks,
                                           .window = window,
                                           .zero_new_blocks = chance(20)};
}

static void draw_groups(sim_config *c, const shape *f)
{
    static const int32_t block_sizes[] = {1, 2, 4, 8, 16};
    c->block_size = block_sizes[rnd(5)];
    int32_t bs = c->block_size;
    switch (f->model) {
    case MODEL_FULL:
        add_group(c, ATTENTION_FULL, 1, 0);
        break;
    case MODEL_SLIDING:
        add_group(c, ATTENTION_SLIDING, 1, 1 + rnd(40));
        break;
    case MODEL_FULL_SLIDING:
        add_group(c, ATTENTION_FULL, 1, 0);
        add_group(c, ATTENTION_SLIDING, 1, 1 + rnd(40));
        break;
    case MODEL_FULL_TWO_SLIDING:
        add_group(c, ATTENTION_SLIDING, 1 + rnd(3), 1 + rnd(40));
        add_group(c, ATTENTION_FULL, 1 + rnd(2), 0);
        add_group(c, ATTENTION_SLIDING, 1 + rnd(3), 1 + rnd(40));
        if (c->groups[0].block_size == c->groups[2].block_size)
            c->groups[2].block_size += bs;
        break;
    case MODEL_FULL_CHUNKED:
        add_group(c, ATTENTION_FULL, 1, 0);
        add_group(c, ATTENTION_CHUNKED, 1, chance(50) ? bs * (1 + rnd(4)) : 1 + rnd(40));
        break;
    case MODEL_MIXED:
        add_group(c, ATTENTION_CHUNKED, 1 + rnd(2), 1 + rnd(40));
        add_group(c, ATTENTION_SLIDING, 1 + rnd(2), 1 + rnd(40));
        add_group(c, ATTENTION_FULL, 1 + rnd(2), 0);
        c->groups[c->n_groups] = c->groups[1];
        if (chance(50))
            c->groups[c->n_groups].window = 1 + rnd(40);
        c->n_groups += chance(60);
        break;
    case MODEL_CROSS:
        add_group(c, ATTENTION_FULL, 1, 0);
        add_group(c, ATTENTION_CROSS, 1 + rnd(2), 1 + rnd(SIM_MAX_ENCODER - 1));
        break;
    case N_MODELS:
        break;
    }
    c->use_eagle = f->has_drafts && chance(30);
    for (int32_t g = 0; g < c->n_groups && c->use_eagle; g++)
        c->groups[g].is_eagle = chance(30);
}

/* The smallest pool in which the longest request can run, and up to three times that more. */
static void draw_pool(sim_config *c)
{
    int32_t n_encoder = sim_max_encoder(c);
    c->n_blocks = 2;
    while (!sim_oracle_fits(c, c->max_model_len, n_encoder))
        c->n_blocks++;
    c->n_blocks += is_overload ? rnd(3) : rnd(3 * c->n_blocks);
}

/* Tiers of a block or two, of less than the pool, and of more than all documents take. */
static int32_t draw_tier_blocks(const sim_config *c)
{
    if (chance(is_overload ? 50 : 25))
        return 1 + rnd(is_overload ? 6 : 3);
    return chance(60) ? 1 + rnd(c->n_blocks) : 1 + rnd(8 * c->n_blocks);
}

static void draw_tier(sim_config *c, const shape *f)
{
    if (!f->is_offload)
        return;
    c->tier_uses_arc = f->uses_arc;
    c->n_tier_blocks = draw_tier_blocks(c);
    c->n_disk_blocks = f->has_disk ? draw_tier_blocks(c) : 0;
    c->tier_threshold = chance(10) ? 1 + rnd(3) : 0;
    c->tier_step_blocks = chance(20) ? 1 + rnd(12) : 0;
    c->n_ranks = 1 + chance(30);
    c->tier_seed = rnd(1 << 20);
    c->tier_delay = chance(70) ? rnd(20) : rnd(100);
    c->tier_faults = chance(40) ? rnd(30) : 0;
}

static void draw_config(sim_config *c, int32_t config_idx)
{
    shape f = shape_of(config_idx);
    memset(c, 0, sizeof *c);
    if (f.is_offload) {
        f.has_drafts = chance(30);
        f.has_priority = chance(30);
    }
    snprintf(c->name, sizeof c->name, "%s", sim_gen_name(config_idx));
    draw_groups(c, &f);
    c->max_model_len = 24 + rnd(SIM_MAX_LEN - 24);
    c->max_num_seqs = 1 + rnd(SIM_MAX_SEQS);
    c->max_num_batched_tokens = 8 + rnd(SIM_MAX_BATCH - 8);
    c->long_prefill_token_threshold = chance(30) ? 1 + rnd(20) : 0;
    c->max_queued_requests = 8 + rnd(32);
    if (f.model == MODEL_CROSS && chance(60))
        c->max_encoder_tokens = sim_max_encoder(c) + rnd(SIM_MAX_ENCODER);
    c->policy = f.has_priority ? SCHEDULER_PRIORITY : SCHEDULER_FCFS;
    c->enable_prefix_caching = f.has_cache;
    c->depth = f.is_deep ? 2 + chance(30) : 1;
    c->is_async = f.is_deep ? chance(75) : chance(25);
    c->max_drafts = f.has_drafts ? 1 + rnd(5) : 0;
    c->n_right_in_4 = rnd(5);
    c->num_lookahead_tokens = f.has_drafts && chance(30) ? rnd(4) : 0;
    c->watermark_percent = chance(20) ? 10 : 0;
    c->check_every = 1;
    c->is_cut = chance(5);
    c->n_ranks = 1;
    c->enable_chunked_prefill = 1;
    draw_pool(c);
    draw_tier(c, &f);
    c->enable_chunked_prefill = chance(80);
    c->admit_partly = chance(15);
}

static void draw_request(sim_request *q, const sim_config *c, int32_t id)
{
    q->id = id;
    q->salt = chance(20) ? 1 + rnd(2) : 0;
    int32_t max_prompt = chance(70) ? 40 : SIM_MAX_LEN;
    q->n_prompt = 1 + rnd(PGD_MIN(c->max_model_len - 1, max_prompt));
    q->document = rnd(N_DOCUMENTS);
    q->n_common = chance(80) ? 1 + rnd(q->n_prompt) : 0;
    q->max_tokens = 1 + rnd(chance(50) ? 6 : 60);
    q->priority = rnd(3);
    q->ignore_eos = chance(50);
    q->skip_lookup = chance(5);
    q->n_encoder = sim_max_encoder(c) > 0 && chance(90) ? 1 + rnd(sim_max_encoder(c)) : 0;
    q->n_encoder += chance(1) ? SIM_MAX_ENCODER - q->n_encoder : 0;
    q->n_scores = chance(20) ? 1 + rnd(SIM_MAX_SCORES) : 0;
}

/* A poison hunt: for a few steps only some requests may run. */
static void draw_hunt(sim_trace *t, int32_t n_requests)
{
    int32_t only[SIM_MAX_ONLY];
    int32_t n_only = rnd(SIM_MAX_ONLY + 1);
    for (int32_t k = 0; k < n_only; k++)
        only[k] = n_requests > 0 ? n_requests - 1 - rnd(PGD_MIN(n_requests, 40)) : 0;
    for (int32_t i = 0; i < 6; i++) {
        sim_op *op = sim_trace_add(t, SIM_OP_STEP);
        if (op == NULL)
            return;
        op->n_only = n_only;
        memcpy(op->only, only, sizeof only);
        if (chance(60))
            sim_trace_add(t, SIM_OP_ANSWER);
    }
}

/* The request is aborted with a step out, and one with the same prompt comes. */
static void draw_heir(sim_trace *t, sim_op *first, int32_t id)
{
    first->request.n_common = first->request.n_prompt;
    sim_trace_add(t, SIM_OP_STEP);
    sim_op *op = sim_trace_add(t, SIM_OP_ABORT);
    if (op != NULL)
        op->arg = first->request.id;
    op = sim_trace_add(t, SIM_OP_ADD);
    if (op == NULL)
        return;
    op->request = first->request;
    op->request.id = id;
    op->request.error_at = 0;
}

static void draw_trace(sim_trace *t, int32_t config_idx, uint64_t seed)
{
    rng_state = hash_u64(seed) ^ hash_u64((uint64_t)config_idx + 1000);
    t->n_ops = 0;
    draw_config(&t->config, config_idx);
    bool has_errors = chance(20);
    int32_t n_requests = 0;
    sim_request failed; /* some turns later one with the same prompt comes */
    int32_t echo_turn = -1;
    for (int32_t turn = 0; turn < N_TURNS; turn++) {
        sim_op *op;
        if (chance(is_overload ? 50 : 25) && n_requests < SIM_MAX_REQUESTS &&
            (op = sim_trace_add(t, SIM_OP_ADD)) != NULL) {
            draw_request(&op->request, &t->config, n_requests++);
            if (has_errors && chance(15))
                op->request.error_at = 1 + rnd(op->request.n_prompt + 8);
            if (op->request.error_at > 0 && t->config.n_tier_blocks > 0) {
                op->request.n_common = op->request.n_prompt;
                failed = op->request;
                echo_turn = turn + 5 + rnd(40);
            } else if (op->request.error_at > 0 && chance(30) && n_requests < SIM_MAX_REQUESTS) {
                draw_heir(t, op, n_requests++);
            }
        }
        if (turn == echo_turn && n_requests < SIM_MAX_REQUESTS &&
            (op = sim_trace_add(t, SIM_OP_ADD)) != NULL) {
            op->request = failed;
            op->request.id = n_requests++;
            op->request.error_at = 0;
        }
        if (chance(has_errors ? 10 : 3) && n_requests > 0 &&
            (op = sim_trace_add(t, SIM_OP_ABORT)) != NULL)
            op->arg = n_requests - 1 - rnd(PGD_MIN(n_requests, 40));
        if (rnd(1000) < 3 && (op = sim_trace_add(t, SIM_OP_KILL)) != NULL)
            op->arg = chance(20);
        if (rnd(1000) < 5)
            draw_hunt(t, n_requests);
        if (rnd(1000) < 5)
            sim_trace_add(t, SIM_OP_CLEAR);
        if (chance(85))
            sim_trace_add(t, SIM_OP_STEP);
        if (chance(80) && (op = sim_trace_add(t, SIM_OP_ANSWER)) != NULL)
            op->arg = chance(10) ? 1 + rnd(1000) : 0;
    }
}

void sim_gen_draw(sim_trace *t, int32_t config_idx, uint64_t seed)
{
    is_overload = false;
    draw_trace(t, config_idx, seed);
}

void sim_gen_draw_overload(sim_trace *t, int32_t config_idx, uint64_t seed)
{
    is_overload = true;
    draw_trace(t, config_idx, seed);
}
