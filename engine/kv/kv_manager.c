/* allocate_slots in its exact order (AL). Counting comes before any change, so that a refusal
 * leaves references, lists and cache as they were and may be tried again in the next step.
 *
 * Blocks are published when they are scheduled, not when they are written. That is sound because
 * steps run in order on the worker, and it lets two equal prompts of one step share blocks. The
 * price: when a scheduled request is un-scheduled, kv_manager_free must take back what was published
 * too early, and when its computation fails, kv_manager_forget, which goes by content, since the
 * blocks may have other holders by then, or none. */
#include "engine/kv/kv_manager.h"

#include <string.h>

#include "common/mem.h"

struct kv_manager {
    block_pool *pool;
    kv_coordinator *coordinator;
    kv_zero_list zero_list;
    kv_events *events; /* NULL = nobody asked */
    int32_t max_model_len;
    int32_t max_holders;
    int32_t *free_rows; /* [max_holders], a stack */
    int32_t n_free_rows;
    int32_t *promised; /* [max_holders], blocks that the row's prefill has still to take */
    int32_t *targets;  /* [max_holders], tokens the row was admitted with; 0 once it has blocks for
                          all of them */
    int32_t n_promised;
    kv_quiet *quiet; /* [max_holders] */
    kv_hit hit;      /* result of the last lookup */
    int32_t *counts; /* [n_blocks], scratch, all 0 between calls */
};

static pgd_err create_parts(kv_manager *m, const kv_manager_opts *opts)
{
    PGD_TRY(block_pool_create(&m->pool, opts->n_blocks, opts->enable_caching));
    size_t n_blocks = (size_t)opts->n_blocks;
    m->zero_list.ids = mem_calloc(n_blocks, sizeof *m->zero_list.ids);
    m->zero_list.is_listed = mem_calloc(n_blocks, sizeof *m->zero_list.is_listed);
    m->counts = mem_calloc(n_blocks, sizeof *m->counts);
    size_t n_rows = (size_t)m->max_holders;
    m->free_rows = mem_calloc(n_rows, sizeof *m->free_rows);
    m->promised = mem_calloc(n_rows, sizeof *m->promised);
    m->targets = mem_calloc(n_rows, sizeof *m->targets);
    m->quiet = mem_calloc(n_rows, sizeof *m->quiet);
    if (m->zero_list.ids == NULL || m->zero_list.is_listed == NULL || m->counts == NULL ||
        m->free_rows == NULL || m->promised == NULL || m->targets == NULL || m->quiet == NULL)
        return PGD_ENOMEM;
    while (m->n_free_rows < m->max_holders) {
        m->free_rows[m->n_free_rows] = m->max_holders - 1 - m->n_free_rows;
        m->n_free_rows++;
    }
    kv_coordinator_opts coordinator_opts = {
        .pool = m->pool,
        .zero_list = &m->zero_list,
        .events = m->events,
        .groups = opts->groups,
        .n_groups = opts->n_groups,
        .enable_caching = opts->enable_caching,
        .use_eagle = opts->use_eagle,
        .hash_block_size = opts->hash_block_size,
        .n_rows = m->max_holders,
        .max_model_len = opts->max_model_len,
        .max_unfinished_tokens = opts->max_unfinished_tokens,
    };
    PGD_TRY(kv_coordinator_create(&m->coordinator, &coordinator_opts));
    block_pool_set_events(m->pool, m->events);
    block_pool_set_residency(m->pool, opts->residency);
    block_pool_set_listener(m->pool, opts->listener);
    if (opts->residency != NULL)
        PGD_TRY(kv_residency_set_pool(opts->residency, opts->n_blocks));
    if (m->events != NULL)
        PGD_TRY(kv_events_set_groups(m->events, opts->groups, opts->n_groups));
    for (int32_t g = 0; g < opts->n_groups; g++) {
        size_t n_entries = (size_t)m->coordinator->groups[g].max_blocks_per_row;
        m->hit.blocks[g] = mem_calloc(n_entries, sizeof *m->hit.blocks[g]);
        if (m->hit.blocks[g] == NULL)
            return PGD_ENOMEM;
    }
    return PGD_OK;
}

