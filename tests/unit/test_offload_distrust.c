/* What gave no numbers is gone from the tiers: from disk too, once and for all, and what is computed
 * later in its place is kept. */
#include "common/log.h"
#include "tests/unit/offload_rig.h"

static void drain_disk(void)
{
    while (g.disk.n_jobs > 0 && !g.disk.is_frozen)
        offload_connector_pump(g.c);
}

/* What n tokens of the prefix that all requests share leave in the host tier, and on disk; the device
 * has forgotten them. */
static void seed_prefix(int32_t n)
{
    FIX_ADD(&g.f, .n_prompt = n + 1, .n_common = n, .max_tokens = 1);
    rig_finish();
    rig_settle();
    drain_disk();
    assert_true(scheduler_reset_prefix_cache(g.f.s));
}

static request *add_reader(int32_t n_prompt, int32_t n_common)
{
    return FIX_ADD(&g.f, .n_prompt = n_prompt, .n_common = n_common, .max_tokens = 2);
}

/* A request over the prefix that the worker gives no numbers for. The disk tier is left alone. */
static void fail_one(int32_t n_prompt, int32_t n_common)
{
    request *r = add_reader(n_prompt, n_common);
    uint64_t id = r->id;
    bool was_frozen = g.disk.is_frozen;
    while (g.f.n_finished[id] == 0) {
        g.fail_id = id;
        g.disk.is_frozen = was_frozen;
        if (rig_schedule())
            rig_answer();
        g.disk.is_frozen = true;
        rig_settle();
    }
    assert_int_equal(g.f.error[id], REQUEST_ERROR_NAN_LOGITS);
    rig_finish();
    g.disk.is_frozen = was_frozen;
}

static void expect_no_poison(void)
{
    for (int32_t i = 0; i < g.disk.n_files; i++)
        assert_true(g.disk.contents[i] != RIG_POISON);
}

static void forget_host(const request *r, int32_t n_blocks)
{
    for (int32_t i = 0; i < n_blocks; i++) {
        offload_key key = {.hash = r->block_hashes[i]};
        offload_manager_forget(g.m, &key, 1);
    }
}

static void finish_all(void)
{
    g.disk.is_frozen = false;
    rig_finish();
    rig_settle();
    drain_disk();
    assert_int_equal(g.c->n_disk_removals, 0);
    assert_int_equal(hash_map_n_entries(g.c->distrusted), 0);
    assert_int_equal(offload_manager_n_evictable(g.m), offload_manager_n_blocks(g.m));
    rig_deinit();
}

static void test_offload_distrust_is_gone_from_disk(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true);
    seed_prefix(64);
    assert_int_equal(g.disk.n_files, 4);
    fail_one(120, 64);
    offload_stats stats;
    offload_connector_get_stats(&stats, g.c);
    assert_int_equal(stats.disk.n_queued_removals, 7);
    assert_int_equal(stats.host.n_distrusted, 4);
    drain_disk();
    offload_connector_get_stats(&stats, g.c);
    assert_int_equal(stats.disk.n_queued_removals, 0);
    assert_int_equal(g.disk.n_files, 0);
    assert_int_equal(offload_manager_n_blocks(g.m), 0);
    /* What is computed anew is stored anew, and comes back. */
    seed_prefix(64);
    assert_int_equal(g.disk.n_files, 4);
    request *r = add_reader(120, 64);
    forget_host(r, 4);
    rig_finish();
    assert_int_equal(g.disk.n_reads, 4);
    expect_no_poison();
    finish_all();
}

/* The file of a write under way comes after the result that says what it is worth. */
static void test_offload_distrust_what_is_being_written(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true);
    g.disk.is_frozen = true;
    seed_prefix(64);
    assert_int_equal(g.disk.n_jobs, 4);
    fail_one(120, 64);
    assert_int_equal(g.disk.n_jobs, 4 + 7);
    g.disk.is_frozen = false;
    drain_disk();
    assert_int_equal(g.disk.n_writes, 4);
    assert_int_equal(g.disk.n_files, 0);
    finish_all();
}

/* Somebody computes it well before the other is gone: that is written then. */
static void test_offload_distrust_what_is_computed_again(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true);
    seed_prefix(64);
    g.disk.is_frozen = true;
    fail_one(120, 64);
    assert_int_equal(g.disk.n_jobs, 7);
    seed_prefix(64);
    assert_int_equal(g.disk.n_jobs, 7);
    g.disk.is_frozen = false;
    drain_disk();
    assert_int_equal(g.disk.n_writes, 8);
    assert_int_equal(g.disk.n_files, 4);
    expect_no_poison();
    finish_all();
}

