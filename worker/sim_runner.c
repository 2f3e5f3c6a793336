/* Rows hold what new_request_msg said and the tokens drawn since; hashes[] is the running hash of
 * the row's own tokens, which the KV slots are held against.
 *
 *   tokens   t0 t1 t2 | t3 t4       n_tokens 5, n_computed 3: a step may compute up to 2 more
 *   hashes   h0 h1 h2 |             h[p] = mix(h[p-1], t[p]);
 *                                   slot(p) must hold h[p] for every p < n_computed
 *
 * With speculation the row makes drafts behind each of its samples: its own next tokens, spoilt here
 * and there, and as a draft model would, it leaves its traces in the slots behind the row's tokens.
 * A step then runs them behind the last token and keeps what draft_verify lets stand; slots of the
 * others are written again later.
 *
 * All rows write before any row reads, as in the model: a request may hit a block that another one
 * fills in the same step. Every position that attention reads is checked in debug builds; otherwise
 * one slot of each block, a different one each step. Groups share the pages, as layers do in the
 * model: what a slot holds is mixed with the group, so that a block in two groups is noticed.
 */
#include "worker/sim_runner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <sys/prctl.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/hash_map.h"
#include "common/mem.h"
#include "worker/sim_layers.h"
#include "worker/spec/draft_verify.h"

#define DEFAULT_BLOCKS 4096
#define SLICE_US       50000 /* longest sleep without progress */
#define MAX_STOP_IDS   4096
#define MAX_UNSEEN     3 /* steps before this one whose results the engine may not have seen */
#define DRAFT_TRACE    0xd4af7d4af7ull

typedef struct sim_row {
    uint64_t request_id;
    uint32_t request_epoch;
    int32_t n_prompt_tokens;
    int32_t n_tokens;
    int32_t n_computed_tokens;
    int32_t n_scheduled_tokens;     /* in the step at hand; drafts that there are not left out */
    int32_t n_asked_drafts;         /* by the engine, in this step */
    int32_t n_step_drafts;          /* as many as there are: behind the known tokens */
    int32_t n_rejected[MAX_UNSEEN]; /* drafts in the row's last steps, newest first */
    int32_t n_drafts;
    token_id drafts[PGD_MAX_DRAFT_TOKENS]; /* for the next step */
    int32_t batch_idx;                     /* where it is in batch, if it is there */
    bool is_failed;   /* answered with an error: a step sent before that was known may follow */
    token_id *tokens; /* [max_model_len + 1] */
    uint64_t *hashes; /* [max_model_len + 1] */
    sampling_params params; /* stop_ids point to stop_ids */
    token_id *stop_ids;     /* [MAX_STOP_IDS] */
    int32_t n_blocks[PGD_MAX_KV_GROUPS];
    int32_t n_null[PGD_MAX_KV_GROUPS];   /* leading null blocks */
    block_id *blocks[PGD_MAX_KV_GROUPS]; /* [max_blocks] */
} sim_row;

typedef struct sim_runner {
    step_runner base;
    load_msg load;
    int32_t vocab_size;
    int32_t n_kv_blocks;
    kv_layout layout;
    int32_t max_block_size;
    int32_t max_model_len;
    int32_t max_blocks;                         /* of a row in the group that needs most */
    token_id kill_token, nan_token, hang_token; /* -1 = none */
    sim_row *rows;                              /* [max_num_seqs] */
    int32_t *free_rows;                         /* stack */
    int32_t n_free_rows;
    hash_map *by_id;
    int32_t *batch; /* rows of the step at hand, in order */
    int32_t n_batch;
    size_t
        block_words; /* of slots: max_block_size; with an offload tier as many bytes as a block of
                           the layout has, so that they are moved */
    uint64_t *slots; /* [n_kv_blocks, block_words] */
    kv_transfer *transfer; /* NULL = no offload tier */
    request_result_msg *results;
    token_logprob *logprobs;
    prompt_result_msg *prompt_results;
    token_logprob *prompt_logprobs; /* [max_num_batched_tokens * (max_logprobs + 1)] */
} sim_runner;

static uint64_t mix(uint64_t h, uint64_t x)
{
    return hash_u64(h * 0x9e3779b97f4a7c15u + x + 1);
}

/* --- sampling --------------------------------------------------------------------------------- */

