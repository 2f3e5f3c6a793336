/* Reads a Prometheus text page (format 0.0.4).
 *
 * Families may be absent and names have no fixed prefix: whoever asks says what he can do without.
 * Limits:  METRICS_TEXT_MAX_SAMPLES samples
 * Owns:    its index; the page is a borrow until deinit
 * Thread:  one at a time
 */
#ifndef ENGINE_STATUS_METRICS_TEXT_H
#define ENGINE_STATUS_METRICS_TEXT_H

#include "common/err.h"

#define METRICS_TEXT_MAX_SAMPLES 200000

typedef struct metrics_sample {
    const char *name; /* not NUL-terminated */
    size_t n_name;
    const char *labels; /* between the braces; n_labels 0 = none */
    size_t n_labels;
    double value;
} metrics_sample;

typedef struct metrics_text {
    metrics_sample *samples; /* [n_samples] in the page's order */
    size_t n_samples;
    size_t cap;
} metrics_text;

/* Errors: PGD_EFORMAT with the line's number, PGD_ENOMEM, PGD_ERANGE. Nothing is left to deinit
 * after an error. */
PGD_MUST_USE pgd_err metrics_text_parse(metrics_text *out, const char *text, size_t n_bytes,
                                        pgd_why *why);
void metrics_text_deinit(metrics_text *m);

/* Next sample of that name behind `at` (NULL: the first), or NULL. */
const metrics_sample *metrics_text_next(const metrics_text *m, const metrics_sample *at,
                                        const char *name);
/* The sum over all label sets; false when there is no sample. *out is then left alone. */
bool metrics_text_sum(const metrics_text *m, const char *name, double *out);
/* A label's value without its escapes, cut to cap; false when absent (out is then ""). */
bool metrics_text_label(const metrics_sample *s, const char *label, char *out, size_t cap);

#endif
