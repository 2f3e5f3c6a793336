/* `paged bench sched`: what a step costs without a model.
 *
 * Thread:  main
 */
#ifndef ENGINE_BENCH_BENCH_SCHED_H
#define ENGINE_BENCH_BENCH_SCHED_H

#include <stdio.h>

/* The words behind `bench sched`; answers the exit status. */
int bench_sched_main(int argc, char **argv);
void bench_sched_help(FILE *out);

#endif
