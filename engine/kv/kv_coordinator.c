/* The loops over groups that every kind shares, and the sets that lookups go by. A kind differs
 * only in how it looks up. */
#include "engine/kv/kv_coordinator.h"

#include "common/mem.h"
#include "engine/kv/kv_hybrid.h"
#include "engine/kv/kv_no_prefix_cache.h"
#include "engine/kv/kv_unitary.h"

static bool is_cacheable(const kv_coordinator_opts *opts, int32_t g)
{
    return opts->enable_caching && opts->groups[g].ops->lookup != NULL;
}

/* Least common multiple; 0 when it is beyond any sensible length. */
static int32_t lcm(int32_t a, int32_t b)
{
    int64_t x = a;
    for (int64_t y = b; y != 0;) {
        int64_t rest = x % y;
        x = y;
        y = rest;
    }
    int64_t product = a / x * b;
    return product < (1 << 30) ? (int32_t)product : 0;
}

/* The granularity of hits, 1 when nothing is cached. */
static pgd_err find_alignment(int32_t *out, const kv_coordinator_opts *opts)
{
    *out = 1;
    for (int32_t g = 0; g < opts->n_groups; g++) {
        if (opts->groups[g].ops == NULL || opts->groups[g].block_size < 1)
            return PGD_EINVAL;
        if (is_cacheable(opts, g))
            *out = lcm(*out, opts->groups[g].block_size);
        if (*out == 0)
            return PGD_EINVAL;
    }
    return PGD_OK;
}

static bool is_equal_spec(const kv_group_manager *a, const kv_group_manager *b)
{
    return a->spec.ops == b->spec.ops && a->spec.block_size == b->spec.block_size &&
           a->spec.window == b->spec.window && a->n_drop == b->n_drop;
}

static void add_to_set(kv_coordinator *c, int32_t group_id)
{
    kv_group_set *set = NULL;
    for (int32_t s = 0; s < c->n_sets && set == NULL; s++) {
        if (is_equal_spec(&c->groups[c->sets[s].group_ids[0]], &c->groups[group_id]))
            set = &c->sets[s];
    }
    if (set == NULL)
        set = &c->sets[c->n_sets++];
    set->group_ids[set->n_groups++] = group_id;
}

/* Sets of groups that skip nothing come first: what they leave bounds the dearer searches. */
static void make_sets(kv_coordinator *c)
{
    for (int is_skipping = 0; is_skipping <= 1; is_skipping++) {
        for (int32_t g = 0; g < c->n_groups; g++) {
            if (c->groups[g].is_cached &&
                (c->groups[g].spec.ops->skipped_tokens != NULL) == is_skipping)
                add_to_set(c, g);
        }
        if (!is_skipping)
            c->n_closed_sets = c->n_sets;
    }
}

static pgd_err choose_ops(kv_coordinator *c, const kv_coordinator_opts *opts)
{
    if (c->n_sets == 0)
        c->ops = kv_no_prefix_cache_get_ops();
    else if (opts->n_groups > 1)
        c->ops = kv_hybrid_get_ops();
    else if (opts->hash_block_size == opts->groups[0].block_size)
        c->ops = kv_unitary_get_ops();
    else
        return PGD_EINVAL;
    return PGD_OK;
}

static pgd_err create_parts(kv_coordinator *c, const kv_coordinator_opts *opts)
{
    /* Whole lines of the cache: a request that grows waits for one, not for one per group. */
    size_t row_bytes = PGD_ROUND_UP((size_t)opts->n_groups * sizeof *c->rows, (size_t)64);
    PGD_TRY(find_alignment(&c->alignment_tokens, opts));
    if (opts->n_rows < 1)
        return PGD_EINVAL;
    c->rows_bytes = (size_t)opts->n_rows * row_bytes;
    c->rows = mem_alloc_aligned(c->rows_bytes, 64);
    if (c->rows == NULL)
        return PGD_ENOMEM;
    while (c->n_groups < opts->n_groups) {
        int32_t g = c->n_groups;
        kv_group_opts group_opts = {
            .spec = opts->groups[g],
            .group_id = g,
            .pool = opts->pool,
            .zero_list = opts->zero_list,
            .events = opts->events,
            .is_cached = is_cacheable(opts, g),
            .hash_block_size = opts->hash_block_size,
            .alignment_tokens = c->alignment_tokens,
            .n_drop = kv_group_ops_n_drop(opts->groups, opts->n_groups, g, opts->use_eagle),
            .n_rows = opts->n_rows,
            .rows = c->rows + g,
            .row_bytes = row_bytes,
            .max_model_len = opts->max_model_len,
            .max_unfinished_tokens = opts->max_unfinished_tokens,
        };
        PGD_TRY(kv_group_manager_init(&c->groups[g], &group_opts));
        c->n_groups++;
    }
    make_sets(c);
    return choose_ops(c, opts);
}

