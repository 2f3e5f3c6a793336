/* Full attention as a KV-cache group: every token attends to all earlier ones (rule SM4).
 *
 * Thread:  core
 */
#ifndef ENGINE_KV_KV_FULL_ATTENTION_H
#define ENGINE_KV_KV_FULL_ATTENTION_H

#include "engine/kv/kv_group_manager.h"

/* Static storage. */
const kv_group_ops *kv_full_attention_get_ops(void);

#endif