pgd_err kv_manager_create(kv_manager **out, const kv_manager_opts *opts)
{
    *out = NULL;
    if (opts->max_holders < 1 || opts->max_model_len < 1 ||
        opts->max_model_len > KV_MANAGER_MAX_MODEL_LEN || opts->n_groups < 1)
        return PGD_EINVAL;
    kv_manager *m = mem_calloc(1, sizeof *m);
    if (m == NULL)
        return PGD_ENOMEM;
    m->max_model_len = opts->max_model_len;
    m->max_holders = opts->max_holders;
    m->events = opts->enable_caching ? opts->events : NULL;
    pgd_err err = create_parts(m, opts);
    if (err != PGD_OK) {
        kv_manager_destroy(m);
        return err;
    }
    *out = m;
    return PGD_OK;
}

void kv_manager_destroy(kv_manager *m)
{
    if (m == NULL)
        return;
    kv_coordinator_destroy(m->coordinator);
    block_pool_destroy(m->pool);
    for (int32_t g = 0; g < PGD_MAX_KV_GROUPS; g++)
        mem_free(m->hit.blocks[g]);
    mem_free(m->zero_list.ids);
    mem_free(m->zero_list.is_listed);
    mem_free(m->counts);
    mem_free(m->free_rows);
    mem_free(m->promised);
    mem_free(m->targets);
    mem_free(m->quiet);
    mem_free(m);
}

const kv_hit *kv_manager_lookup(kv_manager *m, const request *r)
{
    int32_t n_hashes = r->skip_prefix_lookup ? 0 : r->n_block_hashes;
    m->coordinator->ops->lookup(&m->hit, m->coordinator, r->block_hashes, n_hashes,
                                r->n_tokens - 1);
    PGD_ASSERTF(m->hit.n_tokens < r->n_tokens, "a hit of %d tokens leaves nothing of %d to compute",
                m->hit.n_tokens, r->n_tokens);
    return &m->hit;
}

int32_t kv_manager_lookup_group(const kv_hit **hit, kv_manager *m, const request *r, int32_t g)
{
    const kv_coordinator *c = m->coordinator;
    PGD_ASSERTF(g >= 0 && g < c->n_groups, "group %d of %d", g, c->n_groups);
    int64_t n_hashed = r->skip_prefix_lookup ? 0 : (int64_t)r->n_block_hashes * c->hash_block_size;
    int32_t n_known = (int32_t)PGD_MIN(n_hashed, (int64_t)r->n_tokens - 1);
    const kv_group_set set = {.n_groups = 1, .group_ids = {g}};
    *hit = &m->hit;
    if (!c->groups[g].is_cached)
        return 0;
    return kv_coordinator_search(&m->hit, c, &set, r->block_hashes, n_known, n_known,
                                 c->groups[g].spec.block_size);
}

/* Blocks that a prefill has still to take, for rows that are not done with it. */
static void update_promise(kv_manager *m, const request *r)
{
    int32_t row = r->kv_row;
    kv_need need = {.n_tokens = m->targets[row], .n_encoder_tokens = r->n_encoder_tokens};
    if (m->targets[row] == 0)
        return;
    int32_t n_left = kv_coordinator_n_at_most(m->coordinator, row, NULL, &need, NULL);
    m->n_promised += n_left - m->promised[row];
    m->promised[row] = n_left;
    if (kv_coordinator_n_needed(m->coordinator, row, NULL, &need) == 0)
        m->targets[row] = 0;
}

static void take_row(kv_manager *m, request *r)
{
    r->kv_row = m->free_rows[--m->n_free_rows];
    m->promised[r->kv_row] = 0;
    m->targets[r->kv_row] = 0;
    m->quiet[r->kv_row] = (kv_quiet){0};
}

static void give_row(kv_manager *m, request *r)
{
    m->n_promised -= m->promised[r->kv_row];
    m->promised[r->kv_row] = 0;
    m->free_rows[m->n_free_rows++] = r->kv_row;
    r->kv_row = -1;
}

