/* Scheduler: traces H16-H21 and the rules SC, AS, UP outside of preemption
 * (test_scheduler_preempt.c). */
#include "tests/unit/scheduler_fixture.h"

static fix f;

static void test_scheduler_h16_chunked_prefill_with_threshold(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.long_prefill_token_threshold = 400;
    fix_init(&f, opts);
    for (int i = 0; i < 3; i++)
        FIX_ADD(&f, .n_prompt = 800);
    const int32_t want[3][3] = {{400, 400, 224}, {400, 400, 224}, {1, 1, 352}};
    for (int step = 0; step < 3; step++) {
        assert_true(fix_schedule(&f));
        for (uint64_t id = 0; id < 3; id++)
            assert_int_equal(fix_scheduled(&f, id), want[step][id]);
        fix_answer_all(&f);
        assert_int_equal(f.n_tokens[0], step);
        assert_int_equal(f.n_tokens[2], step == 2);
    }
    fix_deinit(&f);
}

static void test_scheduler_h17_preemption_with_late_output(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 11;
    opts.max_num_batched_tokens = 100;
    opts.enable_prefix_caching = false;
    fix_init(&f, opts);
    request *r0 = FIX_ADD(&f, .n_prompt = 80);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_n_free(&f), 5);
    request *r1 = FIX_ADD(&f, .n_prompt = 80);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_cached, 0);
    assert_int_equal(fix_scheduled(&f, 1), 80);
    assert_int_equal(fix_n_free(&f), 0);
    fix_answer_all(&f); /* r0's output */

    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 1);
    assert_int_equal(fix_n_appended(&f, 0), 1);
    assert_int_equal(f.out.n_preempted, 1);
    assert_int_equal(f.out.preempted_ids[0], 1);
    assert_int_equal(r1->status, REQUEST_PREEMPTED);
    assert_int_equal(f.s->n_running, 1);
    assert_ptr_equal(f.s->running[0], r0);
    FIX_ANSWER(&f, 1, 42); /* late */
    FIX_EXPECT_TOKENS(&f, 1, 42);
    assert_int_equal(request_n_output_tokens(r1), 1);
    assert_int_equal(r1->tokens[80], 42);
    assert_int_equal(r1->status, REQUEST_PREEMPTED);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_h18_same_step_deduplication(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.async = true;
    opts.max_num_batched_tokens = 1000;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 100, .n_common = 100);
    FIX_ADD(&f, .n_prompt = 100, .n_common = 100);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 100);
    assert_int_equal(fix_scheduled(&f, 1), 4);
    assert_int_equal(fix_new_msg(&f, 1)->n_computed_tokens, 96);
    for (int i = 0; i < 6; i++)
        assert_int_equal(fix_new_msg(&f, 0)->blocks.ids[0][i],
                         fix_new_msg(&f, 1)->blocks.ids[0][i]);
    assert_int_equal(f.out.n_common_prefix_blocks[0], 6);
    FIX_ADD(&f, .n_prompt = 100, .n_common = 100);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 2), 4);
    fix_answer_all(&f);
    fix_answer_all(&f);
    FIX_ADD(&f, .n_prompt = 100, .n_common = 100);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 3), 4);
    scheduler_stats stats;
    scheduler_get_stats(f.s, &stats);
    assert_int_equal(stats.n_prefix_queries_tokens, 400);
    assert_int_equal(stats.n_prefix_hit_tokens, 3 * 96);
    assert_int_equal(stats.n_prompt_tokens, 400);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void run_h19(bool is_chunked, int32_t n_admitted)
{
    scheduler_opts opts = fix_opts();
    opts.max_num_seqs = 3;
    opts.enable_chunked_prefill = is_chunked;
    opts.max_model_len = 1024;
    fix_init(&f, opts);
    const int32_t n_prompt[4] = {800, 800, 10, 10};
    for (int i = 0; i < 4; i++)
        FIX_ADD(&f, .n_prompt = n_prompt[i]);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, n_admitted);
    assert_int_equal(fix_scheduled(&f, 0), 800);
    assert_int_equal(fix_scheduled(&f, 1), is_chunked ? 224 : 0);
    assert_int_equal(f.out.total_scheduled_tokens, is_chunked ? 1024 : 800);
    fix_answer_all(&f);
    fix_step(&f);
    fix_step(&f);
    assert_int_equal(f.s->n_running, 3); /* max_num_seqs */
    assert_int_equal(f.n_tokens[2] > 0, true);
    assert_int_equal(f.n_tokens[3], 0);
    fix_deinit(&f);
}

