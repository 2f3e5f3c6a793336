/* What the engine tells every worker of a replica to do in one step.
 *
 * A plain view: the engine's scheduler fills one that lives in its own arrays; the worker gets one
 * whose pointers lead into the decoded frame. A preempted row is released; a resumed request is
 * sent as new with all its tokens and tables. Order on the worker: release finished and preempted
 * rows, add new, update cached, transfers, zero blocks, forward.
 * Limits:  n_new + n_cached <= max_num_seqs; total_scheduled_tokens <= max_num_batched_tokens
 * Owns:    nothing; all pointers are borrows, until the next schedule (engine) or the next frame
 *          (worker)
 */
#ifndef PROTO_SCHEDULER_OUTPUT_H
#define PROTO_SCHEDULER_OUTPUT_H

#include "common/base.h"
#include "proto/sampling_params.h"

/* Block ids of one request per KV-cache group. */
typedef struct block_ids_msg {
    int32_t n_blocks[PGD_MAX_KV_GROUPS];
    const block_id *ids[PGD_MAX_KV_GROUPS];
} block_ids_msg;

/* An encoder input that this step computes for a request: of an encoder-decoder model all tokens of
 * each new one, in the order of new_requests. */
typedef struct encoder_input_msg {
    uint64_t request_id;
    int32_t input_idx;
    int32_t n_tokens;
} encoder_input_msg;

typedef struct new_request_msg {
    uint64_t request_id;
    uint32_t request_epoch;
    int32_t n_prompt_tokens;   /* of the original prompt: output position = token index -
                                  n_prompt_tokens */
    int32_t n_tokens;          /* prompt and, after a preemption, outputs so far */
    const token_id *tokens;    /* [n_tokens] */
    int32_t n_computed_tokens; /* prefix hit: KV of these is already in the blocks */
    int32_t n_scheduled_tokens;
    sampling_params params;
    int32_t n_encoder_tokens;       /* 0 without an encoder */
    const token_id *encoder_tokens; /* [n_encoder_tokens] */
    block_ids_msg blocks;           /* full tables, entries may be the null block (0) */
} new_request_msg;

typedef struct cached_request_msg {
    uint64_t request_id;
    /* Before this step, as far as the engine knows: drafts whose verification it has not seen count
     * as accepted. The worker goes on where its row stands, which is behind by as many tokens as
     * were rejected in steps still in flight when this one was made. */
    int32_t n_computed_tokens;
    int32_t n_scheduled_tokens; /* drafts included */
    /* Of n_scheduled_tokens, the last ones. Drafts that a step does not ask for are dropped. */
    int32_t n_draft_tokens;
    int32_t first_draft_token; /* of the step's draft_tokens; 0 when it has none */
} cached_request_msg;

/* Blocks that this step appends to the tables of a continuing request; apart from those, since most
 * decode steps append none. */
typedef struct block_append_msg {
    uint64_t request_id;
    block_ids_msg blocks;
} block_append_msg;

/* Of one step: transfers, and blocks of all of them together. What does not fit goes with a later
 * step, or is not stored. */
#define KV_TRANSFER_MAX_JOBS   1024
#define KV_TRANSFER_MAX_BLOCKS (1 << 16)
/* Loads, and stores, that a worker has been told of and has not reported as done. */
#define KV_TRANSFER_MAX_PENDING 1024

/* Blocks that move between the KV pool of a device and an offload tier (proto/kv_region.h). At the
 * start of a step, when all compute of earlier steps is ordered before, the worker takes up the
 * stores, then waits for those that a flush names, then takes up the loads; whatever the order in the
 * message. Both go on while steps compute; transfers_done tells of their end, and only then may the
 * blocks be used: the target of a load by a request, the source of a store by anything that writes
 * it. A flush makes the latter safe from this step on. */
typedef enum kv_transfer_kind {
    KV_TRANSFER_LOAD = 1,
    KV_TRANSFER_STORE = 2,
    KV_TRANSFER_FLUSH =
        3 /* no blocks; job_id: of a store, sent with this step or before. One that is
                             not known has ended */
} kv_transfer_kind;

typedef struct kv_transfer_msg {
    uint64_t job_id; /* not that of a transfer which has not been reported as done */
    kv_transfer_kind kind;
    int32_t n_blocks;
    /* [n_blocks], of one group each, all different. Those of a load are in the order in which their
     * content ends in the request, so that a number of leading ones means something. */
    const block_id *device_blocks;
    const int32_t *medium_blocks; /* [n_blocks] */
    const uint64_t *tags; /* [n_blocks], what the medium block holds: written, or expected there */
} kv_transfer_msg;

typedef struct scheduler_output {
    uint64_t step_id;
    int32_t total_scheduled_tokens;
    int32_t n_groups;

    int32_t n_new;
    const new_request_msg *new_requests;
    int32_t n_cached;
    const cached_request_msg *cached_requests;
    /* Those of all continuing requests in their order, or none: the worker's own, of which it may have
     * fewer; those that are missing count as rejected. */
    int32_t n_draft_tokens;
    const token_id *draft_tokens;
    int32_t n_appends;
    const block_append_msg *appends; /* in the order of cached_requests, one for each at most */
    int32_t n_finished;
    const uint64_t *finished_ids;
    int32_t n_preempted;
    const uint64_t *preempted_ids;

    int32_t n_blocks_to_zero;
    const block_id *blocks_to_zero;
    int32_t n_common_prefix_blocks[PGD_MAX_KV_GROUPS];

    int32_t n_transfers;
    const kv_transfer_msg *transfers;
    int32_t n_encoder_inputs;
    const encoder_input_msg *encoder_inputs;
    size_t grammar_bitmask_bytes; /* 0 = none; rows in order of new_requests then cached_requests */
    const void *grammar_bitmask;
} scheduler_output;

/* The append of this continuing request, if it is the one at *idx, which then moves on; else NULL. For
 * loops over cached_requests. */
static inline const block_ids_msg *scheduler_output_next_append(const scheduler_output *out,
                                                                int32_t *idx, uint64_t request_id)
{
    if (*idx == out->n_appends || out->appends[*idx].request_id != request_id)
        return NULL;
    return &out->appends[(*idx)++].blocks;
}

/* The drafts of a continuing request, [n_draft_tokens]; NULL = the worker's own. */
static inline const token_id *scheduler_output_drafts(const scheduler_output *out,
                                                      const cached_request_msg *msg)
{
    return out->n_draft_tokens > 0 ? out->draft_tokens + msg->first_draft_token : NULL;
}

extern const wire_record scheduler_output_record;

/* Scratch that scheduler_output_decode can need at most. */
size_t scheduler_output_scratch_bytes(const wire_limits *limits);
/* Upper bound of an encoded step, for RECVMAXSZ. */
size_t scheduler_output_max_frame_bytes(const wire_limits *limits);
/* Checks every range against limits and the totals against each other. Never allocates.
 * Errors:  PGD_EUNSUPPORTED (version), PGD_EPROTO, PGD_EINVAL (frame not aligned)
 * Thread:  any */
PGD_MUST_USE pgd_err scheduler_output_decode(scheduler_output *out, wire_scratch *scratch,
                                             const void *frame, size_t n_bytes,
                                             const wire_limits *limits, pgd_why *why);

#endif
