/* The reader keeps a set of (hash, group) for each medium, by a word of the hash. It reads rarely, so that many events
 * lie in the ring, and it compares when no snapshot is under way. */
#include "tests/sim/sim_events.h"

#include <string.h>

#include "common/hash_map.h"
#include "engine/offload/offload_policy.h"

#define READ_EVERY     16
#define SNAPSHOT_EVERY 20 /* of the readings */
#define MAX_KNOWN      8192

static kv_events *events;
static hash_map *known[KV_N_MEDIA];
static hash_map *held;
static kv_tier_list_fn list_tier[KV_N_MEDIA];
static const void *tier_arg[KV_N_MEDIA];
static bool is_in_snapshot;
static int32_t n_readings;

static uint64_t key_of(const block_hash *hash, int32_t group_id)
{
    uint64_t word;
    memcpy(&word, hash->bytes + 8, sizeof word);
    return word + (uint64_t)group_id;
}

kv_events *sim_events_begin(sim_state *s)
{
    kv_events_destroy(events);
    hash_map_destroy(held);
    for (int m = 0; m < KV_N_MEDIA; m++) {
        hash_map_destroy(known[m]);
        SIM_CHECK(s, hash_map_create(&known[m], MAX_KNOWN) == PGD_OK, "no reader of events");
        list_tier[m] = NULL;
    }
    is_in_snapshot = false;
    n_readings = 0;
    SIM_CHECK(s,
              kv_events_create(&events, KV_EVENTS_MIN_BYTES) == PGD_OK &&
                  hash_map_create(&held, MAX_KNOWN) == PGD_OK,
              "no reader of events");
    return events;
}

void sim_events_set_tier(kv_medium medium, kv_tier_list_fn list, const void *arg)
{
    list_tier[medium] = list;
    tier_arg[medium] = arg;
    kv_events_set_tier(events, medium, list, arg);
}

static void apply(sim_state *s, const kv_cache_event *ev)
{
    for (int m = 0; m < KV_N_MEDIA; m++) {
        if (ev->kind == KV_CACHE_SNAPSHOT_BEGIN ||
            (ev->kind == KV_CACHE_CLEARED && m == (int)ev->medium))
            hash_map_reset(known[m]);
    }
    is_in_snapshot = (is_in_snapshot || ev->kind == KV_CACHE_SNAPSHOT_BEGIN) &&
                     ev->kind != KV_CACHE_SNAPSHOT_END;
    for (int32_t i = 0; i < ev->n_hashes; i++) {
        uint64_t key = key_of(&ev->hashes[i], ev->group_id);
        if (ev->kind == KV_CACHE_STORED)
            SIM_CHECK(s, hash_map_put(known[ev->medium], key, 1), "more than %d hashes are cached",
                      MAX_KNOWN);
        else
            SIM_CHECK(s, hash_map_remove(known[ev->medium], key) || is_in_snapshot,
                      "event %d removes what was not stored, in group %d of %s", (int)ev->seq,
                      ev->group_id, kv_medium_name(ev->medium));
    }
}

static void compare_numbers(sim_state *s, kv_medium medium)
{
    SIM_CHECK(s, hash_map_n_entries(held) == hash_map_n_entries(known[medium]),
              "%d hashes are in %s, %d were told", (int)hash_map_n_entries(held),
              kv_medium_name(medium), (int)hash_map_n_entries(known[medium]));
}

static void compare_pool(sim_state *s)
{
    const block_pool *pool = kv_manager_get_pool(s->sched->kv);
    hash_map_reset(held);
    for (block_id id = 1; id < block_pool_n_blocks(pool); id++) {
        const block_hash *hash = block_pool_get_hash(pool, id);
        if (hash == NULL)
            continue;
        uint64_t key = key_of(hash, block_pool_get_group(pool, id));
        SIM_CHECK(s, hash_map_get(known[KV_MEDIUM_DEVICE], key, NULL),
                  "block %d of group %d is cached and not told", id,
                  block_pool_get_group(pool, id));
        SIM_CHECK(s, hash_map_put(held, key, 1), "more than %d hashes are cached", MAX_KNOWN);
    }
    compare_numbers(s, KV_MEDIUM_DEVICE);
}

static void compare_tier(sim_state *s, kv_medium medium)
{
    hash_map_reset(held);
    for (int32_t cursor = 0; cursor >= 0;) {
        offload_key keys[32];
        int32_t n_keys = list_tier[medium](keys, tier_arg[medium], 32, &cursor);
        for (int32_t i = 0; i < n_keys; i++) {
            uint64_t key = key_of(&keys[i].hash, keys[i].group_id);
            SIM_CHECK(s, hash_map_get(known[medium], key, NULL),
                      "a block of group %d is in %s and not told", keys[i].group_id,
                      kv_medium_name(medium));
            SIM_CHECK(s, hash_map_put(held, key, 1), "more than %d hashes are cached", MAX_KNOWN);
        }
    }
    compare_numbers(s, medium);
}

void sim_events_check(sim_state *s)
{
    kv_cache_event ev;
    if (s->op_idx % READ_EVERY != 0 || s->config->enable_prefix_caching == 0)
        return;
    for (; kv_events_peek(&ev, events); kv_events_pop(events))
        apply(s, &ev);
    if (kv_events_is_lost(events) || ++n_readings % SNAPSHOT_EVERY == 0) {
        kv_events_request_snapshot(events);
        is_in_snapshot = true;
    }
    if (is_in_snapshot)
        return;
    compare_pool(s);
    for (int m = 0; m < KV_N_MEDIA; m++) {
        if (list_tier[m] != NULL)
            compare_tier(s, (kv_medium)m);
    }
}
