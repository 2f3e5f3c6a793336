/* The offload tiers of a simulation: the engine's connector and manager as they are, over the
 * simulated medium and disk.
 *
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_OFFLOAD_H
#define TESTS_SIM_SIM_OFFLOAD_H

#include "engine/kv/kv_events.h"
#include "engine/offload/offload_connector.h"
#include "tests/sim/sim_disk.h"

typedef struct sim_offload {
    const sim_config *config;
    sim_medium *medium;
    kv_events *events;
    disk_tier *disk; /* NULL = none */
    offload_connector *connector;
    uint64_t now;
    uint64_t n_promoted; /* by disk tiers that are gone */
} sim_offload;

/* Borrows what is given until deinit. groups: as the scheduler has them. events: told what the host
 * tier holds. */
void sim_offload_init(sim_offload *o, const sim_config *config, const kv_group_spec *groups,
                      sim_medium *medium, kv_events *events);
void sim_offload_deinit(sim_offload *o);
/* Between two workers: the tiers begin anew. */
void sim_offload_clear(sim_offload *o);
/* A moment passes: the disk goes on. */
void sim_offload_tick(sim_offload *o);
/* Something goes on that the connector will hear of. */
bool sim_offload_is_busy(const sim_offload *o);
/* Blocks that came from disk. */
uint64_t sim_offload_n_promoted(const sim_offload *o);

#endif
