/* `paged bench serve`: latencies and rates of a server as its clients see them.
 *
 * Thread:  main
 */
#ifndef ENGINE_BENCH_BENCH_SERVE_H
#define ENGINE_BENCH_BENCH_SERVE_H

#include <stdio.h>

/* The words behind `bench serve`; answers the exit status: 0 every request succeeded, 1 some
 * failed, else as in engine/commands.h. */
int bench_serve_main(int argc, char **argv);
void bench_serve_help(FILE *out);

#endif
