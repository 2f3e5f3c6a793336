/* A worker without a model, for the scheduler: it keeps rows and block tables from the messages
 * alone, and a shadow of the KV memory.
 *
 * The shadow holds, for every offset of every block, what was last written there: a hash of the
 * whole history of the position and of the group that keeps it. Each step first writes all its
 * positions, then checks that every position that its rows attend to holds exactly their own
 * history. So a wrong prefix hit, a block that is reused too early, one that was published but never
 * written, or a wrong table is noticed at once. Beyond that the worker keeps who holds which block,
 * as far as messages and attention windows tell, and checks every message against it: ids, epochs,
 * positions, drafts, blocks that are new and not free, blocks to zero, common prefixes, totals.
 * A request that is to fail writes numbers that are not finite; whoever reads them fails too.
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_WORKER_H
#define TESTS_SIM_SIM_WORKER_H

#include "proto/scheduler_output.h"
#include "proto/step_result.h"
#include "tests/sim/sim_streams.h"

#define SIM_MAX_TOKENS    (SIM_MAX_LEN + PGD_MAX_DRAFT_TOKENS + 1)
#define SIM_MAX_IN_FLIGHT 4

typedef struct sim_row {
    bool is_used;
    uint64_t id;
    uint32_t epoch;
    const sim_request *request;
    int32_t n_scores;
    int32_t n_tokens;
    int32_t n_computed;
    token_id tokens[SIM_MAX_TOKENS];
    uint64_t chain[SIM_MAX_TOKENS + 1]; /* chain[i]: history of the first i tokens */
    int32_t n_drafts;                   /* its last proposal */
    token_id drafts[PGD_MAX_DRAFT_TOKENS];
    bool must_encode; /* in this step */
    bool is_encoded;  /* cross attention: the encoder's part is written */
    /* Drafts that recent steps rejected, by step id; the engine counts them until it has seen those
     * results. */
    uint64_t rejected_in[SIM_MAX_IN_FLIGHT];
    int32_t n_rejected[SIM_MAX_IN_FLIGHT];
    int32_t n_blocks[SIM_MAX_GROUPS];
    int32_t n_dropped[SIM_MAX_GROUPS]; /* leading blocks that its windows have left */
    block_id table[SIM_MAX_GROUPS][SIM_MAX_LEN + 2];
} sim_row;

/* One request's share of a step. */
typedef struct sim_share {
    sim_row *row;
    int32_t first; /* position */
    int32_t n;
    int32_t n_drafts;  /* of n, the last ones */
    int32_t n_claimed; /* as many drafts the engine counts on */
    bool is_broken;    /* computes numbers that are not finite */
} sim_share;

typedef struct sim_worker {
    const sim_config *config;
    const sim_request *const *requests; /* [SIM_MAX_REQUESTS], by id: what no message tells */
    int32_t max_block_size;
    uint64_t next_step_id;
    uint64_t seen_step_id; /* last one whose result the engine had when it made the message */
    sim_row rows[SIM_MAX_SEQS];
    uint32_t epochs[SIM_MAX_REQUESTS]; /* last one of each id */
    uint64_t *shadow;                  /* [n_blocks, max_block_size] */
    uint64_t *written_in;              /* [n_blocks, max_block_size], step id */
    int32_t *holders;                  /* [n_blocks] */
    int8_t *owner;                     /* [n_blocks], group that wrote last; -1 = zeroed or never */
    uint64_t *fresh_in;                /* [n_blocks], step that handed it out last */
    int8_t *n_loading;                 /* [n_blocks], transfers that write it */
    int8_t *n_storing;                 /* [n_blocks], transfers that read it */
    sim_streams streams;               /* of a worker with a tier */
    int32_t n_shares;
    sim_share shares[SIM_MAX_SEQS];
    uint64_t n_hit_positions;
    prompt_result_msg prompts[SIM_MAX_SEQS]; /* of the last step */
    token_logprob scores[SIM_MAX_BATCH * SIM_MAX_SCORES];
    char fault[256]; /* first fault, empty = none */
} sim_worker;

/* Borrows what is given until deinit. medium: NULL = no tier. */
void sim_worker_init(sim_worker *w, const sim_config *config, const sim_request *const *requests,
                     sim_medium *medium, int32_t rank);
void sim_worker_deinit(sim_worker *w);
/* As a new process: nothing is known, memory holds garbage. next_step_id: of the first step. */
void sim_worker_reset(sim_worker *w, uint64_t next_step_id);
/* Its message has come, some time before it is run. */
void sim_worker_receive(sim_worker *w, const scheduler_output *out);
/* A moment passes: transfers go on. */
void sim_worker_tick(sim_worker *w);
/* Runs one step. results: [SIM_MAX_SEQS]; what *result points to is valid until the next step.
 * seen_step_id: the last step whose result the engine had when it made the message. */
void sim_worker_run(step_result *result, request_result_msg *results, sim_worker *w,
                    const scheduler_output *out, uint64_t seen_step_id);

#endif
