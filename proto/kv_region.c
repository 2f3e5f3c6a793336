/* Where things lie follows from the shape alone, so the superblock repeats it only to be compared:
 * no offset is ever read from the file. */
#include "proto/kv_region.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/bytes.h"
#include "common/hash.h"
#include "common/mem.h"

#define REGION_MAGIC   0x4e4f494745524b50u /* "PKREGION" */
#define REGION_FORMAT  2
#define REGION_PAGE    4096u
#define MAX_FILE_BYTES ((size_t)1 << 62)

typedef struct superblock {
    uint64_t magic;
    uint32_t format;
    int32_t n_blocks;
    int32_t n_ranks;
    uint32_t zero;
    uint64_t shard_bytes;
    uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES];
} superblock;

static_assert(sizeof(superblock) == 64 && sizeof(kv_region_header) == 16 &&
                  sizeof(kv_region_entry) == 64,
              "in a file");

/* --- places ----------------------------------------------------------------------------------- */

/* *at moves behind n_elems elements, to the next page. */
static bool place(size_t *at, size_t n_elems, size_t elem_bytes)
{
    size_t n_bytes;
    if (!mem_mul(&n_bytes, n_elems, elem_bytes) || !mem_add(at, *at, n_bytes) ||
        *at > MAX_FILE_BYTES)
        return false;
    *at = PGD_ROUND_UP(*at, REGION_PAGE);
    return true;
}

static bool lay_out(kv_region *r, const kv_region_shape *shape)
{
    size_t at = REGION_PAGE;
    *r = (kv_region){.shape = *shape};
    if (shape->n_blocks < 1 || shape->n_ranks < 1 || shape->n_ranks > KV_REGION_MAX_RANKS ||
        shape->shard_bytes < 1 || shape->shard_bytes > MAX_FILE_BYTES)
        return false;
    size_t n_blocks = (size_t)shape->n_blocks;
    r->headers_at = at;
    if (!place(&at, n_blocks * (size_t)shape->n_ranks, sizeof(kv_region_header)))
        return false;
    r->entries_at = at;
    if (!place(&at, n_blocks, sizeof(kv_region_entry)))
        return false;
    r->data_at = at;
    if (!place(&r->block_stride, (size_t)shape->n_ranks, (size_t)shape->shard_bytes) ||
        !place(&at, n_blocks, r->block_stride))
        return false;
    r->n_bytes = at;
    return true;
}

bool kv_region_bytes(size_t *out, const kv_region_shape *shape)
{
    kv_region r;
    bool is_valid = lay_out(&r, shape);
    *out = is_valid ? r.n_bytes : 0;
    return is_valid;
}

static pgd_err lay_out_or_fail(kv_region *r, const kv_region_shape *shape, pgd_why *why)
{
    if (lay_out(r, shape))
        return PGD_OK;
    *r = (kv_region){.base = NULL};
    return pgd_fail(why, PGD_EINVAL,
                    "KV region: expected at least one block, 1 to %d ranks and a size below 2^62 "
                    "bytes, got %" PRId32 " blocks of %" PRId32 " shards of %" PRIu64 " bytes",
                    KV_REGION_MAX_RANKS, shape->n_blocks, shape->n_ranks, shape->shard_bytes);
}

/* --- map -------------------------------------------------------------------------------------- */

/* The superblock is touched at once: the space of its page must be there, whoever sees to the rest. */
static pgd_err map_file(kv_region *r, int fd, pgd_why *why)
{
    int fault;
    do
        fault = posix_fallocate(fd, 0, REGION_PAGE);
    while (fault == EINTR);
    if (fault != 0)
        return pgd_fail(why, fault == ENOSPC ? PGD_ENOMEM : PGD_EIO,
                        "KV region: no space for its first page: %s", strerror(fault));
    void *base = mmap(NULL, r->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return pgd_fail(why, errno == ENOMEM ? PGD_ENOMEM : PGD_EIO,
                        "KV region: cannot map %zu bytes: %s", r->n_bytes, strerror(errno));
    r->base = base;
    (void)madvise(base, r->n_bytes, MADV_DONTDUMP); /* cores would be large, and hold prompts */
    return PGD_OK;
}

static pgd_err size_file(const kv_region *r, int fd, pgd_why *why)
{
    if (ftruncate(fd, 0) != 0 || ftruncate(fd, (off_t)r->n_bytes) != 0)
        return pgd_fail(why, PGD_EIO, "KV region: cannot make a file of %zu bytes: %s", r->n_bytes,
                        strerror(errno));
    return PGD_OK;
}

pgd_err kv_region_format(kv_region *out, int fd, const kv_region_shape *shape,
                         const uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES], pgd_why *why)
{
    superblock s = {.format = REGION_FORMAT,
                    .n_blocks = shape->n_blocks,
                    .n_ranks = shape->n_ranks,
                    .shard_bytes = shape->shard_bytes};
    PGD_TRY(lay_out_or_fail(out, shape, why));
    PGD_TRY(size_file(out, fd, why));
    PGD_TRY(map_file(out, fd, why));
    memcpy(s.fingerprint, fingerprint, sizeof s.fingerprint);
    memcpy(out->base, &s, sizeof s);
    out->salt = bytes_load_u64(fingerprint);
    /* The magic last: who dies in between leaves no region. */
    uint64_t magic = REGION_MAGIC;
    __atomic_store_n((uint64_t *)(void *)out->base, magic, __ATOMIC_RELEASE);
    return PGD_OK;
}

