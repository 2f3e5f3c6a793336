/* Engines that are killed at random moments of their work, one or two on one directory: what they
 * leave is within the bound, and each block of it is right or a miss.
 *
 *   PGD_DISK_KILLS=N       rounds, 8 by default
 *   PGD_DISK_KILL_SEED=N   of the moments, otherwise the clock's */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <sys/prctl.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "tests/unit/disk_rig.h"

enum { MAX_FILES = 24, N_KEYS = 120 };

static uint64_t number_from_env(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL ? strtoull(text, NULL, 10) : otherwise;
}

static pid_t start_engine(const char *dir, uint64_t seed)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed test leaves none behind */
        disk_rig_load(dir, MAX_FILES, seed, INT32_MAX);
        _exit(0);
    }
    return pid;
}

static void kill_engine(pid_t pid)
{
    int status;
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    /* One that read something wrong has aborted. */
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGKILL);
}

static void check_bound(const char *dir)
{
    disk_rig_sum sum = disk_rig_sum_files(dir);
    assert_true(sum.n_bytes <= (uint64_t)MAX_FILES * DISK_RIG_FILE_BYTES);
    assert_true(sum.account == UINT64_MAX || sum.account >= sum.n_bytes);
    assert_true(sum.modes_are_right);
}

/* Returns how many blocks were there. */
static int check_all(const char *dir, const kv_region *r, bool is_alone)
{
    int n_right = 0;
    disk_tier_opts opts = disk_rig_opts(dir, r, MAX_FILES);
    disk_tier *d = disk_rig_open(&opts);
    if (is_alone) {
        disk_rig_sum sum = disk_rig_sum_files(dir);
        assert_int_equal(sum.n_temps, 0);
        assert_int_equal(sum.account, sum.n_bytes);
    }
    for (int32_t i = 0; i < N_KEYS; i++)
        n_right += disk_rig_has(d, i) && disk_rig_read(d, r, i);
    assert_int_equal(disk_rig_stats(d).n_bad_files, 0); /* the machine did not crash */
    assert_true(disk_tier_destroy(d));
    return n_right;
}

static void test_disk_tier_kill(void **state)
{
    (void)state;
    uint64_t n_rounds = number_from_env("PGD_DISK_KILLS", 8);
    uint64_t seed = number_from_env("PGD_DISK_KILL_SEED", clock_now_us());
    char dir[] = "/var/tmp/disk_kill.XXXXXX";
    kv_region r;
    int n_right = 0;
    disk_rig_make_dir(dir);
    disk_rig_region(&r, 4);
    disk_tier_opts opts = disk_rig_opts(dir, &r, MAX_FILES);
    assert_true(disk_tier_destroy(disk_rig_open(&opts)));
    print_message("PGD_DISK_KILL_SEED=%llu\n", (unsigned long long)seed);
    for (uint64_t round = 0; round < n_rounds; round++) {
        seed = hash_u64(seed + 1);
        bool are_two = round % 3 == 2;
        pid_t first = start_engine(dir, seed);
        pid_t second = are_two ? start_engine(dir, seed + 1) : -1;
        usleep((useconds_t)(seed >> 20) % 60000);
        check_bound(dir);
        usleep((useconds_t)(seed >> 40) % 60000);
        kill_engine(first);
        check_bound(dir);
        if (are_two) {
            n_right += check_all(dir, &r, false);
            kill_engine(second);
            check_bound(dir);
        }
        n_right += check_all(dir, &r, true);
    }
    print_message("%d blocks read back in %llu rounds\n", n_right, (unsigned long long)n_rounds);
    assert_true(n_right > 0);
    kv_region_unmap(&r);
    disk_rig_remove_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_disk_tier_kill)};
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
