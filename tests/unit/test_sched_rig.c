/* The rig behind `paged bench sched`: what it measures is what it says, and a step takes nothing from
 * the heap, whoever would ask for it: every heap function of the process is counted here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "engine/bench/sched_rig.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#    define COUNTS_HEAP 0
#elif defined(__GLIBC__)
#    define COUNTS_HEAP 1
#else
#    define COUNTS_HEAP 0
#endif

static long n_heap_calls;

#if COUNTS_HEAP
void *__libc_malloc(size_t n_bytes);
void *__libc_calloc(size_t n_elems, size_t elem_bytes);
void *__libc_realloc(void *ptr, size_t n_bytes);

void *malloc(size_t n_bytes)
{
    n_heap_calls++;
    return __libc_malloc(n_bytes);
}

void *calloc(size_t n_elems, size_t elem_bytes)
{
    n_heap_calls++;
    return __libc_calloc(n_elems, elem_bytes);
}

void *realloc(void *ptr, size_t n_bytes)
{
    n_heap_calls++;
    return __libc_realloc(ptr, n_bytes);
}
#endif

static sched_rig *new_rig(int32_t n_running, int32_t n_steps)
{
    sched_rig *g;
    sched_rig_opts opts = {.max_running = n_running,
                           .n_blocks = sched_rig_n_blocks_for(n_running, n_steps, 1),
                           .n_groups = 1};
    assert_int_equal(sched_rig_create(&g, &opts), PGD_OK);
    assert_int_equal(sched_rig_age(g), PGD_OK);
    return g;
}

static void test_sched_rig_steps_take_nothing_from_the_heap(void **state)
{
    (void)state;
    sched_rig_step samples[600];
    sched_rig_run run = {.samples = samples, .max_samples = 600};
    sched_rig *g = new_rig(37, 512);
    long n_calls[3];
    for (int i = 0; i < 3; i++) { /* the first crowd sizes the frames */
        long before = n_heap_calls;
        assert_int_equal(sched_rig_decode(&run, g, 37, 0.5, i == 2 ? 512 : 32), PGD_OK);
        assert_int_equal(run.n_samples, i == 2 ? 512 : 32);
        assert_true(run.allocations_per_step == 0);
        n_calls[i] = n_heap_calls - before;
    }
    assert_int_equal(n_calls[1], n_calls[2]);
    assert_int_equal(n_calls[1] > 0, COUNTS_HEAP);
    sched_rig_destroy(g);
}

static void test_sched_rig_hits_what_it_says(void **state)
{
    (void)state;
    sched_rig_step samples[4];
    sched_rig_run run = {.samples = samples, .max_samples = 4};
    sched_rig *g = new_rig(16, 16);
    for (int i = 0; i <= 4; i++) {
        assert_int_equal(sched_rig_decode(&run, g, 16, i / 4.0, 16), PGD_OK);
        assert_true(run.hit_rate > i / 4.0 - 0.07 && run.hit_rate < i / 4.0 + 0.07);
    }
    double us[3];
    assert_int_equal(sched_rig_admit(us, g, 3), PGD_OK);
    assert_true(us[0] > 0 && us[1] > 0 && us[2] > 0);
    sched_rig_destroy(g);
}

static void test_sched_rig_refuses_what_does_not_fit(void **state)
{
    (void)state;
    sched_rig *g;
    sched_rig_step samples[1];
    sched_rig_run run = {.samples = samples, .max_samples = 1};
    sched_rig_opts opts = {.max_running = 1, .n_blocks = 100, .n_groups = 1};
    assert_int_equal(sched_rig_create(&g, &opts), PGD_EINVAL);
    assert_null(g);
    g = new_rig(1, 16);
    assert_int_equal(sched_rig_decode(&run, g, 2000, 0, 16), PGD_EINVAL);
    assert_int_equal(sched_rig_decode(&run, g, 0, 0, 16), PGD_EINVAL);
    assert_int_equal(sched_rig_decode(&run, g, 1, 0, SCHED_RIG_MAX_STEPS + 1), PGD_EINVAL);
    assert_int_equal(sched_rig_decode(&run, g, 1, 0, 16), PGD_OK);
    sched_rig_destroy(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sched_rig_steps_take_nothing_from_the_heap),
        cmocka_unit_test(test_sched_rig_hits_what_it_says),
        cmocka_unit_test(test_sched_rig_refuses_what_does_not_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
