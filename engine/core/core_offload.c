/* The order of things: the worker tells its layers; block size and fingerprint follow; the region is
 * made, what persisted in it taken up; the worker maps it; the scheduler gets the connector. A later
 * life of the worker finds all of it there, unless its numbers differ. */
#include "engine/core/core_offload.h"

#include <stdio.h>
#include <string.h>

#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/memory_info.h"
#include "engine/offload/disk_tier.h"
#include "engine/offload/host_region.h"
#include "engine/offload/offload_connector.h"
#include "engine/offload/offload_fingerprint.h"
#include "proto/attach.h"

#define MAX_BLOCKS    (1 << 28)
#define TELL_EVERY_US 1000000 /* what is on disk */
#define WARN_EVERY_US 60000000

struct core_offload {
    core_offload_opts opts;
    host_region *region; /* NULL before the first life, as the connector */
    disk_tier *disk;     /* NULL = none */
    offload_connector *connector;
    uint64_t told_version; /* of the disk tier, by events */
    uint64_t next_tell_us;
    log_limit stuck[2];   /* warnings: writes, reads */
    bool is_region_stuck; /* threads that hang may still use it */
};

/* --- what the host tier holds ----------------------------------------------------------------- */

static void on_stored(void *arg, const offload_key *keys, const int32_t *medium_ids, int32_t n_keys)
{
    core_offload *o = arg;
    host_region_on_stored(o->region, keys, medium_ids, n_keys);
    if (o->opts.events != NULL)
        kv_events_tier_stored(o->opts.events, KV_MEDIUM_HOST, keys, n_keys);
}

static void on_removed(void *arg, const offload_key *keys, const int32_t *medium_ids,
                       int32_t n_keys)
{
    core_offload *o = arg;
    host_region_on_removed(o->region, keys, medium_ids, n_keys);
    if (o->opts.events != NULL)
        kv_events_tier_removed(o->opts.events, KV_MEDIUM_HOST, keys, n_keys);
}

static void on_touched(void *arg, int32_t medium_id)
{
    const core_offload *o = arg;
    host_region_on_touched(o->region, medium_id);
}

static void on_reset(void *arg)
{
    core_offload *o = arg;
    host_region_on_reset(o->region);
    if (o->opts.events != NULL)
        kv_events_cleared(o->opts.events, KV_MEDIUM_HOST);
}

/* --- create ----------------------------------------------------------------------------------- */

static bool is_apart(const config *cfg)
{
    return cfg->worker[0] != 0;
}