static token_id draw(uint64_t hash, int32_t output_pos, const sampling_params *p,
                     int32_t vocab_size)
{
    uint64_t x = mix(hash, (uint64_t)output_pos);
    if (p->temperature > 0)
        x = mix(mix(x, p->seed), (uint64_t)p->choice_idx);
    token_id token = (token_id)(x % (uint64_t)vocab_size);
    for (int32_t tries = 0; tries < p->n_stop_ids && output_pos < p->min_tokens; tries++) {
        bool is_stop = false;
        for (int32_t i = 0; i < p->n_stop_ids; i++)
            is_stop |= p->stop_ids[i] == token;
        if (!is_stop)
            break;
        token = (token + 1) % vocab_size;
    }
    return token;
}

token_id sim_runner_next_token(const token_id *tokens, int32_t n_tokens, int32_t n_prompt_tokens,
                               const sampling_params *params, int32_t vocab_size)
{
    uint64_t hash = 0;
    for (int32_t i = 0; i < n_tokens; i++)
        hash = mix(hash, (uint64_t)tokens[i]);
    return draw(hash, n_tokens - n_prompt_tokens, params, vocab_size);
}

/* Falling values that depend on rank only, best first: best, best + 1, ... around the vocabulary. */
static int32_t fill_logprobs(token_logprob *out, token_id token, token_id best, int32_t n_best,
                             int32_t vocab_size)
{
    int32_t rank = (token - best + vocab_size) % vocab_size;
    out[0] = (token_logprob){token, -0.25f - (float)rank};
    for (int32_t k = 0; k < n_best; k++)
        out[1 + k] =
            (token_logprob){(token_id)(((int64_t)best + k) % vocab_size), -0.25f - (float)k};
    return 1 + n_best;
}

/* --- rows ------------------------------------------------------------------------------------- */

static sim_row *find_row(sim_runner *s, uint64_t request_id)
{
    uintptr_t idx;
    return hash_map_get(s->by_id, request_id, &idx) ? &s->rows[idx] : NULL;
}

static pgd_err release_rows(sim_runner *s, const uint64_t *ids, int32_t n_ids, const char *what,
                            pgd_why *why)
{
    for (int32_t i = 0; i < n_ids; i++) {
        sim_row *row = find_row(s, ids[i]);
        if (row == NULL)
            return pgd_fail(why, PGD_EPROTO, "sim: %s request %llu: expected a row, got none", what,
                            (unsigned long long)ids[i]);
        s->free_rows[s->n_free_rows++] = (int32_t)(row - s->rows);
        (void)!hash_map_remove(s->by_id, ids[i]);
    }
    return PGD_OK;
}

static pgd_err append_block(sim_runner *s, sim_row *row, int32_t g, block_id id, pgd_why *why)
{
    const kv_group_layout *group = &s->layout.groups[g];
    bool has_window = group->kind != ATTENTION_FULL;
    bool is_null = has_window && id == 0 && row->n_null[g] == row->n_blocks[g];
    if (!is_null && (id < 1 || id >= s->n_kv_blocks))
        return pgd_fail(why, PGD_EPROTO,
                        "sim: request %llu: expected a block id 1..%d, got %d, at entry %d of "
                        "group %d",
                        (unsigned long long)row->request_id, s->n_kv_blocks - 1, id,
                        row->n_blocks[g], g);
    row->n_null[g] += is_null;
    row->blocks[g][row->n_blocks[g]++] = id;
    return PGD_OK;
}

static int32_t first_position(const sim_runner *s, const sim_row *row, int32_t g)
{
    const kv_group_layout *group = &s->layout.groups[g];
    return kv_layout_first_position(group->kind, group->window, row->n_computed_tokens);
}

/* The row's tables then hold what its scheduled tokens write and read. */
static pgd_err append_blocks(sim_runner *s, sim_row *row, const block_ids_msg *add,
                             int32_t n_context, pgd_why *why)
{
    for (int32_t g = 0; g < s->layout.n_groups; g++) {
        int32_t block_size = s->layout.groups[g].block_size;
        if (row->n_blocks[g] + add->n_blocks[g] > s->max_blocks)
            return pgd_fail(why, PGD_EPROTO,
                            "sim: request %llu: expected at most %d blocks, got %d and %d more",
                            (unsigned long long)row->request_id, s->max_blocks, row->n_blocks[g],
                            add->n_blocks[g]);
        for (int32_t i = 0; i < add->n_blocks[g]; i++)
            PGD_TRY(append_block(s, row, g, add->ids[g][i], why));
        if (!row->is_failed && ((int64_t)row->n_blocks[g] * block_size < n_context ||
                                row->n_null[g] * block_size > first_position(s, row, g)))
            return pgd_fail(why, PGD_EPROTO,
                            "sim: request %llu: expected blocks for positions %d to %d in group "
                            "%d, got %d blocks of %d, %d of them null",
                            (unsigned long long)row->request_id, first_position(s, row, g),
                            n_context - 1, g, row->n_blocks[g], block_size, row->n_null[g]);
    }
    return PGD_OK;
}

