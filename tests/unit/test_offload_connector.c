/* The offload connector under a real scheduler: rules OC1-OC7, OC10, OC11, OC13, TR2, TR6, OF11. */
#include "tests/unit/offload_rig.h"

/* What n tokens of the prefix that all requests share leave in the host tier, and on disk; the device
 * has forgotten them. */
static void seed_prefix(int32_t n)
{
    FIX_ADD(&g.f, .n_prompt = n + 1, .n_common = n, .max_tokens = 1);
    rig_finish();
    rig_settle();
    while (g.disk.n_jobs > 0)
        offload_connector_pump(g.c);
    assert_true(scheduler_reset_prefix_cache(g.f.s));
    g.n_loads = g.n_stores = g.n_flushes = 0;
}

static request *add_reader(int32_t n_prompt, int32_t n_common)
{
    return FIX_ADD(&g.f, .n_prompt = n_prompt, .n_common = n_common, .max_tokens = 2);
}

static offload_lookup look(const request *r, int32_t idx)
{
    offload_key key = {.hash = r->block_hashes[idx]};
    return offload_manager_lookup(g.m, &key);
}

static kv_match_kind answer_of(const request *r)
{
    return (kv_match_kind)(r->tier.answer - 1);
}

static void finish_all(void)
{
    rig_finish();
    rig_settle();
    assert_int_equal(offload_manager_n_evictable(g.m), offload_manager_n_blocks(g.m));
    assert_int_equal(g.c->n_free_pins, g.c->n_pins);
    rig_deinit();
}

static void test_offload_connector_oc11_stores_what_is_written(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = true);
    request *r = add_reader(40, 0);
    assert_true(rig_schedule());
    assert_int_equal(g.f.out.n_transfers, 0); /* this step computes them */
    rig_answer();
    assert_true(rig_schedule());
    assert_int_equal(g.f.out.n_transfers, 1);
    const kv_transfer_msg *msg = &g.f.out.transfers[0];
    assert_int_equal(msg->kind, KV_TRANSFER_STORE);
    assert_int_equal(msg->n_blocks, 2);
    assert_true(msg->tags[0] == rig_tag(r, 0, 0) && msg->tags[1] == rig_tag(r, 0, 1));
    assert_int_equal(look(r, 1), OFFLOAD_PENDING);
    rig_settle();
    assert_int_equal(look(r, 1), OFFLOAD_HIT);
    rig_answer();
    finish_all();
}

/* What is left when no request is, goes out too, and once. */
static void test_offload_connector_sends_what_is_left(void **state)
{
    (void)state;
    RIG_INIT(.capacity = 1);
    FIX_ADD(&g.f, .n_prompt = 40, .max_tokens = 1);
    assert_true(rig_step());
    assert_true(scheduler_has_work(g.f.s)); /* the worker is to forget it, besides */
    assert_true(rig_step());
    assert_int_equal(g.n_stores, 1);
    assert_false(
        scheduler_has_work(g.f.s)); /* the second block finds no room while the first is written */
    assert_false(rig_schedule());
    rig_settle();
    assert_true(scheduler_has_work(g.f.s));
    assert_true(rig_step());
    assert_int_equal(g.n_stores, 2);
    assert_false(scheduler_has_work(g.f.s));
    rig_settle();
    finish_all();
}

static void test_offload_connector_loads_and_tells_tiers(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false);
    seed_prefix(96);
    request *r = add_reader(120, 96);
    assert_true(rig_schedule());
    assert_int_equal(r->status, REQUEST_WAITING_FOR_REMOTE_KVS);
    assert_int_equal(g.n_loads, 1);
    assert_int_equal(g.f.out.transfers[0].n_blocks, 6);
    rig_answer();
    assert_false(rig_schedule());
    rig_settle();
    assert_true(rig_schedule());
    assert_int_equal(fix_new_msg(&g.f, r->id)->n_computed_tokens, 96);
    assert_int_equal(r->num_host_tokens, 96);
    assert_int_equal(r->num_disk_tokens, 0);
    rig_answer();
    finish_all();
}

