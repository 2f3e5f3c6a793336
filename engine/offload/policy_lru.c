/* Least recently used: one list, every touch is equal (OF9). */
#include "engine/offload/offload_policy.h"

enum { ALL };

static void use(offload_policy *p, offload_entry *e)
{
    offload_policy_move(p, e, ALL);
}

static bool choose(offload_entry **out, const offload_policy *p, int32_t n, uint32_t protect_id)
{
    int32_t n_chosen = 0;
    const list_node *end = &p->lists[ALL];
    for (list_node *node = end->next; n_chosen < n && node != end; node = node->next) {
        offload_entry *e = LIST_ENTRY(node, offload_entry, node);
        if (offload_entry_is_evictable(e, protect_id))
            out[n_chosen++] = e;
    }
    return n_chosen == n;
}

static offload_entry *evict(offload_policy *p, offload_entry *e)
{
    offload_policy_remove(p, e);
    return e;
}

const offload_policy_ops *offload_policy_lru(void)
{
    static const offload_policy_ops ops = {
        .name = "lru", .insert = use, .touch = use, .choose = choose, .evict = evict};
    return &ops;
}
