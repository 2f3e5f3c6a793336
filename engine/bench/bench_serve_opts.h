/* The options of `paged bench serve`, which has those of `paged serve` too: they are left for the
 * daemon that it starts.
 *
 * Thread:  main
 */
#ifndef ENGINE_BENCH_BENCH_SERVE_OPTS_H
#define ENGINE_BENCH_BENCH_SERVE_OPTS_H

#include <stdio.h>

#include "engine/bench/bench_load.h"

#define BENCH_MAX_STREAMS 16
#define BENCH_MAX_WORDS   200

typedef struct bench_serve_opts {
    bench_load_opts load;
    double request_rate; /* INFINITY = closed loop or all at once */
    const char *url;     /* NULL = a daemon of our own */
    const char *api_key_file;
    const char *streams_text;
    const char *server_cpus;
    const char *client_cpus;
    int64_t streams[BENCH_MAX_STREAMS]; /* [n_streams] */
    int n_streams;
    int64_t num_warmups; /* -1 = by whose daemon it is */
    int64_t server_pid;  /* 0 = our own, or not known */
    double timeout_s;
    bool json;
    bool histogram;
    bool sweep;
    char *words[BENCH_MAX_WORDS]; /* [n_words] what is not ours, in order */
    int n_words;
} bench_serve_opts;

/* Reads argv, whose strings are kept as borrows. On a mistake prints it and answers false. */
bool bench_serve_opts_parse(bench_serve_opts *o, int argc, char **argv);
void bench_serve_opts_help(FILE *out);

#endif