static void test_offload_connector_pending_is_not_a_miss(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false);
    FIX_ADD(&g.f, .n_prompt = 49, .n_common = 48, .max_tokens = 1);
    assert_true(rig_step());
    assert_true(rig_step()); /* sends the store, which goes on */
    assert_true(scheduler_reset_prefix_cache(g.f.s));
    request *r = add_reader(60, 48);
    assert_false(rig_schedule());
    assert_int_equal(answer_of(r), KV_MATCH_ASK_AGAIN);
    int32_t n_waits = r->tier.n_waits;
    assert_false(rig_schedule());
    assert_int_equal(r->tier.n_waits, n_waits); /* remembered: nothing was looked up again */
    rig_settle();
    assert_true(rig_schedule());
    assert_int_equal(g.n_loads, 1);
    rig_answer();
    finish_all();
}

/* A failed store is a miss for who waited for it. */
static void test_offload_connector_failed_store(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false);
    FIX_ADD(&g.f, .n_prompt = 49, .n_common = 48, .max_tokens = 1);
    assert_true(rig_step());
    assert_true(rig_step());
    assert_true(scheduler_reset_prefix_cache(g.f.s));
    request *r = add_reader(60, 48);
    assert_false(rig_schedule());
    rig_tell(rig_find_kind(KV_TRANSFER_STORE), 0, 0);
    assert_true(rig_schedule());
    assert_int_equal(fix_scheduled(&g.f, r->id), 60);
    assert_int_equal(g.n_loads, 0);
    rig_answer();
    finish_all();
}

static void test_offload_connector_oc1_no_double_load(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false);
    seed_prefix(96);
    request *a = add_reader(120, 96);
    request *b = add_reader(110, 96);
    assert_true(rig_step());
    assert_int_equal(g.n_loads, 1);
    assert_int_equal(answer_of(b), KV_MATCH_ASK_AGAIN);
    rig_settle();
    assert_true(rig_schedule());
    assert_int_equal(g.n_loads, 1);
    assert_int_equal(a->n_external_tokens, 96);
    assert_int_equal(b->n_external_tokens, 0); /* found on the device */
    assert_int_equal(fix_scheduled(&g.f, b->id), 14);
    rig_answer();
    finish_all();
}

/* A hit that is remembered ends when somebody else loads it first. */
static void test_offload_connector_oc1_remembered_hit(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false, .n_blocks = 40, .scheduling = SCHEDULER_PRIORITY);
    seed_prefix(64);
    FIX_ADD(&g.f, .n_prompt = 390, .max_tokens = 8); /* takes 25 of 39 blocks */
    assert_true(rig_step());
    request *a = FIX_ADD(&g.f, .n_prompt = 300, .n_common = 64, .priority = 1);
    assert_true(rig_step());
    uint64_t stamp = a->tier.stamp;
    assert_int_equal(answer_of(a), KV_MATCH_HIT);
    assert_int_equal(a->kv_row, -1); /* no room */
    assert_true(rig_step());
    assert_true(a->tier.stamp == stamp && a->tier.answer != 0); /* not worked out again */
    request *b = FIX_ADD(&g.f, .n_prompt = 80, .n_common = 64, .max_tokens = 2);
    assert_true(rig_step());
    assert_int_equal(b->status, REQUEST_WAITING_FOR_REMOTE_KVS);
    assert_int_equal(g.n_loads, 1);
    assert_int_equal(answer_of(a), KV_MATCH_ASK_AGAIN);
    finish_all();
}

/* Eviction ends it too: what is gone is computed. */
static void test_offload_connector_b047_evicted_before_its_load(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = true, .capacity = 6, .n_blocks = 40);
    seed_prefix(64);
    FIX_ADD(&g.f, .n_prompt = 390, .max_tokens = 8);
    assert_true(rig_step());
    request *a = FIX_ADD(&g.f, .n_prompt = 300, .n_common = 64, .max_tokens = 2);
    assert_true(rig_step()); /* its hit; then the other's blocks take the place */
    assert_int_equal(answer_of(a), KV_MATCH_HIT);
    rig_settle();
    assert_true(rig_step());
    rig_settle();
    assert_true(rig_step());
    assert_int_not_equal(answer_of(a), KV_MATCH_HIT);
    finish_all();
}

