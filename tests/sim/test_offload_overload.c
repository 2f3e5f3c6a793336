/* No deadlock: overload with pools and tiers of a few blocks, in which requests wait for loads, for
 * blocks on their way up from disk, for each other's loads and for blocks that transfers hold, comes
 * to an end whatever fails on the way. Everything that sim_run.h checks is checked too.
 *
 * PGD_SIM_WORKLOADS and PGD_SIM_SEED change the amount and the first seed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <sys/mman.h>

#include <cmocka.h>

#include "tests/sim/sim_gen.h"
#include "tests/sim/sim_run.h"
#include "tests/sim/sim_shrink.h"

#if PGD_DEBUG
#    define DEFAULT_WORKLOADS 60
#else
#    define DEFAULT_WORKLOADS 300
#endif
#define SHRINK_LIMIT_S 60

/* What the child tells while it runs; a shared mapping. */
typedef struct progress {
    uint64_t first_seed;
    uint64_t n_workloads;
    uint64_t seed; /* of the workload that runs */
    sim_totals totals;
} progress;

static sim_trace trace;

static uint64_t number_from_env(const char *name, uint64_t fallback)
{
    const char *text = getenv(name);
    return text != NULL ? strtoull(text, NULL, 10) : fallback;
}

/* A workload of each configuration in turn. */
static void draw(uint64_t seed)
{
    int32_t n_configs = sim_gen_n_configs() - sim_gen_first_offload();
    int32_t config_idx = sim_gen_first_offload() + (int32_t)(seed % (uint64_t)n_configs);
    sim_gen_draw_overload(&trace, config_idx, seed);
    trace.config.is_cut = 0;
}

static void run_all(void *arg)
{
    progress *p = arg;
    for (p->seed = p->first_seed; p->seed < p->first_seed + p->n_workloads; p->seed++) {
        draw(p->seed);
        sim_run(&trace, &p->totals);
    }
}

static void report(const progress *p, sim_verdict *v)
{
    draw(p->seed);
    print_error("%s, seed %llu: %s\n", trace.config.name, (unsigned long long)p->seed, v->text);
    sim_shrink_try(v, &trace);
    if (!v->is_failed) {
        print_error("this workload alone does not fail\n");
        return;
    }
    sim_shrink(&trace, v, SHRINK_LIMIT_S);
    print_error("shrunk: %s\n--- run it with PGD_SIM_TRACE=FILE test_scheduler_property\n",
                v->text);
    sim_trace_write(&trace, stderr);
    print_error("---\n");
}

static void test_offload_overload_comes_to_an_end(void **state)
{
    (void)state;
    progress *p = mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    p->first_seed = number_from_env("PGD_SIM_SEED", 1);
    p->n_workloads = number_from_env("PGD_SIM_WORKLOADS", DEFAULT_WORKLOADS);
    sim_verdict v;
    sim_catch(&v, run_all, p, 100000);
    if (v.is_failed)
        report(p, &v);
    const sim_totals *t = &p->totals;
    print_message("%llu workloads: %llu requests, %llu steps, %llu preemptions, %llu loads, %llu "
                  "of them of preempted requests, %llu failed, %llu stores, %llu promotions, %llu "
                  "delays\n",
                  (unsigned long long)t->n_runs, (unsigned long long)t->n_requests,
                  (unsigned long long)t->n_steps, (unsigned long long)t->n_preemptions,
                  (unsigned long long)t->n_loads, (unsigned long long)t->n_resumed,
                  (unsigned long long)t->n_failed_loads, (unsigned long long)t->n_stores,
                  (unsigned long long)t->n_promoted, (unsigned long long)t->n_delays);
    assert_false(v.is_failed);
    if (p->n_workloads >= DEFAULT_WORKLOADS) {
        assert_true(t->n_preemptions > p->n_workloads);
        assert_true(t->n_loads > p->n_workloads);
        assert_true(t->n_failed_loads > 0);
        assert_true(t->n_promoted > 0);
        assert_true(t->n_delays > p->n_workloads);
    }
    munmap(p, sizeof *p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_offload_overload_comes_to_an_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
