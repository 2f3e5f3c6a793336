/* The private directory of the worker sockets.
 *
 * Whoever can open a worker's socket can pose as its engine, so the directory must be ours and
 * closed to everybody else; one that is not is refused, never repaired.
 * Thread:  any
 */
#ifndef ENGINE_CORE_RUNTIME_DIR_H
#define ENGINE_CORE_RUNTIME_DIR_H

#include "common/err.h"

/* Longest directory that leaves room for a socket's name in a sockaddr_un. */
#define RUNTIME_DIR_BYTES 72

/* Picks wanted, else $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/paged, /tmp/paged-UID; makes it 0700 when
 * missing; checks owner and mode. Errors: PGD_EINVAL (foreign, open to others, too long), PGD_EIO
 */
PGD_MUST_USE pgd_err runtime_dir_prepare(char out[RUNTIME_DIR_BYTES], const char *wanted,
                                         pgd_why *why);
/* Removes sockets that engines left there which no longer live. */
void runtime_dir_sweep(const char *dir);

#endif
