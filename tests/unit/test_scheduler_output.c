/* Steps on the wire: round trips of random steps, hostile frames, the rules between fields. */
#include "tests/unit/proto_samples.h"

static sample_arena arena_;
static wire_scratch scratch_;

static pgd_err decode_step(void *out, wire_scratch *scratch, const void *data, size_t n_bytes,
                           const wire_limits *limits, pgd_why *why)
{
    return scheduler_output_decode(out, scratch, data, n_bytes, limits, why);
}

static void start(uint64_t seed)
{
    sample_arena_init(&arena_, seed);
    free(scratch_.data);
    scratch_ = scratch_make(scheduler_output_scratch_bytes(&arena_.limits));
}

static void assert_blocks_equal(const block_ids_msg *a, const block_ids_msg *b)
{
    for (int g = 0; g < PGD_MAX_KV_GROUPS; g++) {
        assert_int_equal(a->n_blocks[g], b->n_blocks[g]);
        if (a->n_blocks[g] > 0)
            assert_memory_equal(a->ids[g], b->ids[g], (size_t)a->n_blocks[g] * sizeof(block_id));
    }
}

static void assert_params_equal(const sampling_params *a, const sampling_params *b)
{
    assert_memory_equal(&a->temperature, &b->temperature, sizeof(float));
    assert_memory_equal(&a->top_p, &b->top_p, sizeof(float));
    assert_memory_equal(&a->min_p, &b->min_p, sizeof(float));
    assert_memory_equal(&a->repetition_penalty, &b->repetition_penalty, sizeof(float));
    assert_memory_equal(&a->presence_penalty, &b->presence_penalty, sizeof(float));
    assert_memory_equal(&a->frequency_penalty, &b->frequency_penalty, sizeof(float));
    assert_int_equal(a->top_k, b->top_k);
    assert_true(a->seed == b->seed);
    assert_int_equal(a->choice_idx, b->choice_idx);
    assert_int_equal(a->n_logprobs, b->n_logprobs);
    assert_int_equal(a->min_tokens, b->min_tokens);
    assert_int_equal(a->n_stop_ids, b->n_stop_ids);
    if (a->n_stop_ids > 0)
        assert_memory_equal(a->stop_ids, b->stop_ids, (size_t)a->n_stop_ids * sizeof(token_id));
    assert_int_equal(a->n_forced, b->n_forced);
    assert_memory_equal(a->forced, b->forced, sizeof(a->forced));
    assert_int_equal(a->n_logit_bias, b->n_logit_bias);
    if (a->n_logit_bias > 0)
        assert_memory_equal(a->logit_bias, b->logit_bias,
                            (size_t)a->n_logit_bias * sizeof(logit_bias));
}

