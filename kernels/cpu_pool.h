/* The compute threads of a CPU worker: run one function on all of them and wait.
 *
 * The caller is thread 0. Between runs the others spin briefly (so that a step's hundreds of runs
 * cost well under a microsecond each), then park; cpu_pool_begin wakes them ahead of a step. Every
 * thread has FTZ and DAZ set.
 * Thread:  one caller at a time
 */
#ifndef KERNELS_CPU_POOL_H
#define KERNELS_CPU_POOL_H

#include "common/err.h"

PGD_BEGIN_C

typedef struct cpu_pool cpu_pool;
/* thread_idx in [0, n_threads). Work is split by thread_idx or taken from a shared counter; the
 * split may never change a sum. */
typedef void (*cpu_pool_fn)(void *arg, int32_t thread_idx, int32_t n_threads);

/* n_threads 0 = the CPUs of the affinity mask. pin: thread i on the i-th of them. */
PGD_MUST_USE pgd_err cpu_pool_create(cpu_pool **out, int32_t n_threads, bool pin);
void cpu_pool_destroy(cpu_pool *pool);
int32_t cpu_pool_n_threads(const cpu_pool *pool);
/* Wakes parked threads so that the first run of a step does not wait for them. */
void cpu_pool_begin(cpu_pool *pool);
void cpu_pool_run(cpu_pool *pool, cpu_pool_fn fn, void *arg);
/* Next chunk [*first, *last) of n_items for this run, taken from a shared counter that cpu_pool_run
 * resets; false when none is left. chunk >= 1. */
bool cpu_pool_next(cpu_pool *pool, int64_t n_items, int64_t chunk, int64_t *first, int64_t *last);

PGD_END_C
#endif
