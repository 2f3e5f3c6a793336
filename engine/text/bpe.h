/* Byte-pair merging by rank.
 *
 * A word starts as a row of symbols (bytes or characters, each a token id); the pair of neighbours
 * whose merge has the lowest rank, leftmost first, becomes one symbol, until no pair merges. Costs
 * n log n in the symbols of a word, whatever it holds.
 *
 * Owns:    bpe_rules and bpe_work own their arrays
 * Thread:  build from one thread; bpe_merge from any, each with its own bpe_work
 * Source:  Sennrich et al. 2016; order of merges as in Hugging Face tokenizers
 */
#ifndef ENGINE_TEXT_BPE_H
#define ENGINE_TEXT_BPE_H

#include "common/err.h"

typedef struct bpe_rule {
    uint32_t left; /* UINT32_MAX = free slot */
    uint32_t right;
    uint32_t rank;
    uint32_t merged;
} bpe_rule;

/* Zero-initialise; bpe_rules_deinit at any time after. */
typedef struct bpe_rules {
    bpe_rule *slots;  /* [n_slots] */
    uint32_t n_slots; /* power of two */
    int32_t n_rules;
    int32_t cap_rules;
} bpe_rules;

void bpe_rules_deinit(bpe_rules *r);
/* Room for n_rules; call once, first. At most 2^24. */
PGD_MUST_USE pgd_err bpe_rules_reserve(bpe_rules *r, int32_t n_rules);
/* rank grows from call to call; of equal pairs the last one counts. */
void bpe_rules_add(bpe_rules *r, token_id left, token_id right, uint32_t rank, token_id merged);
/* NULL when the pair does not merge. */
const bpe_rule *bpe_rules_find(const bpe_rules *r, token_id left, token_id right);

/* A symbol of the word at hand. Symbols form a list in text order. */
typedef struct bpe_symbol {
    token_id id; /* -1: not in the vocabulary (spm only) */
    int32_t prev;
    int32_t next;
    uint32_t at;      /* first byte in the word */
    uint32_t n_bytes; /* 0 = merged into its left neighbour */
} bpe_symbol;

typedef struct bpe_candidate {
    uint64_t key; /* order: smallest first */
    uint32_t tag; /* what the candidate promises; a stale one is known by it */
} bpe_candidate;

/* Buffers of one call of encode, kept from word to word. Zero-initialise. */
typedef struct bpe_work {
    bpe_symbol *symbols; /* [n_symbols] */
    int32_t n_symbols;
    int32_t cap_symbols;
    bpe_candidate *heap; /* [n_heap] */
    int32_t n_heap;
    int32_t cap_heap;
} bpe_work;

void bpe_work_deinit(bpe_work *w);
/* Forgets the last word and makes room for one of at most n_symbols (<= 2^29). */
PGD_MUST_USE pgd_err bpe_work_begin(bpe_work *w, size_t n_symbols);
void bpe_work_add(bpe_work *w, token_id id, size_t at, size_t n_bytes);
/* Merges in place. Then walk: for (i = 0; i >= 0; i = symbols[i].next), if n_symbols > 0. */
void bpe_merge(bpe_work *w, const bpe_rules *r);

/* The heap, for merging by other keys. bpe_heap_order after any number of appends at the start;
 * push keeps order. */
void bpe_heap_append(bpe_work *w, uint64_t key, uint32_t tag);
void bpe_heap_order(bpe_work *w);
void bpe_heap_push(bpe_work *w, uint64_t key, uint32_t tag);
bool bpe_heap_pop(bpe_work *w, bpe_candidate *out);
/* Joins the right neighbour of symbol i into it, under a new id. */
void bpe_work_join(bpe_work *w, int32_t i, token_id id);

#endif
