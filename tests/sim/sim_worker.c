/* Blocks in the eyes of the worker: a block is held by the rows whose tables it is in, less what
 * their windows have left. The engine may free such blocks, never others, so a block that a message
 * hands out as new must have no holder. A row holds hit blocks too, together with others. */
#include "tests/sim/sim_worker.h"

#include <stdlib.h>
#include <string.h>

#define FAULT(w, ...)                                            \
    do {                                                         \
        if ((w)->fault[0] == '\0')                               \
            snprintf((w)->fault, sizeof(w)->fault, __VA_ARGS__); \
    } while (0)

static bool is_faulty(const sim_worker *w)
{
    return w->fault[0] != '\0';
}

void sim_worker_init(sim_worker *w, const sim_config *config, const sim_request *const *requests,
                     sim_medium *medium, int32_t rank)
{
    memset(w, 0, sizeof *w);
    w->config = config;
    w->requests = requests;
    for (int32_t g = 0; g < config->n_groups; g++)
        w->max_block_size = PGD_MAX(w->max_block_size, config->groups[g].block_size);
    size_t n_blocks = (size_t)config->n_blocks;
    size_t n_slots = n_blocks * (size_t)w->max_block_size;
    w->shadow = calloc(n_slots, sizeof *w->shadow);
    w->written_in = calloc(n_slots, sizeof *w->written_in);
    w->holders = calloc(n_blocks, sizeof *w->holders);
    w->owner = calloc(n_blocks, sizeof *w->owner);
    w->fresh_in = calloc(n_blocks, sizeof *w->fresh_in);
    w->n_loading = calloc(n_blocks, sizeof *w->n_loading);
    w->n_storing = calloc(n_blocks, sizeof *w->n_storing);
    if (w->shadow == NULL || w->written_in == NULL || w->holders == NULL || w->owner == NULL ||
        w->fresh_in == NULL || w->n_loading == NULL || w->n_storing == NULL)
        abort();
    sim_device device = {w->shadow, w->owner, w->n_loading, w->n_storing};
    sim_streams_init(&w->streams, config, medium, &device, rank);
    sim_worker_reset(w, 1);
}

void sim_worker_deinit(sim_worker *w)
{
    sim_streams_reset(&w->streams, 1);
    free(w->shadow);
    free(w->written_in);
    free(w->holders);
    free(w->owner);
    free(w->fresh_in);
    free(w->n_loading);
    free(w->n_storing);
}

static void fill_block(sim_worker *w, block_id id, uint64_t value)
{
    for (int32_t i = 0; i < w->max_block_size; i++)
        w->shadow[(size_t)id * (size_t)w->max_block_size + (size_t)i] = value;
}

void sim_worker_reset(sim_worker *w, uint64_t next_step_id)
{
    w->next_step_id = next_step_id;
    sim_streams_reset(&w->streams, next_step_id);
    for (int i = 0; i < SIM_MAX_SEQS; i++)
        w->rows[i].is_used = false;
    memset(w->epochs, 0, sizeof w->epochs);
    for (block_id id = 0; id < w->config->n_blocks; id++) {
        fill_block(w, id, 0xdeadull + (uint64_t)id);
        w->holders[id] = 0;
        w->owner[id] = -1;
        w->fresh_in[id] = 0;
        w->n_loading[id] = 0;
        w->n_storing[id] = 0;
    }
}

static sim_row *find_row(sim_worker *w, uint64_t id)
{
    for (int i = 0; i < SIM_MAX_SEQS; i++) {
        if (w->rows[i].is_used && w->rows[i].id == id)
            return &w->rows[i];
    }
    return NULL;
}

/* --- who holds what ---------------------------------------------------------------------------- */

static void let_go(sim_worker *w, block_id id)
{
    if (id != 0)
        w->holders[id]--;
}

static void release_row(sim_worker *w, uint64_t id, const char *why)
{
    sim_row *row = find_row(w, id);
    if (row == NULL) {
        FAULT(w, "request %d is %s but has no row", (int)id, why);
        return;
    }
    for (int32_t g = 0; g < w->config->n_groups; g++) {
        for (int32_t i = row->n_dropped[g]; i < row->n_blocks[g]; i++)
            let_go(w, row->table[g][i]);
    }
    row->is_used = false;
}

