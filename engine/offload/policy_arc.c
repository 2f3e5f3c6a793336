/* Adaptive replacement (Megiddo & Modha 2003): T1 holds blocks seen once, T2 those seen again, B1 and
 * B2 the keys that each lost last. A touch of a lost key moves the target length of T1 towards the
 * list that should have been longer. Unlike in the paper only touches adapt (OF10): one request
 * touches a key once and may store it late or not at all.
 *
 * A lost key that is stored again starts in T2, as in the paper: it has been seen again. OF10 would put
 * it into T1, where the blocks of long conversations are lost a second time before their next turn:
 * up to three points below LRU on recorded conversations (test_offload_policies). */
#include "engine/offload/offload_policy.h"

enum { T1, T2, B1, B2 };

static void insert(offload_policy *p, offload_entry *e)
{
    offload_policy_move(p, e, e->list_idx == B1 || e->list_idx == B2 ? T2 : T1);
}

/* How far one touch moves the target: more, the shorter the list that was missed is. */
static double step(const offload_policy *p, int32_t hit, int32_t other)
{
    double ratio = (double)p->n_entries[other] / p->n_entries[hit];
    return ratio > 1 ? ratio : 1;
}

static void touch(offload_policy *p, offload_entry *e)
{
    switch (e->list_idx) {
    case T1:
        offload_policy_move(p, e, e->ref_count < 0 ? T1 : T2);
        break;
    case B1:
        p->target = PGD_MIN((double)p->capacity, p->target + step(p, B1, B2));
        offload_policy_move(p, e, B1);
        break;
    case B2:
        p->target = PGD_MAX(0.0, p->target - step(p, B2, B1));
        offload_policy_move(p, e, B2);
        break;
    default:
        offload_policy_move(p, e, T2);
    }
}

/* Each list helps out the other. (In the paper T1 need not: it gives up one block at a time. Here, with
 * T2 empty and a target as long as the tier, a store of two blocks would be refused for ever.) */
static bool choose(offload_entry **out, offload_policy *p, int32_t n, uint32_t protect_id)
{
    list_node *at[] = {offload_policy_begin_search(p, T1), offload_policy_begin_search(p, T2)};
    int32_t n_t1 = p->n_entries[T1]; /* as it will be */
    for (int32_t i = 0; i < n; i++) {
        int32_t list = n_t1 >= (int32_t)p->target ? T1 : T2;
        out[i] = offload_policy_next_victim(p, list, &at[list], protect_id);
        if (out[i] == NULL) {
            list = list == T1 ? T2 : T1;
            out[i] = offload_policy_next_victim(p, list, &at[list], protect_id);
        }
        if (out[i] == NULL)
            return false;
        n_t1 -= list == T1;
    }
    return true;
}

static offload_entry *evict(offload_policy *p, offload_entry *e)
{
    int32_t ghosts = e->list_idx == T1 ? B1 : B2;
    offload_policy_move(p, e, ghosts);
    if (p->n_entries[ghosts] <= p->capacity)
        return NULL;
    offload_entry *oldest = LIST_ENTRY(p->lists[ghosts].next, offload_entry, node);
    offload_policy_remove(p, oldest);
    return oldest;
}

const offload_policy_ops *offload_policy_arc(void)
{
    static const offload_policy_ops ops = {.name = "arc",
                                           .has_ghosts = true,
                                           .insert = insert,
                                           .touch = touch,
                                           .choose = choose,
                                           .evict = evict};
    return &ops;
}
