/* Field tables of a step, and the rules that hold between its fields.
 *
 * The tables bound every value on its own; check_step then compares what no single field shows: the
 * totals, and that the tables of new requests reach as far as the step computes. What needs the
 * worker's rows (an unknown request, positions that do not continue) is the worker's to check.
 */
#include "proto/scheduler_output.h"

#define MAX_BITMASK_BYTES (64u << 20)

/* Block ids of each KV group, at most what max_model_len needs. */
#define BLOCK_IDS(T, member)                                                           \
    {                                                                                  \
        .name = #member, .kind = WIRE_KIND_ARRAY, .elem = WIRE_KIND_I32,               \
        .flags = WIRE_FLAG_PER_GROUP, .offset = (uint32_t)offsetof(T, member.ids),     \
        .count_offset = (uint32_t)offsetof(T, member.n_blocks), .count_bytes = 4,      \
        .max_n_ref = W_LIMIT(max_blocks_per_request), .max_ref = W_LIMIT(max_block_id) \
    }

static const wire_field NEW_FIELDS[] = {
    W_U64(new_request_msg, request_id),
    W_U32(new_request_msg, request_epoch, 0, UINT32_MAX),
    W_I32_REF(new_request_msg, n_prompt_tokens, 1, max_model_len),
    W_I32_REF(new_request_msg, n_computed_tokens, 0, max_model_len),
    W_I32_REF(new_request_msg, n_scheduled_tokens, 1, max_num_batched_tokens),
    {
        .name = "tokens",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_I32,
        .offset = (uint32_t)offsetof(new_request_msg, tokens),
        .count_offset = W_OFF(new_request_msg, n_tokens, 4),
        .count_bytes = 4,
        .min_n = 1,
        .max_n_ref = W_LIMIT(max_model_len),
        .max_ref = W_LIMIT(max_token_id),
    },
    W_EMBED(new_request_msg, params, &sampling_params_record),
    {
        .name = "encoder_tokens",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_I32,
        .offset = (uint32_t)offsetof(new_request_msg, encoder_tokens),
        .count_offset = W_OFF(new_request_msg, n_encoder_tokens, 4),
        .count_bytes = 4,
        .max_n_ref = W_LIMIT(max_encoder_tokens),
        .max_ref = W_LIMIT(max_token_id),
    },
    BLOCK_IDS(new_request_msg, blocks),
};
static const wire_record NEW_RECORD = {"new_request", NEW_FIELDS, PGD_ARRAY_LEN(NEW_FIELDS),
                                       sizeof(new_request_msg)};

static const wire_field CACHED_FIELDS[] = {
    W_U64(cached_request_msg, request_id),
    W_I32_REF(cached_request_msg, n_computed_tokens, 0, max_model_len),
    W_I32_REF(cached_request_msg, n_scheduled_tokens, 1, max_num_batched_tokens),
    W_I32(cached_request_msg, n_draft_tokens, 0, PGD_MAX_DRAFT_TOKENS),
    W_I32_REF(cached_request_msg, first_draft_token, 0, max_num_batched_tokens),
};
static const wire_record CACHED_RECORD = {"cached_request", CACHED_FIELDS,
                                          PGD_ARRAY_LEN(CACHED_FIELDS), sizeof(cached_request_msg)};

static const wire_field APPEND_FIELDS[] = {
    W_U64(block_append_msg, request_id),
    BLOCK_IDS(block_append_msg, blocks),
};
static const wire_record APPEND_RECORD = {"block_append", APPEND_FIELDS,
                                          PGD_ARRAY_LEN(APPEND_FIELDS), sizeof(block_append_msg)};

