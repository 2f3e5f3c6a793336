/* Events go the way they go in the engine: from the manager's callbacks. */
#include "tests/sim/sim_offload.h"

#include <stdlib.h>
#include <string.h>

static void on_stored(void *arg, const offload_key *keys, const int32_t *medium_ids, int32_t n_keys)
{
    const sim_offload *o = arg;
    (void)medium_ids;
    kv_events_tier_stored(o->events, KV_MEDIUM_HOST, keys, n_keys);
}

static void on_removed(void *arg, const offload_key *keys, const int32_t *medium_ids,
                       int32_t n_keys)
{
    const sim_offload *o = arg;
    (void)medium_ids;
    kv_events_tier_removed(o->events, KV_MEDIUM_HOST, keys, n_keys);
}

static void on_reset(void *arg)
{
    const sim_offload *o = arg;
    kv_events_cleared(o->events, KV_MEDIUM_HOST);
}

void sim_offload_init(sim_offload *o, const sim_config *config, const kv_group_spec *groups,
                      sim_medium *medium, kv_events *events)
{
    memset(o, 0, sizeof *o);
    o->config = config;
    o->medium = medium;
    o->events = events;
    o->disk = config->n_disk_blocks > 0 ? sim_disk_create(config, medium) : NULL;
    offload_connector_opts opts = {
        .host = {.capacity = config->n_tier_blocks,
                 .policy = config->tier_uses_arc ? offload_policy_arc() : offload_policy_lru(),
                 .on_stored = on_stored,
                 .on_removed = on_removed,
                 .on_reset = on_reset,
                 .arg = o},
        .block_bytes = 1,
        .store_threshold = config->tier_threshold,
        .disk = o->disk,
        .n_device_blocks = config->n_blocks,
        .max_num_seqs = config->max_num_seqs,
        .max_model_len = config->max_model_len,
        .hash_block_size = config->block_size,
        .n_groups = config->n_groups,
        .groups = groups,
        .use_eagle = config->use_eagle != 0,
        .n_ranks = config->n_ranks,
        .max_step_blocks = config->tier_step_blocks,
    };
    if (offload_connector_create(&o->connector, &opts) != PGD_OK)
        abort();
}

void sim_offload_deinit(sim_offload *o)
{
    offload_connector_destroy(o->connector);
    sim_disk_destroy(o->disk);
}

void sim_offload_clear(sim_offload *o)
{
    o->n_promoted = sim_offload_n_promoted(o);
    if (o->disk != NULL) {
        sim_disk_destroy(o->disk);
        o->disk = sim_disk_create(o->config, o->medium);
    }
    sim_medium_clear(o->medium);
    offload_connector_clear(o->connector, o->disk);
}

void sim_offload_tick(sim_offload *o)
{
    if (o->disk == NULL)
        return;
    sim_disk_tick(o->disk);
    /* Sometimes the next step is quicker than the wake. */
    if (++o->now % 3 == 0)
        offload_connector_pump(o->connector);
}

bool sim_offload_is_busy(const sim_offload *o)
{
    return o->disk != NULL && sim_disk_is_busy(o->disk);
}

uint64_t sim_offload_n_promoted(const sim_offload *o)
{
    disk_tier_stats stats = {0};
    if (o->disk != NULL)
        disk_tier_get_stats(&stats, o->disk);
    return o->n_promoted + stats.n_reads;
}
