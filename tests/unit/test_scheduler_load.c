/* Scheduler with a KV connector: rules SC5a/b/g, SC8, AL2, OC7, UP6, UP9, by a connector whose
 * answers are written down. */
#include "common/hash.h"
#include "tests/unit/scheduler_fixture.h"

#define MAX_LOADED 64

/* What the connector says of a request, and what it has heard. */
typedef struct script {
    kv_match match; /* of tokens from 0 on: local ones are taken off */
    bool is_loading;
    int n_asked;
    int n_allocated;
    int n_finished;
    int n_forgotten;
    int32_t n_local;
    int32_t n_external;
    int32_t n_table_blocks;
    request *r;
} script;

static fix f;
static script scripts[FIX_MAX_REQS];
static kv_loaded loaded[MAX_LOADED]; /* to be told */
static int n_loaded;
static kv_transfer_msg transfers[FIX_MAX_REQS];
static int32_t n_transfers;
static int n_results;
static int n_step_tokens;
static int n_reports;
static int n_resets;

static kv_match on_match(void *arg, request *r, int32_t n_local_tokens)
{
    script *q = &((script *)arg)[r->id];
    kv_match match = q->match;
    q->n_asked++;
    match.n_tokens -= n_local_tokens;
    if (match.kind == KV_MATCH_HIT && match.n_tokens <= 0)
        match = (kv_match){.kind = KV_MATCH_NONE};
    return match;
}

static void on_allocated(void *arg, request *r, const block_ids_msg *table, int32_t n_local_tokens,
                         int32_t n_external_tokens)
{
    script *q = &((script *)arg)[r->id];
    q->n_allocated++;
    q->r = r;
    q->n_local = n_local_tokens;
    q->n_external = n_external_tokens;
    q->n_table_blocks = table->n_blocks[0];
    q->is_loading = n_external_tokens > 0;
    if (n_external_tokens > 0)
        transfers[n_transfers++] =
            (kv_transfer_msg){.job_id = r->id, .kind = KV_TRANSFER_LOAD, .n_blocks = 0};
}

static bool on_build_step(void *arg, scheduler_output *out)
{
    static kv_transfer_msg sent[FIX_MAX_REQS];
    (void)arg;
    memcpy(sent, transfers, sizeof sent);
    out->transfers = sent;
    out->n_transfers = n_transfers;
    n_transfers = 0;
    return false;
}

static pgd_err on_transfers(void *arg, int32_t rank, const kv_transfer_done *done, int32_t n_done)
{
    (void)arg;
    n_reports += n_done;
    return rank == 0 && done[0].job_id == 7 ? PGD_OK : PGD_EPROTO;
}

static void on_step(void *arg, int32_t n_tokens, uint32_t forward_us)
{
    (void)arg;
    (void)forward_us;
    n_step_tokens += n_tokens;
    n_results++;
}

static bool has_work(void *arg)
{
    (void)arg;
    return n_transfers > 0;
}

static void on_forget(void *arg, const request *r)
{
    ((script *)arg)[r->id].n_forgotten++;
}

static bool on_next_loaded(void *arg, kv_loaded *out)
{
    (void)arg;
    if (n_loaded == 0)
        return false;
    *out = loaded[0];
    memmove(loaded, loaded + 1, (size_t)--n_loaded * sizeof *loaded);
    return true;
}

static void on_end(void *arg, request *r)
{
    ((script *)arg)[r->id].n_finished++;
}

static void on_reset(void *arg)
{
    (void)arg;
    n_resets++;
    n_loaded = 0;
    n_transfers = 0;
    for (int i = 0; i < FIX_MAX_REQS; i++)
        scripts[i].is_loading = false;
}

static const kv_connector connector = {.arg = scripts,
                                       .match = on_match,
                                       .allocated = on_allocated,
                                       .build_step = on_build_step,
                                       .on_transfers = on_transfers,
                                       .on_step = on_step,
                                       .has_work = has_work,
                                       .forget = on_forget,
                                       .next_loaded = on_next_loaded,
                                       .finished = on_end,
                                       .reset = on_reset};

