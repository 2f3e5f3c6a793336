/* Scheduler: what the traces and the other files leave open of the rules SC, CPX, AL and UP, each
 * test by the number of its rule. */
#include "tests/unit/scheduler_fixture.h"

static fix f;

static void test_scheduler_rules_sc1_prompts_and_decodes_share_a_step(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.max_num_batched_tokens = 50;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 10);
    FIX_ADD(&f, .n_prompt = 100);
    FIX_ADD(&f, .n_prompt = 30);
    const int32_t want[5][3] = {{10, 40, 0}, {1, 49, 0}, {1, 11, 30}, {1, 1, 1}, {1, 1, 1}};
    for (int step = 0; step < 5; step++) {
        assert_true(fix_schedule(&f));
        for (uint64_t id = 0; id < 3; id++)
            assert_int_equal(fix_scheduled(&f, id), want[step][id]);
        fix_answer_all(&f);
    }
    fix_deinit(&f);
}

/* SC2f: who has nothing to do is skipped, those behind it run. */
static void test_scheduler_rules_sc2f_skip_and_keep_going(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.max_num_batched_tokens = 50;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 10);
    FIX_ADD(&f, .n_prompt = 100);
    assert_true(fix_schedule(&f)); /* 10 and 40 */
    assert_true(fix_schedule(&f)); /* 0 waits for its token */
    assert_int_equal(fix_scheduled(&f, 0), 0);
    assert_int_equal(fix_scheduled(&f, 1), 50);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 1);
    assert_int_equal(fix_scheduled(&f, 1), 10);
    fix_answer_all(&f);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* SC2g: only a victim that is the request itself ends the loop; SC3: FCFS takes the newest. */
static void test_scheduler_rules_sc3_fcfs_takes_the_newest(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 7;
    opts.enable_prefix_caching = false;
    fix_init(&f, opts);
    for (int i = 0; i < 3; i++)
        FIX_ADD(&f, .n_prompt = 32, .max_tokens = 20);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_n_free(&f), 0);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f)); /* 0 and 1 need a block each: 2 has two */
    assert_int_equal(f.out.n_preempted, 1);
    assert_int_equal(f.out.preempted_ids[0], 2);
    assert_int_equal(fix_scheduled(&f, 0), 1);
    assert_int_equal(fix_scheduled(&f, 1), 1);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* SC3: the greatest (priority, arrival), wherever it is in the list. */
static void test_scheduler_rules_sc3_priority_takes_the_last_by_key(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 9;
    opts.policy = SCHEDULER_PRIORITY;
    opts.enable_prefix_caching = false;
    fix_init(&f, opts);
    const uint64_t arrivals[4] = {7, 9, 8, 1};
    for (int i = 0; i < 4; i++) {
        FIX_ADD(&f, .n_prompt = i == 3 ? 31 : 29, .priority = i == 3 ? 0 : 5,
                .arrival_us = arrivals[i], .max_tokens = 30);
        fix_step(&f); /* the list is in the order of their ids */
    }
    while (f.out.n_preempted == 0)
        fix_step(&f);
    assert_int_equal(f.out.preempted_ids[0], 1); /* not the last of the list, 3, nor 2 */
    fix_deinit(&f);
}

static void test_scheduler_rules_sc4_preemption_keeps_tokens_and_counts(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 8;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 64, .max_tokens = 40);
    request *r1 = FIX_ADD(&f, .n_prompt = 47, .max_tokens = 10);
    fix_step(&f);
    assert_int_equal(r1->num_cached_tokens, 0);
    fix_step(
        &f); /* 0 goes to 66: a fifth block of the seven; 1 has no fourth one, it preempts itself */
    assert_int_equal(r1->status, REQUEST_PREEMPTED);
    assert_int_equal(r1->num_preemptions, 1);
    assert_int_equal(r1->num_computed_tokens, 0);
    assert_int_equal(r1->n_tokens, 48);
    assert_int_equal(r1->kv_row, -1);
    assert_int_equal(r1->n_block_hashes, 3); /* ST5: they outlive the blocks */
    assert_int_equal(fix_n_free(&f), 2);
    scheduler_stats stats;
    scheduler_get_stats(f.s, &stats);
    assert_int_equal(stats.n_preemptions, 1);
    assert_true(scheduler_finish_request(f.s, 0, REQUEST_FINISHED_ABORTED));
    assert_true(fix_schedule(&f)); /* finds two blocks of its own again */
    assert_int_equal(fix_new_msg(&f, 1)->n_tokens, 48);
    assert_int_equal(fix_new_msg(&f, 1)->n_computed_tokens, 32);
    assert_int_equal(r1->num_cached_tokens, 0); /* SC5g: written once */
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* SC5: a step that had to preempt admits nobody, though there may be room now, even for one that
 * comes before the victim. */
