/* Blocks that the disk tier is told to lose: gone whatever was under way with them, for every engine,
 * and after a kill; what is written later stays. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <sys/wait.h>

#include <cmocka.h>

#include "tests/unit/disk_rig.h"

/* Large ones take a while to write: there is time for something else meanwhile. */
enum { LARGE_SHARD_BYTES = 24 << 20 };

typedef struct rig {
    char dir[64];
    kv_region region;
    disk_tier_opts opts;
} rig;

static void rig_init(rig *g, bool is_large)
{
    (void)snprintf(g->dir, sizeof(g->dir), "/var/tmp/disk_remove.XXXXXX");
    disk_rig_make_dir(g->dir);
    if (is_large) {
        kv_region_shape shape = {.n_blocks = 4, .n_ranks = 1, .shard_bytes = LARGE_SHARD_BYTES};
        disk_rig_region_of(&g->region, &shape);
        g->opts = disk_rig_opts(g->dir, &g->region, 0);
        g->opts.max_bytes = 8 * (uint64_t)LARGE_SHARD_BYTES;
    } else {
        disk_rig_region(&g->region, 64);
        g->opts = disk_rig_opts(g->dir, &g->region, 1000);
    }
}

static void rig_deinit(rig *g)
{
    kv_region_unmap(&g->region);
    disk_rig_remove_dir(g->dir);
}

static bool has_file(const rig *g, int32_t number)
{
    char path[DISK_RIG_PATH_BYTES];
    disk_rig_path(path, g->dir, number);
    return access(path, F_OK) == 0;
}

/* Block `block` of a large region with a content of its own. */
static void fill_large(const rig *g, int32_t block, uint8_t version)
{
    void *shard = kv_region_get_shard(&g->region, block, 0);
    memset(shard, version, LARGE_SHARD_BYTES);
    kv_region_seal(&g->region, block, 0, 5, shard);
}

static uint8_t version_of(const rig *g, int32_t block)
{
    const uint8_t *shard = kv_region_get_shard(&g->region, block, 0);
    return shard[LARGE_SHARD_BYTES - 1];
}

static void wait_for_temp(const rig *g)
{
    char path[128];
    (void)snprintf(path, sizeof(path), "%s/tmp", g->dir);
    for (bool is_there = false; !is_there;) {
        DIR *dir = opendir(path);
        assert_non_null(dir);
        for (const struct dirent *e; (e = readdir(dir)) != NULL;)
            is_there |= e->d_name[0] != '.';
        closedir(dir);
    }
}

