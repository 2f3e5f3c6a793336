/* The worker's second thread: tells the engine twice a second how far the device is, and ends the
 * process when the engine is gone, whatever the main thread is doing.
 *
 * Gone is: the loss of the message pipe, or, for a worker that the engine started, the end of file
 * on stdin (the engine holds the other end of that pipe). The exit status is 0: the worker is done.
 * Thread:  start and stop: main
 */
#ifndef WORKER_HEARTBEAT_H
#define WORKER_HEARTBEAT_H

#include "worker/engine_link.h"

typedef struct heartbeat heartbeat;

typedef struct heartbeat_opts {
    engine_link *link;            /* borrow until stop */
    const uint64_t *progress;     /* read atomically; borrow until stop */
    const uint64_t *last_step_id; /* read atomically; borrow until stop */
    int stdin_fd;                 /* -1: the engine did not start this worker */
} heartbeat_opts;

PGD_MUST_USE pgd_err heartbeat_start(heartbeat **out, const heartbeat_opts *opts);
/* NULL is allowed. */
void heartbeat_stop(heartbeat *h);

#endif
