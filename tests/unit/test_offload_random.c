/* The offload connector under random load: tiny pools on all sides, aborts, lost workers, loads that
 * fail, results that are not to be trusted, transfers that end in any order. What a request reads is
 * what it would have computed (the rig checks), and everybody finishes. */
#include <stdlib.h>

#include "tests/unit/offload_rig.h"

static uint64_t seed;

static int32_t draw(int32_t n)
{
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    return (int32_t)(hash_u64(seed) % (uint64_t)n);
}

static void end_some_transfer(void)
{
    rig_job *job = &g.jobs[draw(RIG_JOBS)];
    for (int i = 0; i < RIG_JOBS && !rig_may_tell(job); i++)
        job = &g.jobs[(job - g.jobs + 1) % RIG_JOBS];
    if (!rig_may_tell(job))
        return;
    bool is_load = job->kind == KV_TRANSFER_LOAD;
    int32_t n_good = draw(8) != 0 ? -1 : is_load ? draw(job->n_blocks + 1) : 0;
    rig_tell(job, job->n_told, n_good);
}

static void do_something(int32_t n_requests)
{
    int32_t what = draw(100);
    if (what < 30 && (int32_t)g.f.next_id < n_requests && hash_map_n_entries(g.f.s->requests) < 30)
        FIX_ADD(&g.f, .n_prompt = 1 + draw(150), .n_common = 16 * draw(9),
                .max_tokens = 1 + draw(40), .priority = draw(3));
    else if (what < 33 && g.f.next_id > 0)
        (void)scheduler_finish_request(g.f.s, (uint64_t)draw((int32_t)g.f.next_id),
                                       REQUEST_FINISHED_ABORTED);
    else if (what < 34)
        rig_lose_worker();
    else if (what < 36)
        g.fail_id = g.f.next_id > 0 ? (uint64_t)draw((int32_t)g.f.next_id) : UINT64_MAX;
    else if (what < 38)
        g.disk.fails = !g.disk.fails;
    else if (what < 42)
        g.disk.is_frozen = !g.disk.is_frozen;
    else if (what < 43)
        g.disk.refuses_removal = !g.disk.refuses_removal;
    else if (what < 44)
        g.c->retry_at_us = 0;
    else if (what < 65)
        end_some_transfer();
    else if (g.f.s->n_records < (g.f.s->opts.async ? 2 : 1))
        (void)rig_schedule();
    else
        rig_answer();
}

static void run(rig_opts o, uint64_t s)
{
    seed = s;
    rig_init(o);
    for (int i = 0; i < 600; i++)
        do_something(50);
    g.disk.is_frozen = false;
    g.fail_id = UINT64_MAX;
    while (g.f.s->n_records > 0)
        rig_answer();
    rig_finish();
    rig_settle();
    g.disk.refuses_removal = false;
    for (int i = 0; hash_map_n_entries(g.c->distrusted) + (size_t)g.disk.n_jobs > 0; i++) {
        assert_true(i < 1000);
        g.c->retry_at_us = 0;
        offload_connector_pump(g.c);
    }
    for (int32_t i = 0; i < g.disk.n_files; i++)
        assert_true(g.disk.contents[i] != RIG_POISON);
    assert_int_equal(g.c->n_load_blocks, 0);
    assert_int_equal(g.c->n_pins, g.c->n_free_pins);
    assert_int_equal(offload_manager_n_evictable(g.m), offload_manager_n_blocks(g.m));
    rig_deinit();
}

static void test_offload_random_workloads(void **state)
{
    (void)state;
    const kv_group_spec full = {.ops = &kv_full_attention_ops, .block_size = 16};
    const kv_group_spec wide = {.ops = &kv_full_attention_ops, .block_size = 32};
    const kv_group_spec sliding = {.ops = &kv_sliding_window_ops, .block_size = 16, .window = 40};
    const kv_group_spec chunked = {.ops = &kv_chunked_local_ops, .block_size = 16, .window = 64};
    const kv_group_spec models[][3] = {{full}, {full, sliding}, {sliding}, {wide, chunked, full}};
    const int32_t n_groups[] = {1, 2, 1, 3};
    const int32_t capacities[] = {1, 2, 7, 40, 200};
    const char *const policies[] = {"lru", "arc"};
    const char *rounds = getenv("PGD_OFFLOAD_ROUNDS"); /* for a soak */
    int n_rounds = rounds != NULL ? atoi(rounds) : 1;
    uint64_t n_runs = 0;
    uint64_t n_loads = 0, n_flushes = 0, n_reads = 0;
    for (int32_t k = 0; k < 4 * n_rounds; k++) {
        for (size_t i = 0; i < PGD_ARRAY_LEN(capacities); i++) {
            for (int bits = 0; bits < 16; bits++) {
                rig_opts o = {.capacity = capacities[i],
                              .n_blocks = n_groups[k % 4] == 3   ? 90
                                          : n_groups[k % 4] == 2 ? 60
                                                                 : 30,
                              .policy = policies[bits & 1],
                              .is_eager = (bits & 2) != 0,
                              .is_async = (bits & 4) != 0,
                              .has_disk = (bits & 8) != 0,
                              .n_ranks = 1 + (int32_t)(n_runs % 2),
                              .groups = models[k % 4],
                              .n_groups = n_groups[k % 4],
                              .max_num_seqs = 8,
                              .max_step_blocks = n_runs % 5 == 0 ? 24 : 0,
                              .scheduling = n_runs % 3 == 0 ? SCHEDULER_PRIORITY : SCHEDULER_FCFS};
                run(o, ++n_runs);
                n_loads += (uint64_t)g.n_loads;
                n_flushes += (uint64_t)g.n_flushes;
                n_reads += (uint64_t)g.disk.n_reads;
            }
        }
    }
    print_message("%d runs: %d loads, %d flushes, %d reads from disk\n", (int)n_runs, (int)n_loads,
                  (int)n_flushes, (int)n_reads);
    assert_true(n_loads > 100 && n_flushes > 100 && n_reads > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_offload_random_workloads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
