/* Lists that every policy keeps its entries in, and the table of policies. */
#include "engine/offload/offload_policy.h"

#include <string.h>

#include "common/hash.h"

const offload_policy_ops *offload_policy_find(const char *name)
{
    const offload_policy_ops *const policies[] = {offload_policy_lru(), offload_policy_arc()};
    for (size_t i = 0; i < PGD_ARRAY_LEN(policies); i++) {
        if (strcmp(policies[i]->name, name) == 0)
            return policies[i];
    }
    return NULL;
}

uint64_t offload_key_tag(const offload_key *key)
{
    uint64_t word;
    memcpy(&word, key->hash.bytes, sizeof word);
    return word ^ hash_u64((uint64_t)key->group_id + 1);
}

void offload_policy_init(offload_policy *p, const offload_policy_ops *ops, int32_t capacity)
{
    *p = (offload_policy){.ops = ops, .capacity = capacity};
    for (int32_t i = 0; i < OFFLOAD_POLICY_MAX_LISTS; i++)
        list_init(&p->lists[i]);
}

void offload_policy_remove(offload_policy *p, offload_entry *e)
{
    if (e->list_idx < 0)
        return;
    list_remove(&e->node);
    p->n_entries[e->list_idx]--;
    e->list_idx = -1;
}

void offload_policy_move(offload_policy *p, offload_entry *e, int32_t list_idx)
{
    offload_policy_remove(p, e);
    list_append(&p->lists[list_idx], &e->node);
    p->n_entries[list_idx]++;
    e->list_idx = list_idx;
}
