/* The heap and the list of bpe.c with another key: (score descending, place).
 *
 * A pair is looked up by its joined text rather than by two ids: neighbours lie side by side in the
 * text, so the joined text is already there, and symbols that are no pieces themselves may still
 * join. A candidate is stale if the two symbols at its place are no longer as long as when it was
 * made.
 *
 * Rejected: turning scores into merge rules at load: costs start-up time for every split of every
 * piece.
 */
#include "engine/text/spm.h"

#include <string.h>

#include "engine/text/unicode_class.h"

/* Order-preserving map of a finite float to unsigned, reversed: the best score is the smallest key.
 */
static uint32_t score_key(float score)
{
    uint32_t bits;
    score += 0.0f; /* -0 becomes +0 */
    memcpy(&bits, &score, sizeof(bits));
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return ~bits;
}

static token_id piece_of(const spm_pieces *p, const char *text, size_t n_bytes)
{
    token_id id = vocab_find(p->texts, text, n_bytes);
    return id >= 0 && (p->allowed[id] & p->allowed_mask) ? id : -1;
}

/* The candidate of symbol i and its right neighbour. */
static bool candidate_at(const bpe_work *w, const spm_pieces *p, const char *text, int32_t i,
                         uint64_t *key, uint32_t *n_bytes)
{
    const bpe_symbol *left = &w->symbols[i];
    if (left->next < 0)
        return false;
    *n_bytes = left->n_bytes + w->symbols[left->next].n_bytes;
    token_id id = piece_of(p, text + left->at, *n_bytes);
    if (id < 0)
        return false;
    *key = (uint64_t)score_key(p->scores[id]) << 32 | (uint32_t)i;
    return true;
}

pgd_err spm_merge(bpe_work *w, const spm_pieces *p, const char *text, size_t n_bytes)
{
    PGD_TRY(bpe_work_begin(w, n_bytes));
    for (size_t at = 0; at < n_bytes;) {
        size_t used;
        (void)unicode_decode(text + at, n_bytes - at, &used);
        bpe_work_add(w, piece_of(p, text + at, used), at, used);
        at += used;
    }
    uint64_t key;
    uint32_t size;
    for (int32_t i = 0; i < w->n_symbols; i++)
        if (candidate_at(w, p, text, i, &key, &size))
            bpe_heap_append(w, key, size);
    bpe_heap_order(w);
    bpe_candidate best;
    while (bpe_heap_pop(w, &best)) {
        int32_t i = (int32_t)(uint32_t)best.key;
        const bpe_symbol *left = &w->symbols[i];
        if (left->n_bytes == 0 || left->next < 0 ||
            left->n_bytes + w->symbols[left->next].n_bytes != best.tag)
            continue;
        bpe_work_join(w, i, piece_of(p, text + left->at, best.tag));
        if (left->prev >= 0 && candidate_at(w, p, text, left->prev, &key, &size))
            bpe_heap_push(w, key, size);
        if (candidate_at(w, p, text, i, &key, &size))
            bpe_heap_push(w, key, size);
    }
    return PGD_OK;
}
