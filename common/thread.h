/* Threads: creation with a name, affinity, and role assertions.
 *
 * Thread:  any
 */
#ifndef COMMON_THREAD_H
#define COMMON_THREAD_H

#include <pthread.h>

#include "common/err.h"

typedef enum thread_role {
    THREAD_ANY = 0,
    THREAD_IO,
    THREAD_CORE,
    THREAD_POOL,
    THREAD_WORKER
} thread_role;

typedef void (*thread_fn)(void *arg);

/* name: at most 15 bytes. Signals are blocked in the new thread. */
PGD_MUST_USE pgd_err thread_start(pthread_t *out, const char *name, thread_fn fn, void *arg);
void thread_join(pthread_t thread);
#define THREAD_MAX_ARG_BYTES 16
/* Calls fn with a copy of arg (at most THREAD_MAX_ARG_BYTES) in a thread of its own and waits for
 * its end, at most limit_s. False: it still runs and is left behind. Without memory for a thread it
 * is called here, without a limit. */
bool thread_run_bounded(const char *name, thread_fn fn, const void *arg, size_t arg_bytes,
                        int limit_s);
void thread_set_role(thread_role role);
/* Aborts when the calling thread has another role; THREAD_ANY (never set) passes, for unit tests.
 */
void thread_assert(thread_role role);
/* CPUs of the process's affinity mask, at least 1. */
int thread_n_cpus(void);
/* Pins the calling thread to the idx-th CPU of the affinity mask; false when refused. */
bool thread_pin(int idx);
/* Flush-to-zero and denormals-are-zero for the calling thread (x86 MXCSR, arm64 FPCR). */
void thread_set_flush_denormals(void);

#endif
