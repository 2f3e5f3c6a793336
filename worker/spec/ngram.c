/* The text is read backwards, so that a suffix becomes a prefix: Knuth-Morris-Pratt over the last
 * max_n tokens tells for each place how long the match that ends there is.
 *
 *   tokens    3 1 2 7 1 2          backwards   2 1 7 2 1 3
 *   suffix        .   1 2          pattern     2 1 ...
 *                                  a match of length 2 ends at 4: tokens[6-1-4] starts it
 */
#include "worker/spec/ngram.h"

static token_id from_end(const token_id *tokens, int32_t n_tokens, int32_t i)
{
    return tokens[n_tokens - 1 - i];
}

int32_t ngram_propose(token_id *out, const token_id *tokens, int32_t n_tokens,
                      const ngram_opts *opts)
{
    int32_t max_n = PGD_MIN(opts->max_n, n_tokens - 1);
    int32_t n_drafts = PGD_MIN(opts->max_drafts, opts->max_model_len - n_tokens);
    PGD_ASSERT(opts->min_n >= 1 && opts->max_n <= NGRAM_MAX_N);
    if (max_n < opts->min_n || n_drafts <= 0)
        return 0;
    int32_t borders[NGRAM_MAX_N]; /* of the pattern's first i + 1 tokens */
    int32_t n_matched = 0, best_n = 0, best_end = 0;
    borders[0] = 0;
    for (int32_t i = 1; i < n_tokens; i++) {
        token_id token = from_end(tokens, n_tokens, i);
        if (n_matched == max_n)
            n_matched = borders[max_n - 1];
        while (n_matched > 0 && token != from_end(tokens, n_tokens, n_matched))
            n_matched = borders[n_matched - 1];
        n_matched += token == from_end(tokens, n_tokens, n_matched);
        if (i < max_n)
            borders[i] = n_matched;
        /* Later here is earlier in the text. */
        if (n_matched >= best_n) {
            best_n = n_matched;
            best_end = i;
        }
    }
    if (best_n < opts->min_n)
        return 0;
    int32_t first = n_tokens - 1 - best_end + best_n;
    n_drafts = PGD_MIN(n_drafts, n_tokens - first);
    for (int32_t i = 0; i < n_drafts; i++)
        out[i] = tokens[first + i];
    return n_drafts;
}
