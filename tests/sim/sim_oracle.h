/* What the scheduler should have done, worked out in another way than it does.
 *
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_ORACLE_H
#define TESTS_SIM_SIM_ORACLE_H

#include "tests/sim/sim_state.h"

/* The prefix hit of the request at the head of the queue is the longest that the published blocks
 * allow. */
void sim_oracle_check_lookup(sim_state *s);
/* Of a finished request, no block of full attention is findable whose predecessor is not: what is
 * evicted first is what is of no use without the rest. */
void sim_oracle_check_eviction(const sim_state *s);
/* What running requests have computed is findable, up to the block that became full last. */
void sim_oracle_check_published(const sim_state *s);
/* Keeps the request's hashes for sim_oracle_check_eviction. */
void sim_oracle_remember(sim_state *s, const request *r);
/* Rows hold no block that their window has left. */
void sim_oracle_check_windows(const sim_state *s, const scheduler_output *out);
/* Whether a request of n tokens in all can run alone. */
bool sim_oracle_fits(const sim_config *c, int32_t n_total_tokens, int32_t n_encoder);

/* The queues before a step. */
typedef struct sim_snapshot {
    int32_t n_running;
    uint64_t running[SIM_MAX_SEQS];
    int32_t n_waiting;
    uint64_t waiting[SIM_MAX_REQUESTS];
} sim_snapshot;

void sim_oracle_take_snapshot(sim_snapshot *snapshot, const sim_state *s);
/* No running request that could run was passed over for somebody later in the list, and nobody was
 * admitted before somebody who waits ahead of him. has_only: not everyone may run. */
void sim_oracle_check_order(const sim_state *s, const sim_snapshot *before,
                            const scheduler_output *out, bool has_only);
/* Whoever is first in the queue after a step for everyone could not have been admitted, and whoever
 * was left room for what those before him have still to take. */
void sim_oracle_check_head(const sim_state *s, const scheduler_output *out);

#endif
