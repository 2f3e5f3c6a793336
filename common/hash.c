/* SHA-256 by libcrypto (it uses the CPU's SHA instructions), 64-bit mixes by hand. */
#include "common/hash.h"

#include <string.h>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "common/mem.h"

struct hash_sha256_ctx {
    EVP_MD_CTX *md_ctx;
    const EVP_MD *md;
};

pgd_err hash_sha256_create(hash_sha256_ctx **out)
{
    hash_sha256_ctx *ctx = mem_calloc(1, sizeof(*ctx));
    if (ctx == NULL)
        return PGD_ENOMEM;
    ctx->md_ctx = EVP_MD_CTX_new();
    ctx->md = EVP_sha256();
    /* The first init allocates the digest's state; done here so that begin does not. */
    if (ctx->md_ctx == NULL || EVP_DigestInit_ex(ctx->md_ctx, ctx->md, NULL) != 1) {
        hash_sha256_destroy(ctx);
        return PGD_ENOMEM;
    }
    *out = ctx;
    return PGD_OK;
}

void hash_sha256_destroy(hash_sha256_ctx *ctx)
{
    if (ctx == NULL)
        return;
    EVP_MD_CTX_free(ctx->md_ctx);
    mem_free(ctx);
}

void hash_sha256_begin(hash_sha256_ctx *ctx)
{
    PGD_ASSERT(EVP_DigestInit_ex(ctx->md_ctx, NULL, NULL) == 1);
}

void hash_sha256_update(hash_sha256_ctx *ctx, const void *data, size_t n_bytes)
{
    PGD_ASSERT(EVP_DigestUpdate(ctx->md_ctx, data, n_bytes) == 1);
}

void hash_sha256_end(hash_sha256_ctx *ctx, uint8_t out[HASH_SHA256_BYTES])
{
    unsigned n_bytes = HASH_SHA256_BYTES;
    PGD_ASSERT(EVP_DigestFinal_ex(ctx->md_ctx, out, &n_bytes) == 1 && n_bytes == HASH_SHA256_BYTES);
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
