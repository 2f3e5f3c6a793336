/* Intrusive doubly linked list with a sentinel; every operation is O(1).
 *
 * Thread:  one at a time
 */
#ifndef COMMON_LIST_H
#define COMMON_LIST_H

#include "common/base.h"

typedef struct list_node {
    struct list_node *prev;
    struct list_node *next;
} list_node;

#define LIST_ENTRY(node, type, member) ((type *)(void *)((char *)(node)-offsetof(type, member)))

static inline void list_init(list_node *head)
{
    head->prev = head;
    head->next = head;
}

static inline bool list_is_empty(const list_node *head)
{
    return head->next == head;
}

static inline bool list_is_linked(const list_node *node)
{
    return node->next != NULL;
}

static inline void list_insert_after(list_node *at, list_node *node)
{
    node->prev = at;
    node->next = at->next;
    at->next->prev = node;
    at->next = node;
}

static inline void list_append(list_node *head, list_node *node)
{
    list_insert_after(head->prev, node);
}

static inline void list_prepend(list_node *head, list_node *node)
{
    list_insert_after(head, node);
}

/* Leaves the node's links NULL, so that list_is_linked tells. */
static inline void list_remove(list_node *node)
{
    node->prev->next = node->next;
    node->next->prev = node->prev;
    node->prev = NULL;
    node->next = NULL;
}

/* Moves all nodes of from to out, which need not be initialised. */
static inline void list_take_all(list_node *out, list_node *from)
{
    list_init(out);
    if (list_is_empty(from))
        return;
    *out = *from;
    out->next->prev = out;
    out->prev->next = out;
    list_init(from);
}

#endif
