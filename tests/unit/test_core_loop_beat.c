/* The beat of the core thread, which feeds a watchdog: it comes while the worker starts and while
 * everything is idle, and from the loop's turns alone. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "engine/core/core_loop.h"

#define BEAT_US 20000

static atomic_int n_beats;
static atomic_bool hold; /* the beat itself hangs the core thread */

static void count_beat(void)
{
    atomic_fetch_add(&n_beats, 1);
    while (atomic_load(&hold))
        usleep(1000);
}

static void wake(void *arg)
{
    (void)arg;
}

static void wait_for_state(core_loop *core, core_state wanted)
{
    core_stats s;
    uint64_t end_us = clock_now_us() + 10000000;
    while (core_loop_get_stats(core, &s), s.state != wanted) {
        if (clock_now_us() > end_us)
            fail_msg("state %d did not come", (int)wanted);
        usleep(1000);
    }
}

static void test_core_loop_beat(void **state)
{
    (void)state;
    static config cfg;
    core_loop *core;
    pgd_why why = {0};
    uint8_t seed[32] = {0};
    char dir[] = "/tmp/paged-test-XXXXXX";
    config_init(&cfg);
    snprintf(cfg.device, sizeof(cfg.device), "sim");
    snprintf(cfg.log_level, sizeof(cfg.log_level), "warn");
    assert_non_null(mkdtemp(dir));
    snprintf(cfg.runtime_dir, sizeof(cfg.runtime_dir), "%s", dir);
    ssize_t n = readlink("/proc/self/exe", cfg.worker_path, sizeof(cfg.worker_path) - 32);
    assert_true(n > 0);
    cfg.worker_path[n] = '\0';
    for (int up = 0; up < 3; up++) /* this is BUILD/tests/unit/test_core_loop_beat */
        *strrchr(cfg.worker_path, '/') = '\0';
    strcat(cfg.worker_path, "/bin/paged-worker");

    core_loop_opts opts = {
        .cfg = &cfg, .hash_seed = seed, .wake = wake, .beat = count_beat, .beat_us = BEAT_US};
    if (core_loop_create(&core, &opts, &why) != PGD_OK)
        fail_msg("%s", why.text);
    usleep(3 * BEAT_US);
    assert_int_equal(atomic_load(&n_beats), 0);
    uint64_t start_us = clock_now_us();
    assert_int_equal(core_loop_start(core, &why), PGD_OK);
    wait_for_state(core, CORE_READY);
    assert_true(atomic_load(&n_beats) > 0);
    int before = atomic_load(&n_beats);
    usleep(25 * BEAT_US); /* idle: nothing but the beat wakes it this often */
    int during = atomic_load(&n_beats) - before;
    assert_true(during >= 10); /* 25 on a machine with time for it */
    assert_true((uint64_t)atomic_load(&n_beats) <= (clock_now_us() - start_us) / BEAT_US + 1);
    /* a thread that stands still does not beat */
    atomic_store(&hold, true);
    usleep(5 * BEAT_US);
    before = atomic_load(&n_beats);
    usleep(5 * BEAT_US);
    assert_int_equal(atomic_load(&n_beats), before);
    atomic_store(&hold, false);
    core_loop_stop(core, 0);
    before = atomic_load(&n_beats);
    usleep(3 * BEAT_US);
    assert_int_equal(atomic_load(&n_beats), before);
    core_loop_destroy(core);
    rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_core_loop_beat),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