static void test_offload_connector_oc7_abort_during_load(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false);
    seed_prefix(96);
    request *r = add_reader(120, 96);
    uint64_t id = r->id;
    assert_true(rig_step());
    assert_true(scheduler_finish_request(g.f.s, id, REQUEST_FINISHED_ABORTED));
    assert_int_equal(g.f.n_released[id], 0);
    assert_int_equal(fix_n_free(&g.f), 39 - 6);
    rig_settle();
    (void)rig_step();
    assert_int_equal(g.f.n_released[id], 1);
    assert_int_equal(fix_n_free(&g.f), 39);
    finish_all();
}

static void test_offload_connector_abort_during_store(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false);
    request *r = add_reader(40, 40);
    uint64_t id = r->id;
    assert_true(rig_step());
    assert_true(rig_schedule());
    assert_true(scheduler_finish_request(g.f.s, id, REQUEST_FINISHED_ABORTED));
    rig_answer();
    assert_int_equal(g.f.n_released[id], 1); /* nobody waits for stores */
    rig_settle();
    assert_int_equal(offload_manager_n_evictable(g.m), 2);
    finish_all();
}

/* A block that is handed out again in the step that it was published in was never written. */
static void test_offload_connector_oc10_stores_nothing_unwritten(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false);
    const kv_connector *ops = offload_connector_get_ops(g.c);
    const block_hash hash = {.bytes = {1}};
    for (int was_written = 0; was_written < 2; was_written++) {
        scheduler_output out = {0};
        kv_loaded l;
        assert_false(ops->next_loaded(ops->arg, &l));
        ops->blocks.published(ops->blocks.arg, 1, &hash, 0);
        if (was_written)
            assert_false(ops->next_loaded(ops->arg, &l));
        ops->blocks.reused(ops->blocks.arg, 1);
        assert_int_equal(ops->build_step(ops->arg, &out), was_written);
        assert_int_equal(out.n_transfers, 2 * was_written); /* a store, and a flush of it */
    }
    ops->reset(ops->arg);
    rig_deinit();
}

/* OC6: a block whose store waits or goes on may be handed out again; then the step that does so waits
 * for that store, not for others. */
static void test_offload_connector_oc6_flushes_before_reuse(void **state)
{
    (void)state;
    for (int is_sent = 0; is_sent <= 1; is_sent++) {
        RIG_INIT(.is_eager = false, .n_blocks = 8);
        FIX_ADD(&g.f, .n_prompt = 64, .max_tokens = 1);
        assert_true(rig_step());
        if (is_sent)
            assert_true(rig_step());
        FIX_ADD(&g.f, .n_prompt = 112, .max_tokens = 1); /* all 7 blocks */
        assert_true(rig_schedule());
        assert_int_equal(g.n_stores, 1);
        assert_int_equal(g.n_flushes, 1);
        uint64_t job = rig_find_kind(KV_TRANSFER_STORE)->id;
        for (int32_t i = 0; i < g.f.out.n_transfers; i++)
            assert_int_equal(g.f.out.transfers[i].job_id, job);
        rig_answer();
        assert_true(rig_schedule()); /* its own blocks; the old job is not waited for again */
        assert_int_equal(g.n_stores, 2);
        assert_int_equal(g.n_flushes, 1);
        rig_answer();
        finish_all();
    }
}

static void test_offload_connector_resumes_by_a_load(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false, .n_blocks = 16);
    request *a = FIX_ADD(&g.f, .n_prompt = 96, .max_tokens = 60, .ignore_eos = true);
    request *b = FIX_ADD(&g.f, .n_prompt = 96, .max_tokens = 60, .ignore_eos = true);
    uint64_t ids[] = {a->id, b->id};
    int32_t n_preemptions = 0;
    for (int i = 0; i < 400 && scheduler_has_work(g.f.s); i++) {
        (void)rig_step();
        rig_settle();
        scheduler_stats stats;
        scheduler_get_stats(g.f.s, &stats);
        n_preemptions = (int32_t)stats.n_preemptions;
    }
    assert_true(n_preemptions > 0 && g.n_loads > 0);
    assert_int_equal(g.f.n_tokens[ids[0]], 60);
    assert_int_equal(g.f.n_tokens[ids[1]], 60);
    finish_all();
}

