/* Token ids to UTF-8 text, one id at a time: never emits part of a character.
 *
 * Bytes of an incomplete UTF-8 sequence are held until complete or proven invalid. Of a byte-level
 * vocabulary, invalid bytes become U+FFFD, one per maximal ill-formed part (Unicode 15, table 3-7);
 * of a vocabulary with byte fallback, one per byte. The final flush does the same with what is
 * left. Nothing is allocated but by out.
 *
 * Owns:    nothing; the storage belongs to the caller
 * Thread:  one at a time
 */
#ifndef ENGINE_TEXT_DETOKENIZER_H
#define ENGINE_TEXT_DETOKENIZER_H

#include "common/strbuf.h"
#include "engine/text/tokenizer.h"

typedef struct detokenizer {
    const tokenizer *tokenizer; /* borrow until the last push */
    bool skip_special;
    bool at_start; /* nothing came before: a dummy-prefix space is dropped */
    uint8_t held[4];
    int32_t n_held;
} detokenizer;

/* has_prefix: text comes before (a prompt), so the first piece keeps its space. */
void detokenizer_init(detokenizer *d, const tokenizer *t, bool skip_special, bool has_prefix);
/* Appends the text that id completes (maybe none) to out. */
void detokenizer_push(detokenizer *d, token_id id, strbuf *out);
/* Appends what is still held, as U+FFFD. */
void detokenizer_flush(detokenizer *d, strbuf *out);

#endif
