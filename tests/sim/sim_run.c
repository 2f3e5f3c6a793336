/* The engine's side of a simulation. Steps go through the wire format, so the worker sees what a
 * real one would see and nothing else; a result comes when the trace says so. */
#include "tests/sim/sim_run.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <unistd.h>

#include "common/mem.h"
#include "tests/sim/sim_events.h"
#include "tests/sim/sim_oracle.h"
#include "tests/sim/sim_state.h"

/* Turns without a token or an end, when all prompts could be computed many times over. */
#define MAX_IDLE_TURNS 2000

static sim_state sim;

void sim_fail(const sim_state *s, const char *file, int line, const char *fmt, ...)
{
    va_list args;
    fprintf(stderr, "violation at %s:%d, operation %d of %d: ", file, line, s->op_idx,
            s->trace->n_ops);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fprintf(stderr, "\n");
    fflush(stderr);
    _exit(SIM_EXIT_VIOLATION);
}

static bool has_tier(const sim_state *s)
{
    return s->config->n_tier_blocks > 0;
}

/* Block hashes that have come since, with what they name. */
static void learn_hashes(sim_state *s, const request *r)
{
    sim_life *life = &s->lives[r->id];
    uint64_t chain[SIM_MAX_LEN + 1];
    int32_t bs = s->config->block_size;
    if (!has_tier(s) || life->n_known == r->n_block_hashes)
        return;
    chain[0] = sim_chain_start(life->request->salt);
    for (int32_t i = 0; i < r->n_block_hashes * bs; i++)
        chain[i + 1] = sim_chain_next(chain[i], r->tokens[i]);
    for (; life->n_known < r->n_block_hashes; life->n_known++) {
        int32_t end = (life->n_known + 1) * bs;
        for (int32_t g = 0; g < s->config->n_groups; g++) {
            offload_key key = {.hash = r->block_hashes[life->n_known], .group_id = g};
            if (end % s->config->groups[g].block_size == 0)
                sim_medium_know(&s->medium, offload_key_tag(&key), g, chain, end);
        }
    }
}

/* --- what clients see ----------------------------------------------------------------------------- */

/* With the first token every entry of the prompt is there, whatever happened in between. */
static void check_scores(sim_state *s, request *r, const sim_life *life)
{
    const sim_request *q = life->request;
    token_logprob *scores = request_take_prompt_logprobs(r);
    bool is_first = life->n_tokens == q->n_prompt;
    SIM_CHECK(s, (scores != NULL) == (is_first && q->n_scores > 0),
              "request %d: prompt logprobs %d at token %d of prompt %d", q->id, scores != NULL,
              life->n_tokens, q->n_prompt);
    if (scores == NULL)
        return;
    uint64_t chain = sim_chain_start(q->salt);
    for (int32_t pos = 1; pos < q->n_prompt; pos++) {
        chain = sim_chain_next(chain, sim_prompt_token(q, pos - 1));
        for (int32_t k = 0; k < q->n_scores; k++) {
            token_logprob want = sim_chain_score(chain, sim_prompt_token(q, pos), k);
            const token_logprob *got = &scores[pos * q->n_scores + k];
            SIM_CHECK(s, got->id == want.id && got->logprob == want.logprob,
                      "request %d: entry %d of prompt token %d", q->id, k, pos);
        }
    }
    s->total->n_scored++;
    s->total->n_scored_again += r->epoch > 1;
    mem_free(scores);
}

static void on_token(void *arg, request *r, token_id token, const token_logprob *logprobs,
                     int32_t n_logprobs)
{
    sim_state *s = arg;
    (void)logprobs, (void)n_logprobs;
    sim_life *life = &s->lives[r->id];
    SIM_CHECK(s, life->n_finished == 0 && life->n_tokens < life->limit,
              "request %d gets token %d of %d", (int)r->id, life->n_tokens + 1, life->limit);
    check_scores(s, r, life);
    token_id want = sim_chain_sample(life->chain);
    SIM_CHECK(s, token == want, "request %d: token %d at %d, expected %d", (int)r->id, token,
              life->n_tokens, want);
    life->chain = sim_chain_next(life->chain, token);
    life->n_tokens++;
    life->last = token;
    learn_hashes(s, r);
    s->total->n_tokens++;
    s->total->n_late_appended += r->status == REQUEST_PREEMPTED;
    SIM_CHECK(s, r->n_tokens == life->n_tokens, "request %d has %d tokens, expected %d", (int)r->id,
              r->n_tokens, life->n_tokens);
}

