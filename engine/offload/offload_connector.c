/* Life, and what is no more than a line of the kv_connector. */
#include "engine/offload/offload_connector.h"

#include "common/mem.h"
#include "engine/offload/offload_connector_internal.h"

static bool next_loaded(void *arg, kv_loaded *out)
{
    offload_connector *c = arg;
    offload__pump_disk(c);
    if (offload__next_load(c, out))
        return true;
    c->publish_limit =
        c->n_published; /* OC11: what comes now is computed by the step that is made */
    return false;
}

static void on_step(void *arg, int32_t n_tokens, uint32_t forward_us)
{
    /* Small steps take as long as they take to read the weights. */
    const int32_t n_least = 32;
    offload_connector *c = arg;
    if (n_tokens >= n_least)
        offload_rate_note(&c->rates.us_per_token, forward_us, (uint64_t)n_tokens);
}

static int32_t list_keys(offload_connector *c, const request *r)
{
    int32_t n = offload__list_items(c, r, 0, -1);
    for (int32_t i = 0; i < n; i++)
        c->keys[i] = c->items[i].key;
    return n;
}

static void forget(void *arg, const request *r)
{
    offload_connector *c = arg;
    if (c->alignment == 0)
        return;
    int32_t n = list_keys(c, r);
    offload_manager_forget(c->manager, c->keys, n);
    offload__distrust(c, c->keys, n);
    c->n_changes++;
}

/* Stored from head to tail, its blocks are to be evicted from tail to head. */
static void finished(void *arg, request *r)
{
    offload_connector *c = arg;
    offload__end_promotion(c, r);
    if (c->alignment > 0 && r->epoch > 0 && !r->skip_prefix_lookup)
        offload_manager_refresh(c->manager, c->keys, list_keys(c, r));
}

static void reset(void *arg)
{
    offload_connector *c = arg;
    offload__drop_jobs(c);
    c->n_resets++;
}

static pgd_err set_groups(offload_connector *c)
{
    const offload_connector_opts *o = &c->opts;
    int64_t alignment = 0;
    for (int32_t g = 0; g < o->n_groups; g++) {
        int32_t bs = o->groups[g].block_size;
        if (o->groups[g].ops == NULL || bs < 1)
            return PGD_EINVAL;
        c->groups[g] = o->groups[g];
        c->n_drop[g] = kv_group_ops_n_drop(o->groups, o->n_groups, g, o->use_eagle);
        if (!offload__is_cached(c, g))
            continue;
        if (bs % o->hash_block_size != 0)
            return PGD_EINVAL;
        int64_t lcm = PGD_MAX(alignment, 1);
        while (lcm % bs != 0)
            lcm += PGD_MAX(alignment, 1);
        alignment = lcm;
        if (alignment > 1 << 30)
            return PGD_EINVAL;
        c->max_items += o->max_model_len / bs + 1;
    }
    c->alignment = (int32_t)alignment;
    return PGD_OK;
}

static pgd_err create_arrays(offload_connector *c)
{
    const offload_connector_opts *o = &c->opts;
    size_t n_device = (size_t)o->n_device_blocks, n_items = (size_t)PGD_MAX(c->max_items, 1);
    size_t n_medium = (size_t)o->host.capacity, n_step = (size_t)o->max_step_blocks;
    c->device = mem_calloc(n_device, sizeof *c->device);
    c->urgent = mem_calloc(n_device, sizeof *c->urgent);
    c->urgent_keys = mem_calloc(n_device, sizeof *c->urgent_keys);
    c->medium = mem_calloc(n_medium, sizeof *c->medium);
    c->ring = mem_calloc(n_medium, sizeof *c->ring);
    c->jobs = mem_calloc((size_t)o->max_num_seqs + OFFLOAD_STORE_JOBS, sizeof *c->jobs);
    c->msg_device = mem_calloc(n_step, sizeof *c->msg_device);
    c->msg_medium = mem_calloc(n_step, sizeof *c->msg_medium);
    c->msg_tags = mem_calloc(n_step, sizeof *c->msg_tags);
    c->messages = mem_calloc(KV_TRANSFER_MAX_JOBS, sizeof *c->messages);
    c->items = mem_calloc(n_items, sizeof *c->items);
    c->keys = mem_calloc(PGD_MAX(n_items, n_medium), sizeof *c->keys);
    c->pins = mem_calloc((size_t)c->n_pins, sizeof *c->pins);
    c->removals = mem_calloc(OFFLOAD_REMOVALS, sizeof *c->removals);
    bool is_complete = c->device != NULL && c->urgent != NULL && c->urgent_keys != NULL &&
                       c->medium != NULL && c->ring != NULL && c->jobs != NULL &&
                       c->msg_device != NULL && c->msg_medium != NULL && c->msg_tags != NULL &&
                       c->messages != NULL && c->items != NULL && c->keys != NULL &&
                       c->pins != NULL && c->removals != NULL;
    return is_complete ? PGD_OK : PGD_ENOMEM;
}

