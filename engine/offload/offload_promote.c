/* Between host and disk: blocks that a waiting request wants up, blocks that have become loadable
 * down.
 *
 * A promotion keeps a pin on each host block that its request needs; those that are on disk only are
 * given room in the host tier (being written, as for a store), read one after the other as fast as
 * the disk tier takes them, and pinned when they have arrived. It ends when the request was given
 * blocks or has finished: reads that have begun then go on for nobody.
 *
 * Writes are for whoever comes later: what is evicted before the disk tier took it is not written. */
#include "engine/offload/offload_connector_internal.h"

/* Cookies: reads carry their pin, writes this and the medium block. */
#define WRITE_COOKIE ((uint64_t)1 << 32)

/* --- pins -------------------------------------------------------------------------------------- */

static int32_t take_pin(offload_connector *c, int32_t promotion, int32_t medium_id)
{
    int32_t i = c->first_free_pin;
    offload_pin *pin = &c->pins[i];
    offload_promotion *p = &c->promotions[promotion];
    c->first_free_pin = pin->next;
    c->n_free_pins--;
    *pin = (offload_pin){.medium_id = medium_id, .promotion = promotion, .next = p->first_pin};
    p->first_pin = i;
    return i;
}

static void free_pin(offload_connector *c, int32_t i)
{
    c->pins[i] = (offload_pin){.state = OFFLOAD_PIN_FREE, .next = c->first_free_pin};
    c->first_free_pin = i;
    c->n_free_pins++;
}

static bool hold(offload_connector *c, const offload_key *key)
{
    int32_t id;
    return offload_manager_prepare_load(&id, c->manager, key, 1);
}

static void let_go(offload_connector *c, int32_t medium_id)
{
    offload_key key = offload__key_at(c, medium_id);
    offload_manager_complete_load(c->manager, &key, 1, offload_manager_generation(c->manager));
    c->n_changes++;
}

static void end_store(offload_connector *c, int32_t medium_id, bool ok)
{
    offload_key key = offload__key_at(c, medium_id);
    offload_manager_complete_store(c->manager, &key, 1, ok, offload_manager_generation(c->manager));
    c->n_changes++;
}

/* --- promotions -------------------------------------------------------------------------------- */

static int32_t find_free_promotion(const offload_connector *c)
{
    for (int32_t i = 0; i < OFFLOAD_PROMOTIONS; i++) {
        if (!c->promotions[i].is_used)
            return i;
    }
    return -1;
}

static void give_up(offload_connector *c, offload_pin *pin)
{
    c->medium[pin->medium_id].promotion = 0;
    end_store(c, pin->medium_id, false);
    pin->state = OFFLOAD_PIN_LOST;
    c->promotions[pin->promotion].n_left--;
}

/* With nothing under way no report would call us again: what the disk tier does not take then, it does
 * not take. Nor is it asked for what has been found to be wrong since. */
static void submit_reads(offload_connector *c)
{
    while (!list_is_empty(&c->to_read)) {
        offload_pin *pin = LIST_ENTRY(c->to_read.next, offload_pin, queue);
        offload_key key = offload__key_at(c, pin->medium_id);
        bool is_wanted = !offload__is_distrusted(c, &key);
        bool is_taken = is_wanted && disk_tier_read(c->opts.disk, &key, pin->medium_id,
                                                    (uint64_t)(pin - c->pins));
        if (is_wanted && !is_taken && c->n_disk_reads + c->n_disk_writes > 0)
            return;
        list_remove(&pin->queue);
        if (is_taken) {
            pin->state = OFFLOAD_PIN_READING;
            c->n_disk_reads++;
        } else {
            give_up(c, pin);
        }
    }
}

bool offload__promote(offload_connector *c, request *r, int32_t n_items)
{
    int32_t promotion = find_free_promotion(c);
    offload_store store;
    if (promotion < 0 || c->n_free_pins < n_items)
        return false;
    for (int32_t i = 0; i < n_items; i++)
        c->keys[i] = c->items[i].key;
    if (!offload_manager_prepare_store(&store, c->manager, c->keys, n_items))
        return false;
    c->promotions[promotion] = (offload_promotion){.first_pin = -1, .is_used = true};
    for (int32_t i = 0; i < store.n_stored; i++) {
        offload_pin *pin = &c->pins[take_pin(c, promotion, store.medium_ids[i])];
        pin->state = OFFLOAD_PIN_QUEUED;
        list_append(&c->to_read, &pin->queue);
        c->promotions[promotion].n_left++;
        c->medium[pin->medium_id].promotion = 1 + promotion;
    }
    for (int32_t i = 0; i < n_items; i++) {
        if (!hold(c, &c->keys[i]))
            continue;
        int32_t id = offload_manager_get_id(c->manager, &c->keys[i]);
        c->pins[take_pin(c, promotion, id)].state = OFFLOAD_PIN_HELD;
    }
    r->tier.promotion = 1 + promotion;
    r->tier.was_promoted = true;
    submit_reads(c);
    return true;
}