static void test_offload_connector_lost_worker(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false);
    seed_prefix(96);
    request *r = add_reader(120, 96);
    request *other = FIX_ADD(&g.f, .n_prompt = 50, .max_tokens = 8);
    assert_true(rig_step()); /* loads r, computes the other */
    assert_true(rig_step()); /* stores the other's blocks */
    assert_int_equal(look(other, 1), OFFLOAD_PENDING);
    uint64_t old = rig_find_kind(KV_TRANSFER_LOAD)->id;
    rig_lose_worker();
    assert_int_equal(look(other, 1), OFFLOAD_MISS);
    assert_int_equal(look(r, 5), OFFLOAD_HIT);
    assert_int_equal(offload_manager_n_evictable(g.m), offload_manager_n_blocks(g.m));
    kv_transfer_done late = {.job_id = old, .n_good = 6};
    assert_int_equal(scheduler_transfers_done(g.f.s, 0, &late, 1), PGD_EPROTO);
    assert_true(rig_step());
    assert_int_equal(g.n_loads, 2);
    assert_int_equal(r->status, REQUEST_WAITING_FOR_REMOTE_KVS);
    finish_all();
}

static void test_offload_connector_tr6_partial_load(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false);
    seed_prefix(96);
    request *r = add_reader(120, 96);
    assert_true(rig_step());
    rig_tell(rig_find_kind(KV_TRANSFER_LOAD), 0, 2);
    assert_int_equal(look(r, 1), OFFLOAD_HIT);
    assert_int_equal(look(r, 2), OFFLOAD_MISS); /* known to be bad */
    assert_int_equal(look(r, 3), OFFLOAD_HIT);  /* not known */
    assert_true(rig_schedule());
    assert_int_equal(fix_new_msg(&g.f, r->id)->n_computed_tokens, 32);
    assert_int_equal(r->num_host_tokens, 0);
    rig_answer();
    finish_all();
}

static void test_offload_connector_oc13_all_ranks(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false, .n_ranks = 2);
    seed_prefix(96);
    request *r = add_reader(120, 96);
    assert_true(rig_step());
    rig_job *job = rig_find_kind(KV_TRANSFER_LOAD);
    rig_tell(job, 0, 4);
    assert_false(rig_schedule());
    assert_int_equal(r->status, REQUEST_WAITING_FOR_REMOTE_KVS);
    rig_tell(job, 1, -1);
    assert_true(rig_schedule());
    assert_int_equal(fix_new_msg(&g.f, r->id)->n_computed_tokens, 64); /* the least */
    rig_answer();
    finish_all();
}

static pgd_err report(int32_t rank, uint64_t id, int32_t n_good)
{
    kv_transfer_done done[] = {{.job_id = id, .n_good = n_good}};
    return scheduler_transfers_done(g.f.s, rank, done, 1);
}

static void test_offload_connector_refuses_false_reports(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = false, .n_ranks = 2);
    seed_prefix(96);
    (void)add_reader(120, 96);
    (void)add_reader(50, 0);
    assert_true(rig_step());
    assert_true(rig_step());
    rig_job *load = rig_find_kind(KV_TRANSFER_LOAD), *store = rig_find_kind(KV_TRANSFER_STORE);
    assert_int_equal(report(0, 0, 0), PGD_EPROTO);
    assert_int_equal(report(0, UINT64_MAX, 0), PGD_EPROTO);
    assert_int_equal(report(0, load->id + ((uint64_t)1 << 20), 6), PGD_EPROTO);
    assert_int_equal(report(2, load->id, 6), PGD_EPROTO);
    assert_int_equal(report(-1, load->id, 6), PGD_EPROTO);
    assert_int_equal(report(0, load->id, 7), PGD_EPROTO);
    assert_int_equal(report(0, load->id, -1), PGD_EPROTO);
    assert_int_equal(report(0, store->id, store->n_blocks - 1), PGD_EPROTO);
    kv_transfer_done twice[] = {{.job_id = load->id, .n_good = 6}, {.job_id = load->id}};
    assert_int_equal(scheduler_transfers_done(g.f.s, 0, twice, 2), PGD_EPROTO);
    rig_tell(load, 0, -1);
    assert_int_equal(report(0, load->id, 6), PGD_EPROTO); /* again */
    finish_all();
}

