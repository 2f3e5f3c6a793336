/* Scheduler: preemption, resumption, priority, lost workers, admission. */
#include "tests/unit/scheduler_fixture.h"

static fix f;

static const block_pool *pool(void)
{
    return kv_manager_get_pool(f.s->kv);
}

/* Two requests of 80 tokens fill the 10 blocks; the next step takes r1's. */
static void begin_full_pool(bool is_async, bool enable_caching)
{
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 11;
    opts.async = is_async;
    opts.enable_prefix_caching = enable_caching;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 80, .max_tokens = 4);
    FIX_ADD(&f, .n_prompt = 80, .max_tokens = 4);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, 2);
    assert_int_equal(fix_n_free(&f), 0);
}

static void test_scheduler_so4_resumed_request_is_sent_as_new(void **state)
{
    (void)state;
    begin_full_pool(false, true);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f));
    request *r1 = scheduler_find(f.s, 1);
    assert_int_equal(r1->status, REQUEST_PREEMPTED);
    assert_int_equal(r1->num_computed_tokens, 0);
    assert_int_equal(f.out.n_new, 0);
    assert_int_equal(f.out.preempted_ids[0], 1);
    /* It does not come back while r0 needs the room. */
    fix_answer_all(&f);
    fix_step(&f);
    fix_step(&f);
    assert_int_equal(f.status[0], REQUEST_FINISHED_LENGTH_CAPPED);
    assert_true(fix_schedule(&f));
    const new_request_msg *msg = fix_new_msg(&f, 1);
    assert_non_null(msg);
    assert_int_equal(msg->request_epoch, 2);
    assert_int_equal(msg->n_prompt_tokens, 80);
    assert_int_equal(msg->n_tokens, 81);
    assert_int_equal(msg->tokens[80], 7);
    /* r0 took one of its five blocks (the last, which is evicted first): the other four are still
     * cached. */
    assert_int_equal(msg->n_computed_tokens, 64);
    assert_int_equal(msg->n_scheduled_tokens, 17);
    assert_int_equal(r1->num_cached_tokens, 0); /* of the first admission */
    assert_int_equal(r1->num_preemptions, 1);
    fix_answer_all(&f);
    fix_step(&f);
    fix_step(&f);
    FIX_EXPECT_TOKENS(&f, 1, 7, 7, 7, 7);
    fix_deinit(&f);
}

static void test_scheduler_as4_late_result_after_readmission_is_dropped(void **state)
{
    (void)state;
    begin_full_pool(true, true);
    assert_true(fix_schedule(&f)); /* r1 goes with its first token in flight */
    request *r1 = scheduler_find(f.s, 1);
    assert_int_equal(r1->status, REQUEST_PREEMPTED);
    assert_int_equal(r1->n_output_placeholders, 0);
    assert_int_equal(r1->n_in_flight, 1);
    assert_true(scheduler_finish_request(f.s, 0, REQUEST_FINISHED_ABORTED));
    assert_true(fix_schedule(&f)); /* r1 is back before its late result */
    assert_int_equal(fix_new_msg(&f, 1)->request_epoch, 2);
    assert_int_equal(fix_new_msg(&f, 1)->n_tokens, 80);
    assert_int_equal(r1->n_in_flight, 2);
    FIX_ANSWER(&f, 1, 41);
    assert_int_equal(f.n_tokens[1], 0); /* old life */
    assert_int_equal(r1->n_output_placeholders, 1);
    fix_answer_all(&f); /* a step without r1; r0's last one */
    assert_int_equal(f.n_released[0], 1);
    FIX_ANSWER(&f, 1, 42);
    FIX_EXPECT_TOKENS(&f, 1, 42);
    assert_int_equal(r1->n_output_placeholders, 0);
    fix_deinit(&f);
}

