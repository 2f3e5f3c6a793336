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
    for (int32_t i = 0; i < OFFLOAD_POLICY_MAX_LISTS; i++) {
        list_init(&p->lists[i]);
        p->search_from[i] = &p->lists[i];
    }
}

void offload_policy_remove(offload_policy *p, offload_entry *e)
{
    if (e->list_idx < 0)
        return;
    if (p->search_from[e->list_idx] == &e->node)
        p->search_from[e->list_idx] = e->node.next;
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
    e->place = ++p->last_place;
    if (p->search_from[list_idx] == &p->lists[list_idx])
        p->search_from[list_idx] = &e->node;
}

void offload_policy_note_ready(offload_policy *p, offload_entry *e)
{
    list_node **from = &p->search_from[e->list_idx];
    bool is_end = *from == &p->lists[e->list_idx];
    if (is_end || e->place < LIST_ENTRY(*from, offload_entry, node)->place)
        *from = &e->node;
}

list_node *offload_policy_begin_search(offload_policy *p, int32_t list_idx)
{
    list_node **from = &p->search_from[list_idx];
    while (*from != &p->lists[list_idx] && LIST_ENTRY(*from, offload_entry, node)->ref_count != 0)
        *from = (*from)->next;
    return *from;
}

offload_entry *offload_policy_next_victim(const offload_policy *p, int32_t list_idx,
                                          list_node **node, uint32_t protect_id)
{
    while (*node != &p->lists[list_idx]) {
        offload_entry *e = LIST_ENTRY(*node, offload_entry, node);
        *node = (*node)->next;
        if (e->ref_count == 0 && e->protect_id != protect_id)
            return e;
    }
    return NULL;
}

void offload_policy_check(const offload_policy *p)
{
    for (int32_t i = 0; i < OFFLOAD_POLICY_MAX_LISTS; i++) {
        uint64_t place = 0;
        bool is_behind = false;
        for (const list_node *n = p->lists[i].next; n != &p->lists[i]; n = n->next) {
            const offload_entry *e = LIST_ENTRY(n, offload_entry, node);
            is_behind = is_behind || n == p->search_from[i];
            PGD_ASSERTF(e->place > place && e->list_idx == i,
                        "list %d: an entry of list %d at place %llu behind %llu", i, e->list_idx,
                        (unsigned long long)e->place, (unsigned long long)place);
            PGD_ASSERTF(is_behind || e->ref_count != 0,
                        "list %d: a ready entry stands before all searches", i);
            place = e->place;
        }
        PGD_ASSERTF(is_behind || p->search_from[i] == &p->lists[i],
                    "list %d: searches begin in another list", i);
    }
}