static void bound_growth(kv_manager *m, const request *r)
{
    kv_quiet *quiet = &m->quiet[r->kv_row];
    quiet->max_need_tokens = INT32_MAX;
    quiet->publish_at = INT32_MAX;
    for (int32_t g = 0; g < m->coordinator->n_groups; g++)
        kv_group_manager_bound_growth(quiet, &m->coordinator->groups[g], r->kv_row);
    if (r->hash_block_size == 0)
        quiet->publish_at = INT32_MAX;
}

static void bound_skips(kv_manager *m, const request *r)
{
    kv_quiet *quiet = &m->quiet[r->kv_row];
    quiet->skip_at = INT32_MAX;
    for (int32_t g = 0; g < m->coordinator->n_groups; g++)
        kv_group_manager_bound_skips(quiet, &m->coordinator->groups[g], r->kv_row);
}

bool kv_manager_is_quiet(const kv_manager *m, const request *r, int32_t n_new_tokens,
                         int32_t n_lookahead_tokens)
{
    const kv_quiet *quiet = &m->quiet[r->kv_row];
    int32_t n_main = r->num_computed_tokens + n_new_tokens;
    return n_main + n_lookahead_tokens <= quiet->max_need_tokens &&
           PGD_MIN(n_main, r->n_tokens) < quiet->publish_at &&
           r->num_computed_tokens - r->n_in_flight_tokens < quiet->skip_at;
}

/* Tail of every group's table from n_before[g] on. */
static void fill_block_ids(block_ids_msg *out, const kv_manager *m, int32_t row,
                           const int32_t *n_before)
{
    for (int32_t g = 0; g < m->coordinator->n_groups; g++) {
        const kv_group_manager *group = &m->coordinator->groups[g];
        out->n_blocks[g] = kv_group_manager_get_row(group, row)->n_blocks - n_before[g];
        out->ids[g] = kv_group_manager_get_table(group, row) + n_before[g];
    }
}

static kv_need need_of_all(const kv_manager *m, const request *r, int32_t n_computed_tokens)
{
    return (kv_need){.n_computed_tokens = n_computed_tokens,
                     .n_tokens = PGD_MIN(r->n_tokens, m->max_model_len),
                     .n_encoder_tokens = r->n_encoder_tokens};
}

/* Blocks promised to others. */
static int32_t n_reserved(const kv_manager *m, const request *r)
{
    return m->n_promised - (r->kv_row >= 0 ? m->promised[r->kv_row] : 0);
}

static bool passes_gate(const kv_manager *m, const request *r, const kv_alloc *a,
                        int32_t n_computed)
{
    kv_need need = need_of_all(m, r, n_computed);
    /* Its hits do not count as its own, since others may keep them: who alone holds blocks may have
     * all of them. */
    if (r->kv_row >= 0 && m->n_free_rows == m->max_holders - 1)
        return true;
    int32_t n_needed = kv_coordinator_n_at_most(m->coordinator, r->kv_row, a->hit, &need, NULL);
    return (int64_t)n_needed + a->n_spare_blocks + n_reserved(m, r) <= block_pool_n_free(m->pool);
}

/* Blocks that a load fills are not zeroed: it may write them at any time from the step's beginning
 * on. Some may be listed because others had them while this step was put together. */
static void unlist_for_zeroing(kv_manager *m, int32_t row, const int32_t *n_before)
{
    kv_zero_list *list = &m->zero_list;
    for (int32_t g = 0; g < m->coordinator->n_groups; g++) {
        const kv_group_manager *group = &m->coordinator->groups[g];
        const block_id *table = kv_group_manager_get_table(group, row);
        int32_t n_blocks = kv_group_manager_get_row(group, row)->n_blocks;
        for (int32_t i = n_before[g]; i < n_blocks && !group->spec.ops->is_of_encoder; i++) {
            if (!list->is_listed[table[i]])
                continue;
            int32_t k = 0;
            while (list->ids[k] != table[i])
                k++;
            list->ids[k] = list->ids[--list->n_ids];
            list->is_listed[table[i]] = 0;
        }
    }
}