bool offload__is_promoting(const offload_connector *c, const request *r)
{
    return r->tier.promotion > 0 && c->promotions[r->tier.promotion - 1].n_left > 0;
}

static void end_pin(offload_connector *c, int32_t i)
{
    offload_pin *pin = &c->pins[i];
    if (pin->state != OFFLOAD_PIN_LOST)
        c->medium[pin->medium_id].promotion = 0;
    switch (pin->state) {
    case OFFLOAD_PIN_READING:
        pin->promotion = -1;
        return;
    case OFFLOAD_PIN_HELD:
        let_go(c, pin->medium_id);
        break;
    case OFFLOAD_PIN_QUEUED:
        list_remove(&pin->queue);
        end_store(c, pin->medium_id, false);
        break;
    case OFFLOAD_PIN_LOST:
    case OFFLOAD_PIN_FREE:
        break;
    }
    free_pin(c, i);
}

void offload__end_promotion(offload_connector *c, request *r)
{
    if (r->tier.promotion == 0)
        return;
    offload_promotion *p = &c->promotions[r->tier.promotion - 1];
    r->tier.promotion = 0;
    for (int32_t i = p->first_pin; i >= 0;) {
        int32_t next = c->pins[i].next;
        end_pin(c, i);
        i = next;
    }
    *p = (offload_promotion){0};
}

static void end_read(offload_connector *c, int32_t i, bool ok)
{
    offload_pin *pin = &c->pins[i];
    offload_key key = offload__key_at(c, pin->medium_id);
    PGD_ASSERTF(pin->state == OFFLOAD_PIN_READING, "pin %d is in state %d", i, pin->state);
    end_store(c, pin->medium_id, ok);
    if (pin->promotion < 0) {
        free_pin(c, i);
        return;
    }
    c->promotions[pin->promotion].n_left--;
    bool is_held = ok && hold(c, &key);
    if (!is_held)
        c->medium[pin->medium_id].promotion = 0;
    pin->state = is_held ? OFFLOAD_PIN_HELD : OFFLOAD_PIN_LOST;
}

/* --- to disk ----------------------------------------------------------------------------------- */

void offload__want_on_disk(offload_connector *c, int32_t medium_id)
{
    if (c->opts.disk == NULL || c->medium[medium_id].is_in_ring)
        return;
    int32_t capacity = offload_manager_capacity(c->manager);
    c->medium[medium_id].is_in_ring = true;
    c->ring[(c->first_in_ring + c->n_in_ring++) % capacity] = medium_id;
}

static void submit_writes(offload_connector *c)
{
    for (; c->n_in_ring > 0; c->n_in_ring--) {
        int32_t id = c->ring[c->first_in_ring];
        const offload_key *at = offload_manager_get_key(c->manager, id);
        if (at != NULL && !offload__is_distrusted(c, at) && !disk_tier_lookup(c->opts.disk, at)) {
            offload_key key = *at;
            if (hold(c, &key)) {
                if (!disk_tier_write(c->opts.disk, &key, id, WRITE_COOKIE | (uint64_t)id)) {
                    let_go(c, id);
                    return;
                }
                c->n_disk_writes++;
            }
        }
        c->medium[id].is_in_ring = false;
        c->first_in_ring = (c->first_in_ring + 1) % offload_manager_capacity(c->manager);
    }
}

void offload__pump_disk(offload_connector *c)
{
    disk_tier_done done;
    if (c->opts.disk == NULL)
        return;
    while (disk_tier_next_done(c->opts.disk, &done)) {
        if (done.is_removal) {
            offload__end_removal(c, &done);
            continue;
        }
        if (!done.is_read) {
            c->n_disk_writes--;
            let_go(c, (int32_t)(done.cookie & UINT32_MAX));
            continue;
        }
        c->n_disk_reads--;
        if (done.ok)
            offload_rate_note(&c->rates.us_per_read, done.us, 1);
        end_read(c, (int32_t)done.cookie, done.ok);
    }
    offload__pump_removals(c);
    submit_reads(c);
    submit_writes(c);
}

void offload__clear_disk(offload_connector *c)
{
    list_init(&c->to_read);
    c->first_free_pin = -1;
    c->n_free_pins = 0;
    for (int32_t i = c->n_pins - 1; i >= 0; i--)
        free_pin(c, i);
    for (int32_t i = 0; i < OFFLOAD_PROMOTIONS; i++) {
        if (c->promotions[i].is_used)
            c->promotions[i] = (offload_promotion){.first_pin = -1, .is_used = true};
    }
    c->n_disk_reads = c->n_disk_writes = 0;
    c->first_in_ring = c->n_in_ring = 0;
}
