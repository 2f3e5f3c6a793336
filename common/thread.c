/* Thread creation with a name and blocked signals; roles are a per-thread word that single-thread
 * modules check. */
#include "common/thread.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <sched.h>
#include <unistd.h>

#if defined(__x86_64__)
#    include <xmmintrin.h>
#endif

#include "common/mem.h"

typedef struct start_args {
    thread_fn fn;
    void *arg;
    char name[16];
} start_args;

static _Thread_local thread_role current_role;

static void *thread_main(void *p)
{
    start_args args = *(start_args *)p;
    mem_free(p);
    pthread_setname_np(pthread_self(), args.name);
    args.fn(args.arg);
    return NULL;
}

pgd_err thread_start(pthread_t *out, const char *name, thread_fn fn, void *arg)
{
    start_args *args = mem_alloc(sizeof(*args));
    if (args == NULL)
        return PGD_ENOMEM;
    args->fn = fn;
    args->arg = arg;
    snprintf(args->name, sizeof(args->name), "%s", name);
    /* The new thread inherits the mask: signals go to the main thread's loop only. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(out, NULL, thread_main, args);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc != 0) {
        mem_free(args);
        return PGD_ENOMEM;
    }
    return PGD_OK;
}

void thread_join(pthread_t thread)
{
    PGD_ASSERT(pthread_join(thread, NULL) == 0);
}

typedef struct bounded_call {
    thread_fn fn;
    _Alignas(max_align_t) uint8_t arg[THREAD_MAX_ARG_BYTES];
    pthread_mutex_t m;
    pthread_cond_t ended;
    bool is_ended; /* guarded by m, as is is_left */
    bool is_left;  /* nobody waits any more: the thread frees this */
} bounded_call;

static void free_call(bounded_call *c)
{
    pthread_cond_destroy(&c->ended);
    pthread_mutex_destroy(&c->m);
    mem_free(c);
}

static void run_call(void *arg)
{
    bounded_call *c = arg;
    c->fn(c->arg);
    pthread_mutex_lock(&c->m);
    c->is_ended = true;
    bool is_left = c->is_left;
    pthread_cond_signal(&c->ended);
    pthread_mutex_unlock(&c->m);
    if (is_left)
        free_call(c);
}

/* pthread_clockjoin_np would do, but ThreadSanitizer does not know it. */
static bool wait_call(bounded_call *c, int limit_s)
{
    struct timespec end;
    int rc = 0;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += limit_s;
    pthread_mutex_lock(&c->m);
    while (!c->is_ended && rc == 0)
        rc = pthread_cond_timedwait(&c->ended, &c->m, &end);
    bool is_ended = c->is_ended;
    c->is_left = !is_ended;
    pthread_mutex_unlock(&c->m);
    return is_ended;
}

bool thread_run_bounded(const char *name, thread_fn fn, const void *arg, size_t arg_bytes,
                        int limit_s)
{
    pthread_t thread;
    pthread_condattr_t attr;
    bounded_call here = {.fn = fn};
    PGD_ASSERT(arg_bytes <= sizeof(here.arg));
    memcpy(here.arg, arg, arg_bytes);
    bounded_call *c = mem_alloc(sizeof(*c));
    if (c == NULL) {
        fn(here.arg);
        return true;
    }
    *c = here;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&c->m, NULL);
    pthread_cond_init(&c->ended, &attr);
    pthread_condattr_destroy(&attr);
    if (thread_start(&thread, name, run_call, c) != PGD_OK) {
        fn(c->arg);
    } else if (wait_call(c, limit_s)) {
        thread_join(thread);
    } else {
        pthread_detach(thread);
        return false;
    }
    free_call(c);
    return true;
}

void thread_set_role(thread_role role)
{
    current_role = role;
}

void thread_assert(thread_role role)
{
    PGD_ASSERTF(current_role == THREAD_ANY || current_role == role, "thread role %d, expected %d",
                (int)current_role, (int)role);
}

int thread_n_cpus(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) != 0)
        return 1;
    int n = CPU_COUNT(&set);
    return n > 0 ? n : 1;
}

bool thread_pin(int idx)
{
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof(all), &all) != 0)
        return false;
    int seen = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &all) && seen++ == idx) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            return pthread_setaffinity_np(pthread_self(), sizeof(one), &one) == 0;
        }
    }
    return false;
}

void thread_set_flush_denormals(void)
{
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040); /* FTZ is bit 15, DAZ bit 6 */
#elif defined(__aarch64__)
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    fpcr |= (uint64_t)1 << 24; /* FZ */
    __asm__ volatile("msr fpcr, %0" : : "r"(fpcr));
#endif
}
