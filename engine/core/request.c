/* A request owns every buffer it will ever need from the start: its token array is as long as the
 * request can become, and so is its array of block hashes. The step path only fills them.
 *
 * Block hashes are a function of the tokens alone (with the salt), so they survive preemption and a
 * lost worker; they make "preempt = recompute" cheap when the prefix is still cached. */
#include "engine/core/request.h"

#include <string.h>

#include "common/mem.h"

static_assert(offsetof(request, tokens) == 64 && offsetof(request, params) == 128,
              "lines of the cache, see request.h");

static pgd_err check_opts(const request_opts *o)
{
    if (o->n_prompt_tokens < 1 || o->max_tokens < 1 || o->n_prompt_tokens >= o->max_model_len ||
        o->n_encoder_tokens < 0 || (o->n_encoder_tokens > 0 && o->encoder_tokens == NULL))
        return PGD_EINVAL;
    if (o->params.n_stop_ids < 0 || o->params.n_stop_ids > PGD_MAX_STOP_IDS || o->n_eos_ids < 0 ||
        o->n_eos_ids > PGD_MAX_STOP_IDS)
        return PGD_EINVAL;
    if (o->params.n_logit_bias < 0 || o->params.n_logit_bias > PGD_MAX_LOGIT_BIAS)
        return PGD_EINVAL;
    if (o->params.n_prompt_logprobs_per_token < 0 ||
        o->params.n_prompt_logprobs_per_token > PGD_MAX_LOGPROBS + 1)
        return PGD_EINVAL;
    if (o->hasher != NULL && o->block_size < 1)
        return PGD_EINVAL;
    return PGD_OK;
}

static void *copy_array(const void *data, size_t n_elems, size_t elem_bytes)
{
    void *copy = mem_calloc(n_elems, elem_bytes);
    if (copy != NULL && n_elems > 0)
        memcpy(copy, data, n_elems * elem_bytes);
    return copy;
}

static pgd_err copy_params(request *r, const request_opts *o)
{
    r->n_eos_ids = o->n_eos_ids;
    r->n_stop_ids = o->n_eos_ids + o->params.n_stop_ids;
    r->min_total_tokens =
        (int32_t)PGD_MIN((int64_t)o->n_prompt_tokens + o->params.min_tokens, (int64_t)INT32_MAX);
    token_id *ids = r->few_stop_ids;
    if (r->n_stop_ids > REQUEST_FEW_STOP_IDS)
        ids = mem_calloc((size_t)r->n_stop_ids, sizeof *ids);
    r->params = o->params;
    r->params.n_stop_ids = r->n_stop_ids;
    r->params.stop_ids = ids;
    r->params.logit_bias = copy_array(o->params.logit_bias, (size_t)o->params.n_logit_bias,
                                      sizeof *o->params.logit_bias);
    if (ids == NULL || r->params.logit_bias == NULL)
        return PGD_ENOMEM;
    for (int32_t i = 0; i < r->n_stop_ids; i++)
        ids[i] = i < o->n_eos_ids ? o->eos_ids[i] : o->params.stop_ids[i - o->n_eos_ids];
    return PGD_OK;
}

static pgd_err make_salt_extra(void **out, size_t *n_bytes, const char *cache_salt)
{
    *out = NULL;
    *n_bytes = 0;
    if (cache_salt == NULL)
        return PGD_OK;
    *n_bytes = block_hash_write_extra(NULL, 0, NULL, NULL, 0, cache_salt);
    *out = mem_alloc(*n_bytes);
    if (*out == NULL)
        return PGD_ENOMEM;
    block_hash_write_extra(*out, *n_bytes, NULL, NULL, 0, cache_salt);
    return PGD_OK;
}

