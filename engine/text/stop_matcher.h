/* Finds stop strings in streamed text and holds back what may still become one: at most the longest
 * string less one byte.
 *
 * Owns:    a copy of the strings
 * Thread:  one at a time
 */
#ifndef ENGINE_TEXT_STOP_MATCHER_H
#define ENGINE_TEXT_STOP_MATCHER_H

#include "common/strbuf.h"

typedef struct stop_matcher stop_matcher;

/* strings: [n_strings] of n_bytes[i] > 0 bytes. include_stop: the stop string itself is emitted.
 * n_strings may be 0. */
PGD_MUST_USE pgd_err stop_matcher_create(stop_matcher **out, const char *const *strings,
                                         const size_t *n_bytes, int32_t n_strings,
                                         bool include_stop);
void stop_matcher_destroy(stop_matcher *m);
/* Feeds text; appends to out what is certain not to be part of a stop string. Returns the index of
 * the stop string that was found first in the text (the earliest end, of several there the longest;
 * then out ends before it, or after it with include_stop), or -1. After a match the rest of the
 * text is dropped and nothing more may be fed. */
int32_t stop_matcher_push(stop_matcher *m, const char *text, size_t n_bytes, strbuf *out);
/* The request ended otherwise: appends what was held back. */
void stop_matcher_flush(stop_matcher *m, strbuf *out);

#endif
