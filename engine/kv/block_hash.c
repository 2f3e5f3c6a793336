/* The serialisation is fixed: little-endian, length-prefixed, so that engines that share a cache
 * tier, and one engine before and after a restart, agree on every hash when they share the seed. A
 * block is fed to SHA-256 as one buffer of known size, since the cost of a call into the hash
 * library is that of hashing half a block. */
#include "engine/kv/block_hash.h"

#include <string.h>

#include "common/mem.h"

/* Tokens that are put in order at a time; blocks are this small nearly always. */
#define CHUNK_TOKENS 64

enum { TAG_LORA = 1, TAG_MM = 2, TAG_SALT = 3 };

struct block_hasher {
    hash_sha256_ctx *sha;
    block_hash seed;
    uint8_t buffer[HASH_SHA256_BYTES + 4 + CHUNK_TOKENS * 4 + 4];
};

pgd_err block_hasher_create(block_hasher **out, const uint8_t seed[HASH_SHA256_BYTES])
{
    *out = NULL;
    block_hasher *h = mem_calloc(1, sizeof *h);
    if (h == NULL)
        return PGD_ENOMEM;
    pgd_err err = hash_sha256_create(&h->sha);
    if (err != PGD_OK) {
        block_hasher_destroy(h);
        return err;
    }
    memcpy(h->seed.bytes, seed, sizeof h->seed.bytes);
    *out = h;
    return PGD_OK;
}

void block_hasher_destroy(block_hasher *h)
{
    if (h == NULL)
        return;
    hash_sha256_destroy(h->sha);
    mem_free(h);
}

static uint8_t *write_u32(uint8_t *out, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        *out++ = (uint8_t)(value >> (8 * i));
    return out;
}

void block_hasher_hash(block_hash *out, block_hasher *h, const block_hash *parent,
                       const token_id *tokens, int32_t n_tokens, const void *extra,
                       size_t extra_bytes)
{
    PGD_ASSERTF(n_tokens > 0 && extra_bytes <= UINT32_MAX, "block of %d tokens, %zu extra bytes",
                n_tokens, extra_bytes);
    hash_sha256_begin(h->sha);
    uint8_t *end = h->buffer;
    memcpy(end, parent != NULL ? parent->bytes : h->seed.bytes, HASH_SHA256_BYTES);
    end = write_u32(end + HASH_SHA256_BYTES, (uint32_t)n_tokens);
    int32_t n_buffered = 0;
    for (int32_t i = 0; i < n_tokens; i++) {
        if (n_buffered == CHUNK_TOKENS) {
            hash_sha256_update(h->sha, h->buffer, (size_t)(end - h->buffer));
            end = h->buffer;
            n_buffered = 0;
        }
        end = write_u32(end, (uint32_t)tokens[i]);
        n_buffered++;
    }
    end = write_u32(end, (uint32_t)extra_bytes);
    hash_sha256_update(h->sha, h->buffer, (size_t)(end - h->buffer));
    if (extra_bytes > 0)
        hash_sha256_update(h->sha, extra, extra_bytes);
    hash_sha256_end(h->sha, out->bytes);
}

int32_t block_hash_mm_keys(block_hash_mm_key *keys, int32_t *next_idx,
                           const block_hash_mm_item *items, int32_t n_items, int32_t first_token,
                           int32_t end_token)
{
    int32_t n_keys = 0;
    int32_t i = *next_idx;
    for (; i < n_items; i++) {
        const block_hash_mm_item *item = &items[i];
        int64_t item_end = (int64_t)item->offset + item->n_tokens;
        if (item->offset >= end_token)
            break;
        if (item_end > first_token)
            keys[n_keys++] = (block_hash_mm_key){item->content_id, item->offset - first_token};
        if (item_end > end_token)
            break;
    }
    *next_idx = i;
    return n_keys;
}

typedef struct extra_writer {
    uint8_t *out;
    size_t out_bytes;
    size_t n_bytes;
} extra_writer;

static void put_bytes(extra_writer *w, const void *data, size_t n_bytes)
{
    if (w->out != NULL && w->n_bytes < w->out_bytes)
        memcpy(w->out + w->n_bytes, data, PGD_MIN(n_bytes, w->out_bytes - w->n_bytes));
    w->n_bytes += n_bytes;
}

static void put_u32(extra_writer *w, uint32_t value)
{
    uint8_t bytes[4];
    write_u32(bytes, value);
    put_bytes(w, bytes, sizeof bytes);
}

static void put_text(extra_writer *w, uint8_t tag, const char *text)
{
    size_t n_bytes = strlen(text);
    PGD_ASSERTF(n_bytes <= UINT32_MAX, "text of %zu bytes", n_bytes);
    put_bytes(w, &tag, 1);
    put_u32(w, (uint32_t)n_bytes);
    put_bytes(w, text, n_bytes);
}

size_t block_hash_write_extra(void *out, size_t out_bytes, const char *lora_name,
                              const block_hash_mm_key *keys, int32_t n_keys, const char *salt)
{
    extra_writer w = {out, out_bytes, 0};
    if (lora_name != NULL)
        put_text(&w, TAG_LORA, lora_name);
    for (int32_t i = 0; i < n_keys; i++) {
        put_text(&w, TAG_MM, keys[i].content_id);
        put_u32(&w, (uint32_t)keys[i].offset);
    }
    if (salt != NULL)
        put_text(&w, TAG_SALT, salt);
    return w.n_bytes;
}
