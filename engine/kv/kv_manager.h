/* KV blocks for requests: prefix lookup, allocation, publication, release (rules AL).
 *
 * A request that holds blocks has a row here (request.kv_row); everything is sized at create.
 * "Promised" blocks: an admitted prefill takes its blocks chunk by chunk, so what it has not taken
 * yet is counted as spoken for when the next request asks for admission; growing requests may still
 * take them. In groups that recycle blocks no more is promised than a request holds at a time.
 * Owns:    pool, coordinator, tables
 * Thread:  core
 */
#ifndef ENGINE_KV_KV_MANAGER_H
#define ENGINE_KV_KV_MANAGER_H

#include "engine/core/request.h"
#include "engine/kv/kv_coordinator.h"
#include "proto/scheduler_output.h"

/* With a block, a stretch of the alignment or slots behind it, a length still fits 31 bits. */
#define KV_MANAGER_MAX_MODEL_LEN (1 << 30)

typedef struct kv_manager kv_manager;

typedef struct kv_manager_opts {
    int32_t n_blocks;            /* null block included */
    const kv_group_spec *groups; /* [n_groups], copied */
    int32_t n_groups;
    bool enable_caching;
    bool use_eagle;          /* as in kv_coordinator_opts */
    kv_events *events;       /* told what is cached; borrow until destroy; NULL = nobody asked */
    kv_residency *residency; /* told what comes of blocks, as events */
    const block_listener *listener; /* likewise */
    int32_t hash_block_size;        /* as in kv_coordinator_opts */
    int32_t max_holders;            /* requests that hold blocks at the same time */
    int32_t max_model_len;          /* at most KV_MANAGER_MAX_MODEL_LEN */
    int32_t max_unfinished_tokens;  /* as in kv_group_opts */
} kv_manager_opts;

/* Errors: PGD_EINVAL, PGD_ENOMEM */
PGD_MUST_USE pgd_err kv_manager_create(kv_manager **out, const kv_manager_opts *opts);
void kv_manager_destroy(kv_manager *m);

/* Cached prefix of the request, at most n_tokens - 1 tokens (HS7), empty for skip_prefix_lookup
 * (HS8). No effect on references or recency. Borrow until the next call. */
const kv_hit *kv_manager_lookup(kv_manager *m, const request *r);
/* Tokens of the longest prefix that group g could reuse by itself, in whole blocks of its own (CO7):
 * for whoever brings the blocks that other groups lack. 0 for a group that is not cached. Ends the
 * borrow of kv_manager_lookup; n_blocks[g] and blocks[g] of *hit are the group's. */
int32_t kv_manager_lookup_group(const kv_hit **hit, kv_manager *m, const request *r, int32_t g);

typedef struct kv_alloc {
    int32_t n_new_tokens; /* drafts included; 0 with n_external_tokens, and only then */
    const kv_hit *hit;    /* of kv_manager_lookup; NULL for a request that has a row */
    /* Behind the hit, to be loaded into blocks that are taken now: no block promised to others is
     * taken (SC8), and nothing is published before kv_manager_publish says so. */
    int32_t n_external_tokens;
    int32_t n_lookahead_tokens;
    int32_t n_in_flight_tokens; /* of num_computed_tokens, those of unfinished steps: still in the
                                   window (AL4) */
    int32_t n_spare_blocks;     /* must stay free after this (watermark) */
    bool is_admission;          /* from now on its prefill has blocks promised */
    bool must_fit_whole;        /* blocks for all of its tokens must be there, those promised to
                                   others not counted (AL3) */
} kv_alloc;

/* Makes room for num_computed + hit + n_new tokens, with the first one for all encoder tokens, and
 * publishes what becomes full (AL1-AL9). new_blocks, if not NULL, gets the appended ids, a borrow until the row changes. Refusal (false):
 * nothing changed, except that skipped blocks of a window are gone. */
PGD_MUST_USE bool kv_manager_allocate(block_ids_msg *new_blocks, kv_manager *m, request *r,
                                      const kv_alloc *a);
/* The full table of a request that has a row; borrow until the row changes. */
void kv_manager_get_table(block_ids_msg *out, const kv_manager *m, const request *r);
/* Publishes full blocks within the first n_tokens tokens (async: tokens that were not known when
 * scheduled). */
void kv_manager_publish(kv_manager *m, const request *r, int32_t n_tokens);
/* Whether allocate for n_new more tokens of a request that has a row would change nothing and need not
 * be called: so it is in most decode steps. */
bool kv_manager_is_quiet(const kv_manager *m, const request *r, int32_t n_new_tokens,
                         int32_t n_lookahead_tokens);
/* Hints for a request whose row is about to change: asks for memory that this touches. Each stage reads
 * what the one before has asked for, so there should be some time between them. */
#define KV_PREFETCH_STAGES 4
void kv_manager_prefetch(const kv_manager *m, const request *r, int32_t stage);
/* Ends the row, if any. Blocks that hold anything beyond the first n_valid tokens are un-published
 * first: what was scheduled but will never be computed must not be found. */
void kv_manager_free(kv_manager *m, request *r, int32_t n_valid_tokens);
/* Un-publishes the full blocks of the request's tokens, whoever holds them or none: their content
 * is not to be trusted. */
void kv_manager_forget(kv_manager *m, const request *r);
/* Ids to zero before the next step, each once; the list starts anew. Borrow until the next
 * allocation. */
int32_t kv_manager_take_blocks_to_zero(const block_id **ids, kv_manager *m);
/* out: [n_groups], leading blocks of their tables that all holders share. O(1). */
void kv_manager_common_prefix(int32_t *out, const kv_manager *m);

/* Blocks that a request of n tokens holds at most at a time. */
int32_t kv_manager_n_blocks_for(const kv_manager *m, int32_t n_tokens, int32_t n_encoder_tokens);
/* Encoder tokens that a request can have at most; 0 without a group for them. */
int32_t kv_manager_max_encoder_tokens(const kv_manager *m);
/* Whether freeing these requests would let r, which has no row and this hit, be admitted. O(blocks
 * they hold) when they hold enough, else O(n_victims). */
bool kv_manager_would_fit(kv_manager *m, const request *r, const kv_hit *hit,
                          request *const *victims, int32_t n_victims, int32_t n_spare_blocks);
int32_t kv_manager_n_promised(const kv_manager *m);
const block_pool *kv_manager_get_pool(const kv_manager *m);
/* Goes on with a snapshot for the events' reader, if one was asked for; once a step. */
void kv_manager_pump_events(kv_manager *m);
/* Forgets every hash, whoever holds the blocks: nothing is found any more. */
void kv_manager_forget_cache(kv_manager *m);
/* The same; false and no change unless every block is free. */
bool kv_manager_reset_cache(kv_manager *m);
/* Integrity, O(n): the pool's, and that each block's references equal the tables that hold it.
 * Aborts on a fault. */
void kv_manager_check(kv_manager *m);

#endif