/* A window needs its own blocks only, and they come in the order in which they end. */
static void test_offload_connector_window_of_a_hybrid(void **state)
{
    (void)state;
    const kv_group_spec groups[] = {
        {.ops = &kv_full_attention_ops, .block_size = 16},
        {.ops = &kv_sliding_window_ops, .block_size = 16, .window = 40}};
    RIG_INIT(.is_eager = false, .n_groups = 2, .groups = groups, .n_blocks = 60);
    seed_prefix(160);
    request *r = add_reader(200, 160);
    for (int32_t i = 0; i < 7; i++) { /* those before the window are not missed */
        offload_key key = {.hash = r->block_hashes[i], .group_id = 1};
        offload_manager_forget(g.m, &key, 1);
    }
    assert_true(rig_schedule());
    const kv_transfer_msg *msg = &g.f.out.transfers[0];
    assert_int_equal(msg->kind, KV_TRANSFER_LOAD);
    assert_int_equal(msg->n_blocks, 10 + 3);
    assert_true(msg->tags[7] == rig_tag(r, 0, 7) && msg->tags[8] == rig_tag(r, 1, 7) &&
                msg->tags[12] == rig_tag(r, 1, 9));
    rig_answer();
    rig_settle();
    assert_true(rig_step());
    assert_int_equal(r->num_host_tokens, 160);
    finish_all();
    /* One that the window of the longest prefix needs: a shorter one. */
    RIG_INIT(.is_eager = false, .n_groups = 2, .groups = groups, .n_blocks = 60);
    seed_prefix(160);
    r = add_reader(200, 160);
    offload_key key = {.hash = r->block_hashes[8], .group_id = 1};
    offload_manager_forget(g.m, &key, 1);
    assert_true(rig_step());
    assert_int_equal(r->n_external_tokens, 128);
    finish_all();
}

/* As of what the device holds: the block behind a hit must be there too, and is computed again. */
static void test_offload_connector_co5_leaves_out_the_last(void **state)
{
    (void)state;
    for (int use_eagle = 0; use_eagle < 2; use_eagle++) {
        RIG_INIT(.use_eagle = use_eagle);
        seed_prefix(96);
        request *r = add_reader(120, 96);
        assert_true(rig_step());
        assert_int_equal(r->n_external_tokens, use_eagle ? 80 : 96);
        finish_all();
    }
}

/* Blocks of an encoder's tokens are no business of the tiers. */
static void test_offload_connector_cross_attention(void **state)
{
    (void)state;
    const kv_group_spec groups[] = {
        {.ops = &kv_cross_attention_ops, .block_size = 16, .window = 64},
        {.ops = &kv_full_attention_ops, .block_size = 16}};
    RIG_INIT(.n_groups = 2, .groups = groups);
    FIX_ADD(&g.f, .n_prompt = 40, .n_common = 40, .max_tokens = 1);
    assert_true(rig_step());
    assert_true(rig_schedule());
    assert_int_equal(g.f.out.transfers[0].n_blocks, 2);
    rig_answer();
    rig_settle();
    assert_true(scheduler_reset_prefix_cache(g.f.s));
    (void)add_reader(50, 40);
    assert_true(rig_schedule());
    assert_int_equal(g.n_loads, 1);
    rig_answer();
    finish_all();
}

static void forget_host(const request *r, int32_t n_blocks)
{
    for (int32_t i = 0; i < n_blocks; i++) {
        offload_key key = {.hash = r->block_hashes[i]};
        offload_manager_forget(g.m, &key, 1);
    }
}