/* Blocks wholly before what the row's next position reads. */
static void drop_skipped(sim_worker *w, sim_row *row)
{
    for (int32_t g = 0; g < w->config->n_groups; g++) {
        const sim_group *group = &w->config->groups[g];
        if (group->kind == ATTENTION_FULL || group->kind == ATTENTION_CROSS)
            continue;
        int32_t end =
            PGD_MIN(sim_first_read(group, row->n_computed) / group->block_size, row->n_blocks[g]);
        for (; row->n_dropped[g] < end; row->n_dropped[g]++)
            let_go(w, row->table[g][row->n_dropped[g]]);
    }
}

static bool is_in_pool(sim_worker *w, const sim_row *row, block_id id)
{
    if (id >= 0 && id < w->config->n_blocks)
        return true;
    FAULT(w, "request %d gets block %d of a pool of %d", (int)row->id, id, w->config->n_blocks);
    return false;
}

/* A block that the row is to fill itself. */
static void take_new_block(sim_worker *w, sim_row *row, int32_t g, block_id id)
{
    if (!is_in_pool(w, row, id))
        return;
    if (id == 0)
        FAULT(w, "request %d gets the null block for tokens to come, group %d, entry %d",
              (int)row->id, g, row->n_blocks[g]);
    else if (w->holders[id] != 0)
        FAULT(w, "request %d gets block %d as a new one, which %d others hold, group %d, entry %d",
              (int)row->id, id, w->holders[id], g, row->n_blocks[g]);
    if (w->n_loading[id] != 0 || w->n_storing[id] != 0)
        FAULT(w, "request %d gets block %d, which %d loads and %d stores still use", (int)row->id,
              id, w->n_loading[id], w->n_storing[id]);
    w->holders[id] += id != 0;
    w->fresh_in[id] = w->next_step_id;
    if (row->n_blocks[g] < SIM_MAX_LEN + 2)
        row->table[g][row->n_blocks[g]++] = id;
    else
        FAULT(w, "request %d gets too many blocks", (int)row->id);
}

/* A block of a prefix hit: shared, or null where the window has left it. */
static void take_hit_block(sim_worker *w, sim_row *row, int32_t g, block_id id, bool is_needed)
{
    if (!is_in_pool(w, row, id))
        return;
    if (id == 0 && is_needed)
        FAULT(w, "request %d is to hit the null block, group %d, entry %d", (int)row->id, g,
              row->n_blocks[g]);
    for (int32_t i = 0; i < row->n_blocks[g] && id != 0; i++) {
        if (row->table[g][i] == id)
            FAULT(w, "request %d hits block %d twice, group %d", (int)row->id, id, g);
    }
    if (w->n_loading[id] != 0)
        FAULT(w, "request %d is to hit block %d, which is being loaded", (int)row->id, id);
    w->holders[id] += id != 0;
    row->table[g][row->n_blocks[g]++] = id;
}

/* --- rows --------------------------------------------------------------------------------------- */

static void extend_chain(sim_row *row, int32_t first)
{
    for (int32_t i = first; i < row->n_tokens; i++)
        row->chain[i + 1] = sim_chain_next(row->chain[i], row->tokens[i]);
}

/* Prompt as the client gave it, then what a worker has drawn. */
static void check_tokens(sim_worker *w, const sim_row *row)
{
    for (int32_t i = 0; i < row->n_tokens; i++) {
        token_id want = i < row->request->n_prompt ? sim_prompt_token(row->request, i)
                                                   : sim_chain_sample(row->chain[i]);
        if (row->tokens[i] != want)
            FAULT(w, "request %d is sent with token %d at %d, expected %d", (int)row->id,
                  row->tokens[i], i, want);
    }
}