static const wire_field TRANSFER_FIELDS[] = {
    W_U64(kv_transfer_msg, job_id),
    W_U32(kv_transfer_msg, kind, KV_TRANSFER_LOAD, KV_TRANSFER_FLUSH),
    {
        .name = "device_blocks",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_I32,
        .offset = (uint32_t)offsetof(kv_transfer_msg, device_blocks),
        .count_offset = W_OFF(kv_transfer_msg, n_blocks, 4),
        .count_bytes = 4,
        .max_n = KV_TRANSFER_MAX_BLOCKS,
        .min = 1, /* never the null block */
        .max_ref = W_LIMIT(max_block_id),
    },
    {
        .name = "medium_blocks",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_I32,
        .flags = WIRE_FLAG_SAME_COUNT,
        .offset = (uint32_t)offsetof(kv_transfer_msg, medium_blocks),
        .count_offset = W_OFF(kv_transfer_msg, n_blocks, 4),
        .count_bytes = 4,
        .max_n = KV_TRANSFER_MAX_BLOCKS,
        .max = INT32_MAX,
    },
    {
        .name = "tags",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_U64,
        .flags = WIRE_FLAG_SAME_COUNT,
        .offset = (uint32_t)offsetof(kv_transfer_msg, tags),
        .count_offset = W_OFF(kv_transfer_msg, n_blocks, 4),
        .count_bytes = 4,
        .max_n = KV_TRANSFER_MAX_BLOCKS,
    },
};
static const wire_record TRANSFER_RECORD = {
    "kv_transfer", TRANSFER_FIELDS, PGD_ARRAY_LEN(TRANSFER_FIELDS), sizeof(kv_transfer_msg)};

static const wire_field ENCODER_FIELDS[] = {
    W_U64(encoder_input_msg, request_id),
    W_I32(encoder_input_msg, input_idx, 0, INT32_MAX),
    W_I32_REF(encoder_input_msg, n_tokens, 1, max_encoder_tokens),
};
static const wire_record ENCODER_RECORD = {
    "encoder_input", ENCODER_FIELDS, PGD_ARRAY_LEN(ENCODER_FIELDS), sizeof(encoder_input_msg)};

#define RECORDS(member, count, rec)                                                      \
    .name = #member, .kind = WIRE_KIND_ARRAY, .elem = WIRE_KIND_RECORD, .record = (rec), \
    .count_bytes = 4, .offset = (uint32_t)offsetof(scheduler_output, member),            \
    .count_offset = W_OFF(scheduler_output, count, 4)
/* Ids of rows to release: those of this step's set and those of the step before, hence twice. */
#define IDS(member, count)                                                                 \
    {                                                                                      \
        .name = #member, .kind = WIRE_KIND_ARRAY, .elem = WIRE_KIND_U64, .count_bytes = 4, \
        .max_n = 1u << 21, .offset = (uint32_t)offsetof(scheduler_output, member),         \
        .count_offset = W_OFF(scheduler_output, count, 4)                                  \
    }

static const wire_field FIELDS[] = {
    W_U64(scheduler_output, step_id),
    W_I32_REF(scheduler_output, total_scheduled_tokens, 0, max_num_batched_tokens),
    {
        .name = "n_groups",
        .kind = WIRE_KIND_I32,
        .flags = WIRE_FLAG_SETS_GROUPS,
        .offset = W_OFF(scheduler_output, n_groups, 4),
        .n = 1,
        .min = 1,
        .max_ref = W_LIMIT(n_groups),
    },
    W_FIXED(scheduler_output, n_common_prefix_blocks, WIRE_KIND_I32, 4, PGD_MAX_KV_GROUPS, 0,
            INT32_MAX),
    {RECORDS(new_requests, n_new, &NEW_RECORD), .max_n_ref = W_LIMIT(max_num_seqs)},
    {RECORDS(cached_requests, n_cached, &CACHED_RECORD), .max_n_ref = W_LIMIT(max_num_seqs)},
    {
        .name = "draft_tokens",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_I32,
        .offset = (uint32_t)offsetof(scheduler_output, draft_tokens),
        .count_offset = W_OFF(scheduler_output, n_draft_tokens, 4),
        .count_bytes = 4,
        .max_n_ref = W_LIMIT(max_num_batched_tokens),
        .max_ref = W_LIMIT(max_token_id),
    },
    {RECORDS(appends, n_appends, &APPEND_RECORD), .max_n_ref = W_LIMIT(max_num_seqs)},
    IDS(finished_ids, n_finished),
    IDS(preempted_ids, n_preempted),
    {
        .name = "blocks_to_zero",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_I32,
        .offset = (uint32_t)offsetof(scheduler_output, blocks_to_zero),
        .count_offset = W_OFF(scheduler_output, n_blocks_to_zero, 4),
        .count_bytes = 4,
        .max_n_ref = W_LIMIT(n_blocks),
        .max_ref = W_LIMIT(max_block_id),
    },
    {RECORDS(transfers, n_transfers, &TRANSFER_RECORD), .max_n = KV_TRANSFER_MAX_JOBS},
    {RECORDS(encoder_inputs, n_encoder_inputs, &ENCODER_RECORD),
     .max_n_ref = W_LIMIT(max_num_seqs)},
    {
        .name = "grammar_bitmask",
        .kind = WIRE_KIND_ARRAY,
        .elem = WIRE_KIND_U8,
        .offset = (uint32_t)offsetof(scheduler_output, grammar_bitmask),
        .count_offset = W_OFF(scheduler_output, grammar_bitmask_bytes, 8),
        .count_bytes = 8,
        .max_n = MAX_BITMASK_BYTES,
        .max = 255,
    },
};