static void test_scheduler_up4_late_result_may_finish_a_preempted_request(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 11;
    opts.async = true;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 78, .max_tokens = 8);
    FIX_ADD(&f, .n_prompt = 78, .max_tokens = 2);
    assert_true(fix_schedule(&f)); /* 78 */
    assert_true(fix_schedule(&f)); /* 79 */
    fix_answer_all(&f);
    FIX_EXPECT_TOKENS(&f, 1, 7);
    assert_true(fix_schedule(&f)); /* r0: 80; r1 has its last one in flight */
    assert_true(fix_schedule(&f)); /* r0: 81 needs a sixth block */
    request *r1 = scheduler_find(f.s, 1);
    assert_int_equal(r1->status, REQUEST_PREEMPTED);
    FIX_ANSWER(&f, 1, 8);
    /* The late token was its last: it finishes from the waiting queue and the worker is told
     * nothing more. */
    FIX_EXPECT_TOKENS(&f, 1, 7, 8);
    assert_int_equal(f.status[1], REQUEST_FINISHED_LENGTH_CAPPED);
    assert_int_equal(f.n_released[1], 1);
    assert_int_equal(f.s->n_finished_ids, 0);
    fix_deinit(&f);
}

/* Its blocks went back with their hashes before anybody knew that they hold NaN. */
static void test_scheduler_late_error_unpublishes(void **state)
{
    (void)state;
    begin_full_pool(true, true);
    uint64_t step_id = f.out.step_id;
    assert_true(fix_schedule(&f)); /* r1 goes with its first token in flight */
    assert_int_equal(scheduler_find(f.s, 1)->status, REQUEST_PREEMPTED);
    assert_int_equal(block_pool_n_published(pool()), 5 + 4); /* r0 took one of r1's */
    request_result_msg results[2] = {
        {.request_id = 0, .request_epoch = 1, .n_tokens = 1, .tokens = {9}},
        {.request_id = 1, .request_epoch = 1, .error = REQUEST_ERROR_NAN_LOGITS},
    };
    step_result result = {.step_id = step_id, .n_results = 2, .results = results};
    assert_int_equal(scheduler_update(f.s, &result), PGD_OK);
    scheduler_check(f.s);
    assert_int_equal(f.status[1], REQUEST_FINISHED_ERROR);
    assert_int_equal(block_pool_n_published(pool()), 5);
    fix_deinit(&f);
}

static void test_scheduler_sc7_preempted_goes_ahead_of_waiting(void **state)
{
    (void)state;
    for (int policy = SCHEDULER_FCFS; policy <= SCHEDULER_PRIORITY; policy++) {
        scheduler_opts opts = fix_opts();
        opts.n_blocks = 11;
        opts.policy = (scheduler_policy)policy;
        fix_init(&f, opts);
        FIX_ADD(&f, .n_prompt = 80, .max_tokens = 4, .arrival_us = 1);
        FIX_ADD(&f, .n_prompt = 80, .max_tokens = 4, .arrival_us = 9);
        fix_step(&f);
        FIX_ADD(&f, .n_prompt = 10, .arrival_us = 2); /* came earlier by its own clock */
        assert_true(fix_schedule(&f));
        assert_int_equal(f.out.n_preempted, 1);
        assert_int_equal(f.out.n_new, 0); /* nobody new in a step that preempts */
        assert_int_equal(request_queue_peek(f.s->waiting)->id, 1);
        fix_answer_all(&f);
        fix_step(&f);
        fix_step(&f);
        assert_int_equal(f.n_finished[0], 1);
        assert_true(fix_schedule(&f));
        assert_int_equal(f.out.new_requests[0].request_id, 1);
        fix_answer_all(&f);
        fix_deinit(&f);
    }
}

