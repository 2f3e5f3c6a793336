/* The token-budget scheduler: which request computes how many tokens in the next step (rules SC,
 * AL, AS, UP).
 *
 * Owns every request given to it, the waiting and running queues and the KV manager. One free
 * point: a finished request is handed to the release callback when nothing of it is in flight. All
 * arrays are sized at create; scheduler_schedule and scheduler_update never allocate.
 * Thread:  core
 */
#ifndef ENGINE_CORE_SCHEDULER_H
#define ENGINE_CORE_SCHEDULER_H

#include "engine/core/kv_connector.h"
#include "engine/core/request.h"
#include "engine/kv/kv_group_manager.h"
#include "proto/scheduler_output.h"
#include "proto/step_result.h"

typedef struct scheduler scheduler;

/* Steps that may be scheduled and not yet updated at a time. */
#define SCHEDULER_MAX_STEPS_IN_FLIGHT 4

typedef enum scheduler_policy { SCHEDULER_FCFS, SCHEDULER_PRIORITY } scheduler_policy;

typedef struct scheduler_opts {
    int32_t max_num_seqs;
    int32_t max_num_batched_tokens;
    int32_t long_prefill_token_threshold; /* 0 = off */
    int32_t max_encoder_tokens;           /* of a step, in all its requests; 0 = no limit */
    int32_t max_model_len;
    int32_t max_queued_requests; /* waiting + running requests that are held at most */
    scheduler_policy policy;
    bool enable_chunked_prefill;
    bool enable_prefix_caching;
    bool async;                  /* two steps in flight: placeholders, AS */
    int32_t max_steps_in_flight; /* steps scheduled and not yet updated at a time; 0 =
                                    SCHEDULER_MAX_STEPS_IN_FLIGHT */
    /* Drafts per request and step that the worker makes, 0 = no speculation. Async: the worker keeps
     * them and the scheduler counts on that many (AS2). Otherwise those that results bring are sent
     * back to it. */
    int32_t num_speculative_tokens;
    int32_t num_lookahead_tokens; /* slots beyond each step that the worker's draft model writes */
    double watermark;             /* fraction of blocks */
    bool admit_partly;  /* blocks for its first step are enough to admit a request, not for all its
                          tokens (AL3) */
    int32_t n_blocks;   /* null block included */
    int32_t block_size; /* tokens per block hash; divides every group's block size */
    bool use_eagle;     /* as in kv_coordinator_opts */
    int32_t n_groups;
    const kv_group_spec *groups;   /* [n_groups], copied; NULL: one group of full attention, whose
                                    blocks have block_size tokens */
    const uint8_t *hash_seed;      /* [32] */
    kv_events *kv_events;          /* told what the prefix cache holds; borrow until destroy; NULL =
                                      nobody asked */
    kv_residency *kv_residency;    /* told what comes of KV blocks, likewise */
    const kv_connector *connector; /* copied; NULL = none */

    /* All three are required. Called from scheduler_update, scheduler_finish_request,
     * scheduler_reset_worker and scheduler_destroy, and on_release from scheduler_schedule too when
     * there is a connector, on the core thread; they must not allocate nor call back into the
     * scheduler. */
    void (*on_token)(void *arg, request *r, token_id token, const token_logprob *logprobs,
                     int32_t n_logprobs);
    /* Exactly once per request that was added; the request may still be in flight. error: what the
     * worker reported. */
    void (*on_finished)(void *arg, request *r, request_error error);
    /* Takes the request: nothing of it is in flight any more. */
    void (*on_release)(void *arg, request *r);
    void *arg;
} scheduler_opts;

typedef enum scheduler_add {
    SCHEDULER_ADDED,
    SCHEDULER_QUEUE_FULL, /* refusal; the caller keeps the request */
    SCHEDULER_NEVER_FITS  /* refusal: it needs more blocks than the pool or its tables have; the
                             caller keeps the request */
} scheduler_add;

