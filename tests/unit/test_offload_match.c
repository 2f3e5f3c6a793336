/* Of which tier the tokens of a hit are told to be, and for what nobody waits. */
#include "tests/unit/offload_rig.h"

/* Host memory loses the blocks with tokens from .. to - 1. */
static void forget(const request *r, int32_t from, int32_t to)
{
    for (int32_t group = 0; group < g.n_groups; group++) {
        int32_t size = g.groups[group].block_size;
        for (int32_t i = from / size; i * size < to; i++) {
            offload_key key = offload__key_of(g.c, r, group, i);
            offload_manager_forget(g.m, &key, 1);
        }
    }
}

/* A prefix of 160 tokens lies in both tiers and not on the device, then host memory loses some; what a
 * request is told that has it in common. */
static void expect(const kv_group_spec *groups, int32_t n_groups, int32_t from, int32_t to,
                   int32_t n_host, int32_t n_disk)
{
    RIG_INIT(.has_disk = true, .n_groups = n_groups, .groups = groups, .n_blocks = 100);
    FIX_ADD(&g.f, .n_prompt = 161, .n_common = 160, .max_tokens = 1);
    rig_finish();
    rig_settle();
    while (g.disk.n_jobs > 0)
        offload_connector_pump(g.c);
    assert_true(scheduler_reset_prefix_cache(g.f.s));
    request *r = FIX_ADD(&g.f, .n_prompt = 200, .n_common = 160, .max_tokens = 2);
    forget(r, from, to);
    for (int i = 0; i < 100 && r->num_host_tokens + r->num_disk_tokens == 0; i++) {
        (void)rig_step();
        rig_settle();
    }
    assert_int_equal(r->num_host_tokens, n_host);
    assert_int_equal(r->num_disk_tokens, n_disk);
    rig_finish();
    rig_settle();
    rig_deinit();
}

static void test_offload_match_tiers_of_a_full_group(void **state)
{
    (void)state;
    const kv_group_spec groups[] = {{.ops = &kv_full_attention_ops, .block_size = 16}};
    expect(groups, 1, 0, 0, 160, 0);
    expect(groups, 1, 0, 160, 0, 160);
    expect(groups, 1, 128, 160, 128, 32);
    expect(groups, 1, 48, 64, 144, 16);
}

/* Blocks 7 to 9 stand for all of the prefix: whoever has them has the tokens before them. */
static void test_offload_match_tiers_of_a_window(void **state)
{
    (void)state;
    const kv_group_spec groups[] = {
        {.ops = &kv_sliding_window_ops, .block_size = 16, .window = 40}};
    expect(groups, 1, 0, 0, 160, 0);
    expect(groups, 1, 0, 160, 0, 160);
    expect(groups, 1, 0, 112, 160, 0);
    expect(groups, 1, 112, 128, 32, 128);
    expect(groups, 1, 144, 160, 144, 16);
}

static void test_offload_match_tiers_of_a_hybrid(void **state)
{
    (void)state;
    const kv_group_spec groups[] = {
        {.ops = &kv_full_attention_ops, .block_size = 16},
        {.ops = &kv_sliding_window_ops, .block_size = 32, .window = 40}};
    expect(groups, 2, 0, 0, 160, 0);
    expect(groups, 2, 0, 80, 80, 80);
    expect(groups, 2, 0, 160, 0, 160);
    expect(groups, 2, 144, 160, 144, 16);
    expect(groups, 2, 64, 80, 144, 16);  /* not in the window */
    expect(groups, 2, 96, 112, 128, 32); /* a block of the window is twice as long */
}

/* Before its patience ends, and for whoever comes while it lasts. */
static void test_offload_match_does_not_wait_for_a_stuck_disk(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true);
    FIX_ADD(&g.f, .n_prompt = 97, .n_common = 96, .max_tokens = 1);
    rig_finish();
    rig_settle();
    while (g.disk.n_jobs > 0)
        offload_connector_pump(g.c);
    assert_true(scheduler_reset_prefix_cache(g.f.s));
    request *a = FIX_ADD(&g.f, .n_prompt = 120, .n_common = 96, .max_tokens = 2);
    forget(a, 0, 96);
    g.disk.is_frozen = true;
    assert_false(rig_schedule()); /* it waits */
    g.disk.is_stuck = true;
    assert_true(rig_step());
    assert_int_equal(a->num_cached_tokens, 0);
    rig_finish();
    assert_true(scheduler_reset_prefix_cache(g.f.s));
    /* Blocks 0 to 3 are being read, the others are on disk only. */
    request *b = FIX_ADD(&g.f, .n_prompt = 110, .n_common = 96, .max_tokens = 2);
    int n_jobs = g.disk.n_jobs;
    assert_true(rig_step());
    assert_int_equal(b->num_cached_tokens, 0);
    assert_int_equal(g.disk.n_jobs, n_jobs);
    g.disk.is_stuck = g.disk.is_frozen = false;
    while (g.disk.n_jobs > 0)
        offload_connector_pump(g.c);
    rig_finish();
    rig_settle();
    rig_deinit();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_offload_match_tiers_of_a_full_group),
        cmocka_unit_test(test_offload_match_tiers_of_a_window),
        cmocka_unit_test(test_offload_match_tiers_of_a_hybrid),
        cmocka_unit_test(test_offload_match_does_not_wait_for_a_stuck_disk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
