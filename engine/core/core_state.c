/* The names are part of the API: /health answers with them. */
#include "engine/core/core_state.h"

const char *core_state_name(core_state state)
{
    static const char *const names[] = {
        [CORE_STARTING] = "starting",     [CORE_LOADING] = "loading",   [CORE_READY] = "ready",
        [CORE_RECOVERING] = "recovering", [CORE_DRAINING] = "draining", [CORE_FAILED] = "failed",
        [CORE_STOPPED] = "stopped",
    };
    return names[state];
}