static void take_new_tables(sim_worker *w, sim_row *row, const block_ids_msg *blocks)
{
    for (int32_t g = 0; g < w->config->n_groups; g++) {
        const sim_group *group = &w->config->groups[g];
        bool is_cross = group->kind == ATTENTION_CROSS;
        int32_t n_hits = is_cross ? 0 : row->n_computed / group->block_size;
        int32_t n_skipped = sim_first_read(group, row->n_computed) / group->block_size;
        row->n_blocks[g] = 0;
        row->n_dropped[g] = 0;
        if (!is_cross && row->n_computed % group->block_size != 0)
            FAULT(w, "request %d begins at %d, inside a block of %d tokens of group %d",
                  (int)row->id, row->n_computed, group->block_size, g);
        if (blocks->n_blocks[g] > SIM_MAX_LEN)
            FAULT(w, "request %d gets %d blocks", (int)row->id, blocks->n_blocks[g]);
        for (int32_t i = 0; i < blocks->n_blocks[g] && !is_faulty(w); i++) {
            if (i < n_hits)
                take_hit_block(w, row, g, blocks->ids[g][i], i >= n_skipped);
            else
                take_new_block(w, row, g, blocks->ids[g][i]);
        }
    }
}

static sim_row *add_row(sim_worker *w, const new_request_msg *msg)
{
    if (msg->request_id >= SIM_MAX_REQUESTS || w->requests[msg->request_id] == NULL) {
        FAULT(w, "request %llu is not known", (unsigned long long)msg->request_id);
        return NULL;
    }
    sim_row *row = find_row(w, msg->request_id);
    int32_t n_used = 0;
    if (row != NULL)
        FAULT(w, "request %d is sent as new but has a row", (int)msg->request_id);
    for (int i = 0; i < SIM_MAX_SEQS; i++) {
        n_used += w->rows[i].is_used;
        if (!w->rows[i].is_used && row == NULL)
            row = &w->rows[i];
    }
    if (n_used >= w->config->max_num_seqs)
        FAULT(w, "request %d is sent but %d rows are taken", (int)msg->request_id, n_used);
    if (msg->request_epoch <= w->epochs[msg->request_id])
        FAULT(w, "request %d is sent with epoch %u after %u", (int)msg->request_id,
              msg->request_epoch, w->epochs[msg->request_id]);
    if (msg->n_tokens > SIM_MAX_LEN || msg->n_computed_tokens >= msg->n_tokens)
        FAULT(w, "request %d is sent with %d of %d tokens computed", (int)msg->request_id,
              msg->n_computed_tokens, msg->n_tokens);
    if (is_faulty(w))
        return NULL;
    w->epochs[msg->request_id] = msg->request_epoch;
    row->is_used = true;
    row->id = msg->request_id;
    row->epoch = msg->request_epoch;
    row->request = w->requests[msg->request_id];
    row->n_scores = msg->params.n_prompt_logprobs_per_token;
    row->n_tokens = msg->n_tokens;
    row->n_computed = msg->n_computed_tokens;
    row->n_drafts = 0;
    row->must_encode = false;
    row->is_encoded = false;
    memset(row->rejected_in, 0, sizeof row->rejected_in);
    memcpy(row->tokens, msg->tokens, (size_t)msg->n_tokens * sizeof *msg->tokens);
    row->chain[0] = sim_chain_start(row->request->salt);
    extend_chain(row, 0);
    check_tokens(w, row);
    if (msg->n_prompt_tokens != row->request->n_prompt)
        FAULT(w, "request %d is sent with a prompt of %d tokens, expected %d", (int)row->id,
              msg->n_prompt_tokens, row->request->n_prompt);
    if (msg->n_encoder_tokens != row->request->n_encoder)
        FAULT(w, "request %d is sent with %d encoder tokens, expected %d", (int)row->id,
              msg->n_encoder_tokens, row->request->n_encoder);
    for (int32_t i = 0; i < msg->n_encoder_tokens && !is_faulty(w); i++) {
        if (msg->encoder_tokens[i] != sim_encoder_token(row->request->salt, i))
            FAULT(w, "request %d is sent with encoder token %d at %d", (int)row->id,
                  msg->encoder_tokens[i], i);
    }
    if (row->n_scores > 0 && row->n_computed > 0)
        FAULT(w, "request %d wants prompt logprobs but begins at %d", (int)row->id,
              row->n_computed);
    take_new_tables(w, row, &msg->blocks);
    w->n_hit_positions += (uint64_t)row->n_computed;
    return row;
}

/* Drafts that the engine still takes for accepted. */
static int32_t n_rejected_unseen(const sim_worker *w, const sim_row *row)
{
    int32_t n = 0;
    for (int i = 0; i < SIM_MAX_IN_FLIGHT; i++)
        n += row->rejected_in[i] > w->seen_step_id ? row->n_rejected[i] : 0;
    return n;
}