static void add_to_batch(sim_runner *s, sim_row *row)
{
    row->batch_idx = s->n_batch;
    s->batch[s->n_batch++] = (int32_t)(row - s->rows);
}

static pgd_err add_new(sim_runner *s, const new_request_msg *n, pgd_why *why)
{
    if (find_row(s, n->request_id) != NULL)
        return pgd_fail(why, PGD_EPROTO, "sim: new request %llu: it has a row already",
                        (unsigned long long)n->request_id);
    if (s->n_free_rows == 0)
        return pgd_fail(why, PGD_EPROTO, "sim: new request %llu: all %d rows are taken",
                        (unsigned long long)n->request_id, s->load.max_num_seqs);
    if (n->n_tokens > s->max_model_len || n->params.n_stop_ids > MAX_STOP_IDS)
        return pgd_fail(
            why, PGD_EPROTO,
            "sim: new request %llu: expected at most %d tokens and %d stop ids, got %d and %d",
            (unsigned long long)n->request_id, s->max_model_len, MAX_STOP_IDS, n->n_tokens,
            n->params.n_stop_ids);
    int32_t idx = s->free_rows[--s->n_free_rows];
    sim_row *row = &s->rows[idx];
    if (!hash_map_put(s->by_id, n->request_id, (uintptr_t)idx))
        return pgd_fail(why, PGD_ENOMEM, "sim: row map is full");
    row->request_id = n->request_id;
    row->request_epoch = n->request_epoch;
    row->n_prompt_tokens = n->n_prompt_tokens;
    row->n_tokens = n->n_tokens;
    row->n_computed_tokens = n->n_computed_tokens;
    row->n_scheduled_tokens = n->n_scheduled_tokens;
    row->n_asked_drafts = row->n_step_drafts = row->n_drafts = 0;
    memset(row->n_rejected, 0, sizeof row->n_rejected);
    row->is_failed = false;
    memcpy(row->tokens, n->tokens, (size_t)n->n_tokens * sizeof *row->tokens);
    uint64_t hash = 0;
    for (int32_t p = 0; p < n->n_tokens; p++)
        row->hashes[p] = hash = mix(hash, (uint64_t)n->tokens[p]);
    row->params = n->params;
    row->params.stop_ids = row->stop_ids;
    if (n->params.n_stop_ids > 0)
        memcpy(row->stop_ids, n->params.stop_ids,
               (size_t)n->params.n_stop_ids * sizeof *row->stop_ids);
    memset(row->n_blocks, 0, sizeof row->n_blocks);
    memset(row->n_null, 0, sizeof row->n_null);
    add_to_batch(s, row);
    return append_blocks(s, row, &n->blocks, n->n_computed_tokens + n->n_scheduled_tokens, why);
}

/* The engine counts drafts as accepted until it has seen the result. */
static bool is_at(const sim_row *row, int32_t n_computed)
{
    int32_t pos = row->n_computed_tokens;
    for (int32_t i = 0; i < MAX_UNSEEN && pos < n_computed; i++)
        pos += row->n_rejected[i];
    return pos == n_computed;
}

/* Puts the step's drafts behind the row's tokens: those given, or as many of the row's own as it asks
 * for. */
static pgd_err take_drafts(sim_runner *s, sim_row *row, const cached_request_msg *c,
                           const token_id *given, pgd_why *why)
{
    const token_id *drafts = given != NULL ? given : row->drafts;
    int32_t n_known = c->n_scheduled_tokens - c->n_draft_tokens;
    row->n_asked_drafts = row->n_step_drafts = c->n_draft_tokens;
    if (given == NULL)
        row->n_step_drafts = PGD_MIN(row->n_step_drafts, row->n_drafts);
    row->n_scheduled_tokens = n_known + row->n_step_drafts;
    row->n_drafts = 0;
    if (row->is_failed)
        return PGD_OK;
    if (row->n_computed_tokens + n_known > row->n_tokens ||
        (c->n_draft_tokens > 0 && row->n_computed_tokens + n_known != row->n_tokens) ||
        row->n_tokens + row->n_step_drafts > s->max_model_len)
        return pgd_fail(why, PGD_EPROTO,
                        "sim: request %llu: expected at most %d known tokens, drafts behind the "
                        "last, %d in all, got %d computed + %d scheduled, %d of them drafts",
                        (unsigned long long)c->request_id, row->n_tokens, s->max_model_len,
                        row->n_computed_tokens, c->n_scheduled_tokens, c->n_draft_tokens);
    for (int32_t i = 0; i < row->n_step_drafts; i++) {
        int32_t pos = row->n_tokens + i;
        row->tokens[pos] = drafts[i];
        row->hashes[pos] = mix(row->hashes[pos - 1], (uint64_t)drafts[i]);
    }
    return PGD_OK;
}

