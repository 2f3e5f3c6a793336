/* A block of the disk tier as a file: its name, and the header before the payload.
 *
 *   name     <model, 16 hex digits>-<hash, 64>-<group, 8>, in the folder of the hash's first two
 *   header   whole pages: magic, version, fingerprint, key, shape, a kv_region_header per rank,
 *            XXH3 of all that; little-endian
 *   payload  the block as it lies in the region, to a whole page
 *
 * The model is the first eight bytes of the fingerprint. Shards keep the tag and checksum that
 * their worker gave them, so what is read is held against what was computed, not against what a
 * tier made of it. The file is outside data: it is taken when every byte of the header is as
 * expected, or not at all.
 * Owns:    nothing
 * Thread:  any
 */
#ifndef ENGINE_OFFLOAD_DISK_BLOCK_H
#define ENGINE_OFFLOAD_DISK_BLOCK_H

#include "common/hash.h"
#include "engine/offload/offload_policy.h"
#include "proto/kv_region.h"

enum {
    DISK_BLOCK_ALIGN = 4096,     /* of every length and address, for direct I/O */
    DISK_BLOCK_NAME_BYTES = 96,  /* NUL included */
    DISK_BLOCK_FOLDER_BYTES = 3, /* NUL included */
    DISK_BLOCK_N_FOLDERS = 256
};

/* Which block of which model. */
typedef struct disk_block_id {
    offload_key key;
    uint64_t model;
} disk_block_id;

/* What all files of a tier have in common. */
typedef struct disk_block_kind {
    uint8_t fingerprint[HASH_SHA256_BYTES];
    int32_t n_ranks;
    uint64_t shard_bytes;
} disk_block_kind;

uint64_t disk_block_model(const uint8_t fingerprint[HASH_SHA256_BYTES]);
bool disk_block_id_is_equal(const disk_block_id *a, const disk_block_id *b);
/* Whole pages. */
size_t disk_block_header_bytes(const disk_block_kind *kind);
size_t disk_block_payload_bytes(const disk_block_kind *kind);

/* out: [disk_block_header_bytes], shards: [n_ranks] */
void disk_block_encode(uint8_t *out, const disk_block_kind *kind, const offload_key *key,
                       const kv_region_header *shards);
/* shards: [n_ranks], filled when header [disk_block_header_bytes] is that of this block. */
PGD_MUST_USE bool disk_block_decode(kv_region_header *shards, const uint8_t *header,
                                    const disk_block_kind *kind, const offload_key *key);

void disk_block_name(char out[DISK_BLOCK_NAME_BYTES], const disk_block_id *id);
void disk_block_folder(char out[DISK_BLOCK_FOLDER_BYTES], const disk_block_id *id);
/* False: not the name of a block. */
PGD_MUST_USE bool disk_block_parse_name(disk_block_id *out, const char *name);

#endif
