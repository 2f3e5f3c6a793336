/* The alphabet in which byte-level vocabularies spell bytes: each of the 256 bytes is one printable
 * character.
 *
 * Bytes 21..7E, A1..AC and AE..FF are the characters of the same number; the other 68, in order,
 * are U+0100 and up.
 *
 * Thread:  any
 * Source:  GPT-2 (Radford et al. 2019), its vocabulary file
 */
#ifndef ENGINE_TEXT_BYTE_ALPHABET_H
#define ENGINE_TEXT_BYTE_ALPHABET_H

#include "common/base.h"

/* UTF-8 of the character that spells byte; returns 1 or 2. */
size_t byte_alphabet_spell(char out[4], uint8_t byte);
/* The bytes that text spells into out[n_bytes]; returns their number, or -1 if it holds any other
 * character. */
ptrdiff_t byte_alphabet_read(char *out, const char *text, size_t n_bytes);

#endif
