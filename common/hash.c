/* SHA-256 by libcrypto (it uses the CPU's SHA instructions), XXH3 by libxxhash, 64-bit mixes by
 * hand.
 *
 * SHA-256 by the plain functions, not by EVP: a block of tokens is so short that what EVP does around
 * it costs half as much again. OpenSSL 3 has them, and calls them deprecated. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include "common/hash.h"

#include <string.h>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>
/* Where the library has it, the CPU's widest vectors are used; the values are the same. */
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#    include <xxh_x86dispatch.h>
#else
#    include <xxhash.h>
#endif

#include "common/mem.h"

struct hash_sha256_ctx {
    SHA256_CTX sha;
};

pgd_err hash_sha256_create(hash_sha256_ctx **out)
{
    *out = mem_calloc(1, sizeof **out);
    return *out != NULL ? PGD_OK : PGD_ENOMEM;
}

void hash_sha256_destroy(hash_sha256_ctx *ctx)
{
    mem_free(ctx);
}

void hash_sha256_begin(hash_sha256_ctx *ctx)
{
    PGD_ASSERT(SHA256_Init(&ctx->sha) == 1);
}

void hash_sha256_update(hash_sha256_ctx *ctx, const void *data, size_t n_bytes)
{
    PGD_ASSERT(SHA256_Update(&ctx->sha, data, n_bytes) == 1);
}

void hash_sha256_end(hash_sha256_ctx *ctx, uint8_t out[HASH_SHA256_BYTES])
{
    PGD_ASSERT(SHA256_Final(out, &ctx->sha) == 1);
}

bool hash_hmac_sha256(uint8_t out[HASH_SHA256_BYTES], const void *key, size_t key_bytes,
                      const void *data, size_t n_bytes)
{
    unsigned out_bytes = 0;
    PGD_ASSERT(key_bytes <= INT32_MAX);
    return HMAC(EVP_sha256(), key_bytes > 0 ? key : "", (int)key_bytes, data, n_bytes, out,
                &out_bytes) != NULL;
}

bool hash_is_equal(const void *a, const void *b, size_t n_bytes)
{
    return CRYPTO_memcmp(a, b, n_bytes) == 0;
}

/* The finaliser of MurmurHash3 (public domain constants): every input bit reaches every output bit.
 */
uint64_t hash_u64(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    x ^= x >> 33;
    return x;
}

uint64_t hash_xxh3(const void *data, size_t n_bytes, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, n_bytes, seed);
}

uint64_t hash_bytes(const void *data, size_t n_bytes, uint64_t seed)
{
    const uint8_t *p = data;
    uint64_t h = 0xcbf29ce484222325ULL ^ seed; /* FNV-1a offset basis and prime */
    for (size_t i = 0; i < n_bytes; i++) {
        h ^= p[i];
        h *= 0x100000001b3ULL;
    }
    return hash_u64(h);
}
