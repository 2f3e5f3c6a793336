/* Waiting requests in the order they are to be admitted (rules SC6, SC7).
 *
 * FCFS: a deque. Priority: a heap by (priority, preempted first, arrival, id); smaller priority
 * values come first. Under both policies a preempted request (epoch > 0) goes ahead of the others
 * of its priority class (FCFS has one class), preempted ones among themselves in arrival order.
 * Owns:    nothing; a request is in at most one queue
 * Limits:  max_requests, fixed at create; priority and epoch must not change while queued
 * Thread:  core
 */
#ifndef ENGINE_CORE_REQUEST_QUEUE_H
#define ENGINE_CORE_REQUEST_QUEUE_H

#include "engine/core/request.h"

typedef enum request_queue_policy {
    REQUEST_QUEUE_FCFS,
    REQUEST_QUEUE_PRIORITY
} request_queue_policy;

typedef struct request_queue request_queue;

/* Errors: PGD_EINVAL, PGD_ENOMEM */
PGD_MUST_USE pgd_err request_queue_create(request_queue **out, request_queue_policy policy,
                                          int32_t max_requests);
void request_queue_destroy(request_queue *q);

/* FCFS: at the back. Priority: by key. */
void request_queue_push(request_queue *q, request *r);
/* FCFS: at the front. Priority: by key. */
void request_queue_push_front(request_queue *q, request *r);
/* The next one to admit, NULL when empty; a borrow, it stays queued. */
request *request_queue_peek(const request_queue *q);
/* As peek, and takes it out. */
request *request_queue_pop(request_queue *q);
void request_queue_remove(request_queue *q, request *r);
int32_t request_queue_n_requests(const request_queue *q);
/* Visits all, FCFS in order, priority in no order: after = NULL gives the first, NULL is the end.
 * No changes meanwhile. */
request *request_queue_next(const request_queue *q, const request *after);
/* True when a is admitted before b under the priority order. */
bool request_queue_is_before(const request *a, const request *b);

#endif
