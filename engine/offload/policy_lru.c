/* Least recently used: one list, every touch is equal (OF9). */
#include "engine/offload/offload_policy.h"

enum { ALL };

static void use(offload_policy *p, offload_entry *e)
{
    offload_policy_move(p, e, ALL);
}

static bool choose(offload_entry **out, offload_policy *p, int32_t n, uint32_t protect_id)
{
    list_node *at = offload_policy_begin_search(p, ALL);
    for (int32_t i = 0; i < n; i++) {
        out[i] = offload_policy_next_victim(p, ALL, &at, protect_id);
        if (out[i] == NULL)
            return false;
    }
    return true;
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