static void on_finished(void *arg, request *r, request_error error)
{
    sim_state *s = arg;
    sim_life *life = &s->lives[r->id];
    const sim_request *q = life->request;
    life->n_finished++;
    SIM_CHECK(s, life->n_finished == 1, "request %d finished twice", q->id);
    bool is_stop = life->n_tokens > q->n_prompt && life->last == SIM_EOS && q->ignore_eos == 0;
    request_status want = is_stop ? REQUEST_FINISHED_STOPPED : REQUEST_FINISHED_LENGTH_CAPPED;
    if (r->status == REQUEST_FINISHED_ABORTED) {
        SIM_CHECK(s, life->is_aborted, "request %d was not aborted", q->id);
    } else if (r->status == REQUEST_FINISHED_ERROR) {
        /* Whoever read what a failing request had written before that was known fails too. */
        SIM_CHECK(s,
                  error == REQUEST_ERROR_NAN_LOGITS &&
                      (q->error_at > 0 || s->n_new_errors > 1 || life->hit_in < s->error_step_id),
                  "request %d fails after it was admitted in step %llu; the last error was known "
                  "before step %llu",
                  q->id, (unsigned long long)life->hit_in, (unsigned long long)s->error_step_id);
        s->total->n_errors++;
    } else {
        SIM_CHECK(s, r->status == want && (is_stop || life->n_tokens == life->limit),
                  "request %d: status %d with %d of %d tokens", q->id, r->status, life->n_tokens,
                  life->limit);
    }
    learn_hashes(s, r);
    sim_oracle_remember(s, r);
}

static void on_release(void *arg, request *r)
{
    sim_state *s = arg;
    sim_life *life = &s->lives[r->id];
    life->n_released++;
    SIM_CHECK(s,
              life->n_released == 1 &&
                  (s->is_ending || (life->n_finished == 1 && r->n_in_flight == 0 && r->kv_row < 0)),
              "request %d: released %d times, finished %d, %d in flight, row %d", (int)r->id,
              life->n_released, life->n_finished, r->n_in_flight, r->kv_row);
    request_destroy(r);
}

/* --- operations ------------------------------------------------------------------------------------ */

static void add_request(sim_state *s, const sim_request *q)
{
    static token_id prompt[SIM_MAX_LEN];
    static token_id encoder[SIM_MAX_ENCODER];
    const sim_config *c = s->config;
    sim_life *life = &s->lives[q->id];
    life->request = q;
    life->limit = PGD_MIN(q->n_prompt + q->max_tokens, c->max_model_len);
    life->n_tokens = q->n_prompt;
    life->chain = sim_chain_start(q->salt);
    for (int32_t i = 0; i < q->n_prompt; i++) {
        prompt[i] = sim_prompt_token(q, i);
        life->chain = sim_chain_next(life->chain, prompt[i]);
    }
    for (int32_t i = 0; i < q->n_encoder; i++)
        encoder[i] = sim_encoder_token(q->salt, i);
    const token_id eos = SIM_EOS;
    char salt[2] = {(char)('0' + q->salt), '\0'};
    request_opts opts = {.id = (uint64_t)q->id,
                         .prompt = prompt,
                         .n_prompt_tokens = q->n_prompt,
                         .n_encoder_tokens = q->n_encoder,
                         .encoder_tokens = encoder,
                         .max_tokens = q->max_tokens,
                         .max_model_len = c->max_model_len,
                         .eos_ids = &eos,
                         .n_eos_ids = q->ignore_eos == 0,
                         .priority = q->priority,
                         .arrival_us = (uint64_t)q->id,
                         .cache_salt = q->salt != 0 ? salt : NULL,
                         .block_size = c->block_size,
                         .skip_prefix_lookup = q->skip_lookup != 0,
                         .hasher = c->enable_prefix_caching ? s->hasher : NULL};
    opts.params.top_p = 1;
    opts.params.repetition_penalty = 1;
    opts.params.n_prompt_logprobs_per_token = q->n_scores;
    request *r;
    SIM_CHECK(s, request_create(&r, &opts) == PGD_OK, "request %d cannot be created", q->id);
    scheduler_add answer = scheduler_add_request(s->sched, r);
    if (answer == SCHEDULER_ADDED) {
        learn_hashes(s, r);
        s->requests[q->id] = q;
        s->total->n_requests++;
        return;
    }
    scheduler_stats stats;
    scheduler_get_stats(s->sched, &stats);
    if (answer == SCHEDULER_QUEUE_FULL)
        SIM_CHECK(s, stats.n_running + stats.n_waiting == c->max_queued_requests,
                  "refused with %d of %d requests", stats.n_running + stats.n_waiting,
                  c->max_queued_requests);
    else
        SIM_CHECK(s, !sim_oracle_fits(c, life->limit, q->n_encoder),
                  "request %d of %d tokens refused", q->id, life->limit);
    s->total->n_refused++;
    request_destroy(r);
    life->n_finished = life->n_released = 1;
}

