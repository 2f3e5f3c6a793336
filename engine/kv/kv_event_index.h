/* What the stream of cache events has told to be cached so far: the same set that a subscriber keeps who
 * heard all of it.
 *
 * A block is named by (group, name), where the name is 64 bits of its hash, and may lie in several
 * media. Its tokens and its parent stay known as long as it lies anywhere. After a gap in what the
 * core told, a resync compares: it begins, what is still there is stored again, it ends with the
 * list of what was not.
 * Owns:    its entries; grows with the number of cached blocks
 * Thread:  one at a time
 */
#ifndef ENGINE_KV_KV_EVENT_INDEX_H
#define ENGINE_KV_KV_EVENT_INDEX_H

#include "engine/kv/kv_events.h"

/* Open, to be read. Borrows end with the next change. */
typedef struct kv_event_entry {
    uint64_t name;
    uint64_t parent; /* name of the block before it */
    int32_t group_id;
    int32_t block_size; /* tokens */
    bool has_parent;
    uint8_t media; /* bit per kv_medium; 0 = an empty place */
    uint8_t stale; /* of them, those that a resync has not confirmed yet */
    int32_t n_tokens;
    uint32_t extra_bytes;
    const token_id *tokens; /* [n_tokens], then the extra bytes; NULL = not known */
    int32_t next_free;
} kv_event_entry;

typedef struct kv_event_index kv_event_index;

/* Errors: PGD_ENOMEM */
PGD_MUST_USE pgd_err kv_event_index_create(kv_event_index **out);
void kv_event_index_destroy(kv_event_index *x);

typedef enum kv_index_news {
    KV_INDEX_KNOWN, /* it changes nothing */
    KV_INDEX_NEWS,
    KV_INDEX_NO_MEMORY /* not noted: not to be told either */
} kv_index_news;

/* The i-th block of a STORED event. */
kv_index_news kv_event_index_store(kv_event_index *x, const kv_cache_event *ev, int32_t i);
/* False: it was not there. */
bool kv_event_index_remove(kv_event_index *x, kv_medium medium, int32_t group_id, uint64_t name);
/* medium: KV_N_MEDIA = all. */
void kv_event_index_begin_resync(kv_event_index *x, kv_medium medium);
/* Media in which the entry at a place is still stale; ends that. */
uint8_t kv_event_index_drop_stale(kv_event_index *x, int32_t place);

int64_t kv_event_index_n_blocks(const kv_event_index *x, kv_medium medium);
/* Places are 0 .. n_places - 1; an entry keeps its own as long as it lives. */
int32_t kv_event_index_n_places(const kv_event_index *x);
const kv_event_entry *kv_event_index_get(const kv_event_index *x, int32_t place);

/* 64 bits of a hash as clients know it: the last 8 bytes, big-endian. */
uint64_t kv_event_index_name(const block_hash *hash);

#endif
