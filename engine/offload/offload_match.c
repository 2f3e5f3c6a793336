/* What the tiers have behind a request's local prefix.
 *
 * The search for a length goes as in kv_hybrid.c: kinds of attention that skip nothing are asked
 * first, each cuts the candidate; the others are asked in turn until all agree. A block that is on
 * its way counts as there; whether the request waits for it is decided once the length is known.
 *
 * A request that waits is asked with every step, so the answer is kept in it and holds:
 *   NONE       while the local prefix and the request's hashes are the same, until the worker is lost
 *   HIT        while none of its blocks was evicted or begins to be loaded for another
 *   ASK_AGAIN  while the first block that it waits for is still on its way, and the disk answers */
#include "common/clock.h"
#include "engine/offload/offload_connector_internal.h"

/* What counts as there. */
typedef struct offload_reach {
    bool disk;
    bool pending;
} offload_reach;

/* --- blocks of a prefix ------------------------------------------------------------------------ */

/* First block of the group that a prefix of n_tokens needs behind the first n_local. */
static int32_t first_needed(const offload_connector *c, int32_t g, int32_t n_local,
                            int32_t n_tokens)
{
    return PGD_MAX(kv_group_ops_skipped_blocks(&c->groups[g], n_tokens),
                   n_local / c->groups[g].block_size);
}

/* Tokens that can be named and are not the last. */
static int32_t n_known(const offload_connector *c, const request *r)
{
    int64_t n_hashed = (int64_t)r->n_block_hashes * c->opts.hash_block_size;
    return (int32_t)PGD_MIN(n_hashed, (int64_t)r->n_tokens - 1);
}

int32_t offload__list_items(offload_connector *c, const request *r, int32_t n_local,
                            int32_t n_tokens)
{
    int32_t at[PGD_MAX_KV_GROUPS], end[PGD_MAX_KV_GROUPS];
    for (int32_t g = 0; g < c->opts.n_groups; g++) {
        bool is_all = n_tokens < 0;
        int32_t n = is_all ? r->n_block_hashes * c->opts.hash_block_size : n_tokens;
        end[g] = offload__is_cached(c, g) ? n / c->groups[g].block_size : 0;
        at[g] = is_all ? 0 : first_needed(c, g, n_local, n);
    }
    int32_t n_items = 0;
    for (;;) {
        int32_t next = -1, next_end = INT32_MAX;
        for (int32_t g = 0; g < c->opts.n_groups; g++) {
            int32_t e = at[g] < end[g] ? (at[g] + 1) * c->groups[g].block_size : INT32_MAX;
            if (e < next_end) {
                next = g;
                next_end = e;
            }
        }
        if (next < 0)
            return n_items;
        c->items[n_items++] = (offload_item){
            .key = offload__key_of(c, r, next, at[next]), .idx = at[next], .end = next_end};
        at[next]++;
    }
}

/* --- the longest prefix ------------------------------------------------------------------------ */

static bool is_there(const offload_connector *c, const offload_key *key, offload_reach reach)
{
    switch (offload_manager_lookup(c->manager, key)) {
    case OFFLOAD_HIT:
        return true;
    case OFFLOAD_PENDING:
        return reach.pending;
    case OFFLOAD_MISS:
        break;
    }
    return reach.disk && offload__is_on_disk(c, key);
}

static int32_t align(const offload_connector *c, int64_t n_tokens)
{
    return n_tokens > 0 ? (int32_t)(n_tokens - n_tokens % c->alignment) : 0;
}

/* Longest prefix of at most n_tokens that group g has. A miss rules out all prefixes that reach beyond
 * it. */
static int32_t cut(const offload_connector *c, const request *r, int32_t g, int32_t n_local,
                   int32_t n_tokens, offload_reach reach)
{
    int32_t bs = c->groups[g].block_size;
    int32_t drop = c->n_drop[g];
    n_tokens = PGD_MIN(n_tokens, align(c, ((int64_t)n_known(c, r) / bs - drop) * bs));
    int32_t idx = first_needed(c, g, n_local, n_tokens);
    while (n_tokens > n_local && idx < n_tokens / bs + drop) {
        offload_key key = offload__key_of(c, r, g, idx);
        if (is_there(c, &key, reach)) {
            idx++;
            continue;
        }
        n_tokens = align(c, ((int64_t)idx - drop) * bs);
        if (c->groups[g].ops->skipped_tokens == NULL)
            break;
        idx = first_needed(c, g, n_local, n_tokens);
    }
    return PGD_MAX(n_tokens, n_local);
}

