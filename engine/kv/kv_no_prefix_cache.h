/* The coordinator with prefix caching off: nothing is found (rule CO1).
 *
 * Thread:  core
 */
#ifndef ENGINE_KV_KV_NO_PREFIX_CACHE_H
#define ENGINE_KV_KV_NO_PREFIX_CACHE_H

#include "engine/kv/kv_coordinator.h"

/* Static storage. */
const kv_coordinator_ops *kv_no_prefix_cache_get_ops(void);

#endif