static sim_row *continue_row(sim_worker *w, const cached_request_msg *msg,
                             const block_ids_msg *append, const token_id *drafts)
{
    sim_row *row = find_row(w, msg->request_id);
    int32_t n_unseen = row != NULL ? n_rejected_unseen(w, row) : 0;
    if (row == NULL || row->n_computed + n_unseen != msg->n_computed_tokens) {
        FAULT(w, "request %d continues at %d, its row is at %d, %d rejections not seen",
              (int)msg->request_id, msg->n_computed_tokens, row == NULL ? -1 : row->n_computed,
              n_unseen);
        return NULL;
    }
    for (int32_t g = 0; append != NULL && g < w->config->n_groups; g++) {
        for (int32_t i = 0; i < append->n_blocks[g] && !is_faulty(w); i++)
            take_new_block(w, row, g, append->ids[g][i]);
    }
    bool is_own = msg->n_draft_tokens > 0 && drafts == NULL;
    if (is_own != (msg->n_draft_tokens > 0 && w->config->is_async))
        FAULT(w, "request %d comes with %d drafts of %s", (int)row->id, msg->n_draft_tokens,
              is_own ? "its own" : "the engine");
    if (msg->n_draft_tokens > (is_own ? w->config->max_drafts : row->n_drafts))
        FAULT(w, "request %d comes with %d drafts, it proposed %d", (int)row->id,
              msg->n_draft_tokens, row->n_drafts);
    for (int32_t d = 0; d < PGD_MIN(msg->n_draft_tokens, row->n_drafts) && !is_faulty(w); d++) {
        if (!is_own && drafts[d] != row->drafts[d])
            FAULT(w, "request %d comes with draft %d = %d, it proposed %d", (int)row->id, d,
                  drafts[d], row->drafts[d]);
        row->tokens[row->n_tokens + d] = row->drafts[d];
    }
    return is_faulty(w) ? NULL : row;
}

/* n_claimed: drafts among the n tokens; the row may have proposed fewer. */
static void add_share(sim_worker *w, sim_row *row, int32_t n, int32_t n_claimed)
{
    if (row == NULL)
        return;
    int32_t n_drafts = PGD_MIN(n_claimed, row->n_drafts);
    n -= n_claimed - n_drafts;
    int32_t end = row->n_computed + n;
    if (n < 1 || end > row->n_tokens + n_drafts ||
        (n_drafts > 0 && end != row->n_tokens + n_drafts))
        FAULT(w, "request %d: %d tokens at %d, %d known, %d drafts", (int)row->id, n,
              row->n_computed, row->n_tokens, n_drafts);
    for (int32_t g = 0; g < w->config->n_groups; g++) {
        const sim_group *group = &w->config->groups[g];
        int32_t n_slots = group->kind == ATTENTION_CROSS ? row->request->n_encoder : end;
        if (row->n_blocks[g] * group->block_size < n_slots)
            FAULT(w, "request %d: %d blocks of %d tokens for %d positions, group %d", (int)row->id,
                  row->n_blocks[g], group->block_size, n_slots, g);
    }
    for (int32_t i = 0; i < w->n_shares; i++) {
        if (w->shares[i].row == row)
            FAULT(w, "request %d has two shares of the step", (int)row->id);
    }
    if (!is_faulty(w))
        w->shares[w->n_shares++] =
            (sim_share){.row = row,
                        .first = row->n_computed,
                        .n = n,
                        .n_drafts = n_drafts,
                        .n_claimed = n_claimed,
                        .is_broken = row->request->error_at > 0 && end >= row->request->error_at};
}

/* --- the message as a whole --------------------------------------------------------------------- */