static void abort_request(sim_state *s, uint64_t id)
{
    sim_life *life = &s->lives[id];
    bool is_live = life->request != NULL && life->n_finished == 0;
    life->is_aborted = true;
    bool was_found = scheduler_finish_request(s->sched, id, REQUEST_FINISHED_ABORTED);
    SIM_CHECK(s, was_found == is_live && (!is_live || life->n_finished == 1),
              "abort of request %d: found %d, live %d, finished %d", (int)id, was_found, is_live,
              life->n_finished);
    s->total->n_aborts += was_found;
}

static void keep_frame(sim_state *s, const scheduler_output *out)
{
    sim_frame *frame = &s->frames[(s->first_frame + s->n_frames++) % SCHEDULER_MAX_STEPS_IN_FLIGHT];
    frame->n_bytes = wire_frame_bytes(&scheduler_output_record, out);
    if (frame->n_bytes > frame->cap_bytes) {
        free(frame->data);
        frame->cap_bytes = 2 * frame->n_bytes;
        frame->data = malloc(frame->cap_bytes);
        SIM_CHECK(s, frame->data != NULL, "out of memory");
    }
    frame->seen_step_id = s->seen_step_id;
    wire_encode(frame->data, frame->n_bytes, WIRE_STEP, 1, &scheduler_output_record, out);
}

static void check_new(sim_state *s, uint64_t step_id, const new_request_msg *msg, const sim_op *op)
{
    sim_life *life = &s->lives[msg->request_id];
    uint64_t *load_step = &s->watch.load_step[msg->request_id];
    life->admitted_in = step_id;
    life->hit_in = *load_step != 0 ? *load_step : step_id;
    *load_step = 0;
    bool is_listed = op == NULL || op->n_only < 0;
    for (int32_t k = 0; !is_listed && k < op->n_only; k++)
        is_listed = (uint64_t)op->only[k] == msg->request_id;
    SIM_CHECK(s, is_listed, "request %d runs but is not listed", (int)msg->request_id);
    SIM_CHECK(s, life->n_finished == 0 && msg->n_tokens == life->n_tokens,
              "request %d is sent with %d tokens, it has %d", (int)msg->request_id, msg->n_tokens,
              life->n_tokens);
}

static void check_faults(sim_state *s)
{
    SIM_CHECK(s, s->medium.fault[0] == '\0', "%s", s->medium.fault);
    for (int32_t rank = 0; rank < s->config->n_ranks; rank++) {
        const sim_worker *w = &s->workers[rank];
        SIM_CHECK(s, w->fault[0] == '\0', "rank %d: %s", rank, w->fault);
        SIM_CHECK(s, w->streams.fault[0] == '\0', "rank %d: %s", rank, w->streams.fault);
    }
}

/* Something is under way besides steps that will be told. */
static bool is_transferring(const sim_state *s)
{
    bool is_any = has_tier(s) && sim_offload_is_busy(&s->offload);
    for (int32_t rank = 0; rank < s->config->n_ranks; rank++)
        is_any = is_any || sim_streams_is_busy(&s->workers[rank].streams);
    return is_any;
}

