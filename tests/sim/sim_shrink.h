/* Makes a failing trace short: operations are left out, requests and the configuration simplified,
 * as long as the same failure remains.
 *
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_SHRINK_H
#define TESTS_SIM_SIM_SHRINK_H

#include "tests/sim/sim_catch.h"
#include "tests/sim/sim_trace.h"

/* Runs the trace in a child. */
void sim_shrink_try(sim_verdict *v, const sim_trace *t);
/* *t fails with v->key; on return it is the shortest found that does, and *v its verdict. Takes at
 * most about limit_s. Returns the number of runs. */
int32_t sim_shrink(sim_trace *t, sim_verdict *v, int limit_s);

#endif