static void assert_steps_equal(const scheduler_output *a, const scheduler_output *b)
{
    assert_true(a->step_id == b->step_id);
    assert_int_equal(a->total_scheduled_tokens, b->total_scheduled_tokens);
    assert_int_equal(a->n_groups, b->n_groups);
    assert_memory_equal(a->n_common_prefix_blocks, b->n_common_prefix_blocks,
                        sizeof a->n_common_prefix_blocks);
    assert_int_equal(a->n_new, b->n_new);
    for (int i = 0; i < a->n_new; i++) {
        const new_request_msg *x = &a->new_requests[i];
        const new_request_msg *y = &b->new_requests[i];
        assert_true(x->request_id == y->request_id && x->request_epoch == y->request_epoch);
        assert_int_equal(x->n_prompt_tokens, y->n_prompt_tokens);
        assert_int_equal(x->n_computed_tokens, y->n_computed_tokens);
        assert_int_equal(x->n_scheduled_tokens, y->n_scheduled_tokens);
        assert_int_equal(x->n_tokens, y->n_tokens);
        assert_memory_equal(x->tokens, y->tokens, (size_t)x->n_tokens * sizeof(token_id));
        assert_params_equal(&x->params, &y->params);
        assert_int_equal(x->n_encoder_tokens, y->n_encoder_tokens);
        if (x->n_encoder_tokens > 0)
            assert_memory_equal(x->encoder_tokens, y->encoder_tokens,
                                (size_t)x->n_encoder_tokens * sizeof(token_id));
        assert_blocks_equal(&x->blocks, &y->blocks);
    }
    assert_int_equal(a->n_cached, b->n_cached);
    for (int i = 0; i < a->n_cached; i++) {
        const cached_request_msg *x = &a->cached_requests[i];
        const cached_request_msg *y = &b->cached_requests[i];
        assert_true(x->request_id == y->request_id);
        assert_int_equal(x->n_computed_tokens, y->n_computed_tokens);
        assert_int_equal(x->n_scheduled_tokens, y->n_scheduled_tokens);
        assert_int_equal(x->n_draft_tokens, y->n_draft_tokens);
        assert_int_equal(x->first_draft_token, y->first_draft_token);
    }
    assert_int_equal(a->n_draft_tokens, b->n_draft_tokens);
    for (int i = 0; i < a->n_draft_tokens; i++)
        assert_int_equal(a->draft_tokens[i], b->draft_tokens[i]);
    assert_int_equal(a->n_appends, b->n_appends);
    for (int i = 0; i < a->n_appends; i++) {
        assert_true(a->appends[i].request_id == b->appends[i].request_id);
        assert_blocks_equal(&a->appends[i].blocks, &b->appends[i].blocks);
    }
    assert_int_equal(a->n_finished, b->n_finished);
    if (a->n_finished > 0)
        assert_memory_equal(a->finished_ids, b->finished_ids, (size_t)a->n_finished * 8);
    assert_int_equal(a->n_preempted, b->n_preempted);
    if (a->n_preempted > 0)
        assert_memory_equal(a->preempted_ids, b->preempted_ids, (size_t)a->n_preempted * 8);
    assert_int_equal(a->n_blocks_to_zero, b->n_blocks_to_zero);
    if (a->n_blocks_to_zero > 0)
        assert_memory_equal(a->blocks_to_zero, b->blocks_to_zero,
                            (size_t)a->n_blocks_to_zero * sizeof(block_id));
    assert_int_equal(a->n_transfers, b->n_transfers);
    for (int i = 0; i < a->n_transfers; i++) {
        const kv_transfer_msg *x = &a->transfers[i];
        const kv_transfer_msg *y = &b->transfers[i];
        assert_true(x->job_id == y->job_id && x->kind == y->kind && x->n_blocks == y->n_blocks);
        if (x->n_blocks > 0) {
            assert_memory_equal(x->device_blocks, y->device_blocks, (size_t)x->n_blocks * 4);
            assert_memory_equal(x->medium_blocks, y->medium_blocks, (size_t)x->n_blocks * 4);
            assert_memory_equal(x->tags, y->tags, (size_t)x->n_blocks * 8);
        }
    }
    assert_int_equal(a->n_encoder_inputs, b->n_encoder_inputs);
    for (int i = 0; i < a->n_encoder_inputs; i++)
        assert_memory_equal(&a->encoder_inputs[i], &b->encoder_inputs[i],
                            sizeof(encoder_input_msg));
    assert_int_equal(a->grammar_bitmask_bytes, b->grammar_bitmask_bytes);
    if (a->grammar_bitmask_bytes > 0)
        assert_memory_equal(a->grammar_bitmask, b->grammar_bitmask, a->grammar_bitmask_bytes);
}

static void test_scheduler_output_round_trip(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 500; seed++) {
        scheduler_output in;
        scheduler_output out;
        pgd_why why = {0};
        start(seed);
        sample_step(&arena_, &in);
        frame f = frame_encode(WIRE_STEP, &scheduler_output_record, &in);
        assert_true(f.n_bytes <= scheduler_output_max_frame_bytes(&arena_.limits));
        pgd_err err =
            scheduler_output_decode(&out, &scratch_, f.data, f.n_bytes, &arena_.limits, &why);
        if (err != PGD_OK)
            fail_msg("seed %llu: %s", (unsigned long long)seed, why.text);
        assert_steps_equal(&in, &out);
        /* plain arrays are used where they lie */
        if (out.n_new > 0)
            assert_true((const uint8_t *)out.new_requests[0].tokens > f.data &&
                        (const uint8_t *)out.new_requests[0].tokens < f.data + f.n_bytes);
        free(f.data);
    }
}

