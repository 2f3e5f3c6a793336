/* A worker without a model, for scheduler tests: it keeps rows and block tables from the messages
 * alone, and a shadow of the KV memory.
 *
 * The shadow holds, for every (block, offset), a hash of the whole token history up to that
 * position. Each step first writes all its positions, then checks that every position that its rows
 * attend to holds exactly their own history. So a wrong prefix hit, a block that is reused too
 * early, one that was published but never written, or a wrong table is noticed at once. The next
 * token is a function of the history, so a request's whole output is known beforehand.
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_WORKER_H
#define TESTS_SIM_SIM_WORKER_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "proto/scheduler_output.h"
#include "proto/step_result.h"

#define SIM_MAX_SEQS   16
#define SIM_MAX_LEN    160
#define SIM_MAX_BLOCKS 160 /* of one row */
#define SIM_VOCAB      40
#define SIM_EOS        1
#define SIM_MAX_BATCH  128
#define SIM_MAX_SCORES 3 /* prompt logprobs per token */

/* History hash of the empty prompt; the salt is part of it, as it is of the block hashes. */
static inline uint64_t sim_chain_start(uint64_t salt)
{
    return hash_u64(salt + 0x51ab);
}

static inline uint64_t sim_chain_next(uint64_t chain, token_id token)
{
    return hash_u64(chain * 31 + (uint64_t)token + 1);
}

static inline token_id sim_sample(uint64_t chain)
{
    return (token_id)(hash_u64(chain ^ 0x7777) % SIM_VOCAB);
}

/* Of the token that follows this history, entry k. */
static inline token_logprob sim_score(uint64_t chain, token_id token, int32_t k)
{
    return (token_logprob){k == 0 ? token : k, -(float)(hash_u64(chain + (uint64_t)k) % 1000)};
}

typedef struct sim_row {
    bool is_used;
    uint64_t id;
    uint32_t epoch;
    uint64_t salt;
    int32_t n_prompt;
    int32_t n_scores; /* entries per prompt token, 0 = none wanted */
    int32_t n_tokens;
    int32_t n_computed;
    token_id tokens[SIM_MAX_LEN + PGD_MAX_DRAFT_TOKENS + 1];
    int32_t n_blocks;
    block_id table[SIM_MAX_BLOCKS];
} sim_row;

typedef struct sim_share {
    uint64_t id;
    bool is_new;
    uint32_t epoch;
    uint64_t salt;
    int32_t n_known; /* new: tokens */
    int32_t n_prompt;
    int32_t n_scores;
    token_id tokens[SIM_MAX_LEN];
    int32_t n_computed;
    int32_t n_scheduled;
    int32_t n_drafts;
    token_id drafts[PGD_MAX_DRAFT_TOKENS];
    int32_t n_blocks;
    block_id blocks[SIM_MAX_BLOCKS];
} sim_share;

/* A message, copied in full: the engine's arrays are only valid until its next call. */
typedef struct sim_step {
    uint64_t step_id;
    int32_t n_gone;
    uint64_t gone[2 * SIM_MAX_SEQS];
    int32_t n_shares;
    sim_share shares[SIM_MAX_SEQS];
} sim_step;

typedef struct sim_worker {
    int32_t max_num_seqs;
    int32_t n_blocks;
    int32_t block_size;
    sim_row rows[SIM_MAX_SEQS];
    uint64_t *shadow;     /* [n_blocks * block_size] */
    uint64_t *written_in; /* [n_blocks * block_size], step id */
    uint64_t n_hit_positions;
    /* Proposes drafts and injects errors; NULL = neither. */
    int (*random)(void *arg, int n);
    void *arg;
    int max_drafts;
    int error_per_million;
    prompt_result_msg prompts[SIM_MAX_SEQS]; /* of the last step */
    token_logprob scores[SIM_MAX_BATCH * SIM_MAX_SCORES];
    char fault[256]; /* first fault, empty = none */
} sim_worker;

static inline void sim_worker_reset(sim_worker *w)
{
    for (int i = 0; i < SIM_MAX_SEQS; i++)
        w->rows[i].is_used = false;
    size_t n_slots = (size_t)w->n_blocks * (size_t)w->block_size;
    for (size_t i = 0; i < n_slots; i++) {
        w->shadow[i] = 0xdeadull + i;
        w->written_in[i] = 0;
    }
}

