/* The loops over groups that every kind shares. A kind differs only in what it looks up, publishes
 * and reports as common. */
#include "engine/kv/kv_coordinator.h"

#include "common/mem.h"
#include "engine/kv/kv_no_prefix_cache.h"
#include "engine/kv/kv_unitary.h"

static pgd_err choose_ops(const kv_coordinator_ops **out, const kv_coordinator_opts *opts)
{
    if (!opts->enable_caching) {
        *out = kv_no_prefix_cache_get_ops();
        return PGD_OK;
    }
    if (opts->n_groups > 1)
        return PGD_EUNSUPPORTED;
    if (opts->hash_block_size != opts->groups[0].block_size)
        return PGD_EINVAL;
    *out = kv_unitary_get_ops();
    return PGD_OK;
}

pgd_err kv_coordinator_create(kv_coordinator **out, const kv_coordinator_opts *opts)
{
    *out = NULL;
    if (opts->n_groups < 1 || opts->n_groups > PGD_MAX_KV_GROUPS)
        return PGD_EINVAL;
    const kv_coordinator_ops *ops;
    PGD_TRY(choose_ops(&ops, opts));
    kv_coordinator *c = mem_calloc(1, sizeof *c);
    if (c == NULL)
        return PGD_ENOMEM;
    c->ops = ops;
    c->pool = opts->pool;
    for (int32_t g = 0; g < opts->n_groups; g++) {
        kv_group_opts group_opts = {
            .spec = opts->groups[g],
            .group_id = g,
            .pool = opts->pool,
            .zero_list = opts->zero_list,
            .n_rows = opts->n_rows,
            .max_model_len = opts->max_model_len,
            .max_batched_tokens = opts->max_batched_tokens,
        };
        pgd_err err = kv_group_manager_init(&c->groups[g], &group_opts);
        if (err != PGD_OK) {
            kv_coordinator_destroy(c);
            return err;
        }
        c->n_groups++;
    }
    *out = c;
    return PGD_OK;
}

void kv_coordinator_destroy(kv_coordinator *c)
{
    if (c == NULL)
        return;
    for (int32_t g = 0; g < c->n_groups; g++)
        kv_group_manager_deinit(&c->groups[g]);
    mem_free(c);
}

int32_t kv_coordinator_n_needed(const kv_coordinator *c, int32_t row, const kv_hit *hit,
                                int32_t n_computed_tokens, int32_t n_need_tokens, bool is_gate)
{
    int32_t n_needed = 0;
    for (int32_t i = 0; i < c->n_groups; i++) {
        const kv_group_manager *g = &c->groups[i];
        int32_t n_hits = hit != NULL ? hit->n_blocks[i] : 0;
        int32_t n_fresh =
            kv_group_manager_n_fresh(g, row, n_hits, n_computed_tokens, n_need_tokens);
        if (is_gate)
            n_fresh = PGD_MIN(n_fresh, g->spec.ops->max_held_blocks(g));
        n_needed += n_fresh;
        if (n_hits > 0)
            n_needed += kv_group_manager_n_free_hits(g, hit->blocks[i], n_hits, n_computed_tokens);
    }
    return n_needed;
}

void kv_coordinator_attach(kv_coordinator *c, int32_t row, const kv_hit *hit,
                           int32_t n_computed_tokens)
{
    for (int32_t g = 0; g < c->n_groups; g++)
        kv_group_manager_attach(&c->groups[g], row, hit != NULL ? hit->blocks[g] : NULL,
                                hit != NULL ? hit->n_blocks[g] : 0, n_computed_tokens);
}

void kv_coordinator_allocate(kv_coordinator *c, int32_t row, int32_t n_need_tokens)
{
    for (int32_t g = 0; g < c->n_groups; g++)
        kv_group_manager_allocate(&c->groups[g], row, n_need_tokens);
}

void kv_coordinator_remove_skipped(kv_coordinator *c, int32_t row, int32_t n_computed_tokens)
{
    for (int32_t g = 0; g < c->n_groups; g++)
        kv_group_manager_remove_skipped(&c->groups[g], row, n_computed_tokens);
}

void kv_coordinator_unpublish(kv_coordinator *c, int32_t row, int32_t n_tokens)
{
    for (int32_t g = 0; g < c->n_groups; g++)
        kv_group_manager_unpublish(&c->groups[g], row, n_tokens / c->groups[g].spec.block_size);
}

void kv_coordinator_free(kv_coordinator *c, int32_t row)
{
    for (int32_t g = 0; g < c->n_groups; g++)
        kv_group_manager_free(&c->groups[g], row);
}
