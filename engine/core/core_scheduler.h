/* The scheduler of a replica, from its configuration and what the worker's memory allows.
 *
 * Thread:  core
 */
#ifndef ENGINE_CORE_CORE_SCHEDULER_H
#define ENGINE_CORE_CORE_SCHEDULER_H

#include "engine/core/core_sizes.h"
#include "engine/core/scheduler.h"

/* base: hash_seed, the callbacks and their argument; everything else of it is set here. Errors: those
 * of scheduler_create */
PGD_MUST_USE pgd_err core_scheduler_create(scheduler **out, const scheduler_opts *base,
                                           const config *cfg, const core_sizes *sizes,
                                           const core_kv *kv, pgd_why *why);

#endif
