/* Everything behind the first draft that was not drawn stands on a token that is not there. */
#include "worker/spec/draft_verify.h"

int32_t draft_verify(token_id *tokens, const token_id *drafts, const token_id *sampled,
                     int32_t n_drafts)
{
    int32_t n_accepted = 0;
    while (n_accepted < n_drafts && drafts[n_accepted] == sampled[n_accepted])
        n_accepted++;
    for (int32_t i = 0; i <= n_drafts; i++)
        tokens[i] = i <= n_accepted ? sampled[i] : -1;
    return n_accepted + 1;
}
