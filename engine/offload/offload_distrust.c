/* Blocks whose content is not to be trusted: what a request computed, or computed with, that gave no
 * numbers. The host tier forgets them at once; here they are removed from disk, and until the disk
 * tier says so each is neither read nor written there.
 *
 * Which file holds what is not asked: a write may be under way, or another engine's file may not have
 * been heard of. So every key is removed, and one removal of a key covers all that asked for it, since
 * no write of it goes out meanwhile. When there are more keys than room for them, the disk tier is
 * emptied: better too little than one of them left. */
#include "common/clock.h"
#include "common/log.h"
#include "engine/offload/offload_connector_internal.h"

bool offload__is_distrusted(const offload_connector *c, const offload_key *key)
{
    return c->must_clear_disk || hash_map_get(c->distrusted, offload_key_tag(key), NULL);
}

bool offload__is_on_disk(const offload_connector *c, const offload_key *key)
{
    return disk_tier_lookup(c->opts.disk, key) && !offload__is_distrusted(c, key);
}

static void refuse(offload_connector *c, int32_t i)
{
    if (c->first_refused < 0)
        c->retry_at_us = clock_now_us() + OFFLOAD_RETRY_US;
    c->removals[i].next = c->first_refused;
    c->first_refused = i;
}

static void submit(offload_connector *c, int32_t i)
{
    if (disk_tier_remove(c->opts.disk, &c->removals[i].key, (uint64_t)i))
        c->n_disk_removals++;
    else
        refuse(c, i);
}

void offload__distrust(offload_connector *c, const offload_key *keys, int32_t n_keys)
{
    for (int32_t k = 0; c->opts.disk != NULL && k < n_keys; k++) {
        int32_t i = c->first_free_removal;
        if (offload__is_distrusted(c, &keys[k]))
            continue;
        if (i < 0) {
            c->must_clear_disk = true;
            return;
        }
        PGD_ASSERT(hash_map_put(c->distrusted, offload_key_tag(&keys[k]), (uintptr_t)i));
        c->first_free_removal = c->removals[i].next;
        c->removals[i].key = keys[k];
        submit(c, i);
    }
}

/* Of what has come since, nothing could be written. */
static void want_again(offload_connector *c, const offload_key *key)
{
    if (offload_manager_lookup(c->manager, key) == OFFLOAD_HIT)
        offload__want_on_disk(c, offload_manager_get_id(c->manager, key));
}

void offload__end_removal(offload_connector *c, const disk_tier_done *done)
{
    int32_t i = (int32_t)done->cookie;
    c->n_disk_removals--;
    if (!done->ok) {
        refuse(c, i);
        return;
    }
    (void)hash_map_remove(c->distrusted, offload_key_tag(&c->removals[i].key));
    c->removals[i].next = c->first_free_removal;
    c->first_free_removal = i;
    want_again(c, &c->removals[i].key);
}

static void retry(offload_connector *c)
{
    int32_t i = c->first_refused;
    c->first_refused = -1;
    while (i >= 0) {
        int32_t next = c->removals[i].next;
        submit(c, i);
        i = next;
    }
}

void offload__pump_removals(offload_connector *c)
{
    if (c->must_clear_disk) {
        if (c->n_disk_reads + c->n_disk_writes + c->n_disk_removals > 0)
            return;
        log_warn("offload", "the disk tier is emptied: more than %d blocks are not to be trusted",
                 OFFLOAD_REMOVALS);
        disk_tier_clear(c->opts.disk);
        offload__clear_removals(c, false);
    } else if (c->first_refused >= 0 && clock_now_us() >= c->retry_at_us) {
        retry(c);
    }
}

static bool is_in_use(const offload_connector *c, int32_t i)
{
    uintptr_t at;
    return hash_map_get(c->distrusted, offload_key_tag(&c->removals[i].key), &at) &&
           at == (uintptr_t)i;
}

void offload__clear_removals(offload_connector *c, bool is_same)
{
    c->n_disk_removals = 0;
    c->must_clear_disk = false;
    c->first_refused = is_same ? c->first_refused : -1;
    hash_map_reset(c->distrusted);
    for (int32_t i = c->first_refused; i >= 0; i = c->removals[i].next)
        PGD_ASSERT(hash_map_put(c->distrusted, offload_key_tag(&c->removals[i].key), (uintptr_t)i));
    c->first_free_removal = -1;
    for (int32_t i = OFFLOAD_REMOVALS - 1; i >= 0; i--) {
        if (is_in_use(c, i))
            continue;
        c->removals[i].next = c->first_free_removal;
        c->first_free_removal = i;
    }
}
