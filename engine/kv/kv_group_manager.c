/* Tables are one flat array, so the engine's message can point straight into a row: the ids of a
 * new request are its whole row, those of a running one the tail that the step appended.
 *
 * A row's table:   [ null ... null | hits, published | not yet published ]
 *                    < n_skipped     < n_cached        < n_blocks
 */
#include "engine/kv/kv_group_manager.h"

#include <string.h>

#include "common/mem.h"

static pgd_err check_opts(const kv_group_opts *o)
{
    const kv_group_spec *spec = &o->spec;
    if (spec->ops == NULL || spec->block_size < 1 || o->n_rows < 1 || o->rows == NULL ||
        o->max_model_len < 1 || o->max_unfinished_tokens < 0)
        return PGD_EINVAL;
    if (spec->window < (spec->ops->skipped_tokens != NULL ? 1 : 0))
        return PGD_EINVAL;
    if (!o->is_cached)
        return PGD_OK;
    if (spec->ops->lookup == NULL || o->hash_block_size < 1 || o->alignment_tokens < 1 ||
        spec->block_size % o->hash_block_size != 0 || o->alignment_tokens % spec->block_size != 0 ||
        o->n_drop < 0 || o->n_drop > 1)
        return PGD_EINVAL;
    return PGD_OK;
}

pgd_err kv_group_manager_init(kv_group_manager *g, const kv_group_opts *opts)
{
    *g = (kv_group_manager){
        .spec = opts->spec,
        .group_id = opts->group_id,
        .pool = opts->pool,
        .zero_list = opts->zero_list,
        .events = opts->events,
        .is_cached = opts->is_cached,
        .n_drop = opts->n_drop,
        .n_rows = opts->n_rows,
        .rows = opts->rows,
        .row_bytes = opts->row_bytes,
    };
    PGD_TRY(check_opts(opts));
    const kv_group_spec *spec = &opts->spec;
    if (opts->is_cached) {
        g->hashes_per_block = spec->block_size / opts->hash_block_size;
        g->alignment_blocks = opts->alignment_tokens / spec->block_size;
    }
    int32_t max_tokens =
        spec->ops->is_of_encoder && spec->window > 0 ? spec->window : opts->max_model_len;
    g->max_blocks_per_row = (int32_t)PGD_CEIL_DIV((int64_t)max_tokens, spec->block_size);
    g->max_held_blocks = g->max_blocks_per_row;
    if (spec->ops->max_held_blocks != NULL)
        g->max_held_blocks = PGD_MIN(
            spec->ops->max_held_blocks(spec, opts->max_unfinished_tokens, opts->max_model_len),
            g->max_blocks_per_row);
    size_t n_entries;
    if (!mem_mul(&n_entries, (size_t)g->n_rows, (size_t)g->max_blocks_per_row) ||
        !mem_mul(&g->tables_bytes, n_entries, sizeof *g->tables))
        return PGD_ENOMEM;
    g->tables = mem_alloc_aligned(g->tables_bytes, 64);
    g->scratch = mem_calloc((size_t)g->max_blocks_per_row, sizeof *g->scratch);
    pgd_err err = g->tables == NULL || g->scratch == NULL ? PGD_ENOMEM : PGD_OK;
    g->has_shared_prefix = g->is_cached && spec->ops->skipped_tokens == NULL;
    if (err == PGD_OK && g->has_shared_prefix)
        err = kv_shared_prefix_init(&g->shared_prefix, g->n_rows, g->max_blocks_per_row);
    if (err != PGD_OK)
        kv_group_manager_deinit(g);
    return err;
}

void kv_group_manager_deinit(kv_group_manager *g)
{
    mem_free_aligned(g->tables, g->tables_bytes);
    mem_free(g->scratch);
    kv_shared_prefix_deinit(&g->shared_prefix);
    g->tables = NULL;
    g->scratch = NULL;
}

static int32_t n_skipped_blocks(const kv_group_manager *g, int32_t n_computed_tokens)
{
    return kv_group_ops_skipped_blocks(&g->spec, n_computed_tokens);
}

int32_t kv_group_manager_n_fresh(const kv_group_manager *g, int32_t row, int32_t n_hits,
                                 int32_t n_computed_tokens, int32_t n_need_tokens)
{
    int32_t n_need = PGD_CEIL_DIV(n_need_tokens, g->spec.block_size);
    int32_t n_have = row >= 0 ? kv_group_manager_get_row(g, row)->n_blocks
                              : PGD_MAX(n_skipped_blocks(g, n_computed_tokens), n_hits);
    return PGD_MAX(n_need - n_have, 0);
}

