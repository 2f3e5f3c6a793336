/* A fork-join pool for hundreds of runs per step.
 *
 * A run is published by raising `generation`; workers spin on it for SPIN_NS, then park on it with
 * a futex. The caller works as thread 0, then waits for `n_running` to reach 0 in the same way. A
 * thread that is about to park first counts itself in (n_parked, caller_parked), then looks again;
 * the other side changes the word first, then looks at the count. Both orders are sequentially
 * consistent, so a wake-up is never lost and a run without parked threads makes no system call.
 *
 *   caller:  next = 0, n_running = n-1 | generation++ | n_parked? wake | fn | wait n_running == 0
 *   worker:  wait generation != seen | fn | n_running-- | last and caller_parked? wake
 *
 * With more threads than CPUs spinning only takes time from those who work: the spin is then
 * SPIN_NS_SHARED. pthread barriers and condition variables were rejected: several microseconds a
 * run.
 */
#include "kernels/cpu_pool.h"

#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/mem.h"
#include "common/thread.h"

enum {
    MAX_THREADS = 1024,
    CACHE_LINE = 128, /* pairs of 64: the neighbour line is prefetched too */
    SPIN_NS = 80000,
    SPIN_NS_SHARED = 2000,
    PAUSES_PER_LOOK = 32 /* at the clock */
};

typedef struct pool_thread {
    cpu_pool *pool;
    pthread_t thread;
    int32_t idx;
    bool started;
} pool_thread;

struct cpu_pool {
    /* Written by the caller before generation is raised, constant during a run. */
    cpu_pool_fn fn;
    void *arg;
    int32_t n_threads;
    bool pin;
    bool stopping;
    uint64_t spin_ns;
    pool_thread *threads; /* [n_threads - 1] */
    _Alignas(CACHE_LINE) _Atomic uint32_t generation;
    _Alignas(CACHE_LINE) _Atomic uint32_t n_running;
    _Atomic uint32_t caller_parked;
    _Alignas(CACHE_LINE) _Atomic uint32_t n_parked;
    _Alignas(CACHE_LINE) _Atomic int64_t next;
};

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void futex_wait(_Atomic uint32_t *word, uint32_t expected)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* True as soon as *word differs from value, false after spin_ns. */
static bool spin_while_equal(_Atomic uint32_t *word, uint32_t value, uint64_t spin_ns)
{
    uint64_t start = 0;
    for (;;) {
        for (int i = 0; i < PAUSES_PER_LOOK; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value)
                return true;
            pause_cpu();
        }
        uint64_t now = now_ns();
        if (start == 0)
            start = now;
        else if (now - start > spin_ns)
            return false;
    }
}

static void wait_for_run(cpu_pool *pool, uint32_t seen)
{
    while (!spin_while_equal(&pool->generation, seen, pool->spin_ns)) {
        atomic_fetch_add(&pool->n_parked, 1);
        if (atomic_load(&pool->generation) == seen)
            futex_wait(&pool->generation, seen);
        atomic_fetch_sub(&pool->n_parked, 1);
    }
}

static void worker_main(void *arg)
{
    pool_thread *self = arg;
    cpu_pool *pool = self->pool;
    if (pool->pin)
        thread_pin(self->idx);
    thread_set_flush_denormals();
    for (uint32_t seen = 0;; seen++) {
        wait_for_run(pool, seen);
        if (pool->stopping)
            return;
        pool->fn(pool->arg, self->idx, pool->n_threads);
        if (atomic_fetch_sub(&pool->n_running, 1) == 1 && atomic_load(&pool->caller_parked) != 0)
            futex_wake_all(&pool->n_running);
    }
}

static void wait_for_workers(cpu_pool *pool)
{
    uint64_t spin_ns = pool->spin_ns;
    for (;;) {
        uint32_t n = atomic_load_explicit(&pool->n_running, memory_order_acquire);
        if (n == 0)
            return;
        if (spin_while_equal(&pool->n_running, n, spin_ns))
            continue;
        atomic_store(&pool->caller_parked, 1);
        n = atomic_load(&pool->n_running);
        if (n != 0)
            futex_wait(&pool->n_running, n);
        atomic_store(&pool->caller_parked, 0);
    }
}

static void publish(cpu_pool *pool)
{
    atomic_fetch_add(&pool->generation, 1);
    if (atomic_load(&pool->n_parked) != 0)
        futex_wake_all(&pool->generation);
}

pgd_err cpu_pool_create(cpu_pool **out, int32_t n_threads, bool pin)
{
    *out = NULL;
    int32_t n_cpus = thread_n_cpus();
    if (n_threads == 0)
        n_threads = n_cpus;
    if (n_threads < 0 || n_threads > MAX_THREADS)
        return PGD_EINVAL;
    cpu_pool *pool = mem_alloc_aligned(sizeof(*pool), CACHE_LINE);
    if (pool == NULL)
        return PGD_ENOMEM;
    pool->n_threads = n_threads;
    pool->pin = pin && n_threads <= n_cpus;
    pool->spin_ns = n_threads <= n_cpus ? SPIN_NS : SPIN_NS_SHARED;
    pgd_err err = PGD_OK;
    if (n_threads > 1) {
        pool->threads = mem_calloc((size_t)n_threads - 1, sizeof(*pool->threads));
        err = pool->threads == NULL ? PGD_ENOMEM : PGD_OK;
    }
    for (int32_t i = 0; err == PGD_OK && i < n_threads - 1; i++) {
        pool_thread *t = &pool->threads[i];
        char name[24];
        snprintf(name, sizeof(name), "cpu_pool%d", (int)(i + 1));
        t->pool = pool;
        t->idx = i + 1;
        err = thread_start(&t->thread, name, worker_main, t);
        t->started = err == PGD_OK;
    }
    if (err != PGD_OK) {
        cpu_pool_destroy(pool);
        return err;
    }
    if (pool->pin)
        thread_pin(0);
    thread_set_flush_denormals();
    *out = pool;
    return PGD_OK;
}

void cpu_pool_destroy(cpu_pool *pool)
{
    if (pool == NULL)
        return;
    pool->stopping = true;
    publish(pool);
    for (int32_t i = 0; pool->threads != NULL && i < pool->n_threads - 1; i++) {
        if (pool->threads[i].started)
            thread_join(pool->threads[i].thread);
    }
    mem_free(pool->threads);
    mem_free_aligned(pool, sizeof(*pool));
}

int32_t cpu_pool_n_threads(const cpu_pool *pool)
{
    return pool->n_threads;
}

void cpu_pool_begin(cpu_pool *pool)
{
    /* A step may be driven by another thread than the one that created the pool. */
    thread_set_flush_denormals();
    if (pool->spin_ns == SPIN_NS && atomic_load(&pool->n_parked) != 0)
        futex_wake_all(&pool->generation);
}

void cpu_pool_run(cpu_pool *pool, cpu_pool_fn fn, void *arg)
{
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    if (pool->n_threads == 1) {
        fn(arg, 0, 1);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    atomic_store_explicit(&pool->n_running, (uint32_t)pool->n_threads - 1, memory_order_relaxed);
    publish(pool);
    fn(arg, 0, pool->n_threads);
    wait_for_workers(pool);
}

bool cpu_pool_next(cpu_pool *pool, int64_t n_items, int64_t chunk, int64_t *first, int64_t *last)
{
    if (atomic_load_explicit(&pool->next, memory_order_relaxed) >= n_items)
        return false;
    *first = atomic_fetch_add_explicit(&pool->next, chunk, memory_order_relaxed);
    *last = PGD_MIN(*first + chunk, n_items);
    return *first < n_items;
}
