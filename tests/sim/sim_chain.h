/* What a model without weights computes: keys, values and the next token as functions of the history.
 *
 * A position's contents are a hash of everything before it, the salt included, as the block hashes
 * claim to name it; so whoever reads a slot can tell whose history it holds. The next token is a
 * function of the history too, so a request's whole output is known beforehand.
 * Thread:  any
 */
#ifndef TESTS_SIM_SIM_CHAIN_H
#define TESTS_SIM_SIM_CHAIN_H

#include "common/hash.h"
#include "proto/step_result.h"
#include "tests/sim/sim_trace.h"

#define SIM_VOCAB 40
#define SIM_EOS   1

/* Contents that are not a number. */
#define SIM_NOT_FINITE UINT64_MAX

/* History of the empty prompt. */
static inline uint64_t sim_chain_start(int32_t salt)
{
    return hash_u64((uint64_t)salt + 0x51ab);
}

static inline uint64_t sim_chain_next(uint64_t chain, token_id token)
{
    return hash_u64(chain * 31 + (uint64_t)token + 1);
}

static inline token_id sim_chain_sample(uint64_t chain)
{
    return (token_id)(hash_u64(chain ^ 0x7777) % SIM_VOCAB);
}

/* Of the token that follows this history, entry k. */
static inline token_logprob sim_chain_score(uint64_t chain, token_id token, int32_t k)
{
    return (token_logprob){k == 0 ? token : k, -(float)(hash_u64(chain + (uint64_t)k) % 1000)};
}

/* What group g keeps of a position whose history, itself included, is chain. */
static inline uint64_t sim_chain_content(uint64_t chain, int32_t g)
{
    return chain + (uint64_t)(g + 1) * 0x9e3779b97f4a7c15ull;
}

/* History that stands for position pos of the encoder's input. */
static inline uint64_t sim_chain_encoder(int32_t salt, int32_t pos)
{
    return hash_u64(sim_chain_start(salt) + (uint64_t)pos + 0xe0c);
}

/* Token pos of the encoder's input. */
static inline token_id sim_encoder_token(int32_t salt, int32_t pos)
{
    return sim_chain_sample(sim_chain_encoder(salt, pos));
}

/* Token i of the request's prompt. */
static inline token_id sim_prompt_token(const sim_request *q, int32_t i)
{
    uint64_t source = i < q->n_common ? (uint64_t)q->document : 0x10000ull + (uint64_t)q->id;
    return (token_id)(hash_u64(source * 1000 + (uint64_t)i) % SIM_VOCAB);
}

/* Leading tokens that a query at position pos or later does not read. */
static inline int32_t sim_first_read(const sim_group *group, int32_t pos)
{
    if (group->kind == ATTENTION_SLIDING)
        return PGD_MAX(pos - group->window + 1, 0);
    if (group->kind == ATTENTION_CHUNKED)
        return pos / group->window * group->window;
    return 0;
}

/* Encoder tokens that a request may have; 0 = the model has no encoder. */
static inline int32_t sim_max_encoder(const sim_config *c)
{
    for (int32_t g = 0; g < c->n_groups; g++) {
        if (c->groups[g].kind == ATTENTION_CROSS)
            return c->groups[g].window;
    }
    return 0;
}

#endif
