/* The named configurations, and random traces of each.
 *
 * A configuration fixes the groups of the model, and whether there are prefix caching, drafts,
 * priorities and more than one step in flight: model/cache/drafts/priority/depth. Everything else
 * (sizes of blocks, pool, batch, windows; chunked prefill, watermark, errors) is drawn per trace.
 */
#ifndef TESTS_SIM_SIM_GEN_H
#define TESTS_SIM_SIM_GEN_H

#include "tests/sim/sim_trace.h"

int32_t sim_gen_n_configs(void);
/* From this one on they are those with offload tiers: offload/model/policy/disk/depth. */
int32_t sim_gen_first_offload(void);
/* "full+sliding/cache/drafts/fcfs/depth2"; static storage, until the next call. */
const char *sim_gen_name(int32_t config_idx);
/* The trace is a function of both numbers. */
void sim_gen_draw(sim_trace *t, int32_t config_idx, uint64_t seed);
/* The same with the smallest pools, tiers of a few blocks, and more requests than can be served. */
void sim_gen_draw_overload(sim_trace *t, int32_t config_idx, uint64_t seed);

#endif