/* append: NULL = no new blocks. drafts: NULL = the row's own. */
static pgd_err update_cached(sim_runner *s, const cached_request_msg *c,
                             const block_ids_msg *append, const token_id *drafts, pgd_why *why)
{
    sim_row *row = find_row(s, c->request_id);
    if (row == NULL)
        return pgd_fail(why, PGD_EPROTO, "sim: request %llu: expected a row, got none",
                        (unsigned long long)c->request_id);
    if (row->batch_idx < s->n_batch && &s->rows[s->batch[row->batch_idx]] == row)
        return pgd_fail(why, PGD_EPROTO, "sim: request %llu: it is twice in the step",
                        (unsigned long long)c->request_id);
    if (!row->is_failed && !is_at(row, c->n_computed_tokens))
        return pgd_fail(why, PGD_EPROTO,
                        "sim: request %llu: expected %d computed tokens, and %d, %d and %d drafts "
                        "rejected since, got %d",
                        (unsigned long long)c->request_id, row->n_computed_tokens,
                        row->n_rejected[0], row->n_rejected[1], row->n_rejected[2],
                        c->n_computed_tokens);
    PGD_TRY(take_drafts(s, row, c, drafts, why));
    add_to_batch(s, row);
    static const block_ids_msg none = {.n_blocks = {0}};
    int32_t n_context = c->n_computed_tokens + c->n_scheduled_tokens + s->load.sim_draft_tokens;
    return append_blocks(s, row, append != NULL ? append : &none,
                         PGD_MIN(n_context, s->max_model_len), why);
}

/* --- KV cache --------------------------------------------------------------------------------- */

static uint64_t *slot_at(sim_runner *s, const sim_row *row, int32_t g, int32_t pos)
{
    int32_t block_size = s->layout.groups[g].block_size;
    size_t block = (size_t)row->blocks[g][pos / block_size];
    return &s->slots[block * s->block_words + (size_t)(pos % block_size)];
}

static void write_kv(sim_runner *s, const sim_row *row)
{
    int32_t end = row->n_computed_tokens + row->n_scheduled_tokens;
    for (int32_t g = 0; g < s->layout.n_groups && !row->is_failed; g++)
        for (int32_t p = row->n_computed_tokens; p < end; p++)
            *slot_at(s, row, g, p) = mix(row->hashes[p], (uint64_t)g);
}

static pgd_err check_kv(sim_runner *s, const sim_row *row, uint64_t step_id, pgd_why *why)
{
    int32_t end = row->n_computed_tokens + row->n_scheduled_tokens;
    for (int32_t g = 0; g < s->layout.n_groups && !row->is_failed; g++) {
        int32_t block_size = s->layout.groups[g].block_size;
        int32_t stride = PGD_DEBUG ? 1 : block_size;
        int32_t offset = PGD_DEBUG ? 0 : (int32_t)(step_id % (uint64_t)block_size);
        for (int32_t p = first_position(s, row, g) + offset; p < end; p += stride) {
            uint64_t got = *slot_at(s, row, g, p);
            if (got != mix(row->hashes[p], (uint64_t)g))
                return pgd_fail(why, PGD_EPROTO,
                                "sim: step %llu, request %llu: block %d (group %d) holds %s at "
                                "position %d of %d computed and "
                                "%d scheduled tokens",
                                (unsigned long long)step_id, (unsigned long long)row->request_id,
                                row->blocks[g][p / block_size], g,
                                got == 0 ? "nothing" : "other tokens", p, row->n_computed_tokens,
                                row->n_scheduled_tokens);
        }
    }
    return PGD_OK;
}

static void zero_blocks(sim_runner *s, const scheduler_output *in)
{
    for (int32_t i = 0; i < in->n_blocks_to_zero; i++)
        memset(&s->slots[(size_t)in->blocks_to_zero[i] * s->block_words], 0,
               s->block_words * sizeof *s->slots);
}

/* --- a step ----------------------------------------------------------------------------------- */

