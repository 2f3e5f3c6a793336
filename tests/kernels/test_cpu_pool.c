/* The compute pool: every thread runs once per run, nothing is lost, parking and oversubscription
 * included. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "common/thread.h"
#include "kernels/cpu_features.h"
#include "kernels/cpu_pool.h"

enum { MAX_THREADS = 16, MAX_ITEMS = 1000 };

typedef struct probe {
    cpu_pool *pool;
    int32_t n_threads;
    int32_t calls[MAX_THREADS]; /* plain: a run orders them */
    int32_t taken[MAX_ITEMS];
    int64_t n_items;
    int64_t chunk;
    _Atomic int32_t n_bad;
} probe;

static void count_calls(void *arg, int32_t thread_idx, int32_t n_threads)
{
    probe *p = arg;
    if (n_threads != p->n_threads || thread_idx < 0 || thread_idx >= n_threads)
        p->n_bad++;
    else
        p->calls[thread_idx]++;
}

static void take_items(void *arg, int32_t thread_idx, int32_t n_threads)
{
    probe *p = arg;
    int64_t first;
    int64_t last;
    (void)thread_idx;
    (void)n_threads;
    while (cpu_pool_next(p->pool, p->n_items, p->chunk, &first, &last)) {
        if (first < 0 || last > p->n_items || first >= last)
            p->n_bad++;
        for (int64_t i = first; i < last; i++)
            p->taken[i]++;
    }
}

static volatile float tiny = 1e-39f;

static void check_flush(void *arg, int32_t thread_idx, int32_t n_threads)
{
    probe *p = arg;
    (void)thread_idx;
    (void)n_threads;
    float product = tiny * 1.0f;
    if (product != 0.0f)
        p->n_bad++;
}

static void sleep_us(long us)
{
    struct timespec ts = {0, us * 1000};
    nanosleep(&ts, NULL);
}

static void test_cpu_pool_runs_on_every_thread(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 6; n++) {
        probe p = {.n_threads = n};
        assert_int_equal(cpu_pool_create(&p.pool, n, n % 2 == 0), PGD_OK);
        assert_int_equal(cpu_pool_n_threads(p.pool), n);
        const int32_t n_runs = 300;
        for (int32_t i = 0; i < n_runs; i++) {
            cpu_pool_run(p.pool, count_calls, &p);
            for (int32_t t = 0; t < n; t++)
                assert_int_equal(p.calls[t], i + 1);
        }
        assert_int_equal(p.n_bad, 0);
        cpu_pool_destroy(p.pool);
    }
}

static void test_cpu_pool_items_taken_once(void **state)
{
    (void)state;
    static const int64_t chunks[] = {1, 3, 7, MAX_ITEMS + 5};
    for (int32_t n = 1; n <= 4; n++) {
        probe p = {.n_threads = n};
        assert_int_equal(cpu_pool_create(&p.pool, n, false), PGD_OK);
        for (size_t c = 0; c < PGD_ARRAY_LEN(chunks); c++) {
            for (int64_t n_items = 0; n_items <= MAX_ITEMS; n_items += n_items < 5 ? 1 : 199) {
                memset(p.taken, 0, sizeof(p.taken));
                p.n_items = n_items;
                p.chunk = chunks[c];
                cpu_pool_run(p.pool, take_items, &p);
                for (int64_t i = 0; i < MAX_ITEMS; i++)
                    assert_int_equal(p.taken[i], i < n_items);
            }
        }
        assert_int_equal(p.n_bad, 0);
        cpu_pool_destroy(p.pool);
    }
}

/* Pauses around the length of the spin: runs meet spinning, parking and parked threads. */
static void test_cpu_pool_wakes_parked_threads(void **state)
{
    (void)state;
    probe p = {.n_threads = 3};
    assert_int_equal(cpu_pool_create(&p.pool, 3, false), PGD_OK);
    for (int32_t i = 0; i < 200; i++) {
        sleep_us(i % 8 * 30);
        if (i % 3 == 0)
            cpu_pool_begin(p.pool);
        cpu_pool_run(p.pool, count_calls, &p);
        for (int32_t t = 0; t < 3; t++)
            assert_int_equal(p.calls[t], i + 1);
    }
    cpu_pool_destroy(p.pool);
}