static void test_scheduler_h19_order_and_chunking(void **state)
{
    (void)state;
    run_h19(true, 2);
    run_h19(false, 1);
}

static void run_h20(int32_t max_num_seqs, const int32_t *priority, const uint64_t *arrival,
                    const uint64_t *want, int32_t n_want)
{
    scheduler_opts opts = fix_opts();
    opts.policy = SCHEDULER_PRIORITY;
    opts.max_num_seqs = max_num_seqs;
    fix_init(&f, opts);
    for (int i = 0; i < 4; i++)
        FIX_ADD(&f, .n_prompt = 20, .priority = priority[i], .arrival_us = arrival[i]);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, n_want);
    for (int32_t i = 0; i < n_want; i++)
        assert_int_equal(f.out.new_requests[i].request_id, want[i]);
    fix_answer_all(&f);
}

static void test_scheduler_h20_priority_order(void **state)
{
    (void)state;
    run_h20(4, (const int32_t[]){2, 1, 1, 0}, (const uint64_t[]){1, 3, 2, 4},
            (const uint64_t[]){3, 2, 1, 0}, 4);
    fix_deinit(&f);
    run_h20(4, (const int32_t[]){1, 1, 1, 1}, (const uint64_t[]){4, 1, 3, 2},
            (const uint64_t[]){1, 3, 2, 0}, 4);
    fix_deinit(&f);
    run_h20(2, (const int32_t[]){3, 1, 2, 0}, (const uint64_t[]){1, 2, 3, 4},
            (const uint64_t[]){3, 1}, 2);
    assert_int_equal(request_queue_pop(f.s->waiting)->id, 2);
    assert_int_equal(request_queue_peek(f.s->waiting)->id, 0);
    request_queue_push(f.s->waiting, scheduler_find(f.s, 2));
    fix_deinit(&f);
}

/* A request whose first token is 10 with `drafts` proposed after it; the second step carries them.
 */
static request *begin_h21(fix_req q, const token_id *drafts, int32_t n_drafts)
{
    fix_init(&f, fix_opts());
    q.n_prompt = 1;
    request *r = fix_add(&f, q);
    assert_true(fix_schedule(&f));
    fix_answer(&f, 0, (const token_id[]){3}, 1, drafts, n_drafts);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 1 + n_drafts);
    const cached_request_msg *msg = fix_cached_msg(&f, 0);
    assert_int_equal(msg->n_draft_tokens, n_drafts);
    for (int32_t i = 0; i < n_drafts; i++)
        assert_int_equal(scheduler_output_drafts(&f.out, msg)[i], drafts[i]);
    return r;
}

static void test_scheduler_h21_stop_token_in_drafts(void **state)
{
    (void)state;
    begin_h21((fix_req){.stop_id = 42}, (const token_id[]){10, 42}, 2);
    FIX_ANSWER(&f, 0, 10, 42, 12);
    FIX_EXPECT_TOKENS(&f, 0, 3, 10, 42);
    assert_int_equal(f.status[0], REQUEST_FINISHED_STOPPED);
    assert_int_equal(f.stop_token[0], 42);
    fix_deinit(&f);
}