static void count_progress(sim_runner *s)
{
    __atomic_fetch_add(&s->base.progress, 1, __ATOMIC_RELAXED);
}

/* To a point in time, so that what the step did before does not make it longer. */
static void sleep_until(sim_runner *s, uint64_t end_us)
{
    for (uint64_t now = clock_now_us(); now < end_us; now = clock_now_us()) {
        uint64_t wake_us = PGD_MIN(end_us, now + SLICE_US);
        struct timespec ts = {.tv_sec = (time_t)(wake_us / 1000000),
                              .tv_nsec = (long)(wake_us % 1000000) * 1000};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL);
        count_progress(s);
    }
}

/* True when the row's answer is an error. Rejected drafts have no effect: end leaves them out. */
static bool apply_faults(sim_runner *s, const sim_row *row, int32_t end)
{
    bool is_nan = row->is_failed;
    for (int32_t p = row->n_computed_tokens; p < end && !row->is_failed; p++) {
        if (row->tokens[p] == s->kill_token) {
            fprintf(stderr, "sim: told to die by token %d\n", s->kill_token);
            abort();
        }
        while (row->tokens[p] == s->hang_token)
            nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
        is_nan |= row->tokens[p] == s->nan_token;
    }
    return is_nan;
}

/* The prompt's tokens that the rows of this step predict. */
static void score_prompt(sim_runner *s, const sim_row *row, step_result *out)
{
    int32_t n_per_token = row->params.n_prompt_logprobs_per_token;
    int32_t first = row->n_computed_tokens + 1;
    int32_t end = PGD_MIN(first + row->n_scheduled_tokens, row->n_prompt_tokens);
    if (n_per_token == 0 || first >= end)
        return;
    s->prompt_results[out->n_prompt_results++] =
        (prompt_result_msg){.request_id = row->request_id,
                            .request_epoch = row->request_epoch,
                            .first_token = first,
                            .n_tokens = end - first,
                            .n_logprobs_per_token = n_per_token,
                            .first_logprob = out->n_prompt_logprobs};
    for (int32_t p = first; p < end; p++) {
        token_id best = (token_id)(mix(row->hashes[p - 1], 0) % (uint64_t)s->vocab_size);
        out->n_prompt_logprobs +=
            fill_logprobs(&s->prompt_logprobs[out->n_prompt_logprobs], row->tokens[p], best,
                          n_per_token - 1, s->vocab_size);
    }
}

/* Tokens that the row draws, at most n_step_drafts + 1; 0 while it is inside its prompt. */
static int32_t sample_row(sim_runner *s, const sim_row *row, token_id *tokens)
{
    if (row->n_computed_tokens + row->n_scheduled_tokens < row->n_tokens)
        return 0;
    for (int32_t i = 0; i <= row->n_step_drafts; i++)
        tokens[i] = draw(row->hashes[row->n_tokens - 1 + i],
                         row->n_tokens - row->n_prompt_tokens + i, &row->params, s->vocab_size);
    return draft_verify(tokens, row->tokens + row->n_tokens, tokens, row->n_step_drafts);
}

/* Known tokens and accepted drafts are computed now; the last token drawn is not. */
static void keep_tokens(sim_row *row, const token_id *tokens, int32_t n_tokens)
{
    memmove(row->n_rejected + 1, row->n_rejected, sizeof row->n_rejected - sizeof *row->n_rejected);
    row->n_rejected[0] = 0;
    row->n_computed_tokens += row->n_scheduled_tokens;
    if (n_tokens == 0)
        return;
    for (int32_t i = 0; i < n_tokens; i++, row->n_tokens++) {
        row->tokens[row->n_tokens] = tokens[i];
        row->hashes[row->n_tokens] = mix(row->hashes[row->n_tokens - 1], (uint64_t)tokens[i]);
    }
    row->n_rejected[0] = row->n_asked_drafts - (n_tokens - 1);
    row->n_computed_tokens = row->n_tokens - 1;
}

/* Most often the most there may be, now and then fewer, as an n-gram search finds them. */
static int32_t choose_n_drafts(const sim_runner *s, const sim_row *row, uint64_t x)
{
    int32_t n = s->load.sim_draft_tokens;
    if (x % 8 == 0)
        n = (int32_t)(x / 8 % (uint64_t)(n + 1));
    return PGD_MAX(PGD_MIN(n, s->max_model_len - row->n_tokens), 0);
}

/* A draft model's KV lies behind the row's tokens, where the engine has left room (SD1); a row that
 * is new has none yet. */
