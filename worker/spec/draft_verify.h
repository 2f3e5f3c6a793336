/* Which tokens of a draft stand (rule SD5 of the project: a draft is accepted exactly when it is
 * the token that would have been sampled, so speculation never changes the output).
 *
 * The last known token and n_drafts draft tokens are run as one chunk; sampled[i] is what is drawn
 * behind the i-th of them, with the random number of that output position.
 *
 *   drafts   d0 d1 d2     sampled  s0 s1 s2 s3
 *   d0 == s0, d1 != s1:   tokens   s0 s1 -1 -1    two: the accepted draft and its correction
 *
 * Thread:  any
 */
#ifndef WORKER_SPEC_DRAFT_VERIFY_H
#define WORKER_SPEC_DRAFT_VERIFY_H

#include "common/base.h"

/* Shapes:  tokens and sampled [n_drafts + 1], drafts [n_drafts]; tokens may be sampled
 * Returns the number of tokens that the step yields, accepted drafts + 1; the rest of tokens is -1.
 */
int32_t draft_verify(token_id *tokens, const token_id *drafts, const token_id *sampled,
                     int32_t n_drafts);

#endif
