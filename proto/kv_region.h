/* The memory of an offload tier: a file that the engine makes and its workers map, so that it
 * outlives them, and the engine too where the file does.
 *
 *   superblock   a page: magic, format, fingerprint, shape
 *   headers      [n_blocks][n_ranks], 16 bytes: what the shard holds, by who wrote it
 *   entries      [n_blocks], 64 bytes: the engine's own
 *   data         page-aligned; [n_blocks] of n_ranks shards of shard_bytes, each block at a page
 *
 * A shard is the pages of one device block, slot after slot. Its header is written behind the
 * payload: the tag, and a checksum of the payload that is seeded with the tag and the fingerprint.
 * Both are held against what was read whenever a shard is read, so that a torn or foreign block is a
 * miss, and so is one that a worker writes late which belonged to another engine or model.
 * The file is outside data: sizes and shape are checked when it is mapped, contents by checksum. A
 * file that is cut short while it is mapped kills who reads it (SIGBUS): nothing but a seal prevents
 * that, which only a memfd can have, and whoever may do it to a file of mode 0600 may also kill the
 * process; the next one finds another size, and so no region. Beyond the first page so does a full
 * file system, unless the space was reserved.
 * Owns:    the mapping, not the descriptor
 * Thread:  any; who may touch which block when is the engine's to say, in messages
 */
#ifndef PROTO_KV_REGION_H
#define PROTO_KV_REGION_H

#include "common/err.h"

#define KV_REGION_FINGERPRINT_BYTES 32
#define KV_REGION_KEY_BYTES         48
#define KV_REGION_MAX_RANKS         1024

typedef struct kv_region_shape {
    int32_t n_blocks; /* >= 1 */
    int32_t n_ranks;  /* 1 to KV_REGION_MAX_RANKS */
    uint64_t shard_bytes;
} kv_region_shape;

typedef struct kv_region_header {
    uint64_t tag;
    uint64_t checksum;
} kv_region_header;

/* All zero in a region that was just made. The meaning is the engine's. */
typedef struct kv_region_entry {
    uint8_t key[KV_REGION_KEY_BYTES];
    uint64_t stamp;
    uint32_t state;
    uint32_t unused;
} kv_region_entry;

typedef struct kv_region {
    uint8_t *base; /* NULL = not mapped */
    size_t n_bytes;
    kv_region_shape shape;
    size_t headers_at, entries_at, data_at;
    size_t block_stride;
    uint64_t salt; /* of checksums: from the fingerprint that it was made, mapped or set with */
} kv_region;

/* Of the whole file. False: a shape that nothing can have. */
PGD_MUST_USE bool kv_region_bytes(size_t *out, const kv_region_shape *shape);
/* Empties the file, gives it its size, writes the superblock and maps it. Its space is taken as it is
 * written. Errors: PGD_EINVAL (shape), PGD_ENOMEM (memory, space), PGD_EIO */
PGD_MUST_USE pgd_err kv_region_format(kv_region *out, int fd, const kv_region_shape *shape,
                                      const uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES],
                                      pgd_why *why);
/* Maps one that must have this shape. Errors: PGD_EINVAL (shape), PGD_EFORMAT (another one, or no
 * region at all), PGD_ENOMEM, PGD_EIO */
PGD_MUST_USE pgd_err kv_region_map(kv_region *out, int fd, const kv_region_shape *expect,
                                   pgd_why *why);
/* The same by path. Errors: also PGD_ENOENT, PGD_EIO with the system's reason */
PGD_MUST_USE pgd_err kv_region_open(kv_region *out, const char *path, const kv_region_shape *expect,
                                    pgd_why *why);
/* One that is not mapped is left alone. */
void kv_region_unmap(kv_region *r);

/* Borrows until unmap. A block or rank out of range is a bug. */
const uint8_t *kv_region_get_fingerprint(const kv_region *r);
/* In place of the one that it was made or mapped with. No shard of before holds anything from now on,
 * nor does what is written through mappings of before. */
void kv_region_set_fingerprint(kv_region *r,
                               const uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES]);
kv_region_entry *kv_region_get_entry(const kv_region *r, int32_t block);
kv_region_header *kv_region_get_header(const kv_region *r, int32_t block, int32_t rank);
/* [shape.shard_bytes] */
void *kv_region_get_shard(const kv_region *r, int32_t block, int32_t rank);

/* payload: [shape.shard_bytes] */
uint64_t kv_region_checksum(const kv_region *r, const void *payload, uint64_t tag);
/* Writes the header of a shard that payload [shard_bytes] was copied to. The payload itself is to be
 * where nobody else writes: of the shard, the checksum would be right for whatever an older worker,
 * which knows nothing of a new engine yet, has just put there. */
void kv_region_seal(const kv_region *r, int32_t block, int32_t rank, uint64_t tag,
                    const void *payload);
/* Whether it says that the shard holds this, and payload [shape.shard_bytes], a copy of it or the
 * shard itself, is that. */
bool kv_region_holds(const kv_region *r, int32_t block, int32_t rank, uint64_t tag,
                     const void *payload);

#endif
