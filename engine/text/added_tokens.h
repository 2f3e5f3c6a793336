/* Tokens that are found in the text itself before anything else is done to it: special tokens and
 * the user's own.
 *
 * The text is searched left to right; of the tokens that begin at the first such place the longest
 * is taken. Costs the text's length times the depth of the trie that the text reaches.
 *
 * Owns:    a copy of the strings
 * Limits:  ADDED_MAX_BYTES per token, which also bounds the depth
 * Thread:  build from one thread; searching from any
 * Source:  added_tokens of tokenizer.json, flags as Hugging Face tokenizers treats them
 */
#ifndef ENGINE_TEXT_ADDED_TOKENS_H
#define ENGINE_TEXT_ADDED_TOKENS_H

#include "common/err.h"

#define ADDED_MAX_BYTES 1024 /* of one token's text */

typedef struct added_flags {
    bool special;     /* taken only when the caller parses special tokens */
    bool lstrip;      /* takes the white space before it along */
    bool rstrip;      /* ... and after it */
    bool single_word; /* only between non-word characters */
} added_flags;

typedef struct added_node {
    int32_t child; /* first one, 0 = none */
    int32_t sibling;
    int32_t entry; /* of the token that ends here, -1 = none */
    uint8_t byte;
} added_node;

typedef struct added_entry {
    token_id id;
    added_flags flags;
} added_entry;

/* Zero-initialise; added_tokens_deinit at any time after. */
typedef struct added_tokens {
    added_node *nodes; /* [n_nodes]; nodes[0] is the root */
    int32_t n_nodes;
    int32_t cap_nodes;
    added_entry *entries; /* [n_entries] */
    int32_t n_entries;
    int32_t cap_entries;
    int32_t first[256]; /* children of the root by byte, 0 = none */
    bool strips;        /* some token has lstrip or rstrip */
} added_tokens;

void added_tokens_deinit(added_tokens *a);
/* text: 1 to ADDED_MAX_BYTES bytes, else PGD_ERANGE. A text that is there already keeps its first
 * id. */
PGD_MUST_USE pgd_err added_tokens_add(added_tokens *a, const char *text, size_t n_bytes,
                                      token_id id, added_flags flags);
/* Id of the token with exactly this text, or -1. */
token_id added_tokens_find(const added_tokens *a, const char *text, size_t n_bytes);

/* A token, or (id -1) text between tokens. */
typedef struct added_part {
    token_id id;
    size_t start;
    size_t end;
} added_part;

typedef struct added_iter {
    const added_tokens *tokens;
    const char *text;
    size_t n_bytes;
    bool parse_special;
    size_t search; /* where the next token may begin */
    size_t done;   /* what lies before was returned */
    bool has_pending;
    added_part pending;
} added_iter;

/* Borrows a and text until the last call of added_iter_next. */
void added_iter_begin(added_iter *it, const added_tokens *a, const char *text, size_t n_bytes,
                      bool parse_special);
bool added_iter_next(added_iter *it, added_part *out);

#endif
