/* The disk tier while the clock of the machine is set forward and back by days, and with files whose
 * times are anything: the order of eviction stays that of use, nothing goes without need, and what
 * comes anew can stay. The clock is this program's own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <sys/syscall.h>

#include <cmocka.h>

#include "tests/unit/disk_rig.h"

#define DAY_S INT64_C(86400)

static int64_t set_by_s;

int clock_gettime(clockid_t id, struct timespec *ts)
{
    int rc = (int)syscall(SYS_clock_gettime, id, ts);
    if (rc == 0 && id == CLOCK_REALTIME)
        ts->tv_sec += set_by_s;
    return rc;
}

typedef struct rig {
    char dir[64];
    kv_region region;
    disk_tier_opts opts;
} rig;

static void rig_init_at(rig *g, int32_t max_files, const char *parent)
{
    set_by_s = 0;
    (void)snprintf(g->dir, sizeof(g->dir), "%s/disk_clock.XXXXXX", parent);
    disk_rig_make_dir(g->dir);
    disk_rig_region(&g->region, 4);
    g->opts = disk_rig_opts(g->dir, &g->region, max_files);
}

static void rig_init(rig *g, int32_t max_files)
{
    rig_init_at(g, max_files, "/var/tmp");
}

static void rig_deinit(rig *g)
{
    kv_region_unmap(&g->region);
    disk_rig_remove_dir(g->dir);
}

static void write_some(disk_tier *d, const rig *g, int32_t first, int32_t end)
{
    for (int32_t i = first; i < end; i++)
        assert_true(disk_rig_write(d, &g->region, i));
}

/* Those from first to end are there, and of 0 to end no other. They are not touched. */
static void expect_only(const disk_tier *d, int32_t first, int32_t end)
{
    for (int32_t i = 0; i < end; i++)
        assert_int_equal(disk_rig_has(d, i), i >= first);
}

static void read_all(disk_tier *d, const rig *g, int32_t first, int32_t end)
{
    for (int32_t i = first; i < end; i++)
        assert_true(disk_rig_read(d, &g->region, i));
}

/* One life at one time, the next at another. */
static void test_disk_tier_clock_set_between_lives(void **state)
{
    static const int64_t jumps_s[] = {-10 * DAY_S, 10 * DAY_S, -40 * DAY_S, -3000 * DAY_S, 0};
    (void)state;
    rig g;
    rig_init(&g, 10);
    disk_tier *d = disk_rig_open(&g.opts);
    write_some(d, &g, 0, 10);
    assert_true(disk_tier_destroy(d));
    int32_t end = 10;
    for (size_t i = 0; i < PGD_ARRAY_LEN(jumps_s); i++, end += 4) {
        set_by_s = jumps_s[i];
        d = disk_rig_open(&g.opts);
        assert_int_equal(disk_rig_stats(d).n_files, 10); /* nothing goes at the start */
        write_some(d, &g, end, end + 4);
        assert_int_equal(disk_rig_stats(d).n_evicted, 4);
        expect_only(d, end + 4 - 10, end + 4);
        assert_true(disk_tier_destroy(d));
    }
    d = disk_rig_open(&g.opts);
    read_all(d, &g, end - 10, end);
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

/* What is wanted after the clock was set is as recent as it is, for the next life too. */
static void test_disk_tier_clock_set_during_a_life(void **state)
{
    (void)state;
    for (int sign = -1; sign <= 1; sign += 2) {
        rig g;
        rig_init(&g, 10);
        disk_tier *d = disk_rig_open(&g.opts);
        write_some(d, &g, 0, 10);
        set_by_s = sign * 20 * DAY_S;
        usleep(1100000);
        disk_rig_touch(d, 0);
        disk_rig_touch(d, 2);
        write_some(d, &g, 10, 12); /* instead of 1 and 3 */
        assert_true(disk_rig_has(d, 0) && !disk_rig_has(d, 1) && !disk_rig_has(d, 3));
        set_by_s = 0;
        assert_true(disk_tier_destroy(d));
        d = disk_rig_open(&g.opts);
        write_some(d, &g, 12, 18);
        for (int32_t i = 0; i < 18; i++)
            assert_int_equal(disk_rig_has(d, i), i == 0 || i == 2 || i >= 10);
        assert_true(disk_tier_destroy(d));
        rig_deinit(&g);
    }
}

static void wait_until_known(disk_tier *d, int32_t number, bool is_there)
{
    for (int i = 0; i < 5000 && disk_rig_has(d, number) != is_there; i++)
        usleep(1000);
    assert_int_equal(disk_rig_has(d, number), is_there);
}

/* Engines that were started before and after: neither one's blocks go before the other's. */
static void test_disk_tier_clock_set_between_engines(void **state)
{
    (void)state;
    for (int sign = -1; sign <= 1; sign += 2) {
        rig g;
        int32_t n = 0;
        rig_init(&g, 10);
        disk_tier *d[2];
        d[0] = disk_rig_open(&g.opts);
        set_by_s = sign * 5 * DAY_S;
        d[1] = disk_rig_open(&g.opts);
        for (int round = 0; round < 6; round++) {
            disk_tier *writer = d[round % 2];
            write_some(writer, &g, n, n + 4);
            n += 4;
            wait_until_known(d[(round + 1) % 2], n - 1, true);
            if (n > 10)
                wait_until_known(d[(round + 1) % 2], n - 11, false);
            expect_only(writer, PGD_MAX(n - 10, 0), n);
        }
        read_all(d[0], &g, n - 10, n);
        read_all(d[1], &g, n - 10, n);
        assert_true(disk_tier_destroy(d[0]));
        assert_true(disk_tier_destroy(d[1]));
        rig_deinit(&g);
    }
}

static void set_times(const rig *g, int32_t first, int32_t end, int64_t time_s)
{
    for (int32_t i = first; i < end; i++) {
        char path[DISK_RIG_PATH_BYTES];
        struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = time_s}};
        disk_rig_path(path, g->dir, i);
        assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    }
}

