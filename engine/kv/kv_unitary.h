/* The coordinator of a model with one KV-cache group (rule CO2).
 *
 * Thread:  core
 */
#ifndef ENGINE_KV_KV_UNITARY_H
#define ENGINE_KV_KV_UNITARY_H

#include "engine/kv/kv_coordinator.h"

/* Static storage. */
const kv_coordinator_ops *kv_unitary_get_ops(void);

#endif