static void test_scheduler_sc2g_preempts_itself_last(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 11;
    opts.enable_prefix_caching = false;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 70, .max_tokens = 20);
    FIX_ADD(&f, .n_prompt = 80, .max_tokens = 20);
    fix_step(&f);
    /* r0 has room in its block, r1 needs one: the newest is r1 itself. */
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 1);
    assert_int_equal(f.out.preempted_ids[0], 1);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* Priority: the victim stands before the one that needs room and was skipped in this step; nobody
 * may be skipped for it. */
static void test_scheduler_sc3_victim_before_index_skips_nobody(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 10;
    opts.policy = SCHEDULER_PRIORITY;
    opts.async = true;
    opts.enable_prefix_caching = false;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 40, .priority = 9,
            .max_tokens = 1); /* 3 blocks, its last token in flight: skipped */
    assert_true(fix_schedule(&f));
    FIX_ADD(&f, .n_prompt = 48, .priority = 1, .max_tokens = 10);
    FIX_ADD(&f, .n_prompt = 41, .priority = 1, .max_tokens = 10, .arrival_us = 1);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_n_free(&f), 0);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_preempted, 1);
    assert_int_equal(f.out.preempted_ids[0], 0);
    assert_int_equal(fix_scheduled(&f, 1), 1);
    assert_int_equal(fix_scheduled(&f, 2), 1);
    for (int i = 0; i < 3; i++)
        fix_answer_all(&f);
    assert_int_equal(f.status[0], REQUEST_FINISHED_LENGTH_CAPPED);
    fix_deinit(&f);
}

/* Priority: a victim that already has its share of this step gives it back, with what was published
 * too early. */