pgd_err kv_coordinator_create(kv_coordinator **out, const kv_coordinator_opts *opts)
{
    *out = NULL;
    if (opts->n_groups < 1 || opts->n_groups > PGD_MAX_KV_GROUPS)
        return PGD_EINVAL;
    kv_coordinator *c = mem_calloc(1, sizeof *c);
    if (c == NULL)
        return PGD_ENOMEM;
    c->pool = opts->pool;
    c->hash_block_size = opts->hash_block_size;
    pgd_err err = create_parts(c, opts);
    if (err != PGD_OK) {
        kv_coordinator_destroy(c);
        return err;
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
    mem_free_aligned(c->rows, c->rows_bytes);
    mem_free(c);
}

int32_t kv_coordinator_search(kv_hit *hit, const kv_coordinator *c, const kv_group_set *set,
                              const block_hash *hashes, int32_t n_known_tokens, int32_t max_tokens,
                              int32_t alignment_tokens)
{
    const kv_group_manager *g = &c->groups[set->group_ids[0]];
    int32_t bs = g->spec.block_size;
    block_id *lists[PGD_MAX_KV_GROUPS];
    for (int32_t j = 0; j < set->n_groups; j++)
        lists[j] = hit->blocks[set->group_ids[j]];
    kv_lookup q = {
        .pool = c->pool,
        .spec = &g->spec,
        .group_ids = set->group_ids,
        .n_groups = set->n_groups,
        .hashes = hashes,
        .hashes_per_block = g->hashes_per_block,
        .n_known = n_known_tokens / bs,
        .alignment_blocks = alignment_tokens / bs,
        .n_drop = g->n_drop,
    };
    q.max_blocks = kv_group_ops_align(&q, PGD_MIN(max_tokens / bs, q.n_known - q.n_drop));
    int32_t n_blocks = q.max_blocks > 0 ? g->spec.ops->lookup(lists, &q) : 0;
    for (int32_t j = 0; j < set->n_groups; j++)
        hit->n_blocks[set->group_ids[j]] = n_blocks;
    return n_blocks * bs;
}

static int32_t n_need_tokens(const kv_group_manager *g, const kv_need *need)
{
    return g->spec.ops->is_of_encoder ? need->n_encoder_tokens : need->n_tokens;
}

int32_t kv_coordinator_n_needed(const kv_coordinator *c, int32_t row, const kv_hit *hit,
                                const kv_need *need)
{
    int32_t n_needed = 0;
    for (int32_t i = 0; i < c->n_groups; i++) {
        const kv_group_manager *g = &c->groups[i];
        int32_t n_hits = hit != NULL ? hit->n_blocks[i] : 0;
        n_needed += kv_group_manager_n_fresh(g, row, n_hits, need->n_computed_tokens,
                                             n_need_tokens(g, need));
        if (n_hits > 0)
            n_needed += kv_group_manager_n_free_hits(g, hit->blocks[i], n_hits,
                                                     need->n_computed_tokens, NULL);
    }
    return n_needed;
}

int32_t kv_coordinator_n_at_most(const kv_coordinator *c, int32_t row, const kv_hit *hit,
                                 const kv_need *need, const int32_t *n_given)
{
    int32_t n_at_most = 0;
    for (int32_t i = 0; i < c->n_groups; i++) {
        const kv_group_manager *g = &c->groups[i];
        int32_t n_hits = hit != NULL ? hit->n_blocks[i] : 0;
        int32_t n = kv_group_manager_n_fresh(g, row, n_hits, need->n_computed_tokens,
                                             n_need_tokens(g, need));
        if (n_hits > 0)
            n += kv_group_manager_n_free_hits(g, hit->blocks[i], n_hits, need->n_computed_tokens,
                                              n_given);
        n_at_most += PGD_MIN(n, kv_group_manager_n_allowed(g, row));
    }
    return n_at_most;
}

void kv_coordinator_attach(kv_coordinator *c, int32_t row, const kv_hit *hit,
                           int32_t n_computed_tokens)
{
    for (int32_t g = 0; g < c->n_groups; g++)
        kv_group_manager_attach(&c->groups[g], row, hit != NULL ? hit->blocks[g] : NULL,
                                hit != NULL ? hit->n_blocks[g] : 0, n_computed_tokens);
}

void kv_coordinator_allocate(kv_coordinator *c, int32_t row, const kv_need *need)
{
    for (int32_t g = 0; g < c->n_groups; g++)
        kv_group_manager_allocate(&c->groups[g], row, n_need_tokens(&c->groups[g], need));
}

void kv_coordinator_remove_skipped(kv_coordinator *c, int32_t row, int32_t n_computed_tokens)
{
    for (int32_t g = 0; g < c->n_groups; g++)
        kv_group_manager_remove_skipped(&c->groups[g], row, n_computed_tokens);
}

void kv_coordinator_publish(kv_coordinator *c, int32_t row, const kv_content *content,
                            int32_t n_tokens)
{
    for (int32_t g = 0; g < c->n_groups; g++)
        kv_group_manager_publish(&c->groups[g], row, content, n_tokens);
}

void kv_coordinator_unpublish(kv_coordinator *c, int32_t row, int32_t n_tokens)
{
    for (int32_t g = 0; g < c->n_groups; g++)
        kv_group_manager_unpublish(&c->groups[g], row, n_tokens / c->groups[g].spec.block_size);
}

void kv_coordinator_common_prefix(int32_t *out, const kv_coordinator *c)
{
    for (int32_t g = 0; g < c->n_groups; g++)
        out[g] = kv_group_manager_common_prefix(&c->groups[g]);
}

void kv_coordinator_free(kv_coordinator *c, int32_t row)
{
    for (int32_t g = 0; g < c->n_groups; g++)
        kv_group_manager_free(&c->groups[g], row);
}
