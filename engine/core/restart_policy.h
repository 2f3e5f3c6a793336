/* When a worker that died is started again, and when no more.
 *
 * The first restart comes at once, the next ones after 0.5, 1, 2, 4 and 8 s: an ordinary death costs
 * no wait, and five restarts with a wait that bring no sign of life are enough. Signs of life, which
 * start the row anew: an acknowledged step; a worker that was ready for RESTART_PROVEN_US and
 * answers a ping, so that deaths of an idle worker months apart never add up. Deaths while the
 * search for a poison request runs suspects apart do not count, and finding it starts the row anew:
 * they are that request's doing. But three requests found guilty without a sign of life between
 * them say that it is the worker after all; from then on every death counts.
 * Owns:    nothing; plain data, a zeroed one is ready
 * Thread:  core
 */
#ifndef ENGINE_CORE_RESTART_POLICY_H
#define ENGINE_CORE_RESTART_POLICY_H

#include "engine/core/poison.h"

#define RESTART_PROVEN_US 60000000u

/* Why a worker was given up. */
typedef enum restart_reason {
    RESTART_START,        /* could not be started, or never said hello */
    RESTART_EXIT,         /* ended by itself */
    RESTART_SIGNAL,       /* ended by a signal that was not ours */
    RESTART_CLOSED,       /* lives, but closed its messages */
    RESTART_ERROR,        /* reported a failure of its own */
    RESTART_PROTOCOL,     /* sent what it must not */
    RESTART_STALL,        /* stopped working: steps, pings or its messages are left lying */
    RESTART_STEP_TIMEOUT, /* works, but one step takes too long */
    RESTART_SILENCE,      /* nothing at all is heard */
    RESTART_N_REASONS
} restart_reason;

typedef struct restart_policy {
    int32_t n_barren;   /* restarts since the last sign of life */
    int32_t n_culprits; /* requests found guilty since then */
    uint64_t n_restarts[RESTART_N_REASONS];
} restart_policy;

/* A worker died. True: start another one in *wait_us; false: give up. */
PGD_MUST_USE bool restart_policy_note_death(restart_policy *p, uint64_t *wait_us,
                                            restart_reason reason, poison_verdict verdict);
void restart_policy_note_step(restart_policy *p);
void restart_policy_note_pong(restart_policy *p, uint64_t ready_for_us);
uint64_t restart_policy_n_restarts(const restart_policy *p);
/* "exit", "step_timeout" ...; static storage. */
const char *restart_policy_reason_name(restart_reason reason);

#endif