static void leave_traces(sim_runner *s, const sim_row *row)
{
    for (int32_t g = 0; g < s->layout.n_groups; g++) {
        int32_t end = PGD_MIN(row->n_tokens - 1 + s->load.sim_draft_tokens,
                              row->n_blocks[g] * s->layout.groups[g].block_size);
        for (int32_t p = row->n_tokens - 1; p < PGD_MIN(end, s->max_model_len); p++)
            *slot_at(s, row, g, p) = DRAFT_TRACE;
    }
}

/* One draft in a hundred is spoilt for each percent that sim_draft_accept lacks. */
static void make_drafts(sim_runner *s, sim_row *row, request_result_msg *r)
{
    uint64_t hash = row->hashes[row->n_tokens - 1];
    if (s->load.sim_draft_tokens == 0)
        return;
    row->n_drafts = r->n_drafts = choose_n_drafts(s, row, mix(hash, DRAFT_TRACE));
    for (int32_t i = 0; i < row->n_drafts; i++) {
        token_id token =
            draw(hash, row->n_tokens - row->n_prompt_tokens + i, &row->params, s->vocab_size);
        bool is_right = mix(hash, DRAFT_TRACE + 1) % 100 < (uint64_t)s->load.sim_draft_accept;
        row->drafts[i] = r->drafts[i] = is_right ? token : (token + 1) % s->vocab_size;
        hash = mix(hash, (uint64_t)token);
    }
    leave_traces(s, row);
}

static void finish_row(sim_runner *s, sim_row *row, step_result *out)
{
    token_id tokens[PGD_MAX_DRAFT_TOKENS + 1];
    int32_t n_tokens = row->is_failed ? 0 : sample_row(s, row, tokens);
    int32_t end = n_tokens > 0 ? row->n_tokens + n_tokens - 1
                               : row->n_computed_tokens + row->n_scheduled_tokens;
    bool is_nan = apply_faults(s, row, end);
    request_result_msg *r = &s->results[out->n_results];
    if (!is_nan) {
        score_prompt(s, row, out);
        keep_tokens(row, tokens, n_tokens);
    }
    if (n_tokens == 0 && !is_nan)
        return; /* still inside its prompt */
    *r = (request_result_msg){.request_id = row->request_id, .request_epoch = row->request_epoch};
    out->n_results++;
    if (is_nan) {
        row->is_failed = true;
        r->error = REQUEST_ERROR_NAN_LOGITS;
        return;
    }
    r->n_tokens = n_tokens;
    r->first_logprob = out->n_logprobs;
    for (int32_t i = 0; i < n_tokens; i++) {
        r->tokens[i] = tokens[i];
        if (row->params.n_logprobs < 0)
            continue;
        r->n_logprobs_per_token = fill_logprobs(&s->logprobs[out->n_logprobs], tokens[i], tokens[i],
                                                row->params.n_logprobs, s->vocab_size);
        out->n_logprobs += r->n_logprobs_per_token;
    }
    make_drafts(s, row, r);
}

static pgd_err sim_step(step_runner *base, const scheduler_output *in, step_result *out,
                        pgd_why *why)
{
    sim_runner *s = (sim_runner *)(void *)base;
    uint64_t start_us = clock_now_us();
    *out = (step_result){.step_id = in->step_id,
                         .results = s->results,
                         .logprobs = s->logprobs,
                         .prompt_results = s->prompt_results,
                         .prompt_logprobs = s->prompt_logprobs};
    s->n_batch = 0;
    PGD_TRY(kv_transfer_begin_step(s->transfer, in, why));
    PGD_TRY(release_rows(s, in->finished_ids, in->n_finished, "finished", why));
    PGD_TRY(release_rows(s, in->preempted_ids, in->n_preempted, "preempted", why));
    for (int32_t i = 0; i < in->n_new; i++)
        PGD_TRY(add_new(s, &in->new_requests[i], why));
    int32_t n_appended = 0;
    for (int32_t i = 0; i < in->n_cached; i++) {
        const cached_request_msg *c = &in->cached_requests[i];
        const block_ids_msg *append = scheduler_output_next_append(in, &n_appended, c->request_id);
        PGD_TRY(update_cached(s, c, append, scheduler_output_drafts(in, c), why));
    }
    zero_blocks(s, in);
    for (int32_t i = 0; i < s->n_batch; i++)
        write_kv(s, &s->rows[s->batch[i]]);
    for (int32_t i = 0; i < s->n_batch; i++)
        PGD_TRY(check_kv(s, &s->rows[s->batch[i]], in->step_id, why));
    if (s->n_batch > 0)
        sleep_until(s, start_us + s->load.sim_step_us +
                           (uint64_t)s->load.sim_token_us * (uint64_t)in->total_scheduled_tokens);
    for (int32_t i = 0; i < s->n_batch; i++)
        finish_row(s, &s->rows[s->batch[i]], out);
    count_progress(s);
    out->forward_us = (uint32_t)PGD_MIN(clock_now_us() - start_us, UINT32_MAX);
    return PGD_OK;
}