static void init(scheduler_opts opts)
{
    memset(scripts, 0, sizeof scripts);
    n_loaded = n_results = n_resets = n_step_tokens = n_reports = 0;
    n_transfers = 0;
    opts.connector = &connector;
    fix_init(&f, opts);
}

static void script_hit(uint64_t id, int32_t n_tokens)
{
    scripts[id].match = (kv_match){.kind = KV_MATCH_HIT, .n_tokens = n_tokens};
}

static void end_load(uint64_t id, int32_t n_valid_tokens)
{
    assert_true(n_loaded < MAX_LOADED);
    loaded[n_loaded++] = (kv_loaded){scripts[id].r, n_valid_tokens};
    scripts[id].is_loading = false;
}

static int32_t n_published(void)
{
    return block_pool_n_published(kv_manager_get_pool(f.s->kv));
}

static scheduler_stats stats(void)
{
    scheduler_stats s;
    scheduler_get_stats(f.s, &s);
    return s;
}

static void test_scheduler_load_sc5g_request_waits_for_its_load(void **state)
{
    (void)state;
    init(fix_opts());
    script_hit(0, 64);
    scripts[0].match.n_disk_tokens = 48;
    request *r = FIX_ADD(&f, .n_prompt = 100);
    FIX_ADD(&f, .n_prompt = 20);
    assert_true(fix_schedule(&f));
    assert_int_equal(r->status, REQUEST_WAITING_FOR_REMOTE_KVS);
    assert_int_equal(scripts[0].n_external, 64);
    assert_int_equal(scripts[0].n_table_blocks, 4);
    assert_int_equal(f.out.n_transfers, 1);
    assert_null(fix_new_msg(&f, 0));
    assert_int_equal(fix_scheduled(&f, 1), 20); /* goes past it */
    assert_int_equal(n_published(), 1);         /* of request 1 alone */
    assert_int_equal(fix_n_free(&f), 999 - 4 - 2);
    assert_int_equal(stats().n_loading, 1);
    assert_int_equal(stats().n_waiting, 1);
    fix_answer_all(&f);
    assert_int_equal(n_results, 1);
    for (int i = 0; i < 3; i++) {
        fix_step(&f);
        assert_int_equal(r->status, REQUEST_WAITING_FOR_REMOTE_KVS);
    }
    end_load(0, 64);
    assert_true(fix_schedule(&f));
    assert_int_equal(r->status, REQUEST_RUNNING);
    assert_int_equal(fix_new_msg(&f, 0)->n_computed_tokens, 64);
    assert_int_equal(fix_scheduled(&f, 0), 36);
    assert_int_equal(fix_new_msg(&f, 0)->blocks.n_blocks[0], 7);
    assert_int_equal(scripts[0].n_asked, 1); /* no second question once it holds blocks */
    assert_int_equal(scripts[0].n_allocated, 2);
    assert_int_equal(scripts[0].n_local, 64);
    assert_int_equal(scripts[0].n_external, 0);
    assert_int_equal(r->num_cached_tokens, 64);
    assert_int_equal(r->num_host_tokens, 16);
    assert_int_equal(r->num_disk_tokens, 48);
    assert_int_equal(stats().n_external_queries_tokens, 100 + 20);
    assert_int_equal(stats().n_external_hit_tokens, 64);
    assert_int_equal(stats().n_disk_hit_tokens, 48);
    assert_int_equal(stats().n_prefix_hit_tokens, 0);
    assert_int_equal(stats().n_loading, 0);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* A step with nothing but a load is sent; while the load runs there is nothing to send. */
static void test_scheduler_load_goes_out_alone(void **state)
{
    (void)state;
    init(fix_opts());
    script_hit(0, 64);
    FIX_ADD(&f, .n_prompt = 100);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.total_scheduled_tokens, 0);
    assert_int_equal(f.out.n_transfers, 1);
    assert_false(fix_schedule(&f));
    assert_true(scheduler_has_work(f.s));
    fix_answer_all(&f);
    assert_false(fix_schedule(&f));
    end_load(0, 64);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 36);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* Reports reach the connector and its answer the caller; it hears of each step, of results that are
 * not to be trusted, and keeps the scheduler awake while it has something to send. */