static void test_offload_connector_tr2_promotes_from_disk(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true);
    seed_prefix(96);
    assert_int_equal(g.disk.n_writes, 6);
    request *r = add_reader(120, 96);
    forget_host(r, 6);
    g.disk.is_frozen = true;
    assert_false(rig_schedule());
    assert_int_equal(answer_of(r), KV_MATCH_ASK_AGAIN);
    assert_int_equal(g.disk.n_jobs, 4); /* as many as it takes */
    offload_stats stats;
    offload_connector_get_stats(&stats, g.c);
    assert_int_equal(stats.disk.load.n_queued, 4);
    assert_false(rig_schedule());
    g.disk.is_frozen = false;
    offload_connector_pump(g.c);
    while (g.disk.n_jobs > 0)
        offload_connector_pump(g.c);
    assert_int_equal(offload_manager_n_evictable(g.m), 0); /* kept for it */
    assert_true(rig_step());
    assert_int_equal(r->n_external_tokens, 96);
    rig_settle();
    assert_true(rig_step());
    assert_int_equal(r->num_disk_tokens, 96);
    assert_int_equal(r->num_host_tokens, 0);
    assert_int_equal(g.disk.n_writes, 6); /* they are on disk already */
    finish_all();
}

/* What the host tier has of the prefix is kept while the rest is read. */
static void test_offload_connector_tr2_keeps_what_is_there(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true);
    seed_prefix(96);
    request *r = add_reader(120, 96);
    forget_host(r, 2);
    g.disk.is_frozen = true;
    assert_false(rig_schedule());
    assert_int_equal(answer_of(r), KV_MATCH_ASK_AGAIN);
    for (int32_t i = 2; i < 6; i++) {
        offload_key key = {.hash = r->block_hashes[i]};
        assert_int_equal(offload_manager_lookup(g.m, &key), OFFLOAD_HIT);
    }
    assert_int_equal(offload_manager_n_evictable(g.m), offload_manager_n_blocks(g.m) - 6);
    g.disk.is_frozen = false;
    finish_all();
}

static void test_offload_connector_tr2_full_host(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true, .capacity = 4);
    seed_prefix(96);
    g.disk.max_jobs = 100;
    int n_files = g.disk.n_files;
    assert_true(n_files >= 4);
    request *r = add_reader(120, 96);
    while (scheduler_has_work(g.f.s) && r->num_cached_tokens < 0) {
        (void)rig_step();
        rig_settle();
    }
    assert_true(g.n_loads >= 1 && r->num_cached_tokens > 0 && r->num_cached_tokens <= 64);
    finish_all();
}

static void test_offload_connector_tr2_failed_reads(void **state)
{
    (void)state;
    for (int how = 0; how < 3; how++) {
        RIG_INIT(.has_disk = true);
        seed_prefix(96);
        request *r = add_reader(120, 96);
        forget_host(r, 6);
        g.disk.fails = how == 0;
        g.disk.max_jobs = how == 1 ? 0 : 4; /* it takes nothing: nobody would wake us */
        if (how == 2)
            g.disk.n_files = 3; /* as if others had removed some */
        for (int i = 0; i < 20 && r->num_cached_tokens < 0; i++) {
            (void)rig_step();
            rig_settle();
        }
        assert_int_equal(r->num_cached_tokens, how == 2 ? 48 : 0);
        assert_int_equal(g.disk.n_reads, how == 0 ? 6 : how == 1 ? 0 : 3); /* one round */
        finish_all();
    }
}

static void test_offload_connector_abort_during_promotion(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true);
    seed_prefix(96);
    request *r = add_reader(120, 96);
    forget_host(r, 6);
    g.disk.is_frozen = true;
    assert_false(rig_schedule());
    assert_true(scheduler_finish_request(g.f.s, r->id, REQUEST_FINISHED_ABORTED));
    offload_connector_check(g.c);
    assert_int_equal(offload_manager_n_blocks(g.m), 4); /* being read; the others gave way */
    g.disk.is_frozen = false;
    offload_connector_pump(g.c);
    assert_int_equal(offload_manager_n_evictable(g.m), 4);
    finish_all();
}

