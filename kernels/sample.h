/* From logits to a token, one row per token to sample; the same algorithm on every back end.
 *
 *   1. A NaN or infinity among the raw logits: SAMPLE_ERROR_NOT_FINITE, no token.
 *   2. z = logits; z[id] += bias for each entry of bias in order; z[id] = -inf for masked_ids.
 *   3. Penalties, with c = times that id occurs in tokens[n_prompt_tokens ..):
 *      if id occurs in tokens at all and repetition_penalty r != 1, z = z > 0 ? z / r : z * r;
 *      then, if c > 0, z -= frequency_penalty * c + presence_penalty.
 *   4. temperature < SAMPLE_MIN_TEMPERATURE: the token is arg max z, ties to the lower id.
 *   5. y = (z - max z) / temperature. Candidates are ordered by descending z, ties to the lower id.
 *      top_k k > 0 keeps the first k.
 *      top_p < 1 keeps the shortest prefix whose mass sum exp(y) reaches top_p times the mass of
 *      all that top_k left, at least one.
 *      min_p > 0 keeps those with exp(y) >= min_p.
 *   6. The token is the candidate with the greatest y + g, ties to the lower id:
 *        g = -ln(-ln(1 - u)),  u = (x + 0.5) 2^-32,
 *        x = word (id & 3) of Philox4x32-10 with key {seed low, seed high} and
 *            counter {id >> 2, position, choice_idx, 0},  position = n_tokens - n_prompt_tokens.
 *      (u near 0 makes the large g, so f32 keeps its precision.)
 *      With has_token the row's token is given and steps 2 to 6 are left out.
 *   7. Logprobs: log softmax of the raw logits; the token first, then the n_logprobs best in
 *      descending order, ties to the lower id.
 *
 * All sums are taken in an order that depends on the row alone; one thread works on one row.
 *
 * Shapes:  rows [n_rows]; each row's logits [vocab_size]
 * Types:   f32; the ref computes in double from step 5 on
 * Limits:  ids in bias, masked_ids and tokens are in [0, vocab_size) (the caller has checked);
 *          parameter ranges as in proto/sampling_params.h; n_logprobs <= SAMPLE_MAX_LOGPROBS and
 *          <= vocab_size
 * Owns:    nothing
 * Thread:  the worker's main thread
 * Errors:  PGD_EINVAL (vocab_size < 1, workspace too small); errors of one row are in its result
 * Source:  Gumbel 1954 (arg max of perturbed logits); Salmon et al. 2011 (Philox)
 */
#ifndef KERNELS_SAMPLE_H
#define KERNELS_SAMPLE_H

#include "kernels/kernel_ctx.h"

PGD_BEGIN_C

#define SAMPLE_MIN_TEMPERATURE 1e-5f
#define SAMPLE_MAX_LOGPROBS    PGD_MAX_LOGPROBS

typedef struct sample_bias {
    token_id id;
    float bias;
} sample_bias;

typedef struct sample_logprob {
    token_id id;
    float logprob;
} sample_logprob;

typedef enum sample_error {
    SAMPLE_OK = 0,
    SAMPLE_ERROR_NOT_FINITE, /* NaN or infinity among the raw logits */
    SAMPLE_ERROR_ALL_MASKED  /* no token is left to choose from */
} sample_error;

typedef struct sample_row {
    const float *logits;      /* [vocab_size]; not changed */
    float temperature;        /* 0 = greedy */
    float top_p;              /* (0, 1]; 1 = off */
    float min_p;              /* [0, 1]; 0 = off */
    int32_t top_k;            /* 0 = off */
    float repetition_penalty; /* > 0; 1 = off */
    float presence_penalty;   /* 0 = off */
    float frequency_penalty;  /* 0 = off */
    uint64_t seed;
    int32_t choice_idx;
    int32_t n_logprobs; /* -1 none, 0 the sampled token only, k also the k best */
    int32_t n_masked_ids;
    const token_id *masked_ids;
    int32_t n_bias;
    const sample_bias *bias;
    const token_id *tokens; /* [n_tokens] prompt and output so far */
    int32_t n_prompt_tokens;
    int32_t n_tokens;

    bool has_token; /* token is given: a prompt's, only its logprobs are wanted */

    /* Results, written by the op. */
    token_id token; /* -1 with an error; with has_token the caller's, in [0, vocab_size) */
    sample_error error;
    sample_logprob *logprobs; /* [n_logprobs + 1] when n_logprobs >= 0 */
} sample_row;

typedef struct sample_args {
    sample_row *rows;
    int32_t n_rows;
    int32_t vocab_size;
} sample_args;

/* Philox4x32-10: out = the block of this key and counter. */
static inline void sample_philox(uint32_t out[4], const uint32_t key[2], const uint32_t counter[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

pgd_err sample_ref(const sample_args *args, kernel_ctx *ctx);
/* The tokens of the reference, but where the f32 exponentials that they add for top_p put the border
 * between two candidates elsewhere. */
pgd_err sample_avx2(const sample_args *args, kernel_ctx *ctx);
pgd_err sample_avx512(const sample_args *args, kernel_ctx *ctx);
/* Of all CPU versions. */
size_t sample_ref_workspace_bytes(int32_t vocab_size, int32_t n_threads);

PGD_END_C
#endif
