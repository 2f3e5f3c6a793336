/* The body of the which-th request: everything random in it comes from seed and which, so that two
 * runs with one seed send the same requests, whatever the order of the answers.
 *
 * Thread:  any
 */
#ifndef ENGINE_BENCH_BENCH_PROMPT_H
#define ENGINE_BENCH_BENCH_PROMPT_H

#include "engine/bench/bench_load.h"

/* Tokens asked for. Sets out->failed when out of memory. */
int64_t bench_prompt_write(strbuf *out, const bench_load_opts *opts, uint64_t which);
/* Uniform in (0, 1) from the seed, a stream number and a counter. */
double bench_prompt_uniform(int64_t seed, uint64_t stream, uint64_t n);

#endif