bool kv_manager_allocate(block_ids_msg *new_blocks, kv_manager *m, request *r, const kv_alloc *a)
{
    kv_coordinator *c = m->coordinator;
    bool is_holder = r->kv_row >= 0;
    bool is_load = a->n_external_tokens > 0;
    PGD_ASSERTF(is_load ? a->n_new_tokens == 0 : a->n_new_tokens > 0,
                "request %llu asks for slots for %d tokens, %d external", (unsigned long long)r->id,
                a->n_new_tokens, a->n_external_tokens);
    PGD_ASSERTF(!(is_holder && a->hit != NULL), "request %llu holds blocks and brings a hit",
                (unsigned long long)r->id);
    int32_t n_hit = a->hit != NULL ? a->hit->n_tokens : 0;
    int32_t n_computed =
        PGD_MIN(r->num_computed_tokens + n_hit + a->n_external_tokens, m->max_model_len);
    int32_t n_main = n_computed + a->n_new_tokens;
    kv_need need = {.n_computed_tokens = n_computed,
                    .n_tokens = PGD_MIN(n_main + a->n_lookahead_tokens, m->max_model_len),
                    .n_encoder_tokens = r->n_encoder_tokens};

    if (a->must_fit_whole && !passes_gate(m, r, a, n_computed))
        return false;
    if (is_holder) {
        int32_t n_done = PGD_MAX(n_computed - a->n_in_flight_tokens, 0);
        if (n_done >= m->quiet[r->kv_row].skip_at) {
            kv_coordinator_remove_skipped(c, r->kv_row, n_done);
            bound_skips(m, r);
        }
    }
    int32_t n_needed = 0;
    if (!is_holder || need.n_tokens > m->quiet[r->kv_row].max_need_tokens)
        n_needed = kv_coordinator_n_needed(c, r->kv_row, a->hit, &need);
    int64_t n_kept = (int64_t)a->n_spare_blocks + (is_load ? n_reserved(m, r) : 0);
    if (n_needed + n_kept > block_pool_n_free(m->pool) || (!is_holder && m->n_free_rows == 0)) {
        if (is_holder)
            update_promise(m, r);
        return false;
    }

    if (!is_holder) {
        take_row(m, r);
        kv_coordinator_attach(c, r->kv_row, a->hit, n_computed);
        bound_skips(m, r);
    }
    int32_t n_before[PGD_MAX_KV_GROUPS];
    for (int32_t g = 0; g < c->n_groups; g++)
        n_before[g] = kv_group_manager_get_row(&c->groups[g], r->kv_row)->n_blocks;
    if (a->is_admission)
        m->targets[r->kv_row] = PGD_MIN(r->n_tokens, m->max_model_len);
    if (n_needed > 0)
        kv_coordinator_allocate(c, r->kv_row, &need);
    update_promise(m, r);
    if (!is_holder || n_needed > 0)
        bound_growth(m, r);
    if (is_load)
        unlist_for_zeroing(m, r->kv_row, n_before);
    else
        kv_manager_publish(m, r, PGD_MIN(n_main, r->n_tokens));
    if (new_blocks != NULL)
        fill_block_ids(new_blocks, m, r->kv_row, n_before);
    return true;
}

void kv_manager_get_table(block_ids_msg *out, const kv_manager *m, const request *r)
{
    static const int32_t n_none[PGD_MAX_KV_GROUPS] = {0};
    PGD_ASSERTF(r->kv_row >= 0, "request %llu holds no blocks", (unsigned long long)r->id);
    fill_block_ids(out, m, r->kv_row, n_none);
}

void kv_manager_publish(kv_manager *m, const request *r, int32_t n_tokens)
{
    if (n_tokens < m->quiet[r->kv_row].publish_at)
        return;
    kv_content content = {.hashes = r->block_hashes,
                          .n_hashes = r->n_block_hashes,
                          .tokens = r->tokens,
                          .extra_bytes = r->salt_extra_bytes,
                          .extra = r->salt_extra};
    kv_coordinator_publish(m->coordinator, r->kv_row, &content, n_tokens);
    bound_growth(m, r);
}