static void test_scheduler_sc3_unscheduled_chunk_is_unpublished(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 8;
    opts.policy = SCHEDULER_PRIORITY;
    opts.long_prefill_token_threshold = 16;
    fix_init(&f, opts);
    request *r0 = FIX_ADD(&f, .n_prompt = 96, .priority = 9); /* a block per step, six in all */
    fix_step(&f);
    FIX_ADD(&f, .n_prompt = 13, .priority = 1);
    for (int i = 0; i < 4; i++)
        fix_step(&f); /* r0: 80 tokens, r1: its prompt and three outputs */
    assert_int_equal(r0->num_computed_tokens, 80);
    assert_int_equal(f.n_tokens[1], 4);
    assert_int_equal(fix_n_free(&f), 1);
    /* r0 takes the last block for its last chunk, then r1 needs one for position 16. */
    assert_true(fix_schedule(&f));
    assert_int_equal(r0->status, REQUEST_PREEMPTED);
    assert_int_equal(f.out.n_preempted, 1);
    assert_null(fix_cached_msg(&f, 0));
    assert_int_equal(fix_scheduled(&f, 1), 1);
    assert_int_equal(fix_n_appended(&f, 1), 1);
    assert_int_equal(f.out.total_scheduled_tokens, 1);
    for (int32_t i = 0; i < 6; i++)
        assert_int_equal(block_pool_lookup(pool(), &r0->block_hashes[i], 0) >= 0, i < 5);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_sc5_priority_equal_class_waits(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 11;
    opts.policy = SCHEDULER_PRIORITY;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 70, .priority = 5, .arrival_us = 1);
    FIX_ADD(&f, .n_prompt = 70, .priority = 5, .arrival_us = 2);
    fix_step(&f);
    FIX_ADD(&f, .n_prompt = 20, .priority = 5, .arrival_us = 0);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_preempted, 0);
    assert_int_equal(f.out.n_new, 0);
    assert_int_equal(f.out.n_cached, 2);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_sc5_priority_takes_place_and_blocks(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 11;
    opts.max_num_seqs = 2;
    opts.policy = SCHEDULER_PRIORITY;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 70, .priority = 5, .arrival_us = 1);
    FIX_ADD(&f, .n_prompt = 20, .priority = 7, .arrival_us = 2);
    fix_step(&f);
    /* No seat is free: the lowest one gives way, its share of the step goes back, it does not
     * return at once. */
    FIX_ADD(&f, .n_prompt = 20, .priority = 6);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_preempted, 1);
    assert_int_equal(f.out.preempted_ids[0], 1);
    assert_null(fix_cached_msg(&f, 1));
    assert_int_equal(fix_scheduled(&f, 2), 20);
    assert_int_equal(f.out.total_scheduled_tokens, 21);
    fix_answer_all(&f);
    /* Blocks: 150 tokens need both out, one after the other. */
    FIX_ADD(&f, .n_prompt = 150, .priority = 0, .max_tokens = 2);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_preempted, 2);
    assert_int_equal(f.out.preempted_ids[0], 2);
    assert_int_equal(f.out.preempted_ids[1], 0);
    assert_int_equal(fix_scheduled(&f, 3), 150);
    assert_int_equal(f.out.n_cached, 0);
    fix_answer_all(&f);
    /* Then they come back by class. */
    fix_step(&f);
    assert_int_equal(f.n_finished[3], 1);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, 2);
    assert_int_equal(f.out.new_requests[0].request_id, 0);
    assert_int_equal(f.out.new_requests[1].request_id, 2);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_sc5_priority_preempts_only_if_it_helps(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 11;
    opts.policy = SCHEDULER_PRIORITY;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 90, .priority = 1); /* 6 blocks, not to be preempted */
    FIX_ADD(&f, .n_prompt = 30, .priority = 9); /* 2 blocks */
    fix_step(&f);
    FIX_ADD(&f, .n_prompt = 78, .priority = 5); /* 5 blocks, 2 + 2 can be had */
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_preempted, 0);
    assert_int_equal(f.out.n_cached, 2);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_sc8_gate_and_watermark(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 21;
    opts.long_prefill_token_threshold = 64;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 200); /* 13 blocks, four at a time */
    FIX_ADD(&f, .n_prompt = 128); /* 8: of 16 free ones 9 are promised */
    FIX_ADD(&f, .n_prompt = 16);  /* does not overtake */
    for (int i = 0; i < 4; i++) { /* 64, 64, 64, 8: what is taken was promised before */
        assert_true(fix_schedule(&f));
        assert_int_equal(f.out.n_new, i == 0);
        assert_int_equal(f.out.total_scheduled_tokens, i < 3 ? 64 : 8);
        assert_int_equal(fix_n_free(&f), i < 3 ? 16 - 4 * i : 7);
        fix_answer_all(&f);
    }
    assert_true(scheduler_finish_request(f.s, 1, REQUEST_FINISHED_ABORTED));
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 2), 16);
    fix_answer_all(&f);
    fix_deinit(&f);

    opts.long_prefill_token_threshold = 0;
    opts.watermark = 0.25; /* 5 of 21 */
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 288); /* 18 of 20: alone, so the watermark does not count */
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, 1);
    fix_answer_all(&f);
    assert_true(scheduler_finish_request(f.s, 0, REQUEST_FINISHED_ABORTED));
    FIX_ADD(&f, .n_prompt = 224); /* 14 */
    FIX_ADD(&f, .n_prompt = 32);  /* 2 of 6 would leave 4 */
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, 1);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_reset_worker_loses_nothing(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.async = true;
    opts.max_num_seqs = 3;
    fix_init(&f, opts);
    for (int i = 0; i < 5; i++)
        FIX_ADD(&f, .n_prompt = 40, .max_tokens = 5);
    assert_true(fix_schedule(&f));
    assert_true(fix_schedule(&f));
    fix_answer_all(&f);
    assert_true(fix_schedule(&f));
    assert_true(scheduler_finish_request(f.s, 1, REQUEST_FINISHED_ABORTED));
    assert_int_equal(f.n_released[1], 0);
    scheduler_reset_worker(f.s);
    scheduler_check(f.s);
    assert_int_equal(scheduler_n_steps_in_flight(f.s), 0);
    assert_int_equal(f.n_released[1], 1);
    assert_int_equal(fix_n_free(&f), 999);
    assert_int_equal(block_pool_n_published(pool()), 0);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_finished, 0); /* the new worker knows nobody */
    assert_int_equal(f.out.n_preempted, 0);
    assert_int_equal(f.out.n_new, 3);
    const uint64_t want[3] = {0, 2, 3};
    for (int i = 0; i < 3; i++) {
        const new_request_msg *msg = &f.out.new_requests[i];
        assert_int_equal(msg->request_id, want[i]);
        assert_int_equal(msg->n_tokens, i < 2 ? 41 : 40);
        assert_int_equal(msg->n_computed_tokens, 0);
    }
    scheduler_stats stats;
    scheduler_get_stats(f.s, &stats);
    assert_int_equal(stats.n_preemptions, 0);
    for (int i = 0; i < 16 && scheduler_has_work(f.s); i++) {
        fix_answer_all(&f);
        fix_schedule(&f);
    }
    for (uint64_t id = 0; id < 5; id++)
        assert_int_equal(f.n_tokens[id], id == 1 ? 1 : 5);
    fix_deinit(&f);
}

