/* Chained content hashes of full KV blocks (rules HS of the engine-core reference).
 *
 *   hash_i = SHA-256( parent || le32(n_tokens) || le32 tokens... || le32(extra_len) || extra )
 *
 * parent = hash_{i-1}, or the deployment seed for i = 0. extra is the canonical, length-prefixed
 * little-endian form of LoRA name, multimodal items that overlap the block, and, for block 0 only,
 * the cache salt; empty = length 0.
 * Thread:  a block_hasher belongs to one thread; the seed is copied
 */
#ifndef ENGINE_KV_BLOCK_HASH_H
#define ENGINE_KV_BLOCK_HASH_H

#include "common/hash.h"

typedef struct block_hash {
    uint8_t bytes[HASH_SHA256_BYTES];
} block_hash;

typedef struct block_hasher block_hasher;

PGD_MUST_USE pgd_err block_hasher_create(block_hasher **out, const uint8_t seed[HASH_SHA256_BYTES]);
void block_hasher_destroy(block_hasher *h);
/* parent NULL = the seed. extra may be NULL with 0 bytes. Never allocates. */
void block_hasher_hash(block_hash *out, block_hasher *h, const block_hash *parent,
                       const token_id *tokens, int32_t n_tokens, const void *extra,
                       size_t extra_bytes);

/* A multimodal item of the prompt: its placeholder tokens are [offset, offset + n_tokens). */
typedef struct block_hash_mm_item {
    const char *content_id; /* NUL-terminated digest of the content, borrow */
    int32_t offset;
    int32_t n_tokens;
} block_hash_mm_item;

/* What one item adds to the hash of a block: the offset is relative to the block's start and may be
 * negative, so that the same content at another place does not collide (HS3). */
typedef struct block_hash_mm_key {
    const char *content_id;
    int32_t offset;
} block_hash_mm_key;

/* Keys of the items (sorted by offset, not overlapping) that overlap tokens [first_token,
 * end_token). *next_idx is the cursor: items before it are not looked at; on return it is the first
 * item that reaches beyond end_token. keys: [n_items - *next_idx]. Returns the number of keys. */
int32_t block_hash_mm_keys(block_hash_mm_key *keys, int32_t *next_idx,
                           const block_hash_mm_item *items, int32_t n_items, int32_t first_token,
                           int32_t end_token);

/* The canonical extra bytes of one block: for each present part, in the order LoRA name, multimodal
 * keys, salt:
 *   u8 tag (1, 2, 3) || le32 text length || text || (multimodal only) le32 offset
 * lora_name and salt may be NULL; pass the salt for block 0 only. out may be NULL to ask for the
 * size; nothing is written beyond out_bytes. Returns the size in full. */
size_t block_hash_write_extra(void *out, size_t out_bytes, const char *lora_name,
                              const block_hash_mm_key *keys, int32_t n_keys, const char *salt);

#endif
