/* `paged bench latency|throughput`: the engine without HTTP.
 *
 * Thread:  main (it becomes the io thread)
 */
#ifndef ENGINE_BENCH_BENCH_OFFLINE_H
#define ENGINE_BENCH_BENCH_OFFLINE_H

#include <stdbool.h>
#include <stdio.h>

/* The words behind `bench latency` or `bench throughput`; answers the exit status. */
int bench_offline_main(int argc, char **argv, bool is_latency);
void bench_offline_help(FILE *out);

#endif