const wire_record scheduler_output_record = {"step", FIELDS, PGD_ARRAY_LEN(FIELDS),
                                             sizeof(scheduler_output)};

size_t scheduler_output_scratch_bytes(const wire_limits *limits)
{
    return (size_t)limits->max_num_seqs * (sizeof(new_request_msg) + sizeof(cached_request_msg) +
                                           sizeof(block_append_msg) + sizeof(encoder_input_msg)) +
           KV_TRANSFER_MAX_JOBS * sizeof(kv_transfer_msg);
}

size_t scheduler_output_max_frame_bytes(const wire_limits *limits)
{
    /* A new request: its tokens, its tables, its parameters; the rest is small beside them. */
    size_t per_request =
        ((size_t)limits->max_model_len + (size_t)limits->max_encoder_tokens) * 4 +
        (size_t)limits->n_groups * ((size_t)limits->max_blocks_per_request * 4 + 16) + 4096 * 4 +
        PGD_MAX_LOGIT_BIAS * 8 + 512;
    size_t n_new = (size_t)PGD_MIN(limits->max_num_seqs, limits->max_num_batched_tokens);
    return n_new * per_request + (size_t)limits->max_num_seqs * (16 * 4 + 512) +
           (size_t)limits->n_blocks * 4 + KV_TRANSFER_MAX_BLOCKS * (size_t)16 +
           KV_TRANSFER_MAX_JOBS * (size_t)96 + MAX_BITMASK_BYTES + (1u << 20);
}

/* The sum of scheduled tokens cannot overflow: at most 2^20 requests of the two kinds, each under
 * 2^31. */
static pgd_err check_new(const scheduler_output *out, const wire_limits *limits, int64_t *total,
                         pgd_why *why)
{
    for (int32_t i = 0; i < out->n_new; i++) {
        const new_request_msg *n = &out->new_requests[i];
        int64_t n_context = (int64_t)n->n_computed_tokens + n->n_scheduled_tokens;
        if (n->n_prompt_tokens > n->n_tokens || n_context > n->n_tokens)
            return pgd_fail(why, PGD_EPROTO,
                            "step %llu: new request %llu: expected n_prompt_tokens and n_computed "
                            "+ n_scheduled within its %d "
                            "tokens, got %d and %d + %d",
                            (unsigned long long)out->step_id, (unsigned long long)n->request_id,
                            n->n_tokens, n->n_prompt_tokens, n->n_computed_tokens,
                            n->n_scheduled_tokens);
        for (int32_t g = 0; g < out->n_groups; g++) {
            bool is_cross = (limits->cross_groups >> g & 1u) != 0;
            if (!is_cross && (int64_t)n->blocks.n_blocks[g] * limits->block_sizes[g] < n_context)
                return pgd_fail(
                    why, PGD_EPROTO,
                    "step %llu: new request %llu: group %d: expected blocks for %lld tokens, got "
                    "%d blocks of %d",
                    (unsigned long long)out->step_id, (unsigned long long)n->request_id, g,
                    (long long)n_context, n->blocks.n_blocks[g], limits->block_sizes[g]);
        }
        *total += n->n_scheduled_tokens;
    }
    return PGD_OK;
}