static void test_scheduler_load_connector_hears_of_everything(void **state)
{
    (void)state;
    init(fix_opts());
    FIX_ADD(&f, .n_prompt = 100);
    assert_true(fix_schedule(&f));
    request_result_msg broken = {
        .request_id = 0, .request_epoch = 1, .error = REQUEST_ERROR_NAN_LOGITS};
    step_result result = {.step_id = f.out.step_id, .n_results = 1, .results = &broken};
    assert_int_equal(scheduler_update(f.s, &result), PGD_OK);
    assert_int_equal(n_step_tokens, 100);
    assert_int_equal(scripts[0].n_forgotten, 1);
    assert_false(fix_schedule(&f) && scheduler_has_work(f.s));
    n_transfers = 1;
    assert_true(scheduler_has_work(f.s));
    n_transfers = 0;
    kv_transfer_done done[2] = {{.job_id = 7}, {.job_id = 8}};
    assert_int_equal(scheduler_transfers_done(f.s, 0, done, 2), PGD_OK);
    assert_int_equal(n_reports, 2);
    assert_int_equal(scheduler_transfers_done(f.s, 1, done, 2), PGD_EPROTO);
    if (f.s->n_records > 0)
        fix_answer_all(&f);
    fix_deinit(&f);
    init(fix_opts());
    f.s->has_connector = false;
    assert_int_equal(scheduler_transfers_done(f.s, 0, done, 2), PGD_EPROTO);
    fix_deinit(&f);
}

