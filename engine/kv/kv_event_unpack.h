/* Reads batches of cache events, in the form of kv_event_pack.h, from outside.
 *
 * Fields that are missing at the end of an event, or more of them, are fine; so are tags that are
 * not known. What is not MessagePack, or is of another type than it must be, is refused.
 * Thread:  any
 */
#ifndef ENGINE_KV_KV_EVENT_UNPACK_H
#define ENGINE_KV_KV_EVENT_UNPACK_H

#include "common/err.h"

typedef enum kv_event_tag {
    KV_EVENT_TAG_STORED,
    KV_EVENT_TAG_REMOVED,
    KV_EVENT_TAG_CLEARED,
    KV_EVENT_TAG_OTHER
} kv_event_tag;

/* Unsigned numbers in MessagePack; kv_event_unpack_next_number takes them one by one. */
typedef struct kv_event_numbers {
    const uint8_t *at, *end;
    uint32_t n;
} kv_event_numbers;

/* A text in the batch, not NUL-terminated; NULL = nil. */
typedef struct kv_event_text {
    const char *text;
    uint32_t n_bytes;
} kv_event_text;

/* Borrows of the batch. */
typedef struct kv_unpacked_event {
    kv_event_tag tag;
    kv_event_numbers names;  /* STORED, REMOVED */
    kv_event_numbers tokens; /* STORED */
    bool has_parent;
    bool has_group;
    uint64_t parent;
    uint64_t block_size;
    uint64_t group;
    uint64_t window; /* 0 = none */
    kv_event_text medium;
    kv_event_text attention;
} kv_unpacked_event;

typedef struct kv_event_unpack {
    const uint8_t *at, *end;
    uint32_t n_left;
    double ts;
} kv_event_unpack;

/* Errors, here and below: PGD_EPROTO */
PGD_MUST_USE pgd_err kv_event_unpack_begin(kv_event_unpack *u, const void *batch, size_t n_bytes,
                                           pgd_why *why);
/* The next event, as long as u->n_left > 0. */
PGD_MUST_USE pgd_err kv_event_unpack_next(kv_unpacked_event *out, kv_event_unpack *u, pgd_why *why);
/* False at the end. */
bool kv_event_unpack_next_number(uint64_t *out, kv_event_numbers *n);

#endif
