/* How engine and worker recognise each other before anything else is said.
 *
 *   worker                            engine
 *   challenge(nonce_w)    ───────►
 *                         ◄───────    attach(nonce_e, max_frame_bytes, proof of the engine)
 *   hello(proof of the worker) ────►
 *
 *   proof = HMAC-SHA256(key, role ‖ version ‖ nonce_w ‖ nonce_e ‖ epoch ‖ max_frame_bytes)
 *
 * The key never travels. The roles keep one side from being answered with its own proof, the nonces
 * keep old proofs from being used again, and what the engine lays down is part of what it proves.
 * The key is what the engine wrote to the stdin of a worker that it started, or the content of
 * --worker-token-file; without one it is empty: then both sides must be without.
 * Thread:  any
 */
#ifndef PROTO_ATTACH_H
#define PROTO_ATTACH_H

#include "proto/control.h"

#define ATTACH_MIN_KEY_BYTES 32
#define ATTACH_MAX_KEY_BYTES 1024

typedef enum attach_role { ATTACH_ENGINE, ATTACH_WORKER } attach_role;

typedef struct attach_key {
    size_t n_bytes; /* 0 = none */
    uint8_t data[ATTACH_MAX_KEY_BYTES];
} attach_key;

/* What both sides know when a proof is made or checked. */
typedef struct attach_terms {
    uint8_t worker_nonce[CONTROL_NONCE_BYTES];
    uint8_t engine_nonce[CONTROL_NONCE_BYTES];
    uint32_t worker_epoch;
    uint32_t max_frame_bytes;
} attach_terms;

/* Errors: PGD_EIO (the system has no random numbers) */
PGD_MUST_USE pgd_err attach_draw_nonce(uint8_t nonce[CONTROL_NONCE_BYTES], pgd_why *why);
/* Errors: PGD_ENOMEM */
PGD_MUST_USE pgd_err attach_prove(uint8_t proof[CONTROL_PROOF_BYTES], const attach_key *key,
                                  attach_role role, const attach_terms *terms);
/* Compares in constant time. PGD_EPROTO: not this key, or other terms. */
PGD_MUST_USE pgd_err attach_check(const uint8_t proof[CONTROL_PROOF_BYTES], const attach_key *key,
                                  attach_role role, const attach_terms *terms, pgd_why *why);

/* The key from a file that nobody else may read or write; a newline at its end does not belong to
 * it. The why never holds any of it. Errors: PGD_EINVAL (mode, length), PGD_ENOENT, PGD_EIO */
PGD_MUST_USE pgd_err attach_read_key(attach_key *out, const char *path, pgd_why *why);

/* Whether a worker may be reached at url: ipc:// with an absolute path, tcp:// with host and port.
 * TCP beyond loopback needs a key. Errors: PGD_EINVAL, PGD_EUNSUPPORTED */
PGD_MUST_USE pgd_err attach_check_url(const char *url, bool has_key, pgd_why *why);
/* The path of an ipc:// URL, else NULL; borrow of url. */
const char *attach_ipc_path(const char *url);
/* Before NNG listens at the path of a good ipc:// URL: it replaces a socket that nobody listens on,
 * but any other file too. PGD_EINVAL: something else is there. */
PGD_MUST_USE pgd_err attach_check_ipc_place(const char *path, pgd_why *why);
/* Whether a good URL can only mean this machine. */
bool attach_is_local(const char *url);

#endif