int32_t kv_group_manager_n_free_hits(const kv_group_manager *g, const block_id *hits,
                                     int32_t n_hits, int32_t n_computed_tokens,
                                     const int32_t *n_given)
{
    int32_t n_free = 0;
    for (int32_t i = n_skipped_blocks(g, n_computed_tokens); i < n_hits; i++) {
        int32_t n_other = n_given != NULL ? n_given[hits[i]] : 0;
        n_free += hits[i] != BLOCK_POOL_NULL && block_pool_ref_count(g->pool, hits[i]) == n_other;
    }
    return n_free;
}

int32_t kv_group_manager_n_allowed(const kv_group_manager *g, int32_t row)
{
    if (row < 0)
        return g->max_held_blocks;
    const kv_group_row *r = kv_group_manager_get_row(g, row);
    return PGD_MAX(g->max_held_blocks - (r->n_blocks - PGD_MAX(r->n_skipped, r->n_hits)), 0);
}

void kv_group_manager_attach(kv_group_manager *g, int32_t row, const block_id *hits, int32_t n_hits,
                             int32_t n_computed_tokens)
{
    kv_group_row *r = kv_group_manager_get_row(g, row);
    PGD_ASSERTF(!r->is_holder && r->n_blocks == 0, "row %d of group %d already holds %d blocks",
                row, g->group_id, r->n_blocks);
    int32_t n_skipped = n_skipped_blocks(g, n_computed_tokens);
    int32_t n_blocks = PGD_MAX(n_skipped, n_hits);
    PGD_ASSERTF(n_blocks <= g->max_blocks_per_row, "%d hit blocks, room for %d", n_blocks,
                g->max_blocks_per_row);
    block_id *table = kv_group_manager_get_table(g, row);
    for (int32_t i = 0; i < n_blocks; i++)
        table[i] = i < n_skipped ? BLOCK_POOL_NULL : hits[i];
    block_pool_touch(g->pool, table, n_blocks);
    r->n_blocks = n_blocks;
    r->n_skipped = n_skipped;
    r->n_hits = n_blocks;
    r->n_cached = n_blocks;
    r->is_holder = true;
    g->n_holders++;
    if (g->has_shared_prefix)
        kv_shared_prefix_join(&g->shared_prefix, g, row);
}

static void list_for_zeroing(kv_zero_list *list, const block_id *ids, int32_t n_ids)
{
    for (int32_t i = 0; i < n_ids; i++) {
        if (list->is_listed[ids[i]])
            continue;
        list->is_listed[ids[i]] = 1;
        list->ids[list->n_ids++] = ids[i];
    }
}

void kv_group_manager_allocate(kv_group_manager *g, int32_t row, int32_t n_need_tokens)
{
    kv_group_row *r = kv_group_manager_get_row(g, row);
    int32_t n_new = kv_group_manager_n_fresh(g, row, 0, 0, n_need_tokens);
    if (n_new == 0)
        return;
    PGD_ASSERTF(r->is_holder && r->n_blocks + n_new <= g->max_blocks_per_row,
                "row %d of group %d: %d blocks and %d new, room for %d", row, g->group_id,
                r->n_blocks, n_new, g->max_blocks_per_row);
    block_id *new_ids = kv_group_manager_get_table(g, row) + r->n_blocks;
    bool was_given = block_pool_get_new(new_ids, g->pool, n_new);
    PGD_ASSERTF(was_given, "%d blocks were counted on, %d are free", n_new,
                block_pool_n_free(g->pool));
    r->n_blocks += n_new;
    if (g->spec.zero_new_blocks)
        list_for_zeroing(g->zero_list, new_ids, n_new);
}

/* Leading blocks that may be published when n_tokens tokens are known: whole stretches of the
 * alignment, and the block behind them that a dropping search looks at (CO6). */
static int32_t n_publishable(const kv_group_manager *g, int32_t n_hashes, int32_t n_tokens)
{
    int32_t n_full = PGD_MIN(n_tokens / g->spec.block_size, n_hashes / g->hashes_per_block);
    if (g->alignment_blocks == 1)
        return n_full;
    return PGD_MIN(n_full - n_full % g->alignment_blocks + g->n_drop, n_full);
}

