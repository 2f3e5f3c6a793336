/* Text normalisation before tokenizing: a short list of steps from the model's tokenizer.
 *
 * Owns:    the strings of its steps
 * Limits:  NORMALIZER_MAX_STEPS
 * Thread:  build from one thread; normalizer_apply from any
 * Source:  the normalizer entry of tokenizer.json; Unicode standard annex 15 (NFC)
 */
#ifndef ENGINE_TEXT_NORMALIZER_H
#define ENGINE_TEXT_NORMALIZER_H

#include "common/strbuf.h"

#define NORMALIZER_MAX_STEPS 8

typedef enum normalizer_kind {
    NORMALIZER_NFC,     /* canonical composition; invalid bytes stay */
    NORMALIZER_PREPEND, /* with, in front of a text that is not empty */
    NORMALIZER_REPLACE  /* every what by with, left to right */
} normalizer_kind;

typedef struct normalizer_step {
    normalizer_kind kind;
    char *what; /* REPLACE, at least one byte */
    size_t n_what_bytes;
    char *with;
    size_t n_with_bytes;
} normalizer_step;

/* Zero-initialise: no steps. */
typedef struct normalizer {
    normalizer_step steps[NORMALIZER_MAX_STEPS];
    int32_t n_steps;
} normalizer;

void normalizer_deinit(normalizer *z);
/* Copies what and with (both may be NULL with 0 bytes where the kind has no use for them). */
PGD_MUST_USE pgd_err normalizer_add(normalizer *z, normalizer_kind kind, const char *what,
                                    size_t n_what_bytes, const char *with, size_t n_with_bytes);
/* Replaces what out holds by the normalised text. spare is a second buffer; its content is lost. */
PGD_MUST_USE pgd_err normalizer_apply(const normalizer *z, const char *text, size_t n_bytes,
                                      strbuf *out, strbuf *spare);

#endif