static void test_scheduler_h21_max_tokens_in_drafts(void **state)
{
    (void)state;
    /* 3 outputs in all: one came, of three more only two are kept. */
    request *r = begin_h21((fix_req){.max_tokens = 4}, (const token_id[]){10, 11}, 2);
    assert_int_equal(r->num_computed_tokens, 4);
    FIX_ANSWER(&f, 0, 10, 11, 12);
    FIX_EXPECT_TOKENS(&f, 0, 3, 10, 11, 12);
    assert_int_equal(f.status[0], REQUEST_FINISHED_LENGTH_CAPPED);
    fix_deinit(&f);
}

static void test_scheduler_h21_drafts_are_cut_to_the_length(void **state)
{
    (void)state;
    /* Room for two more tokens: of three drafts only one can be of use. */
    fix_init(&f, fix_opts());
    FIX_ADD(&f, .n_prompt = 1, .max_tokens = 3);
    assert_true(fix_schedule(&f));
    fix_answer(&f, 0, (const token_id[]){3}, 1, (const token_id[]){10, 11, 12}, 3);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_cached_msg(&f, 0)->n_draft_tokens, 1);
    FIX_ANSWER(&f, 0, 10, 11);
    FIX_EXPECT_TOKENS(&f, 0, 3, 10, 11);
    assert_int_equal(f.status[0], REQUEST_FINISHED_LENGTH_CAPPED);
    fix_deinit(&f);
}

static void test_scheduler_h21_ignore_eos(void **state)
{
    (void)state;
    request *r = begin_h21((fix_req){.ignore_eos = true}, (const token_id[]){FIX_EOS, 10}, 2);
    FIX_ANSWER(&f, 0, FIX_EOS, 10, 11);
    FIX_EXPECT_TOKENS(&f, 0, 3, FIX_EOS, 10, 11);
    assert_int_equal(r->status, REQUEST_RUNNING);
    assert_int_equal(r->num_computed_tokens, r->n_tokens - 1);
    fix_deinit(&f);
}

static void test_scheduler_h21_eos(void **state)
{
    (void)state;
    fix_init(&f, fix_opts());
    FIX_ADD(&f, .n_prompt = 1);
    assert_true(fix_schedule(&f));
    FIX_ANSWER(&f, 0, FIX_EOS);
    FIX_EXPECT_TOKENS(&f, 0, FIX_EOS);
    assert_int_equal(f.status[0], REQUEST_FINISHED_STOPPED);
    fix_deinit(&f);
}

static void test_scheduler_h21_min_tokens(void **state)
{
    (void)state;
    begin_h21((fix_req){.min_tokens = 5}, (const token_id[]){10, 11}, 2);
    FIX_ANSWER(&f, 0, 10, 11, FIX_EOS);
    assert_int_equal(f.n_finished[0], 0);
    for (token_id t = 10; t <= 14; t++) {
        assert_true(fix_schedule(&f));
        FIX_ANSWER(&f, 0, t);
    }
    assert_true(fix_schedule(&f));
    FIX_ANSWER(&f, 0, FIX_EOS);
    assert_int_equal(f.status[0], REQUEST_FINISHED_STOPPED);
    assert_int_equal(f.n_tokens[0], 10);
    fix_deinit(&f);
}

