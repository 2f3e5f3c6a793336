/* One generation request inside the engine, from admission to its last late result.
 *
 * Created on the io or pool thread with every buffer it will ever need (nothing on the step path
 * allocates), then given to the core thread. num_computed_tokens is written by the scheduler alone.
 * States and counters: rules ST1-ST7 of the engine-core reference. "Finished" = status greater than
 * REQUEST_PREEMPTED.
 * Owns:    its arrays; freed by request_destroy once n_in_flight == 0
 * Thread:  create: any; afterwards core only
 */
#ifndef ENGINE_CORE_REQUEST_H
#define ENGINE_CORE_REQUEST_H

#include "common/list.h"
#include "engine/kv/block_hash.h"
#include "proto/sampling_params.h"
#include "proto/step_result.h"

typedef enum request_status {
    REQUEST_WAITING,
    REQUEST_WAITING_FOR_GRAMMAR,
    REQUEST_WAITING_FOR_REMOTE_KVS,
    REQUEST_WAITING_FOR_STREAMING_INPUT,
    REQUEST_RUNNING,
    REQUEST_PREEMPTED,
    REQUEST_FINISHED_STOPPED,
    REQUEST_FINISHED_LENGTH_CAPPED,
    REQUEST_FINISHED_ABORTED,
    REQUEST_FINISHED_IGNORED,
    REQUEST_FINISHED_ERROR,
    REQUEST_FINISHED_REPETITION
} request_status;

typedef struct request_opts {
    uint64_t id;
    const token_id *prompt;  /* [n_prompt_tokens], copied */
    int32_t n_prompt_tokens; /* >= 1 */
    /* Tokens of the encoder's input, 0 = none. Such a request is not hashed: what its own tokens
     * are worth depends on that input. */
    int32_t n_encoder_tokens;
    const token_id *encoder_tokens; /* [n_encoder_tokens], copied */
    /* By request_hash_prompt with the same block_size and salt, copied; NULL: worked out here. */
    const block_hash *prompt_hashes;
    int32_t max_tokens; /* >= 1 output tokens */
    int32_t max_model_len;
    sampling_params params;  /* deep-copied; stop_ids = the request's stop_token_ids only */
    const token_id *eos_ids; /* the model's, copied; none with ignore_eos */
    int32_t n_eos_ids;
    int32_t priority; /* smaller first */
    uint64_t arrival_us;
    const char *cache_salt;  /* NULL or copied */
    int32_t block_size;      /* hash block size */
    bool skip_prefix_lookup; /* HS8; set for requests that want prompt logprobs */
    block_hasher *hasher;    /* borrow for the call; NULL = prefix caching off */
} request_opts;

#define REQUEST_FEW_STOP_IDS 4

/* What a KV connector remembers of a request from one question to the next; all zero at first. Nobody
 * else reads it. */
typedef struct request_tier {
    uint64_t stamp;         /* as long as this holds, so does the answer */
    int32_t n_local_tokens; /* what it was asked */
    int32_t n_block_hashes;
    int32_t answer;        /* 0 = to be worked out, else 1 + kv_match_kind */
    int32_t n_tokens;      /* of the answer */
    int32_t n_disk_tokens; /* likewise */
    int32_t group_id;      /* the block that it waits for; -1 = its promotion */
    int32_t block_idx;
    int32_t n_waits;
    uint64_t since_us; /* that it waits for blocks; 0 = it does not */
    int32_t promotion; /* 1 + the one that is made for it, 0 = none */
    bool was_promoted; /* since it was admitted last */
    bool was_touched;  /* since it has been waiting */
} request_tier;

/* The first line of the cache is what scheduling a decode step touches, the second what appending its
 * token touches besides. */
