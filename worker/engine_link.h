/* The worker's end of the message channel to its engine: an NNG pair0 socket that dials the
 * engine's URL.
 *
 * Sends may come from the main thread (which waits) and the heartbeat thread (which does not). A
 * lost pipe is final: the descriptor of engine_link_get_lost_fd becomes readable and the process
 * should exit.
 * Thread:  send any; the rest main
 */
#ifndef WORKER_ENGINE_LINK_H
#define WORKER_ENGINE_LINK_H

#include "proto/wire.h"

typedef struct engine_link engine_link;

typedef struct engine_frame {
    wire_type type;
    const void *data; /* borrow until the next recv or close; 8-byte aligned */
    size_t n_bytes;
} engine_frame;

/* max_recv_bytes: RECVMAXSZ. Waits for the connection. */
PGD_MUST_USE pgd_err engine_link_open(engine_link **out, const char *url, uint32_t worker_epoch,
                                      size_t max_recv_bytes, pgd_why *why);
void engine_link_close(engine_link *l);
/* wait: block while the queue is full, else PGD_EAGAIN. PGD_ECLOSED: the engine is gone. */
PGD_MUST_USE pgd_err engine_link_send(engine_link *l, wire_type type, const wire_record *rec,
                                      const void *msg, bool wait);
/* Blocks until a frame of this incarnation's epoch comes. PGD_ECLOSED: the engine is gone. */
PGD_MUST_USE pgd_err engine_link_recv(engine_link *l, engine_frame *out, pgd_why *why);
int engine_link_get_lost_fd(const engine_link *l);

#endif
