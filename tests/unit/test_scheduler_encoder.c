/* Encoder inputs in the scheduler (SC5d): each goes out whole in the step of an admission, within the
 * step's budget of encoder tokens; a preempted request's again; its blocks come back with it. */
#include "engine/kv/kv_group_ops.h"
#include "tests/unit/scheduler_fixture.h"

static void init(fix *f, int32_t n_blocks, int32_t max_encoder_tokens)
{
    kv_group_spec specs[2] = {
        {.ops = kv_group_ops_of(ATTENTION_FULL), .block_size = 16},
        {.ops = kv_group_ops_of(ATTENTION_CROSS), .block_size = 16, .window = 64}};
    scheduler_opts o = fix_opts();
    o.enable_prefix_caching = false;
    o.n_blocks = n_blocks;
    o.n_groups = 2;
    o.groups = specs;
    o.max_encoder_tokens = max_encoder_tokens;
    fix_init(f, o);
}

static request *new_request(fix *f, int32_t n_encoder, int32_t max_tokens)
{
    static token_id encoder[64];
    const token_id start = 2;
    for (int32_t i = 0; i < 64; i++)
        encoder[i] = 100 * (token_id)f->next_id + i;
    request_opts opts = {.id = f->next_id++,
                         .prompt = &start,
                         .n_prompt_tokens = 1,
                         .n_encoder_tokens = n_encoder,
                         .encoder_tokens = n_encoder > 0 ? encoder : NULL,
                         .max_tokens = max_tokens,
                         .max_model_len = f->max_model_len};
    request *r;
    assert_int_equal(request_create(&r, &opts), PGD_OK);
    return r;
}

static request *add(fix *f, int32_t n_encoder, int32_t max_tokens)
{
    request *r = new_request(f, n_encoder, max_tokens);
    assert_int_equal(scheduler_add_request(f->s, r), SCHEDULER_ADDED);
    return r;
}

/* The message's inputs are those of its new requests, in order and with their tokens. */
static void check_inputs(const fix *f, int32_t n_inputs)
{
    assert_int_equal(f->out.n_new, n_inputs);
    assert_int_equal(f->out.n_encoder_inputs, n_inputs);
    for (int32_t i = 0; i < n_inputs; i++) {
        const new_request_msg *m = &f->out.new_requests[i];
        assert_int_equal(f->out.encoder_inputs[i].request_id, m->request_id);
        assert_int_equal(f->out.encoder_inputs[i].n_tokens, m->n_encoder_tokens);
        assert_int_equal(m->encoder_tokens[0], 100 * (token_id)m->request_id);
        assert_int_equal(m->blocks.n_blocks[1], PGD_CEIL_DIV(m->n_encoder_tokens, 16));
    }
}

static void answer(fix *f)
{
    fix_answer(f, 0, (const token_id[]){7}, 1, NULL, 0);
}

static void test_scheduler_encoder_budget(void **state)
{
    (void)state;
    fix f;
    init(&f, 100, 64);
    add(&f, 40, 8);
    add(&f, 30, 8);
    add(&f, 20, 8);
    add(&f, 20, 8); /* would fit beside the first one, but does not overtake */
    assert_true(fix_schedule(&f));
    check_inputs(&f, 1);
    answer(&f);
    assert_true(fix_schedule(&f));
    check_inputs(&f, 2);
    assert_int_equal(f.out.n_cached, 1);
    answer(&f);
    assert_true(fix_schedule(&f));
    check_inputs(&f, 1);
    assert_int_equal(f.out.n_cached, 3);
    answer(&f);
    for (int i = 0; i < 8 && fix_schedule(&f); i++) {
        check_inputs(&f, 0);
        answer(&f);
    }
    scheduler_stats stats;
    scheduler_get_stats(f.s, &stats);
    assert_int_equal(stats.n_blocks_free, stats.n_blocks_total);
    fix_deinit(&f);
}

static void test_scheduler_encoder_preempted_goes_again(void **state)
{
    (void)state;
    fix f;
    init(&f, 1 + 9, 64); /* both inputs, and 3 blocks for the texts */
    add(&f, 40, 40);
    add(&f, 40, 40);
    assert_true(fix_schedule(&f));
    check_inputs(&f, 1);
    answer(&f);
    int n_again = 0;
    for (int i = 0; i < 200 && fix_schedule(&f); i++) {
        n_again += f.out.n_new;
        check_inputs(&f, f.out.n_new);
        answer(&f);
    }
    assert_int_equal(f.status[0], REQUEST_FINISHED_LENGTH_CAPPED);
    assert_int_equal(f.status[1], REQUEST_FINISHED_LENGTH_CAPPED);
    scheduler_stats stats;
    scheduler_get_stats(f.s, &stats);
    assert_true(stats.n_preemptions > 0);
    assert_int_equal(n_again, 1 + (int)stats.n_preemptions);
    assert_int_equal(stats.n_prompt_tokens, 2 * 41);
    assert_int_equal(stats.n_prompt_computed_tokens, 2 * 41);
    assert_in_range(stats.n_prompt_recomputed_tokens, 41 * stats.n_preemptions,
                    41 * stats.n_preemptions);
    assert_int_equal(stats.n_blocks_free, stats.n_blocks_total);
    fix_deinit(&f);
}

static void test_scheduler_encoder_refusals(void **state)
{
    (void)state;
    fix f;
    init(&f, 100, 50);
    request *r = new_request(&f, 51, 8); /* never within a step's budget */
    assert_int_equal(scheduler_add_request(f.s, r), SCHEDULER_NEVER_FITS);
    fix_on_release(&f, r);
    fix_deinit(&f);
    init(&f, 100, 0); /* no budget; the group's own length holds */
    add(&f, 64, 8);
    r = new_request(&f, 64, 8);
    r->n_encoder_tokens = 65;
    assert_int_equal(scheduler_add_request(f.s, r), SCHEDULER_NEVER_FITS);
    fix_on_release(&f, r);
    fix_deinit(&f);
    request_opts opts = {
        .prompt = (const token_id[]){2}, .n_prompt_tokens = 1, .max_tokens = 1, .max_model_len = 9};
    opts.n_encoder_tokens = 1; /* of which there are none */
    assert_int_equal(request_create(&r, &opts), PGD_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler_encoder_budget),
        cmocka_unit_test(test_scheduler_encoder_preempted_goes_again),
        cmocka_unit_test(test_scheduler_encoder_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
