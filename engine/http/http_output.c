/* Two buffers that change places: while `sending` waits for a slow client, `bytes` goes on
 * gathering, so that a stream is written without allocating. An idle handle does the flush: it runs
 * in every turn of the loop before it may sleep, and not at all once it is stopped.
 *
 * Rejected: uv_write for every piece (measured: its allocation, its callback and the epoll_ctl that
 * libuv adds cost more than rendering the token). */
#include "engine/http/http_output.h"

#include "engine/http/pool_free.h"

#define MAX_KEPT_BYTES  65536  /* of an empty buffer */
#define MAX_PIECE_BYTES 262144 /* handed to the kernel in one turn */

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
    strbuf_init(&o->body);
    strbuf_init(&o->sending);
}

static void drop_bytes(http_output *o, strbuf *b)
{
    if (b->cap_bytes > MAX_KEPT_BYTES)
        pool_free_strbuf(o->stream->loop, b);
    else
        strbuf_reset(b);
}

void http_output_deinit(http_output *o)
{
    drop_bytes(o, &o->body);
    drop_bytes(o, &o->sending);
    strbuf_deinit(&o->bytes);
    strbuf_deinit(&o->body);
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

void http_output_give(http_output *o, strbuf *body)
{
    PGD_ASSERT(o->body.n_bytes == 0);
    o->bytes.failed = o->bytes.failed || body->failed;
    strbuf_deinit(&o->body);
    o->body = *body;
    strbuf_init(body);
}

static void swap(strbuf *a, strbuf *b)
{
    strbuf t = *a;
    *a = *b;
    *b = t;
}

static void note_sent(http_output *o, size_t n_bytes)
{
    o->n_sent_bytes += n_bytes;
    o->done_bytes += n_bytes;
}

static void end_buffer(http_output *o, strbuf *b)
{
    drop_bytes(o, b);
    o->n_sent_bytes = 0;
}

static void on_written(uv_write_t *req, int status)
{
    http_output *o = LIST_ENTRY(req, http_output, req);
    o->is_sending = false;
    if (o->is_closed)
        return;
    if (status != 0) {
        o->on_flushed(o->arg, status);
        return;
    }
    note_sent(o, o->n_req_bytes);
    if (o->n_sent_bytes == o->sending.n_bytes)
        end_buffer(o, &o->sending);
    http_output_flush(o);
}

/* The rest of a piece, which the kernel did not take, waits for the client. */
static int send_later(http_output *o, size_t n_bytes)
{
    uv_buf_t buf = {.base = o->sending.data + o->n_sent_bytes, .len = n_bytes};
    int rc = uv_write(&o->req, o->stream, &buf, 1, on_written);
    o->is_sending = rc == 0;
    o->n_req_bytes = n_bytes;
    return rc != 0 ? rc : UV_EAGAIN;
}

/* 0: all is out. UV_EAGAIN: on_written, or the next turn, goes on. */
static int send_piece(http_output *o)
{
    if (o->bytes.failed)
        return UV_ENOMEM;
    if (o->sending.n_bytes == 0 && o->bytes.n_bytes == 0)
        swap(&o->sending, &o->body);
    strbuf *b = o->sending.n_bytes > 0 ? &o->sending : &o->bytes;
    if (b->n_bytes == 0)
        return 0;
    size_t n_piece = PGD_MIN(b->n_bytes - o->n_sent_bytes, MAX_PIECE_BYTES);
    uv_buf_t buf = {.base = b->data + o->n_sent_bytes, .len = n_piece};
    int n = uv_try_write(o->stream, &buf, 1);
    if (n < 0 && n != UV_EAGAIN)
        return n;
    size_t n_taken = (size_t)PGD_MAX(n, 0);
    note_sent(o, n_taken);
    if (o->n_sent_bytes == b->n_bytes) {
        end_buffer(o, b);
        if (o->bytes.n_bytes + o->body.n_bytes == 0)
            return 0;
    } else if (b == &o->bytes) {
        swap(&o->sending, &o->bytes);
    }
    if (n_taken < n_piece)
        return send_later(o, n_piece - n_taken);
    http_output_commit(o);
    return UV_EAGAIN;
}

void http_output_flush(http_output *o)
{
    if (list_is_linked(&o->node))
        list_remove(&o->node);
    if (o->is_sending || o->is_closed)
        return;
    int rc = send_piece(o);
    if (rc != UV_EAGAIN)
        o->on_flushed(o->arg, rc);
}

uint64_t http_output_given_bytes(const http_output *o)
{
    return o->done_bytes + o->sending.n_bytes + o->bytes.n_bytes + o->body.n_bytes -
           o->n_sent_bytes;
}

uint64_t http_output_taken_bytes(const http_output *o)
{
    size_t n_waiting = uv_stream_get_write_queue_size(o->stream);
    return o->done_bytes + (o->is_sending ? o->n_req_bytes - n_waiting : 0);
}
