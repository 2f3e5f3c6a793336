/* UTF-8 decoding by the Unicode standard's table 3-7 (no overlong forms, surrogates or code points
 * above U+10FFFF).
 *
 * Thread:  any
 */
#ifndef COMMON_UTF8_H
#define COMMON_UTF8_H

#include "common/base.h"

#define UTF8_REPLACEMENT "\xEF\xBF\xBD"

typedef enum utf8_status {
    UTF8_OK,         /* one code point, *n_bytes long */
    UTF8_INCOMPLETE, /* a valid start that the text's end cuts off; *n_bytes = what is there */
    UTF8_INVALID     /* *n_bytes = the maximal ill-formed part (>= 1) */
} utf8_status;

/* Decodes the first code point of text[n_avail], n_avail >= 1. code may be NULL. */
utf8_status utf8_decode(uint32_t *code, size_t *n_bytes, const char *text, size_t n_avail);
/* Writes code (a valid scalar value) to out[4]; returns 1 to 4. */
size_t utf8_encode(char out[4], uint32_t code);
/* True when all of text is well-formed; *bad_at (may be NULL) is the offset of the first fault. */
bool utf8_is_valid(const char *text, size_t n_bytes, size_t *bad_at);

#endif
