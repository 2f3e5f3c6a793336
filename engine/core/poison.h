/* Finds the request that kills workers, and only that one.
 *
 * Suspects are the requests of the steps that a dead worker had not acknowledged. A strike counts
 * only when the suspect got no further since its last one. Suspects with two strikes are run apart
 * from all others, half of them at a time; a half that gets further is cleared, one that dies is
 * split. A request is the culprit after two deaths alone without progress. Strikes live in the
 * requests (n_strikes, progress_at_strike).
 * Owns:    three lists of ids, sized at create
 * Thread:  core
 */
#ifndef ENGINE_CORE_POISON_H
#define ENGINE_CORE_POISON_H

#include "engine/core/request.h"

typedef struct poison poison;

typedef struct poison_suspect {
    uint64_t id;
    int32_t position; /* tokens whose computation the worker had acknowledged */
} poison_suspect;

/* What a death tells. */
typedef enum poison_verdict {
    POISON_UNKNOWN,   /* nothing */
    POISON_SEARCHING, /* suspects that run apart died: one of them is it, or will be cleared */
    POISON_FOUND
} poison_verdict;

typedef request *(*poison_find_fn)(void *arg, uint64_t id);

PGD_MUST_USE pgd_err poison_create(poison **out, int32_t max_suspects, poison_find_fn find,
                                   void *arg);
void poison_destroy(poison *p);

/* A worker died. POISON_FOUND: *culprit must be failed (the caller does, then calls
 * poison_forget). */
poison_verdict poison_note_death(poison *p, const poison_suspect *suspects, int32_t n_suspects,
                                 uint64_t *culprit);
/* The worker acknowledged a step: the request's first position tokens are computed. */
void poison_note_progress(poison *p, uint64_t id, int32_t position);
/* The request has finished, for whatever reason. */
void poison_forget(poison *p, uint64_t id);
/* The only requests that may run now; NULL: all may. Borrow until the next call. */
const uint64_t *poison_get_only(const poison *p, int32_t *n_only);

#endif