static pgd_err create_hashing(request *r, const request_opts *o)
{
    if (o->hasher == NULL || o->n_encoder_tokens > 0)
        return PGD_OK;
    r->hash_block_size = o->block_size;
    r->block_hashes =
        mem_calloc((size_t)(r->max_total_tokens / r->hash_block_size), sizeof *r->block_hashes);
    if (r->block_hashes == NULL)
        return PGD_ENOMEM;
    return make_salt_extra(&r->salt_extra, &r->salt_extra_bytes, o->cache_salt);
}

static pgd_err create_prompt_logprobs(request *r)
{
    size_t n_entries;
    if (r->params.n_prompt_logprobs_per_token == 0)
        return PGD_OK;
    if (!mem_mul(&n_entries, (size_t)r->n_prompt_tokens,
                 (size_t)r->params.n_prompt_logprobs_per_token))
        return PGD_ENOMEM;
    r->prompt_logprobs = mem_calloc(n_entries, sizeof *r->prompt_logprobs);
    return r->prompt_logprobs != NULL ? PGD_OK : PGD_ENOMEM;
}

/* Fills hashes[first .. n_blocks). */
static void hash_blocks(block_hash *hashes, int32_t first, int32_t n_blocks, block_hasher *hasher,
                        const token_id *tokens, int32_t block_size, const void *extra,
                        size_t extra_bytes)
{
    for (int32_t i = first; i < n_blocks; i++)
        block_hasher_hash(&hashes[i], hasher, i > 0 ? &hashes[i - 1] : NULL,
                          tokens + (size_t)i * (size_t)block_size, block_size,
                          i == 0 ? extra : NULL, i == 0 ? extra_bytes : 0);
}

/* Hashes the full blocks that have no hash yet. */
static void hash_full_blocks(request *r, block_hasher *hasher)
{
    int32_t n_blocks = r->n_tokens / r->hash_block_size;
    hash_blocks(r->block_hashes, r->n_block_hashes, n_blocks, hasher, r->tokens, r->hash_block_size,
                r->salt_extra, r->salt_extra_bytes);
    r->n_block_hashes = n_blocks;
}

pgd_err request_hash_prompt(block_hash **out, block_hasher *hasher, const token_id *prompt,
                            int32_t n_prompt_tokens, int32_t block_size, const char *cache_salt)
{
    int32_t n_blocks = n_prompt_tokens / block_size;
    void *extra;
    size_t extra_bytes;
    *out = mem_calloc((size_t)n_blocks, sizeof **out);
    if (*out == NULL)
        return PGD_ENOMEM;
    if (make_salt_extra(&extra, &extra_bytes, cache_salt) != PGD_OK) {
        mem_free(*out);
        *out = NULL;
        return PGD_ENOMEM;
    }
    hash_blocks(*out, 0, n_blocks, hasher, prompt, block_size, extra, extra_bytes);
    mem_free(extra);
    return PGD_OK;
}