static int32_t find_longest(const offload_connector *c, const request *r, int32_t n_local,
                            int32_t n_tokens, offload_reach reach)
{
    for (int32_t g = 0; g < c->opts.n_groups; g++) {
        if (offload__is_cached(c, g) && c->groups[g].ops->skipped_tokens == NULL)
            n_tokens = cut(c, r, g, n_local, n_tokens, reach);
    }
    for (int32_t before = -1; before != n_tokens;) {
        before = n_tokens;
        for (int32_t g = 0; g < c->opts.n_groups; g++) {
            if (offload__is_cached(c, g) && c->groups[g].ops->skipped_tokens != NULL)
                n_tokens = cut(c, r, g, n_local, n_tokens, reach);
        }
    }
    return n_tokens;
}

/* --- the answer -------------------------------------------------------------------------------- */

static bool is_loading(const offload_connector *c, const offload_key *key)
{
    int32_t id = offload_manager_get_id(c->manager, key);
    return id >= 0 && c->medium[id].n_loading > 0;
}

/* Tokens of the hit that the request's promotion has brought up: those of its blocks, and those that
 * no group needs before them. */
static int32_t count_disk_tokens(const offload_connector *c, const request *r, int32_t n_local,
                                 int32_t n_items)
{
    int32_t n = 0, covered = n_local;
    int32_t reached = n_local, before = n_local; /* where items end, and those that end earlier */
    for (int32_t i = 0; i < n_items && r->tier.promotion > 0; i++) {
        const offload_item *item = &c->items[i];
        int32_t id = offload_manager_get_id(c->manager, &item->key);
        if (item->end > reached) {
            before = reached;
            reached = item->end;
        }
        if (c->medium[id].promotion != r->tier.promotion)
            continue;
        int32_t first = PGD_MIN(item->end - c->groups[item->key.group_id].block_size, before);
        n += item->end - PGD_MAX(first, covered);
        covered = item->end;
    }
    return n;
}

static void keep(request *r, kv_match_kind kind, uint64_t stamp)
{
    r->tier.answer = 1 + (int32_t)kind;
    r->tier.stamp = stamp;
}

static bool is_patient(const request *r)
{
    return r->tier.since_us == 0 || clock_now_us() - r->tier.since_us < OFFLOAD_PATIENCE_US;
}

/* Blocks that are read from a disk that hangs look like any that are on their way: then nobody waits
 * for any. */
static bool is_stuck(const offload_connector *c)
{
    return c->opts.disk != NULL && disk_tier_is_stuck(c->opts.disk, true);
}

static void answer_later(request *r)
{
    if (r->tier.since_us == 0)
        r->tier.since_us = clock_now_us();
    keep(r, KV_MATCH_ASK_AGAIN, 0);
}

static void answer_none(const offload_connector *c, request *r)
{
    keep(r, KV_MATCH_NONE, c->n_resets);
}

static void answer_hit(offload_connector *c, request *r, int32_t n_local, int32_t n_items,
                       int32_t n_tokens)
{
    uint64_t stamp = offload_manager_next_stamp(c->manager);
    for (int32_t i = 0; i < n_items; i++)
        offload_manager_watch(c->manager, &c->items[i].key, stamp);
    r->tier.n_tokens = n_tokens;
    r->tier.n_disk_tokens = count_disk_tokens(c, r, n_local, n_items);
    keep(r, KV_MATCH_HIT, stamp);
}

/* True when the request is to wait for one of the items, which are all there or on their way. */
static bool must_wait(const offload_connector *c, request *r, int32_t n_items)
{
    for (int32_t i = 0; i < n_items; i++) {
        const offload_key *key = &c->items[i].key;
        if (offload_manager_lookup(c->manager, key) != OFFLOAD_PENDING && !is_loading(c, key))
            continue;
        r->tier.n_waits++;
        r->tier.group_id = key->group_id;
        r->tier.block_idx = c->items[i].idx;
        return true;
    }
    return false;
}

static int32_t count_misses(const offload_connector *c, int32_t n_items)
{
    int32_t n = 0;
    for (int32_t i = 0; i < n_items; i++)
        n += offload_manager_lookup(c->manager, &c->items[i].key) == OFFLOAD_MISS;
    return n;
}

