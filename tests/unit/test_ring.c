/* Order, capacity and hand-off between two threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/ring.h"
#include "common/thread.h"

#define N_HANDED 300000

static void test_ring_fills_and_wraps(void **state)
{
    (void)state;
    ring *r;
    int v;
    assert_int_equal(ring_create(&r, sizeof(int), 5), PGD_OK);
    assert_int_equal(ring_capacity(r), 8);
    for (int round = 0; round < 100; round++) {
        assert_false(ring_pop(r, &v));
        for (int i = 0; i < 8; i++)
            assert_true(ring_push(r, &(int){round * 8 + i}));
        assert_false(ring_push(r, &v));
        assert_int_equal(ring_n_used(r), 8);
        for (int i = 0; i < 8; i++) {
            assert_true(ring_pop(r, &v));
            assert_int_equal(v, round * 8 + i);
        }
    }
    ring_destroy(r);
    ring_destroy(NULL);
}

static void produce(void *arg)
{
    for (uint64_t i = 0; i < N_HANDED;) {
        uint64_t elem[3] = {i, i * 3, ~i};
        i += ring_push(arg, elem) ? 1 : 0;
    }
}

static void test_ring_between_threads(void **state)
{
    (void)state;
    ring *r;
    pthread_t thread;
    uint64_t elem[3];
    assert_int_equal(ring_create(&r, sizeof(elem), 64), PGD_OK);
    assert_int_equal(thread_start(&thread, "producer", produce, r), PGD_OK);
    for (uint64_t i = 0; i < N_HANDED;) {
        if (!ring_pop(r, elem))
            continue;
        assert_true(elem[0] == i && elem[1] == i * 3 && elem[2] == ~i);
        i++;
    }
    thread_join(thread);
    assert_false(ring_pop(r, elem));
    ring_destroy(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ring_fills_and_wraps),
        cmocka_unit_test(test_ring_between_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
