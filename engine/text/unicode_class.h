/* Character classes of code points, as pre-tokenizer expressions see them.
 *
 * Classes are \p{L}, \p{N}, \s, \w and two unions of categories as the expression engines behind Hugging Face tokenizers
 * define them (Unicode 16), independent of the system's Unicode library.
 *
 * Thread:  any
 */
#ifndef ENGINE_TEXT_UNICODE_CLASS_H
#define ENGINE_TEXT_UNICODE_CLASS_H

#include "common/base.h"
#include "common/utf8.h"

enum {
    UNICODE_LETTER = 1, /* \p{L} */
    UNICODE_NUMBER = 2, /* \p{N} */
    UNICODE_SPACE = 4,  /* \s = White_Space */
    UNICODE_WORD = 8,   /* \w: alphabetic, mark, decimal digit, connector, join control */
    /* Halves of a word; letters without case and marks are in both. */
    UNICODE_CAPITAL = 16, /* [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}] */
    UNICODE_SMALL = 32    /* [\p{Ll}\p{Lm}\p{Lo}\p{M}] */
};

typedef struct unicode_range {
    uint32_t first;
    uint32_t last;
    uint32_t classes; /* sum of UNICODE_… */
} unicode_range;

/* Ascending, disjoint; a code point in none of them has no class. */
extern const unicode_range unicode_ranges[];
extern const int32_t unicode_n_ranges;

/* Sum of UNICODE_…; 0 for cp < 0 (an invalid byte). */
unsigned unicode_class(int32_t cp);

/* The well-formed character at text[0] (n_bytes > 0), *n_used bytes long. Otherwise -1 and *n_used
 * = 1: the byte stands for itself. */
static inline int32_t unicode_decode(const char *text, size_t n_bytes, size_t *n_used)
{
    uint32_t code = (uint8_t)text[0];
    if (code < 0x80) {
        *n_used = 1;
        return (int32_t)code;
    }
    if (utf8_decode(&code, n_used, text, n_bytes) == UTF8_OK)
        return (int32_t)code;
    *n_used = 1;
    return -1;
}

#endif
