/* Whether the simulation finds what it is there for: each fault of planted_bugs.txt must be caught
 * within a bounded number of steps, and none must be when none is planted. Prints which check caught
 * it and after how many steps. One of them is shrunk, written, read again and must still fail.
 * PGD_SIM_PLANT=N takes bug N alone, and shrinks it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <sys/mman.h>

#include <cmocka.h>

#include "tests/sim/planted_bugs.h"
#include "tests/sim/sim_gen.h"
#include "tests/sim/sim_run.h"
#include "tests/sim/sim_shrink.h"

/* Bugs that need a rare meeting of events are found after some tens of thousands. */
#define MAX_STEPS      200000
#define N_CLEAN_STEPS  20000
#define SHRINK_LIMIT_S 20
#define MAX_SHRUNK_OPS 12

int sim_planted;

/* What the child tells while it runs; a shared mapping. */
typedef struct progress {
    uint64_t max_steps;
    int32_t first_config;
    int32_t config_idx;
    uint64_t seed;
    sim_totals totals;
} progress;

static sim_trace trace;

/* A trace of each configuration in turn, from the first one on. */
static void hunt(void *arg)
{
    progress *p = arg;
    for (p->seed = 1;; p->seed++) {
        for (p->config_idx = p->first_config; p->config_idx < sim_gen_n_configs();
             p->config_idx++) {
            if (p->totals.n_steps >= p->max_steps)
                return;
            sim_gen_draw(&trace, p->config_idx, p->seed);
            sim_run(&trace, &p->totals);
        }
    }
}

static bool is_of_tiers(const planted_bug *b)
{
    static const char *const parts[] = {"offload", "sim_streams", "scheduler_load"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(parts); i++) {
        if (strstr(b->file, parts[i]) != NULL)
            return true;
    }
    return false;
}

static void find(sim_verdict *v, progress *p, int bug, uint64_t max_steps)
{
    memset(p, 0, sizeof *p);
    p->max_steps = max_steps;
    if (bug > 0 && is_of_tiers(&planted_bugs[bug - 1]))
        p->first_config = sim_gen_first_offload();
    sim_planted = bug;
    sim_catch(v, hunt, p, 600);
    v->text[strcspn(v->text, "\n")] = '\0';
}

static progress *map_progress(void)
{
    progress *p = mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    return p;
}

static int only_bug(void)
{
    const char *text = getenv("PGD_SIM_PLANT");
    return text != NULL ? atoi(text) : 0;
}

static void test_planted_bugs_are_found(void **state)
{
    (void)state;
    progress *p = map_progress();
    sim_verdict v;
    int n_missed = 0;
    for (int bug = 1; bug <= n_planted_bugs; bug++) {
        const planted_bug *b = &planted_bugs[bug - 1];
        if (only_bug() != 0 && only_bug() != bug)
            continue;
        if (!b->is_planted) {
            print_error(
                "bug %d, \"%s\": its lines are not in %s once: planted_bugs.txt is behind\n", bug,
                b->name, b->file);
            n_missed++;
            continue;
        }
        find(&v, p, bug, MAX_STEPS);
        n_missed += !v.is_failed;
        print_message("%2d %-68s %s %6llu steps  %s\n", bug, b->name,
                      v.is_failed ? "found after" : "MISSED in",
                      (unsigned long long)p->totals.n_steps, v.text);
    }
    find(&v, p, 0, N_CLEAN_STEPS);
    munmap(p, sizeof *p);
    assert_int_equal(n_missed, 0);
    if (v.is_failed)
        print_error("nothing planted: %s\n", v.text);
    assert_false(v.is_failed);
}

/* The shrunk trace is short, survives being written and read, and needs the bug to fail. */
static void test_planted_bugs_shrink(void **state)
{
    (void)state;
    progress *p = map_progress();
    sim_verdict v;
    int bug = only_bug() != 0 ? only_bug() : 1;
    find(&v, p, bug, MAX_STEPS);
    assert_true(v.is_failed);
    sim_gen_draw(&trace, p->config_idx, p->seed);
    munmap(p, sizeof *p);
    int32_t n_before = trace.n_ops;
    sim_shrink_try(&v, &trace);
    assert_true(v.is_failed);
    int32_t n_runs = sim_shrink(&trace, &v, SHRINK_LIMIT_S);
    print_message("bug %d: %d operations shrunk to %d in %d runs: %s", bug, n_before, trace.n_ops,
                  n_runs, v.text);
    if (only_bug() != 0)
        sim_trace_write(&trace, stdout);

    FILE *file = tmpfile();
    static sim_trace again;
    sim_verdict replayed;
    assert_non_null(file);
    sim_trace_write(&trace, file);
    rewind(file);
    assert_true(sim_trace_read(&again, file));
    fclose(file);
    assert_int_equal(again.n_ops, trace.n_ops);
    sim_shrink_try(&replayed, &again);
    assert_true(replayed.is_failed);
    assert_string_equal(replayed.key, v.key);
    sim_planted = 0;
    sim_shrink_try(&replayed, &again);
    assert_false(replayed.is_failed);
    if (only_bug() == 0)
        assert_true(trace.n_ops <= MAX_SHRUNK_OPS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_planted_bugs_are_found),
        cmocka_unit_test(test_planted_bugs_shrink),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
