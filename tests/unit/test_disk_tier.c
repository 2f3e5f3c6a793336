/* The disk tier as one engine and several see it: what is read is right or a miss, the bound, the
 * order of eviction, and what goes wrong with files, directories and disks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "common/mem.h"
#include "common/thread.h"
#include "tests/unit/disk_rig.h"

typedef struct rig {
    char dir[64];
    kv_region region;
    disk_tier_opts opts;
} rig;

static void rig_init(rig *g, int32_t max_files)
{
    (void)snprintf(g->dir, sizeof(g->dir), "/var/tmp/disk_tier.XXXXXX");
    disk_rig_make_dir(g->dir);
    disk_rig_region(&g->region, 64);
    g->opts = disk_rig_opts(g->dir, &g->region, max_files);
}

static void rig_deinit(rig *g)
{
    kv_region_unmap(&g->region);
    disk_rig_remove_dir(g->dir);
}

static void path_of(char out[DISK_RIG_PATH_BYTES], const rig *g, int32_t number)
{
    disk_rig_path(out, g->dir, number);
}

static bool wait_for(bool (*is_so)(void *arg), void *arg, int limit_ms)
{
    for (int i = 0; i < limit_ms / 5; i++) {
        if (is_so(arg))
            return true;
        usleep(5000);
    }
    return is_so(arg);
}

static void test_disk_tier_keeps_blocks(void **state)
{
    (void)state;
    rig g;
    rig_init(&g, 100);
    disk_tier *d = disk_rig_open(&g.opts);
    assert_false(disk_rig_has(d, 1));
    assert_false(disk_rig_read(d, &g.region, 1));
    for (int32_t i = 0; i < 20; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    for (int32_t i = 0; i < 20; i++) {
        assert_true(disk_rig_has(d, i));
        assert_true(disk_rig_read(d, &g.region, i));
    }
    assert_true(disk_rig_write(d, &g.region, 3)); /* there already */
    disk_tier_stats stats = disk_rig_stats(d);
    assert_int_equal(stats.n_files, 20);
    assert_int_equal(stats.used_bytes, 20 * DISK_RIG_FILE_BYTES);
    assert_int_equal(stats.n_writes, 21);
    assert_int_equal(stats.n_written_bytes, 20 * DISK_RIG_RANKS * DISK_RIG_SHARD_BYTES);
    assert_int_equal(stats.n_reads, 20);
    assert_int_equal(stats.n_failed_reads, 1);
    assert_int_equal(stats.n_bad_files, 0);
    disk_rig_sum sum = disk_rig_sum_files(g.dir);
    assert_int_equal(sum.n_bytes, stats.used_bytes);
    assert_int_equal(sum.account, stats.used_bytes);
    assert_int_equal(sum.n_temps, 0);
    assert_true(sum.modes_are_right);
    assert_true(disk_tier_destroy(d));
    d = disk_rig_open(&g.opts);
    for (int32_t i = 0; i < 20; i++)
        assert_true(disk_rig_read(d, &g.region, i));
    assert_true(disk_tier_destroy(d));
    g.opts.fingerprint[20] ^= 1; /* the same name, another model */
    d = disk_rig_open(&g.opts);
    assert_false(disk_rig_read(d, &g.region, 5));
    assert_false(disk_rig_has(d, 5));
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

/* Its own files go, whoever wrote them; those of other models stay. */
static void test_disk_tier_clear(void **state)
{
    (void)state;
    rig g;
    rig_init(&g, 100);
    disk_tier *d = disk_rig_open(&g.opts);
    disk_tier_opts other_opts = g.opts;
    other_opts.fingerprint[0] ^= 1;
    disk_tier *other = disk_rig_open(&other_opts);
    for (int32_t round = 0; round < 2; round++) {
        for (int32_t i = 0; i < 20; i++)
            assert_true(disk_rig_write(d, &g.region, i));
        assert_true(disk_rig_write(other, &g.region, 7));
        disk_tier_clear(d);
        for (int32_t i = 0; i < 20; i++)
            assert_false(disk_rig_has(d, i));
        int32_t n_tries = 0;
        while (!disk_rig_write(d, &g.region, 30) && n_tries++ < 4000)
            usleep(1000);
        assert_true(disk_rig_has(d, 30));
        for (int32_t i = 0; i < 20; i++)
            assert_false(disk_rig_read(d, &g.region, i));
        assert_true(disk_rig_read(other, &g.region, 7));
        disk_rig_sum sum = disk_rig_sum_files(g.dir);
        assert_int_equal(sum.n_blocks, 2);
        assert_int_equal(sum.account, 2 * DISK_RIG_FILE_BYTES);
    }
    disk_tier_clear(d); /* and at once: */
    assert_true(disk_tier_destroy(d));
    assert_true(disk_tier_destroy(other));
    rig_deinit(&g);
}