typedef struct request {
    _Alignas(64) uint64_t id;
    request_status status;
    int32_t n_prompt_tokens;
    int32_t n_tokens;
    int32_t max_total_tokens; /* min(n_prompt_tokens + max_tokens, max_model_len) */
    int32_t num_computed_tokens;
    int32_t n_output_placeholders;
    int32_t n_draft_tokens;     /* to verify in the next step */
    int32_t n_in_flight;        /* dispatched steps whose result has not been seen */
    int32_t n_in_flight_tokens; /* of num_computed_tokens, those of steps in flight */
    uint32_t epoch;             /* bumped at each admission to RUNNING */
    int32_t n_prompt_seen;      /* prompt tokens that were cached or computed at least once */
    int32_t entry_idx;          /* position in the step that it was scheduled in last */
    int32_t running_idx;        /* position in the running list; -1 */
    int32_t kv_row;             /* row of its block tables, kv_manager's; -1 = holds no blocks */

    token_id *tokens;         /* [max_total_tokens]: prompt, then accepted output */
    block_hash *block_hashes; /* [n_block_hashes], one per full hash block */
    /* [n_prompt_tokens, params.n_prompt_logprobs_per_token], token 0 unused, filled as results come;
     * NULL when none are wanted, or taken. What a preemption or a lost worker has computed again is
     * written again, with the same values. */
    token_logprob *prompt_logprobs;
    int32_t n_block_hashes;
    int32_t hash_block_size;  /* 0 = no hashing */
    int32_t min_total_tokens; /* no stop id ends it before it has these */
    int32_t n_held_drafts;    /* async: how many the worker made with the last result */
    int32_t n_eos_ids;        /* of params.stop_ids, the first ones */
    int32_t n_stop_ids;       /* all of params.stop_ids */
    token_id few_stop_ids[REQUEST_FEW_STOP_IDS]; /* those, if they are no more */

    sampling_params
        params; /* stop_ids: eos and stop_token_ids together, as the worker masks them */
    int32_t n_encoder_tokens; /* 0 = none */
    token_id *encoder_tokens; /* [n_encoder_tokens] */
    int32_t max_tokens;
    int32_t priority;
    uint64_t arrival_us;
    uint64_t scheduled_us; /* last admission before the first token; 0 before */
    bool skip_prefix_lookup;
    bool skip_external_lookup; /* a load of it failed */
    bool is_held;              /* finished, but its blocks are still being loaded */
    int32_t num_cached_tokens; /* prefix hit at first admission, loaded or not; -1 before */
    int32_t num_host_tokens;   /* of num_cached_tokens, those loaded from the host tier */
    int32_t num_disk_tokens;   /* and those that came up from disk */
    int32_t n_external_tokens; /* of the tokens computed at admission, those that were loaded */
    int32_t n_disk_tokens;     /* and of those, the ones that came up from disk */
    int32_t num_preemptions;
    token_id stop_token;     /* which stop_token_id ended it; -1 */
    uint64_t preempted_step; /* id of the step that preempted it last; 0 */
    request_tier tier;       /* the connector's */
    void *salt_extra;        /* canonical extra keys of block 0 */
    size_t salt_extra_bytes;
    list_node queue_node; /* waiting queue, or the scheduler's list of set aside or held ones */
    int32_t heap_idx;     /* priority queue; -1 */
    int32_t n_strikes;    /* poison rule, core_loop's */
    int32_t progress_at_strike;
    token_id draft_tokens[PGD_MAX_DRAFT_TOKENS]; /* async: not known, the worker keeps them */
} request;

/* Hashes the full blocks of a prompt, once for any number of requests. *out:
 * [n_prompt_tokens / block_size], mem_free. Thread: any, with a hasher of its own */
PGD_MUST_USE pgd_err request_hash_prompt(block_hash **out, block_hasher *hasher,
                                         const token_id *prompt, int32_t n_prompt_tokens,
                                         int32_t block_size, const char *cache_salt);
/* Errors: PGD_EINVAL (a limit above; or no room for an output token: n_prompt_tokens >=
 * max_model_len), PGD_ENOMEM */
PGD_MUST_USE pgd_err request_create(request **out, const request_opts *opts);
void request_destroy(request *r);

static inline bool request_is_finished(const request *r)
{
    return r->status > REQUEST_PREEMPTED;
}

static inline int32_t request_n_output_tokens(const request *r)
{
    return r->n_tokens - r->n_prompt_tokens;
}

/* Hands the prompt's log probabilities to the caller, who frees them with mem_free; NULL if there
 * are none. From now on the request is one that does not want any. */
token_logprob *request_take_prompt_logprobs(request *r);
/* Appends one accepted token and hashes the block it completes (hasher may be NULL). */
void request_append_token(request *r, token_id token, block_hasher *hasher);
/* Rule ST7 after an append: sets status and stop_token; true when the request is finished. The
 * length limits hold even below min_tokens. */
bool request_check_stop(request *r, int32_t max_model_len);

#endif