static void test_scheduler_rules_sc5_no_admission_after_a_preemption(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 9;
    opts.enable_prefix_caching = false;
    opts.policy = SCHEDULER_PRIORITY;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 64, .max_tokens = 10, .priority = 5, .arrival_us = 1);
    FIX_ADD(&f, .n_prompt = 64, .max_tokens = 10, .priority = 5, .arrival_us = 2);
    fix_step(&f);
    request *r2 = FIX_ADD(&f, .n_prompt = 5, .priority = 0);
    assert_true(fix_schedule(&f)); /* 1 gives its four blocks for one */
    assert_int_equal(f.out.n_preempted, 1);
    assert_int_equal(f.out.n_new, 0);
    assert_int_equal(f.s->n_running, 1);
    assert_int_equal(fix_n_free(&f), 3);
    assert_int_equal(r2->status, REQUEST_WAITING);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 2), 5);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_rules_sc5_stops_at_max_num_seqs(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.max_num_seqs = 2;
    fix_init(&f, opts);
    for (int i = 0; i < 4; i++)
        FIX_ADD(&f, .n_prompt = 5, .max_tokens = 1 + 3 * (i == 1));
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, 2);
    fix_answer_all(&f);
    assert_int_equal(f.n_finished[0], 1);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, 1);
    assert_int_equal(f.out.new_requests[0].request_id, 2);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* SC5c: without chunks nothing overtakes what does not fit this step; with a threshold it is the
 * part that must fit. */
static void test_scheduler_rules_sc5c_without_chunks(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.enable_chunked_prefill = false;
    opts.max_num_batched_tokens = 100;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 60, .max_tokens = 5);
    FIX_ADD(&f, .n_prompt = 60, .max_tokens = 5);
    FIX_ADD(&f, .n_prompt = 5, .max_tokens = 5);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, 1);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 1), 60);
    assert_int_equal(fix_scheduled(&f, 2), 5);
    fix_answer_all(&f);
    fix_deinit(&f);
    opts.long_prefill_token_threshold = 40;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 60, .max_tokens = 5);
    FIX_ADD(&f, .n_prompt = 60, .max_tokens = 5);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 40);
    assert_int_equal(fix_scheduled(&f, 1), 40);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* SC5f: the head that finds no room holds up those behind it, under both policies. */
static void test_scheduler_rules_sc5f_head_of_line(void **state)
{
    (void)state;
    for (int policy = SCHEDULER_FCFS; policy <= SCHEDULER_PRIORITY; policy++) {
        scheduler_opts opts = fix_opts();
        opts.n_blocks = 11;
        opts.policy = (scheduler_policy)policy;
        fix_init(&f, opts);
        FIX_ADD(&f, .n_prompt = 90, .arrival_us = 1);
        FIX_ADD(&f, .n_prompt = 90, .arrival_us = 2);
        FIX_ADD(&f, .n_prompt = 5, .arrival_us = 3);
        for (int i = 0; i < 3; i++) {
            assert_true(fix_schedule(&f));
            assert_int_equal(f.out.n_new + f.out.n_cached, 1);
            fix_answer_all(&f);
        }
        fix_deinit(&f);
    }
}

/* SC8: without the gate the first chunk is enough, and the price is paid later. */
static void test_scheduler_rules_sc8_without_the_gate(void **state)
{
    (void)state;
    for (int is_off = 0; is_off <= 1; is_off++) {
        scheduler_opts opts = fix_opts();
        opts.n_blocks = 11;
        opts.long_prefill_token_threshold = 32;
        opts.admit_partly = is_off;
        opts.enable_prefix_caching = false;
        fix_init(&f, opts);
        FIX_ADD(&f, .n_prompt = 112, .max_tokens = 2);
        FIX_ADD(&f, .n_prompt = 112, .max_tokens = 2);
        assert_true(fix_schedule(&f));
        assert_int_equal(f.out.n_new, 1 + is_off);
        fix_answer_all(&f);
        for (int i = 0; i < 20 && scheduler_has_work(f.s); i++)
            fix_step(&f);
        scheduler_stats stats;
        scheduler_get_stats(f.s, &stats);
        assert_int_equal(stats.n_preemptions > 0, is_off);
        assert_int_equal(f.n_tokens[0], 2);
        assert_int_equal(f.n_tokens[1], 2);
        fix_deinit(&f);
    }
}

/* SC9: computed positions advance when a step is made, not when it is answered. */
static void test_scheduler_rules_sc9_advances_at_once(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.max_num_batched_tokens = 30;
    opts.async = true;
    fix_init(&f, opts);
    request *r = FIX_ADD(&f, .n_prompt = 70, .max_tokens = 9);
    const int32_t want[4] = {30, 60, 70, 71};
    const int32_t n_placeholders[4] = {0, 0, 1, 2};
    for (int i = 0; i < 4; i++) {
        assert_true(fix_schedule(&f));
        assert_int_equal(r->num_computed_tokens, want[i]);
        assert_int_equal(r->n_output_placeholders, n_placeholders[i]);
        assert_int_equal(r->n_in_flight, i + 1);
    }
    while (f.s->n_records > 0)
        fix_answer_all(&f);
    assert_int_equal(f.n_tokens[0], 2);
    fix_deinit(&f);
}