static void check_totals(sim_worker *w, const scheduler_output *out)
{
    int32_t n_total = 0;
    for (int32_t i = 0; i < out->n_new; i++)
        n_total += out->new_requests[i].n_scheduled_tokens;
    for (int32_t i = 0; i < out->n_cached; i++)
        n_total += out->cached_requests[i].n_scheduled_tokens;
    if (out->step_id != w->next_step_id)
        FAULT(w, "step %llu comes, expected %llu", (unsigned long long)out->step_id,
              (unsigned long long)w->next_step_id);
    if (out->n_groups != w->config->n_groups)
        FAULT(w, "%d groups, expected %d", out->n_groups, w->config->n_groups);
    if (n_total != out->total_scheduled_tokens || n_total > w->config->max_num_batched_tokens)
        FAULT(w, "%d tokens in all, %d are listed, at most %d", out->total_scheduled_tokens,
              n_total, w->config->max_num_batched_tokens);
    if (out->n_new + out->n_cached > w->config->max_num_seqs)
        FAULT(w, "%d new and %d continuing requests", out->n_new, out->n_cached);
}

/* What is zeroed must not be in use; what needs zeros must get them. */
static void zero_blocks(sim_worker *w, const scheduler_output *out)
{
    for (int32_t i = 0; i < out->n_blocks_to_zero; i++) {
        block_id id = out->blocks_to_zero[i];
        if (id < 1 || id >= w->config->n_blocks || w->owner[id] == -2) {
            FAULT(w, "block %d is to be zeroed, or twice", id);
            return;
        }
        if (w->holders[id] > 0 && w->fresh_in[id] != out->step_id)
            FAULT(w, "block %d is to be zeroed while %d hold it", id, w->holders[id]);
        if (w->n_loading[id] != 0 || w->n_storing[id] != 0)
            FAULT(w, "block %d is to be zeroed, which %d loads and %d stores still use", id,
                  w->n_loading[id], w->n_storing[id]);
        fill_block(w, id, 0);
        w->owner[id] = -2;
    }
}

static void check_zeroed(sim_worker *w, const scheduler_output *out)
{
    for (int32_t s = 0; s < w->n_shares; s++) {
        const sim_row *row = w->shares[s].row;
        for (int32_t g = 0; g < w->config->n_groups; g++) {
            for (int32_t i = row->n_dropped[g];
                 w->config->groups[g].zero_new_blocks && i < row->n_blocks[g]; i++) {
                block_id id = row->table[g][i];
                if (id != 0 && w->fresh_in[id] == out->step_id && w->owner[id] != -2)
                    FAULT(w, "request %d: block %d of group %d is not zeroed", (int)row->id, id, g);
            }
        }
    }
    for (int32_t i = 0; i < out->n_blocks_to_zero && !is_faulty(w); i++)
        w->owner[out->blocks_to_zero[i]] = -1;
}

/* --- transfers ----------------------------------------------------------------------------------- */

/* A load writes blocks of nobody; a store reads any. */
static void check_transfers(sim_worker *w, const scheduler_output *out)
{
    for (int32_t i = 0; i < out->n_transfers; i++) {
        const kv_transfer_msg *msg = &out->transfers[i];
        for (int32_t k = 0; k < msg->n_blocks && msg->kind != KV_TRANSFER_FLUSH; k++) {
            block_id id = msg->device_blocks[k];
            bool is_load = msg->kind == KV_TRANSFER_LOAD;
            if (id < 1 || w->n_loading[id] != 0 || (is_load && w->n_storing[id] != 0))
                FAULT(w, "job %d uses block %d, which %d loads and %d stores use", (int)msg->job_id,
                      id, w->n_loading[id], w->n_storing[id]);
            if (is_load && w->holders[id] > 0)
                FAULT(w, "job %d loads block %d, which %d rows hold", (int)msg->job_id, id,
                      w->holders[id]);
        }
    }
}

void sim_worker_receive(sim_worker *w, const scheduler_output *out)
{
    sim_streams_submit(&w->streams, out);
}

void sim_worker_tick(sim_worker *w)
{
    sim_streams_tick(&w->streams);
}

static int32_t n_equal(const sim_row *a, const sim_row *b, int32_t g)
{
    int32_t n = PGD_MIN(a->n_blocks[g], b->n_blocks[g]);
    int32_t i = 0;
    while (i < n && a->table[g][i] == b->table[g][i])
        i++;
    return i;
}

