/* SentencePiece-BPE: merging by the score of the merged piece.
 *
 * The word starts as its characters; of all pairs of neighbours whose joined text is a piece, the
 * one of the best score, leftmost first, is joined, until none is left. Afterwards symbols without
 * an id are the caller's to spell in bytes. Costs n log n in the characters of the word.
 *
 * Thread:  any, each with its own bpe_work
 * Source:  Kudo & Richardson 2018; order as in the sentencepiece library
 */
#ifndef ENGINE_TEXT_SPM_H
#define ENGINE_TEXT_SPM_H

#include "engine/text/bpe.h"
#include "engine/text/vocab.h"

typedef struct spm_pieces {
    const vocab *texts;
    const float *scores;    /* [n_tokens], finite */
    const uint8_t *allowed; /* [n_tokens], & allowed_mask: the piece may come out of text */
    uint8_t allowed_mask;
} spm_pieces;

/* Leaves the symbols of text in w; walk as after bpe_merge. */
PGD_MUST_USE pgd_err spm_merge(bpe_work *w, const spm_pieces *p, const char *text, size_t n_bytes);

#endif
