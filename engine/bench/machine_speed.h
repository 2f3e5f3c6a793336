/* What the memory of this machine can do, as a yardstick that is measured beside a benchmark.
 *
 * Thread:  any
 */
#ifndef ENGINE_BENCH_MACHINE_SPEED_H
#define ENGINE_BENCH_MACHINE_SPEED_H

#include "common/err.h"

typedef struct machine_speed {
    double random_read_ns; /* one dependent read somewhere in 256 MB */
    double cache_read_ns;  /* one dependent read somewhere in 512 KB */
    double read_gb_s;      /* one thread, in order */
} machine_speed;

/* Takes about a third of a second. Errors: PGD_ENOMEM */
PGD_MUST_USE pgd_err machine_speed_measure(machine_speed *out);

#endif
