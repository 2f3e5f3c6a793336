/* An external tier behind the scheduler's KV connector, which does what the trace says: it has the
 * first n_external tokens of a request, makes the scheduler ask again, takes its time, loads only a
 * part, or keeps the blocks of a finished request until it has stored them.
 *
 * The medium holds what a model would have computed, so whoever reads a loaded block finds his own
 * history, and a store is compared with what should be there.
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_TIER_H
#define TESTS_SIM_SIM_TIER_H

#include "engine/core/scheduler_internal.h"
#include "tests/sim/sim_chain.h"

#define SIM_MAX_JOBS       32
#define SIM_MAX_JOB_BLOCKS (SIM_MAX_GROUPS * SIM_MAX_LEN)

typedef enum sim_job_state {
    SIM_JOB_NONE,
    SIM_JOB_NEW,
    SIM_JOB_SENT, /* to the worker */
    SIM_JOB_DONE  /* the scheduler is to be told */
} sim_job_state;

typedef struct sim_job {
    sim_job_state state;
    uint64_t id;
    kv_transfer_kind kind;
    request *r; /* the scheduler's */
    bool is_async;
    int32_t delay;          /* steps that it takes beyond the one that brings it */
    int32_t n_valid_tokens; /* LOAD: as many come */
    int32_t n_blocks;
    block_id blocks[SIM_MAX_JOB_BLOCKS];
    int32_t medium[SIM_MAX_JOB_BLOCKS]; /* offset of the block's first token in contents */
    int8_t group[SIM_MAX_JOB_BLOCKS];
    bool is_valid[SIM_MAX_JOB_BLOCKS];
    int32_t n_contents;
    uint64_t contents[SIM_MAX_GROUPS * SIM_MAX_LEN];
} sim_job;

typedef struct sim_tier {
    const sim_config *config;
    const sim_request *const *requests;
    const scheduler *sched; /* for the tables of what it stores; borrow */
    int32_t alignment;
    bool can_store;
    uint64_t n_ids;
    int32_t n_asked[SIM_MAX_REQUESTS];
    uint64_t load_step[SIM_MAX_REQUESTS]; /* in which the last slow load began, 0 = none */
    sim_job jobs[SIM_MAX_JOBS];
    int32_t n_put_off; /* requests that are to be asked for again; the scheduler's user clears it */
    int32_t n_messages;
    kv_transfer_msg messages[SIM_MAX_JOBS];
    uint64_t n_loads;
    uint64_t n_failed_loads;
    uint64_t n_stores;
} sim_tier;

/* Borrows what is given until the end; sched is to be set before the first step. alignment: tokens
 * of which a hit is a multiple. */
void sim_tier_init(sim_tier *t, const sim_config *config, const sim_request *const *requests,
                   int32_t alignment, bool can_store);
kv_connector sim_tier_connector(sim_tier *t);
/* The transfer that a message names; NULL if there is none. */
const sim_job *sim_tier_find(const sim_tier *t, uint64_t job_id);

#endif