/* A moment passes: transfers go on, and the scheduler hears of those that have ended. */
static void tick(sim_state *s)
{
    for (int32_t rank = 0; has_tier(s) && rank < s->config->n_ranks; rank++) {
        sim_streams *streams = &s->workers[rank].streams;
        sim_done done;
        sim_streams_tick(streams);
        while (sim_streams_next_told(streams, &done)) {
            kv_transfer_done told = {.job_id = done.job_id,
                                     .n_good = done.n_good,
                                     .us = 1 + (uint32_t)(hash_u64(done.job_id) % 1000),
                                     .n_bytes = (uint64_t)done.n_good};
            SIM_CHECK(s, scheduler_transfers_done(s->sched, rank, &told, 1) == PGD_OK,
                      "job %d of rank %d is not known", (int)done.job_id, rank);
        }
    }
    if (has_tier(s))
        sim_offload_tick(&s->offload);
    check_faults(s);
}

static void claim_medium(sim_state *s, const scheduler_output *out)
{
    for (int32_t i = 0; i < s->sched->n_running; i++)
        learn_hashes(s, s->sched->running[i]);
    for (int32_t i = 0; i < out->n_transfers; i++) {
        const kv_transfer_msg *msg = &out->transfers[i];
        for (int32_t k = 0; k < msg->n_blocks; k++)
            sim_medium_claim(&s->medium,
                             msg->kind == KV_TRANSFER_LOAD ? SIM_USER_LOAD : SIM_USER_STORE,
                             msg->medium_blocks[k], msg->tags[k]);
    }
    SIM_CHECK(s, s->medium.n_double_loads == 0 || s->watch.has_lost_patience,
              "a block is loaded for two at a time");
    check_faults(s);
}

static bool schedule(sim_state *s, const sim_op *op)
{
    scheduler_output out;
    sim_snapshot before;
    bool is_narrow = op != NULL && op->n_only >= 0;
    uint64_t only[SIM_MAX_ONLY];
    for (int32_t k = 0; is_narrow && k < op->n_only; k++)
        only[k] = (uint64_t)op->only[k];
    s->watch.n_put_off = 0;
    sim_oracle_take_snapshot(&before, s);
    bool is_step =
        scheduler_schedule(s->sched, &out, is_narrow ? only : NULL, is_narrow ? op->n_only : 0);
    s->total->n_narrowed += is_narrow;
    SIM_CHECK(s,
              is_step || s->n_frames > 0 || is_narrow || s->watch.n_put_off > 0 ||
                  is_transferring(s) || !scheduler_has_work(s->sched),
              "stuck: nothing in flight, nothing to send, work left");
    if (!is_narrow)
        sim_oracle_check_head(s, &out);
    if (!is_step)
        return false;
    sim_oracle_check_order(s, &before, &out, is_narrow);
    for (int32_t i = 0; i < out.n_new; i++)
        check_new(s, out.step_id, &out.new_requests[i], op);
    sim_oracle_check_windows(s, &out);
    s->total->n_common += out.n_common_prefix_blocks[0] > 0 && out.n_cached + out.n_new > 1;
    claim_medium(s, &out);
    keep_frame(s, &out);
    /* Now and then a worker looks at a message well before it comes to the step. */
    for (int32_t rank = 0; rank < s->config->n_ranks; rank++) {
        if (hash_u64(out.step_id * 2 + (uint64_t)rank) % 2 == 0)
            sim_worker_receive(&s->workers[rank], &out);
    }
    s->total->n_steps++;
    return true;
}

/* Results of a step come in any order. */
static void shuffle(step_result *result, request_result_msg *results, prompt_result_msg *prompts,
                    uint64_t order)
{
    for (int32_t i = result->n_results - 1; i > 0; i--) {
        order = hash_u64(order);
        int32_t k = (int32_t)(order % (uint64_t)(i + 1));
        request_result_msg swap = results[i];
        results[i] = results[k];
        results[k] = swap;
    }
    for (int32_t i = result->n_prompt_results - 1; i > 0; i--) {
        order = hash_u64(order);
        int32_t k = (int32_t)(order % (uint64_t)(i + 1));
        prompt_result_msg swap = prompts[i];
        prompts[i] = prompts[k];
        prompts[k] = swap;
    }
}

static void check_limits(const sim_state *s, const scheduler_output *out)
{
    for (int32_t i = 0; i < out->n_cached; i++) {
        const cached_request_msg *msg = &out->cached_requests[i];
        SIM_CHECK(
            s, msg->n_computed_tokens + msg->n_scheduled_tokens < s->lives[msg->request_id].limit,
            "request %d computes its last token", (int)msg->request_id);
    }
}

