/* What goes to one client: gathered during a turn of the loop, however many writes made it, and sent
 * with one system call before the loop sleeps.
 *
 *   bytes, then body → flush → the kernel; what it does not take at once → sending
 *
 * However much waits, one turn hands the kernel a bounded piece of it: a large answer to one client
 * is no pause for the others.
 * Owns:    its buffers; borrows queue and stream until deinit
 * Thread:  io
 */
#ifndef ENGINE_HTTP_HTTP_OUTPUT_H
#define ENGINE_HTTP_HTTP_OUTPUT_H

#include <uv.h>

#include "common/list.h"
#include "common/strbuf.h"

/* The outputs of one loop that have something to send. */
typedef struct http_output_queue {
    list_node outputs;
    uv_idle_t flusher;
} http_output_queue;

typedef struct http_output {
    strbuf bytes; /* append here, then http_output_commit */

    /* private */
    http_output_queue *queue;
    uv_stream_t *stream;
    strbuf body;         /* given whole, to be sent behind bytes */
    strbuf sending;      /* what is sent before bytes, */
    size_t n_sent_bytes; /* from here on */
    size_t n_req_bytes;  /* while is_sending: that req has of it */
    bool is_sending;
    bool is_closed;
    uint64_t done_bytes; /* taken by the kernel, but for those of req */
    uv_write_t req;
    list_node node;
    void (*on_flushed)(void *arg, int status);
    void *arg;
} http_output;

/* data: of the queue's handle, for the callback that closes it */
void http_output_queue_init(http_output_queue *q, uv_loop_t *loop, void *data);
void http_output_queue_close(http_output_queue *q, uv_close_cb on_closed);
/* Sends now what this turn has written. */
void http_output_queue_flush(http_output_queue *q);

/* on_flushed is called from the flush, never from a commit: with 0 when everything that was
 * committed is out, with a libuv error when it cannot be sent. It may close the connection. */
void http_output_init(http_output *o, http_output_queue *q, uv_stream_t *stream,
                      void (*on_flushed)(void *arg, int status), void *arg);
/* The stream has been closed. */
void http_output_deinit(http_output *o);
/* The stream is being closed: nothing more is sent or told. */
void http_output_close(http_output *o);
/* Takes body, which is sent behind bytes without being copied; then bytes must stay as they are until
 * everything is out. */
void http_output_give(http_output *o, strbuf *body);
/* Has bytes sent, in this turn if they are few; with none, on_flushed is called in its time all the same. */
void http_output_commit(http_output *o);
/* Tries to send a piece at once. */
void http_output_flush(http_output *o);

/* Over the life of the connection: written by us, and of that taken by the kernel. */
uint64_t http_output_given_bytes(const http_output *o);
uint64_t http_output_taken_bytes(const http_output *o);
static inline size_t http_output_unsent_bytes(const http_output *o)
{
    return (size_t)(http_output_given_bytes(o) - http_output_taken_bytes(o));
}

#endif