static inline void sim_worker_init(sim_worker *w, int32_t max_num_seqs, int32_t n_blocks,
                                   int32_t block_size)
{
    memset(w, 0, sizeof *w);
    w->max_num_seqs = max_num_seqs;
    w->n_blocks = n_blocks;
    w->block_size = block_size;
    size_t n_slots = (size_t)n_blocks * (size_t)block_size;
    w->shadow = calloc(n_slots, sizeof *w->shadow);
    w->written_in = calloc(n_slots, sizeof *w->written_in);
    if (w->shadow == NULL || w->written_in == NULL)
        abort();
    sim_worker_reset(w);
}

static inline void sim_worker_deinit(sim_worker *w)
{
    free(w->shadow);
    free(w->written_in);
}

#define SIM_FAULT(w, ...)                                        \
    do {                                                         \
        if ((w)->fault[0] == '\0')                               \
            snprintf((w)->fault, sizeof(w)->fault, __VA_ARGS__); \
    } while (0)

static inline void sim_step_copy(sim_step *step, const scheduler_output *out,
                                 uint64_t (*salt_of)(uint64_t id))
{
    step->step_id = out->step_id;
    step->n_gone = 0;
    step->n_shares = 0;
    for (int32_t i = 0; i < out->n_finished; i++)
        step->gone[step->n_gone++] = out->finished_ids[i];
    for (int32_t i = 0; i < out->n_preempted; i++)
        step->gone[step->n_gone++] = out->preempted_ids[i];
    for (int32_t i = 0; i < out->n_new; i++) {
        const new_request_msg *msg = &out->new_requests[i];
        sim_share *share = &step->shares[step->n_shares++];
        share->id = msg->request_id;
        share->is_new = true;
        share->epoch = msg->request_epoch;
        share->salt = salt_of(msg->request_id);
        share->n_known = msg->n_tokens;
        share->n_prompt = msg->n_prompt_tokens;
        share->n_scores = msg->params.n_prompt_logprobs_per_token;
        memcpy(share->tokens, msg->tokens, (size_t)msg->n_tokens * sizeof *msg->tokens);
        share->n_computed = msg->n_computed_tokens;
        share->n_scheduled = msg->n_scheduled_tokens;
        share->n_drafts = 0;
        share->n_blocks = msg->blocks.n_blocks[0];
        memcpy(share->blocks, msg->blocks.ids[0], (size_t)share->n_blocks * sizeof *share->blocks);
    }
    for (int32_t i = 0; i < out->n_cached; i++) {
        const cached_request_msg *msg = &out->cached_requests[i];
        sim_share *share = &step->shares[step->n_shares++];
        share->id = msg->request_id;
        share->is_new = false;
        share->n_computed = msg->n_computed_tokens;
        share->n_scheduled = msg->n_scheduled_tokens;
        share->n_drafts = msg->n_draft_tokens;
        if (share->n_drafts > 0)
            memcpy(share->drafts, msg->draft_tokens,
                   (size_t)share->n_drafts * sizeof *share->drafts);
        share->n_blocks = msg->new_blocks.n_blocks[0];
        if (share->n_blocks > 0)
            memcpy(share->blocks, msg->new_blocks.ids[0],
                   (size_t)share->n_blocks * sizeof *share->blocks);
    }
}

static inline sim_row *sim_worker_find(sim_worker *w, uint64_t id)
{
    for (int i = 0; i < SIM_MAX_SEQS; i++) {
        if (w->rows[i].is_used && w->rows[i].id == id)
            return &w->rows[i];
    }
    return NULL;
}