static void test_scheduler_output_hostile(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        scheduler_output in;
        start(seed * 1000);
        sample_step(&arena_, &in);
        frame f = frame_encode(WIRE_STEP, &scheduler_output_record, &in);
        check_frame_hostile(f, WIRE_STEP, &scheduler_output_record, decode_step, &scratch_,
                            &arena_.limits);
        free(f.data);
    }
}

/* One request each, valid as they stand; the rules below break them one at a time. */
static const token_id TOKENS[4] = {1, 2, 3, 4};
static const block_id BLOCKS[2] = {3, 4};

static new_request_msg one_new(void)
{
    new_request_msg n = {.request_id = 1,
                         .n_prompt_tokens = 4,
                         .n_tokens = 4,
                         .tokens = TOKENS,
                         .n_scheduled_tokens = 4,
                         .params = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1}};
    for (int32_t g = 0; g < arena_.limits.n_groups; g++) {
        n.blocks.n_blocks[g] = 1;
        n.blocks.ids[g] = BLOCKS;
    }
    return n;
}

static void expect(const new_request_msg *n, const cached_request_msg *c, int32_t total,
                   const char *why_part)
{
    scheduler_output out = {
        .step_id = 1, .total_scheduled_tokens = total, .n_groups = arena_.limits.n_groups};
    scheduler_output back;
    pgd_why why = {0};
    out.n_new = n != NULL;
    out.new_requests = n;
    out.n_cached = c != NULL;
    out.cached_requests = c;
    frame f = frame_encode(WIRE_STEP, &scheduler_output_record, &out);
    pgd_err err =
        scheduler_output_decode(&back, &scratch_, f.data, f.n_bytes, &arena_.limits, &why);
    free(f.data);
    if (why_part == NULL) {
        if (err != PGD_OK)
            fail_msg("%s", why.text);
        return;
    }
    assert_int_equal(err, PGD_EPROTO);
    if (strstr(why.text, why_part) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", why_part, why.text);
}

static void test_scheduler_output_rules_new(void **state)
{
    (void)state;
    start(3);
    new_request_msg n = one_new();
    expect(&n, NULL, 4, NULL);
    expect(&n, NULL, 5, "total_scheduled_tokens");
    n.n_scheduled_tokens = 0;
    expect(&n, NULL, 0, "n_scheduled_tokens");
    n.n_scheduled_tokens = -1;
    expect(&n, NULL, -1, "total_scheduled_tokens");
    n = one_new();
    n.n_computed_tokens = 1;
    expect(&n, NULL, 4, "n_computed + n_scheduled");
    n = one_new();
    n.n_prompt_tokens = 5;
    expect(&n, NULL, 4, "n_prompt_tokens");
    n = one_new();
    n.blocks.n_blocks[0] = 0;
    expect(&n, NULL, 4, "expected blocks for 4 tokens");
    n = one_new();
    n.params.n_logprobs = arena_.limits.max_logprobs + 1;
    expect(&n, NULL, 4, "n_logprobs");
    n = one_new();
    n.params.temperature = NAN;
    expect(&n, NULL, 4, "temperature");
    n.params.temperature = INFINITY;
    expect(&n, NULL, 4, "temperature");
    n = one_new();
    n.params.top_p = 0;
    expect(&n, NULL, 4, "top_p");
    n = one_new();
    static const token_id bad_tokens[4] = {1, 2, 300, 4};
    n.tokens = bad_tokens;
    expect(&n, NULL, 4, "new_request.tokens: expected 0..299, got 300");
    n = one_new();
    static const block_id bad_blocks[1] = {50};
    n.blocks.ids[0] = bad_blocks;
    expect(&n, NULL, 4, "blocks");
    n = one_new();
    static const logit_bias bias = {3, NAN};
    n.params.n_logit_bias = 1;
    n.params.logit_bias = &bias;
    expect(&n, NULL, 4, "logit_bias");
}

static void test_scheduler_output_rules_cached(void **state)
{
    (void)state;
    start(3);
    cached_request_msg c = {.request_id = 9, .n_computed_tokens = 90, .n_scheduled_tokens = 6};
    expect(NULL, &c, 6, NULL);
    c.n_computed_tokens = 91;
    expect(NULL, &c, 6, "a context of at most 96");
    c = (cached_request_msg){.request_id = 9, .n_scheduled_tokens = 2, .n_draft_tokens = 2};
    expect(NULL, &c, 2, "drafts");
    c = (cached_request_msg){.request_id = 9, .n_scheduled_tokens = 2, .first_draft_token = 1};
    expect(NULL, &c, 2, "expected its drafts from 0 on, got 1");
    expect(NULL, NULL, 0, NULL);
    c.n_draft_tokens = 0;
    arena_.limits.n_groups++;
    scheduler_output out = {.step_id = 1, .n_groups = arena_.limits.n_groups - 1};
    scheduler_output back;
    frame f = frame_encode(WIRE_STEP, &scheduler_output_record, &out);
    assert_int_equal(
        scheduler_output_decode(&back, &scratch_, f.data, f.n_bytes, &arena_.limits, NULL),
        PGD_EPROTO);
    free(f.data);
}

static void test_scheduler_output_rules_transfers(void **state)
{
    (void)state;
    static block_id devices[KV_TRANSFER_MAX_BLOCKS + 1];
    static int32_t mediums[KV_TRANSFER_MAX_BLOCKS + 1];
    static uint64_t tags[KV_TRANSFER_MAX_BLOCKS + 1];
    static const int32_t negative[] = {-1};
    static const block_id null_block[] = {0};
    start(5);
    for (size_t i = 0; i < PGD_ARRAY_LEN(devices); i++)
        devices[i] = arena_.limits.max_block_id;
    const kv_transfer_msg load = {1, KV_TRANSFER_LOAD, 1, devices, mediums, tags};
    const kv_transfer_msg flush = {1, KV_TRANSFER_FLUSH, 0, NULL, NULL, NULL};
    const struct {
        kv_transfer_msg t[2];
        const char *why_part; /* NULL: valid */
    } cases[] = {
        {{load, flush}, NULL},
        {{{1, KV_TRANSFER_LOAD, 0, NULL, NULL, NULL}, flush}, "expected blocks for a load"},
        {{{1, KV_TRANSFER_STORE, 0, NULL, NULL, NULL}, flush}, "expected blocks for a load"},
        {{{1, KV_TRANSFER_FLUSH, 1, devices, mediums, tags}, flush}, "got 1 for kind 3"},
        {{{1, KV_TRANSFER_LOAD, 1, null_block, mediums, tags}, flush}, "expected 1..49, got 0"},
        {{{1, KV_TRANSFER_LOAD, 1, devices, negative, tags}, flush}, "medium_blocks"},
        {{{1, (kv_transfer_kind)4, 1, devices, mediums, tags}, flush}, "kind"},
        {{{1, KV_TRANSFER_STORE, KV_TRANSFER_MAX_BLOCKS, devices, mediums, tags}, flush}, NULL},
        {{{1, KV_TRANSFER_STORE, KV_TRANSFER_MAX_BLOCKS, devices, mediums, tags}, load},
         "at most 65536 blocks to be transferred, got 65537"},
        {{{1, KV_TRANSFER_STORE, KV_TRANSFER_MAX_BLOCKS + 1, devices, mediums, tags}, load},
         "device_blocks"},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        scheduler_output out = {
            .n_groups = arena_.limits.n_groups, .n_transfers = 2, .transfers = cases[i].t};
        scheduler_output back;
        pgd_why why = {0};
        frame f = frame_encode(WIRE_STEP, &scheduler_output_record, &out);
        pgd_err err =
            scheduler_output_decode(&back, &scratch_, f.data, f.n_bytes, &arena_.limits, &why);
        if ((err == PGD_OK) != (cases[i].why_part == NULL) ||
            (err != PGD_OK && strstr(why.text, cases[i].why_part) == NULL))
            fail_msg("case %zu: %s", i, err == PGD_OK ? "accepted" : why.text);
        assert_true(f.n_bytes <= scheduler_output_max_frame_bytes(&arena_.limits) || i == 9);
        free(f.data);
    }
}

/* An append belongs to a continuing request, and comes in their order, once. */
static void test_scheduler_output_rules_appends(void **state)
{
    (void)state;
    static const struct {
        uint64_t ids[2];
        int32_t n_ids;
        bool is_valid;
    } cases[] = {{{1, 2}, 2, true},  {{2}, 1, true},     {{0}, 0, true},
                 {{2, 1}, 2, false}, {{1, 1}, 2, false}, {{3}, 1, false}};
    start(4);
    const cached_request_msg c[2] = {{.request_id = 1, .n_scheduled_tokens = 1},
                                     {.request_id = 2, .n_scheduled_tokens = 1}};
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        block_append_msg appends[2] = {{.request_id = cases[i].ids[0]},
                                       {.request_id = cases[i].ids[1]}};
        scheduler_output out = {.total_scheduled_tokens = 2,
                                .n_groups = arena_.limits.n_groups,
                                .n_cached = 2,
                                .cached_requests = c,
                                .n_appends = cases[i].n_ids,
                                .appends = appends};
        scheduler_output back;
        pgd_why why = {0};
        frame f = frame_encode(WIRE_STEP, &scheduler_output_record, &out);
        pgd_err err =
            scheduler_output_decode(&back, &scratch_, f.data, f.n_bytes, &arena_.limits, &why);
        free(f.data);
        assert_int_equal(err, cases[i].is_valid ? PGD_OK : PGD_EPROTO);
        assert_int_equal(strstr(why.text, "order of the continuing") != NULL, !cases[i].is_valid);
    }
}

