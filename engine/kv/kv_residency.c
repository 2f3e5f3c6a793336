/* Times lie beside the pool's records and are touched for sampled blocks only; what tells these is a
 * bitmap that stays in the CPU's caches. */
#include "engine/kv/kv_residency.h"

#include <string.h>

#include "common/hash.h"
#include "common/mem.h"
#include "engine/core/stats.h"

typedef struct block_times {
    uint64_t given_us;
    uint64_t used_us; /* last handed out or hit */
} block_times;

struct kv_residency {
    uint64_t (*now_us)(void);
    uint64_t threshold; /* of 2^32 */
    uint64_t n_given;
    int32_t n_blocks;
    uint64_t *is_sampled; /* [n_blocks / 64 + 1], bits */
    block_times *times;   /* [n_blocks] */
    bool is_changed;
    kv_residency_stats stats;
    stats_cell *cell;
};

static const double bounds_s[] = {0.001, 0.002, 0.005, 0.01,  0.02,  0.05,   0.1,
                                  0.2,   0.5,   1.0,   2.0,   5.0,   10.0,   20.0,
                                  30.0,  60.0,  120.0, 300.0, 600.0, 1200.0, 1800.0};

pgd_err kv_residency_create(kv_residency **out, double sample, uint64_t (*now_us)(void))
{
    *out = NULL;
    if (!(sample > 0 && sample <= 1))
        return PGD_EINVAL;
    kv_residency *k = mem_calloc(1, sizeof *k);
    if (k == NULL)
        return PGD_ENOMEM;
    k->now_us = now_us;
    k->threshold = (uint64_t)(sample * 4294967296.0);
    histogram_init(&k->stats.lifetime_s, bounds_s, PGD_ARRAY_LEN(bounds_s));
    histogram_init(&k->stats.idle_s, bounds_s, PGD_ARRAY_LEN(bounds_s));
    histogram_init(&k->stats.reuse_gap_s, bounds_s, PGD_ARRAY_LEN(bounds_s));
    pgd_err err = stats_cell_create(&k->cell, sizeof k->stats);
    if (err != PGD_OK) {
        kv_residency_destroy(k);
        return err;
    }
    stats_publish(k->cell, &k->stats);
    *out = k;
    return PGD_OK;
}

void kv_residency_destroy(kv_residency *k)
{
    if (k == NULL)
        return;
    stats_cell_destroy(k->cell);
    mem_free(k->is_sampled);
    mem_free(k->times);
    mem_free(k);
}

pgd_err kv_residency_set_pool(kv_residency *k, int32_t n_blocks)
{
    PGD_ASSERTF(k->times == NULL, "the pool has %d blocks already", k->n_blocks);
    k->n_blocks = n_blocks;
    k->is_sampled = mem_calloc((size_t)n_blocks / 64 + 1, sizeof *k->is_sampled);
    k->times = mem_calloc((size_t)n_blocks, sizeof *k->times);
    return k->is_sampled != NULL && k->times != NULL ? PGD_OK : PGD_ENOMEM;
}

static bool is_sampled(const kv_residency *k, block_id id)
{
    return (k->is_sampled[id / 64] >> (id % 64) & 1) != 0;
}

static void add(kv_residency *k, histogram *h, uint64_t from_us, uint64_t to_us)
{
    histogram_add(h, (double)(to_us - from_us) * 1e-6);
    k->is_changed = true;
}

static void publish_changes(kv_residency *k)
{
    if (k->is_changed)
        stats_publish(k->cell, &k->stats);
    k->is_changed = false;
}

void kv_residency_note_evicted(kv_residency *k, block_id id)
{
    if (!is_sampled(k, id))
        return;
    uint64_t now_us = k->now_us();
    add(k, &k->stats.lifetime_s, k->times[id].given_us, now_us);
    add(k, &k->stats.idle_s, k->times[id].used_us, now_us);
}

void kv_residency_note_given(kv_residency *k, const block_id *ids, int32_t n_ids)
{
    for (int32_t i = 0; i < n_ids; i++) {
        uint64_t draw = hash_u64(((uint64_t)ids[i] << 40) + k->n_given++) >> 32;
        uint64_t bit = (uint64_t)1 << (ids[i] % 64);
        k->is_sampled[ids[i] / 64] &= ~bit;
        if (draw >= k->threshold)
            continue;
        k->is_sampled[ids[i] / 64] |= bit;
        uint64_t now_us = k->now_us();
        k->times[ids[i]] = (block_times){.given_us = now_us, .used_us = now_us};
    }
    publish_changes(k);
}

void kv_residency_note_used(kv_residency *k, const block_id *ids, int32_t n_ids)
{
    for (int32_t i = 0; i < n_ids; i++) {
        if (ids[i] == 0 || !is_sampled(k, ids[i]))
            continue;
        block_times *t = &k->times[ids[i]];
        uint64_t now_us = k->now_us();
        add(k, &k->stats.reuse_gap_s, t->used_us, now_us);
        t->used_us = now_us;
    }
    publish_changes(k);
}

void kv_residency_read(const kv_residency *k, kv_residency_stats *out)
{
    stats_read(k->cell, out);
}
