/* Waiting queue: both policies, removal from the middle, preempted requests first in their class,
 * heap against a sort. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "engine/core/request_queue.h"

static void init(request *r, uint64_t id, int32_t priority, uint64_t arrival_us)
{
    *r = (request){.id = id, .priority = priority, .arrival_us = arrival_us, .heap_idx = -1};
}

static void test_request_queue_fcfs(void **state)
{
    (void)state;
    request r[5];
    request_queue *q;
    assert_int_equal(request_queue_create(&q, REQUEST_QUEUE_FCFS, 5), PGD_OK);
    assert_null(request_queue_peek(q));
    assert_null(request_queue_pop(q));
    for (uint64_t i = 0; i < 5; i++)
        init(&r[i], i, (int32_t)(5 - i), 5 - i); /* neither priority nor arrival matters */
    for (int i = 0; i < 4; i++)
        request_queue_push(q, &r[i]);
    request_queue_push_front(q, &r[4]);
    assert_ptr_equal(request_queue_peek(q), &r[4]);
    request_queue_remove(q, &r[1]);
    assert_int_equal(request_queue_n_requests(q), 4);
    const int want[] = {4, 0, 2, 3};
    const request *it = NULL;
    for (int i = 0; i < 4; i++) {
        it = request_queue_next(q, it);
        assert_ptr_equal(it, &r[want[i]]);
    }
    assert_null(request_queue_next(q, it));
    for (int i = 0; i < 4; i++)
        assert_ptr_equal(request_queue_pop(q), &r[want[i]]);
    assert_int_equal(request_queue_n_requests(q), 0);
    request_queue_destroy(q);
    assert_int_equal(request_queue_create(&q, REQUEST_QUEUE_FCFS, 0), PGD_EINVAL);
}

static void test_request_queue_priority_order(void **state)
{
    (void)state;
    request r[6];
    request_queue *q;
    assert_int_equal(request_queue_create(&q, REQUEST_QUEUE_PRIORITY, 6), PGD_OK);
    init(&r[0], 0, 2, 1);
    init(&r[1], 1, 1, 3);
    init(&r[2], 2, 1, 2);
    init(&r[3], 3, 0, 4);
    init(&r[4], 4, 1, 2); /* as r[2], later id */
    init(&r[5], 5, 1, 9);
    r[5].epoch = 1; /* first of its class, whatever its arrival */
    for (int i = 0; i < 5; i++)
        request_queue_push(q, &r[i]);
    request_queue_push_front(q, &r[5]);
    const int want[] = {3, 5, 2, 4, 1, 0};
    for (int i = 0; i < 6; i++)
        assert_ptr_equal(request_queue_pop(q), &r[want[i]]);
    assert_null(request_queue_pop(q));
    request_queue_destroy(q);
}

static void test_request_queue_heap_random(void **state)
{
    (void)state;
    enum { N = 200 };
    static request r[N];
    bool is_in[N] = {false};
    request_queue *q;
    srand(5);
    assert_int_equal(request_queue_create(&q, REQUEST_QUEUE_PRIORITY, N), PGD_OK);
    for (int step = 0; step < 20000; step++) {
        int i = rand() % N;
        if (!is_in[i]) {
            init(&r[i], (uint64_t)i, rand() % 4, (uint64_t)(rand() % 10));
            if (rand() % 5 == 0)
                r[i].epoch = 1;
            request_queue_push(q, &r[i]);
            is_in[i] = true;
        } else if (rand() % 3 == 0) {
            request_queue_remove(q, &r[i]);
            is_in[i] = false;
        } else {
            const request *first = NULL;
            for (int k = 0; k < N; k++) {
                if (is_in[k] && (first == NULL || request_queue_is_before(&r[k], first)))
                    first = &r[k];
            }
            assert_ptr_equal(request_queue_pop(q), first);
            is_in[first->id] = false;
        }
    }
    int n_in = 0;
    for (int k = 0; k < N; k++)
        n_in += is_in[k];
    int n_seen = 0;
    for (const request *it = NULL; (it = request_queue_next(q, it)) != NULL; n_seen++)
        assert_true(is_in[it->id]);
    assert_int_equal(n_seen, n_in);
    assert_int_equal(request_queue_n_requests(q), n_in);
    request_queue_destroy(q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_request_queue_fcfs),
        cmocka_unit_test(test_request_queue_priority_order),
        cmocka_unit_test(test_request_queue_heap_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
