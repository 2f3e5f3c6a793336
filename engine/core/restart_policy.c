/* One count and what resets it. A limit by time (so many deaths a minute) was rejected: a model that
 * takes minutes to load would never reach it, and give up never.
 */
#include "engine/core/restart_policy.h"

#define MAX_CULPRITS 3

/* By the number of restarts before it without a sign of life. */
static const uint64_t WAITS_US[] = {0, 500000, 1000000, 2000000, 4000000, 8000000};

bool restart_policy_note_death(restart_policy *p, uint64_t *wait_us, restart_reason reason,
                               poison_verdict verdict)
{
    bool is_excused = verdict != POISON_UNKNOWN && p->n_culprits < MAX_CULPRITS;
    if (verdict == POISON_FOUND) {
        if (is_excused)
            p->n_barren = 0;
        p->n_culprits++;
    }
    if (!is_excused && p->n_barren == (int32_t)PGD_ARRAY_LEN(WAITS_US))
        return false;
    *wait_us = is_excused ? 0 : WAITS_US[p->n_barren];
    if (!is_excused)
        p->n_barren++;
    p->n_restarts[reason]++;
    return true;
}

void restart_policy_note_step(restart_policy *p)
{
    p->n_barren = 0;
    p->n_culprits = 0;
}

void restart_policy_note_pong(restart_policy *p, uint64_t ready_for_us)
{
    if (ready_for_us >= RESTART_PROVEN_US)
        restart_policy_note_step(p);
}

uint64_t restart_policy_n_restarts(const restart_policy *p)
{
    uint64_t n = 0;
    for (int i = 0; i < RESTART_N_REASONS; i++)
        n += p->n_restarts[i];
    return n;
}

const char *restart_policy_reason_name(restart_reason reason)
{
    static const char *const names[RESTART_N_REASONS] = {"start",  "exit",         "signal",
                                                         "closed", "error",        "protocol",
                                                         "stall",  "step_timeout", "silence"};
    return names[reason];
}
