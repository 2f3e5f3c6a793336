/* Scheduler: speculation, that is trace H22 and the rules SC2i, AS2, AS3, UP3, UP8, SD1, SD6, SD8.
 *
 * "Kept" drafts are the worker's (async): the scheduler counts on num_speculative_tokens of them.
 * Otherwise they come with a result and go back with the next step. */
#include "tests/unit/scheduler_fixture.h"

static fix f;

static void init_kept(int32_t n_drafts)
{
    scheduler_opts opts = fix_opts();
    opts.async = true;
    opts.num_speculative_tokens = n_drafts;
    fix_init(&f, opts);
}

static scheduler_stats stats(void)
{
    scheduler_stats s;
    scheduler_get_stats(f.s, &s);
    return s;
}

static void expect_stats(int n_drafts, int n_tokens, int n_accepted, const int *per_pos)
{
    scheduler_stats s = stats();
    assert_int_equal(s.n_drafts, n_drafts);
    assert_int_equal(s.n_draft_tokens, n_tokens);
    assert_int_equal(s.n_accepted_tokens, n_accepted);
    for (int i = 0; i < PGD_MAX_DRAFT_TOKENS; i++)
        assert_int_equal(s.n_accepted_per_pos[i], i < 3 ? per_pos[i] : 0);
}

typedef struct h22 {
    int n_reqs;
    token_id drafts[2][3];
    int32_t n_drafts[2];
    token_id outputs[2][4];
    int32_t n_outputs[2];
    int want[3];
    int per_pos[3];
} h22;

static const h22 h22_examples[] = {
    {1, {{1, 2, 3}}, {3}, {{1, 2, 3, 4}}, {4}, {1, 3, 3}, {1, 1, 1}},
    {1, {{1, 2, 3}}, {3}, {{1, 5}}, {2}, {1, 3, 1}, {1, 0, 0}},
    {2, {{1, 2}, {3}}, {2, 1}, {{1, 2, 5}, {3, 4}}, {3, 2}, {2, 3, 3}, {2, 1, 0}},
    {2, {{1, 2, 3}, {4, 5, 6}}, {3, 3}, {{1, 2, 7}, {4, 8}}, {3, 2}, {2, 6, 3}, {2, 1, 0}},
    {1, {{0}}, {0}, {{5}}, {1}, {0, 0, 0}, {0, 0, 0}},
};

/* Answers the oldest step: as much of the lists as each sampled request has. */
static void answer_all(const token_id outputs[][4], const int32_t *n_outputs,
                       const token_id drafts[][3], const int32_t *n_drafts)
{
    request_result_msg results[2] = {0};
    const step_record *record = scheduler__record_at(f.s, 0);
    step_result result = {
        .step_id = record->step_id, .results = results, .n_results = record->n_entries};
    for (int32_t i = 0; i < record->n_entries; i++) {
        results[i].request_id = record->entries[i].request_id;
        results[i].request_epoch = record->entries[i].epoch;
        results[i].n_tokens = n_outputs[i];
        memcpy(results[i].tokens, outputs[i], sizeof outputs[i]);
        results[i].n_drafts = n_drafts[i];
        memcpy(results[i].drafts, drafts[i], sizeof drafts[i]);
    }
    assert_int_equal(scheduler_update(f.s, &result), PGD_OK);
    scheduler_check(f.s);
}

static void run_h22(const h22 *h, bool is_kept)
{
    static const token_id first[2][4] = {{9}, {9}};
    static const token_id none[2][3] = {{0}};
    if (is_kept)
        init_kept(3);
    else
        fix_init(&f, fix_opts());
    for (int i = 0; i < h->n_reqs; i++)
        FIX_ADD(&f, .n_prompt = 1);
    assert_true(fix_schedule(&f));
    answer_all(first, (const int32_t[]){1, 1}, h->drafts, h->n_drafts);
    assert_true(fix_schedule(&f));
    for (int i = 0; i < h->n_reqs; i++)
        assert_int_equal(fix_scheduled(&f, (uint64_t)i), 1 + (is_kept ? 3 : h->n_drafts[i]));
    answer_all(h->outputs, h->n_outputs, none, (const int32_t[]){0, 0});
    expect_stats(h->want[0], h->want[1], h->want[2], h->per_pos);
    /* A step without drafts adds nothing. */
    assert_true(fix_schedule(&f));
    answer_all(first, (const int32_t[]){1, 1}, none, (const int32_t[]){0, 0});
    expect_stats(h->want[0], h->want[1], h->want[2], h->per_pos);
    fix_deinit(&f);
}

