/* Batches of cache events in MessagePack, as subscribers of vLLM's events read them.
 *
 *   batch   = [ts, [event...], data_parallel_rank]
 *   stored  = ["BlockStored", [name...], parent or nil, [token...], block_size, nil, medium, nil,
 *              extra_keys or nil, group, kind of attention, window or nil]
 *   removed = ["BlockRemoved", [name...], medium, group]
 *   cleared = ["AllBlocksCleared"]
 *
 * The nils are LoRA's id and name. extra_keys: per block nil or what its hash covers beside tokens.
 * A pack collects events; its owner looks at failed once at the end.
 * Owns:    its buffer
 * Thread:  one at a time
 * Source:  vLLM's kv_events as of 2025 and 2026, in which structs are arrays with a tag in front
 */
#ifndef ENGINE_KV_KV_EVENT_PACK_H
#define ENGINE_KV_KV_EVENT_PACK_H

#include "common/strbuf.h"
#include "engine/kv/kv_event_index.h"

/* Bytes that a batch has beside its events. */
#define KV_EVENT_PACK_HEAD_BYTES 32

typedef struct kv_event_pack {
    strbuf events; /* encoded, without the array's head; failed: out of memory */
    int32_t n_events;
    /* The removed event that is being collected. */
    strbuf names;
    int32_t n_names;
    kv_medium medium;
    int32_t group_id;
} kv_event_pack;

void kv_event_pack_init(kv_event_pack *p);
void kv_event_pack_deinit(kv_event_pack *p);
void kv_event_pack_reset(kv_event_pack *p);

/* Blocks [first, end) of a STORED event. */
void kv_event_pack_stored(kv_event_pack *p, const kv_cache_event *ev, int32_t first, int32_t end);
/* One block of an index, in that medium. attention and window: of its group. */
void kv_event_pack_entry(kv_event_pack *p, const kv_event_entry *e, kv_medium medium,
                         const char *attention, int32_t window);
/* Consecutive ones of one medium and group become one event. */
void kv_event_pack_removed(kv_event_pack *p, kv_medium medium, int32_t group_id, uint64_t name);
void kv_event_pack_cleared(kv_event_pack *p);

/* Bytes that the batch would have now, at most. */
size_t kv_event_pack_n_bytes(const kv_event_pack *p);
/* out: [kv_event_pack_n_bytes]. Returns how many bytes it has. ts: seconds since 1970 */
size_t kv_event_pack_write(uint8_t *out, kv_event_pack *p, double ts, int32_t data_parallel_rank);

#endif