static pgd_err check_cached(const scheduler_output *out, const wire_limits *limits, int64_t *total,
                            pgd_why *why)
{
    int32_t n_appended = 0;
    int32_t n_drafts = 0;
    for (int32_t i = 0; i < out->n_cached; i++) {
        const cached_request_msg *c = &out->cached_requests[i];
        if (c->n_draft_tokens >= c->n_scheduled_tokens ||
            (int64_t)c->n_computed_tokens + c->n_scheduled_tokens > limits->max_model_len)
            return pgd_fail(why, PGD_EPROTO,
                            "step %llu: request %llu: expected drafts < scheduled tokens and a "
                            "context of at most %d, got %d "
                            "drafts, %d computed + %d scheduled",
                            (unsigned long long)out->step_id, (unsigned long long)c->request_id,
                            limits->max_model_len, c->n_draft_tokens, c->n_computed_tokens,
                            c->n_scheduled_tokens);
        if (c->first_draft_token != n_drafts)
            return pgd_fail(why, PGD_EPROTO,
                            "step %llu: request %llu: expected its drafts from %d on, got %d",
                            (unsigned long long)out->step_id, (unsigned long long)c->request_id,
                            n_drafts, c->first_draft_token);
        if (out->n_draft_tokens > 0)
            n_drafts += c->n_draft_tokens;
        *total += c->n_scheduled_tokens;
        (void)scheduler_output_next_append(out, &n_appended, c->request_id);
    }
    if (n_drafts != out->n_draft_tokens)
        return pgd_fail(why, PGD_EPROTO, "step %llu: expected %d drafts, or none, got %d",
                        (unsigned long long)out->step_id, n_drafts, out->n_draft_tokens);
    if (n_appended < out->n_appends)
        return pgd_fail(why, PGD_EPROTO,
                        "step %llu: expected appends in the order of the continuing requests, got "
                        "one for %llu",
                        (unsigned long long)out->step_id,
                        (unsigned long long)out->appends[n_appended].request_id);
    return PGD_OK;
}

static pgd_err check_transfers(const scheduler_output *out, pgd_why *why)
{
    int64_t n_blocks = 0;
    for (int32_t i = 0; i < out->n_transfers; i++) {
        const kv_transfer_msg *t = &out->transfers[i];
        if ((t->n_blocks == 0) != (t->kind == KV_TRANSFER_FLUSH))
            return pgd_fail(why, PGD_EPROTO,
                            "step %llu: transfer %llu: expected blocks for a load or store alone, "
                            "got %d for kind %d",
                            (unsigned long long)out->step_id, (unsigned long long)t->job_id,
                            t->n_blocks, (int)t->kind);
        n_blocks += t->n_blocks;
    }
    if (n_blocks > KV_TRANSFER_MAX_BLOCKS)
        return pgd_fail(
            why, PGD_EPROTO, "step %llu: expected at most %d blocks to be transferred, got %lld",
            (unsigned long long)out->step_id, KV_TRANSFER_MAX_BLOCKS, (long long)n_blocks);
    return PGD_OK;
}

static pgd_err check_step(const scheduler_output *out, const wire_limits *limits, pgd_why *why)
{
    int64_t total = 0;
    if (out->n_groups != limits->n_groups)
        return pgd_fail(why, PGD_EPROTO, "step %llu: expected %d KV groups, got %d",
                        (unsigned long long)out->step_id, limits->n_groups, out->n_groups);
    if ((int64_t)out->n_new + out->n_cached > limits->max_num_seqs)
        return pgd_fail(
            why, PGD_EPROTO, "step %llu: expected at most %d requests, got %d new and %d cached",
            (unsigned long long)out->step_id, limits->max_num_seqs, out->n_new, out->n_cached);
    PGD_TRY(check_new(out, limits, &total, why));
    PGD_TRY(check_cached(out, limits, &total, why));
    PGD_TRY(check_transfers(out, why));
    if (total != out->total_scheduled_tokens)
        return pgd_fail(why, PGD_EPROTO, "step %llu: expected total_scheduled_tokens %lld, got %d",
                        (unsigned long long)out->step_id, (long long)total,
                        out->total_scheduled_tokens);
    return PGD_OK;
}

pgd_err scheduler_output_decode(scheduler_output *out, wire_scratch *scratch, const void *frame,
                                size_t n_bytes, const wire_limits *limits, pgd_why *why)
{
    PGD_TRY(wire_decode(out, scratch, frame, n_bytes, WIRE_STEP, &scheduler_output_record, limits,
                        why));
    return check_step(out, limits, why);
}