/* --- life ------------------------------------------------------------------------------------- */

static void sim_describe(step_runner *base, hello_msg *hello)
{
    (void)base;
    snprintf(hello->device_name, sizeof hello->device_name, "simulated");
    hello->memory_total_bytes = 64ull << 30;
    hello->memory_free_bytes = 64ull << 30;
}

static pgd_err sim_load(step_runner *base, const load_msg *msg, load_done_msg *done,
                        step_runner_progress_fn progress, void *arg, pgd_why *why)
{
    sim_runner *s = (sim_runner *)(void *)base;
    if (msg->sim_vocab_size < 1)
        return pgd_fail(why, PGD_EPROTO, "sim: expected sim_vocab_size >= 1, got %d",
                        msg->sim_vocab_size);
    s->load = *msg; /* the drafts' limits were checked when it was decoded */
    s->vocab_size = msg->sim_vocab_size;
    *done = (load_done_msg){.vocab_size = msg->sim_vocab_size, .numerics = "sim"};
    PGD_TRY(sim_layers_parse(done->kv_layers, &done->n_kv_layers, msg->sim_kv_layers, why));
    /* A quarter of it makes DEFAULT_BLOCKS of one layer. */
    done->memory_free_bytes =
        4ull * DEFAULT_BLOCKS * (uint64_t)msg->block_size * SIM_LAYERS_TOKEN_BYTES;
    progress(arg, 1, 1);
    return PGD_OK;
}

static pgd_err alloc_rows(sim_runner *s, pgd_why *why)
{
    int32_t n_rows = s->load.max_num_seqs;
    size_t n_tokens = (size_t)s->max_model_len + 1;
    s->rows = mem_calloc((size_t)n_rows, sizeof *s->rows);
    s->free_rows = mem_calloc((size_t)n_rows, sizeof *s->free_rows);
    s->batch = mem_calloc((size_t)n_rows, sizeof *s->batch);
    s->results = mem_calloc((size_t)n_rows, sizeof *s->results);
    s->logprobs =
        mem_calloc((size_t)n_rows * (PGD_MAX_DRAFT_TOKENS + 1) * (size_t)(s->load.max_logprobs + 1),
                   sizeof *s->logprobs);
    s->prompt_results = mem_calloc((size_t)n_rows, sizeof *s->prompt_results);
    s->prompt_logprobs =
        mem_calloc((size_t)s->load.max_num_batched_tokens * (size_t)(s->load.max_logprobs + 1),
                   sizeof *s->prompt_logprobs);
    s->slots = mem_calloc((size_t)s->n_kv_blocks, s->block_words * sizeof *s->slots);
    bool ok = s->rows != NULL && s->free_rows != NULL && s->batch != NULL && s->results != NULL &&
              s->logprobs != NULL && s->prompt_results != NULL && s->prompt_logprobs != NULL &&
              s->slots != NULL && hash_map_create(&s->by_id, (size_t)n_rows) == PGD_OK;
    for (int32_t i = 0; ok && i < n_rows; i++) {
        sim_row *row = &s->rows[i];
        s->free_rows[s->n_free_rows++] = n_rows - 1 - i;
        row->tokens = mem_calloc(n_tokens, sizeof *row->tokens);
        row->hashes = mem_calloc(n_tokens, sizeof *row->hashes);
        row->stop_ids = mem_calloc(MAX_STOP_IDS, sizeof *row->stop_ids);
        ok = row->tokens != NULL && row->hashes != NULL && row->stop_ids != NULL;
        for (int32_t g = 0; ok && g < s->layout.n_groups; g++) {
            row->blocks[g] = mem_calloc((size_t)s->max_blocks, sizeof *row->blocks[g]);
            ok = row->blocks[g] != NULL;
        }
    }
    return ok ? PGD_OK
              : pgd_fail(why, PGD_ENOMEM, "sim: out of memory for %d rows and %d blocks", n_rows,
                         s->n_kv_blocks);
}