static void test_disk_tier_remove_lasts(void **state)
{
    (void)state;
    rig g;
    rig_init(&g, false);
    disk_tier *d = disk_rig_open(&g.opts);
    for (int32_t i = 0; i < 6; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    uint64_t version = disk_tier_version(d);
    assert_true(disk_rig_remove(d, 2));
    assert_true(disk_tier_version(d) != version); /* so that it is told */
    assert_true(disk_rig_remove(d, 40));          /* was never there */
    assert_false(disk_rig_has(d, 2));
    assert_false(has_file(&g, 2));
    assert_false(disk_rig_read(d, &g.region, 2));
    disk_tier_stats stats = disk_rig_stats(d);
    assert_int_equal(stats.n_files, 5);
    assert_int_equal(stats.n_removed, 1);
    assert_int_equal(stats.n_evicted, 0);
    assert_int_equal(stats.n_writes, 6);
    assert_int_equal(stats.n_queued_removals, 0);
    assert_int_equal(disk_rig_sum_files(g.dir).account, 5 * DISK_RIG_FILE_BYTES);
    assert_true(disk_rig_write(d, &g.region, 2)); /* what comes later is as good as any */
    assert_true(disk_rig_read(d, &g.region, 2));
    assert_true(disk_rig_remove(d, 3));
    assert_true(disk_tier_destroy(d));
    d = disk_rig_open(&g.opts);
    for (int32_t i = 0; i < 6; i++)
        assert_int_equal(disk_rig_read(d, &g.region, i), i != 3);
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

/* The write has begun, and a thread is free for the removal: it waits all the same. */
static void test_disk_tier_remove_what_is_being_written(void **state)
{
    (void)state;
    rig g;
    rig_init(&g, true);
    disk_tier *d = disk_rig_open(&g.opts);
    offload_key key = disk_rig_key(1);
    fill_large(&g, 0, 0xBA);
    assert_true(disk_tier_write(d, &key, 0, 10));
    wait_for_temp(&g);
    assert_true(disk_tier_remove(d, &key, 11));
    disk_tier_done done = disk_rig_wait_done(d);
    assert_true(done.cookie == 10 && done.ok && !done.is_removal);
    done = disk_rig_wait_done(d);
    assert_true(done.cookie == 11 && done.ok && done.is_removal && !done.is_read);
    assert_int_equal(done.n_bytes, 0);
    assert_false(has_file(&g, 1));
    assert_false(disk_rig_has(d, 1));
    assert_true(disk_tier_destroy(d));
    assert_int_equal(disk_rig_sum_files(g.dir).account, 0);
    rig_deinit(&g);
}

/* Written, removed, written again, all at once: the last one stays, and no other is ever read. */
static void test_disk_tier_remove_and_write_again(void **state)
{
    (void)state;
    rig g;
    rig_init(&g, true);
    disk_tier *d = disk_rig_open(&g.opts);
    offload_key key = disk_rig_key(1);
    fill_large(&g, 0, 0xBA);
    fill_large(&g, 1, 0x60);
    assert_true(disk_tier_write(d, &key, 0, 0));
    wait_for_temp(&g);
    assert_true(disk_tier_remove(d, &key, 1));
    assert_true(disk_tier_write(d, &key, 1, 2));
    for (uint64_t i = 0; i < 3; i++) {
        disk_tier_done done = disk_rig_wait_done(d);
        assert_int_equal(done.cookie, i);
        assert_true(done.ok);
    }
    assert_true(disk_rig_has(d, 1));
    assert_true(disk_tier_read(d, &key, 2, 3));
    assert_true(disk_rig_wait_done(d).ok);
    assert_int_equal(version_of(&g, 2), 0x60);
    /* One after the other is as good when none is slow: many short ones, the last of them good. */
    for (int round = 0; round < 20; round++) {
        fill_large(&g, round % 2, (uint8_t)(round + 1));
        assert_true(disk_tier_remove(d, &key, 0));
        assert_true(disk_tier_write(d, &key, round % 2, 1));
        assert_int_equal(disk_rig_wait_done(d).cookie, 0);
        assert_int_equal(disk_rig_wait_done(d).cookie, 1);
    }
    assert_true(disk_tier_read(d, &key, 2, 3));
    assert_true(disk_rig_wait_done(d).ok);
    assert_int_equal(version_of(&g, 2), 20);
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

/* Who has it open reads it whole or not at all; it is gone in any case. */
static void test_disk_tier_remove_what_is_being_read(void **state)
{
    (void)state;
    rig g;
    rig_init(&g, true);
    disk_tier *d = disk_rig_open(&g.opts);
    offload_key key = disk_rig_key(1);
    fill_large(&g, 0, 0xBA);
    for (int round = 0; round < 8; round++) {
        assert_true(disk_tier_write(d, &key, 0, 0));
        assert_true(disk_rig_wait_done(d).ok);
        memset(kv_region_get_shard(&g.region, 1, 0), 0, LARGE_SHARD_BYTES);
        assert_true(disk_tier_read(d, &key, 1, 1));
        usleep((useconds_t)round * 2000);
        assert_true(disk_tier_remove(d, &key, 2));
        for (int i = 0; i < 2; i++) {
            disk_tier_done done = disk_rig_wait_done(d);
            assert_int_equal(done.is_read, done.cookie == 1);
            assert_true(done.ok || done.is_read);
            assert_true(!done.is_read || !done.ok || version_of(&g, 1) == 0xBA);
        }
        assert_false(has_file(&g, 1));
        assert_false(disk_rig_has(d, 1));
    }
    assert_int_equal(disk_rig_stats(d).n_bad_files, 0);
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

static bool is_gone(const disk_tier *d, int32_t number)
{
    for (int i = 0; i < 4000 && disk_rig_has(d, number); i++)
        usleep(1000);
    return !disk_rig_has(d, number);
}

/* By name: whoever wrote it, and whether or not it was heard of already. */
static void test_disk_tier_remove_what_others_wrote(void **state)
{
    (void)state;
    rig g;
    rig_init(&g, false);
    disk_tier *a = disk_rig_open(&g.opts);
    disk_tier *b = disk_rig_open(&g.opts);
    for (int32_t i = 0; i < 20; i++) {
        assert_true(disk_rig_write(a, &g.region, i));
        assert_true(disk_rig_remove(b, i));
        assert_false(has_file(&g, i));
        assert_true(is_gone(a, i));
        assert_true(is_gone(b, i)); /* what it heard of late is not kept either */
        assert_false(disk_rig_read(a, &g.region, i));
    }
    assert_int_equal(disk_rig_sum_files(g.dir).account, 0);
    /* A block of another model with the same key stays. */
    disk_tier_opts other_opts = g.opts;
    other_opts.fingerprint[0] ^= 1;
    disk_tier *other = disk_rig_open(&other_opts);
    assert_true(disk_rig_write(other, &g.region, 7));
    assert_true(disk_rig_remove(a, 7));
    assert_true(disk_rig_read(other, &g.region, 7));
    assert_true(disk_tier_destroy(other));
    assert_true(disk_tier_destroy(a));
    assert_true(disk_tier_destroy(b));
    rig_deinit(&g);
}

/* Many are taken at once; those that were taken are carried out though the end comes. */
static void test_disk_tier_remove_before_the_end(void **state)
{
    enum { N = 200, MAX_REMOVALS = 150 };
    (void)state;
    rig g;
    rig_init(&g, false);
    g.opts.max_jobs = 8;
    g.opts.max_removals = MAX_REMOVALS;
    disk_tier *d = disk_rig_open(&g.opts);
    for (int32_t i = 0; i < N; i++)
        assert_true(disk_rig_write(d, &g.region, i));
    int32_t n_taken = 0;
    for (int32_t i = 0; i < N; i++) {
        offload_key key = disk_rig_key(i);
        if (i % 50 == 0) { /* writes have a queue of their own length, removals are not in it */
            offload_key more = disk_rig_key(1000 + i);
            disk_rig_fill(&g.region, 2 + i / 50, 1000 + i);
            assert_true(disk_tier_write(d, &more, 2 + i / 50, 0));
        }
        n_taken += disk_tier_remove(d, &key, (uint64_t)i);
    }
    assert_int_equal(n_taken, MAX_REMOVALS);
    assert_int_equal(disk_rig_stats(d).n_queued_removals, MAX_REMOVALS);
    assert_true(disk_tier_destroy(d));
    for (int32_t i = 0; i < N; i++)
        assert_int_equal(has_file(&g, i), i >= MAX_REMOVALS);
    disk_rig_sum sum = disk_rig_sum_files(g.dir);
    assert_int_equal(sum.n_temps, 0);
    assert_int_equal(sum.account, sum.n_bytes);
    rig_deinit(&g);
}

/* Writes and removes without end, each key once, and tells by the pipe what was reported as removed. */
static void remove_until_killed(const char *dir, int32_t first, int pipe_fd)
{
    enum { N_BLOCKS = 16 };
    kv_region r;
    disk_rig_region(&r, N_BLOCKS);
    disk_tier_opts opts = disk_rig_opts(dir, &r, 100000);
    disk_tier *d = disk_rig_open(&opts);
    int32_t left[N_BLOCKS] = {0}; /* jobs of this block */
    for (int32_t number = first;; number++) {
        int32_t block = number % N_BLOCKS;
        disk_tier_done done;
        while (left[block] > 0) {
            if (!disk_tier_next_done(d, &done)) {
                usleep(20);
                continue;
            }
            int32_t told = (int32_t)done.cookie;
            left[told % N_BLOCKS]--;
            if (done.is_removal && done.ok)
                PGD_ASSERT(write(pipe_fd, &told, sizeof(told)) == sizeof(told));
        }
        offload_key key = disk_rig_key(number);
        disk_rig_fill(&r, block, number);
        PGD_ASSERT(disk_tier_write(d, &key, block, (uint64_t)number));
        PGD_ASSERT(disk_tier_remove(d, &key, (uint64_t)number));
        left[block] = 2;
    }
}

static void test_disk_tier_remove_outlives_a_kill(void **state)
{
    (void)state;
    rig g;
    uint64_t x = clock_now_us();
    int32_t n_told = 0;
    rig_init(&g, false);
    for (int round = 0; round < 6; round++) {
        int fds[2];
        int status;
        int32_t number;
        assert_int_equal(pipe(fds), 0);
        pid_t pid = fork();
        if (pid == 0) {
            close(fds[0]);
            remove_until_killed(g.dir, round << 20, fds[1]);
            _exit(1);
        }
        close(fds[1]);
        x = hash_u64(x + 1);
        for (uint64_t n = x % 300;; n--) {
            assert_int_equal(read(fds[0], &number, sizeof(number)), sizeof(number));
            assert_false(has_file(&g, number));
            if (n == 0)
                break;
        }
        assert_int_equal(kill(pid, SIGKILL), 0);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        disk_tier *d = disk_rig_open(&g.opts);
        while (read(fds[0], &number, sizeof(number)) == sizeof(number)) {
            n_told++;
            assert_false(has_file(&g, number));
            assert_false(disk_rig_has(d, number));
        }
        assert_true(disk_tier_destroy(d));
        close(fds[0]);
    }
    print_message("%d more were told of before the end\n", n_told);
    rig_deinit(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_disk_tier_remove_lasts),
        cmocka_unit_test(test_disk_tier_remove_what_is_being_written),
        cmocka_unit_test(test_disk_tier_remove_and_write_again),
        cmocka_unit_test(test_disk_tier_remove_what_is_being_read),
        cmocka_unit_test(test_disk_tier_remove_what_others_wrote),
        cmocka_unit_test(test_disk_tier_remove_before_the_end),
        cmocka_unit_test(test_disk_tier_remove_outlives_a_kill),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