void kv_manager_prefetch(const kv_manager *m, const request *r, int32_t stage)
{
    int32_t n_done = r->num_computed_tokens - r->n_in_flight_tokens;
    if (stage == 0)
        PGD_PREFETCH(&r->block_hashes);
    else if (stage == 1 && r->n_block_hashes > 0)
        PGD_PREFETCH(&r->block_hashes[r->n_block_hashes - 1]);
    for (int32_t i = 0; i < m->coordinator->n_groups; i++) {
        const kv_group_manager *g = &m->coordinator->groups[i];
        if (stage == 0)
            kv_group_manager_prefetch_row(g, r->kv_row, r->n_tokens, n_done);
        else if (stage == 1)
            kv_group_manager_prefetch_blocks(g, r->kv_row, n_done >= m->quiet[r->kv_row].skip_at);
        else
            kv_group_manager_prefetch_key(g, r->kv_row, r->block_hashes, r->n_block_hashes,
                                          stage == 3);
    }
}

void kv_manager_free(kv_manager *m, request *r, int32_t n_valid_tokens)
{
    if (r->kv_row < 0)
        return;
    kv_coordinator_unpublish(m->coordinator, r->kv_row, n_valid_tokens);
    kv_coordinator_free(m->coordinator, r->kv_row);
    give_row(m, r);
}

void kv_manager_forget(kv_manager *m, const request *r)
{
    for (int32_t i = 0; i < m->coordinator->n_groups; i++) {
        const kv_group_manager *g = &m->coordinator->groups[i];
        if (!g->is_cached)
            continue;
        for (int32_t k = g->hashes_per_block - 1; k < r->n_block_hashes; k += g->hashes_per_block) {
            block_id id;
            while ((id = block_pool_lookup(m->pool, &r->block_hashes[k], i)) >= 0)
                block_pool_unpublish(m->pool, &id, 1);
        }
    }
}

int32_t kv_manager_take_blocks_to_zero(const block_id **ids, kv_manager *m)
{
    int32_t n_ids = m->zero_list.n_ids;
    *ids = m->zero_list.ids;
    for (int32_t i = 0; i < n_ids; i++)
        m->zero_list.is_listed[m->zero_list.ids[i]] = 0;
    m->zero_list.n_ids = 0;
    return n_ids;
}

void kv_manager_common_prefix(int32_t *out, const kv_manager *m)
{
    kv_coordinator_common_prefix(out, m->coordinator);
}

int32_t kv_manager_n_blocks_for(const kv_manager *m, int32_t n_tokens, int32_t n_encoder_tokens)
{
    kv_need need = {.n_tokens = PGD_MIN(n_tokens, m->max_model_len),
                    .n_encoder_tokens = n_encoder_tokens};
    return kv_coordinator_n_at_most(m->coordinator, -1, NULL, &need, NULL);
}

int32_t kv_manager_max_encoder_tokens(const kv_manager *m)
{
    int32_t max_tokens = 0;
    for (int32_t i = 0; i < m->coordinator->n_groups; i++) {
        const kv_group_manager *g = &m->coordinator->groups[i];
        int32_t n = g->spec.window > 0 ? g->spec.window : m->max_model_len;
        if (g->spec.ops->is_of_encoder)
            max_tokens = max_tokens > 0 ? PGD_MIN(max_tokens, n) : n;
    }
    return max_tokens;
}

/* Adds (sign 1) or takes back (sign -1) the victim's references in counts; returns how many blocks
 * reach their full count. */
static int32_t count_references(kv_manager *m, const request *r, int32_t sign)
{
    int32_t n_full = 0;
    for (int32_t g = 0; g < m->coordinator->n_groups; g++) {
        const kv_group_manager *group = &m->coordinator->groups[g];
        const block_id *table = kv_group_manager_get_table(group, r->kv_row);
        for (int32_t i = 0; i < kv_group_manager_get_row(group, r->kv_row)->n_blocks; i++) {
            if (table[i] == BLOCK_POOL_NULL)
                continue;
            m->counts[table[i]] += sign;
            n_full += m->counts[table[i]] == block_pool_ref_count(m->pool, table[i]);
        }
    }
    return n_full;
}