static void test_scheduler_spec_h22_statistics(void **state)
{
    (void)state;
    for (size_t i = 0; i < PGD_ARRAY_LEN(h22_examples); i++)
        run_h22(&h22_examples[i], false);
}

/* The same when the worker keeps its drafts, of which it may have fewer than were counted on. */
static void test_scheduler_spec_h22_statistics_of_kept_drafts(void **state)
{
    (void)state;
    for (size_t i = 0; i < PGD_ARRAY_LEN(h22_examples); i++)
        run_h22(&h22_examples[i], true);
}

static void test_scheduler_spec_as2_counts_on_kept_drafts(void **state)
{
    (void)state;
    init_kept(3);
    request *r = FIX_ADD(&f, .n_prompt = 10, .max_tokens = 100);
    assert_true(fix_schedule(&f));
    assert_int_equal(r->n_output_placeholders, 1);
    assert_int_equal(r->n_draft_tokens, 3);
    for (int step = 0; step < 2; step++) { /* two more before the first result */
        assert_true(fix_schedule(&f));
        const cached_request_msg *msg = fix_cached_msg(&f, 0);
        assert_int_equal(msg->n_computed_tokens, 10 + 4 * step);
        assert_int_equal(msg->n_scheduled_tokens, 4);
        assert_int_equal(msg->n_draft_tokens, 3);
        assert_null(scheduler_output_drafts(&f.out, msg));
        assert_int_equal(r->n_output_placeholders, 1 + 4 * (step + 1));
        assert_int_equal(r->n_draft_tokens, 3);
    }
    fix_answer_all(&f);
    assert_int_equal(r->n_output_placeholders, 8);
    FIX_ANSWER(&f, 0, 10, 11); /* one of three accepted: UP3 */
    assert_int_equal(r->n_output_placeholders, 4);
    assert_int_equal(r->n_tokens, 13);
    assert_int_equal(r->num_computed_tokens - r->n_in_flight_tokens, r->n_tokens - 1);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_cached_msg(&f, 0)->n_computed_tokens, 16); /* 12 and the 4 in flight */
    FIX_ANSWER(&f, 0, 20, 21, 22, 23);
    FIX_ANSWER(&f, 0, 30);
    assert_int_equal(r->n_output_placeholders, 0);
    assert_int_equal(r->num_computed_tokens, r->n_tokens - 1);
    FIX_EXPECT_TOKENS(&f, 0, 7, 10, 11, 20, 21, 22, 23, 30);
    fix_deinit(&f);
}

/* AS2: who sits a step out has no drafts for the next one. */
static void test_scheduler_spec_as2_clears_stale_placeholders(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.async = true;
    opts.num_speculative_tokens = 3;
    opts.max_num_batched_tokens = 5;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 1, .max_tokens = 3);
    request *r1 = FIX_ADD(&f, .n_prompt = 2, .max_tokens = 50);
    request *r2 = FIX_ADD(&f, .n_prompt = 2, .max_tokens = 50);
    assert_true(fix_schedule(&f)); /* all three prompts */
    assert_int_equal(f.out.n_new, 3);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f)); /* 0: 1 + 1 drafts up to its limit; 1: 1 + 2 within the budget */
    assert_int_equal(fix_scheduled(&f, 0), 2);
    assert_int_equal(fix_scheduled(&f, 1), 3);
    assert_int_equal(fix_cached_msg(&f, 1)->n_draft_tokens, 2);
    assert_int_equal(fix_scheduled(&f, 2), 0);
    assert_int_equal(r1->n_draft_tokens, 3);
    assert_int_equal(r2->n_draft_tokens, 0);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f)); /* 0: its last one */
    assert_int_equal(fix_scheduled(&f, 0), 1);
    assert_int_equal(fix_scheduled(&f, 1), 4);
    fix_answer_all(&f);
    assert_int_equal(f.n_finished[0], 1);
    assert_true(scheduler_finish_request(f.s, 1, REQUEST_FINISHED_ABORTED));
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 2), 1); /* without drafts first */
    assert_int_equal(fix_cached_msg(&f, 2)->n_draft_tokens, 0);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 2), 4);
    fix_answer_all(&f);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_spec_sc2i_budget_cuts_kept_drafts(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.async = true;
    opts.num_speculative_tokens = 5;
    opts.max_num_batched_tokens = 4;
    fix_init(&f, opts);
    request *r = FIX_ADD(&f, .n_prompt = 4, .max_tokens = 50);
    assert_true(fix_schedule(&f));
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 4);
    assert_int_equal(fix_cached_msg(&f, 0)->n_draft_tokens, 3);
    assert_int_equal(r->n_output_placeholders, 5);
    fix_answer_all(&f);
    fix_answer_all(&f);
    assert_int_equal(r->n_output_placeholders, 0);
    assert_int_equal(r->num_computed_tokens, r->n_tokens - 1);
    fix_deinit(&f);
}

