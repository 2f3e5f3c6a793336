/* How often each key was seen lately, in bounded memory (rule OF11).
 *
 * Keys share sets of four places; a new one takes the place that was used longest ago in its set, so
 * a count may be forgotten but never is too high, unless two keys agree in 64 bits.
 * Owns:    16 bytes for each key that it can hold
 * Thread:  core
 */
#ifndef ENGINE_OFFLOAD_OFFLOAD_COUNTER_H
#define ENGINE_OFFLOAD_OFFLOAD_COUNTER_H

#include "engine/offload/offload_policy.h"

typedef struct offload_counter offload_counter;

/* Room for n_keys >= 1 or a few more. Errors: PGD_EINVAL, PGD_ENOMEM */
PGD_MUST_USE pgd_err offload_counter_create(offload_counter **out, int32_t n_keys);
void offload_counter_destroy(offload_counter *c);
/* Neither allocates. */
void offload_counter_add(offload_counter *c, const offload_key *key);
uint32_t offload_counter_get(const offload_counter *c, const offload_key *key);

#endif
