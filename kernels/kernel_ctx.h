/* What every kernel call is ordered by and works with: the stream on a device, the thread pool and
 * scratch memory on a CPU.
 *
 * Thread:  the worker's main thread
 */
#ifndef KERNELS_KERNEL_CTX_H
#define KERNELS_KERNEL_CTX_H

#include "common/err.h"
#include "kernels/cpu_pool.h"

PGD_BEGIN_C

typedef struct kernel_ctx {
    cpu_pool *pool;  /* CPU */
    void *workspace; /* 64-byte aligned; contents are lost from one op to the next */
    size_t workspace_bytes;
    void *stream; /* device back ends */
} kernel_ctx;

PGD_END_C
#endif
