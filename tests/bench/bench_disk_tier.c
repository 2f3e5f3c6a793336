/* Write and read rates of the disk tier by size of block, beside plain direct I/O on the same disk:
 * one file of as many bytes, written and read in pieces of a block's size by one thread.
 *
 *   bench_disk_tier [DIR [MB]]    /var/tmp, 256 MB */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "engine/offload/disk_tier.h"

enum { N_BLOCKS = 16 };

typedef struct rates {
    double write_gb_s;
    double read_gb_s;
} rates;

static double gb_s(size_t n_bytes, uint64_t us)
{
    return (double)n_bytes / 1e3 / (double)PGD_MAX(us, 1);
}

static void settle(void)
{
    sync();
    usleep(200000);
}

static rates run_plain(const char *dir, const kv_region *r, size_t block_bytes, int32_t n)
{
    char path[4096];
    rates out;
    (void)snprintf(path, sizeof(path), "%s/plain.XXXXXX", dir);
    int fd = mkostemp(path, O_DIRECT);
    PGD_ASSERTF(fd >= 0, "cannot make %s", path);
    unlink(path);
    uint64_t start_us = clock_now_us();
    for (int32_t i = 0; i < n; i++)
        PGD_ASSERT(pwrite(fd, kv_region_get_shard(r, i % N_BLOCKS, 0), block_bytes,
                          (off_t)i * (off_t)block_bytes) == (ssize_t)block_bytes);
    out.write_gb_s = gb_s((size_t)n * block_bytes, clock_now_us() - start_us);
    settle();
    start_us = clock_now_us();
    for (int32_t i = 0; i < n; i++)
        PGD_ASSERT(pread(fd, kv_region_get_shard(r, i % N_BLOCKS, 0), block_bytes,
                         (off_t)i * (off_t)block_bytes) == (ssize_t)block_bytes);
    out.read_gb_s = gb_s((size_t)n * block_bytes, clock_now_us() - start_us);
    close(fd);
    return out;
}

static offload_key key_of(int32_t number)
{
    offload_key key = {.group_id = 0};
    for (int i = 0; i < 4; i++) {
        uint64_t word = hash_u64((uint64_t)number * 4 + (uint64_t)i + 1);
        memcpy(key.hash.bytes + 8 * i, &word, sizeof(word));
    }
    return key;
}

/* As many jobs under way as there are blocks in the region. */
static uint64_t run_jobs(disk_tier *d, int32_t n, bool is_read)
{
    disk_tier_done done;
    bool is_busy[N_BLOCKS] = {false};
    uint64_t start_us = clock_now_us();
    int32_t n_done = 0;
    for (int32_t next = 0; n_done < n;) {
        int32_t block = next % N_BLOCKS;
        offload_key key = key_of(next);
        while (disk_tier_next_done(d, &done)) {
            PGD_ASSERT(done.ok);
            is_busy[done.cookie] = false;
            n_done++;
        }
        if (next == n || is_busy[block]) {
            usleep(20);
        } else {
            is_busy[block] = is_read ? disk_tier_read(d, &key, block, (uint64_t)block)
                                     : disk_tier_write(d, &key, block, (uint64_t)block);
            PGD_ASSERT(is_busy[block]);
            next++;
        }
    }
    return clock_now_us() - start_us;
}

static rates run_tier(const char *dir, const kv_region *r, size_t block_bytes, int32_t n)
{
    disk_tier_stats stats = {.is_ready = false};
    disk_tier *d;
    pgd_why why = {{0}};
    rates out;
    disk_tier_opts opts = {.dir = dir, .max_bytes = UINT64_C(1) << 40, .region = r};
    opts.max_bytes = (uint64_t)n * (block_bytes + 8192);
    PGD_ASSERTF(disk_tier_create(&d, &opts, &why) == PGD_OK, "%s", why.text);
    for (; !stats.is_ready; usleep(1000))
        disk_tier_get_stats(&stats, d);
    out.write_gb_s = gb_s((size_t)n * block_bytes, run_jobs(d, n, false));
    settle();
    out.read_gb_s = gb_s((size_t)n * block_bytes, run_jobs(d, n, true));
    PGD_ASSERT(disk_tier_destroy(d));
    return out;
}

static void run(const char *parent, size_t block_bytes, size_t total_bytes)
{
    char dir[4096];
    char command[4200];
    kv_region r;
    kv_region_shape shape = {.n_blocks = N_BLOCKS, .n_ranks = 1, .shard_bytes = block_bytes};
    uint8_t fingerprint[HASH_SHA256_BYTES] = {0};
    int32_t n = (int32_t)PGD_MAX(total_bytes / block_bytes, 1);
    int fd = memfd_create("bench_disk_tier", MFD_CLOEXEC);
    PGD_ASSERT(fd >= 0 && kv_region_format(&r, fd, &shape, fingerprint, NULL) == PGD_OK);
    for (int32_t i = 0; i < N_BLOCKS; i++) {
        memset(kv_region_get_shard(&r, i, 0), i + 1, block_bytes);
        kv_region_seal(&r, i, 0, (uint64_t)i + 1, kv_region_get_shard(&r, i, 0));
    }
    (void)snprintf(dir, sizeof(dir), "%s/bench_disk_tier.XXXXXX", parent);
    PGD_ASSERTF(mkdtemp(dir) != NULL, "cannot make %s", dir);
    rates tier = run_tier(dir, &r, block_bytes, n);
    settle();
    rates plain = run_plain(parent, &r, block_bytes, n);
    printf("%5zu KB blocks: write %5.2f GB/s, plain %5.2f (%.2f)   read %5.2f GB/s, plain %5.2f "
           "(%.2f)\n",
           block_bytes >> 10, tier.write_gb_s, plain.write_gb_s, tier.write_gb_s / plain.write_gb_s,
           tier.read_gb_s, plain.read_gb_s, tier.read_gb_s / plain.read_gb_s);
    (void)fflush(stdout);
    (void)snprintf(command, sizeof(command), "rm -rf '%s'", dir);
    PGD_ASSERT(system(command) == 0);
    kv_region_unmap(&r);
    close(fd);
}

int main(int argc, char **argv)
{
    const char *dir = argc > 1 ? argv[1] : "/var/tmp";
    size_t total_bytes = (argc > 2 ? strtoull(argv[2], NULL, 10) : 256) << 20;
    log_set_level(LOG_WARN);
    for (size_t kb = 64; kb <= 4096; kb *= 4)
        run(dir, kb << 10, total_bytes);
    return 0;
}
