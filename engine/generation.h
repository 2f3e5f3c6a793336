/* One sampled continuation as the front end sees it: token ids in, text out.
 *
 * Between the core loop's events and a client: detokenizes, looks for stop strings, keeps what has
 * not been delivered yet. An HTTP choice, a `paged run` prompt and a benchmark sequence are each
 * one generation.
 * Owns:    its text, tokens, detokenizer state and stop matcher
 * Thread:  io
 */
#ifndef ENGINE_GENERATION_H
#define ENGINE_GENERATION_H

#include "common/list.h"
#include "common/strbuf.h"
#include "engine/core/core_loop.h"
#include "engine/text/detokenizer.h"
#include "engine/text/stop_matcher.h"

typedef enum generation_finish {
    GENERATION_RUNNING,
    GENERATION_STOP,   /* eos, a stop token or a stop string */
    GENERATION_LENGTH, /* max_tokens or the context's end */
    GENERATION_ABORT,
    GENERATION_ERROR /* see error_status, error_text */
} generation_finish;

typedef struct generation_token {
    token_id id;
    int32_t n_logprobs;
    token_logprob logprobs[PGD_MAX_LOGPROBS + 1]; /* the sampled token first */
} generation_token;

typedef struct generation generation;

typedef struct generation_opts {
    /* [n_prompt_tokens], copied; of an encoder-decoder model the encoder's input */
    const token_id *prompt;
    int32_t n_prompt_tokens;
    const block_hash
        *prompt_hashes; /* by engine_hash_prompt; NULL: worked out by engine_generate */
    int32_t max_tokens;
    sampling_params params; /* deep-copied; stop_ids = stop_token_ids of the request */
    bool ignore_eos;
    const char *const *stop; /* [n_stop], copied */
    const size_t *stop_bytes;
    int32_t n_stop;
    bool include_stop;
    bool skip_special;
    bool keep_tokens; /* tokens are wanted, not only text */
    int32_t priority;
    const char *cache_salt;
    uint64_t arrival_us;
    /* New text or tokens, or the end (finish != GENERATION_RUNNING, exactly once and last: g is
     * freed afterwards). What is in text and tokens is the part since the last call. */
    void (*on_chunk)(void *arg, generation *g);
    void *arg;
} generation_opts;

struct generation {
    uint64_t id;
    strbuf text;              /* since the last on_chunk */
    generation_token *tokens; /* [n_tokens], since the last on_chunk; only with keep_tokens */
    int32_t n_tokens;
    token_logprob
        *prompt_logprobs;    /* [n_prompt_tokens, n_prompt_logprobs_per_token], there with the
                                       first token if asked for, token 0 unused; may be taken */
    int32_t n_output_tokens; /* in all, the stopping token included */
    int32_t n_prompt_tokens;
    int32_t n_cached_tokens;
    int32_t n_host_tokens; /* of them, those that were loaded from the host tier */
    int32_t n_disk_tokens; /* and those that came up from disk */
    generation_finish finish;
    int32_t stop_string_idx; /* GENERATION_STOP by a stop string, else -1 */
    token_id stop_token;     /* GENERATION_STOP by a stop_token_id, else -1 */
    int error_status;        /* HTTP status of GENERATION_ERROR */
    const char *error_text;
    uint64_t arrival_us;
    uint64_t first_token_us; /* 0 before */
    uint64_t last_token_us;

    /* private to generation.c and engine.c */
    void (*on_chunk)(void *arg, generation *g);
    void *arg;
    detokenizer detok;
    stop_matcher *stops;
    strbuf piece;
    token_id *stop_ids;
    int32_t n_stop_ids;
    int32_t min_tokens;
    int32_t max_kept_tokens;
    bool keep_tokens;
    bool include_stop;
    bool is_cancelled;  /* the consumer is gone, or it ended by a stop string: later events are
                           dropped */
    bool is_delivering; /* inside on_chunk */
    bool is_held;       /* by engine_hold */
    bool is_dirty;      /* linked in the engine's list of generations to flush */
    list_node dirty_node;
};

/* eos_ids: the model's; none with ignore_eos. */
PGD_MUST_USE pgd_err generation_create(generation **out, const generation_opts *opts,
                                       const tokenizer *tok, const token_id *eos_ids,
                                       int32_t n_eos_ids);
void generation_destroy(generation *g);
/* Applies a TOKEN or FINISHED event; takes its prompt_logprobs. True when it ended by a stop string
 * just now: the caller aborts the request. */
bool generation_apply(generation *g, const core_event *event);

#endif
