/* An engine without a server, for commands that run some generations and leave.
 *
 * Thread:  main
 */
#ifndef ENGINE_OFFLINE_H
#define ENGINE_OFFLINE_H

#include "engine/engine.h"

typedef struct offline {
    uv_loop_t loop;
    engine *engine;
    core_state state;
    uint64_t ready_us; /* time from start to ready */
} offline;

/* Starts the engine and runs the loop until the worker is ready; shows progress. On failure prints
 * the reason and returns an exit status, else 0. Storage belongs to the caller and must not move.
 */
int offline_start(offline *o, const config *cfg);
/* Runs the loop until *n_left is 0 or the engine fails; false then. */
bool offline_wait(offline *o, const int *n_left);
void offline_stop(offline *o);

#endif