static void test_scheduler_only_listed_requests_run(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 11;
    opts.max_num_seqs = 2;
    fix_init(&f, opts);
    for (int i = 0; i < 4; i++)
        FIX_ADD(&f, .n_prompt = 70, .max_tokens = 5);
    fix_step(&f); /* 0 and 1 run, the pool is full */
    const uint64_t third[] = {2};
    assert_true(scheduler_schedule(f.s, &f.out, third, 1));
    scheduler_check(f.s);
    /* Those not listed give their place, in their order. */
    assert_int_equal(f.out.n_preempted, 2);
    assert_int_equal(f.out.n_new, 1);
    assert_int_equal(f.out.new_requests[0].request_id, 2);
    fix_answer_all(&f);
    const uint64_t two[] = {1, 3};
    assert_true(scheduler_schedule(f.s, &f.out, two, 2));
    scheduler_check(f.s);
    assert_int_equal(f.out.preempted_ids[0], 2);
    assert_int_equal(f.out.n_new, 2);
    assert_int_equal(f.out.new_requests[0].request_id, 1);
    assert_int_equal(f.out.new_requests[1].request_id, 3);
    fix_answer_all(&f);
    /* None listed: all wait. */
    assert_true(scheduler_schedule(f.s, &f.out, two, 0));
    assert_int_equal(f.out.total_scheduled_tokens, 0);
    assert_int_equal(f.out.n_preempted, 2);
    fix_answer_all(&f);
    assert_false(scheduler_schedule(f.s, &f.out, two, 0));
    /* And without a list everything goes on, order kept as far as it was. */
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, 2);
    fix_answer_all(&f);
    for (int i = 0; i < 40 && scheduler_has_work(f.s); i++)
        fix_step(&f);
    for (uint64_t id = 0; id < 4; id++)
        assert_int_equal(f.n_tokens[id], 5);
    fix_deinit(&f);
}

static void test_scheduler_sc6_requests_not_ready_are_set_aside(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.max_num_seqs = 2;
    fix_init(&f, opts);
    for (int i = 0; i < 4; i++) {
        request *r = fix_new(&f, (fix_req){.n_prompt = 20});
        if (i == 0 || i == 2)
            r->status = REQUEST_WAITING_FOR_GRAMMAR;
        assert_int_equal(scheduler_add_request(f.s, r), SCHEDULER_ADDED);
    }
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, 2);
    assert_int_equal(f.out.new_requests[0].request_id, 1);
    assert_int_equal(f.out.new_requests[1].request_id, 3);
    assert_int_equal(request_queue_peek(f.s->waiting)->id, 0); /* order kept */
    assert_int_equal(request_queue_next(f.s->waiting, scheduler_find(f.s, 0))->id, 2);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* A request whose external load has completed holds blocks while it waits. */
