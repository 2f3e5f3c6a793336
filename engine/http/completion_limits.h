/* What a completion asks for in all, held against what this server has: its lengths against the
 * model and the KV cache, its answer against what may be held of it.
 *
 * Thread:  any
 */
#ifndef ENGINE_HTTP_COMPLETION_LIMITS_H
#define ENGINE_HTTP_COMPLETION_LIMITS_H

#include "engine/core/core_loop.h"
#include "engine/http/completion_params.h"

/* max_source: engine_max_source. Of params whose prompts are token ids. False with *fault filled: a 400 that says by how much. */
PGD_MUST_USE bool completion_limits_check(completion_fault *fault, const completion_params *p,
                                          const core_stats *stats, const config *cfg,
                                          int32_t max_source);

#endif