static void test_scheduler_load_sc5b_behind_the_local_hit(void **state)
{
    (void)state;
    init(fix_opts());
    request *r0 = FIX_ADD(&f, .n_prompt = 40, .n_common = 40);
    fix_step(&f);
    script_hit(1, 64);
    FIX_ADD(&f, .n_prompt = 100, .n_common = 40);
    FIX_ADD(&f, .n_prompt = 100, .n_common = 40);
    assert_true(fix_schedule(&f));
    assert_int_equal(scripts[1].n_local, 32);
    assert_int_equal(scripts[1].n_external, 32);
    assert_int_equal(scripts[2].n_local, 32);
    assert_int_equal(scripts[2].n_external, 0); /* it has nothing to load */
    assert_int_equal(scripts[2].n_table_blocks, 7);
    assert_int_equal(fix_new_msg(&f, 2)->n_computed_tokens, 32);
    assert_int_equal(fix_scheduled(&f, 2), 68);
    assert_int_equal(stats().n_prefix_hit_tokens, 32);
    assert_int_equal(stats().n_external_hit_tokens, 0);
    assert_int_equal(r0->n_external_tokens, 0);
    fix_answer_all(&f);
    /* The local part has two holders and more: it outlives them. */
    assert_true(scheduler_finish_request(f.s, 0, REQUEST_FINISHED_ABORTED));
    end_load(1, 64);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_new_msg(&f, 1)->n_computed_tokens, 64);
    assert_int_equal(stats().n_prefix_hit_tokens, 64);
    assert_int_equal(stats().n_external_hit_tokens, 32);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_load_sc5b_asked_again(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.max_num_seqs = 2;
    init(opts);
    scripts[0].match.kind = scripts[1].match.kind = KV_MATCH_ASK_AGAIN;
    FIX_ADD(&f, .n_prompt = 20);
    FIX_ADD(&f, .n_prompt = 20);
    FIX_ADD(&f, .n_prompt = 20, .max_tokens = 2);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, 1);
    assert_int_equal(fix_scheduled(&f, 2), 20);
    assert_int_equal(request_queue_peek(f.s->waiting)->id, 0); /* order kept (SC6) */
    fix_answer_all(&f);
    fix_step(&f);
    assert_int_equal(scripts[0].n_asked, 2);
    assert_int_equal(scripts[1].n_asked, 2);
    scripts[0].match.kind = scripts[1].match.kind = KV_MATCH_NONE;
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_new, 2);
    assert_int_equal(f.out.new_requests[0].request_id, 0);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_load_up6_recomputes_from_the_first_bad_block(void **state)
{
    (void)state;
    init(fix_opts());
    script_hit(0, 96);
    script_hit(1, 96);
    request *r = FIX_ADD(&f, .n_prompt = 100);
    FIX_ADD(&f, .n_prompt = 100);
    assert_true(fix_schedule(&f));
    fix_answer_all(&f);
    end_load(0, 32); /* block 2 is bad */
    end_load(1, 0);  /* all of them */
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_new_msg(&f, 0)->n_computed_tokens, 32);
    assert_int_equal(fix_scheduled(&f, 0), 68);
    assert_int_equal(fix_new_msg(&f, 1)->n_computed_tokens, 0);
    assert_int_equal(scripts[0].n_asked, 1); /* and is not asked again */
    assert_int_equal(scripts[1].n_asked, 1);
    assert_int_equal(r->n_external_tokens, 0);
    /* What is there again is right: both prompts are found whole. */
    assert_int_equal(n_published(), 12);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static void test_scheduler_load_up9_abort_keeps_blocks_until_the_load_ends(void **state)
{
    (void)state;
    init(fix_opts());
    script_hit(0, 64);
    FIX_ADD(&f, .n_prompt = 100);
    assert_true(fix_schedule(&f));
    fix_answer_all(&f);
    assert_true(scheduler_finish_request(f.s, 0, REQUEST_FINISHED_ABORTED));
    scheduler_check(f.s);
    assert_int_equal(f.n_finished[0], 1);
    assert_int_equal(f.n_released[0], 0);
    assert_int_equal(scripts[0].n_finished, 1);
    assert_int_equal(fix_n_free(&f), 995);
    assert_null(scheduler_find(f.s, 0));
    assert_true(scheduler_has_work(f.s));
    assert_false(scheduler_reset_prefix_cache(f.s));
    assert_false(fix_schedule(&f)); /* the worker has no row of it */
    end_load(0, 64);
    assert_false(fix_schedule(&f));
    assert_int_equal(f.n_released[0], 1);
    assert_int_equal(fix_n_free(&f), 999);
    assert_int_equal(n_published(), 0);
    assert_false(scheduler_has_work(f.s));
    fix_deinit(&f);
}

