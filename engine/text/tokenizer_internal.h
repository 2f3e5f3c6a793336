/* What a tokenizer holds, shared by its encoder (tokenizer_encode.c) and its loaders
 * (tokenizer_gguf.c, tokenizer_json.c).
 *
 * A loader fills the struct in this order: the model's kind and decoding flags, tokenizer_reserve,
 * tokenizer_set_token for ids 0, 1, 2, ..., merges, the rest; then tokenizer_finish checks and
 * derives what encode needs.
 *
 * Thread:  one while loading; read-only afterwards
 */
#ifndef ENGINE_TEXT_TOKENIZER_INTERNAL_H
#define ENGINE_TEXT_TOKENIZER_INTERNAL_H

#include "engine/text/added_tokens.h"
#include "engine/text/bpe.h"
#include "engine/text/normalizer.h"
#include "engine/text/pretokenizer.h"
#include "engine/text/tokenizer.h"
#include "engine/text/vocab.h"

#define TOKENIZER_MAX_AFFIX  16             /* ids put before or after a text */
#define TOKENIZER_WORD_MARK  "\xE2\x96\x81" /* U+2581, SentencePiece's space */
#define TOKENIZER_MARK_BYTES 3

typedef enum tokenizer_model {
    TOKENIZER_BYTE_BPE, /* symbols are bytes, merged by rank */
    TOKENIZER_CHAR_BPE, /* symbols are characters, merged by rank, maybe with byte fallback */
    TOKENIZER_SPM       /* symbols are characters, merged by score, with byte fallback */
} tokenizer_model;

enum {
    TOKEN_MODEL = 1, /* may come out of plain text */
    TOKEN_SPECIAL = 2,
    TOKEN_ADDED = 4, /* found in the text before the model sees it */
    TOKEN_BYTE = 8   /* its piece is one byte of byte fallback */
};

/* Which word marks become no space at the start of a decoded text. */
typedef enum tokenizer_first_space {
    FIRST_SPACE_KEEP,
    FIRST_SPACE_STRIP_ONE, /* one leading space of the whole text */
    FIRST_SPACE_STRIP_ALL  /* every word mark of the first token (Metaspace decoder) */
} tokenizer_first_space;

typedef enum metaspace_prepend {
    METASPACE_NEVER,
    METASPACE_FIRST,
    METASPACE_ALWAYS
} metaspace_prepend;

struct tokenizer {
    tokenizer_model model;
    vocab texts;    /* entries as the file spells them; TOKEN_MODEL ones (in a GGUF all) indexed */
    vocab pieces;   /* entries as decoded bytes; with ignore_merges those of BYTE_BPE indexed */
    uint8_t *attrs; /* [n_tokens] */
    float *scores;  /* [n_tokens], SPM only */
    bpe_rules rules;
    token_id byte_ids[256]; /* the token of each byte (BYTE_BPE) or its fallback; -1 = none */
    token_id unk_id;
    token_id bos_id;
    token_id eos_id;
    bool ignore_merges; /* a word that is itself an entry is that entry */
    bool byte_fallback;
    bool fuse_unk;

    normalizer normalizer;
    pretokenizer_rule rule;
    bool add_prefix_space; /* BYTE_BPE: a space before each stretch that begins with none */
    bool has_metaspace;    /* spaces become word marks after normalisation */
    bool metaspace_split;  /* ... and each begins a word */
    metaspace_prepend metaspace_prepend;

    added_tokens added;            /* sought in the raw text */
    added_tokens added_normalized; /* sought in the normalised text, themselves normalised */

    bool marks_are_spaces; /* decoding: U+2581 is a space */
    bool decodes_bytes;    /* decoding: "<0x41>" is a byte */
    tokenizer_first_space first_space;

    int32_t n_prefix;
    int32_t n_suffix;
    token_id prefix[TOKENIZER_MAX_AFFIX];
    token_id suffix[TOKENIZER_MAX_AFFIX];
};

/* An empty tokenizer; destroy with tokenizer_destroy. */
PGD_MUST_USE pgd_err tokenizer_alloc(tokenizer **out);
/* Room for ids 0 .. n_tokens - 1 whose texts hold about n_bytes; set model, ignore_merges,
 * marks_are_spaces and decodes_bytes before. */
PGD_MUST_USE pgd_err tokenizer_reserve(tokenizer *t, int32_t n_tokens, size_t n_bytes,
                                       pgd_why *why);
/* The next id. attrs: TOKEN_…; indexed: tokenizer_find and merges see it. */
PGD_MUST_USE pgd_err tokenizer_set_token(tokenizer *t, const char *text, size_t n_bytes,
                                         unsigned attrs, bool indexed, pgd_why *why);
/* The merge of two entries by their texts; rank grows from call to call. */
PGD_MUST_USE pgd_err tokenizer_add_merge(tokenizer *t, const char *left, size_t n_left,
                                         const char *right, size_t n_right, uint32_t rank,
                                         pgd_why *why);
/* Makes id findable in text; normalized: in normalised text. */
PGD_MUST_USE pgd_err tokenizer_add_added(tokenizer *t, token_id id, added_flags flags,
                                         bool normalized, pgd_why *why);
PGD_MUST_USE pgd_err tokenizer_finish(tokenizer *t, pgd_why *why);

/* json: a tokenizer.json; config: a tokenizer_config.json, or NULL with 0. */
PGD_MUST_USE pgd_err tokenizer_from_json(tokenizer **out, const char *json, size_t n_json,
                                         const char *config, size_t n_config, pgd_why *why);

/* The piece of id is one byte of byte fallback. */
bool tokenizer_is_byte(const tokenizer *t, token_id id);

#endif
