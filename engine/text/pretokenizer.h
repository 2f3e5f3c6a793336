/* Cuts text into the pieces that byte-level BPE merges within.
 *
 * Each rule is a hand-written scanner that gives exactly the pieces of the expression it replaces,
 * in one pass:
 *
 *   GPT2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *   LLAMA3  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}
 *           | ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
 *   QWEN2   the same with \p{N} for \p{N}{1,3}
 *   O200K   [^\r\n\p{L}\p{N}]?C*S+('…)?|[^\r\n\p{L}\p{N}]?C+S*('…)?|\p{N}{1,3}
 *           | ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
 *           with C = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}], S = [\p{Ll}\p{Lm}\p{Lo}\p{M}] and the first
 *           alternative of LLAMA3 for '…
 *   SMOLLM  each \p{N} alone, then GPT2 on what lies between
 *   NONE    one piece
 *
 * An invalid byte counts as a character that is neither letter, number nor space.
 *
 * Thread:  any
 * Source:  the pre_tokenizer entries of the models' tokenizer.json
 */
#ifndef ENGINE_TEXT_PRETOKENIZER_H
#define ENGINE_TEXT_PRETOKENIZER_H

#include "common/err.h"

typedef enum pretokenizer_rule {
    PRETOKENIZER_NONE,
    PRETOKENIZER_GPT2,
    PRETOKENIZER_LLAMA3,
    PRETOKENIZER_QWEN2,
    PRETOKENIZER_SMOLLM,
    PRETOKENIZER_O200K
} pretokenizer_rule;

/* End of the piece that begins at start (start < n_bytes, a piece border). Always > start. */
size_t pretokenizer_next(pretokenizer_rule rule, const char *text, size_t n_bytes, size_t start);

/* The rule of a GGUF's tokenizer.ggml.pre; false if this build lacks it. */
bool pretokenizer_from_name(pretokenizer_rule *out, const char *name, size_t n_bytes);
/* The rule that an expression of tokenizer.json spells; false if it is not a known one. */
bool pretokenizer_from_regex(pretokenizer_rule *out, const char *regex, size_t n_bytes);

#endif