static void test_scheduler_load_sc8_leaves_promised_blocks(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 12;
    opts.long_prefill_token_threshold = 16;
    opts.admit_partly = true;
    init(opts);
    FIX_ADD(&f, .n_prompt = 96);
    script_hit(1, 80);
    request *r = FIX_ADD(&f, .n_prompt = 90);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 0), 16); /* 10 blocks are free, 5 of them promised */
    assert_int_equal(r->status, REQUEST_WAITING_FOR_REMOTE_KVS);
    assert_int_equal(fix_n_free(&f), 5);
    fix_answer_all(&f);
    fix_deinit(&f);
    opts.n_blocks = 11;
    init(opts);
    FIX_ADD(&f, .n_prompt = 96);
    script_hit(1, 80);
    r = FIX_ADD(&f, .n_prompt = 90);
    assert_true(fix_schedule(&f));
    assert_int_equal(r->status, REQUEST_WAITING);
    assert_int_equal(r->kv_row, -1);
    fix_answer_all(&f);
    /* Without the load the first chunk is all it needs. */
    scripts[1].match.kind = KV_MATCH_NONE;
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 1), 16);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* A preempted request that is loaded again stays ahead of those that never ran. */
static void test_scheduler_load_sc5a_preempted_comes_back_as_preempted(void **state)
{
    (void)state;
    for (int policy = SCHEDULER_FCFS; policy <= SCHEDULER_PRIORITY; policy++) {
        scheduler_opts opts = fix_opts();
        opts.n_blocks = 9;
        opts.max_num_seqs = 3;
        opts.policy = (scheduler_policy)policy;
        init(opts);
        FIX_ADD(&f, .n_prompt = 64, .arrival_us = 1, .max_tokens = 2);
        request *r1 = FIX_ADD(&f, .n_prompt = 63, .arrival_us = 2);
        request *r2 = FIX_ADD(&f, .n_prompt = 20, .arrival_us = 3);
        fix_step(&f);
        script_hit(1, 48);
        assert_true(fix_schedule(&f)); /* 0 needs a fifth block */
        assert_int_equal(r1->status, REQUEST_PREEMPTED);
        fix_answer_all(&f);
        assert_int_equal(f.n_finished[0], 1);
        while (!scheduler_reset_prefix_cache(f.s))
            fix_step(&f);
        r2->arrival_us = 0; /* earlier, but it never ran */
        assert_true(fix_schedule(&f));
        assert_int_equal(r1->status, REQUEST_WAITING_FOR_REMOTE_KVS);
        fix_answer_all(&f);
        end_load(1, 48);
        scheduler__take_loaded(f.s);
        assert_int_equal(r1->status, REQUEST_PREEMPTED);
        assert_true(fix_schedule(&f));
        assert_int_equal(r1->status, REQUEST_RUNNING);
        const new_request_msg *msg = fix_new_msg(&f, 1);
        assert_int_equal(msg->n_computed_tokens, 48);
        assert_int_equal(msg->request_epoch, 2);
        fix_answer_all(&f);
        fix_deinit(&f);
    }
}

/* Preempted with a token in flight, it is being loaded when that token comes. */
static void test_scheduler_load_late_token_is_appended(void **state)
{
    (void)state;
    const uint64_t nobody = 99;
    for (int32_t max_tokens = 1; max_tokens <= 2; max_tokens++) {
        scheduler_opts opts = fix_opts();
        opts.async = true;
        opts.enable_prefix_caching = false;
        init(opts);
        request *r = FIX_ADD(&f, .n_prompt = 64, .max_tokens = max_tokens);
        assert_true(fix_schedule(&f));
        assert_true(scheduler_schedule(f.s, &f.out, &nobody, 1));
        assert_int_equal(r->status, REQUEST_PREEMPTED);
        script_hit(0, 48);
        assert_true(fix_schedule(&f));
        assert_int_equal(r->status, REQUEST_WAITING_FOR_REMOTE_KVS);
        fix_answer_all(&f);
        FIX_EXPECT_TOKENS(&f, 0, 7);
        fix_answer_all(&f);
        fix_answer_all(&f);
        if (max_tokens == 1) { /* it was the last one; the load still writes its blocks */
            assert_int_equal(f.status[0], REQUEST_FINISHED_LENGTH_CAPPED);
            assert_int_equal(f.n_released[0], 0);
            assert_int_equal(fix_n_free(&f), 999 - 3);
            end_load(0, 48);
            assert_false(fix_schedule(&f));
            assert_int_equal(f.n_released[0], 1);
        } else {
            end_load(0, 48);
            assert_true(fix_schedule(&f));
            assert_int_equal(fix_new_msg(&f, 0)->n_tokens, 65);
            assert_int_equal(fix_new_msg(&f, 0)->n_computed_tokens, 48);
            fix_answer_all(&f);
        }
        fix_deinit(&f);
    }
}

/* A request that runs alone takes the blocks of one that waits with its own loaded: if it preempted
 * itself it would be admitted again ahead of the other, and so on for ever. */
