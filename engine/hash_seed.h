/* The secret that block hashes begin with: fresh at every start, or kept in a file that engines share.
 *
 * Thread:  any
 */
#ifndef ENGINE_HASH_SEED_H
#define ENGINE_HASH_SEED_H

#include "common/hash.h"

/* path "": a fresh one. Else the first 32 bytes of that file, which is made (0600) when it is missing or
 * empty; of engines that start at the same time all get the same. Errors: PGD_EINVAL (something
 * else lies there), PGD_EIO (it cannot be read or made) */
PGD_MUST_USE pgd_err hash_seed_load(uint8_t out[HASH_SHA256_BYTES], const char *path, pgd_why *why);

#endif