static pgd_err create_parts(offload_connector *c)
{
    const offload_connector_opts *o = &c->opts;
    PGD_TRY(set_groups(c));
    /* A host block may be kept by several promotions, and be read for nobody besides. */
    c->n_pins = 2 * PGD_MIN(o->host.capacity, 1 << 17);
    PGD_TRY(offload_manager_create(&c->manager, &o->host));
    PGD_TRY(create_arrays(c));
    if (o->store_threshold > 0)
        PGD_TRY(offload_counter_create(&c->counter, 4 * PGD_MIN(o->host.capacity, 1 << 24)));
    PGD_TRY(hash_map_create(&c->distrusted, OFFLOAD_REMOVALS));
    for (int32_t i = 0; i < o->n_device_blocks; i++)
        c->device[i].store = -1;
    list_init(&c->queue);
    list_init(&c->to_send);
    list_init(&c->to_tell);
    c->refused_change = UINT64_MAX;
    offload__clear_disk(c);
    offload__clear_removals(c, false);
    return PGD_OK;
}

pgd_err offload_connector_create(offload_connector **out, const offload_connector_opts *opts)
{
    *out = NULL;
    if (opts->n_device_blocks < 2 || opts->max_num_seqs < 1 || opts->max_num_seqs >= 1 << 19 ||
        opts->max_model_len < 1 || opts->hash_block_size < 1 || opts->n_groups < 1 ||
        opts->n_groups > PGD_MAX_KV_GROUPS || opts->n_ranks < 1 || opts->n_ranks > 64 ||
        opts->store_threshold < 0 || opts->max_step_blocks < 0 ||
        opts->max_step_blocks > KV_TRANSFER_MAX_BLOCKS || opts->host.capacity < 1 ||
        opts->host.capacity > 1 << 28)
        return PGD_EINVAL;
    offload_connector *c = mem_calloc(1, sizeof *c);
    if (c == NULL)
        return PGD_ENOMEM;
    c->opts = *opts;
    if (c->opts.max_step_blocks == 0)
        c->opts.max_step_blocks = KV_TRANSFER_MAX_BLOCKS;
    pgd_err err = create_parts(c);
    if (err != PGD_OK) {
        offload_connector_destroy(c);
        return err;
    }
    c->opts.groups = c->groups;
    c->ops = (kv_connector){.arg = c,
                            .match = offload__match,
                            .allocated = offload__allocated,
                            .build_step = offload__build_step,
                            .on_transfers = offload__on_transfers,
                            .on_step = on_step,
                            .next_loaded = next_loaded,
                            .has_work = offload__has_work,
                            .forget = forget,
                            .finished = finished,
                            .reset = reset,
                            .blocks = {.arg = c,
                                       .published = offload__published,
                                       .unpublished = offload__unpublished,
                                       .reused = offload__reused}};
    *out = c;
    return PGD_OK;
}

void offload_connector_destroy(offload_connector *c)
{
    if (c == NULL)
        return;
    offload_manager_destroy(c->manager);
    offload_counter_destroy(c->counter);
    hash_map_destroy(c->distrusted);
    mem_free(c->device);
    mem_free(c->urgent);
    mem_free(c->urgent_keys);
    mem_free(c->medium);
    mem_free(c->ring);
    mem_free(c->jobs);
    mem_free(c->msg_device);
    mem_free(c->msg_medium);
    mem_free(c->msg_tags);
    mem_free(c->messages);
    mem_free(c->items);
    mem_free(c->keys);
    mem_free(c->pins);
    mem_free(c->removals);
    mem_free(c);
}

const kv_connector *offload_connector_get_ops(const offload_connector *c)
{
    return &c->ops;
}

offload_manager *offload_connector_get_manager(offload_connector *c)
{
    return c->manager;
}