static void test_scheduler_up3_rejected_drafts_roll_back(void **state)
{
    (void)state;
    request *r = begin_h21((fix_req){.max_tokens = 50}, (const token_id[]){10, 11, 12}, 3);
    assert_int_equal(r->num_computed_tokens, 5);
    FIX_ANSWER(&f, 0, 10, 20); /* one accepted, two rejected */
    assert_int_equal(r->num_computed_tokens, r->n_tokens - 1);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 1);
    assert_int_equal(fix_cached_msg(&f, 0)->n_computed_tokens, 3);
    assert_int_equal(fix_cached_msg(&f, 0)->n_draft_tokens, 0);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_sc2i_drafts_are_cut_by_the_budget(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.max_num_batched_tokens = 3;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 1);
    assert_true(fix_schedule(&f));
    fix_answer(&f, 0, (const token_id[]){3}, 1, (const token_id[]){10, 11, 12, 13}, 4);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 3);
    assert_int_equal(fix_cached_msg(&f, 0)->n_draft_tokens, 2);
    FIX_ANSWER(&f, 0, 10, 11, 12);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 1); /* the rest was dropped, not kept */
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_sc2a_async_never_computes_beyond_max_tokens(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.async = true;
    fix_init(&f, opts);
    request *r = FIX_ADD(&f, .n_prompt = 10, .max_tokens = 3);
    FIX_ADD(&f, .n_prompt = 10, .max_tokens = 10);
    assert_true(fix_schedule(&f)); /* prefill, token 1 */
    assert_true(fix_schedule(&f)); /* token 2 */
    assert_int_equal(fix_scheduled(&f, 0), 1);
    assert_int_equal(r->n_output_placeholders, 2);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f)); /* token 3 */
    assert_int_equal(fix_scheduled(&f, 0), 1);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f)); /* nothing is left: the last one is on its way */
    assert_int_equal(fix_scheduled(&f, 0), 0);
    assert_int_equal(fix_scheduled(&f, 1), 1);
    assert_int_equal(r->num_computed_tokens, r->max_total_tokens - 1);
    fix_answer_all(&f);
    FIX_EXPECT_TOKENS(&f, 0, 7, 7, 7);
    assert_int_equal(f.status[0], REQUEST_FINISHED_LENGTH_CAPPED);
    assert_int_equal(f.n_released[0], 1);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_as1_stop_is_seen_one_step_late(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.async = true;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 40);
    assert_true(fix_schedule(&f));
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 1);
    FIX_ANSWER(&f, 0, FIX_EOS);
    assert_int_equal(f.status[0], REQUEST_FINISHED_STOPPED);
    assert_int_equal(f.n_released[0], 0); /* a step of it is in flight */
    assert_int_equal(fix_n_free(&f), 999);
    assert_null(scheduler_find(f.s, 0));
    FIX_ANSWER(&f, 0, 99); /* dropped */
    FIX_EXPECT_TOKENS(&f, 0, FIX_EOS);
    assert_int_equal(f.n_released[0], 1);
    /* The worker is told although nothing is left to compute (SO5). */
    assert_true(scheduler_has_work(f.s));
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.total_scheduled_tokens, 0);
    assert_int_equal(f.out.n_finished, 1);
    assert_int_equal(f.out.finished_ids[0], 0);
    fix_answer_all(&f);
    assert_false(scheduler_has_work(f.s));
    assert_false(fix_schedule(&f));
    fix_deinit(&f);
}

static void test_scheduler_as3_publishes_when_tokens_are_known(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.async = true;
    /* The last token is never computed: with 3 the request ends there, with 4 it goes on. */
    for (int32_t max_tokens = 3; max_tokens <= 4; max_tokens++) {
        fix_init(&f, opts);
        const block_pool *pool = kv_manager_get_pool(f.s->kv);
        request *r = FIX_ADD(&f, .n_prompt = 30, .max_tokens = max_tokens);
        assert_true(fix_schedule(&f)); /* tokens 0-29 */
        assert_true(fix_schedule(&f)); /* 30 */
        assert_int_equal(block_pool_n_published(pool), 1);
        fix_answer_all(&f);
        assert_true(fix_schedule(&f)); /* 31 fills block 2, but its token is not known */
        assert_int_equal(block_pool_n_published(pool), 1);
        fix_answer_all(&f);
        assert_int_equal(r->n_block_hashes, 2);
        assert_int_equal(block_pool_n_published(pool), 1); /* 31 is still in flight (AS3) */
        fix_answer_all(&f);
        assert_int_equal(f.n_finished[0], max_tokens == 3);
        assert_int_equal(block_pool_n_published(pool), 2);
        fix_deinit(&f);
    }
}

