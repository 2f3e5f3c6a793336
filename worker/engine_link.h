/* The worker's end of the message channel to its engine: an NNG pair0 socket that dials the URL of
 * the engine that started it, or listens until one comes.
 *
 * One connection in its life, further ones are refused; an ipc:// socket is then no longer found
 * under its path, so that another worker can listen there even if this one hangs.
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
    uint32_t worker_epoch;
    const void *data; /* borrow until the next recv or close; 8-byte aligned */
    size_t n_bytes;
} engine_frame;

/* Dials. Frames of any epoch are received, of at most max_recv_bytes, until engine_link_adopt. */
PGD_MUST_USE pgd_err engine_link_dial(engine_link **out, const char *url, size_t max_recv_bytes,
                                      pgd_why *why);
/* Listens; a socket file that nobody listens on any more is replaced. Errors: PGD_EINVAL (something
 * else is at the path), PGD_EIO (in use, no such address) */
PGD_MUST_USE pgd_err engine_link_listen(engine_link **out, const char *url, size_t max_recv_bytes,
                                        pgd_why *why);
/* Until somebody has connected to a link that listens; false: nobody has within the time. */
bool engine_link_wait(engine_link *l, int timeout_ms);
/* From here on frames carry this epoch, and only such are received. Errors: PGD_ERANGE (larger
 * frames than a link that listens can take with this release of NNG), PGD_EIO */
PGD_MUST_USE pgd_err engine_link_adopt(engine_link *l, uint32_t worker_epoch,
                                       size_t max_recv_bytes);
/* A link that listened and was adopted is left to the end of the process: NNG would remove the file
 * at its path, which may be another worker's by now. */
void engine_link_close(engine_link *l);
/* wait: block while the queue is full, else PGD_EAGAIN. PGD_ECLOSED: the engine is gone. */
PGD_MUST_USE pgd_err engine_link_send(engine_link *l, wire_type type, const wire_record *rec,
                                      const void *msg, bool wait);
/* Blocks until a frame of this incarnation's epoch comes. PGD_ECLOSED: the engine is gone. */
PGD_MUST_USE pgd_err engine_link_recv(engine_link *l, engine_frame *out, pgd_why *why);
/* The same with a limit. PGD_ETIMEDOUT; PGD_ECLOSED: also when the connection is lost. */
PGD_MUST_USE pgd_err engine_link_recv_within(engine_link *l, engine_frame *out, int timeout_ms,
                                             pgd_why *why);
int engine_link_get_lost_fd(const engine_link *l);

#endif
