/* Draft tokens from the text itself: what followed the last tokens when they stood there before
 * (rule SD2).
 *
 * Thread:  any
 */
#ifndef WORKER_SPEC_NGRAM_H
#define WORKER_SPEC_NGRAM_H

#include "common/err.h"

#define NGRAM_MAX_N 32

typedef struct ngram_opts {
    int32_t min_n; /* 1 <= min_n <= max_n <= NGRAM_MAX_N */
    int32_t max_n;
    int32_t max_drafts;
    int32_t max_model_len; /* drafts never reach beyond it */
} ngram_opts;

/* Finds the longest suffix of the tokens, of min_n to max_n of them, that occurs earlier (it may
 * overlap the suffix), the earliest such place, and copies up to max_drafts tokens that follow it.
 * Returns their number. out: [max_drafts]. O(n_tokens), no allocation. */
int32_t ngram_propose(token_id *out, const token_id *tokens, int32_t n_tokens,
                      const ngram_opts *opts);

#endif