/* Whether a hit can need block idx: the shortest one that reaches it must not skip it. */
static bool can_be_hit(const kv_group_manager *g, int32_t idx)
{
    if (g->alignment_blocks == 1 || g->spec.ops->skipped_tokens == NULL)
        return true;
    int32_t n_stretches = PGD_CEIL_DIV(idx + 1 - g->n_drop, g->alignment_blocks);
    int32_t n_hit_blocks = PGD_MAX(n_stretches, 1) * g->alignment_blocks;
    return n_skipped_blocks(g, n_hit_blocks * g->spec.block_size) <= idx;
}

/* Tells that blocks [first, end) are the first copies of their hashes. */
static void tell_stored(const kv_group_manager *g, const kv_content *content, int32_t first,
                        int32_t end)
{
    kv_stored stored = {.group_id = g->group_id,
                        .first = first,
                        .end = end,
                        .hashes = content->hashes,
                        .hashes_per_block = g->hashes_per_block,
                        .tokens = content->tokens,
                        .extra_bytes = content->extra_bytes,
                        .extra = content->extra};
    if (first < end)
        kv_events_stored(g->events, &stored);
}

static bool is_news(const kv_group_manager *g, const block_hash *hash)
{
    return kv_events_is_in_snapshot(g->events) || block_pool_lookup(g->pool, hash, g->group_id) < 0;
}

void kv_group_manager_publish(kv_group_manager *g, int32_t row, const kv_content *content,
                              int32_t n_tokens)
{
    kv_group_row *r = kv_group_manager_get_row(g, row);
    if (!g->is_cached)
        return;
    int32_t n_full = n_publishable(g, content->n_hashes, n_tokens);
    if (n_full <= r->n_cached)
        return;
    PGD_ASSERTF(n_full <= r->n_blocks, "row %d of group %d: %d full blocks of %d", row, g->group_id,
                n_full, r->n_blocks);
    const block_id *table = kv_group_manager_get_table(g, row);
    int32_t first_new = n_full;
    for (int32_t i = PGD_MAX(r->n_cached, r->n_skipped); i < n_full; i++) {
        const block_hash *hash =
            &content->hashes[(size_t)(i + 1) * (size_t)g->hashes_per_block - 1];
        bool is_used = can_be_hit(g, i);
        bool is_new = is_used && g->events != NULL && is_news(g, hash);
        if (is_used)
            block_pool_publish(g->pool, table[i], hash, g->group_id);
        if (is_new) {
            first_new = PGD_MIN(first_new, i);
        } else if (first_new < i) {
            tell_stored(g, content, first_new, i);
            first_new = n_full;
        }
    }
    tell_stored(g, content, first_new, n_full);
    r->n_cached = n_full;
}

void kv_group_manager_unpublish(kv_group_manager *g, int32_t row, int32_t first_idx)
{
    kv_group_row *r = kv_group_manager_get_row(g, row);
    if (first_idx >= r->n_cached)
        return;
    block_pool_unpublish(g->pool, kv_group_manager_get_table(g, row) + first_idx,
                         r->n_cached - first_idx);
    r->n_cached = first_idx;
}

void kv_group_manager_remove_skipped(kv_group_manager *g, int32_t row, int32_t n_computed_tokens)
{
    kv_group_row *r = kv_group_manager_get_row(g, row);
    int32_t n_skipped = PGD_MIN(n_skipped_blocks(g, n_computed_tokens), r->n_blocks);
    if (n_skipped <= r->n_skipped)
        return;
    block_id *table = kv_group_manager_get_table(g, row);
    int32_t n_removed = 0;
    for (int32_t i = n_skipped - 1; i >= r->n_skipped; i--) {
        g->scratch[n_removed++] = table[i];
        table[i] = BLOCK_POOL_NULL;
    }
    r->n_skipped = n_skipped;
    block_pool_free(g->pool, g->scratch, n_removed);
}

int32_t kv_group_manager_common_prefix(const kv_group_manager *g)
{
    return g->has_shared_prefix ? kv_shared_prefix_get(&g->shared_prefix, g) : 0;
}

void kv_group_manager_check(const kv_group_manager *g)
{
    int32_t n_common = 0;
    for (int32_t row = 0; row < g->n_rows; row++) {
        const kv_group_row *r = kv_group_manager_get_row(g, row);
        const block_id *table = kv_group_manager_get_table(g, row);
        for (int32_t i = 0; i < r->n_blocks; i++)
            PGD_ASSERTF((table[i] == BLOCK_POOL_NULL) == (i < r->n_skipped),
                        "row %d of group %d: block %d at %d, %d skipped", row, g->group_id,
                        table[i], i, r->n_skipped);
        n_common = 0;
        while (r->is_holder && g->has_shared_prefix && n_common < r->n_blocks &&
               block_pool_ref_count(g->pool, table[n_common]) == g->n_holders)
            n_common++;
        PGD_ASSERTF(!r->is_holder || n_common == kv_group_manager_common_prefix(g),
                    "row %d of group %d shares %d blocks with all, %d were kept", row, g->group_id,
                    n_common, kv_group_manager_common_prefix(g));
    }
}