static void answer(sim_state *s, uint64_t order)
{
    static request_result_msg results[SIM_MAX_SEQS];
    const sim_frame *frame = &s->frames[s->first_frame];
    scheduler_output out;
    step_result result;
    pgd_why why;
    pgd_err err =
        scheduler_output_decode(&out, &s->scratch, frame->data, frame->n_bytes, &s->limits, &why);
    SIM_CHECK(s, err == PGD_OK, "the message is refused: %s", why.text);
    for (int32_t rank = s->config->n_ranks - 1; rank >= 0; rank--)
        sim_worker_run(&result, results, &s->workers[rank], &out, frame->seen_step_id);
    /* While the result is on its way. */
    for (uint64_t n = hash_u64(out.step_id + 77) % 24; n > 12; n--)
        tick(s);
    check_faults(s);
    check_limits(s, &out);
    /* In most traces every load is worth its while. */
    result.forward_us =
        s->config->tier_seed % 4 != 0 ? 1000000 : (uint32_t)(hash_u64(out.step_id) % 2000);
    if (order != 0)
        shuffle(&result, results, s->workers[0].prompts, order);
    s->n_new_errors = 0;
    for (int32_t i = 0; i < result.n_results; i++) {
        s->n_new_errors += results[i].error != REQUEST_ERROR_NONE;
        const request *r = scheduler_find(s->sched, results[i].request_id);
        s->total->n_late_dropped += r != NULL && r->epoch != results[i].request_epoch;
        s->total->n_drafts_accepted += (uint64_t)PGD_MAX(results[i].n_tokens - 1, 0);
    }
    for (int32_t i = 0; i < s->workers[0].n_shares; i++)
        s->total->n_drafts += (uint64_t)s->workers[0].shares[i].n_drafts;
    s->first_frame = (s->first_frame + 1) % SCHEDULER_MAX_STEPS_IN_FLIGHT;
    s->n_frames--;
    SIM_CHECK(s, scheduler_update(s->sched, &result) == PGD_OK,
              "the result of step %llu is refused", (unsigned long long)result.step_id);
    s->seen_step_id = result.step_id;
    if (s->n_new_errors > 0)
        s->error_step_id = s->sched->next_step_id;
}

static void kill_worker(sim_state *s, bool is_emptied)
{
    s->n_frames = 0;
    scheduler_reset_worker(s->sched);
    for (int32_t rank = 0; rank < s->config->n_ranks; rank++)
        sim_worker_reset(&s->workers[rank], s->sched->next_step_id);
    if (has_tier(s))
        sim_medium_lose_worker(&s->medium);
    if (has_tier(s) && is_emptied)
        sim_offload_clear(&s->offload);
    scheduler_stats stats;
    scheduler_get_stats(s->sched, &stats);
    SIM_CHECK(s,
              stats.n_blocks_free == s->config->n_blocks - 1 && stats.n_blocks_cached == 0 &&
                  stats.n_running == 0,
              "after a reset: %d free, %d cached, %d running", stats.n_blocks_free,
              stats.n_blocks_cached, stats.n_running);
    s->total->n_resets++;
}

static void check_all(sim_state *s)
{
    scheduler_check(s->sched);
    sim_oracle_check_lookup(s);
    sim_oracle_check_eviction(s);
    sim_oracle_check_published(s);
    sim_events_check(s);
    if (has_tier(s))
        offload_connector_check(s->offload.connector);
}

static void run_op(sim_state *s, const sim_op *op)
{
    tick(s);
    switch ((sim_op_kind)op->kind) {
    case SIM_OP_ADD:
        add_request(s, &op->request);
        break;
    case SIM_OP_STEP:
        if (s->n_frames < s->config->depth)
            schedule(s, op);
        break;
    case SIM_OP_ANSWER:
        if (s->n_frames > 0)
            answer(s, (uint64_t)op->arg);
        break;
    case SIM_OP_ABORT:
        abort_request(s, (uint64_t)op->arg);
        break;
    case SIM_OP_KILL:
        kill_worker(s, op->arg != 0);
        break;
    case SIM_OP_CLEAR:
        scheduler_reset_prefix_cache(s->sched);
        break;
    }
}

