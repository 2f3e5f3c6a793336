/* The worker's main thread: hello, load, KV configuration, then one step after the other until
 * shutdown.
 *
 * Everything it knows it was told in this life; nothing survives it (invariant I2).
 * Thread:  worker
 */
#ifndef WORKER_WORKER_LOOP_H
#define WORKER_WORKER_LOOP_H

#include "proto/control.h"
#include "worker/engine_link.h"
#include "worker/step_runner.h"

typedef struct worker_loop_opts {
    engine_link *link;   /* borrow for the call */
    step_runner *runner; /* borrow for the call */
    const char *device;  /* "cpu", "sim" */
    uint32_t rank;
    uint8_t proof[CONTROL_PROOF_BYTES]; /* of handshake_run */
    uint64_t *last_step_id;             /* written atomically, for the heartbeat */
} worker_loop_opts;

/* PGD_OK after a shutdown message. On any failure the engine has been told, if it could be; why
 * says what. */
PGD_MUST_USE pgd_err worker_loop_run(const worker_loop_opts *opts, pgd_why *why);

#endif