/* More requests than the worker has rows for: refused before the scratch buffer is written. */
static void test_scheduler_output_too_many(void **state)
{
    (void)state;
    start(4);
    cached_request_msg c[13];
    for (int i = 0; i < 13; i++)
        c[i] = (cached_request_msg){.request_id = (uint64_t)i, .n_scheduled_tokens = 1};
    scheduler_output out = {.total_scheduled_tokens = 13,
                            .n_groups = arena_.limits.n_groups,
                            .n_cached = 13,
                            .cached_requests = c};
    scheduler_output back;
    pgd_why why = {0};
    frame f = frame_encode(WIRE_STEP, &scheduler_output_record, &out);
    assert_int_equal(
        scheduler_output_decode(&back, &scratch_, f.data, f.n_bytes, &arena_.limits, &why),
        PGD_EPROTO);
    assert_non_null(strstr(why.text, "expected 0..12 elements, got 13"));
    free(f.data);
    new_request_msg n = one_new();
    out.n_cached = 12;
    out.n_new = 1;
    out.new_requests = &n;
    out.total_scheduled_tokens = 16;
    f = frame_encode(WIRE_STEP, &scheduler_output_record, &out);
    assert_int_equal(
        scheduler_output_decode(&back, &scratch_, f.data, f.n_bytes, &arena_.limits, &why),
        PGD_EPROTO);
    assert_non_null(strstr(why.text, "at most 12 requests"));
    free(f.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler_output_round_trip),
        cmocka_unit_test(test_scheduler_output_hostile),
        cmocka_unit_test(test_scheduler_output_rules_new),
        cmocka_unit_test(test_scheduler_output_rules_cached),
        cmocka_unit_test(test_scheduler_output_rules_appends),
        cmocka_unit_test(test_scheduler_output_rules_transfers),
        cmocka_unit_test(test_scheduler_output_too_many),
    };
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(scratch_.data);
    return n_failed;
}
