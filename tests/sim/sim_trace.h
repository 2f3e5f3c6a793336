/* A workload as data: the configuration of a scheduler and its simulated worker, and a list of
 * operations. Running a trace is deterministic, so a failing one can be kept, shrunk and replayed.
 *
 * Text form, one line each, in this order; missing members are 0:
 *
 *   config name=... block_size=4 n_blocks=20 ...
 *   group kind=1 block_size=4 window=9 ...           1 to SIM_MAX_GROUPS lines
 *   add id=0 n_prompt=12 ...                         a request arrives
 *   step | step only 0 3                             schedule, if the pipeline has room
 *   answer | answer 5                                the worker runs the oldest step; 5: results
 *                                                    come in an order drawn from it
 *   abort 0 | kill | kill 1 | clear                  kill: the worker dies, 1: the next one has no
 *                                                    use for the tiers; clear: the prefix cache
 *
 * After the last operation all requests are run to their end, unless the configuration is_cut.
 */
#ifndef TESTS_SIM_SIM_TRACE_H
#define TESTS_SIM_SIM_TRACE_H

#include <stdio.h>

#include "common/model/attention_kind.h"

#define SIM_MAX_SEQS     16
#define SIM_MAX_LEN      160
#define SIM_MAX_GROUPS   4
#define SIM_MAX_REQUESTS 256 /* of one trace */
#define SIM_MAX_OPS      2048
#define SIM_MAX_ONLY     6
#define SIM_MAX_BATCH    128
#define SIM_MAX_SCORES   3 /* prompt logprobs per token */
#define SIM_MAX_ENCODER  48

typedef struct sim_group {
    int32_t kind;       /* attention_kind */
    int32_t block_size; /* tokens, a multiple of the configuration's */
    int32_t window;     /* cross: encoder tokens at most */
    int32_t zero_new_blocks;
    int32_t is_eagle;
} sim_group;

typedef struct sim_config {
    char name[64];
    int32_t block_size; /* tokens per block hash */
    int32_t n_blocks;
    int32_t max_num_seqs;
    int32_t max_num_batched_tokens;
    int32_t long_prefill_token_threshold;
    int32_t max_model_len;
    int32_t max_queued_requests;
    int32_t max_encoder_tokens; /* of a step, 0 = any number */
    int32_t policy;             /* scheduler_policy */
    int32_t enable_chunked_prefill;
    int32_t enable_prefix_caching;
    int32_t is_async;
    int32_t depth; /* steps in flight at most */
    int32_t num_lookahead_tokens;
    int32_t watermark_percent;
    int32_t admit_partly;
    int32_t use_eagle;
    int32_t max_drafts;    /* that the worker proposes for a request, 0 = none */
    int32_t n_right_in_4;  /* drafts are right this often */
    int32_t n_tier_blocks; /* of the offload tier (sim_offload.h), 0 = none */
    int32_t n_disk_blocks; /* of the tier behind it, 0 = none */
    int32_t n_ranks;
    int32_t tier_uses_arc;
    int32_t tier_threshold;   /* requests that ask for a block before it is stored */
    int32_t tier_step_blocks; /* in the transfers of a step, 0 = any number */
    int32_t tier_seed;        /* of the moments of transfers */
    int32_t tier_delay;       /* moments that one takes at most; most take few */
    int32_t tier_faults;      /* percent of the transfers that fail, in part */
    int32_t is_cut;           /* ends after the last operation, whatever is under way */
    int32_t check_every;      /* steps between integrity checks of the whole scheduler */
    int32_t n_groups;
    sim_group groups[SIM_MAX_GROUPS];
} sim_config;

/* A request as its client sees it. Its prompt begins with n_common tokens of a document that others
 * use too. */
typedef struct sim_request {
    int32_t id; /* also its time of arrival */
    int32_t n_prompt;
    int32_t n_common;
    int32_t document;
    int32_t max_tokens;
    int32_t priority;
    int32_t salt; /* 0 = none; it also decides the encoder's input */
    int32_t ignore_eos;
    int32_t n_scores; /* prompt logprobs per token, 0 = none wanted */
    int32_t skip_lookup;
    int32_t error_at;  /* the worker fails it when this many positions are computed; 0 = never */
    int32_t n_encoder; /* encoder tokens */
} sim_request;

typedef enum sim_op_kind {
    SIM_OP_ADD,
    SIM_OP_STEP,
    SIM_OP_ANSWER,
    SIM_OP_ABORT,
    SIM_OP_KILL,
    SIM_OP_CLEAR,
    SIM_OP_LAST = SIM_OP_CLEAR
} sim_op_kind;

typedef struct sim_op {
    int32_t kind;
    int32_t arg;    /* abort: id; answer: order, 0 = as sent; kill: 1 = the tiers are emptied */
    int32_t n_only; /* step: -1 = everyone may run */
    int32_t only[SIM_MAX_ONLY];
    sim_request request;
} sim_op;

typedef struct sim_trace {
    sim_config config;
    int32_t n_ops;
    sim_op ops[SIM_MAX_OPS];
} sim_trace;

/* The next operation, zeroed; NULL when the trace is full. */
sim_op *sim_trace_add(sim_trace *t, sim_op_kind kind);
void sim_trace_write(const sim_trace *t, FILE *file);
/* False, with the reason on stderr, when the text is not a trace. */
bool sim_trace_read(sim_trace *t, FILE *file);
/* Whether the numbers are within what the simulation has room for. */
bool sim_trace_is_valid(const sim_trace *t);

#endif
