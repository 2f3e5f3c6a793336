/* A reader of the KV events, which must know at any time what pool and tiers hold.
 *
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_EVENTS_H
#define TESTS_SIM_SIM_EVENTS_H

#include "engine/kv/kv_events.h"
#include "tests/sim/sim_state.h"

/* Empties what an earlier trace left. Borrow until the next call. */
kv_events *sim_events_begin(sim_state *s);
/* Of a tier from its beginning on; list as for kv_events_set_tier. */
void sim_events_set_tier(kv_medium medium, kv_tier_list_fn list, const void *arg);
/* Reads what there is, now and then asks for a snapshot, and compares. */
void sim_events_check(sim_state *s);

#endif