pgd_err request_create(request **out, const request_opts *opts)
{
    *out = NULL;
    PGD_TRY(check_opts(opts));
    request *r = mem_alloc_aligned(sizeof *r, _Alignof(request));
    if (r == NULL)
        return PGD_ENOMEM;
    r->id = opts->id;
    r->status = REQUEST_WAITING;
    r->n_prompt_tokens = opts->n_prompt_tokens;
    r->n_tokens = opts->n_prompt_tokens;
    r->n_encoder_tokens = opts->n_encoder_tokens;
    r->max_tokens = opts->max_tokens;
    r->max_total_tokens = (int32_t)PGD_MIN((int64_t)opts->n_prompt_tokens + opts->max_tokens,
                                           (int64_t)opts->max_model_len);
    r->priority = opts->priority;
    r->arrival_us = opts->arrival_us;
    r->skip_prefix_lookup =
        opts->skip_prefix_lookup || opts->params.n_prompt_logprobs_per_token > 0;
    r->num_cached_tokens = -1;
    r->stop_token = -1;
    r->running_idx = -1;
    r->heap_idx = -1;
    r->kv_row = -1;
    r->tokens = mem_calloc((size_t)r->max_total_tokens, sizeof *r->tokens);
    pgd_err err = r->tokens == NULL ? PGD_ENOMEM : copy_params(r, opts);
    if (err == PGD_OK)
        err = create_hashing(r, opts);
    if (err == PGD_OK)
        err = create_prompt_logprobs(r);
    if (err == PGD_OK && r->n_encoder_tokens > 0) {
        r->encoder_tokens = copy_array(opts->encoder_tokens, (size_t)r->n_encoder_tokens,
                                       sizeof *r->encoder_tokens);
        err = r->encoder_tokens != NULL ? PGD_OK : PGD_ENOMEM;
    }
    if (err != PGD_OK) {
        request_destroy(r);
        return err;
    }
    memcpy(r->tokens, opts->prompt, (size_t)opts->n_prompt_tokens * sizeof *r->tokens);
    if (r->hash_block_size > 0 && opts->prompt_hashes != NULL) {
        r->n_block_hashes = r->n_prompt_tokens / r->hash_block_size;
        memcpy(r->block_hashes, opts->prompt_hashes,
               (size_t)r->n_block_hashes * sizeof *r->block_hashes);
    } else if (r->hash_block_size > 0) {
        hash_full_blocks(r, opts->hasher);
    }
    *out = r;
    return PGD_OK;
}

void request_destroy(request *r)
{
    if (r == NULL)
        return;
    PGD_ASSERTF(r->n_in_flight == 0, "request %llu destroyed with %d steps in flight",
                (unsigned long long)r->id, r->n_in_flight);
    mem_free(r->tokens);
    if (r->params.stop_ids != r->few_stop_ids)
        mem_free((void *)r->params.stop_ids);
    mem_free((void *)r->params.logit_bias);
    mem_free(r->block_hashes);
    mem_free(r->salt_extra);
    mem_free(r->prompt_logprobs);
    mem_free(r->encoder_tokens);
    mem_free_aligned(r, sizeof *r);
}

token_logprob *request_take_prompt_logprobs(request *r)
{
    token_logprob *taken = r->prompt_logprobs;
    r->prompt_logprobs = NULL;
    if (taken != NULL) {
        r->params.n_prompt_logprobs_per_token = 0;
        r->skip_prefix_lookup = false;
    }
    return taken;
}

void request_append_token(request *r, token_id token, block_hasher *hasher)
{
    PGD_ASSERTF(r->n_tokens < r->max_total_tokens, "request %llu is full with %d tokens",
                (unsigned long long)r->id, r->n_tokens);
    r->tokens[r->n_tokens++] = token;
    if (hasher != NULL && r->hash_block_size > 0 &&
        r->n_tokens - r->n_block_hashes * r->hash_block_size >= r->hash_block_size)
        hash_full_blocks(r, hasher);
}

/* Index of id among the request's stop ids, -1 if it is none. */
static int32_t find_stop_id(const request *r, token_id id)
{
    const token_id *ids =
        r->n_stop_ids <= REQUEST_FEW_STOP_IDS ? r->few_stop_ids : r->params.stop_ids;
    for (int32_t i = 0; i < r->n_stop_ids; i++) {
        if (ids[i] == id)
            return i;
    }
    return -1;
}

bool request_check_stop(request *r, int32_t max_model_len)
{
    token_id last = r->tokens[r->n_tokens - 1];
    int32_t i = r->n_tokens >= r->min_total_tokens ? find_stop_id(r, last) : -1;
    if (i >= 0) {
        r->status = REQUEST_FINISHED_STOPPED;
        if (i >= r->n_eos_ids)
            r->stop_token = last;
        return true;
    }
    if (r->n_tokens >= PGD_MIN(r->max_total_tokens, max_model_len)) {
        r->status = REQUEST_FINISHED_LENGTH_CAPPED;
        return true;
    }
    return false;
}