static void test_scheduler_sc2f_waits_for_its_token(void **state)
{
    (void)state;
    fix_init(&f, fix_opts());
    FIX_ADD(&f, .n_prompt = 10);
    assert_true(fix_schedule(&f));
    assert_false(fix_schedule(&f)); /* its token is not known yet */
    assert_int_equal(scheduler_n_steps_in_flight(f.s), 1);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 1);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_sc9_messages(void **state)
{
    (void)state;
    fix_init(&f, fix_opts());
    request *r = FIX_ADD(&f, .n_prompt = 31);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.step_id, 1);
    assert_int_equal(f.out.n_groups, 1);
    const new_request_msg *msg = fix_new_msg(&f, 0);
    assert_int_equal(msg->request_epoch, 1);
    assert_int_equal(msg->n_prompt_tokens, 31);
    assert_int_equal(msg->n_tokens, 31);
    assert_int_equal(msg->n_computed_tokens, 0);
    assert_int_equal(msg->n_scheduled_tokens, 31);
    assert_ptr_equal(msg->tokens, r->tokens);
    assert_int_equal(msg->blocks.n_blocks[0], 2);
    assert_int_equal(f.out.n_blocks_to_zero, 0);
    fix_answer_all(&f);
    for (int step = 0; step < 3; step++) {
        assert_true(fix_schedule(&f));
        assert_int_equal(f.out.n_new, 0);
        const cached_request_msg *next = fix_cached_msg(&f, 0);
        assert_int_equal(next->n_computed_tokens, 31 + step);
        assert_int_equal(next->n_scheduled_tokens, 1);
        assert_int_equal(fix_n_appended(&f, 0), step == 1); /* position 32 opens a block */
        if (step == 1)
            assert_int_equal(f.out.appends[0].blocks.ids[0][0], 3);
        fix_answer_all(&f);
    }
    fix_deinit(&f);
}

static void test_scheduler_al3_refuses_what_can_never_fit(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 5; /* 64 slots */
    fix_init(&f, opts);
    /* The last token is never computed: 65 tokens take 64 slots. */
    assert_true(scheduler_can_ever_fit(f.s, 65));
    assert_false(scheduler_can_ever_fit(f.s, 66));
    request *big = fix_new(&f, (fix_req){.n_prompt = 60, .max_tokens = 6});
    assert_int_equal(scheduler_add_request(f.s, big), SCHEDULER_NEVER_FITS);
    assert_null(scheduler_find(f.s, big->id));
    fix_on_release(&f, big);
    FIX_ADD(&f, .n_prompt = 60, .max_tokens = 5);
    for (int i = 0; i < 5; i++)
        fix_step(&f);
    assert_int_equal(f.status[1], REQUEST_FINISHED_LENGTH_CAPPED);
    fix_deinit(&f);

    opts = fix_opts();
    opts.enable_chunked_prefill = false;
    opts.max_num_batched_tokens = 100;
    fix_init(&f, opts);
    request *wide = fix_new(&f, (fix_req){.n_prompt = 90, .max_tokens = 12});
    assert_int_equal(scheduler_add_request(f.s, wide), SCHEDULER_NEVER_FITS);
    fix_on_release(&f, wide);
    FIX_ADD(&f, .n_prompt = 90, .max_tokens = 11);
    fix_deinit(&f);

    opts = fix_opts();
    opts.max_model_len = 32;
    fix_init(&f, opts);
    f.max_model_len = 64; /* made before the effective length was known */
    request *late = fix_new(&f, (fix_req){.n_prompt = 32});
    assert_int_equal(scheduler_add_request(f.s, late), SCHEDULER_NEVER_FITS);
    fix_on_release(&f, late);
    FIX_ADD(&f, .n_prompt = 30);
    fix_step(&f);
    fix_step(&f);
    assert_int_equal(f.status[1], REQUEST_FINISHED_LENGTH_CAPPED);
    fix_deinit(&f);
}

