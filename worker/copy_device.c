/* The CPU as a copy_device: memcpy, and events that have always passed. */
#include "worker/copy_device.h"

#include <string.h>

static pgd_err event_init(copy_device *d, copy_event *e)
{
    (void)d;
    *e = (copy_event){.handle = NULL};
    return PGD_OK;
}

static void event_deinit(copy_device *d, copy_event *e)
{
    (void)d;
    (void)e;
}

static pgd_err record(copy_device *d, copy_event *e, copy_stream stream)
{
    (void)d;
    (void)e;
    (void)stream;
    return PGD_OK;
}

static pgd_err wait_event(copy_device *d, copy_stream stream, const copy_event *e)
{
    (void)d;
    (void)stream;
    (void)e;
    return PGD_OK;
}

static pgd_err sync_event(copy_device *d, const copy_event *e)
{
    (void)d;
    (void)e;
    return PGD_OK;
}

static pgd_err copy(copy_device *d, copy_stream stream, void *dst, const void *src, size_t n_bytes)
{
    (void)d;
    (void)stream;
    memcpy(dst, src, n_bytes);
    return PGD_OK;
}

copy_device *copy_device_get_cpu(void)
{
    static const copy_device_vtbl vtbl = {.event_init = event_init,
                                          .event_deinit = event_deinit,
                                          .record = record,
                                          .wait = wait_event,
                                          .sync = sync_event,
                                          .copy = copy};
    static copy_device cpu = {.vtbl = &vtbl, .depth = 1};
    return &cpu;
}
