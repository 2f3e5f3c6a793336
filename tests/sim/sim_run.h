/* Runs a trace: a scheduler, a simulated worker behind encoded messages, and everything that must
 * hold between them.
 *
 * Checked beside what the worker finds: the tokens of every request against the only right ones,
 * exactly one finish and one release each, refusals, prefix hits against a search of its own
 * (sim_oracle.h), queue and block integrity, never stuck; at the end: all done, no block lost. A
 * violation ends the process with a line on stderr, as an assertion of the engine does.
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_RUN_H
#define TESTS_SIM_SIM_RUN_H

#include "tests/sim/sim_trace.h"

/* Exit status of a violation. */
#define SIM_EXIT_VIOLATION 3

typedef struct sim_totals {
    uint64_t n_runs;
    uint64_t n_steps;
    uint64_t n_requests;
    uint64_t n_refused;
    uint64_t n_tokens;
    uint64_t n_preemptions;
    uint64_t n_late_appended;
    uint64_t n_late_dropped;
    uint64_t n_hit_positions;
    uint64_t n_resets;
    uint64_t n_aborts;
    uint64_t n_errors;
    uint64_t n_drafts_accepted;
    uint64_t n_drafts;
    uint64_t n_narrowed; /* steps of a poison hunt */
    uint64_t n_scored;
    uint64_t n_scored_again;
    uint64_t n_null_entries; /* of tables: blocks that a window gave back */
    uint64_t n_common;       /* steps with a common prefix of two or more requests */
    uint64_t n_loads;        /* from a tier */
    uint64_t n_failed_loads; /* in part */
    uint64_t n_stores;
    uint64_t n_resumed;  /* loads for a request that was preempted */
    uint64_t n_delays;   /* times that a request was to ask again */
    uint64_t n_flushes;  /* stores that a step had to wait for */
    uint64_t n_promoted; /* blocks that came from disk */
} sim_totals;

/* Adds to *total. */
void sim_run(const sim_trace *t, sim_totals *total);

#endif