void kv_group_manager_prefetch_row(const kv_group_manager *g, int32_t row, int32_t n_tokens,
                                   int32_t n_computed_tokens)
{
    const block_id *table = kv_group_manager_get_table(g, row);
    PGD_PREFETCH(kv_group_manager_get_row(g, row));
    PGD_PREFETCH(table + n_tokens / g->spec.block_size);
    if (g->spec.ops->skipped_tokens != NULL)
        PGD_PREFETCH(table + PGD_MAX(n_skipped_blocks(g, n_computed_tokens) - 1, 0));
}

void kv_group_manager_prefetch_blocks(const kv_group_manager *g, int32_t row, bool is_skipping)
{
    const kv_group_row *r = kv_group_manager_get_row(g, row);
    const block_id *table = kv_group_manager_get_table(g, row);
    if (g->is_cached && r->n_cached < r->n_blocks)
        block_pool_prefetch(g->pool, table[r->n_cached]);
    if (is_skipping && g->spec.ops->skipped_tokens != NULL && r->n_skipped < r->n_blocks)
        block_pool_prefetch(g->pool, table[r->n_skipped]);
}

void kv_group_manager_prefetch_key(const kv_group_manager *g, int32_t row, const block_hash *hashes,
                                   int32_t n_hashes, bool has_arrived)
{
    const kv_group_row *r = kv_group_manager_get_row(g, row);
    int64_t hash_idx = (int64_t)(r->n_cached + 1) * g->hashes_per_block - 1;
    if (!g->is_cached || r->n_cached >= r->n_blocks || hash_idx >= n_hashes)
        return;
    if (has_arrived)
        block_pool_prefetch_found(g->pool, &hashes[hash_idx], g->group_id);
    else
        block_pool_prefetch_key(g->pool, &hashes[hash_idx], g->group_id);
}

/* Least number of full blocks with which something behind the first n_cached can be published. */
static int32_t next_publishable(const kv_group_manager *g, int32_t n_cached)
{
    if (g->alignment_blocks == 1)
        return n_cached + 1;
    int32_t n_over = n_cached % g->alignment_blocks;
    return n_over < g->n_drop ? n_cached + 1 : n_cached - n_over + g->alignment_blocks;
}

void kv_group_manager_bound_growth(kv_quiet *quiet, const kv_group_manager *g, int32_t row)
{
    const kv_group_row *r = kv_group_manager_get_row(g, row);
    int32_t bs = g->spec.block_size;
    if (!g->spec.ops->is_of_encoder) /* its blocks are all there from the start */
        quiet->max_need_tokens = PGD_MIN(quiet->max_need_tokens, r->n_blocks * bs);
    if (g->is_cached)
        quiet->publish_at = PGD_MIN(quiet->publish_at, next_publishable(g, r->n_cached) * bs);
}

void kv_group_manager_bound_skips(kv_quiet *quiet, const kv_group_manager *g, int32_t row)
{
    const kv_group_row *r = kv_group_manager_get_row(g, row);
    if (g->spec.ops->skipped_tokens == NULL)
        return;
    int64_t at = g->spec.ops->tokens_to_skip(&g->spec, (r->n_skipped + 1) * g->spec.block_size);
    quiet->skip_at = (int32_t)PGD_MIN((int64_t)quiet->skip_at, at);
}

void kv_group_manager_free(kv_group_manager *g, int32_t row)
{
    kv_group_row *r = kv_group_manager_get_row(g, row);
    PGD_ASSERTF(r->is_holder, "row %d of group %d holds no blocks", row, g->group_id);
    const block_id *table = kv_group_manager_get_table(g, row);
    int32_t n_held = r->n_blocks - r->n_skipped;
    for (int32_t i = 0; i < n_held; i++)
        g->scratch[i] = table[r->n_blocks - 1 - i];
    block_pool_free(g->pool, g->scratch, n_held);
    if (g->has_shared_prefix)
        kv_shared_prefix_leave(&g->shared_prefix, g, row);
    *r = (kv_group_row){0};
    g->n_holders--;
}