static void test_scheduler_queue_is_bounded(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.max_queued_requests = 2;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 10);
    fix_step(&f);
    FIX_ADD(&f, .n_prompt = 10);
    request *r = fix_new(&f, (fix_req){.n_prompt = 10});
    assert_int_equal(scheduler_add_request(f.s, r), SCHEDULER_QUEUE_FULL);
    assert_true(scheduler_finish_request(f.s, 1, REQUEST_FINISHED_ABORTED));
    assert_int_equal(scheduler_add_request(f.s, r), SCHEDULER_ADDED);
    fix_deinit(&f);
}

static void test_scheduler_up9_finish_from_outside(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.max_num_seqs = 2;
    fix_init(&f, opts);
    for (int i = 0; i < 3; i++)
        FIX_ADD(&f, .n_prompt = 20);
    assert_true(fix_schedule(&f));
    assert_false(scheduler_finish_request(f.s, 17, REQUEST_FINISHED_ABORTED));
    /* Waiting: gone at once, the worker never hears of it. */
    assert_true(scheduler_finish_request(f.s, 2, REQUEST_FINISHED_ABORTED));
    assert_int_equal(f.n_released[2], 1);
    /* Running with a step in flight: blocks back, callback now, released with the late result. */
    assert_true(scheduler_finish_request(f.s, 0, REQUEST_FINISHED_ABORTED));
    assert_false(scheduler_finish_request(f.s, 0, REQUEST_FINISHED_ABORTED));
    scheduler_check(f.s);
    assert_int_equal(f.status[0], REQUEST_FINISHED_ABORTED);
    assert_int_equal(f.n_released[0], 0);
    assert_int_equal(fix_n_free(&f), 999 - 2);
    fix_answer_all(&f);
    assert_int_equal(f.n_released[0], 1);
    assert_int_equal(f.n_tokens[0], 0);
    assert_int_equal(f.n_tokens[1], 1);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_finished, 1);
    assert_int_equal(f.out.finished_ids[0], 0);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_worker_error_ends_one_request(void **state)
{
    (void)state;
    fix_init(&f, fix_opts());
    FIX_ADD(&f, .n_prompt = 40);
    FIX_ADD(&f, .n_prompt = 40);
    assert_true(fix_schedule(&f));
    assert_int_equal(block_pool_n_published(kv_manager_get_pool(f.s->kv)), 4);
    request_result_msg results[2] = {
        {.request_id = 0, .request_epoch = 1, .error = REQUEST_ERROR_NAN_LOGITS},
        {.request_id = 1, .request_epoch = 1, .n_tokens = 1, .tokens = {9}},
    };
    step_result result = {.step_id = 1, .n_results = 2, .results = results};
    assert_int_equal(scheduler_update(f.s, &result), PGD_OK);
    scheduler_check(f.s);
    assert_int_equal(f.status[0], REQUEST_FINISHED_ERROR);
    assert_int_equal(f.error[0], REQUEST_ERROR_NAN_LOGITS);
    FIX_EXPECT_TOKENS(&f, 1, 9);
    /* What it computed is not to be found by others. */
    assert_int_equal(block_pool_n_published(kv_manager_get_pool(f.s->kv)), 2);
    fix_step(&f);
    fix_deinit(&f);
}

/* Aborted while its step is out: nobody is told of the error, but its blocks were published. */
static void test_scheduler_error_after_abort_unpublishes(void **state)
{
    (void)state;
    fix_init(&f, fix_opts());
    FIX_ADD(&f, .n_prompt = 40);
    assert_true(fix_schedule(&f));
    assert_true(scheduler_finish_request(f.s, 0, REQUEST_FINISHED_ABORTED));
    assert_int_equal(block_pool_n_published(kv_manager_get_pool(f.s->kv)), 2);
    request_result_msg res = {
        .request_id = 0, .request_epoch = 1, .error = REQUEST_ERROR_NAN_LOGITS};
    step_result result = {.step_id = 1, .n_results = 1, .results = &res};
    assert_int_equal(scheduler_update(f.s, &result), PGD_OK);
    assert_int_equal(f.status[0], REQUEST_FINISHED_ABORTED);
    assert_int_equal(f.n_released[0], 1);
    assert_int_equal(block_pool_n_published(kv_manager_get_pool(f.s->kv)), 0);
    fix_deinit(&f);
}