/* SD8, UP8: a prompt in chunks has no drafts until its last one is scheduled. */
static void test_scheduler_spec_sd8_none_inside_the_prompt(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.async = true;
    opts.num_speculative_tokens = 3;
    opts.long_prefill_token_threshold = 40;
    fix_init(&f, opts);
    request *r = FIX_ADD(&f, .n_prompt = 100);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(r->n_draft_tokens, 0);
        assert_true(fix_schedule(&f));
        assert_int_equal(fix_scheduled(&f, 0), i < 2 ? 40 : 20);
        if (i > 0)
            assert_int_equal(fix_cached_msg(&f, 0)->n_draft_tokens, 0);
        assert_int_equal(r->n_output_placeholders, i == 2);
    }
    assert_int_equal(r->n_draft_tokens, 3);
    for (int i = 0; i < 3; i++)
        fix_answer_all(&f);
    fix_deinit(&f);
}

/* SD6: rejected drafts leave their blocks with the request. */
static void test_scheduler_spec_sd6_blocks_of_rejected_drafts_stay(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.block_size = 4;
    fix_init(&f, opts);
    request *r = FIX_ADD(&f, .n_prompt = 4, .max_tokens = 100);
    assert_true(fix_schedule(&f));
    fix_answer(&f, 0, (const token_id[]){9}, 1, (const token_id[]){1, 2, 3, 4, 5, 6, 7}, 7);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_n_appended(&f, 0), 2);
    int32_t n_free = fix_n_free(&f);
    FIX_ANSWER(&f, 0, 20);
    assert_int_equal(r->num_computed_tokens, r->n_tokens - 1);
    assert_int_equal(fix_n_free(&f), n_free);
    for (int i = 0; i < 7; i++) { /* positions 5 to 11 */
        assert_true(fix_schedule(&f));
        assert_int_equal(fix_n_appended(&f, 0), 0);
        fix_answer_all(&f);
    }
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_n_appended(&f, 0), 1);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* SD1, SC5e: k slots beyond each step, but not in the first prefill; never beyond the longest
 * request, and counted when it is asked whether a request can ever fit. */
static void test_scheduler_spec_sd1_lookahead_slots(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.block_size = 4;
    opts.num_lookahead_tokens = 3;
    opts.max_model_len = 14;
    opts.n_blocks = 5;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 4, .max_tokens = 9);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_new_msg(&f, 0)->blocks.n_blocks[0], 1);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f)); /* 5 + 3 slots */
    assert_int_equal(fix_n_appended(&f, 0), 1);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f)); /* 6 + 3 */
    assert_int_equal(fix_n_appended(&f, 0), 1);
    fix_answer_all(&f);
    while (f.n_finished[0] == 0) /* 12 + 3 slots at the end, of which 14 can be of use */
        fix_step(&f);
    assert_int_equal(f.n_tokens[0], 9);
    fix_deinit(&f);
    /* With three blocks 12 tokens could be computed, but not drafted upon. */
    opts.n_blocks = 4;
    fix_init(&f, opts);
    assert_false(scheduler_can_ever_fit(f.s, 13));
    assert_true(scheduler_can_ever_fit(f.s, 10));
    fix_deinit(&f);
}

static void test_scheduler_spec_never_beyond_the_longest_request(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.async = true;
    opts.num_speculative_tokens = 4;
    opts.max_model_len = 20;
    fix_init(&f, opts);
    request *r = FIX_ADD(&f, .n_prompt = 10, .max_tokens = 100);
    assert_true(fix_schedule(&f));
    assert_true(fix_schedule(&f)); /* 10 to 14 */
    assert_true(fix_schedule(&f)); /* 15 to 18; 19 is never computed */
    assert_int_equal(fix_scheduled(&f, 0), 4);
    assert_int_equal(r->num_computed_tokens, 19);
    assert_false(fix_schedule(&f)); /* nothing is certain to be left */
    fix_answer_all(&f);
    FIX_ANSWER(&f, 0, 10, 11); /* three rejected */
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_cached_msg(&f, 0)->n_computed_tokens, 16);
    assert_int_equal(fix_scheduled(&f, 0), 1); /* it sat a step out: no drafts */
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 2);
    assert_int_equal(fix_cached_msg(&f, 0)->n_draft_tokens, 1);
    FIX_ANSWER(&f, 0, 20, 21, 22, 23);
    FIX_ANSWER(&f, 0, 30);
    assert_int_equal(r->num_computed_tokens, 19);
    assert_int_equal(r->n_tokens, 18);
    FIX_ANSWER(&f, 0, 40, 41);
    assert_int_equal(f.status[0], REQUEST_FINISHED_LENGTH_CAPPED);
    assert_int_equal(f.n_tokens[0], 10);
    fix_deinit(&f);
}

