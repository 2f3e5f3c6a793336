/* What the benchmarks without a server share: whole numbers as options, and medians.
 *
 * Thread:  any
 */
#ifndef ENGINE_BENCH_BENCH_WORDS_H
#define ENGINE_BENCH_BENCH_WORDS_H

#include "common/err.h"

/* An option --NAME N or --NAME=N, stored into an int64_t. */
typedef struct bench_word {
    const char *name; /* with its dashes */
    size_t offset;    /* in the options */
    int64_t min, max;
} bench_word;

/* words: [n_words], as command_load_config leaves them. --json sets *json. On a wrong one prints what
 * was expected and returns false. */
PGD_MUST_USE bool bench_words_parse(void *opts, bool *json, const bench_word *rows, size_t n_rows,
                                    char **words, int n_words);
/* Sorts the values; n >= 1. */
double bench_median(double *values, int64_t n);

#endif
