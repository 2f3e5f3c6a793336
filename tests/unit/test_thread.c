/* A call with a limit: what is waited for, and what is left behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>

#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/thread.h"

static atomic_int n_done_;

static void sleep_ms(void *arg)
{
    usleep(*(int *)arg * 1000u);
    atomic_fetch_add(&n_done_, 1);
}

static void test_thread_run_bounded(void **state)
{
    (void)state;
    int times_ms[] = {0, 300, 2000};
    uint64_t start_us = clock_now_us();
    assert_true(thread_run_bounded("short", sleep_ms, &times_ms[0], sizeof(int), 1));
    assert_true(thread_run_bounded("short", sleep_ms, &times_ms[1], sizeof(int), 1));
    assert_int_equal(atomic_load(&n_done_), 2);
    assert_in_range(clock_now_us() - start_us, 300000, 900000);
    start_us = clock_now_us();
    assert_false(thread_run_bounded("long", sleep_ms, &times_ms[2], sizeof(int), 1));
    times_ms[2] = 100000; /* it has a copy */
    assert_in_range(clock_now_us() - start_us, 1000000, 1900000);
    assert_int_equal(atomic_load(&n_done_), 2);
    for (int i = 0; i < 500 && atomic_load(&n_done_) < 3; i++) /* it goes on by itself */
        usleep(10000);
    assert_int_equal(atomic_load(&n_done_), 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_thread_run_bounded)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