static void test_scheduler_load_holder_gives_way_to_what_runs(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 6;
    opts.enable_prefix_caching = false;
    init(opts);
    request *r0 = FIX_ADD(&f, .n_prompt = 32, .max_tokens = 40);
    request *r1 = FIX_ADD(&f, .n_prompt = 33, .max_tokens = 4);
    script_hit(1, 32);
    fix_step(&f);
    assert_int_equal(r1->status, REQUEST_WAITING_FOR_REMOTE_KVS);
    fix_step(&f);
    assert_int_equal(fix_n_free(&f), 0);
    end_load(1, 32);
    scripts[1].match.kind = KV_MATCH_NONE;
    fix_step(&f);
    assert_int_equal(r1->status, REQUEST_WAITING);
    assert_true(r1->kv_row >= 0);
    while (r0->n_tokens < 50)
        fix_step(&f);
    assert_true(r1->kv_row < 0);
    assert_int_equal(r0->num_preemptions, 0);
    for (int turn = 0; turn < 40 && f.n_finished[1] == 0; turn++)
        fix_step(&f);
    assert_int_equal(f.n_finished[0], 1);
    assert_int_equal(f.n_finished[1], 1);
    fix_deinit(&f);
}

/* While that load is under way its blocks cannot be taken: the one that runs waits where it is. If
 * it preempted itself it would meet the next load of the other, and so on for ever. */
static void test_scheduler_load_what_runs_waits_for_it(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 6;
    opts.enable_prefix_caching = false;
    init(opts);
    request *r0 = FIX_ADD(&f, .n_prompt = 32, .max_tokens = 40);
    request *r1 = FIX_ADD(&f, .n_prompt = 33, .max_tokens = 4);
    FIX_ADD(&f, .n_prompt = 5, .max_tokens = 1);
    script_hit(1, 32);
    fix_step(&f);
    while (f.s->n_records > 0 || fix_schedule(&f))
        fix_answer_all(&f);
    assert_int_equal(r0->num_computed_tokens, 48);
    assert_int_equal(r0->num_preemptions, 0);
    assert_int_equal(r0->status, REQUEST_RUNNING);
    assert_true(r1->kv_row >= 0);
    end_load(1, 32);
    scripts[1].match.kind = KV_MATCH_NONE;
    for (int turn = 0; turn < 60 && f.n_finished[1] == 0; turn++)
        fix_step(&f);
    for (int i = 0; i < 3; i++)
        assert_int_equal(f.n_finished[i], 1);
    assert_int_equal(f.s->stats.n_preemptions, 0);
    fix_deinit(&f);
}

static void test_scheduler_load_lost_worker(void **state)
{
    (void)state;
    init(fix_opts());
    script_hit(0, 64);
    script_hit(1, 64);
    request *r = FIX_ADD(&f, .n_prompt = 100);
    FIX_ADD(&f, .n_prompt = 100);
    assert_true(fix_schedule(&f));
    fix_answer_all(&f);
    assert_true(scheduler_finish_request(f.s, 1, REQUEST_FINISHED_ABORTED));
    scheduler_reset_worker(f.s);
    scheduler_check(f.s);
    assert_int_equal(n_resets, 1);
    assert_int_equal(f.n_released[1], 1);
    assert_int_equal(fix_n_free(&f), 999);
    assert_int_equal(stats().n_loading, 0);
    assert_int_equal(r->status, REQUEST_WAITING);
    assert_true(fix_schedule(&f)); /* asked again, loaded again */
    assert_int_equal(scripts[0].n_asked, 2);
    assert_int_equal(r->status, REQUEST_WAITING_FOR_REMOTE_KVS);
    fix_answer_all(&f);
    /* Destroyed with a load under way that nobody waits for any more. */
    assert_true(scheduler_finish_request(f.s, 0, REQUEST_FINISHED_ABORTED));
    fix_deinit(&f);
}

