/* What scheduler.c, scheduler_schedule.c, scheduler_update.c and scheduler_load.c share. Not for other modules.
 *
 * Thread:  core
 */
#ifndef ENGINE_CORE_SCHEDULER_INTERNAL_H
#define ENGINE_CORE_SCHEDULER_INTERNAL_H

#include "common/hash_map.h"
#include "engine/core/request_queue.h"
#include "engine/core/scheduler.h"
#include "engine/kv/kv_manager.h"

/* How many requests ahead of its work a loop asks for their memory. */
#define SCHEDULER_PREFETCH 8

/* One request's share of a step, kept until the step's result has been applied. */
typedef struct step_entry {
    request *r;
    uint64_t request_id;
    uint32_t epoch;
    int32_t n_tokens; /* drafts included */
    int32_t n_drafts;
    int32_t n_computed;       /* before the step */
    int32_t n_prompt_seen;    /* before the step */
    int32_t n_prompt_results; /* prompt tokens whose logprobs the result must have, from token
                                 n_computed + 1 on */
    bool is_sampled;          /* reaches the end of its tokens: the result has at least one token */
} step_entry;

/* A step in flight. Continuing requests come first, then new ones, as in its message. */
typedef struct step_record {
    uint64_t step_id;
    int32_t n_entries;
    int32_t n_sampled;             /* entries that are */
    int32_t n_with_prompt_results; /* entries that have any */
    step_entry *entries;           /* [max_num_seqs] */
} step_record;

/* The step being put together. */
typedef struct step_draft {
    uint64_t step_id;
    step_record *record;
    int32_t budget;
    int32_t n_cached;
    int32_t n_appends;
    int32_t n_new;
    int32_t n_encoder_inputs;
    int32_t encoder_budget;
    int32_t n_preempted;
    bool has_admission; /* some request was admitted or began to load */
    bool is_short;      /* a running request waits for blocks that loads hold */
    const uint64_t *only;
    int32_t n_only;
} step_draft;

struct scheduler {
    scheduler_opts opts;
    kv_manager *kv;
    block_hasher *hasher; /* NULL with prefix caching off */
    hash_map *requests;   /* id -> request, unfinished ones */
    request_queue *waiting;
    request **running; /* [max_num_seqs], order of admission; NULL only inside scheduler_update */
    int32_t n_running;
    list_node set_aside; /* empty between calls */
    bool has_connector;
    kv_connector connector;
    int32_t n_loading; /* loads in flight, those of finished requests included */
    list_node held;    /* finished requests that are still being loaded */

    step_record records[SCHEDULER_MAX_STEPS_IN_FLIGHT]; /* a ring */
    int32_t first_record;
    int32_t n_records;
    uint64_t next_step_id;
    step_draft step;

    new_request_msg *new_msgs;         /* [max_num_seqs] */
    encoder_input_msg *encoder_inputs; /* [max_num_seqs] */
    cached_request_msg *cached_msgs;   /* [max_num_seqs] */
    token_id *draft_tokens;    /* [max_num_seqs * PGD_MAX_DRAFT_TOKENS], not with async: NULL */
    block_append_msg *appends; /* [max_num_seqs + 1], the last one is never sent */
    uint64_t *preempted_ids;   /* [max_num_seqs] */
    uint64_t *finished_ids;    /* [max_num_seqs], to be told with the next step */
    int32_t n_finished_ids;
    uint64_t *sent_finished_ids; /* [max_num_seqs], those of the last message */
    int32_t *result_of_entry;    /* [max_num_seqs], scratch of update */
    int32_t *prompt_of_entry;    /* [max_num_seqs], scratch of update */
    int32_t first_hole;          /* in running, while update makes holes; INT32_MAX = none */
    request **victims;           /* [max_num_seqs], scratch of schedule */
    scheduler_stats stats;
};

/* Tokens that the request can have at most. */
static inline int32_t scheduler__limit(const scheduler *s, const request *r)
{
    return PGD_MIN(r->max_total_tokens, s->opts.max_model_len);
}

static inline step_record *scheduler__record_at(const scheduler *s, int32_t i)
{
    return (step_record *)&s->records[(s->first_record + i) % SCHEDULER_MAX_STEPS_IN_FLIGHT];
}

/* Blocks that an admission must leave free. */
int32_t scheduler__watermark(const scheduler *s);
void scheduler__remove_running(scheduler *s, request *r);
/* Forgets what the device holds of the request; its tokens stay. n_valid_tokens as in
 * kv_manager_free. */
void scheduler__drop_progress(scheduler *s, request *r, int32_t n_valid_tokens);
/* Releases a finished request unless something of it is still under way. */
void scheduler__release_if_done(scheduler *s, request *r);
/* Ends the request: blocks back, callbacks. `was` is its status before it finished, r->status may
 * be set already. Leaves the running list alone. */
void scheduler__finish(scheduler *s, request *r, request_status was, request_status status,
                       request_error error, int32_t n_valid_tokens);

/* scheduler_load.c. What the connector has behind the first n_local tokens. */
kv_match scheduler__match(const scheduler *s, request *r, int32_t n_local_tokens);
void scheduler__tell_allocated(scheduler *s, request *r, int32_t n_local_tokens,
                               int32_t n_external_tokens);
/* The waiting request has blocks and waits for their contents now; puts it among those set aside. */
void scheduler__start_load(scheduler *s, request *r, int32_t n_local_tokens, const kv_match *match);
/* Tells the connector of the end; true when the blocks stay. `was` as in scheduler__finish. */
bool scheduler__hold(scheduler *s, request *r, request_status was);
/* What was computed of r is found no more, neither on the device nor in a tier. */
void scheduler__forget(scheduler *s, const request *r);
void scheduler__take_loaded(scheduler *s);
/* Loads and held requests are no more; the former have blocks still. */
void scheduler__reset_connector(scheduler *s);

#endif