/* Brings the row of one share up to date; NULL after a fault. */
static inline sim_row *sim_worker_apply(sim_worker *w, const sim_share *share)
{
    sim_row *row = sim_worker_find(w, share->id);
    if (share->is_new) {
        if (row != NULL) {
            SIM_FAULT(w, "request %llu is sent as new but has a row",
                      (unsigned long long)share->id);
            return NULL;
        }
        int n_used = 0;
        for (int i = 0; i < SIM_MAX_SEQS; i++) {
            n_used += w->rows[i].is_used;
            if (!w->rows[i].is_used && row == NULL)
                row = &w->rows[i];
        }
        if (n_used >= w->max_num_seqs || row == NULL) {
            SIM_FAULT(w, "%d rows are taken", n_used);
            return NULL;
        }
        row->is_used = true;
        row->id = share->id;
        row->epoch = share->epoch;
        row->salt = share->salt;
        row->n_tokens = share->n_known;
        row->n_prompt = share->n_prompt;
        row->n_scores = share->n_scores;
        if (share->n_scores > 0 && share->n_computed > 0)
            SIM_FAULT(w, "request %llu wants prompt logprobs but begins at %d",
                      (unsigned long long)share->id, share->n_computed);
        memcpy(row->tokens, share->tokens, (size_t)share->n_known * sizeof *row->tokens);
        row->n_computed = share->n_computed;
        row->n_blocks = 0;
        w->n_hit_positions += (uint64_t)share->n_computed;
    } else if (row == NULL || row->n_computed != share->n_computed) {
        SIM_FAULT(w, "request %llu continues at %d, its row is at %d",
                  (unsigned long long)share->id, share->n_computed,
                  row == NULL ? -1 : row->n_computed);
        return NULL;
    }
    for (int32_t i = 0; i < share->n_blocks; i++)
        row->table[row->n_blocks++] = share->blocks[i];
    memcpy(row->tokens + row->n_tokens, share->drafts,
           (size_t)share->n_drafts * sizeof *row->tokens);
    if (share->n_scheduled < 1 ||
        row->n_computed + share->n_scheduled > row->n_tokens + share->n_drafts ||
        (row->n_computed + share->n_scheduled + w->block_size - 1) / w->block_size > row->n_blocks)
        SIM_FAULT(w, "request %llu: %d tokens at %d, %d known, %d drafts, %d blocks",
                  (unsigned long long)share->id, share->n_scheduled, row->n_computed, row->n_tokens,
                  share->n_drafts, row->n_blocks);
    return w->fault[0] == '\0' ? row : NULL;
}

static inline size_t sim_worker_slot(sim_worker *w, const sim_row *row, int32_t pos)
{
    block_id id = row->table[pos / w->block_size];
    if (id < 1 || id >= w->n_blocks) {
        SIM_FAULT(w, "request %llu: block id %d at position %d", (unsigned long long)row->id, id,
                  pos);
        return 0;
    }
    return (size_t)id * (size_t)w->block_size + (size_t)(pos % w->block_size);
}

static inline void sim_worker_write(sim_worker *w, const sim_row *row, const sim_share *share,
                                    uint64_t step_id)
{
    uint64_t chain = sim_chain_start(row->salt);
    for (int32_t pos = 0; pos < share->n_computed + share->n_scheduled; pos++) {
        chain = sim_chain_next(chain, row->tokens[pos]);
        if (pos < share->n_computed)
            continue;
        size_t slot = sim_worker_slot(w, row, pos);
        if (w->written_in[slot] == step_id)
            SIM_FAULT(w, "request %llu: slot %zu is written twice in step %llu",
                      (unsigned long long)row->id, slot, (unsigned long long)step_id);
        w->written_in[slot] = step_id;
        w->shadow[slot] = chain;
    }
}

static inline void sim_worker_read(sim_worker *w, const sim_row *row, const sim_share *share)
{
    uint64_t chain = sim_chain_start(row->salt);
    for (int32_t pos = 0; pos < share->n_computed + share->n_scheduled; pos++) {
        chain = sim_chain_next(chain, row->tokens[pos]);
        size_t slot = sim_worker_slot(w, row, pos);
        if (w->shadow[slot] != chain)
            SIM_FAULT(w,
                      "request %llu attends at position %d of %d (hit or computed before: %d) to "
                      "foreign contents of slot %zu",
                      (unsigned long long)row->id, pos, share->n_computed + share->n_scheduled,
                      share->n_computed, slot);
    }
}