/* Nobody takes the blocks of a load that is under way, not even when nothing else can move. */
static void test_scheduler_load_is_not_released_for_the_head(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 11;
    init(opts);
    script_hit(0, 96);
    request *r0 = FIX_ADD(&f, .n_prompt = 100, .max_tokens = 2);
    FIX_ADD(&f, .n_prompt = 90, .max_tokens = 2);
    assert_true(fix_schedule(&f));
    fix_answer_all(&f);
    assert_false(fix_schedule(&f));
    assert_true(r0->kv_row >= 0);
    assert_true(scheduler_finish_request(f.s, 0, REQUEST_FINISHED_ABORTED));
    assert_false(fix_schedule(&f)); /* its blocks are written still */
    end_load(0, 96);
    assert_true(fix_schedule(&f));
    assert_int_equal(fix_scheduled(&f, 1), 90);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* A request that was set aside, here because it is not among those that may run, gives its blocks
 * back when the only one that may run lacks them. */
static void test_scheduler_load_holder_set_aside_is_released(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 11;
    opts.max_num_batched_tokens = 120;
    init(opts);
    script_hit(0, 96);
    request *r0 = FIX_ADD(&f, .n_prompt = 100, .max_tokens = 2);
    FIX_ADD(&f, .n_prompt = 90, .max_tokens = 2);
    assert_true(fix_schedule(&f));
    fix_answer_all(&f);
    end_load(0, 96);
    const uint64_t second[] = {1};
    assert_true(scheduler_schedule(f.s, &f.out, second, 1));
    scheduler_check(f.s);
    assert_int_equal(fix_scheduled(&f, 1), 90);
    assert_int_equal(r0->kv_row, -1);
    fix_answer_all(&f);
    fix_deinit(&f);
}

/* The blocks that a load's local hit shares may be published by this very step, so nobody is
 * preempted after it began. */
static void test_scheduler_load_nobody_is_preempted_after_it_began(void **state)
{
    (void)state;
    scheduler_opts opts = fix_opts();
    opts.n_blocks = 13;
    opts.policy = SCHEDULER_PRIORITY;
    init(opts);
    FIX_ADD(&f, .n_prompt = 60, .priority = 5, .max_tokens = 40); /* 4 blocks */
    fix_step(&f);
    script_hit(1, 64);
    FIX_ADD(&f, .n_prompt = 80, .priority = 0, .arrival_us = 1); /* 5 of 8 */
    FIX_ADD(&f, .n_prompt = 60, .priority = 0, .arrival_us = 2); /* 4 of 3 */
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_preempted, 0);
    assert_int_equal(fix_scheduled(&f, 0), 1);
    assert_int_equal(fix_scheduled(&f, 2), 0);
    fix_answer_all(&f);
    assert_true(fix_schedule(&f));
    assert_int_equal(f.out.n_preempted, 1);
    assert_int_equal(fix_scheduled(&f, 2), 60);
    fix_answer_all(&f);
    fix_deinit(&f);
}

static uint64_t rng;

static int rnd(int n)
{
    rng = hash_u64(rng + 0x9e3779b97f4a7c15u);
    return (int)((rng >> 11) % (uint64_t)n);
}

/* Loads end late, in part or not at all before the worker dies; requests are aborted; all come to
 * their end and every block comes back. */