/* CPX1: leading blocks of running[0] that every holder shares, scheduled or not. */
static void test_scheduler_rules_cpx1_common_prefix(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.max_num_batched_tokens = 200;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 100, .n_common = 80, .max_tokens = 50);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_common_prefix_blocks[0], 7); /* alone it shares all with all */
    fix_answer_all(&f);
    FIX_ADD(&f, .n_prompt = 70, .n_common = 50, .max_tokens = 50);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_common_prefix_blocks[0], 3);
    fix_answer_all(&f);
    FIX_ADD(&f, .n_prompt = 400, .n_common = 90, .max_tokens = 1);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_common_prefix_blocks[0], 3);
    assert_true(fix_schedule(&f)); /* only 2 has something to do; 1 counts still */
    assert_int_equal(f.out.n_cached, 1);
    assert_int_equal(f.out.n_common_prefix_blocks[0], 3);
    fix_answer_all(&f);
    fix_answer_all(&f);
    FIX_ADD(&f, .n_prompt = 5, .max_tokens = 50); /* a holder without the prefix */
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_common_prefix_blocks[0], 0);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* CPX1: full attention alone has a common prefix; each group has its own count. */
static void test_scheduler_rules_cpx1_per_group(void **state)
{
    (void)state;
    const kv_group_spec groups[] = {
        {.ops = kv_group_ops_of(ATTENTION_SLIDING), .block_size = 16, .window = 40},
        {.ops = kv_group_ops_of(ATTENTION_FULL), .block_size = 16},
    };
    scheduler_opts opts = fix_opts();
    opts.groups = groups;
    opts.n_groups = 2;
    fix_init(&f, opts);
    for (int i = 0; i < 3; i++)
        FIX_ADD(&f, .n_prompt = 100, .n_common = 80);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_groups, 2);
    assert_int_equal(f.out.n_common_prefix_blocks[0], 0);
    assert_int_equal(f.out.n_common_prefix_blocks[1], 5);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* AL10: whoever goes before it had blocks changes nothing. */
static void test_scheduler_rules_al10_abort_before_blocks(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.max_num_seqs = 1;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 20);
    FIX_ADD(&f, .n_prompt = 20);
    fix_step(&f);
    int32_t n_free = fix_n_free(&f);
    assert_true(scheduler_finish_request(f.s, 1, REQUEST_FINISHED_ABORTED));
    assert_false(scheduler_finish_request(f.s, 1, REQUEST_FINISHED_ABORTED));
    assert_int_equal(fix_n_free(&f), n_free);
    assert_int_equal(f.n_released[1], 1);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_finished, 0); /* the worker never knew it */
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* UP2: a chunk inside the prompt yields nothing, and no result may claim that it did. */
static void test_scheduler_rules_up2_nothing_inside_the_prompt(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.max_num_batched_tokens = 30;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 50);
    assert_true(fix_schedule(&f));
    request_result_msg res = {.request_id = 0, .request_epoch = 1, .n_tokens = 1, .tokens = {5}};
    step_result result = {.step_id = 1, .n_results = 1, .results = &res};
    assert_int_equal(scheduler_update(f.s, &result), PGD_EPROTO);
    result.n_results = 0;
    assert_int_equal(scheduler_update(f.s, &result), PGD_OK);
    assert_int_equal(f.n_tokens[0], 0);
    fix_step(&f);
    assert_int_equal(f.n_tokens[0], 1);
    fix_deinit(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler_rules_sc1_prompts_and_decodes_share_a_step),
        cmocka_unit_test(test_scheduler_rules_sc2f_skip_and_keep_going),
        cmocka_unit_test(test_scheduler_rules_sc3_fcfs_takes_the_newest),
        cmocka_unit_test(test_scheduler_rules_sc3_priority_takes_the_last_by_key),
        cmocka_unit_test(test_scheduler_rules_sc4_preemption_keeps_tokens_and_counts),
        cmocka_unit_test(test_scheduler_rules_sc5_no_admission_after_a_preemption),
        cmocka_unit_test(test_scheduler_rules_sc5_stops_at_max_num_seqs),
        cmocka_unit_test(test_scheduler_rules_sc5c_without_chunks),
        cmocka_unit_test(test_scheduler_rules_sc5f_head_of_line),
        cmocka_unit_test(test_scheduler_rules_sc8_without_the_gate),
        cmocka_unit_test(test_scheduler_rules_sc9_advances_at_once),
        cmocka_unit_test(test_scheduler_rules_cpx1_common_prefix),
        cmocka_unit_test(test_scheduler_rules_cpx1_per_group),
        cmocka_unit_test(test_scheduler_rules_al10_abort_before_blocks),
        cmocka_unit_test(test_scheduler_rules_up2_nothing_inside_the_prompt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