static void test_scheduler_logprobs_are_passed_on(void **state)
{
    (void)state;
    fix_init(&f, fix_opts());
    FIX_ADD(&f, .n_prompt = 4);
    assert_true(fix_schedule(&f));
    const token_logprob logprobs[5] = {{1, -9.0f}, {1, -9.0f}, {9, -0.5f}, {4, -1.0f}, {5, -2.0f}};
    request_result_msg res = {.request_id = 0,
                              .request_epoch = 1,
                              .n_tokens = 1,
                              .tokens = {9},
                              .n_logprobs_per_token = 3,
                              .first_logprob = 2};
    step_result result = {
        .step_id = 1, .n_results = 1, .results = &res, .n_logprobs = 5, .logprobs = logprobs};
    assert_int_equal(scheduler_update(f.s, &result), PGD_OK);
    assert_int_equal(f.n_logprobs_seen, 3);
    assert_true(f.last_logprob == -0.5f);
    fix_deinit(&f);
}

static void test_scheduler_faulty_results_change_nothing(void **state)
{
    (void)state;
    fix_init(&f, fix_opts());
    step_result none = {.step_id = 1};
    assert_int_equal(scheduler_update(f.s, &none), PGD_EPROTO); /* nothing is in flight */
    request *r0 = FIX_ADD(&f, .n_prompt = 10);
    FIX_ADD(&f, .n_prompt = 1100); /* 1014 now, the rest later */
    assert_true(fix_schedule(&f));
    const request_result_msg good = {
        .request_id = 0, .request_epoch = 1, .n_tokens = 1, .tokens = {9}};
    enum { N_BAD = 10 };
    request_result_msg bad[N_BAD][2];
    for (int i = 0; i < N_BAD; i++)
        bad[i][0] = bad[i][1] = good;
    int32_t n_results[N_BAD] = {1, 1, 1, 1, 1, 1, 2, 2, 0, 1};
    bad[0][0].request_id = 5;    /* not in the step */
    bad[1][0].request_epoch = 2; /* another life */
    bad[2][0].n_tokens = 0;      /* no token and no error */
    bad[3][0].n_tokens = 2;      /* more than drafts + 1 */
    bad[4][0].n_tokens = -1;
    bad[5][0].n_logprobs_per_token = 1; /* outside of the list */
    bad[6][1].n_tokens = 1;             /* twice the same */
    bad[7][1].request_id = 1;           /* a token from inside a prompt */
    bad[9][0].n_drafts = PGD_MAX_DRAFT_TOKENS + 1;
    for (int i = 0; i < N_BAD; i++) {
        step_result result = {.step_id = 1, .n_results = n_results[i], .results = bad[i]};
        assert_int_equal(scheduler_update(f.s, &result), PGD_EPROTO);
        assert_int_equal(scheduler_n_steps_in_flight(f.s), 1);
        assert_int_equal(r0->n_in_flight, 1);
        assert_int_equal(f.n_tokens[0], 0);
    }
    step_result result = {.step_id = 2, .n_results = 1, .results = &good};
    assert_int_equal(scheduler_update(f.s, &result), PGD_EPROTO); /* not the oldest step */
    result.step_id = 1;
    assert_int_equal(scheduler_update(f.s, &result), PGD_OK);
    FIX_EXPECT_TOKENS(&f, 0, 9);
    fix_deinit(&f);
}

