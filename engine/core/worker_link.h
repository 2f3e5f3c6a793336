/* The engine's end of the message channel to one incarnation of a worker: an NNG pair0 socket that
 * listens on a fresh ipc:// URL, or that dials the URL of a worker that an operator started.
 *
 * One link per incarnation, and one connection per link: a pair0 socket that outlives its worker
 * would hand the dead worker's queued frames to the next one, so a second connection is refused.
 * Dialing goes on in the background until the first one is made. Nothing here blocks. wake_fd (an
 * eventfd) is written when a frame comes after worker_link_recv had none, and when the worker's end
 * goes away.
 * Owns:    the socket and the frame last received
 * Thread:  core; the NNG threads touch only wake_fd and two flags (atomic)
 */
#ifndef ENGINE_CORE_WORKER_LINK_H
#define ENGINE_CORE_WORKER_LINK_H

#include "proto/wire.h"

#define WORKER_LINK_MAX_HELD 4

typedef struct worker_link worker_link;

typedef struct worker_link_opts {
    const char *dir;       /* listen in this directory of runtime_dir_prepare; or */
    const char *dial;      /* dial this URL; the other is NULL; borrows for the call */
    uint32_t worker_epoch; /* stamped on every frame sent, expected on every frame received */
    size_t max_recv_bytes; /* RECVMAXSZ */
    int wake_fd;           /* borrow until close */
} worker_link_opts;

typedef struct worker_frame {
    wire_type type;
    const void *data; /* borrow until the next recv or close; 8-byte aligned */
    size_t n_bytes;
} worker_frame;

PGD_MUST_USE pgd_err worker_link_open(worker_link **out, const worker_link_opts *opts,
                                      pgd_why *why);
/* Removes the socket's file too. NULL is allowed. The worker should be dead by then, and the caller
 * should have received regularly (see worker_link.c). */
void worker_link_close(worker_link *l);
/* What the worker dials, or listens on; borrow until close. */
const char *worker_link_get_url(const worker_link *l);
/* PGD_EAGAIN: the queue to the worker is full, it has stalled; PGD_ECLOSED: it is gone. */
PGD_MUST_USE pgd_err worker_link_send(worker_link *l, wire_type type, const wire_record *rec,
                                      const void *msg);
/* PGD_EAGAIN: none waits. Frames of another epoch are dropped, but for a challenge or error of
 * epoch 0, whose sender does not know its own yet. PGD_EPROTO, PGD_EUNSUPPORTED: a bad header. */
PGD_MUST_USE pgd_err worker_link_recv(worker_link *l, worker_frame *out, pgd_why *why);
/* Keeps the frame last received, in order, until worker_link_take_held. False when
 * WORKER_LINK_MAX_HELD are kept. */
bool worker_link_hold(worker_link *l);
/* The oldest kept frame, as if it had just been received; false when there is none. */
bool worker_link_take_held(worker_link *l, worker_frame *out);
int32_t worker_link_n_held(const worker_link *l);
/* A worker has connected. */
bool worker_link_is_up(const worker_link *l);
/* The worker had connected and its end is gone. */
bool worker_link_is_lost(const worker_link *l);

#endif
