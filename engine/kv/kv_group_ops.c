/* The table of kinds, and the steps that their searches are made of. */
#include "engine/kv/kv_group_ops.h"

/* How many blocks ahead a long search asks for their memory. */
#define PREFETCH 8

const kv_group_ops *kv_group_ops_of(attention_kind kind)
{
#define ROW(kind, ops) [kind] = &ops,
    static const kv_group_ops *const table[] = {KV_GROUP_OPS_TABLE(ROW)};
#undef ROW
    return (unsigned)kind < PGD_ARRAY_LEN(table) ? table[kind] : NULL;
}

void kv_group_ops_prefetch(const kv_lookup *q, int32_t idx)
{
    for (int32_t near = 0; near <= 1; near++) {
        int32_t i = near ? idx + PREFETCH : idx + 2 * PREFETCH;
        if (i >= q->n_known)
            continue;
        const block_hash *hash = &q->hashes[(size_t)(i + 1) * (size_t)q->hashes_per_block - 1];
        for (int32_t j = 0; j < q->n_groups; j++) {
            if (near)
                block_pool_prefetch_found(q->pool, hash, q->group_ids[j]);
            else
                block_pool_prefetch_key(q->pool, hash, q->group_ids[j]);
        }
    }
}

bool kv_group_ops_find(block_id *const *blocks, const kv_lookup *q, int32_t idx)
{
    const block_hash *hash = &q->hashes[(size_t)(idx + 1) * (size_t)q->hashes_per_block - 1];
    for (int32_t j = 0; j < q->n_groups; j++) {
        block_id id = block_pool_lookup(q->pool, hash, q->group_ids[j]);
        if (id < 0)
            return false;
        blocks[j][idx] = id;
    }
    return true;
}

void kv_group_ops_skip(block_id *const *blocks, const kv_lookup *q, int32_t n_blocks)
{
    for (int32_t j = 0; j < q->n_groups; j++) {
        for (int32_t i = 0; i < n_blocks; i++)
            blocks[j][i] = BLOCK_POOL_NULL;
    }
}

int32_t kv_group_ops_n_drop(const kv_group_spec *groups, int32_t n_groups, int32_t g,
                            bool use_eagle)
{
    bool is_any_marked = false;
    for (int32_t i = 0; i < n_groups; i++)
        is_any_marked = is_any_marked || groups[i].is_eagle;
    return use_eagle && (groups[g].is_eagle || !is_any_marked);
}

int32_t kv_group_ops_first_needed(const kv_lookup *q, int32_t n_blocks)
{
    return kv_group_ops_skipped_blocks(q->spec, n_blocks * q->spec->block_size);
}
