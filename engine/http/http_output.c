/* Two buffers that change places: while `sending` waits for a slow client, `bytes` goes on
 * gathering, so that a stream is written without allocating. An idle handle does the flush: it runs
 * in every turn of the loop before it may sleep, and not at all once it is stopped.
 *
 * Rejected: uv_write for every piece (measured: its allocation, its callback and the epoll_ctl that
 * libuv adds cost more than rendering the token). */
#include "engine/http/http_output.h"

#define MAX_KEPT_BYTES 65536 /* of an empty buffer */

static void on_idle(uv_idle_t *flusher)
{
    http_output_queue *q = LIST_ENTRY(flusher, http_output_queue, flusher);
    http_output_queue_flush(q);
    if (list_is_empty(&q->outputs))
        uv_idle_stop(flusher);
}

void http_output_queue_init(http_output_queue *q, uv_loop_t *loop, void *data)
{
    list_init(&q->outputs);
    uv_idle_init(loop, &q->flusher);
    q->flusher.data = data;
}

void http_output_queue_close(http_output_queue *q, uv_close_cb on_closed)
{
    if (!uv_is_closing((uv_handle_t *)&q->flusher))
        uv_close((uv_handle_t *)&q->flusher, on_closed);
}

/* What is committed meanwhile, by pipelined requests, is for the next turn. */
void http_output_queue_flush(http_output_queue *q)
{
    list_node batch;
    list_take_all(&batch, &q->outputs);
    while (!list_is_empty(&batch))
        http_output_flush(LIST_ENTRY(batch.next, http_output, node));
}

void http_output_init(http_output *o, http_output_queue *q, uv_stream_t *stream,
                      void (*on_flushed)(void *arg, int status), void *arg)
{
    *o = (http_output){.queue = q, .stream = stream, .on_flushed = on_flushed, .arg = arg};
    strbuf_init(&o->bytes);
    strbuf_init(&o->sending);
}

void http_output_deinit(http_output *o)
{
    strbuf_deinit(&o->bytes);
    strbuf_deinit(&o->sending);
}

void http_output_close(http_output *o)
{
    o->is_closed = true;
    if (list_is_linked(&o->node))
        list_remove(&o->node);
}

void http_output_commit(http_output *o)
{
    if (o->is_closed || list_is_linked(&o->node))
        return;
    if (list_is_empty(&o->queue->outputs))
        uv_idle_start(&o->queue->flusher, on_idle);
    list_append(&o->queue->outputs, &o->node);
}

static void drop_bytes(strbuf *b)
{
    if (b->cap_bytes > MAX_KEPT_BYTES)
        strbuf_deinit(b);
    else
        strbuf_reset(b);
}

static void on_written(uv_write_t *req, int status)
{
    http_output *o = LIST_ENTRY(req, http_output, req);
    o->is_sending = false;
    drop_bytes(&o->sending);
    if (o->is_closed)
        return;
    if (status != 0)
        o->on_flushed(o->arg, status);
    else
        http_output_flush(o);
}

/* What the kernel did not take of bytes, from start on, waits for the client in sending. */
static int send_rest(http_output *o, size_t start)
{
    strbuf rest = o->bytes;
    o->bytes = o->sending;
    o->sending = rest;
    uv_buf_t buf = {.base = rest.data + start, .len = rest.n_bytes - start};
    int rc = uv_write(&o->req, o->stream, &buf, 1, on_written);
    o->is_sending = rc == 0;
    return rc;
}

/* 0: all is out. UV_EAGAIN: on_written goes on. */
static int send_bytes(http_output *o)
{
    if (o->bytes.failed)
        return UV_ENOMEM;
    if (o->bytes.n_bytes == 0)
        return 0;
    uv_buf_t buf = {.base = o->bytes.data, .len = o->bytes.n_bytes};
    int n = uv_try_write(o->stream, &buf, 1);
    if (n < 0 && n != UV_EAGAIN)
        return n;
    size_t n_taken = (size_t)PGD_MAX(n, 0);
    o->handed_bytes += o->bytes.n_bytes;
    if (n_taken < o->bytes.n_bytes) {
        int rc = send_rest(o, n_taken);
        return rc != 0 ? rc : UV_EAGAIN;
    }
    drop_bytes(&o->bytes);
    return 0;
}

void http_output_flush(http_output *o)
{
    if (list_is_linked(&o->node))
        list_remove(&o->node);
    if (o->is_sending || o->is_closed)
        return;
    int rc = send_bytes(o);
    if (rc != UV_EAGAIN)
        o->on_flushed(o->arg, rc);
}

uint64_t http_output_given_bytes(const http_output *o)
{
    return o->handed_bytes + o->bytes.n_bytes;
}

uint64_t http_output_taken_bytes(const http_output *o)
{
    return o->handed_bytes - uv_stream_get_write_queue_size(o->stream);
}
