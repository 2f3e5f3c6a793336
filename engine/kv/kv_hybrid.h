/* The coordinator of a model with several KV-cache groups and prefix caching (rules CO3-CO7).
 *
 * Thread:  core
 */
#ifndef ENGINE_KV_KV_HYBRID_H
#define ENGINE_KV_KV_HYBRID_H

#include "engine/kv/kv_coordinator.h"

/* Static storage. */
const kv_coordinator_ops *kv_hybrid_get_ops(void);

#endif
