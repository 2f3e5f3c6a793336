/* Hashes: SHA-256 (libcrypto) for content that must not collide, HMAC for proofs, a 64-bit
 * mix for hash tables, XXH3 (libxxhash) for checksums of large blocks.
 *
 * Thread:  any; a hash_sha256_ctx belongs to one thread at a time
 */
#ifndef COMMON_HASH_H
#define COMMON_HASH_H

#include "common/err.h"

#define HASH_SHA256_BYTES 32

typedef struct hash_sha256_ctx hash_sha256_ctx;

PGD_MUST_USE pgd_err hash_sha256_create(hash_sha256_ctx **out);
void hash_sha256_destroy(hash_sha256_ctx *ctx);
/* begin, any number of updates, end; begin again to reuse. Never allocates after create. */
void hash_sha256_begin(hash_sha256_ctx *ctx);
void hash_sha256_update(hash_sha256_ctx *ctx, const void *data, size_t n_bytes);
void hash_sha256_end(hash_sha256_ctx *ctx, uint8_t out[HASH_SHA256_BYTES]);

/* key may be empty. False when memory ran out. */
PGD_MUST_USE bool hash_hmac_sha256(uint8_t out[HASH_SHA256_BYTES], const void *key,
                                   size_t key_bytes, const void *data, size_t n_bytes);
/* In a time that does not depend on where they differ. */
bool hash_is_equal(const void *a, const void *b, size_t n_bytes);

/* XXH3, 64 bits: finds damage, not malice. The values are the same on every machine, and may be kept
 * in files. */
uint64_t hash_xxh3(const void *data, size_t n_bytes, uint64_t seed);
/* FNV-1a with a final mix; not for untrusted keys without a seed. */
uint64_t hash_bytes(const void *data, size_t n_bytes, uint64_t seed);
uint64_t hash_u64(uint64_t x);

#endif
