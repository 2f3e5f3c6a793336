/* What moves KV blocks between a device and host memory, with streams and events as a GPU has them.
 *
 * A stream does what it is given in order; streams are not ordered against each other but by events.
 * The CPU's copies are done when the call returns, and the main thread is its compute stream: all
 * that was issued is done, so that events have nothing to mark.
 * Thread:  the compute stream: the worker's main thread; each copy stream: the one thread that uses
 *          it. Events may be recorded by one thread and waited for by another that has been handed
 *          them
 */
#ifndef WORKER_COPY_DEVICE_H
#define WORKER_COPY_DEVICE_H

#include "common/err.h"

typedef enum copy_stream {
    COPY_STREAM_COMPUTE,
    COPY_STREAM_STORE, /* device to host */
    COPY_STREAM_LOAD,  /* host to device */
    COPY_N_STREAMS
} copy_stream;

typedef struct copy_event {
    void *handle; /* the device's */
    uint64_t mark;
} copy_event;

typedef struct copy_device copy_device;

typedef struct copy_device_vtbl {
    pgd_err (*event_init)(copy_device *d, copy_event *e);
    void (*event_deinit)(copy_device *d, copy_event *e);
    /* Marks the place in the stream behind all that it has been given. An event is used again as soon
     * as it has been waited for. */
    pgd_err (*record)(copy_device *d, copy_event *e, copy_stream stream);
    /* What the stream is given from now on waits until the marked place is passed. */
    pgd_err (*wait)(copy_device *d, copy_stream stream, const copy_event *e);
    /* Until the marked place is passed; the device's errors up to there. */
    pgd_err (*sync)(copy_device *d, const copy_event *e);
    /* Gives the stream a copy, one side of which is the device's memory; both sides must stay until
     * it has passed. */
    pgd_err (*copy)(copy_device *d, copy_stream stream, void *dst, const void *src, size_t n_bytes);
} copy_device_vtbl;

#define COPY_MAX_DEPTH 8

struct copy_device {
    const copy_device_vtbl *vtbl;
    int32_t depth; /* blocks to be given to a stream before the first is waited for, 1 to
                      COPY_MAX_DEPTH: hides what an order costs where copies go on by themselves */
};

/* Static storage. */
copy_device *copy_device_get_cpu(void);

#endif