static pgd_err sim_init_kv(step_runner *base, const kv_config_msg *msg, kv_ready_msg *ready,
                           pgd_why *why)
{
    sim_runner *s = (sim_runner *)(void *)base;
    s->n_kv_blocks = msg->n_blocks;
    s->layout = msg->layout;
    s->max_model_len = msg->max_model_len;
    int32_t min_block_size = msg->layout.groups[0].block_size;
    for (int32_t g = 0; g < msg->layout.n_groups; g++) {
        s->max_block_size = PGD_MAX(s->max_block_size, msg->layout.groups[g].block_size);
        min_block_size = PGD_MIN(min_block_size, msg->layout.groups[g].block_size);
    }
    s->max_blocks = (s->max_model_len - 1) / min_block_size + 2;
    uint64_t block_bytes = kv_layout_block_bytes(&msg->layout);
    ready->kv_bytes = (uint64_t)msg->n_blocks * block_bytes;
    s->block_words = msg->offload_path[0] != 0 ? (size_t)(block_bytes / sizeof *s->slots)
                                               : (size_t)s->max_block_size;
    PGD_ASSERT(s->block_words >= (size_t)s->max_block_size);
    PGD_TRY(alloc_rows(s, why));
    kv_transfer_slot slot = {(uint8_t *)s->slots, s->block_words * sizeof *s->slots};
    kv_transfer_opts opts = {.device = copy_device_get_cpu(),
                             .slots = &slot,
                             .n_slots = 1,
                             .config = msg,
                             .rank = s->base.rank,
                             .progress = &s->base.progress,
                             .on_done = s->base.on_transfer,
                             .arg = s->base.on_transfer_arg};
    return kv_transfer_create(&s->transfer, &opts, why);
}

static void sim_stop(step_runner *base)
{
    kv_transfer_stop(((sim_runner *)(void *)base)->transfer);
}

static void sim_destroy(step_runner *base)
{
    sim_runner *s = (sim_runner *)(void *)base;
    kv_transfer_destroy(s->transfer);
    for (int32_t i = 0; s->rows != NULL && i < s->load.max_num_seqs; i++) {
        mem_free(s->rows[i].tokens);
        mem_free(s->rows[i].hashes);
        mem_free(s->rows[i].stop_ids);
        for (int32_t g = 0; g < PGD_MAX_KV_GROUPS; g++)
            mem_free(s->rows[i].blocks[g]);
    }
    mem_free(s->rows);
    mem_free(s->free_rows);
    mem_free(s->batch);
    mem_free(s->results);
    mem_free(s->logprobs);
    mem_free(s->prompt_results);
    mem_free(s->prompt_logprobs);
    mem_free(s->slots);
    hash_map_destroy(s->by_id);
    mem_free(s);
}

static const step_runner_vtbl VTBL = {
    .describe = sim_describe,
    .load = sim_load,
    .init_kv = sim_init_kv,
    .step = sim_step,
    .stop = sim_stop,
    .destroy = sim_destroy,
};

static pgd_err parse_faults(sim_runner *s, const char *text, pgd_why *why)
{
    s->kill_token = s->nan_token = s->hang_token = -1;
    while (text != NULL && *text != 0) {
        char name[8];
        int token;
        int used = 0;
        if (sscanf(text, "%7[a-z]:%d%n", name, &token, &used) < 2 ||
            (text[used] != 0 && text[used] != ','))
            return pgd_fail(why, PGD_EINVAL,
                            "PAGED_SIM_FAULTS: expected kill:T, nan:T or hang:T, got %s", text);
        if (strcmp(name, "kill") == 0)
            s->kill_token = token;
        else if (strcmp(name, "nan") == 0)
            s->nan_token = token;
        else if (strcmp(name, "hang") == 0)
            s->hang_token = token;
        else
            return pgd_fail(why, PGD_EINVAL, "PAGED_SIM_FAULTS: expected kill, nan or hang, got %s",
                            name);
        text += used + (text[used] == ',');
    }
    return PGD_OK;
}

pgd_err sim_runner_create(step_runner **out, pgd_why *why)
{
    sim_runner *s = mem_calloc(1, sizeof *s);
    if (s == NULL)
        return pgd_fail(why, PGD_ENOMEM, "sim: out of memory");
    s->base.vtbl = &VTBL;
    (void)prctl(PR_SET_TIMERSLACK, 1); /* of 50 us by default: much, for a step of 1 ms */
    pgd_err err = parse_faults(s, getenv("PAGED_SIM_FAULTS"), why);
    if (err != PGD_OK) {
        mem_free(s);
        return err;
    }
    *out = &s->base;
    return PGD_OK;
}