/* Everything that was accepted comes to its end, and nobody waits for ever. */
static void drain(sim_state *s)
{
    uint64_t n_before = 0;
    int32_t last_turn = 0;
    for (int32_t turn = 0; scheduler_has_work(s->sched) || s->n_frames > 0; turn++) {
        if (s->total->n_tokens + s->total->n_errors != n_before)
            last_turn = turn;
        n_before = s->total->n_tokens + s->total->n_errors;
        SIM_CHECK(s, turn - last_turn < MAX_IDLE_TURNS, "does not come to an end");
        tick(s);
        bool is_step = s->n_frames < s->config->depth && schedule(s, NULL);
        if (s->n_frames > 0 && (!is_step || s->n_frames == s->config->depth))
            answer(s, 0);
        if (turn % s->config->check_every == 0)
            check_all(s);
    }
}

static void check_released(sim_state *s)
{
    for (int32_t id = 0; id < SIM_MAX_REQUESTS; id++) {
        const sim_life *life = &s->lives[id];
        bool is_finished = life->n_finished == 1 || s->config->is_cut != 0;
        SIM_CHECK(s, life->request == NULL || (is_finished && life->n_released == 1),
                  "request %d: finished %d, released %d", id, life->n_finished, life->n_released);
    }
    s->total->n_runs++;
}

static void check_end(sim_state *s)
{
    scheduler_stats stats;
    scheduler_get_stats(s->sched, &stats);
    SIM_CHECK(s, stats.n_blocks_free == s->config->n_blocks - 1,
              "%d of %d blocks are free at the end", stats.n_blocks_free, s->config->n_blocks - 1);
    SIM_CHECK(s, stats.n_running == 0 && stats.n_waiting == 0, "%d running, %d waiting at the end",
              stats.n_running, stats.n_waiting);
    /* Each prompt token is cached or computed for the first time at most once. */
    SIM_CHECK(
        s, stats.n_prompt_computed_tokens + stats.n_prefix_hit_tokens <= stats.n_prompt_tokens,
        "%llu computed and %llu cached of %llu prompt tokens",
        (unsigned long long)stats.n_prompt_computed_tokens,
        (unsigned long long)stats.n_prefix_hit_tokens, (unsigned long long)stats.n_prompt_tokens);
    for (int i = 0; i < SIM_MAX_SEQS; i++)
        SIM_CHECK(s, !s->workers[0].rows[i].is_used, "the worker still has a row of request %d",
                  (int)s->workers[0].rows[i].id);
    s->total->n_preemptions += stats.n_preemptions;
    s->total->n_hit_positions += s->workers[0].n_hit_positions;
    s->total->n_loads += s->watch.n_loads;
    s->total->n_failed_loads += s->watch.n_failed_loads;
    s->total->n_resumed += s->watch.n_resumed;
    s->total->n_delays += s->watch.n_delays;
    s->total->n_promoted += sim_offload_n_promoted(&s->offload);
    for (int32_t rank = 0; rank < s->config->n_ranks; rank++) {
        s->total->n_stores += s->workers[rank].streams.n_stored;
        s->total->n_flushes += s->workers[rank].streams.n_flushed;
    }
}

/* --- set-up ------------------------------------------------------------------------------------------ */