pgd_err core_offload_create(core_offload **out, const core_offload_opts *opts, pgd_why *why)
{
    const config *cfg = opts->cfg;
    *out = NULL;
    if (cfg->kv_hash_seed_file[0] != 0 && !cfg->kv_offload_persist)
        host_region_tell_unused(HOST_REGION_SHM_DIR, opts->hash_seed);
    if (cfg->kv_offload_memory == 0)
        return PGD_OK;
    if (is_apart(cfg) && !attach_is_local(cfg->worker))
        return pgd_fail(why, PGD_EINVAL,
                        "kv_offload_memory: expected a worker on this host, which can map that "
                        "memory, got one at %s",
                        cfg->worker);
    const char *dir = cfg->kv_offload_persist || is_apart(cfg) ? HOST_REGION_SHM_DIR : NULL;
    memory_info memory;
    memory_info_read(&memory);
    PGD_TRY(host_region_check_room((uint64_t)cfg->kv_offload_memory, memory.total_bytes, dir, why));
    core_offload *o = mem_calloc(1, sizeof *o);
    if (o == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    o->opts = *opts;
    *out = o;
    return PGD_OK;
}

static void destroy_disk(core_offload *o)
{
    if (o->opts.events != NULL)
        kv_events_set_tier(o->opts.events, KV_MEDIUM_DISK, NULL, NULL);
    if (!disk_tier_destroy(o->disk))
        o->is_region_stuck = true;
    o->disk = NULL;
}

void core_offload_destroy(core_offload *o)
{
    if (o == NULL)
        return;
    if (o->opts.events != NULL)
        kv_events_set_tier(o->opts.events, KV_MEDIUM_HOST, NULL, NULL);
    destroy_disk(o);
    offload_connector_destroy(o->connector);
    if (o->is_region_stuck)
        host_region_abandon(o->region);
    else
        host_region_destroy(o->region);
    mem_free(o);
}

/* --- a life begins ---------------------------------------------------------------------------- */

static pgd_err make_fingerprint(uint8_t out[HASH_SHA256_BYTES], const core_offload *o,
                                const worker_facts *f, pgd_why *why)
{
    offload_fingerprint_facts facts = {.model_fingerprint = f->model_fingerprint,
                                       .model_path = o->opts.model_path,
                                       .numerics = f->numerics,
                                       .layout = &f->kv.groups.layout,
                                       .hash_seed = o->opts.hash_seed,
                                       .kv_dtype = o->opts.sizes->kv_dtype,
                                       .block_size = o->opts.sizes->block_size,
                                       .vocab_size = f->vocab_size,
                                       .n_ranks = 1};
    pgd_err err = offload_fingerprint_make(out, &facts);
    return err == PGD_OK ? PGD_OK
                         : pgd_fail(why, err, "kv_offload_memory: no fingerprint of %s: %s",
                                    o->opts.model_path, pgd_err_text(err));
}

/* The most blocks whose file is not larger than the memory that was given. */
static pgd_err fit_shape(kv_region_shape *out, int64_t memory_bytes, uint64_t block_bytes,
                         pgd_why *why)
{
    size_t n_bytes = 0;
    uint64_t n = PGD_MIN((uint64_t)memory_bytes / block_bytes, MAX_BLOCKS);
    *out = (kv_region_shape){.n_blocks = (int32_t)n, .n_ranks = 1, .shard_bytes = block_bytes};
    while (out->n_blocks > 0 &&
           (!kv_region_bytes(&n_bytes, out) || n_bytes > (uint64_t)memory_bytes))
        out->n_blocks -= PGD_MAX(out->n_blocks / 256, 1);
    if (out->n_blocks < 1) {
        out->n_blocks = 1;
        (void)!kv_region_bytes(&n_bytes, out);
        return pgd_fail(why, PGD_ERANGE,
                        "kv_offload_memory: expected room for a block of %llu bytes, at least %zu "
                        "bytes in all, got %lld",
                        (unsigned long long)block_bytes, n_bytes, (long long)memory_bytes);
    }
    return PGD_OK;
}

static pgd_err make_region(core_offload *o, const worker_facts *facts,
                           const uint8_t fingerprint[HASH_SHA256_BYTES], pgd_why *why)
{
    const config *cfg = o->opts.cfg;
    host_region_opts region = {.n_groups = facts->kv.groups.layout.n_groups,
                               .seed = cfg->kv_offload_persist ? o->opts.hash_seed : NULL,
                               .is_named = is_apart(cfg),
                               .dir = HOST_REGION_SHM_DIR,
                               .beat = o->opts.beat};
    memcpy(region.fingerprint, fingerprint, sizeof region.fingerprint);
    PGD_TRY(fit_shape(&region.shape, cfg->kv_offload_memory,
                      kv_layout_block_bytes(&facts->kv.groups.layout), why));
    return host_region_create(&o->region, &region, why);
}

static void wake(void *arg)
{
    const core_offload *o = arg;
    uint64_t one = 1;
    ssize_t n = write(o->opts.wake_fd, &one, sizeof one);
    (void)n; /* full means that a wake-up is pending */
}

static pgd_err make_disk(core_offload *o, const uint8_t fingerprint[HASH_SHA256_BYTES],
                         pgd_why *why)
{
    const config *cfg = o->opts.cfg;
    if (cfg->kv_offload_dir[0] == 0)
        return PGD_OK;
    disk_tier_opts disk = {.dir = cfg->kv_offload_dir,
                           .max_bytes = (uint64_t)cfg->kv_offload_disk,
                           .region = host_region_get_memory(o->region),
                           .wake = wake,
                           .arg = o};
    memcpy(disk.fingerprint, fingerprint, sizeof disk.fingerprint);
    o->told_version = 0;
    pgd_err err = disk_tier_create(&o->disk, &disk, why);
    if (err == PGD_OK && o->opts.events != NULL)
        kv_events_set_tier(o->opts.events, KV_MEDIUM_DISK, disk_tier_list, o->disk);
    /* What is wrong with it now will be wrong at the next start. */
    return err == PGD_OK
               ? PGD_OK
               : pgd_fail_prefix(why, err == PGD_EIO ? PGD_EINVAL : err, "kv_offload_dir");
}

static pgd_err make_connector(core_offload *o, const worker_facts *facts, pgd_why *why)
{
    const config *cfg = o->opts.cfg;
    const kv_region *memory = host_region_get_memory(o->region);
    kv_group_spec groups[PGD_MAX_KV_GROUPS];
    for (int32_t g = 0; g < facts->kv.groups.layout.n_groups; g++)
        groups[g] = kv_groups_spec(&facts->kv.groups, g);
    offload_connector_opts opts = {.host = {.capacity = memory->shape.n_blocks,
                                            .policy = offload_policy_find(cfg->kv_offload_policy),
                                            .on_stored = on_stored,
                                            .on_removed = on_removed,
                                            .on_touched = on_touched,
                                            .on_reset = on_reset,
                                            .arg = o},
                                   .block_bytes = memory->block_stride,
                                   .store_threshold = (int32_t)cfg->kv_offload_store_threshold,
                                   .disk = o->disk,
                                   .n_device_blocks = facts->kv.n_blocks,
                                   .max_num_seqs = o->opts.sizes->max_num_seqs,
                                   .max_model_len = facts->max_model_len,
                                   .hash_block_size = o->opts.sizes->block_size,
                                   .n_groups = facts->kv.groups.layout.n_groups,
                                   .groups = groups,
                                   .n_ranks = memory->shape.n_ranks};
    pgd_err err = offload_connector_create(&o->connector, &opts);
    return err == PGD_OK ? PGD_OK
                         : pgd_fail(why, err, "kv_offload_memory: no index of %d blocks: %s",
                                    memory->shape.n_blocks, pgd_err_text(err));
}

static pgd_err make_tiers(core_offload *o, const worker_facts *facts,
                          const uint8_t fingerprint[HASH_SHA256_BYTES], pgd_why *why)
{
    int32_t n_restored;
    PGD_TRY(make_region(o, facts, fingerprint, why));
    PGD_TRY(make_disk(o, fingerprint, why));
    PGD_TRY(make_connector(o, facts, why));
    offload_manager *manager = offload_connector_get_manager(o->connector);
    if (host_region_restore(&n_restored, o->region, manager) != PGD_OK)
        return pgd_fail(why, PGD_ENOMEM, "kv_offload_memory: out of memory");
    if (o->opts.events != NULL)
        kv_events_set_tier(o->opts.events, KV_MEDIUM_HOST, offload_manager_list, manager);
    const kv_region *memory = host_region_get_memory(o->region);
    log_info("offload", "host tier blocks=%d block_bytes=%zu bytes=%zu policy=%s restored=%d at %s",
             memory->shape.n_blocks, memory->block_stride, memory->n_bytes,
             o->opts.cfg->kv_offload_policy, n_restored, host_region_get_path(o->region));
    return PGD_OK;
}

/* What an earlier worker computed is not what this one would. */
static pgd_err empty_tiers(core_offload *o, const uint8_t fingerprint[HASH_SHA256_BYTES],
                           pgd_why *why)
{
    log_warn("offload", "the tiers are emptied: the worker's numbers or the model's files are not "
                        "those of before");
    destroy_disk(o); /* before the memory is another's */
    host_region_set_fingerprint(o->region, fingerprint);
    if (o->opts.events != NULL)
        kv_events_cleared(o->opts.events, KV_MEDIUM_DISK);
    pgd_err err = make_disk(o, fingerprint, why);
    offload_connector_clear(o->connector, o->disk);
    return err;
}

pgd_err core_offload_begin_life(core_offload *o, kv_config_msg *kv, const worker_facts *facts,
                                pgd_why *why)
{
    uint8_t fingerprint[HASH_SHA256_BYTES];
    PGD_TRY(make_fingerprint(fingerprint, o, facts, why));
    if (o->region == NULL)
        PGD_TRY(make_tiers(o, facts, fingerprint, why));
    else if (!host_region_has_fingerprint(o->region, fingerprint))
        PGD_TRY(empty_tiers(o, fingerprint, why));
    const kv_region *memory = host_region_get_memory(o->region);
    snprintf(kv->offload_path, sizeof kv->offload_path, "%s", host_region_get_path(o->region));
    kv->offload_blocks = memory->shape.n_blocks;
    kv->offload_n_ranks = memory->shape.n_ranks;
    return PGD_OK;
}

/* --- the rest --------------------------------------------------------------------------------- */

const kv_connector *core_offload_get_connector(const core_offload *o)
{
    return o != NULL ? offload_connector_get_ops(o->connector) : NULL;
}

void core_offload_get_stats(offload_stats *out, const core_offload *o)
{
    memset(out, 0, sizeof *out);
    if (o == NULL || o->connector == NULL)
        return;
    offload_connector_get_stats(out, o->connector);
    out->disk.size_bytes = o->disk != NULL ? (uint64_t)o->opts.cfg->kv_offload_disk : 0;
}

static void warn_if_stuck(core_offload *o)
{
    static const char *const what[] = {
        "nothing can be written: the file system hangs, or another engine that uses the directory",
        "nothing can be read: the file system hangs; what lies there is computed again"};
    for (int i = 0; i < 2; i++) {
        if (disk_tier_is_stuck(o->disk, i == 1) &&
            log_limit_pass(&o->stuck[i], WARN_EVERY_US, NULL))
            log_warn("disk", "%s dir=%s", what[i], o->opts.cfg->kv_offload_dir);
    }
}

/* Files come and go by the hands of several threads and engines: the tier is walked when something
 * has changed, not told one by one. */
void core_offload_turn(core_offload *o)
{
    if (o == NULL || o->disk == NULL || o->connector == NULL)
        return;
    offload_connector_pump(o->connector); /* no step may come that would */
    warn_if_stuck(o);
    if (o->opts.events == NULL)
        return;
    uint64_t now_us = clock_now_us();
    uint64_t version = disk_tier_version(o->disk);
    if (version != o->told_version && now_us >= o->next_tell_us &&
        kv_events_walk_tier(o->opts.events, KV_MEDIUM_DISK)) {
        o->told_version = version;
        o->next_tell_us = now_us + TELL_EVERY_US;
    }
}

bool core_offload_is_quiet(const core_offload *o)
{
    offload_stats s;
    core_offload_get_stats(&s, o);
    return s.host.store.n_queued + s.host.load.n_queued + s.disk.store.n_queued +
               s.disk.load.n_queued + s.disk.n_queued_removals ==
           0;
}

bool core_offload_reset(core_offload *o)
{
    if (o == NULL || o->connector == NULL)
        return true;
    if (!core_offload_is_quiet(o))
        return false;
    if (o->disk != NULL)
        disk_tier_clear(o->disk);
    offload_connector_clear(o->connector, o->disk);
    return true;
}
