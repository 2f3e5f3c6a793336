/* Everything in a header but tags and checksums is known to who reads it, so that decoding is
 * making the header that should be there and comparing. */
#include "engine/offload/disk_block.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/bytes.h"

#define MAGIC   "PAGEDKVB"
#define VERSION 1u

enum {
    AT_VERSION = 8,
    AT_N_RANKS = 12,
    AT_SHARD_BYTES = 16,
    AT_FINGERPRINT = 24,
    AT_HASH = AT_FINGERPRINT + HASH_SHA256_BYTES,
    AT_GROUP = AT_HASH + HASH_SHA256_BYTES,
    AT_SHARDS = AT_GROUP + 8,
    SHARD_BYTES = 16,
    CHECKSUM_BYTES = 8
};

uint64_t disk_block_model(const uint8_t fingerprint[HASH_SHA256_BYTES])
{
    return bytes_load_u64(fingerprint);
}

bool disk_block_id_is_equal(const disk_block_id *a, const disk_block_id *b)
{
    return a->model == b->model && a->key.group_id == b->key.group_id &&
           memcmp(&a->key.hash, &b->key.hash, sizeof(a->key.hash)) == 0;
}

size_t disk_block_header_bytes(const disk_block_kind *kind)
{
    size_t n = AT_SHARDS + (size_t)kind->n_ranks * SHARD_BYTES + CHECKSUM_BYTES;
    return PGD_ROUND_UP(n, (size_t)DISK_BLOCK_ALIGN);
}

size_t disk_block_payload_bytes(const disk_block_kind *kind)
{
    return PGD_ROUND_UP((size_t)kind->n_ranks * kind->shard_bytes, (size_t)DISK_BLOCK_ALIGN);
}

/* All up to the shards' headers; they are all zero, as is the rest. */
static void put_fixed(uint8_t *out, const disk_block_kind *kind, const offload_key *key)
{
    uint32_t version = VERSION;
    memcpy(out, MAGIC, sizeof(MAGIC) - 1);
    memcpy(out + AT_VERSION, &version, sizeof(version));
    memcpy(out + AT_N_RANKS, &kind->n_ranks, sizeof(kind->n_ranks));
    memcpy(out + AT_SHARD_BYTES, &kind->shard_bytes, sizeof(kind->shard_bytes));
    memcpy(out + AT_FINGERPRINT, kind->fingerprint, HASH_SHA256_BYTES);
    memcpy(out + AT_HASH, key->hash.bytes, HASH_SHA256_BYTES);
    memcpy(out + AT_GROUP, &key->group_id, sizeof(key->group_id));
}

static size_t checksum_at(const disk_block_kind *kind)
{
    return AT_SHARDS + (size_t)kind->n_ranks * SHARD_BYTES;
}

void disk_block_encode(uint8_t *out, const disk_block_kind *kind, const offload_key *key,
                       const kv_region_header *shards)
{
    size_t at = checksum_at(kind);
    memset(out, 0, disk_block_header_bytes(kind));
    put_fixed(out, kind, key);
    for (int32_t i = 0; i < kind->n_ranks; i++) {
        uint8_t *shard = out + AT_SHARDS + (size_t)i * SHARD_BYTES;
        memcpy(shard, &shards[i].tag, sizeof(shards[i].tag));
        memcpy(shard + 8, &shards[i].checksum, sizeof(shards[i].checksum));
    }
    uint64_t checksum = hash_xxh3(out, at, 0);
    memcpy(out + at, &checksum, sizeof(checksum));
}

bool disk_block_decode(kv_region_header *shards, const uint8_t *header, const disk_block_kind *kind,
                       const offload_key *key)
{
    uint8_t expected[AT_SHARDS] = {0};
    size_t at = checksum_at(kind);
    put_fixed(expected, kind, key);
    if (memcmp(header, expected, sizeof(expected)) != 0 ||
        bytes_load_u64(header + at) != hash_xxh3(header, at, 0))
        return false;
    for (int32_t i = 0; i < kind->n_ranks; i++) {
        const uint8_t *shard = header + AT_SHARDS + (size_t)i * SHARD_BYTES;
        shards[i].tag = bytes_load_u64(shard);
        shards[i].checksum = bytes_load_u64(shard + 8);
    }
    return true;
}

void disk_block_name(char out[DISK_BLOCK_NAME_BYTES], const disk_block_id *id)
{
    size_t at = (size_t)snprintf(out, DISK_BLOCK_NAME_BYTES, "%016" PRIx64 "-", id->model);
    for (int i = 0; i < HASH_SHA256_BYTES; i++)
        at += (size_t)snprintf(out + at, DISK_BLOCK_NAME_BYTES - at, "%02x", id->key.hash.bytes[i]);
    (void)snprintf(out + at, DISK_BLOCK_NAME_BYTES - at, "-%08" PRIx32, (uint32_t)id->key.group_id);
}

void disk_block_folder(char out[DISK_BLOCK_FOLDER_BYTES], const disk_block_id *id)
{
    (void)snprintf(out, DISK_BLOCK_FOLDER_BYTES, "%02x", id->key.hash.bytes[0]);
}

/* n_digits lower-case hexadecimal digits, as they are written; stands behind them afterwards. */
static bool take_hex(uint64_t *out, const char **text, int n_digits)
{
    *out = 0;
    for (int i = 0; i < n_digits; i++, (*text)++) {
        int digit = bytes_hex_digit(**text);
        if (digit < 0 || (**text >= 'A' && **text <= 'F'))
            return false;
        *out = *out << 4 | (uint64_t)digit;
    }
    return true;
}

bool disk_block_parse_name(disk_block_id *out, const char *name)
{
    uint64_t v;
    if (!take_hex(&out->model, &name, 16) || *name++ != '-')
        return false;
    for (int i = 0; i < HASH_SHA256_BYTES; i++) {
        if (!take_hex(&v, &name, 2))
            return false;
        out->key.hash.bytes[i] = (uint8_t)v;
    }
    if (*name++ != '-' || !take_hex(&v, &name, 8) || *name != '\0')
        return false;
    out->key.group_id = (int32_t)(uint32_t)v;
    return true;
}
