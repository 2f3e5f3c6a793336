/* Options of a benchmark stand among those of paged serve, which have been taken out before. */
#include "engine/bench/bench_words.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const bench_word *find(const bench_word *rows, size_t n_rows, const char *word, size_t len)
{
    for (size_t i = 0; i < n_rows; i++) {
        if (strlen(rows[i].name) == len && strncmp(rows[i].name, word, len) == 0)
            return &rows[i];
    }
    return NULL;
}

bool bench_words_parse(void *opts, bool *json, const bench_word *rows, size_t n_rows, char **words,
                       int n_words)
{
    for (int i = 0; i < n_words; i++) {
        if (strcmp(words[i], "--json") == 0) {
            *json = true;
            continue;
        }
        size_t len = strcspn(words[i], "=");
        const bench_word *row = find(rows, n_rows, words[i], len);
        if (row == NULL) {
            fprintf(stderr, "paged bench: unexpected %s\n", words[i]);
            return false;
        }
        const char *value = words[i][len] == '=' ? words[i] + len + 1 : words[++i];
        char *end;
        int64_t v = strtoll(value, &end, 10);
        if (end == value || *end != '\0' || v < row->min || v > row->max) {
            fprintf(stderr, "paged bench: %s: expected %" PRId64 " to %" PRId64 ", got %s\n",
                    row->name, row->min, row->max, value);
            return false;
        }
        memcpy((char *)opts + row->offset, &v, sizeof(v));
    }
    return true;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double bench_median(double *values, int64_t n)
{
    qsort(values, (size_t)n, sizeof(*values), compare_doubles);
    return n % 2 != 0 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}
