/* What the steps in flight hold: which requests, from which position on. When a worker dies, those are
 * the suspects.
 *
 * Owns:    everything, sized at create
 * Thread:  core
 */
#ifndef ENGINE_CORE_STEP_NOTES_H
#define ENGINE_CORE_STEP_NOTES_H

#include "engine/core/poison.h"
#include "proto/scheduler_output.h"

typedef struct step_notes step_notes;

typedef struct step_note {
    int32_t n_tokens; /* scheduled, of all requests */
    int32_t n_requests;
    uint64_t *ids;       /* [n_requests], as the next two */
    int32_t *n_computed; /* before the step */
    int32_t *n_scheduled;
} step_note;

PGD_MUST_USE pgd_err step_notes_create(step_notes **out, int32_t max_steps, int32_t max_seqs);
void step_notes_destroy(step_notes *n);
void step_notes_reset(step_notes *n);

int32_t step_notes_n_steps(const step_notes *n);
/* At most max_steps of max_seqs requests each. */
void step_notes_add(step_notes *n, const scheduler_output *out);
/* The oldest step has its result: takes it off. Borrow until the next add. */
const step_note *step_notes_take(step_notes *n);
/* Every request of the steps, once, with the first position that is not acknowledged; the number of
 * them. *suspects: a borrow until the next call. */
int32_t step_notes_gather(step_notes *n, const poison_suspect **suspects);

#endif