/* The prompt tokens that this step's positions predict. */
static inline void sim_worker_score(sim_worker *w, const sim_row *row, const sim_share *share,
                                    step_result *result)
{
    int32_t end = PGD_MIN(share->n_computed + share->n_scheduled, row->n_prompt - 1);
    if (row->n_scores == 0 || share->n_computed >= end)
        return;
    w->prompts[result->n_prompt_results++] =
        (prompt_result_msg){.request_id = row->id,
                            .request_epoch = row->epoch,
                            .first_token = share->n_computed + 1,
                            .n_tokens = end - share->n_computed,
                            .n_logprobs_per_token = row->n_scores,
                            .first_logprob = result->n_prompt_logprobs};
    uint64_t chain = sim_chain_start(row->salt);
    for (int32_t pos = 0; pos < end; pos++) {
        chain = sim_chain_next(chain, row->tokens[pos]);
        for (int32_t k = 0; pos >= share->n_computed && k < row->n_scores; k++)
            w->scores[result->n_prompt_logprobs++] = sim_score(chain, row->tokens[pos + 1], k);
    }
}

/* Samples; with drafts, as many as agree with what would have been sampled, and one more. */
static inline void sim_worker_sample(sim_worker *w, sim_row *row, const sim_share *share,
                                     step_result *result, request_result_msg *results)
{
    int32_t end = share->n_computed + share->n_scheduled;
    bool is_error = w->error_per_million > 0 && w->random(w->arg, 1000000) < w->error_per_million;
    row->n_computed = end;
    bool is_sampled = end >= row->n_tokens;
    if (!is_sampled && !is_error)
        return;
    request_result_msg *res = &results[result->n_results++];
    memset(res, 0, sizeof *res);
    res->request_id = row->id;
    res->request_epoch = row->epoch;
    uint64_t chain = sim_chain_start(row->salt);
    for (int32_t pos = 0; pos < row->n_tokens; pos++)
        chain = sim_chain_next(chain, row->tokens[pos]);
    for (int32_t d = 0; is_sampled && d <= share->n_drafts; d++) {
        token_id token = sim_sample(chain);
        bool is_accepted = d < share->n_drafts && share->drafts[d] == token;
        res->tokens[res->n_tokens++] = token;
        row->tokens[row->n_tokens++] = token;
        chain = sim_chain_next(chain, token);
        if (!is_accepted)
            break;
    }
    if (is_sampled)
        row->n_computed = row->n_tokens - 1;
    if (is_error) { /* the row goes on until the engine takes it away */
        res->n_tokens = 0;
        res->error = REQUEST_ERROR_NAN_LOGITS;
        return;
    }
    if (w->max_drafts > 0) {
        res->n_drafts = w->random(w->arg, w->max_drafts + 1);
        for (int32_t d = 0; d < res->n_drafts; d++) {
            token_id token = sim_sample(chain);
            res->drafts[d] = w->random(w->arg, 4) == 0 ? (token + 1) % SIM_VOCAB : token;
            chain = sim_chain_next(chain, token);
        }
    }
}

/* Runs one step. results: [SIM_MAX_SEQS]. */
static inline void sim_worker_run(step_result *result, request_result_msg *results, sim_worker *w,
                                  const sim_step *step)
{
    sim_row *rows[SIM_MAX_SEQS];
    *result = (step_result){.step_id = step->step_id,
                            .results = results,
                            .prompt_results = w->prompts,
                            .prompt_logprobs = w->scores};
    for (int32_t i = 0; i < step->n_gone; i++) {
        sim_row *row = sim_worker_find(w, step->gone[i]);
        if (row == NULL)
            SIM_FAULT(w, "request %llu is to go but has no row", (unsigned long long)step->gone[i]);
        else
            row->is_used = false;
    }
    for (int32_t i = 0; i < step->n_shares; i++) {
        rows[i] = sim_worker_apply(w, &step->shares[i]);
        if (rows[i] == NULL)
            return;
    }
    for (int32_t i = 0; i < step->n_shares; i++)
        sim_worker_write(w, rows[i], &step->shares[i], step->step_id);
    for (int32_t i = 0; i < step->n_shares; i++)
        sim_worker_read(w, rows[i], &step->shares[i]);
    for (int32_t i = 0; i < step->n_shares; i++)
        sim_worker_score(w, rows[i], &step->shares[i], result);
    for (int32_t i = 0; i < step->n_shares; i++)
        sim_worker_sample(w, rows[i], &step->shares[i], result, results);
}

#endif