/* Tries shorter prefixes when there is no room to bring up the longest. */
static void work_out(offload_connector *c, request *r, int32_t n_local)
{
    bool may_wait = is_patient(r) && !is_stuck(c);
    offload_reach reach = {.disk = c->opts.disk != NULL && !r->tier.was_promoted && !is_stuck(c),
                           .pending = r->tier.n_waits < OFFLOAD_MAX_WAITS && may_wait};
    int32_t n_most = align(c, n_known(c, r));
    int32_t n_tokens = find_longest(c, r, n_local, n_most, reach);
    while (n_tokens > n_local) {
        int32_t n_items = offload__list_items(c, r, n_local, n_tokens);
        if (n_items == 0)
            break;
        if (n_items > c->opts.max_step_blocks) {
            n_tokens =
                find_longest(c, r, n_local, align(c, n_local + (n_tokens - n_local) / 2), reach);
            continue;
        }
        if (reach.pending && must_wait(c, r, n_items)) {
            answer_later(r);
            return;
        }
        int32_t n_disk = count_misses(c, n_items);
        offload_work work = {n_tokens - n_local, n_items + c->n_load_blocks, n_disk};
        if (!offload_should_load(&c->rates, &work)) {
            if (n_disk == 0)
                break;
            reach.disk = false; /* what the host tier has may be worth it */
            n_tokens = find_longest(c, r, n_local, n_most, reach);
            continue;
        }
        if (n_disk == 0) {
            answer_hit(c, r, n_local, n_items, n_tokens - n_local);
            return;
        }
        if (offload__promote(c, r, n_items)) {
            r->tier.group_id = -1;
            answer_later(r);
            return;
        }
        n_tokens = find_longest(c, r, n_local, align(c, n_local + (n_tokens - n_local) / 2), reach);
        if (n_tokens <= n_local) {
            reach.disk = false;
            n_tokens = find_longest(c, r, n_local, n_most, reach);
        }
    }
    answer_none(c, r);
}

/* The key of the block that it waits for has not arrived, nor failed to. */
static bool is_still_waiting(const offload_connector *c, const request *r)
{
    if (r->tier.group_id < 0)
        return offload__is_promoting(c, r);
    offload_key key = offload__key_of(c, r, r->tier.group_id, r->tier.block_idx);
    return offload_manager_lookup(c->manager, &key) == OFFLOAD_PENDING || is_loading(c, &key);
}

static bool does_hold(const offload_connector *c, const request *r, int32_t n_local)
{
    const request_tier *t = &r->tier;
    if (t->answer == 0 || t->n_local_tokens != n_local || t->n_block_hashes != r->n_block_hashes)
        return offload__is_promoting(c, r) && is_patient(r) && !is_stuck(c);
    switch ((kv_match_kind)(t->answer - 1)) {
    case KV_MATCH_NONE:
        return t->stamp == c->n_resets;
    case KV_MATCH_HIT:
        return offload_manager_is_intact(c->manager, t->stamp);
    case KV_MATCH_ASK_AGAIN:
        return is_still_waiting(c, r) && is_patient(r) && !is_stuck(c);
    }
    return false;
}

/* Once for each time that the request waits: more often would make it worth more than others. */
static void touch(offload_connector *c, request *r)
{
    int32_t n = offload__list_items(c, r, 0, -1);
    r->tier.was_touched = true;
    for (int32_t i = 0; i < n; i++) {
        c->keys[i] = c->items[i].key;
        if (c->counter != NULL)
            offload_counter_add(c->counter, &c->keys[i]);
    }
    offload_manager_touch(c->manager, c->keys, n);
    if (c->opts.disk != NULL)
        disk_tier_touch(c->opts.disk, c->keys, n);
}

kv_match offload__match(void *arg, request *r, int32_t n_local_tokens)
{
    offload_connector *c = arg;
    if (r->n_block_hashes == 0 || c->alignment == 0)
        return (kv_match){.kind = KV_MATCH_NONE};
    if (!r->tier.was_touched)
        touch(c, r);
    if (!does_hold(c, r, n_local_tokens)) {
        r->tier.n_local_tokens = n_local_tokens;
        r->tier.n_block_hashes = r->n_block_hashes;
        work_out(c, r, n_local_tokens);
    }
    kv_match match = {.kind = (kv_match_kind)(r->tier.answer - 1)};
    if (match.kind == KV_MATCH_HIT) {
        match.n_tokens = r->tier.n_tokens;
        match.n_disk_tokens = r->tier.n_disk_tokens;
    }
    return match;
}
