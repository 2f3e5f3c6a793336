/* Scheduler and KV manager under random workloads, against a simulated worker with a shadow of the
 * KV memory; see sim_run.h for what is checked and sim_gen.h for the configurations.
 *
 * Each configuration runs in a child. When that fails, the trace is drawn again from its seed,
 * shrunk and printed. Environment:
 *   PGD_SIM_STEPS=N       steps per configuration
 *   PGD_SIM_SEED=N        first seed
 *   PGD_SIM_CONFIG=TEXT   only configurations whose name contains the text
 *   PGD_SIM_TRACE=FILE    runs this trace and nothing else
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <sys/mman.h>
#include <sys/resource.h>

#include <cmocka.h>

#include "tests/sim/sim_gen.h"
#include "tests/sim/sim_run.h"
#include "tests/sim/sim_shrink.h"

#if PGD_DEBUG
#    define DEFAULT_STEPS 700
#else
#    define DEFAULT_STEPS 3000
#endif
/* Integrity of everything is checked in each step of the default run, and now and then in long ones. */
#define LONG_STEPS       20000
#define LONG_CHECK_EVERY 8
#define SHRINK_LIMIT_S   60

/* What the child tells while it runs; a shared mapping. */
typedef struct progress {
    int32_t config_idx;
    uint64_t first_seed;
    uint64_t want_steps;
    uint64_t seed; /* of the trace that runs */
    sim_totals totals;
} progress;

static sim_trace trace;

static uint64_t number_from_env(const char *name, uint64_t fallback)
{
    const char *text = getenv(name);
    return text != NULL ? strtoull(text, NULL, 10) : fallback;
}

static void draw(const progress *p)
{
    sim_gen_draw(&trace, p->config_idx, p->seed);
    if (p->want_steps >= LONG_STEPS)
        trace.config.check_every = LONG_CHECK_EVERY;
}

static void run_config(void *arg)
{
    progress *p = arg;
    for (p->seed = p->first_seed; p->totals.n_steps < p->want_steps; p->seed++) {
        draw(p);
        sim_run(&trace, &p->totals);
    }
}

static void report(const progress *p, sim_verdict *v)
{
    print_error("%s, seed %llu: %s\n", sim_gen_name(p->config_idx), (unsigned long long)p->seed,
                v->text);
    draw(p);
    sim_shrink_try(v, &trace);
    if (!v->is_failed) {
        print_error("this trace alone does not fail\n");
        return;
    }
    int32_t n_ops = trace.n_ops;
    int32_t n_runs = sim_shrink(&trace, v, SHRINK_LIMIT_S);
    print_error("shrunk from %d to %d operations in %d runs: %s\n", n_ops, trace.n_ops, n_runs,
                v->text);
    print_error("--- run it with PGD_SIM_TRACE=FILE\n");
    sim_trace_write(&trace, stderr);
    print_error("---\n");
}

static void add_totals(sim_totals *sum, const sim_totals *t)
{
    const uint64_t *from = (const uint64_t *)t;
    uint64_t *to = (uint64_t *)sum;
    for (size_t i = 0; i < sizeof *sum / sizeof *to; i++)
        to[i] += from[i];
}

/* Of the children so far. */
static double cpu_s(void)
{
    struct rusage usage;
    getrusage(RUSAGE_CHILDREN, &usage);
    return (double)usage.ru_utime.tv_sec + (double)usage.ru_utime.tv_usec * 1e-6;
}