static void test_disk_tier_bounded_queue(void **state)
{
    (void)state;
    rig g;
    rig_init(&g, 100);
    g.opts.max_jobs = 4;
    disk_tier *d = disk_rig_open(&g.opts);
    uint64_t n_allocations = mem_n_allocations();
    for (int32_t i = 0; i < 4; i++) {
        offload_key key = disk_rig_key(i);
        disk_rig_fill(&g.region, i, i);
        assert_true(disk_tier_write(d, &key, i, (uint64_t)i));
    }
    offload_key key = disk_rig_key(4);
    assert_false(disk_tier_write(d, &key, 4, 4));
    assert_true(disk_tier_read(d, &key, 4, 4)); /* a queue of its own */
    unsigned seen = 0;
    for (int i = 0; i < 5; i++) {
        disk_tier_done done = disk_rig_wait_done(d);
        assert_int_equal(done.ok, done.cookie != 4);
        seen |= 1u << done.cookie;
    }
    assert_int_equal(seen, 31);
    assert_int_equal(mem_n_allocations(), n_allocations);
    assert_true(disk_tier_write(d, &key, 4, 4));
    assert_true(disk_tier_destroy(d)); /* with a job in it */
    rig_deinit(&g);
}

/* Another engine that was stopped while it held the account: a bad file cannot be taken out of it. */
static void test_disk_tier_is_stuck(void **state)
{
    (void)state;
    rig g;
    char path[256];
    disk_tier_done done;
    offload_key key = disk_rig_key(0);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    rig_init(&g, 100);
    g.opts.stuck_ms = 200;
    disk_tier *d = disk_rig_open(&g.opts);
    assert_true(disk_rig_write(d, &g.region, 0));
    usleep(300000);
    assert_false(disk_tier_is_stuck(d, true) || disk_tier_is_stuck(d, false)); /* nothing is out */
    path_of(path, &g, 0);
    assert_int_equal(truncate(path, 100), 0);
    (void)snprintf(path, sizeof(path), "%s/accounts", g.dir);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fcntl(fd, F_OFD_SETLKW, &lock), 0);
    assert_true(disk_tier_read(d, &key, 1, 7));
    usleep(300000);
    assert_false(disk_tier_next_done(d, &done));
    assert_true(disk_tier_is_stuck(d, true));
    assert_false(disk_tier_is_stuck(d, false));
    disk_rig_fill(&g.region, 0, 1);
    key = disk_rig_key(1);
    assert_true(disk_tier_write(d, &key, 0, 8));
    usleep(300000);
    assert_true(disk_tier_is_stuck(d, false));
    close(fd);
    (void)disk_rig_wait_done(d);
    (void)disk_rig_wait_done(d);
    assert_false(disk_tier_is_stuck(d, true) || disk_tier_is_stuck(d, false));
    assert_true(disk_rig_read(d, &g.region, 1));
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

