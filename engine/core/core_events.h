/* Cache events of the core thread on their way to subscribers: the ring that scheduler and offload
 * tiers write, and the link that publishes it.
 *
 * Thread:  core, but open and close: io while the core thread does not run
 */
#ifndef ENGINE_CORE_CORE_EVENTS_H
#define ENGINE_CORE_CORE_EVENTS_H

#include "config/config.h"
#include "engine/core/scheduler.h"
#include "engine/kv/kv_events_link.h"

typedef struct core_events core_events;

/* *out is NULL, which the other functions take, when kv_events_url is empty. wake_fd: an eventfd that
 * makes the core loop turn; borrow until close. Errors: those of kv_events_link_open */
PGD_MUST_USE pgd_err core_events_open(core_events **out, const config *cfg, int wake_fd,
                                      pgd_why *why);
void core_events_close(core_events *e);
/* For whoever tells what is cached; borrow until close; NULL = nobody asks. */
kv_events *core_events_get_ring(const core_events *e);
/* Once the scheduler is there and the tiers are told: what they hold from before is published. */
void core_events_start(core_events *e);
/* In each turn: goes on with a snapshot, lets the link know of new events. s may be NULL. */
void core_events_turn(core_events *e, scheduler *s);
/* Zeros without events. Thread: any */
void core_events_get_stats(const core_events *e, kv_events_link_stats *out);

#endif
