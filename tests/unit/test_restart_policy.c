/* Deaths in every order, and what is done about them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/core/restart_policy.h"

#define MAX_BARREN 6

static const uint64_t WAITS_US[MAX_BARREN] = {0, 500000, 1000000, 2000000, 4000000, 8000000};

static bool die(restart_policy *p, poison_verdict verdict)
{
    uint64_t wait_us;
    return restart_policy_note_death(p, &wait_us, RESTART_EXIT, verdict);
}

/* Dies without a sign of life from the n-th place of the row on, until given up. */
static void expect_row(restart_policy *p, int from)
{
    uint64_t wait_us;
    for (int i = from; i < MAX_BARREN; i++) {
        assert_true(restart_policy_note_death(p, &wait_us, RESTART_EXIT, POISON_UNKNOWN));
        assert_int_equal(wait_us, WAITS_US[i]);
    }
    assert_false(restart_policy_note_death(p, &wait_us, RESTART_EXIT, POISON_UNKNOWN));
}

static void test_restart_policy_gives_up(void **state)
{
    (void)state;
    restart_policy p = {0};
    expect_row(&p, 0);
    assert_int_equal(restart_policy_n_restarts(&p), MAX_BARREN); /* the last death had none */
}

static void test_restart_policy_step_resets(void **state)
{
    (void)state;
    restart_policy p = {0};
    for (int i = 0; i < 100; i++) {
        for (int k = 0; k < MAX_BARREN; k++)
            assert_true(die(&p, POISON_UNKNOWN));
        restart_policy_note_step(&p);
    }
    expect_row(&p, 0);
}

/* An idle worker dies once a month. */
static void test_restart_policy_long_life_resets(void **state)
{
    (void)state;
    restart_policy p = {0};
    for (int i = 0; i < 100; i++) {
        assert_true(die(&p, POISON_UNKNOWN));
        restart_policy_note_pong(&p, RESTART_PROVEN_US);
    }
    assert_true(die(&p, POISON_UNKNOWN));
    restart_policy_note_pong(&p, RESTART_PROVEN_US - 1); /* answers, but has not lived long */
    expect_row(&p, 1);
}

/* Two deaths that nobody can explain yet, some while suspects run apart, the last one's verdict. */
static bool find_culprit(restart_policy *p, int n_searching)
{
    bool ok = die(p, POISON_UNKNOWN) && die(p, POISON_UNKNOWN);
    for (int i = 0; i < n_searching && ok; i++)
        ok = die(p, POISON_SEARCHING);
    return ok && die(p, POISON_FOUND);
}

/* Two poison requests in a row with nobody else there, whatever the search takes. */
static void test_restart_policy_poison_does_not_count(void **state)
{
    (void)state;
    for (int n_searching = 1; n_searching < 20; n_searching++) {
        restart_policy p = {0};
        assert_true(find_culprit(&p, n_searching));
        assert_true(find_culprit(&p, n_searching));
        expect_row(&p, 0);
    }
}

/* A worker that dies of every request is not the fault of all of them. */
static void test_restart_policy_everything_is_poison(void **state)
{
    (void)state;
    restart_policy p = {0};
    int n_found = 0;
    while (find_culprit(&p, 5))
        n_found++;
    assert_int_equal(n_found, 3);
    memset(&p, 0, sizeof p);
    for (int i = 0; i < 20; i++) { /* with steps in between it may go on */
        assert_true(find_culprit(&p, 5));
        restart_policy_note_step(&p);
    }
}

/* Not even a search that never finds anybody goes on for ever without a found one: deaths before
 * the first step of a life are nobody's. */
static void test_restart_policy_dies_while_starting(void **state)
{
    (void)state;
    restart_policy p = {0};
    assert_true(die(&p, POISON_UNKNOWN) && die(&p, POISON_UNKNOWN) && die(&p, POISON_SEARCHING));
    expect_row(&p, 2);
}

static void test_restart_policy_reasons(void **state)
{
    (void)state;
    restart_policy p = {0};
    uint64_t wait_us;
    for (restart_reason r = 0; r < RESTART_N_REASONS; r++) {
        restart_policy_note_step(&p);
        for (restart_reason k = 0; k <= r % 3; k++)
            assert_true(restart_policy_note_death(&p, &wait_us, r, POISON_UNKNOWN));
        assert_int_equal(p.n_restarts[r], 1 + r % 3);
        for (restart_reason k = 0; k < r; k++)
            assert_string_not_equal(restart_policy_reason_name(k), restart_policy_reason_name(r));
    }
    assert_int_equal(restart_policy_n_restarts(&p), 18);
    assert_string_equal(restart_policy_reason_name(RESTART_STEP_TIMEOUT), "step_timeout");
    assert_string_equal(restart_policy_reason_name(RESTART_SILENCE), "silence");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_restart_policy_gives_up),
        cmocka_unit_test(test_restart_policy_step_resets),
        cmocka_unit_test(test_restart_policy_long_life_resets),
        cmocka_unit_test(test_restart_policy_poison_does_not_count),
        cmocka_unit_test(test_restart_policy_everything_is_poison),
        cmocka_unit_test(test_restart_policy_dies_while_starting),
        cmocka_unit_test(test_restart_policy_reasons),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