/* A worker may read the claimed blocks once for all rows of the step. */
static void check_common_prefix(sim_worker *w, const scheduler_output *out)
{
    for (int32_t g = 0; g < w->config->n_groups; g++) {
        int32_t n_claimed = out->n_common_prefix_blocks[g];
        if (n_claimed != 0 && w->config->groups[g].kind != ATTENTION_FULL)
            FAULT(w, "%d common blocks in group %d, which has no common prefixes", n_claimed, g);
        for (int32_t s = 0; s < w->n_shares; s++) {
            const sim_row *row = w->shares[s].row;
            int32_t n = PGD_MIN(n_equal(w->shares[0].row, row, g), row->n_blocks[g]);
            if (n_claimed > n)
                FAULT(w, "%d common blocks in group %d, requests %d and %d share %d", n_claimed, g,
                      (int)w->shares[0].row->id, (int)row->id, n);
        }
    }
}

/* Each input goes through the encoder once, whole, before the decoder's first tokens. */
static void check_encoder_inputs(sim_worker *w, const scheduler_output *out)
{
    int32_t n_tokens = 0;
    for (int32_t i = 0; i < out->n_encoder_inputs; i++) {
        const encoder_input_msg *input = &out->encoder_inputs[i];
        sim_row *row = find_row(w, input->request_id);
        n_tokens += input->n_tokens;
        if (row == NULL || row->must_encode || row->is_encoded ||
            input->n_tokens != row->request->n_encoder) {
            FAULT(w, "request %d: %d encoder tokens, unknown, twice or not all",
                  (int)input->request_id, input->n_tokens);
            return;
        }
        row->must_encode = true;
    }
    if (w->config->max_encoder_tokens > 0 && n_tokens > w->config->max_encoder_tokens)
        FAULT(w, "%d encoder tokens in a step, at most %d", n_tokens,
              w->config->max_encoder_tokens);
}

static void apply(sim_worker *w, const scheduler_output *out)
{
    int32_t n_appended = 0;
    w->n_shares = 0;
    check_totals(w, out);
    sim_streams_submit(&w->streams, out);
    sim_streams_flush(&w->streams, out);
    for (int32_t i = 0; i < out->n_finished && !is_faulty(w); i++)
        release_row(w, out->finished_ids[i], "finished");
    for (int32_t i = 0; i < out->n_preempted && !is_faulty(w); i++)
        release_row(w, out->preempted_ids[i], "preempted");
    for (int i = 0; i < SIM_MAX_SEQS; i++) {
        if (w->rows[i].is_used)
            drop_skipped(w, &w->rows[i]);
    }
    for (int32_t i = 0; i < out->n_cached && !is_faulty(w); i++) {
        const cached_request_msg *msg = &out->cached_requests[i];
        const block_ids_msg *append =
            scheduler_output_next_append(out, &n_appended, msg->request_id);
        const token_id *drafts = scheduler_output_drafts(out, msg);
        add_share(w, continue_row(w, msg, append, drafts), msg->n_scheduled_tokens,
                  msg->n_draft_tokens);
    }
    for (int32_t i = 0; i < out->n_new && !is_faulty(w); i++) {
        const new_request_msg *msg = &out->new_requests[i];
        add_share(w, add_row(w, msg), msg->n_scheduled_tokens, 0);
    }
    if (is_faulty(w))
        return;
    check_encoder_inputs(w, out);
    check_transfers(w, out);
    sim_streams_apply(&w->streams, out);
    zero_blocks(w, out);
    check_zeroed(w, out);
    check_common_prefix(w, out);
}

/* --- the forward pass --------------------------------------------------------------------------- */

static size_t slot_of(sim_worker *w, const sim_row *row, int32_t g, int32_t pos)
{
    int32_t bs = w->config->groups[g].block_size;
    block_id id = row->table[g][pos / bs];
    if (id == 0)
        FAULT(w, "request %d uses the null block at position %d, group %d, %d computed",
              (int)row->id, pos, g, row->n_computed);
    return (size_t)id * (size_t)w->max_block_size + (size_t)(pos % bs);
}