static void test_cpu_pool_more_threads_than_cpus(void **state)
{
    (void)state;
    probe p = {.n_threads = MAX_THREADS};
    assert_int_equal(cpu_pool_create(&p.pool, MAX_THREADS, true), PGD_OK);
    for (int32_t i = 0; i < 200; i++) {
        cpu_pool_run(p.pool, count_calls, &p);
        for (int32_t t = 0; t < MAX_THREADS; t++)
            assert_int_equal(p.calls[t], i + 1);
    }
    assert_int_equal(p.n_bad, 0);
    cpu_pool_destroy(p.pool);
}

/* Idle threads must not use CPU time: they park. */
static void test_cpu_pool_idle_threads_sleep(void **state)
{
    (void)state;
    probe p = {.n_threads = 4};
    assert_int_equal(cpu_pool_create(&p.pool, 4, false), PGD_OK);
    cpu_pool_run(p.pool, count_calls, &p);
    sleep_us(20000);
    struct timespec before;
    struct timespec after;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    sleep_us(200000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    int64_t used_ns = (after.tv_sec - before.tv_sec) * 1000000000 + after.tv_nsec - before.tv_nsec;
    assert_true(used_ns < 20000000);
    cpu_pool_destroy(p.pool);
}

static void test_cpu_pool_flushes_denormals(void **state)
{
    (void)state;
#if defined(__x86_64__) || defined(__aarch64__)
    probe p = {.n_threads = 3};
    assert_int_equal(cpu_pool_create(&p.pool, 3, false), PGD_OK);
    cpu_pool_run(p.pool, check_flush, &p);
    assert_int_equal(p.n_bad, 0);
    cpu_pool_destroy(p.pool);
#else
    skip();
#endif
}

static void test_cpu_pool_limits(void **state)
{
    (void)state;
    cpu_pool *pool = NULL;
    assert_int_equal(cpu_pool_create(&pool, -1, false), PGD_EINVAL);
    assert_null(pool);
    assert_int_equal(cpu_pool_create(&pool, 1 << 20, false), PGD_EINVAL);
    assert_int_equal(cpu_pool_create(&pool, 0, false), PGD_OK);
    assert_int_equal(cpu_pool_n_threads(pool), thread_n_cpus());
    cpu_pool_destroy(pool);
    cpu_pool_destroy(NULL);
}

static void test_cpu_features_levels(void **state)
{
    (void)state;
    cpu_isa best = cpu_features_best();
    cpu_isa isa;
    pgd_why why = {{0}};
    assert_true(cpu_features_has(CPU_ISA_REF));
    assert_true(cpu_features_has(best));
    assert_true(strlen(cpu_features_cpu_name()) > 0);
    unsetenv("PGD_CPU_ISA");
    assert_int_equal(cpu_features_choose(&isa, &why), PGD_OK);
    assert_int_equal(isa, best);
    for (int i = CPU_ISA_REF; i <= CPU_ISA_NEON; i++) {
        setenv("PGD_CPU_ISA", cpu_features_name((cpu_isa)i), 1);
        pgd_err err = cpu_features_choose(&isa, &why);
        assert_int_equal(err, cpu_features_has((cpu_isa)i) ? PGD_OK : PGD_EUNSUPPORTED);
        if (err == PGD_OK)
            assert_int_equal(isa, i);
    }
    setenv("PGD_CPU_ISA", "sse9", 1);
    assert_int_equal(cpu_features_choose(&isa, &why), PGD_EUNSUPPORTED);
    assert_non_null(strstr(why.text, "sse9"));
    unsetenv("PGD_CPU_ISA");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cpu_pool_runs_on_every_thread),
        cmocka_unit_test(test_cpu_pool_items_taken_once),
        cmocka_unit_test(test_cpu_pool_wakes_parked_threads),
        cmocka_unit_test(test_cpu_pool_more_threads_than_cpus),
        cmocka_unit_test(test_cpu_pool_idle_threads_sleep),
        cmocka_unit_test(test_cpu_pool_flushes_denormals),
        cmocka_unit_test(test_cpu_pool_limits),
        cmocka_unit_test(test_cpu_features_levels),
    };
    return cmocka_run_group_tests_name("cpu_pool", tests, NULL, NULL);
}
