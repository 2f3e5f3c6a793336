/* What a core loop is doing, as everybody else is told.
 *
 * Thread:  any
 */
#ifndef ENGINE_CORE_CORE_STATE_H
#define ENGINE_CORE_CORE_STATE_H

typedef enum core_state {
    CORE_STARTING, /* worker being spawned */
    CORE_LOADING,  /* worker loads the model */
    CORE_READY,
    CORE_RECOVERING, /* worker died, being restarted */
    CORE_DRAINING,
    CORE_FAILED, /* given up; see core_stats.why */
    CORE_STOPPED
} core_state;

/* "starting", "loading" ...; static storage. */
const char *core_state_name(core_state state);

#endif