static void test_scheduler_results_in_any_order(void **state)
{
    (void)state;
    fix_init(&f, fix_opts());
    for (int i = 0; i < 4; i++)
        FIX_ADD(&f, .n_prompt = 10);
    assert_true(fix_schedule(&f));
    request_result_msg results[4];
    const uint64_t order[4] = {2, 0, 3, 1};
    for (int i = 0; i < 4; i++)
        results[i] = (request_result_msg){.request_id = order[i],
                                          .request_epoch = 1,
                                          .n_tokens = 1,
                                          .tokens = {100 + (token_id)order[i]}};
    step_result result = {.step_id = 1, .n_results = 4, .results = results};
    assert_int_equal(scheduler_update(f.s, &result), PGD_OK);
    for (uint64_t id = 0; id < 4; id++)
        FIX_EXPECT_TOKENS(&f, id, 100 + (token_id)id);
    fix_deinit(&f);
}

static void test_scheduler_create_refuses(void **state)
{
    (void)state;
    scheduler *s;
    scheduler_opts opts = fix_opts();
    opts.n_groups = 2; /* and nothing that says what they are */
    assert_int_equal(scheduler_create(&s, &opts), PGD_EINVAL);
    assert_null(s);
    opts = fix_opts();
    opts.max_num_seqs = 0;
    assert_int_equal(scheduler_create(&s, &opts), PGD_EINVAL);
    opts = fix_opts();
    opts.n_blocks = 1;
    assert_int_equal(scheduler_create(&s, &opts), PGD_EINVAL);
    opts = fix_opts();
    opts.watermark = 1.0;
    assert_int_equal(scheduler_create(&s, &opts), PGD_EINVAL);
    opts = fix_opts();
    opts.hash_seed = NULL;
    assert_int_equal(scheduler_create(&s, &opts), PGD_EINVAL);
    opts = fix_opts();
    opts.on_release = NULL;
    assert_int_equal(scheduler_create(&s, &opts), PGD_EINVAL);
    scheduler_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler_h16_chunked_prefill_with_threshold),
        cmocka_unit_test(test_scheduler_h17_preemption_with_late_output),
        cmocka_unit_test(test_scheduler_h18_same_step_deduplication),
        cmocka_unit_test(test_scheduler_h19_order_and_chunking),
        cmocka_unit_test(test_scheduler_h20_priority_order),
        cmocka_unit_test(test_scheduler_h21_stop_token_in_drafts),
        cmocka_unit_test(test_scheduler_h21_max_tokens_in_drafts),
        cmocka_unit_test(test_scheduler_h21_drafts_are_cut_to_the_length),
        cmocka_unit_test(test_scheduler_h21_ignore_eos),
        cmocka_unit_test(test_scheduler_h21_eos),
        cmocka_unit_test(test_scheduler_h21_min_tokens),
        cmocka_unit_test(test_scheduler_up3_rejected_drafts_roll_back),
        cmocka_unit_test(test_scheduler_sc2i_drafts_are_cut_by_the_budget),
        cmocka_unit_test(test_scheduler_sc2a_async_never_computes_beyond_max_tokens),
        cmocka_unit_test(test_scheduler_as1_stop_is_seen_one_step_late),
        cmocka_unit_test(test_scheduler_as3_publishes_when_tokens_are_known),
        cmocka_unit_test(test_scheduler_sc2f_waits_for_its_token),
        cmocka_unit_test(test_scheduler_sc9_messages),
        cmocka_unit_test(test_scheduler_al3_refuses_what_can_never_fit),
        cmocka_unit_test(test_scheduler_queue_is_bounded),
        cmocka_unit_test(test_scheduler_up9_finish_from_outside),
        cmocka_unit_test(test_scheduler_worker_error_ends_one_request),
        cmocka_unit_test(test_scheduler_error_after_abort_unpublishes),
        cmocka_unit_test(test_scheduler_logprobs_are_passed_on),
        cmocka_unit_test(test_scheduler_faulty_results_change_nothing),
        cmocka_unit_test(test_scheduler_results_in_any_order),
        cmocka_unit_test(test_scheduler_create_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
