/* A daemon of our own: `paged serve` as a child of the measuring process, on a free port, with its
 * log in a temporary file.
 *
 * It dies with its parent. The log is removed after a good end and kept, and named, after any
 * other.
 * Owns:    the child and its log file
 * Thread:  main (the kernel's parent-death signal goes by thread)
 */
#ifndef ENGINE_BENCH_BENCH_DAEMON_H
#define ENGINE_BENCH_BENCH_DAEMON_H

#include <sys/types.h>

#include <uv.h>

#include "common/err.h"

typedef struct bench_daemon {
    pid_t pid; /* 0 = none */
    int exit_status;
    char log_path[256];
    char url[300]; /* once it is ready */
} bench_daemon;

/* Starts `paged serve` with flags (NULL-terminated; borrow for the call) and waits until it serves.
 * cpus: the CPUs it may use, or NULL. stop: gives up when it becomes true; loop: run meanwhile, so
 * that it can. On failure the why tells the end of its log, and exit_status of the struct is its
 * own (71 when there was none). */
PGD_MUST_USE pgd_err bench_daemon_start(bench_daemon *d, const char *const *flags, const char *cpus,
                                        uv_loop_t *loop, const bool *stop, pgd_why *why);
/* SIGTERM, and SIGKILL if that does not help. False when it had ended before, or ended badly: the
 * last lines of the log then go to stderr. */
bool bench_daemon_stop(bench_daemon *d);

#endif