/* A disk that hangs costs a while, not the request, nor those that wait for the same blocks. */
static void test_offload_connector_does_not_wait_for_ever(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true);
    seed_prefix(96);
    request *a = add_reader(120, 96);
    request *b = add_reader(110, 96);
    forget_host(a, 6);
    g.disk.is_frozen = true;
    assert_false(rig_schedule());
    assert_int_equal(answer_of(b), KV_MATCH_ASK_AGAIN);
    a->tier.since_us -= OFFLOAD_PATIENCE_US;
    assert_true(rig_step());
    assert_int_equal(a->num_cached_tokens, 0);
    /* It has computed them meanwhile: b finds them on the device. */
    assert_int_equal(b->num_cached_tokens, 96);
    rig_finish();
    g.disk.is_frozen = false;
    while (g.disk.n_jobs > 0)
        offload_connector_pump(g.c);
    finish_all();
}

/* NaN: nothing of it stays, on disk neither. */
static void test_offload_connector_forgets_what_is_not_to_be_trusted(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true);
    seed_prefix(64);
    request *r = add_reader(120, 64);
    uint64_t id = r->id;
    while (r->status != REQUEST_RUNNING) {
        g.fail_id = id;
        if (!rig_schedule()) {
            rig_settle();
            continue;
        }
        rig_answer();
        if (g.f.n_finished[id] > 0)
            break;
        rig_settle();
    }
    assert_int_equal(g.f.error[id], REQUEST_ERROR_NAN_LOGITS);
    rig_finish();
    assert_int_equal(offload_manager_n_blocks(g.m), 0);
    request *again = add_reader(120, 64);
    assert_true(rig_step());
    assert_int_equal(again->num_cached_tokens, 0);
    assert_int_equal(g.disk.n_reads, 0);
    finish_all();
}

static void test_offload_connector_of11_threshold(void **state)
{
    (void)state;
    RIG_INIT(.store_threshold = 2);
    (void)add_reader(40, 40);
    rig_finish();
    assert_int_equal(g.n_stores, 0);
    assert_true(scheduler_reset_prefix_cache(g.f.s));
    (void)add_reader(50, 40);
    rig_finish();
    assert_int_equal(g.n_stores, 1);
    assert_int_equal(offload_manager_n_blocks(g.m), 2); /* those that were asked for twice */
    finish_all();
}

static void test_offload_connector_computes_what_is_quicker(void **state)
{
    (void)state;
    RIG_INIT(.is_eager = true);
    seed_prefix(96);
    g.c->rates = (offload_rates){.us_per_load = 161, .us_per_token = 10};
    request *r = add_reader(120, 96);
    assert_true(rig_step());
    assert_int_equal(r->num_cached_tokens, 0);
    rig_finish();
    assert_true(scheduler_reset_prefix_cache(g.f.s));
    g.c->rates.us_per_load = 160;
    r = add_reader(120, 96);
    assert_true(rig_step());
    assert_int_equal(r->n_external_tokens, 96);
    finish_all();
}

/* Another worker's numbers differ: nothing is left, and what waits goes on. */
static void test_offload_connector_clear(void **state)
{
    (void)state;
    RIG_INIT(.has_disk = true);
    seed_prefix(96);
    request *r = add_reader(120, 96);
    forget_host(r, 6);
    g.disk.is_frozen = true;
    assert_false(rig_schedule());
    rig_lose_worker();
    g.disk.n_jobs = g.disk.n_files = 0;
    offload_connector_clear(g.c, &g.disk);
    g.disk.is_frozen = false;
    offload_connector_check(g.c);
    assert_int_equal(offload_manager_n_blocks(g.m), 0);
    assert_true(rig_step());
    assert_int_equal(r->num_cached_tokens, 0);
    finish_all();
}

static void test_offload_connector_numbers(void **state)
{
    (void)state;
    RIG_INIT(.capacity = 4);
    g.c->opts.block_bytes = 1000;
    (void)add_reader(96, 96);
    assert_true(rig_step());
    assert_true(rig_schedule());
    offload_stats stats;
    offload_connector_get_stats(&stats, g.c);
    assert_int_equal(stats.host.size_bytes, 4000);
    assert_int_equal(stats.host.used_bytes, 4000);
    assert_int_equal(stats.host.store.n_queued, 6); /* four under way */
    rig_job *job = rig_find_kind(KV_TRANSFER_STORE);
    kv_transfer_done done = {.job_id = job->id, .n_good = 4, .n_bytes = 4000, .us = 7};
    rig_copy(job);
    job->id = 0;
    assert_int_equal(scheduler_transfers_done(g.f.s, 0, &done, 1), PGD_OK);
    rig_answer();
    rig_finish();
    offload_connector_get_stats(&stats, g.c);
    assert_int_equal(stats.host.store.n_bytes, 4000);
    assert_int_equal(stats.host.store.us, 7);
    assert_int_equal(stats.host.n_evicted, 2);
    finish_all();
}