void offload_connector_clear(offload_connector *c, disk_tier *disk)
{
    PGD_ASSERTF(c->n_load_blocks == 0 && c->n_store_blocks == 0,
                "%lld blocks are being loaded, %d stored", (long long)c->n_load_blocks,
                c->n_store_blocks);
    offload_manager_reset(c->manager);
    offload__clear_disk(c);
    offload__clear_removals(c, disk == c->opts.disk);
    for (int32_t i = 0; i < offload_manager_capacity(c->manager); i++)
        c->medium[i] = (offload_medium_block){0};
    c->opts.disk = disk;
    c->n_changes++;
    c->n_resets++;
}

void offload_connector_pump(offload_connector *c)
{
    offload__pump_disk(c);
}

/* Queued are those that have not been heard of, done or not. */
static void fill_disk_stats(offload_tier_stats *out, const offload_connector *c)
{
    disk_tier_stats d;
    disk_tier_get_stats(&d, c->opts.disk);
    out->used_bytes = d.used_bytes;
    out->n_evicted = d.n_evicted;
    out->n_distrusted = d.n_removed;
    out->n_queued_removals = (uint64_t)c->n_disk_removals;
    out->store = (offload_flow){d.n_written_bytes, d.write_us, d.n_failed_writes,
                                (uint64_t)c->n_disk_writes};
    out->load =
        (offload_flow){d.n_read_bytes, d.read_us, d.n_failed_reads, (uint64_t)c->n_disk_reads};
}

void offload_connector_get_stats(offload_stats *out, const offload_connector *c)
{
    *out = c->stats;
    out->host.size_bytes = (uint64_t)offload_manager_capacity(c->manager) * c->opts.block_bytes;
    out->host.used_bytes = (uint64_t)offload_manager_n_blocks(c->manager) * c->opts.block_bytes;
    out->host.n_evicted = offload_manager_n_evicted(c->manager);
    out->host.n_distrusted = offload_manager_n_forgotten(c->manager);
    out->host.load.n_queued = (uint64_t)c->n_load_blocks;
    out->host.store.n_queued = (uint64_t)c->n_queued + (uint64_t)c->n_store_blocks;
    if (c->opts.disk != NULL)
        fill_disk_stats(&out->disk, c);
}

void offload_connector_check(const offload_connector *c)
{
    int32_t n_queued = 0, n_pins = 0, n_storing = 0, n_in_ring = 0;
    int64_t n_loading = 0;
    offload_manager_check(c->manager);
    for (int32_t i = 0; i < c->opts.n_device_blocks; i++)
        n_queued += list_is_linked(&c->device[i].queue);
    for (int32_t i = 0; i < c->n_pins; i++)
        n_pins += c->pins[i].state != OFFLOAD_PIN_FREE;
    for (int32_t i = 0; i < offload_manager_capacity(c->manager); i++) {
        n_loading += c->medium[i].n_loading;
        n_in_ring += c->medium[i].is_in_ring;
    }
    int32_t n_loads = 0;
    for (int32_t i = 0; i < c->opts.max_num_seqs; i++)
        n_loads += c->jobs[i].id != 0 && c->jobs[i].is_sent;
    PGD_ASSERTF(n_in_ring == c->n_in_ring && n_loads == c->n_loads,
                "%d blocks are to be written to disk, %d counted; %d loads are out, %d counted",
                n_in_ring, c->n_in_ring, n_loads, c->n_loads);
    for (int32_t i = 0; i < OFFLOAD_STORE_JOBS; i++) {
        const offload_job *job = &c->jobs[c->opts.max_num_seqs + i];
        n_storing += job->id != 0 ? job->n_blocks : 0;
    }
    PGD_ASSERTF(n_queued == c->n_queued && n_pins == c->n_pins - c->n_free_pins &&
                    n_loading == c->n_load_blocks && n_storing == c->n_store_blocks &&
                    n_storing <= offload_manager_n_blocks(c->manager),
                "%d queued, %d counted; %d pins, %d free of %d; %lld loading, %lld counted; %d "
                "being stored, %d counted, of %d",
                n_queued, c->n_queued, n_pins, c->n_free_pins, c->n_pins, (long long)n_loading,
                (long long)c->n_load_blocks, n_storing, c->n_store_blocks,
                offload_manager_n_blocks(c->manager));
}