static void hold_blocks(request *r, int32_t n_tokens)
{
    kv_alloc a = {.n_new_tokens = n_tokens, .hit = kv_manager_lookup(f.s->kv, r)};
    assert_true(kv_manager_allocate(NULL, f.s->kv, r, &a));
    r->num_computed_tokens = n_tokens;
}

static void test_scheduler_sc5b_waiting_holder_keeps_its_blocks(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 11;
    fix_init(&f, opts);
    request *r0 = FIX_ADD(&f, .n_prompt = 100);
    hold_blocks(r0, 48);
    assert_true(fix_schedule(&f));
    const new_request_msg *msg = fix_new_msg(&f, 0);
    assert_int_equal(msg->n_computed_tokens, 48);
    assert_int_equal(msg->n_scheduled_tokens, 52);
    assert_int_equal(msg->blocks.n_blocks[0], 7);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_newest_waiting_holder_is_released(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 11;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 100, .arrival_us = 1);
    request *r1 = FIX_ADD(&f, .n_prompt = 90, .arrival_us = 2);
    request *r2 = FIX_ADD(&f, .n_prompt = 90, .arrival_us = 3);
    hold_blocks(r1, 48);
    hold_blocks(r2, 64);
    /* The head needs 7 of 10 blocks, 3 are free, nothing runs: r2's four go back, r1 keeps its
     * three. */
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 100);
    assert_int_equal(r2->kv_row, -1);
    assert_int_equal(r2->num_computed_tokens, 0);
    assert_true(r1->kv_row >= 0);
    fix_answer_all(&f);
    /* While something runs nobody is released. */
    assert_true(fix_schedule(&f));
    assert_true(r1->kv_row >= 0);
    fix_answer_all(&f);
    scheduler_reset_worker(f.s);
    assert_int_equal(r1->kv_row, -1);
    fix_deinit(&f);

    /* Two holders that block each other: the later one gives way. */
    fix_init(&f, opts);
    request *a = FIX_ADD(&f, .n_prompt = 150, .max_tokens = 2, .arrival_us = 5);
    hold_blocks(a, 80);
    request *b = FIX_ADD(&f, .n_prompt = 90, .arrival_us = 6);
    hold_blocks(b, 80);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 70);
    assert_int_equal(b->kv_row, -1);
    fix_answer_all(&f);
    fix_deinit(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler_so4_resumed_request_is_sent_as_new),
        cmocka_unit_test(test_scheduler_as4_late_result_after_readmission_is_dropped),
        cmocka_unit_test(test_scheduler_up4_late_result_may_finish_a_preempted_request),
        cmocka_unit_test(test_scheduler_late_error_unpublishes),
        cmocka_unit_test(test_scheduler_sc7_preempted_goes_ahead_of_waiting),
        cmocka_unit_test(test_scheduler_sc2g_preempts_itself_last),
        cmocka_unit_test(test_scheduler_sc3_victim_before_index_skips_nobody),
        cmocka_unit_test(test_scheduler_sc3_unscheduled_chunk_is_unpublished),
        cmocka_unit_test(test_scheduler_sc5_priority_equal_class_waits),
        cmocka_unit_test(test_scheduler_sc5_priority_takes_place_and_blocks),
        cmocka_unit_test(test_scheduler_sc5_priority_preempts_only_if_it_helps),
        cmocka_unit_test(test_scheduler_sc8_gate_and_watermark),
        cmocka_unit_test(test_scheduler_reset_worker_loses_nothing),
        cmocka_unit_test(test_scheduler_only_listed_requests_run),
        cmocka_unit_test(test_scheduler_sc6_requests_not_ready_are_set_aside),
        cmocka_unit_test(test_scheduler_sc5b_waiting_holder_keeps_its_blocks),
        cmocka_unit_test(test_scheduler_newest_waiting_holder_is_released),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