static void write_slot(sim_worker *w, const sim_share *share, int32_t g, int32_t pos,
                       uint64_t chain)
{
    const sim_row *row = share->row;
    block_id id = row->table[g][pos / w->config->groups[g].block_size];
    size_t slot = slot_of(w, row, g, pos);
    if (w->written_in[slot] == w->next_step_id)
        FAULT(w, "request %d: offset %d of block %d, group %d, is written twice in step %llu",
              (int)row->id, pos % w->config->groups[g].block_size, id, g,
              (unsigned long long)w->next_step_id);
    if (w->n_loading[id] != 0 || w->n_storing[id] != 0)
        FAULT(w, "request %d writes block %d, which %d loads and %d stores use", (int)row->id, id,
              w->n_loading[id], w->n_storing[id]);
    if (w->owner[id] != g) { /* the groups lay out a block in their own ways */
        fill_block(w, id, 0xbadull + (uint64_t)id);
        w->owner[id] = (int8_t)g;
    }
    w->written_in[slot] = w->next_step_id;
    w->shadow[slot] = share->is_broken ? SIM_NOT_FINITE : sim_chain_content(chain, g);
}

static void write_share(sim_worker *w, const sim_share *share)
{
    sim_row *row = share->row;
    for (int32_t i = row->n_tokens; i < row->n_tokens + share->n_drafts; i++)
        row->chain[i + 1] = sim_chain_next(row->chain[i], row->tokens[i]);
    for (int32_t g = 0; g < w->config->n_groups; g++) {
        if (w->config->groups[g].kind == ATTENTION_CROSS) {
            for (int32_t pos = 0; pos < row->request->n_encoder && row->must_encode; pos++)
                write_slot(w, share, g, pos, sim_chain_encoder(row->request->salt, pos));
            row->is_encoded = row->is_encoded || row->must_encode;
            row->must_encode = false;
            continue;
        }
        for (int32_t pos = share->first; pos < share->first + share->n; pos++)
            write_slot(w, share, g, pos, row->chain[pos + 1]);
    }
}

/* What the share wrote in this step is not finite after all. */
static void break_share(sim_worker *w, sim_share *share)
{
    share->is_broken = true;
    for (int32_t g = 0; g < w->config->n_groups; g++) {
        if (w->config->groups[g].kind == ATTENTION_CROSS)
            continue;
        for (int32_t pos = share->first; pos < share->first + share->n; pos++)
            w->shadow[slot_of(w, share->row, g, pos)] = SIM_NOT_FINITE;
    }
}

/* False when it read something that is not finite. */
static bool read_slot(sim_worker *w, const sim_share *share, int32_t g, int32_t pos, uint64_t chain)
{
    size_t slot = slot_of(w, share->row, g, pos);
    if (w->n_loading[slot / (size_t)w->max_block_size] != 0)
        FAULT(w, "request %d reads block %zu, which is being loaded", (int)share->row->id,
              slot / (size_t)w->max_block_size);
    if (w->shadow[slot] == SIM_NOT_FINITE)
        return false;
    if (w->shadow[slot] != sim_chain_content(chain, g))
        FAULT(w,
              "request %d, %d tokens at %d, attends at position %d to foreign contents of block "
              "%zu, group %d",
              (int)share->row->id, share->n, share->first, pos, slot / (size_t)w->max_block_size,
              g);
    return true;
}

static bool read_share(sim_worker *w, const sim_share *share)
{
    const sim_row *row = share->row;
    bool is_finite = true;
    for (int32_t g = 0; g < w->config->n_groups; g++) {
        const sim_group *group = &w->config->groups[g];
        if (group->kind == ATTENTION_CROSS) {
            for (int32_t pos = 0; pos < row->request->n_encoder; pos++)
                is_finite &=
                    read_slot(w, share, g, pos, sim_chain_encoder(row->request->salt, pos));
            continue;
        }
        for (int32_t pos = sim_first_read(group, share->first); pos < share->first + share->n;
             pos++)
            is_finite &= read_slot(w, share, g, pos, row->chain[pos + 1]);
    }
    return is_finite;
}

/* Rows may read what others wrote in this step, so what breaks goes on until all is settled. */
static void read_shares(sim_worker *w)
{
    bool is_changed = true;
    while (is_changed) {
        is_changed = false;
        for (int32_t i = 0; i < w->n_shares; i++) {
            if (!read_share(w, &w->shares[i]) && !w->shares[i].is_broken) {
                break_share(w, &w->shares[i]);
                is_changed = true;
            }
        }
    }
}

/* --- results ------------------------------------------------------------------------------------- */

