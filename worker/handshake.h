/* The worker's side of proto/attach.h: who is at the other end of a link, and under which epoch.
 *
 * Thread:  worker
 */
#ifndef WORKER_HANDSHAKE_H
#define WORKER_HANDSHAKE_H

#include "proto/attach.h"
#include "worker/engine_link.h"

/* RECVMAXSZ of a link until the engine has proved itself. */
#define HANDSHAKE_MAX_RECV_BYTES CONTROL_MIN_FRAME_BYTES

/* Challenges the engine and adopts its epoch and frame size; proof is what hello has to carry. An
 * engine that proves nothing has been told. Errors: PGD_EPROTO, PGD_EUNSUPPORTED (another version),
 * PGD_ETIMEDOUT, PGD_ECLOSED, PGD_EIO, PGD_ENOMEM */
PGD_MUST_USE pgd_err handshake_run(uint8_t proof[CONTROL_PROOF_BYTES], engine_link *link,
                                   const attach_key *key, int timeout_ms, pgd_why *why);

/* Listens at url until an engine comes that knows the key. Others are logged and told, and cost
 * nothing but the moment that they take. Errors: those of engine_link_listen */
PGD_MUST_USE pgd_err handshake_await(engine_link **out, uint8_t proof[CONTROL_PROOF_BYTES],
                                     const char *url, const attach_key *key, pgd_why *why);

#endif