/* While one watches, and before one starts. */
static void try_time(const char *parent, int64_t time_s)
{
    rig g;
    rig_init_at(&g, 10, parent);
    disk_tier *d = disk_rig_open(&g.opts);
    write_some(d, &g, 0, 10);
    for (int32_t end = 10; end <= 30; end += 10) {
        set_times(&g, end - 10, end - 5, time_s); /* as if somebody wanted them, or long ago */
        if (end == 20) {
            assert_true(disk_tier_destroy(d));
            d = disk_rig_open(&g.opts);
        }
        assert_int_equal(disk_rig_stats(d).n_files, 10);
        if (time_s == INT64_MAX)
            usleep(1100000); /* a clock that was taken there would have overflowed meanwhile */
        /* Who looks for room sees what was done; what was on its way then has an earlier stamp. */
        write_some(d, &g, 100 + end, 101 + end);
        uint64_t n_evicted = disk_rig_stats(d).n_evicted;
        write_some(d, &g, end, end + 10);
        assert_int_equal(disk_rig_stats(d).n_evicted, n_evicted + 10);
        expect_only(d, end, end + 10);
    }
    read_all(d, &g, 30, 40);
    assert_true(disk_tier_destroy(d));
    rig_deinit(&g);
}

/* Whatever is done to the times of files: nothing goes at the start, then one for each that comes,
 * and those that came stay. */
static void test_disk_tier_clock_any_times(void **state)
{
    static const int64_t times_s[] = {0,         -1,         INT64_MIN,           INT64_MAX,
                                      2 * DAY_S, 4000000000, INT64_C(9999999999), INT64_C(1) << 40};
    (void)state;
    for (size_t i = 0; i < PGD_ARRAY_LEN(times_s); i++) {
        try_time("/var/tmp", times_s[i]);
        try_time("/dev/shm", times_s[i]); /* keeps any time as it is */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_disk_tier_clock_set_between_lives),
        cmocka_unit_test(test_disk_tier_clock_set_during_a_life),
        cmocka_unit_test(test_disk_tier_clock_set_between_engines),
        cmocka_unit_test(test_disk_tier_clock_any_times),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
