/* A disk tier in memory, which takes the place of engine/offload/disk_tier: its jobs take their time,
 * some fail, its queues fill up, and it is full soon. Files vanish now and then, as when another
 * engine removes them.
 *
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_DISK_H
#define TESTS_SIM_SIM_DISK_H

#include "engine/offload/disk_tier.h"
#include "tests/sim/sim_medium.h"

/* Borrows both until the end. */
disk_tier *sim_disk_create(const sim_config *config, sim_medium *medium);
void sim_disk_destroy(disk_tier *d);
/* A moment passes. */
void sim_disk_tick(disk_tier *d);
/* Jobs that have not been taken by next_done. */
bool sim_disk_is_busy(const disk_tier *d);

#endif