static void run_random(void)
{
    scheduler_opts opts = fix_opts();
    opts.max_queued_requests = FIX_MAX_REQS;
    opts.n_blocks = 20 + rnd(30);
    opts.max_num_seqs = 1 + rnd(6);
    opts.max_num_batched_tokens = 40 + rnd(100);
    opts.policy = rnd(2) == 0 ? SCHEDULER_FCFS : SCHEDULER_PRIORITY;
    opts.async = rnd(2) == 0;
    opts.admit_partly = rnd(2) == 0;
    opts.enable_prefix_caching = rnd(4) > 0;
    init(opts);
    uint64_t n_reqs = 0;
    for (int turn = 0; turn < 3000 && (n_reqs < 50 || scheduler_has_work(f.s)); turn++) {
        if (n_reqs < 50 && rnd(4) == 0) {
            int32_t n_prompt = 1 + rnd(250);
            script *q = &scripts[n_reqs];
            q->match.kind = (kv_match_kind)rnd(3);
            q->match.n_tokens = 16 * rnd((n_prompt + 15) / 16);
            if (q->match.n_tokens == 0 && q->match.kind == KV_MATCH_HIT)
                q->match.kind = KV_MATCH_NONE;
            FIX_ADD(&f, .n_prompt = n_prompt, .n_common = rnd(2) * n_prompt,
                    .max_tokens = 1 + rnd(40), .priority = rnd(3), .arrival_us = n_reqs);
            n_reqs++;
        }
        for (uint64_t id = 0; id < n_reqs; id++) {
            script *q = &scripts[id];
            const request *r = q->r;
            if (q->match.kind == KV_MATCH_ASK_AGAIN && rnd(10) == 0)
                q->match.kind = KV_MATCH_NONE;
            if (f.n_released[id] > 0 || r == NULL || rnd(8) > 0)
                continue;
            bool is_told = false;
            for (int i = 0; i < n_loaded; i++)
                is_told = is_told || loaded[i].r == r;
            if (is_told || !q->is_loading)
                continue;
            int32_t n_lost = rnd(2) * rnd(q->n_external / 16 + 1) * 16;
            end_load(id, q->n_local + q->n_external - n_lost);
        }
        if (rnd(60) == 0 && n_reqs > 0)
            scheduler_finish_request(f.s, (uint64_t)rnd((int)n_reqs), REQUEST_FINISHED_ABORTED);
        if (rnd(300) == 0)
            scheduler_reset_worker(f.s);
        if (f.s->n_records < 2 && fix_schedule(&f))
            continue;
        if (f.s->n_records > 0)
            fix_answer_all(&f);
    }
    while (f.s->n_records > 0)
        fix_answer_all(&f);
    assert_false(scheduler_has_work(f.s));
    assert_int_equal(fix_n_free(&f), opts.n_blocks - 1);
    for (uint64_t id = 0; id < n_reqs; id++) {
        assert_int_equal(f.n_finished[id], 1);
        assert_int_equal(scripts[id].n_finished, 1);
    }
    fix_deinit(&f);
}

static void test_scheduler_load_random(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        rng = seed;
        run_random();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler_load_sc5g_request_waits_for_its_load),
        cmocka_unit_test(test_scheduler_load_goes_out_alone),
        cmocka_unit_test(test_scheduler_load_connector_hears_of_everything),
        cmocka_unit_test(test_scheduler_load_sc5b_behind_the_local_hit),
        cmocka_unit_test(test_scheduler_load_sc5b_asked_again),
        cmocka_unit_test(test_scheduler_load_up6_recomputes_from_the_first_bad_block),
        cmocka_unit_test(test_scheduler_load_up9_abort_keeps_blocks_until_the_load_ends),
        cmocka_unit_test(test_scheduler_load_sc8_leaves_promised_blocks),
        cmocka_unit_test(test_scheduler_load_sc5a_preempted_comes_back_as_preempted),
        cmocka_unit_test(test_scheduler_load_late_token_is_appended),
        cmocka_unit_test(test_scheduler_load_holder_gives_way_to_what_runs),
        cmocka_unit_test(test_scheduler_load_what_runs_waits_for_it),
        cmocka_unit_test(test_scheduler_load_lost_worker),
        cmocka_unit_test(test_scheduler_load_is_not_released_for_the_head),
        cmocka_unit_test(test_scheduler_load_holder_set_aside_is_released),
        cmocka_unit_test(test_scheduler_load_nobody_is_preempted_after_it_began),
        cmocka_unit_test(test_scheduler_load_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