static void create_scheduler(sim_state *s)
{
    static const uint8_t seed[32] = {42};
    const sim_config *c = s->config;
    kv_group_spec groups[SIM_MAX_GROUPS];
    for (int32_t g = 0; g < c->n_groups; g++)
        groups[g] = (kv_group_spec){.ops = kv_group_ops_of((attention_kind)c->groups[g].kind),
                                    .block_size = c->groups[g].block_size,
                                    .window = c->groups[g].window,
                                    .zero_new_blocks = c->groups[g].zero_new_blocks != 0,
                                    .is_eagle = c->groups[g].is_eagle != 0};
    kv_events *events = sim_events_begin(s);
    kv_connector connector = {0};
    if (has_tier(s)) {
        sim_offload_init(&s->offload, c, groups, &s->medium, events);
        connector = sim_watch_connector(&s->watch, offload_connector_get_ops(s->offload.connector));
        sim_events_set_tier(KV_MEDIUM_HOST, offload_manager_list,
                            offload_connector_get_manager(s->offload.connector));
    }
    scheduler_opts opts = {
        .connector = has_tier(s) ? &connector : NULL,
        .max_num_seqs = c->max_num_seqs,
        .max_num_batched_tokens = c->max_num_batched_tokens,
        .long_prefill_token_threshold = c->long_prefill_token_threshold,
        .max_model_len = c->max_model_len,
        .max_queued_requests = c->max_queued_requests,
        .max_encoder_tokens = c->max_encoder_tokens,
        .policy = (scheduler_policy)c->policy,
        .enable_chunked_prefill = c->enable_chunked_prefill != 0,
        .enable_prefix_caching = c->enable_prefix_caching != 0,
        .async = c->is_async != 0,
        .max_steps_in_flight = c->depth,
        .num_speculative_tokens = c->max_drafts,
        .num_lookahead_tokens = c->num_lookahead_tokens,
        .watermark = c->watermark_percent / 100.0,
        .admit_partly = c->admit_partly != 0,
        .n_blocks = c->n_blocks,
        .block_size = c->block_size,
        .use_eagle = c->use_eagle != 0,
        .n_groups = c->n_groups,
        .groups = groups,
        .hash_seed = seed,
        .kv_events = events,
        .on_token = on_token,
        .on_finished = on_finished,
        .on_release = on_release,
        .arg = s,
    };
    SIM_CHECK(s, scheduler_create(&s->sched, &opts) == PGD_OK, "no scheduler for this trace");
    s->watch.sched = s->sched;
    SIM_CHECK(s, block_hasher_create(&s->hasher, seed) == PGD_OK, "no hasher");
}

static void create_wire(sim_state *s)
{
    const sim_config *c = s->config;
    s->limits = (wire_limits){.max_num_seqs = c->max_num_seqs,
                              .max_num_batched_tokens = c->max_num_batched_tokens,
                              .max_model_len = c->max_model_len,
                              .vocab_size = SIM_VOCAB,
                              .n_blocks = c->n_blocks,
                              .n_groups = c->n_groups,
                              .max_encoder_tokens = sim_max_encoder(c),
                              .max_logprobs = SIM_MAX_SCORES};
    for (int32_t g = 0; g < c->n_groups; g++) {
        s->limits.block_sizes[g] = c->groups[g].block_size;
        s->limits.cross_groups |= (uint32_t)(c->groups[g].kind == ATTENTION_CROSS) << g;
    }
    SIM_CHECK(s, wire_limits_derive(&s->limits, NULL) == PGD_OK, "limits out of range");
    s->scratch.cap_bytes = scheduler_output_scratch_bytes(&s->limits);
    s->scratch.data = malloc(s->scratch.cap_bytes);
    SIM_CHECK(s, s->scratch.data != NULL, "out of memory");
}

void sim_run(const sim_trace *t, sim_totals *total)
{
    sim_state *s = &sim;
    memset(s, 0, sizeof *s);
    s->trace = t;
    s->config = &t->config;
    s->total = total;
    for (int32_t i = 0; i < t->n_ops; i++)
        s->has_errors = s->has_errors || t->ops[i].request.error_at > 0;
    if (has_tier(s))
        sim_medium_init(&s->medium, s->config, s->has_errors);
    create_scheduler(s);
    for (int32_t rank = 0; rank < s->config->n_ranks; rank++)
        sim_worker_init(&s->workers[rank], s->config, s->requests, has_tier(s) ? &s->medium : NULL,
                        rank);
    create_wire(s);
    for (; s->op_idx < t->n_ops; s->op_idx++) {
        run_op(s, &t->ops[s->op_idx]);
        if (s->op_idx % s->config->check_every == 0)
            check_all(s);
    }
    if (s->config->is_cut == 0) {
        drain(s);
        check_end(s);
    }
    s->is_ending = true;
    scheduler_destroy(s->sched);
    check_released(s);
    block_hasher_destroy(s->hasher);
    for (int32_t rank = 0; rank < s->config->n_ranks; rank++)
        sim_worker_deinit(&s->workers[rank]);
    if (has_tier(s)) {
        sim_offload_deinit(&s->offload);
        sim_medium_deinit(&s->medium);
    }
    free(s->scratch.data);
    for (int32_t i = 0; i < SCHEDULER_MAX_STEPS_IN_FLIGHT; i++)
        free(s->frames[i].data);
}