static void test_offload_connector_refuses_options(void **state)
{
    (void)state;
    const kv_group_spec full = {.ops = &kv_full_attention_ops, .block_size = 16};
    const offload_connector_opts good = {.host = {.capacity = 4, .policy = offload_policy_lru()},
                                         .n_device_blocks = 4,
                                         .max_num_seqs = 2,
                                         .max_model_len = 64,
                                         .hash_block_size = 16,
                                         .n_groups = 1,
                                         .groups = &full,
                                         .n_ranks = 1};
    offload_connector *c;
    assert_int_equal(offload_connector_create(&c, &good), PGD_OK);
    offload_connector_destroy(c);
    offload_connector_destroy(NULL);
    offload_connector_opts bad[] = {good, good, good, good, good, good};
    bad[0].n_ranks = 65;
    bad[1].hash_block_size = 24;
    bad[2].host.capacity = 0;
    bad[3].n_device_blocks = 1;
    bad[4].max_step_blocks = KV_TRANSFER_MAX_BLOCKS + 1;
    bad[5].n_groups = PGD_MAX_KV_GROUPS + 1;
    for (size_t i = 0; i < PGD_ARRAY_LEN(bad); i++)
        assert_int_equal(offload_connector_create(&c, &bad[i]), PGD_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_offload_connector_oc11_stores_what_is_written),
        cmocka_unit_test(test_offload_connector_sends_what_is_left),
        cmocka_unit_test(test_offload_connector_loads_and_tells_tiers),
        cmocka_unit_test(test_offload_connector_pending_is_not_a_miss),
        cmocka_unit_test(test_offload_connector_failed_store),
        cmocka_unit_test(test_offload_connector_oc1_no_double_load),
        cmocka_unit_test(test_offload_connector_oc1_remembered_hit),
        cmocka_unit_test(test_offload_connector_b047_evicted_before_its_load),
        cmocka_unit_test(test_offload_connector_oc7_abort_during_load),
        cmocka_unit_test(test_offload_connector_abort_during_store),
        cmocka_unit_test(test_offload_connector_oc10_stores_nothing_unwritten),
        cmocka_unit_test(test_offload_connector_oc6_flushes_before_reuse),
        cmocka_unit_test(test_offload_connector_resumes_by_a_load),
        cmocka_unit_test(test_offload_connector_lost_worker),
        cmocka_unit_test(test_offload_connector_tr6_partial_load),
        cmocka_unit_test(test_offload_connector_oc13_all_ranks),
        cmocka_unit_test(test_offload_connector_refuses_false_reports),
        cmocka_unit_test(test_offload_connector_window_of_a_hybrid),
        cmocka_unit_test(test_offload_connector_co5_leaves_out_the_last),
        cmocka_unit_test(test_offload_connector_cross_attention),
        cmocka_unit_test(test_offload_connector_tr2_promotes_from_disk),
        cmocka_unit_test(test_offload_connector_tr2_keeps_what_is_there),
        cmocka_unit_test(test_offload_connector_tr2_full_host),
        cmocka_unit_test(test_offload_connector_tr2_failed_reads),
        cmocka_unit_test(test_offload_connector_abort_during_promotion),
        cmocka_unit_test(test_offload_connector_does_not_wait_for_ever),
        cmocka_unit_test(test_offload_connector_forgets_what_is_not_to_be_trusted),
        cmocka_unit_test(test_offload_connector_of11_threshold),
        cmocka_unit_test(test_offload_connector_computes_what_is_quicker),
        cmocka_unit_test(test_offload_connector_clear),
        cmocka_unit_test(test_offload_connector_numbers),
        cmocka_unit_test(test_offload_connector_refuses_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