static void print_totals(const char *name, const sim_totals *t, double took_s)
{
    static const char *const names[] = {"traces",
                                        "steps",
                                        "requests",
                                        "refused",
                                        "tokens",
                                        "preemptions",
                                        "late tokens appended",
                                        "dropped",
                                        "positions hit",
                                        "worker deaths",
                                        "aborts",
                                        "errors",
                                        "drafts accepted",
                                        "of drafts",
                                        "steps of hunts",
                                        "prompts scored",
                                        "again",
                                        "null entries",
                                        "common prefixes",
                                        "loads",
                                        "of them failed",
                                        "stores",
                                        "resumed by a load",
                                        "delays",
                                        "flushes",
                                        "promotions"};
    static_assert(PGD_ARRAY_LEN(names) == sizeof *t / sizeof(uint64_t), "a name for each");
    const uint64_t *values = (const uint64_t *)t;
    print_message("%s, %.1f s of CPU:", name, took_s);
    for (size_t i = 0; i < PGD_ARRAY_LEN(names); i++) {
        if (values[i] > 0)
            print_message(" %llu %s", (unsigned long long)values[i], names[i]);
    }
    print_message("\n");
}

/* The workload must have gone through everything that it is meant to try. */
static void expect_coverage(const sim_totals *t)
{
    assert_true(t->n_preemptions > 100);
    assert_true(t->n_late_appended > 10);
    assert_true(t->n_late_dropped > 0);
    assert_true(t->n_null_entries > 1000);
    assert_true(t->n_refused > 100);
    assert_true(t->n_hit_positions > 1000);
    assert_true(t->n_resets > 5);
    assert_true(t->n_aborts > 50);
    assert_true(t->n_errors > 0);
    assert_true(t->n_drafts_accepted > 100);
    assert_true(t->n_drafts_accepted < t->n_drafts);
    assert_true(t->n_narrowed > 5);
    assert_true(t->n_scored > 100);
    assert_true(t->n_scored_again > 5);
    assert_true(t->n_common > 100);
    assert_true(t->n_loads > 100);
    assert_true(t->n_failed_loads > 10);
    assert_true(t->n_stores > 100);
    assert_true(t->n_resumed > 10);
    assert_true(t->n_delays > 100);
    assert_true(t->n_flushes > 100);
    assert_true(t->n_promoted > 100);
}

static void test_scheduler_property_random_workloads(void **state)
{
    (void)state;
    const char *only = getenv("PGD_SIM_CONFIG");
    uint64_t want_steps = number_from_env("PGD_SIM_STEPS", DEFAULT_STEPS);
    bool is_long = want_steps >= LONG_STEPS;
    progress *p = mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    sim_totals sum = {0};
    int32_t n_failed = 0;
    for (int32_t i = 0; i < sim_gen_n_configs() && n_failed < 3; i++) {
        sim_verdict v;
        if (only != NULL && strstr(sim_gen_name(i), only) == NULL)
            continue;
        memset(p, 0, sizeof *p);
        p->config_idx = i;
        p->want_steps = want_steps;
        p->first_seed = number_from_env("PGD_SIM_SEED", 1);
        double began_s = cpu_s();
        sim_catch(&v, run_config, p, 100000);
        n_failed += v.is_failed;
        if (v.is_failed)
            report(p, &v);
        if (v.is_failed || is_long)
            print_totals(sim_gen_name(i), &p->totals, cpu_s() - began_s);
        add_totals(&sum, &p->totals);
    }
    print_totals("all", &sum, cpu_s());
    munmap(p, sizeof *p);
    assert_int_equal(n_failed, 0);
    if (only == NULL)
        expect_coverage(&sum);
}

static void test_scheduler_property_trace(void **state)
{
    (void)state;
    sim_verdict v;
    const char *name = getenv("PGD_SIM_TRACE");
    FILE *file = fopen(name, "r");
    assert_non_null(file);
    assert_true(sim_trace_read(&trace, file));
    fclose(file);
    sim_shrink_try(&v, &trace);
    if (v.is_failed)
        print_error("%s\n", v.text);
    assert_false(v.is_failed);
}

int main(void)
{
    const struct CMUnitTest workloads[] = {
        cmocka_unit_test(test_scheduler_property_random_workloads),
    };
    const struct CMUnitTest replay[] = {
        cmocka_unit_test(test_scheduler_property_trace),
    };
    if (getenv("PGD_SIM_TRACE") != NULL)
        return cmocka_run_group_tests(replay, NULL, NULL);
    return cmocka_run_group_tests(workloads, NULL, NULL);
}