static void test_disk_tier_evicts_least_recent(void **state)
{
    enum { N_KEYS = 40, MAX_FILES = 12, N_OPS = 1500 };
    (void)state;
    rig g;
    uint64_t stamps[N_KEYS] = {0}; /* 0 = not on disk */
    uint64_t now = 0;
    uint64_t x = 7;
    rig_init(&g, MAX_FILES);
    disk_tier *d = disk_rig_open(&g.opts);
    for (int op = 0; op < N_OPS; op++) {
        x = hash_u64(x + 1);
        int32_t number = (int32_t)(x % N_KEYS);
        bool is_there = stamps[number] != 0;
        assert_int_equal(disk_rig_has(d, number), is_there);
        switch (x >> 32 & 3) {
        case 0:
            disk_rig_touch(d, number);
            stamps[number] = is_there ? ++now : 0;
            break;
        case 1:
            assert_int_equal(disk_rig_read(d, &g.region, number), is_there);
            stamps[number] = is_there ? ++now : 0;
            break;
        default: {
            int32_t n = 0;
            int32_t oldest = -1;
            for (int32_t i = 0; i < N_KEYS; i++)
                if (stamps[i] != 0) {
                    n++;
                    if (oldest < 0 || stamps[i] < stamps[oldest])
                        oldest = i;
                }
            assert_true(disk_rig_write(d, &g.region, number));
            if (!is_there && n == MAX_FILES)
                stamps[oldest] = 0;
            if (!is_there)
                stamps[number] = ++now;
        }
        }
        if (op % 500 ==
            499) { /* the order outlives a restart, where it was saved: all touched now */
            assert_true(disk_tier_destroy(d));
            d = disk_rig_open(&g.opts);
            for (uint64_t at = 0; at <= now; at++)
                for (int32_t i = 0; i < N_KEYS; i++)
                    if (stamps[i] != 0 && stamps[i] == at)
                        disk_rig_touch(d, i);
        }
    }
    disk_rig_sum sum = disk_rig_sum_files(g.dir);
    assert_int_equal(sum.n_bytes, sum.account);
    assert_true(sum.n_bytes <= g.opts.max_bytes);
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

static void test_disk_tier_order_in_files(void **state)
{
    (void)state;
    rig g;
    rig_init(&g, 10);
    disk_tier *d = disk_rig_open(&g.opts);
    for (int32_t i = 0; i < 10; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    usleep(1100000);
    disk_rig_touch(d, 0); /* more than a second later: saved at the end */
    disk_rig_touch(d, 2);
    assert_true(disk_tier_destroy(d));
    d = disk_rig_open(&g.opts);
    for (int32_t i = 10; i < 18; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    for (int32_t i = 0; i < 18; i++)
        assert_int_equal(disk_rig_has(d, i), i == 0 || i == 2 || i >= 10);
    assert_true(disk_tier_destroy(d));
    g.opts.max_bytes = 3 * DISK_RIG_FILE_BYTES; /* less than there is */
    d = disk_rig_open(&g.opts);
    assert_true(disk_rig_write(d, &g.region, 20));
    assert_true(disk_rig_sum_files(g.dir).n_bytes <= g.opts.max_bytes);
    assert_true(disk_rig_has(d, 17));
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

/* The stamp in a file is how other engines tell that they want it. */
static void test_disk_tier_spares_what_others_want(void **state)
{
    (void)state;
    rig g;
    char path[256];
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}};
    rig_init(&g, 4);
    disk_tier *d = disk_rig_open(&g.opts);
    for (int32_t i = 0; i < 4; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    path_of(path, &g, 0);
    (void)clock_gettime(CLOCK_REALTIME, &times[1]); /* UTIME_NOW may be some ms behind */
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    for (int32_t i = 4; i < 7; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    for (int32_t i = 0; i < 7; i++)
        assert_int_equal(disk_rig_has(d, i), i == 0 || i >= 4);
    assert_true(disk_rig_write(d, &g.region, 7));
    assert_false(disk_rig_has(d, 0));
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

static void test_disk_tier_dead_models_go_first(void **state)
{
    (void)state;
    rig g;
    rig_init(&g, 10);
    disk_tier_opts other_opts = g.opts;
    other_opts.fingerprint[0] = 77;
    disk_tier *other = disk_rig_open(&other_opts);
    disk_tier *d = disk_rig_open(&g.opts);
    for (int32_t i = 0; i < 5; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    for (int32_t i = 0; i < 5; i++)
        assert_true(disk_rig_write(other, &g.region, 100 + i));
    /* Both live: the oldest go, whoever wrote them. */
    for (int32_t i = 5; i < 7; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    assert_false(disk_rig_has(d, 0));
    assert_false(disk_rig_has(d, 1));
    assert_true(disk_tier_destroy(other));
    assert_true(disk_tier_destroy(d));
    /* Now the others are of nobody, and newer than 2 to 4. */
    d = disk_rig_open(&g.opts);
    assert_int_equal(disk_rig_stats(d).n_foreign, 5);
    for (int32_t i = 7; i < 12; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    assert_int_equal(disk_rig_stats(d).n_foreign, 0);
    for (int32_t i = 2; i < 12; i++)
        assert_true(disk_rig_has(d, i));
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

static void damage(const char *path, off_t at)
{
    uint8_t byte;
    int fd = open(path, O_RDWR);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void test_disk_tier_bad_files(void **state)
{
    enum { N = 9 };
    (void)state;
    rig g;
    char path[256];
    char from[256];
    rig_init(&g, 100);
    disk_tier *d = disk_rig_open(&g.opts);
    for (int32_t i = 0; i < N + 1; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    path_of(path, &g, 0);
    assert_int_equal(truncate(path, DISK_RIG_FILE_BYTES - 1), 0);
    path_of(path, &g, 1);
    assert_int_equal(truncate(path, 0), 0);
    path_of(path, &g, 2);
    damage(path, 3); /* magic */
    path_of(path, &g, 3);
    damage(path, 97 + 16); /* a tag or checksum */
    path_of(path, &g, 4);
    damage(path, 4096 + 4999); /* the last byte of a shard */
    path_of(path, &g, 5);
    damage(path, 4096 + 5000); /* the first byte of the other */
    path_of(from, &g, 9);
    path_of(path, &g, 6);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(link(from, path), 0); /* a good file under another's name */
    path_of(path, &g, 7);                  /* the right contents, but behind a link */
    (void)snprintf(from, sizeof(from), "%s/7", g.dir);
    assert_int_equal(rename(path, from), 0);
    assert_int_equal(symlink(from, path), 0);
    path_of(path, &g, 8);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    for (int32_t i = 0; i < N; i++) {
        struct stat st;
        assert_false(disk_rig_read(d, &g.region, i));
        assert_false(disk_rig_has(d, i));
        path_of(path, &g, i);
        assert_int_not_equal(lstat(path, &st), 0);
    }
    assert_true(disk_rig_read(d, &g.region, N));
    for (int32_t i = 0; i < N; i++) { /* the place is free again */
        assert_true(disk_rig_write(d, &g.region, i));
        assert_true(disk_rig_read(d, &g.region, i));
    }
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

/* A folder that somebody made in a block's place costs that block, until it is empty. */
static void test_disk_tier_folder_in_the_way(void **state)
{
    (void)state;
    rig g;
    char path[256];
    char inner[272];
    rig_init(&g, 100);
    disk_tier *d = disk_rig_open(&g.opts);
    path_of(path, &g, 0);
    (void)snprintf(inner, sizeof(inner), "%s/inner", path);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(mkdir(inner, 0700), 0);
    assert_false(disk_rig_write(d, &g.region, 0));
    assert_true(disk_rig_write(d, &g.region, 1)); /* nothing rests for it */
    assert_false(disk_rig_read(d, &g.region, 0));
    assert_true(disk_rig_read(d, &g.region, 1));
    disk_rig_sum sum = disk_rig_sum_files(g.dir);
    assert_int_equal(sum.n_temps, 0);
    assert_int_equal(sum.account, DISK_RIG_FILE_BYTES);
    assert_int_equal(rmdir(inner), 0);
    assert_true(disk_rig_write(d, &g.region, 0));
    assert_true(disk_rig_read(d, &g.region, 0));
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

static void expect_refusal(const disk_tier_opts *opts, pgd_err err, const char *part)
{
    disk_tier *d;
    pgd_why why = {{0}};
    assert_int_equal(disk_tier_create(&d, opts, &why), err);
    if (strstr(why.text, part) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", part, why.text);
}

static void test_disk_tier_refuses(void **state)
{
    (void)state;
    rig g;
    char path[128];
    rig_init(&g, 10);
    assert_int_equal(chmod(g.dir, 0777), 0);
    expect_refusal(&g.opts, PGD_EIO, "mode 777");
    assert_int_equal(chmod(g.dir, 0720), 0);
    expect_refusal(&g.opts, PGD_EIO, "chmod go-w");
    assert_int_equal(chmod(g.dir, 0700), 0);
    if (geteuid() == 0) {
        assert_int_equal(chown(g.dir, 12345, 0), 0);
        expect_refusal(&g.opts, PGD_EIO, "of user 12345");
        assert_int_equal(chown(g.dir, 0, 0), 0);
    }
    (void)snprintf(path, sizeof(path), "%s/letters", g.dir);
    assert_int_equal(mkdir(path, 0700), 0);
    expect_refusal(&g.opts, PGD_EIO, "holds \"letters\"");
    assert_int_equal(rmdir(path), 0);
    g.opts.max_bytes = DISK_RIG_FILE_BYTES - 1;
    expect_refusal(&g.opts, PGD_EINVAL, "at least one KV block of 16384 bytes");
    g.opts.max_bytes++;
    (void)snprintf(path, sizeof(path), "%s/a/b", g.dir);
    g.opts.dir = path;
    expect_refusal(&g.opts, PGD_EIO, "cannot make the directory");
    (void)snprintf(path, sizeof(path), "%s/accounts", g.dir);
    assert_int_equal(symlink("/etc/passwd", path), 0);
    g.opts.dir = g.dir;
    expect_refusal(&g.opts, PGD_EIO, "accounts");
    assert_int_equal(unlink(path), 0);
    (void)snprintf(path, sizeof(path), "%s/new", g.dir); /* is made */
    g.opts.dir = path;
    disk_tier *d = disk_rig_open(&g.opts);
    assert_true(disk_rig_write(d, &g.region, 1)); /* room for one */
    assert_true(disk_rig_write(d, &g.region, 2));
    assert_true(disk_tier_destroy(d));
    assert_int_equal(disk_rig_sum_files(path).n_blocks, 1);
    rig_deinit(&g);
}

typedef struct wish {
    disk_tier *d;
    rig *g;
    int32_t number;
    bool has;
} wish;

static bool is_as_wished(void *arg)
{
    wish *w = arg;
    return disk_rig_has(w->d, w->number) == w->has;
}

static bool can_write(void *arg)
{
    wish *w = arg;
    return disk_rig_write(w->d, &w->g->region, w->number);
}

static void test_disk_tier_shared(void **state)
{
    (void)state;
    rig g;
    rig_init(&g, 10);
    disk_tier *a = disk_rig_open(&g.opts);
    disk_tier *b = disk_rig_open(&g.opts);
    assert_true(disk_rig_write(a, &g.region, 1));
    assert_true(wait_for(is_as_wished, &(wish){b, &g, 1, true}, 3000));
    assert_true(disk_rig_read(b, &g.region, 1));
    for (int32_t i = 2; i < 12; i++)
        assert_true(disk_rig_write(b, &g.region, i));
    assert_true(wait_for(is_as_wished, &(wish){a, &g, 1, false}, 3000));
    assert_true(wait_for(is_as_wished, &(wish){a, &g, 11, true}, 3000));
    assert_true(disk_rig_read(a, &g.region, 11));
    assert_int_equal(disk_rig_sum_files(g.dir).account, 10 * DISK_RIG_FILE_BYTES);
    /* A smaller one brings it down to its own bound. */
    disk_tier_opts small = g.opts;
    small.max_bytes = 4 * DISK_RIG_FILE_BYTES;
    disk_tier *c = disk_rig_open(&small);
    assert_true(disk_rig_write(c, &g.region, 50));
    assert_true(disk_rig_sum_files(g.dir).n_bytes <= small.max_bytes);
    assert_true(disk_tier_destroy(c));
    assert_true(disk_tier_destroy(a));
    assert_true(disk_tier_destroy(b));
    rig_deinit(&g);
}

/* Two tiers under load in threads, and one more that sums. */
typedef struct load {
    const char *dir;
    int32_t max_files;
    uint64_t seed;
    int n_ops;
    atomic_bool *stop;
} load;

static void run_load(void *arg)
{
    load l = *(load *)arg;
    disk_rig_load(l.dir, l.max_files, l.seed, l.n_ops);
}

static void run_sums(void *arg)
{
    load l = *(load *)arg;
    int n = 0;
    for (; !atomic_load(l.stop); n++) {
        disk_rig_sum sum = disk_rig_sum_files(l.dir);
        PGD_ASSERTF(sum.n_bytes <= (uint64_t)l.max_files * DISK_RIG_FILE_BYTES, "%llu bytes",
                    (unsigned long long)sum.n_bytes);
        PGD_ASSERT(sum.account == UINT64_MAX || sum.account >= sum.n_bytes);
        usleep(2000);
    }
    PGD_ASSERT(n > 10);
}

static void test_disk_tier_bound_under_load(void **state)
{
    (void)state;
    rig g;
    pthread_t threads[3];
    atomic_bool stop = false;
    rig_init(&g, 30);
    assert_true(disk_tier_destroy(disk_rig_open(&g.opts))); /* the accounts */
    load loads[3];
    for (int i = 0; i < 3; i++)
        loads[i] = (load){g.dir, i == 1 ? 15 : 30, 100 + (uint64_t)i, 6000, &stop};
    assert_int_equal(thread_start(&threads[2], "sums", run_sums, &loads[2]), PGD_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(thread_start(&threads[i], "load", run_load, &loads[i]), PGD_OK);
    thread_join(threads[0]);
    thread_join(threads[1]);
    atomic_store(&stop, true);
    thread_join(threads[2]);
    disk_rig_sum sum = disk_rig_sum_files(g.dir);
    assert_int_equal(sum.n_temps, 0);
    assert_int_equal(sum.account, sum.n_bytes);
    rig_deinit(&g);
}

static void test_disk_tier_directory_removed(void **state)
{
    (void)state;
    rig g;
    char path[256];
    rig_init(&g, 10);
    disk_tier *d = disk_rig_open(&g.opts);
    for (int32_t i = 0; i < 10; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    disk_rig_remove_dir(g.dir);
    for (int32_t i = 0; i < 10; i++)
        assert_false(disk_rig_read(d, &g.region, i));
    assert_true(wait_for(can_write, &(wish){d, &g, 30, true}, 5000));
    assert_true(disk_rig_read(d, &g.region, 30));
    assert_false(disk_rig_has(d, 3));
    /* Folders alone, and the accounts alone. */
    (void)snprintf(path, sizeof(path), "rm -rf %s/[0-9a-f][0-9a-f] %s/tmp", g.dir, g.dir);
    assert_int_equal(system(path), 0);
    assert_true(wait_for(can_write, &(wish){d, &g, 31, true}, 5000));
    assert_true(disk_rig_read(d, &g.region, 31));
    assert_true(wait_for(is_as_wished, &(wish){d, &g, 30, false}, 5000));
    (void)snprintf(path, sizeof(path), "%s/accounts", g.dir);
    assert_int_equal(unlink(path), 0);
    usleep(1500000);
    assert_true(wait_for(can_write, &(wish){d, &g, 32, true}, 5000));
    assert_int_equal(disk_rig_sum_files(g.dir).account, 2 * DISK_RIG_FILE_BYTES);
    /* The accounts made unreadable, then far too high. */
    assert_int_equal(truncate(path, 5), 0);
    assert_true(wait_for(can_write, &(wish){d, &g, 33, true}, 5000));
    assert_int_equal(disk_rig_sum_files(g.dir).account, 3 * DISK_RIG_FILE_BYTES);
    for (int32_t i = 40; i < 47; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    (void)snprintf(path, sizeof(path), "rm -f %s/*/*-*", g.dir);
    assert_int_equal(system(path), 0);
    usleep(1200000);
    assert_true(wait_for(can_write, &(wish){d, &g, 50, true}, 5000));
    assert_int_equal(disk_rig_sum_files(g.dir).account, DISK_RIG_FILE_BYTES);
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

static bool has_no_temps(void *arg)
{
    return disk_rig_sum_files(arg).n_temps == 0;
}

static void test_disk_tier_leftovers(void **state)
{
    static const char *const names[] = {"63-0123456789abcdef-0", "0-0123456789abcdef-7"};
    (void)state;
    rig g;
    char path[128];
    rig_init(&g, 10);
    disk_tier *d = disk_rig_open(&g.opts);
    for (size_t i = 0; i < PGD_ARRAY_LEN(names); i++) {
        (void)snprintf(path, sizeof(path), "%s/tmp/%s", g.dir, names[i]);
        close(open(path, O_CREAT | O_WRONLY, 0600));
    }
    assert_true(wait_for(has_no_temps, g.dir, 4000));
    assert_true(disk_tier_destroy(d));
    close(open(path, O_CREAT | O_WRONLY, 0600));
    assert_int_equal(truncate(path, 100000), 0);
    d = disk_rig_open(&g.opts);
    assert_true(has_no_temps(g.dir));
    assert_int_equal(disk_rig_sum_files(g.dir).account, 0);
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_disk_tier_keeps_blocks),
        cmocka_unit_test(test_disk_tier_clear),
        cmocka_unit_test(test_disk_tier_bounded_queue),
        cmocka_unit_test(test_disk_tier_is_stuck),
        cmocka_unit_test(test_disk_tier_evicts_least_recent),
        cmocka_unit_test(test_disk_tier_order_in_files),
        cmocka_unit_test(test_disk_tier_spares_what_others_want),
        cmocka_unit_test(test_disk_tier_dead_models_go_first),
        cmocka_unit_test(test_disk_tier_bad_files),
        cmocka_unit_test(test_disk_tier_folder_in_the_way),
        cmocka_unit_test(test_disk_tier_refuses),
        cmocka_unit_test(test_disk_tier_shared),
        cmocka_unit_test(test_disk_tier_bound_under_load),
        cmocka_unit_test(test_disk_tier_directory_removed),
        cmocka_unit_test(test_disk_tier_leftovers),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