typedef struct scheduler_stats {
    int32_t n_running;
    int32_t n_waiting; /* those being loaded included */
    int32_t n_loading;
    int32_t n_blocks_total;  /* null block not counted */
    int32_t n_blocks_free;   /* reusable: never used or cached but unreferenced */
    int32_t n_blocks_cached; /* of the free ones, those with a hash */
    uint64_t n_prefix_queries_tokens;
    uint64_t n_prefix_hit_tokens;
    uint64_t n_external_queries_tokens; /* behind the local hit, asked of the connector */
    uint64_t n_external_hit_tokens;     /* loaded by the connector */
    uint64_t n_disk_hit_tokens;         /* of them, those that came up from disk */
    uint64_t n_preemptions;
    uint64_t n_prompt_tokens;            /* admitted, counted once per request at first admission;
                                            here and in the next two with encoder tokens */
    uint64_t n_prompt_computed_tokens;   /* scheduled for the first time */
    uint64_t n_prompt_recomputed_tokens; /* again, after a preemption or a lost worker */
    uint64_t n_generated_tokens;
    int32_t num_speculative_tokens; /* as in the options */
    uint64_t n_drafts;              /* times that a request had draft tokens to verify */
    uint64_t n_draft_tokens;
    uint64_t n_accepted_tokens;                        /* of them */
    uint64_t n_accepted_per_pos[PGD_MAX_DRAFT_TOKENS]; /* the same by place in the draft */
} scheduler_stats;

PGD_MUST_USE pgd_err scheduler_create(scheduler **out, const scheduler_opts *opts);
/* Releases every request through on_release without on_finished. */
void scheduler_destroy(scheduler *s);

/* Takes the request when it answers SCHEDULER_ADDED. */
scheduler_add scheduler_add_request(scheduler *s, request *r);
/* Whether a request of n tokens, prompt and output together, can run alone: its blocks against the
 * whole pool (the last token is never computed), and without chunked prefill its tokens against one
 * step. */
bool scheduler_can_ever_fit(const scheduler *s, int32_t n_total_tokens);
/* Finishes it from outside (rule UP9): on_finished is called now; late results are dropped. False
 * if unknown or already finished. status: REQUEST_FINISHED_ABORTED, _ERROR, or _STOPPED for a stop
 * string that was found outside. */
bool scheduler_finish_request(scheduler *s, uint64_t request_id, request_status status);
request *scheduler_find(const scheduler *s, uint64_t request_id);

/* Transfers have ended on this rank of the worker; PGD_EPROTO and no change if they are not under
 * way there. */
PGD_MUST_USE pgd_err scheduler_transfers_done(scheduler *s, int32_t rank,
                                              const kv_transfer_done *done, int32_t n_done);

/* Anything to do: a request waiting or running, or finished while it is loaded, transfers to be sent,
 * or finished ids still to be told to the worker. */
bool scheduler_has_work(const scheduler *s);

/* Fills *out for the next step; pointers are valid until the next call of any function that changes
 * the scheduler. False when there is nothing to send (no tokens and no ids to deliver). At most
 * max_steps_in_flight steps may be without result. num_computed_tokens advances now
 * (SC9). `only`: when not NULL, requests other than those listed wait, running ones are preempted
 * (bisection of a poison request); n_only ids. */
bool scheduler_schedule(scheduler *s, scheduler_output *out, const uint64_t *only, int32_t n_only);

/* Applies the result of the oldest step in flight. PGD_EPROTO and no change when it is of another
 * step or does not fit it: a request that is not in the step, or twice, or of another epoch; tokens
 * for a row that is still inside its prompt; none for one that is not and has no error; more tokens
 * than drafts + 1; prompt logprobs other than those of the rows that the step computed; logprobs
 * outside the list. Tokens were checked against vocab_size by the caller. */
PGD_MUST_USE pgd_err scheduler_update(scheduler *s, const step_result *result);

/* The worker is gone: every step in flight is forgotten, running requests go back to waiting in
 * order with their tokens kept, the KV pool and its hashes are reset. Nothing is lost. */
void scheduler_reset_worker(scheduler *s);
/* Steps that have been scheduled and not yet updated. */
int32_t scheduler_n_steps_in_flight(const scheduler *s);

/* Goes on with a snapshot of the cache events, if one was asked for; also done with each step. */
void scheduler_pump_events(scheduler *s);
/* False and no change unless every block is free. */
bool scheduler_reset_prefix_cache(scheduler *s);
void scheduler_get_stats(const scheduler *s, scheduler_stats *out);
/* Integrity of queues and blocks, O(n); aborts with the values on a fault. */
void scheduler_check(const scheduler *s);

#endif