static int64_t n_held(const kv_manager *m, const request *r)
{
    int64_t n = 0;
    for (int32_t g = 0; g < m->coordinator->n_groups; g++)
        n += kv_group_manager_get_row(&m->coordinator->groups[g], r->kv_row)->n_blocks -
             kv_group_manager_get_row(&m->coordinator->groups[g], r->kv_row)->n_skipped;
    return n;
}

bool kv_manager_would_fit(kv_manager *m, const request *r, const kv_hit *hit,
                          request *const *victims, int32_t n_victims, int32_t n_spare_blocks)
{
    kv_need need = need_of_all(m, r, hit->n_tokens);
    int64_t n_free = block_pool_n_free(m->pool) - m->n_promised;
    int64_t n_most = n_free; /* if they shared no block with anybody */
    for (int32_t i = 0; i < n_victims; i++)
        n_most += n_held(m, victims[i]) + m->promised[victims[i]->kv_row];
    int64_t n_least = kv_coordinator_n_at_most(m->coordinator, -1, hit, &need, NULL);
    if (n_least + n_spare_blocks > n_most)
        return false;
    for (int32_t i = 0; i < n_victims; i++)
        n_free += count_references(m, victims[i], 1) + m->promised[victims[i]->kv_row];
    int32_t n_needed = kv_coordinator_n_at_most(m->coordinator, -1, hit, &need, m->counts);
    for (int32_t i = 0; i < n_victims; i++)
        count_references(m, victims[i], -1);
    return (int64_t)n_needed + n_spare_blocks <= n_free;
}

int32_t kv_manager_n_promised(const kv_manager *m)
{
    return m->n_promised;
}

const block_pool *kv_manager_get_pool(const kv_manager *m)
{
    return m->pool;
}

void kv_manager_pump_events(kv_manager *m)
{
    if (m->events != NULL)
        kv_events_pump(m->events, m->pool);
}

void kv_manager_forget_cache(kv_manager *m)
{
    block_pool_forget_cache(m->pool);
}

bool kv_manager_reset_cache(kv_manager *m)
{
    if (block_pool_n_free(m->pool) != block_pool_n_blocks(m->pool) - 1)
        return false;
    block_pool_forget_cache(m->pool);
    return true;
}

void kv_manager_check(kv_manager *m)
{
    block_pool_check(m->pool);
    int32_t n_blocks = block_pool_n_blocks(m->pool);
    int32_t n_promised = 0;
    for (int32_t g = 0; g < m->coordinator->n_groups; g++) {
        const kv_group_manager *group = &m->coordinator->groups[g];
        int32_t n_holders = 0;
        kv_group_manager_check(group);
        for (int32_t row = 0; row < group->n_rows; row++) {
            n_holders += kv_group_manager_get_row(group, row)->is_holder;
            const block_id *table = kv_group_manager_get_table(group, row);
            for (int32_t i = 0; i < kv_group_manager_get_row(group, row)->n_blocks; i++)
                m->counts[table[i]]++;
        }
        PGD_ASSERTF(n_holders == group->n_holders && n_holders == m->max_holders - m->n_free_rows,
                    "group %d: %d rows hold blocks, %d counted, %d rows taken", g, n_holders,
                    group->n_holders, m->max_holders - m->n_free_rows);
    }
    for (int32_t row = 0; row < m->max_holders; row++)
        n_promised += m->promised[row];
    PGD_ASSERTF(n_promised == m->n_promised, "%d blocks promised, %d counted", n_promised,
                m->n_promised);
    for (block_id id = 1; id < n_blocks; id++)
        PGD_ASSERTF(m->counts[id] == block_pool_ref_count(m->pool, id),
                    "block %d is in %d tables and has %d references", id, m->counts[id],
                    block_pool_ref_count(m->pool, id));
    memset(m->counts, 0, (size_t)n_blocks * sizeof *m->counts);
}