static pgd_err check_superblock(const kv_region *r, pgd_why *why)
{
    superblock s;
    memcpy(&s, r->base, sizeof s);
    if (s.magic != REGION_MAGIC || s.zero != 0)
        return pgd_fail(why, PGD_EFORMAT, "KV region: expected its magic number, got another file");
    if (s.format != REGION_FORMAT)
        return pgd_fail(why, PGD_EFORMAT, "KV region: expected format %d, got %" PRIu32,
                        REGION_FORMAT, s.format);
    if (s.n_blocks != r->shape.n_blocks || s.n_ranks != r->shape.n_ranks ||
        s.shard_bytes != r->shape.shard_bytes)
        return pgd_fail(why, PGD_EFORMAT,
                        "KV region: expected %" PRId32 " blocks of %" PRId32 " shards of %" PRIu64
                        " bytes, got %" PRId32 " of %" PRId32 " of %" PRIu64,
                        r->shape.n_blocks, r->shape.n_ranks, r->shape.shard_bytes, s.n_blocks,
                        s.n_ranks, s.shard_bytes);
    return PGD_OK;
}

pgd_err kv_region_map(kv_region *out, int fd, const kv_region_shape *expect, pgd_why *why)
{
    struct stat st;
    PGD_TRY(lay_out_or_fail(out, expect, why));
    if (fstat(fd, &st) != 0)
        return pgd_fail(why, PGD_EIO, "KV region: %s", strerror(errno));
    if (!S_ISREG(st.st_mode) || st.st_size < 0 || (size_t)st.st_size != out->n_bytes)
        return pgd_fail(why, PGD_EFORMAT, "KV region: expected a file of %zu bytes, got %lld",
                        out->n_bytes, (long long)st.st_size);
    PGD_TRY(map_file(out, fd, why));
    pgd_err err = check_superblock(out, why);
    if (err == PGD_OK)
        out->salt = bytes_load_u64(kv_region_get_fingerprint(out));
    else
        kv_region_unmap(out);
    return err;
}

pgd_err kv_region_open(kv_region *out, const char *path, const kv_region_shape *expect,
                       pgd_why *why)
{
    *out = (kv_region){.base = NULL};
    /* Not a FIFO or device that would make us wait. */
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0)
        return pgd_fail(why, errno == ENOENT ? PGD_ENOENT : PGD_EIO, "KV region: %s",
                        strerror(errno));
    pgd_err err = kv_region_map(out, fd, expect, why);
    close(fd);
    return err;
}

void kv_region_unmap(kv_region *r)
{
    if (r->base != NULL)
        (void)munmap(r->base, r->n_bytes);
    *r = (kv_region){.base = NULL};
}

/* --- parts ------------------------------------------------------------------------------------ */

static size_t shard_idx(const kv_region *r, int32_t block, int32_t rank)
{
    PGD_ASSERTF(r->base != NULL && block >= 0 && block < r->shape.n_blocks && rank >= 0 &&
                    rank < r->shape.n_ranks,
                "KV region: block %d rank %d of %d and %d", block, rank, r->shape.n_blocks,
                r->shape.n_ranks);
    return (size_t)block * (size_t)r->shape.n_ranks + (size_t)rank;
}

const uint8_t *kv_region_get_fingerprint(const kv_region *r)
{
    return r->base + offsetof(superblock, fingerprint);
}

void kv_region_set_fingerprint(kv_region *r, const uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES])
{
    r->salt = bytes_load_u64(fingerprint);
    memcpy(r->base + offsetof(superblock, fingerprint), fingerprint, KV_REGION_FINGERPRINT_BYTES);
}

kv_region_entry *kv_region_get_entry(const kv_region *r, int32_t block)
{
    (void)shard_idx(r, block, 0);
    return (kv_region_entry *)(void *)(r->base + r->entries_at) + block;
}

kv_region_header *kv_region_get_header(const kv_region *r, int32_t block, int32_t rank)
{
    return (kv_region_header *)(void *)(r->base + r->headers_at) + shard_idx(r, block, rank);
}

void *kv_region_get_shard(const kv_region *r, int32_t block, int32_t rank)
{
    (void)shard_idx(r, block, rank);
    return r->base + r->data_at + (size_t)block * r->block_stride +
           (size_t)rank * (size_t)r->shape.shard_bytes;
}

uint64_t kv_region_checksum(const kv_region *r, const void *payload, uint64_t tag)
{
    return hash_xxh3(payload, (size_t)r->shape.shard_bytes, tag ^ r->salt);
}

void kv_region_seal(const kv_region *r, int32_t block, int32_t rank, uint64_t tag,
                    const void *payload)
{
    *kv_region_get_header(r, block, rank) =
        (kv_region_header){tag, kv_region_checksum(r, payload, tag)};
}

bool kv_region_holds(const kv_region *r, int32_t block, int32_t rank, uint64_t tag,
                     const void *payload)
{
    kv_region_header h = *kv_region_get_header(r, block, rank);
    return h.tag == tag && h.checksum == kv_region_checksum(r, payload, tag);
}
