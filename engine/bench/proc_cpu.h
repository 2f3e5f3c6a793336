/* CPU time of a process and of its children, from /proc.
 *
 * Thread:  any
 */
#ifndef ENGINE_BENCH_PROC_CPU_H
#define ENGINE_BENCH_PROC_CPU_H

#include <sys/types.h>

#include "common/err.h"

typedef struct proc_cpu {
    uint64_t self_us;     /* all threads, user and system */
    uint64_t children_us; /* of the children that live now */
    int32_t n_children;
} proc_cpu;

/* False when there is no such process or /proc does not tell. Resolution: a clock tick, 10 ms. */
bool proc_cpu_read(proc_cpu *out, pid_t pid);
/* Binds the calling thread, and what it starts, to CPUs given as "0" or "0,2-3". Errors: PGD_EINVAL
 * (the list), PGD_EIO (refused) */
PGD_MUST_USE pgd_err proc_cpu_bind(const char *list, pgd_why *why);

#endif
