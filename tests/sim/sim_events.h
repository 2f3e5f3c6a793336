/* A reader of the prefix cache's events, which must know at any time what the pool holds.
 *
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_EVENTS_H
#define TESTS_SIM_SIM_EVENTS_H

#include "tests/sim/sim_state.h"

/* Empties what an earlier trace left. Borrow until the next call. */
kv_events *sim_events_begin(sim_state *s);
/* Reads what there is, now and then asks for a snapshot, and compares. */
void sim_events_check(sim_state *s);

#endif
