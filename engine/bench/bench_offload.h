/* `paged bench offload`: what the tiers behind the KV cache are worth.
 *
 * Thread:  main (it becomes the io thread)
 */
#ifndef ENGINE_BENCH_BENCH_OFFLOAD_H
#define ENGINE_BENCH_BENCH_OFFLOAD_H

#include <stdio.h>

/* The words behind `bench offload`; answers the exit status. */
int bench_offload_main(int argc, char **argv);
void bench_offload_help(FILE *out);

#endif
