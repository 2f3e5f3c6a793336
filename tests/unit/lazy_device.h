/* A copy_device whose streams do nothing until somebody has to wait for them, and then no more than
 * that: the latest that the interface allows. What is not ordered by an event happens in the wrong
 * order here, every time. A gate keeps waits from ending while it is closed. */
#ifndef TESTS_UNIT_LAZY_DEVICE_H
#define TESTS_UNIT_LAZY_DEVICE_H

#include <string.h>

#include <pthread.h>

#include "worker/copy_device.h"

#define LAZY_MAX_OPS 8192

typedef enum lazy_kind { LAZY_COPY, LAZY_WAIT } lazy_kind;

typedef struct lazy_op {
    lazy_kind kind;
    void *dst;
    const void *src;
    size_t n_bytes;
    copy_stream stream; /* WAIT: for the first `mark` operations of this one */
    uint64_t mark;
} lazy_op;

typedef struct lazy_stream {
    lazy_op ops[LAZY_MAX_OPS];
    uint64_t n_given, n_done;
} lazy_stream;

typedef struct lazy_device {
    copy_device base;
    pthread_mutex_t mutex;
    pthread_cond_t opened;
    bool is_closed;
    int32_t n_good_copies; /* before all fail; -1 = none does */
    int32_t n_events;
    lazy_stream streams[COPY_N_STREAMS];
} lazy_device;

static inline void lazy_run(lazy_device *d, copy_stream stream, uint64_t end)
{
    lazy_stream *s = &d->streams[stream];
    while (s->n_done < end) {
        const lazy_op *op = &s->ops[s->n_done % LAZY_MAX_OPS];
        if (op->kind == LAZY_WAIT)
            lazy_run(d, op->stream, op->mark);
        else
            memcpy(op->dst, op->src, op->n_bytes);
        s->n_done++;
    }
}

static inline void lazy_give(lazy_device *d, copy_stream stream, lazy_op op)
{
    lazy_stream *s = &d->streams[stream];
    PGD_ASSERT(s->n_given - s->n_done < LAZY_MAX_OPS);
    s->ops[s->n_given++ % LAZY_MAX_OPS] = op;
}

static inline pgd_err lazy_event_init(copy_device *base, copy_event *e)
{
    lazy_device *d = (lazy_device *)base;
    e->handle = NULL;
    e->mark = 0;
    d->n_events++;
    return PGD_OK;
}

static inline void lazy_event_deinit(copy_device *base, copy_event *e)
{
    lazy_device *d = (lazy_device *)base;
    (void)e;
    d->n_events--;
}

static inline pgd_err lazy_record(copy_device *base, copy_event *e, copy_stream stream)
{
    lazy_device *d = (lazy_device *)base;
    pthread_mutex_lock(&d->mutex);
    e->handle = &d->streams[stream];
    e->mark = d->streams[stream].n_given;
    pthread_mutex_unlock(&d->mutex);
    return PGD_OK;
}

static inline copy_stream lazy_stream_of(const lazy_device *d, const copy_event *e)
{
    return e->handle == NULL ? COPY_STREAM_COMPUTE
                             : (copy_stream)((const lazy_stream *)e->handle - d->streams);
}

static inline pgd_err lazy_wait(copy_device *base, copy_stream stream, const copy_event *e)
{
    lazy_device *d = (lazy_device *)base;
    pthread_mutex_lock(&d->mutex);
    lazy_give(d, stream,
              (lazy_op){.kind = LAZY_WAIT, .stream = lazy_stream_of(d, e), .mark = e->mark});
    pthread_mutex_unlock(&d->mutex);
    return PGD_OK;
}

static inline pgd_err lazy_sync(copy_device *base, const copy_event *e)
{
    lazy_device *d = (lazy_device *)base;
    pthread_mutex_lock(&d->mutex);
    while (d->is_closed)
        pthread_cond_wait(&d->opened, &d->mutex);
    lazy_run(d, lazy_stream_of(d, e), e->mark);
    pthread_mutex_unlock(&d->mutex);
    return PGD_OK;
}

static inline pgd_err lazy_copy(copy_device *base, copy_stream stream, void *dst, const void *src,
                                size_t n_bytes)
{
    lazy_device *d = (lazy_device *)base;
    pthread_mutex_lock(&d->mutex);
    pgd_err err = d->n_good_copies == 0 ? PGD_EDEVICE : PGD_OK;
    d->n_good_copies -= d->n_good_copies > 0;
    if (err == PGD_OK)
        lazy_give(d, stream,
                  (lazy_op){.kind = LAZY_COPY, .dst = dst, .src = src, .n_bytes = n_bytes});
    pthread_mutex_unlock(&d->mutex);
    return err;
}

static inline void lazy_init(lazy_device *d, int32_t depth)
{
    static const copy_device_vtbl vtbl = {.event_init = lazy_event_init,
                                          .event_deinit = lazy_event_deinit,
                                          .record = lazy_record,
                                          .wait = lazy_wait,
                                          .sync = lazy_sync,
                                          .copy = lazy_copy};
    memset(d, 0, sizeof(*d));
    d->base = (copy_device){&vtbl, depth};
    d->n_good_copies = -1;
    pthread_mutex_init(&d->mutex, NULL);
    pthread_cond_init(&d->opened, NULL);
}

static inline void lazy_set_gate(lazy_device *d, bool is_closed)
{
    pthread_mutex_lock(&d->mutex);
    d->is_closed = is_closed;
    pthread_cond_broadcast(&d->opened);
    pthread_mutex_unlock(&d->mutex);
}

/* All that streams have been given. */
static inline void lazy_drain(lazy_device *d)
{
    pthread_mutex_lock(&d->mutex);
    for (int s = 0; s < COPY_N_STREAMS; s++)
        lazy_run(d, (copy_stream)s, d->streams[s].n_given);
    pthread_mutex_unlock(&d->mutex);
}

#endif
