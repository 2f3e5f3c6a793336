/* libFuzzer target: any bytes as a file of the disk tier (name and header). The first byte chooses
 * how the rest is used: as a name, as a header as it is, or as changes to a right one. Names that
 * parse must be written back the same; a header of another kind or key must not be taken. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/offload/disk_block.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

/* FIXED_BYTES: all before tags and checksums. */
enum { MAX_RANKS = 300, MAX_HEADER_BYTES = 2 * DISK_BLOCK_ALIGN, FIXED_BYTES = 96 };

static const offload_key key = {.hash = {{9, 8, 7}}, .group_id = 3};

static void try_name(const uint8_t *data, size_t n_bytes)
{
    char name[DISK_BLOCK_NAME_BYTES];
    disk_block_id id;
    char *text = malloc(n_bytes + 1);
    if (text == NULL)
        abort();
    memcpy(text, data, n_bytes);
    text[n_bytes] = '\0';
    if (disk_block_parse_name(&id, text)) {
        disk_block_name(name, &id);
        if (strcmp(name, text) != 0)
            abort();
    }
    free(text);
}

/* On the heap with its exact size, so that AddressSanitizer sees a read beyond it. */
static void try_header(const uint8_t *data, size_t n_bytes, int32_t n_ranks, bool from_right_one)
{
    disk_block_kind kind = {.fingerprint = {1, 2, 3}, .n_ranks = n_ranks, .shard_bytes = 4000};
    kv_region_header shards[MAX_RANKS] = {{0}};
    kv_region_header got[MAX_RANKS];
    size_t header_bytes = disk_block_header_bytes(&kind);
    uint8_t *header = calloc(1, header_bytes);
    uint8_t *right = calloc(1, header_bytes);
    if (header == NULL || right == NULL || header_bytes > MAX_HEADER_BYTES)
        abort();
    for (int32_t i = 0; i < n_ranks; i++)
        shards[i] = (kv_region_header){(uint64_t)i + 5, (uint64_t)i * 77};
    disk_block_encode(right, &kind, &key, shards);
    if (from_right_one)
        memcpy(header, right, header_bytes);
    for (size_t i = 0; from_right_one && i + 2 < n_bytes; i += 3)
        header[(data[i] | (size_t)data[i + 1] << 8) % header_bytes] ^= data[i + 2];
    if (!from_right_one)
        memcpy(header, data, PGD_MIN(n_bytes, header_bytes));
    bool is_taken = disk_block_decode(got, header, &kind, &key);
    if (memcmp(header, right, FIXED_BYTES) != 0 && is_taken)
        abort();
    if (memcmp(header, right, header_bytes) == 0 && !is_taken)
        abort();
    if (is_taken && memcmp(got, header + FIXED_BYTES, (size_t)n_ranks * sizeof(*got)) != 0)
        abort();
    free(header);
    free(right);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes == 0)
        return 0;
    if (data[0] < 64)
        try_name(data + 1, n_bytes - 1);
    else
        try_header(data + 1, n_bytes - 1, 1 + data[0] % 3 * 149, data[0] >= 128);
    return 0;
}
