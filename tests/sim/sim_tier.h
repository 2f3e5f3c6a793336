/* An external tier behind the scheduler's KV connector, which does what the trace says: it has the
 * first n_external tokens of a request, makes the scheduler ask again, or keeps the blocks of a
 * finished request until it has stored them.
 *
 * A load finds in the medium what a model would have computed.
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_TIER_H
#define TESTS_SIM_SIM_TIER_H

#include "engine/core/scheduler_internal.h"
#include "proto/control.h"
#include "tests/sim/sim_medium.h"

#define SIM_TIER_JOBS       32
#define SIM_TIER_JOB_BLOCKS (SIM_MAX_GROUPS * SIM_MAX_LEN)
#define SIM_TIER_BLOCKS     (SIM_TIER_JOBS * SIM_TIER_JOB_BLOCKS)

typedef enum sim_tier_state {
    SIM_TIER_FREE,
    SIM_TIER_NEW,
    SIM_TIER_SENT, /* to the worker */
    SIM_TIER_DONE  /* the scheduler is to be told */
} sim_tier_state;

typedef struct sim_tier_job {
    sim_tier_state state;
    uint64_t id;
    kv_transfer_kind kind;
    request *r; /* the scheduler's */
    int32_t n_local_tokens;
    int32_t end;            /* tokens */
    int32_t n_valid_tokens; /* LOAD: as many come */
    int32_t n_told;         /* ranks */
    int32_t n_blocks;
    block_id blocks[SIM_TIER_JOB_BLOCKS];
    int32_t medium[SIM_TIER_JOB_BLOCKS];
    uint64_t tags[SIM_TIER_JOB_BLOCKS];
    int32_t ends[SIM_TIER_JOB_BLOCKS]; /* tokens, in ascending order */
} sim_tier_job;

typedef struct sim_tier {
    const sim_config *config;
    const sim_request *const *requests;
    sim_medium *medium;
    const scheduler *sched; /* for the tables of what it stores; borrow */
    int32_t alignment;
    bool can_store;
    uint64_t n_ids;
    int32_t n_asked[SIM_MAX_REQUESTS];
    sim_tier_job jobs[SIM_TIER_JOBS];
    int32_t n_messages;
    kv_transfer_msg messages[SIM_TIER_JOBS];
} sim_tier;

/* Borrows what is given until the end; sched is to be set before the first step. alignment: tokens
 * of which a hit is a multiple. */
void sim_tier_init(sim_tier *t, const sim_config *config, const sim_request *const *requests,
                   sim_medium *medium, int32_t alignment, bool can_store);
kv_connector sim_tier_connector(sim_tier *t);

#endif
