/* How the CPU ops share their items between the pool's threads.
 *
 * An op whose whole work is below CPU_SPLIT_MIN_WORK (about the number of multiply-adds or moved
 * values) runs on the calling thread: waking the others would cost more than it saves. The split
 * never changes the order of a sum.
 * Thread:  the worker's main thread
 */
#ifndef KERNELS_CPU_CPU_SPLIT_H
#define KERNELS_CPU_CPU_SPLIT_H

#include "kernels/kernel_ctx.h"

#define CPU_SPLIT_MIN_WORK 8192

/* Runs fn on the pool, or inline as thread 0 of 1 when there is no pool or little work. */
static inline void cpu_split_run(kernel_ctx *ctx, cpu_pool_fn fn, void *arg, int64_t work)
{
    if (!ctx->pool || work < CPU_SPLIT_MIN_WORK)
        fn(arg, 0, 1);
    else
        cpu_pool_run(ctx->pool, fn, arg);
}

/* Items [*first, *last) of thread thread_idx, in equal parts. */
static inline void cpu_split_range(int64_t *first, int64_t *last, int64_t n_items,
                                   int32_t thread_idx, int32_t n_threads)
{
    *first = n_items * thread_idx / n_threads;
    *last = n_items * (thread_idx + 1) / n_threads;
}

#endif
