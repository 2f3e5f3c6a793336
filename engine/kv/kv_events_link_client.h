/* A subscriber of the stream that kv_events_link publishes.
 *
 * Owns:    its socket and the last frame
 * Thread:  one
 */
#ifndef ENGINE_KV_KV_EVENTS_LINK_CLIENT_H
#define ENGINE_KV_KV_EVENTS_LINK_CLIENT_H

#include "common/err.h"

typedef struct kv_events_link_client kv_events_link_client;

/* Borrows end with the next call. */
typedef struct kv_events_frame {
    uint64_t seq;
    uint64_t incarnation;
    const uint8_t *batch;
    size_t n_bytes;
} kv_events_frame;

/* topic NULL: any. Errors: PGD_EIO (nobody there), PGD_ENOMEM */
PGD_MUST_USE pgd_err kv_events_link_client_open(kv_events_link_client **out, const char *url,
                                                const char *topic, pgd_why *why);
void kv_events_link_client_close(kv_events_link_client *c);
/* Errors: PGD_EAGAIN (nothing within the time), PGD_ECLOSED (the server is gone), PGD_EPROTO */
PGD_MUST_USE pgd_err kv_events_link_client_recv(kv_events_frame *out, kv_events_link_client *c,
                                                int timeout_ms, pgd_why *why);

#endif