/* Preempted with two steps out: what they drew is kept, as many tokens as there are, and the next
 * life starts without drafts. */
static void test_scheduler_spec_preemption_with_drafts_in_flight(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.async = true;
    opts.num_speculative_tokens = 3;
    opts.n_blocks = 5;
    opts.enable_prefix_caching = false;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 24, .max_tokens = 30);
    request *r1 = FIX_ADD(&f, .n_prompt = 20, .max_tokens = 30);
    assert_true(fix_schedule(&f));
    assert_true(fix_schedule(&f)); /* 0 is at 28, 1 at 24 */
    assert_int_equal(fix_scheduled(&f, 1), 4);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f)); /* 32 and 28 */
    assert_true(fix_schedule(&f)); /* 0 needs a third block */
    assert_int_equal(f.out.n_preempted, 1);
    assert_int_equal(r1->status, REQUEST_PREEMPTED);
    assert_int_equal(r1->n_draft_tokens, 0);
    assert_int_equal(r1->n_output_placeholders, 0);
    FIX_ANSWER(&f, 1, 10, 11, 12);
    FIX_ANSWER(&f, 1, 20, 21, 22, 23);
    FIX_EXPECT_TOKENS(&f, 1, 7, 10, 11, 12, 20, 21, 22, 23);
    assert_int_equal(r1->status, REQUEST_PREEMPTED);
    assert_int_equal(stats().n_accepted_tokens, 2 + 3);
    assert_true(scheduler_finish_request(f.s, 0, REQUEST_FINISHED_ABORTED));
    assert_true(fix_schedule(&f));
    const new_request_msg *msg = fix_new_msg(&f, 1);
    assert_int_equal(msg->n_tokens, 28);
    assert_int_equal(msg->n_scheduled_tokens, 28);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_cached_msg(&f, 1)->n_draft_tokens, 3);
    while (f.s->n_records > 0)
        fix_answer_all(&f);
    assert_int_equal(r1->num_computed_tokens, r1->n_tokens - 1);
    fix_deinit(&f);
}

/* A victim that has its share of this step gives its drafts back too. */
static void test_scheduler_spec_unscheduled_victim_loses_its_drafts(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 5;
    opts.policy = SCHEDULER_PRIORITY;
    opts.enable_prefix_caching = false;
    fix_init(&f, opts);
    request *r0 = FIX_ADD(&f, .n_prompt = 20, .priority = 9);
    FIX_ADD(&f, .n_prompt = 31, .priority = 1);
    fix_step(&f);
    assert_true(fix_schedule(&f)); /* 1 writes position 31 */
    fix_answer(&f, 0, (const token_id[]){5}, 1, (const token_id[]){1, 2, 3}, 3);
    assert_int_equal(r0->n_draft_tokens, 3);
    assert_true(fix_schedule(&f)); /* 0 gets 4 tokens, then 1 needs a block */
    assert_int_equal(f.out.preempted_ids[0], 0);
    assert_null(fix_cached_msg(&f, 0));
    assert_int_equal(f.out.total_scheduled_tokens, 1);
    assert_int_equal(r0->n_draft_tokens, 0);
    fix_answer_all(&f);
    assert_int_equal(stats().n_drafts, 0);
    fix_deinit(&f);
}

/* A stop among accepted drafts while a further step is out. */
static void test_scheduler_spec_stop_with_a_step_in_flight(void **state)
{
    (void)state;
    init_kept(3);
    FIX_ADD(&f, .n_prompt = 30, .stop_id = 42);
    assert_true(fix_schedule(&f));
    fix_answer_all(&f);
    assert_true(fix_schedule(&f));
    assert_true(fix_schedule(&f));
    FIX_ANSWER(&f, 0, 10, 42, 12, 13);
    FIX_EXPECT_TOKENS(&f, 0, 7, 10, 42);
    assert_int_equal(f.status[0], REQUEST_FINISHED_STOPPED);
    assert_int_equal(fix_n_free(&f), 999);
    assert_int_equal(f.n_released[0], 0);
    FIX_ANSWER(&f, 0, 20, 21);
    assert_int_equal(f.n_tokens[0], 3);
    assert_int_equal(f.n_released[0], 1);
    /* Only what was known and computed is found again: 32 of 33 tokens, the last not computed. */
    assert_int_equal(block_pool_n_published(kv_manager_get_pool(f.s->kv)), 2);
    fix_deinit(&f);
}

