/* Steps in flight: first in, first out; suspects once each, at their oldest position. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/core/step_notes.h"

static void add(step_notes *n, uint64_t new_id, uint64_t cached_id, int32_t n_computed)
{
    new_request_msg first = {.request_id = new_id, .n_scheduled_tokens = 7};
    cached_request_msg second = {
        .request_id = cached_id, .n_computed_tokens = n_computed, .n_scheduled_tokens = 1};
    scheduler_output out = {.n_new = new_id != 0,
                            .new_requests = &first,
                            .n_cached = cached_id != 0,
                            .cached_requests = &second};
    step_notes_add(n, &out);
}

static void test_step_notes_first_in_first_out(void **state)
{
    (void)state;
    step_notes *n;
    assert_int_equal(step_notes_create(&n, 3, 2), PGD_OK);
    for (uint64_t round = 1; round < 6; round++) {
        add(n, 10 * round, 0, 0);
        add(n, 10 * round + 1, 10 * round, 7);
        assert_int_equal(step_notes_n_steps(n), 2);
        const step_note *s = step_notes_take(n);
        assert_int_equal(s->n_requests, 1);
        assert_int_equal(s->ids[0], 10 * round);
        assert_int_equal(s->n_tokens, 7);
        s = step_notes_take(n);
        assert_int_equal(s->n_requests, 2);
        assert_int_equal(s->ids[1], 10 * round);
        assert_int_equal(s->n_computed[1], 7);
        assert_int_equal(s->n_tokens, 8);
        assert_int_equal(step_notes_n_steps(n), 0);
    }
    step_notes_destroy(n);
    step_notes_destroy(NULL);
}

static void test_step_notes_suspects(void **state)
{
    (void)state;
    step_notes *n;
    const poison_suspect *suspects;
    assert_int_equal(step_notes_create(&n, 2, 2), PGD_OK);
    assert_int_equal(step_notes_gather(n, &suspects), 0);
    add(n, 0, 5, 30);
    add(n, 6, 5, 31);
    assert_int_equal(step_notes_gather(n, &suspects), 2);
    assert_int_equal(suspects[0].id, 5);
    assert_int_equal(suspects[0].position, 30);
    assert_int_equal(suspects[1].id, 6);
    assert_int_equal(suspects[1].position, 0);
    step_notes_reset(n);
    assert_int_equal(step_notes_gather(n, &suspects), 0);
    step_notes_destroy(n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_step_notes_first_in_first_out),
        cmocka_unit_test(test_step_notes_suspects),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