/* The prompt tokens that this step's positions predict. */
static void score_share(sim_worker *w, const sim_share *share, step_result *result)
{
    const sim_row *row = share->row;
    int32_t end = PGD_MIN(share->first + share->n, row->request->n_prompt - 1);
    if (row->n_scores == 0 || share->first >= end)
        return;
    w->prompts[result->n_prompt_results++] =
        (prompt_result_msg){.request_id = row->id,
                            .request_epoch = row->epoch,
                            .first_token = share->first + 1,
                            .n_tokens = end - share->first,
                            .n_logprobs_per_token = row->n_scores,
                            .first_logprob = result->n_prompt_logprobs};
    for (int32_t pos = share->first; pos < end; pos++) {
        for (int32_t k = 0; k < row->n_scores; k++)
            w->scores[result->n_prompt_logprobs++] =
                sim_chain_score(row->chain[pos + 1], row->tokens[pos + 1], k);
    }
}

/* Drafts and how right they are depend on the request and the position alone. */
static void propose(const sim_worker *w, sim_row *row, request_result_msg *res)
{
    uint64_t chain = row->chain[row->n_tokens];
    uint64_t draw = hash_u64(chain + row->id * 77 + 5);
    row->n_drafts = (int32_t)(draw % (uint64_t)(w->config->max_drafts + 1));
    for (int32_t d = 0; d < row->n_drafts; d++) {
        token_id token = sim_chain_sample(chain);
        draw = hash_u64(draw);
        bool is_right = (int32_t)(draw % 4) < w->config->n_right_in_4;
        row->drafts[d] = is_right ? token : (token + 1) % SIM_VOCAB;
        chain = sim_chain_next(chain, token);
    }
    res->n_drafts = row->n_drafts;
    memcpy(res->drafts, row->drafts, sizeof row->drafts);
}

/* Samples; with drafts, as many as agree with what would have been sampled, and one more. */
static void sample_share(sim_worker *w, const sim_share *share, step_result *result,
                         request_result_msg *results)
{
    sim_row *row = share->row;
    int32_t end = share->first + share->n;
    bool is_sampled = end >= row->n_tokens;
    row->n_computed = end;
    if (!is_sampled && !share->is_broken)
        return;
    request_result_msg *res = &results[result->n_results++];
    memset(res, 0, sizeof *res);
    res->request_id = row->id;
    res->request_epoch = row->epoch;
    row->n_drafts = 0;
    for (int32_t d = 0; is_sampled && d <= share->n_drafts; d++) {
        token_id token = sim_chain_sample(row->chain[row->n_tokens]);
        bool is_accepted = d < share->n_drafts && row->tokens[row->n_tokens] == token;
        res->tokens[res->n_tokens++] = token;
        row->tokens[row->n_tokens++] = token;
        extend_chain(row, row->n_tokens - 1);
        if (!is_accepted)
            break;
    }
    if (is_sampled)
        row->n_computed = row->n_tokens - 1;
    int32_t oldest = (int32_t)(w->next_step_id % SIM_MAX_IN_FLIGHT);
    row->rejected_in[oldest] = w->next_step_id;
    row->n_rejected[oldest] = is_sampled ? share->n_claimed - (res->n_tokens - 1) : 0;
    if (share->is_broken) { /* the row goes on until the engine takes it away */
        res->n_tokens = 0;
        res->error = REQUEST_ERROR_NAN_LOGITS;
    } else if (w->config->max_drafts > 0) {
        propose(w, row, res);
    }
}

void sim_worker_run(step_result *result, request_result_msg *results, sim_worker *w,
                    const scheduler_output *out, uint64_t seen_step_id)
{
    w->seen_step_id = seen_step_id;
    *result = (step_result){.step_id = out->step_id,
                            .results = results,
                            .prompt_results = w->prompts,
                            .prompt_logprobs = w->scores};
    apply(w, out);
    sim_worker_tick(w);
    if (is_faulty(w))
        return;
    for (int32_t i = 0; i < w->n_shares; i++)
        write_share(w, &w->shares[i]);
    sim_worker_tick(w);
    read_shares(w);
    for (int32_t i = 0; i < w->n_shares; i++)
        score_share(w, &w->shares[i], result);
    for (int32_t i = 0; i < w->n_shares; i++)
        sample_share(w, &w->shares[i], result, results);
    w->streams.n_steps_done = out->step_id;
    w->next_step_id++;
}
