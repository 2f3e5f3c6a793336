/* The scheduler over several KV groups: lone requests in the smallest pool that lets them in,
 * encoder tokens, and the events of the prefix cache. */
#include "tests/unit/scheduler_fixture.h"

static fix f;

static kv_group_spec spec_of(attention_kind kind, int32_t bs, int32_t window)
{
    return (kv_group_spec){.ops = kv_group_ops_of(kind), .block_size = bs, .window = window};
}

/* Runs until nothing is left, with up to `depth` steps in flight. */
static void run(int32_t depth)
{
    for (int turn = 0; scheduler_has_work(f.s) || scheduler_n_steps_in_flight(f.s) > 0; turn++) {
        assert_true(turn < 5000);
        bool is_step = scheduler_n_steps_in_flight(f.s) < depth && fix_schedule(&f);
        if (scheduler_n_steps_in_flight(f.s) > 0 &&
            (!is_step || scheduler_n_steps_in_flight(f.s) == depth))
            fix_answer_all(&f);
    }
}

/* A row of a window also holds the blocks of the steps in flight. Were they not counted, a request
 * that is let in could find no room with nobody left to give way. */
static void test_scheduler_kv_lone_request_in_the_smallest_pool(void **state)
{
    (void)state;
    const kv_group_spec models[3][3] = {
        {spec_of(ATTENTION_FULL, 16, 0), spec_of(ATTENTION_SLIDING, 16, 40)},
        {spec_of(ATTENTION_SLIDING, 16, 40), spec_of(ATTENTION_CHUNKED, 32, 64)},
        {spec_of(ATTENTION_CHUNKED, 16, 50), spec_of(ATTENTION_SLIDING, 32, 20),
         spec_of(ATTENTION_FULL, 16, 0)}};
    for (int model = 0; model < 3; model++) {
        for (int32_t depth = 1; depth <= 4; depth++) {
            scheduler_opts opts = fix_opts();
            opts.groups = models[model];
            opts.n_groups = model == 2 ? 3 : 2;
            opts.max_num_batched_tokens = 48;
            opts.max_steps_in_flight = depth;
            opts.async = depth > 1;
            opts.n_blocks = 2;
            const int32_t n_prompt = 700;
            for (bool fits = false; !fits; opts.n_blocks++) {
                fix_init(&f, opts);
                fits = scheduler_can_ever_fit(f.s, n_prompt + 100);
                if (fits) {
                    FIX_ADD(&f, .n_prompt = n_prompt, .max_tokens = 100, .ignore_eos = true);
                    run(depth);
                    assert_int_equal(f.n_tokens[0], 100);
                    scheduler_stats stats;
                    scheduler_get_stats(f.s, &stats);
                    assert_int_equal(stats.n_preemptions, 0);
                    assert_int_equal(fix_n_free(&f), opts.n_blocks - 1);
                }
                fix_deinit(&f);
            }
        }
    }
}

static request *new_with_encoder(int32_t n_encoder_tokens)
{
    static const token_id prompt[2] = {1, 2};
    static const token_id encoder_tokens[101];
    request_opts opts = {.id = f.next_id++,
                         .prompt = prompt,
                         .n_prompt_tokens = 2,
                         .encoder_tokens = encoder_tokens,
                         .n_encoder_tokens = n_encoder_tokens,
                         .max_tokens = 30,
                         .max_model_len = f.max_model_len,
                         .block_size = f.block_size,
                         .hasher = f.hasher};
    request *r;
    assert_int_equal(request_create(&r, &opts), PGD_OK);
    return r;
}

static void test_scheduler_kv_encoder_blocks_in_the_message(void **state)
{
    (void)state;
    const kv_group_spec groups[2] = {spec_of(ATTENTION_FULL, 16, 0),
                                     spec_of(ATTENTION_CROSS, 16, 100)};
    scheduler_opts opts = fix_opts();
    opts.groups = groups;
    opts.n_groups = 2;
    opts.n_blocks = 12;
    fix_init(&f, opts);
    request *r = new_with_encoder(90);
    assert_int_equal(scheduler_add_request(f.s, r), SCHEDULER_ADDED);
    request *too_long = new_with_encoder(101);
    assert_int_equal(scheduler_add_request(f.s, too_long), SCHEDULER_NEVER_FITS);
    fix_on_release(&f, too_long);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.new_requests[0].blocks.n_blocks[0], 1);
    assert_int_equal(f.out.new_requests[0].blocks.n_blocks[1], 6);
    /* Those of a second one do not fit beside: it waits. */
    request *second = new_with_encoder(80);
    assert_int_equal(scheduler_add_request(f.s, second), SCHEDULER_ADDED);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, 0);
    for (int32_t i = 0; i < f.out.n_appends; i++)
        assert_int_equal(f.out.appends[i].blocks.n_blocks[1], 0);
    run(1);
    assert_int_equal(f.n_tokens[0], 30);
    assert_int_equal(f.n_tokens[2], 30);
    assert_int_equal(fix_n_free(&f), 11);
    fix_deinit(&f);
    /* A model without encoder has no place for such a request. */
    fix_init(&f, fix_opts());
    request *stray = new_with_encoder(1);
    assert_int_equal(scheduler_add_request(f.s, stray), SCHEDULER_NEVER_FITS);
    fix_on_release(&f, stray);
    fix_deinit(&f);
}

static void test_scheduler_kv_events_of_a_worker_that_died(void **state)
{
    (void)state;
    kv_events *events;
    kv_cache_event ev;
    assert_int_equal(kv_events_create(&events, KV_EVENTS_MIN_BYTES), PGD_OK);
    scheduler_opts opts = fix_opts();
    opts.kv_events = events;
    fix_init(&f, opts);
    FIX_ADD(&f, .n_prompt = 70, .n_common = 40);
    FIX_ADD(&f, .n_prompt = 70, .n_common = 40);
    assert_true(fix_schedule(&f));
    /* 4 blocks of the first; of the second the two that it does not share. */
    int32_t n_hashes = 0;
    for (; kv_events_peek(&ev, events); kv_events_pop(events)) {
        assert_int_equal(ev.kind, KV_CACHE_STORED);
        n_hashes += ev.n_hashes;
    }
    assert_int_equal(n_hashes, 6);
    assert_int_equal(block_pool_n_published(kv_manager_get_pool(f.s->kv)), 6);
    scheduler_reset_worker(f.s);
    /* One word says it, however many blocks there were. */
    assert_true(kv_events_peek(&ev, events));
    assert_int_equal(ev.kind, KV_CACHE_CLEARED);
    assert_int_equal(ev.medium, KV_MEDIUM_DEVICE);
    kv_events_pop(events);
    assert_false(kv_events_peek(&ev, events));
    /* A late reader asks for what there is; a step brings it. */
    kv_events_request_snapshot(events);
    assert_true(fix_schedule(&f));
    n_hashes = 0;
    bool is_begun = false;
    for (; kv_events_peek(&ev, events); kv_events_pop(events)) {
        is_begun = is_begun || ev.kind == KV_CACHE_SNAPSHOT_BEGIN;
        n_hashes += is_begun && ev.kind == KV_CACHE_STORED ? ev.n_hashes : 0;
    }
    assert_true(is_begun);
    assert_int_equal(n_hashes, 6);
    run(1);
    fix_deinit(&f);
    kv_events_destroy(events);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler_kv_lone_request_in_the_smallest_pool),
        cmocka_unit_test(test_scheduler_kv_encoder_blocks_in_the_message),
        cmocka_unit_test(test_scheduler_kv_events_of_a_worker_that_died),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