/* A read that has begun brings nothing that counts; one that has not is not made. */
static void test_offload_distrust_what_is_being_read(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true);
    seed_prefix(96);
    request *waiting = add_reader(120, 96);
    forget_host(waiting, 6);
    g.disk.is_frozen = true;
    assert_false(rig_schedule());
    assert_int_equal(g.disk.n_jobs, 4); /* two more are to be read */
    offload_key keys[6];
    for (int32_t i = 0; i < 6; i++)
        keys[i] = (offload_key){.hash = waiting->block_hashes[i]};
    offload_manager_forget(g.m, keys, 6);
    offload__distrust(g.c, keys, 6);
    assert_int_equal(g.disk.n_jobs, 4 + 6);
    g.disk.max_jobs = 100;
    offload_connector_pump(g.c);
    assert_int_equal(g.disk.n_jobs, 4 + 6);
    g.disk.is_frozen = false;
    drain_disk();
    assert_int_equal(g.disk.n_reads, 4);
    assert_int_equal(g.disk.n_files, 0);
    assert_int_equal(offload_manager_n_blocks(g.m), 0);
    while (waiting->num_cached_tokens < 0) {
        (void)rig_step();
        rig_settle();
    }
    assert_int_equal(waiting->num_cached_tokens, 0);
    finish_all();
}

/* What could not be removed is not read, and tried again. */
static void test_offload_distrust_refused(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true);
    seed_prefix(64);
    g.disk.refuses_removal = true;
    fail_one(120, 64);
    drain_disk();
    assert_int_equal(g.disk.n_files, 4);
    int n_writes = g.disk.n_writes;
    seed_prefix(64); /* in the host tier, well */
    request *r = add_reader(120, 64);
    offload_key key = {.hash = r->block_hashes[0]};
    forget_host(r, 4);
    rig_finish();
    assert_int_equal(g.disk.n_reads, 0);
    assert_true(g.disk.n_writes <= n_writes + 4); /* of what was new in them */
    int32_t n_files = g.disk.n_files;
    /* A reset of the tiers does not make it any better. */
    drain_disk();
    offload_connector_clear(g.c, &g.disk);
    assert_true(offload__is_distrusted(g.c, &key) && !offload__is_on_disk(g.c, &key));
    offload_connector_pump(g.c);
    assert_int_equal(g.disk.n_jobs, 0); /* not at once */
    g.disk.refuses_removal = false;
    g.c->retry_at_us = 0;
    offload_connector_pump(g.c);
    drain_disk();
    assert_int_equal(g.disk.n_files, n_files - 4);
    assert_false(offload__is_distrusted(g.c, &key));
    finish_all();
}

/* More than there is room for: all goes, once nothing is under way. */
static void test_offload_distrust_too_many(void **state)
{
    static offload_key keys[OFFLOAD_REMOVALS + 1];
    (void)state;
    RIG_INIT(.has_disk = true);
    seed_prefix(64);
    memset(keys, 0, sizeof keys);
    for (int32_t i = 0; i <= OFFLOAD_REMOVALS; i++) {
        uint64_t word = hash_u64((uint64_t)i);
        memcpy(keys[i].hash.bytes, &word, sizeof word);
    }
    g.disk.is_frozen = true;
    offload__distrust(g.c, keys, OFFLOAD_REMOVALS);
    offload__distrust(g.c, keys, OFFLOAD_REMOVALS); /* the same ones take no more room */
    assert_int_equal(g.disk.n_jobs, OFFLOAD_REMOVALS);
    assert_false(g.c->must_clear_disk);
    offload__distrust(g.c, keys + OFFLOAD_REMOVALS, 1);
    assert_true(g.c->must_clear_disk);
    request *r = add_reader(120, 64);
    forget_host(r, 4);
    offload_key first = {.hash = r->block_hashes[0]};
    assert_false(offload__is_on_disk(g.c, &first));
    assert_true(rig_step());
    assert_int_equal(r->num_cached_tokens, 0);
    assert_int_equal(g.disk.n_clears, 0);
    g.disk.is_frozen = false;
    drain_disk();
    offload_connector_pump(g.c);
    assert_int_equal(g.disk.n_clears, 1);
    assert_int_equal(g.disk.n_reads, 0);
    rig_finish();
    drain_disk();
    assert_int_equal(g.disk.n_clears, 1);
    assert_true(g.disk.n_files > 0); /* it goes on */
    finish_all();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_offload_distrust_is_gone_from_disk),
        cmocka_unit_test(test_offload_distrust_what_is_being_written),
        cmocka_unit_test(test_offload_distrust_what_is_computed_again),
        cmocka_unit_test(test_offload_distrust_what_is_being_read),
        cmocka_unit_test(test_offload_distrust_refused),
        cmocka_unit_test(test_offload_distrust_too_many),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
