/* Two-way table between strings and token ids.
 *
 * Owns:    a copy of all strings
 * Limits:  VOCAB_MAX_TOKENS ids, VOCAB_MAX_TOKEN_BYTES per string
 * Thread:  build from one thread; look-ups from any
 */
#ifndef ENGINE_TEXT_VOCAB_H
#define ENGINE_TEXT_VOCAB_H

#include "common/err.h"

#define VOCAB_MAX_TOKENS      (1 << 22)
#define VOCAB_MAX_TOKEN_BYTES (1 << 16)

/* Zero-initialise; vocab_deinit at any time after. */
typedef struct vocab {
    char *bytes;       /* all strings, one after the other */
    uint32_t *offsets; /* [n_tokens + 1] */
    uint64_t *slots;   /* [n_slots], hash bits << 32 | id + 1; 0 = free */
    uint32_t n_slots;  /* power of two */
    uint32_t cap_bytes;
    int32_t n_tokens;
    int32_t cap_tokens;
    int32_t longest_bytes; /* among the indexed strings */
} vocab;

void vocab_deinit(vocab *v);
/* Room for n_tokens; makes the index. Call once, first. */
PGD_MUST_USE pgd_err vocab_reserve(vocab *v, int32_t n_tokens, size_t n_bytes);
/* Gives the next id to the string. Indexed strings are found by vocab_find; of equal ones the first
 * wins. */
PGD_MUST_USE pgd_err vocab_add(vocab *v, const char *text, size_t n_bytes, bool indexed);
/* -1 when absent. */
token_id vocab_find(const vocab *v, const char *text, size_t n_bytes);
/* The string of id in [0, n_tokens). Borrow until deinit. */
const char *vocab_text(const vocab *v, token_id id, size_t *n_bytes);

#endif