/* UP3: no tokens are not "minus one accepted". */
static void test_scheduler_spec_up3_error_with_drafts(void **state)
{
    (void)state;
    init_kept(3);
    FIX_ADD(&f, .n_prompt = 10);
    assert_true(fix_schedule(&f));
    fix_answer_all(&f);
    assert_true(fix_schedule(&f));
    const step_record *record = scheduler__record_at(f.s, 0);
    request_result_msg res = {.request_id = 0,
                              .request_epoch = record->entries[0].epoch,
                              .error = REQUEST_ERROR_NAN_LOGITS};
    step_result result = {.step_id = record->step_id, .n_results = 1, .results = &res};
    assert_int_equal(scheduler_update(f.s, &result), PGD_OK);
    scheduler_check(f.s);
    assert_int_equal(f.status[0], REQUEST_FINISHED_ERROR);
    assert_int_equal(stats().n_drafts, 0);
    fix_deinit(&f);
}

static void test_scheduler_spec_lost_worker_takes_the_drafts_along(void **state)
{
    (void)state;
    init_kept(3);
    request *r = FIX_ADD(&f, .n_prompt = 10, .max_tokens = 50);
    assert_true(fix_schedule(&f));
    assert_true(fix_schedule(&f));
    fix_answer(&f, 0, (const token_id[]){9}, 1, (const token_id[]){1, 2, 3}, 3);
    scheduler_reset_worker(f.s);
    scheduler_check(f.s);
    assert_int_equal(r->n_draft_tokens, 0);
    assert_int_equal(r->n_held_drafts, 0);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_new_msg(&f, 0)->n_scheduled_tokens, 11);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_cached_msg(&f, 0)->n_draft_tokens, 3);
    fix_answer_all(&f);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_spec_faulty_results(void **state)
{
    (void)state;
    init_kept(2);
    FIX_ADD(&f, .n_prompt = 10);
    assert_true(fix_schedule(&f));
    fix_answer_all(&f);
    assert_true(fix_schedule(&f));
    const step_record *record = scheduler__record_at(f.s, 0);
    request_result_msg res = {
        .request_id = 0, .request_epoch = record->entries[0].epoch, .n_tokens = 4};
    step_result result = {.step_id = record->step_id, .n_results = 1, .results = &res};
    assert_int_equal(scheduler_update(f.s, &result), PGD_EPROTO);
    res.n_tokens = 0;
    assert_int_equal(scheduler_update(f.s, &result), PGD_EPROTO);
    res.n_tokens = 3;
    assert_int_equal(scheduler_update(f.s, &result), PGD_OK);
    fix_deinit(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler_spec_h22_statistics),
        cmocka_unit_test(test_scheduler_spec_h22_statistics_of_kept_drafts),
        cmocka_unit_test(test_scheduler_spec_as2_counts_on_kept_drafts),
        cmocka_unit_test(test_scheduler_spec_as2_clears_stale_placeholders),
        cmocka_unit_test(test_scheduler_spec_sc2i_budget_cuts_kept_drafts),
        cmocka_unit_test(test_scheduler_spec_sd8_none_inside_the_prompt),
        cmocka_unit_test(test_scheduler_spec_sd6_blocks_of_rejected_drafts_stay),
        cmocka_unit_test(test_scheduler_spec_sd1_lookahead_slots),
        cmocka_unit_test(test_scheduler_spec_never_beyond_the_longest_request),
        cmocka_unit_test(test_scheduler_spec_preemption_with_drafts_in_flight),
        cmocka_unit_test(test_scheduler_spec_unscheduled_victim_loses_its_drafts),
        cmocka_unit_test(test_scheduler_spec_stop_with_a_step_in_flight),
        cmocka_unit_test(test_scheduler_spec_up3_error_with_drafts),
        cmocka_unit_test(test_scheduler_spec_lost_worker_takes_the_drafts_along),
        cmocka_unit_test(test_scheduler_spec_faulty_results),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
