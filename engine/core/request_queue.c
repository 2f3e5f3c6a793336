/* Intrusive both ways: the list node and the heap index live in the request, so that an abort
 * removes it in O(1) or O(log n) and a push never allocates. "Preempted" is what has been admitted
 * before, which does not change while it is queued. */
#include "engine/core/request_queue.h"

#include "common/mem.h"

struct request_queue {
    request_queue_policy policy;
    int32_t max_requests;
    int32_t n_requests;
    list_node list; /* FCFS */
    request **heap; /* [max_requests], priority; children of i are 2i+1 and 2i+2 */
};

pgd_err request_queue_create(request_queue **out, request_queue_policy policy, int32_t max_requests)
{
    *out = NULL;
    if (max_requests < 1)
        return PGD_EINVAL;
    request_queue *q = mem_calloc(1, sizeof *q);
    if (q == NULL)
        return PGD_ENOMEM;
    q->policy = policy;
    q->max_requests = max_requests;
    list_init(&q->list);
    if (policy == REQUEST_QUEUE_PRIORITY) {
        q->heap = mem_calloc((size_t)max_requests, sizeof(request *));
        if (q->heap == NULL) {
            request_queue_destroy(q);
            return PGD_ENOMEM;
        }
    }
    *out = q;
    return PGD_OK;
}

void request_queue_destroy(request_queue *q)
{
    if (q == NULL)
        return;
    mem_free(q->heap);
    mem_free(q);
}

static int class_of(const request *r)
{
    return r->epoch > 0 ? 0 : 1;
}

bool request_queue_is_before(const request *a, const request *b)
{
    if (a->priority != b->priority)
        return a->priority < b->priority;
    if (class_of(a) != class_of(b))
        return class_of(a) < class_of(b);
    if (a->arrival_us != b->arrival_us)
        return a->arrival_us < b->arrival_us;
    return a->id < b->id;
}

static void put_at(request_queue *q, int32_t i, request *r)
{
    q->heap[i] = r;
    r->heap_idx = i;
}

static void sift_up(request_queue *q, int32_t i)
{
    request *r = q->heap[i];
    while (i > 0 && request_queue_is_before(r, q->heap[(i - 1) / 2])) {
        put_at(q, i, q->heap[(i - 1) / 2]);
        i = (i - 1) / 2;
    }
    put_at(q, i, r);
}

static void sift_down(request_queue *q, int32_t i)
{
    request *r = q->heap[i];
    for (;;) {
        int32_t child = 2 * i + 1;
        if (child >= q->n_requests)
            break;
        if (child + 1 < q->n_requests &&
            request_queue_is_before(q->heap[child + 1], q->heap[child]))
            child++;
        if (!request_queue_is_before(q->heap[child], r))
            break;
        put_at(q, i, q->heap[child]);
        i = child;
    }
    put_at(q, i, r);
}

static void push(request_queue *q, request *r, bool is_front)
{
    PGD_ASSERTF(q->n_requests < q->max_requests, "queue of %d requests is full", q->max_requests);
    PGD_ASSERTF(!list_is_linked(&r->queue_node) && r->heap_idx < 0,
                "request %llu is already queued", (unsigned long long)r->id);
    q->n_requests++;
    if (q->policy == REQUEST_QUEUE_PRIORITY) {
        put_at(q, q->n_requests - 1, r);
        sift_up(q, q->n_requests - 1);
    } else if (is_front) {
        list_prepend(&q->list, &r->queue_node);
    } else {
        list_append(&q->list, &r->queue_node);
    }
}

void request_queue_push(request_queue *q, request *r)
{
    push(q, r, false);
}

void request_queue_push_front(request_queue *q, request *r)
{
    push(q, r, true);
}

request *request_queue_peek(const request_queue *q)
{
    return q->policy == REQUEST_QUEUE_PRIORITY && q->n_requests > 0 ? q->heap[0]
                                                                    : request_queue_next(q, NULL);
}

request *request_queue_pop(request_queue *q)
{
    request *r = request_queue_peek(q);
    if (r != NULL)
        request_queue_remove(q, r);
    return r;
}

void request_queue_remove(request_queue *q, request *r)
{
    if (q->policy == REQUEST_QUEUE_FCFS) {
        PGD_ASSERTF(list_is_linked(&r->queue_node), "request %llu is not queued",
                    (unsigned long long)r->id);
        list_remove(&r->queue_node);
        q->n_requests--;
        return;
    }
    int32_t i = r->heap_idx;
    PGD_ASSERTF(i >= 0 && i < q->n_requests && q->heap[i] == r, "request %llu is not queued",
                (unsigned long long)r->id);
    q->n_requests--;
    r->heap_idx = -1;
    if (i == q->n_requests)
        return;
    put_at(q, i, q->heap[q->n_requests]);
    sift_up(q, i);
    sift_down(q, i);
}

int32_t request_queue_n_requests(const request_queue *q)
{
    return q->n_requests;
}

request *request_queue_next(const request_queue *q, const request *after)
{
    if (q->policy == REQUEST_QUEUE_PRIORITY) {
        int32_t i = after == NULL ? 0 : after->heap_idx + 1;
        return i < q->n_requests ? q->heap[i] : NULL;
    }
    const list_node *node = after == NULL ? q->list.next : after->queue_node.next;
    return node == &q->list ? NULL : LIST_ENTRY(node, request, queue_node);
}
