/* The sentinel has index max_blocks and closes the ring, so no operation has a special case for the
 * ends. A block that is not queued has -1 in both links: putting it in twice or taking it out twice
 * is a bug that asserts at once instead of bending the ring.
 *
 * Who takes blocks one after the other would wait for memory at each, since only a block knows the
 * next one. So an append leaves a note in the block that was appended BLOCK_QUEUE_AHEAD before: when
 * that one is taken, the later one is asked for. Notes are not kept up to date; a wrong one costs a
 * useless read. */
#include "engine/kv/block_queue.h"

static block_queue_link *link_of(const block_queue *q, int32_t id)
{
    return (block_queue_link *)(void *)(q->links + (size_t)id * q->stride);
}

pgd_err block_queue_init(block_queue *q, void *links, size_t stride, int32_t max_blocks)
{
    *q = (block_queue){.links = links, .stride = stride};
    if (links == NULL || stride < sizeof(block_queue_link) || max_blocks < 1 ||
        max_blocks == INT32_MAX)
        return PGD_EINVAL;
    q->max_blocks = max_blocks;
    for (int32_t i = 0; i < max_blocks; i++)
        *link_of(q, i) = (block_queue_link){-1, -1, -1};
    *link_of(q, max_blocks) = (block_queue_link){max_blocks, max_blocks, -1};
    for (int i = 0; i < BLOCK_QUEUE_AHEAD; i++)
        q->recent[i] = -1;
    for (int i = 0; i < BLOCK_QUEUE_WAIT; i++)
        q->asked[i] = -1;
    return PGD_OK;
}

static void check_id(const block_queue *q, block_id id)
{
    PGD_ASSERTF(id >= 0 && id < q->max_blocks, "block id %d outside 0..%d", id, q->max_blocks - 1);
}

bool block_queue_contains(const block_queue *q, block_id id)
{
    check_id(q, id);
    return link_of(q, id)->next >= 0;
}

block_id block_queue_next(const block_queue *q, block_id id)
{
    int32_t next = link_of(q, id < 0 ? q->max_blocks : id)->next;
    return next == q->max_blocks ? -1 : next;
}

void block_queue_insert(block_queue *q, block_id id, block_id after)
{
    check_id(q, id);
    PGD_ASSERTF(link_of(q, id)->next < 0, "block %d is already in the free queue", id);
    int32_t prev = after < 0 ? q->max_blocks : after;
    int32_t next = link_of(q, prev)->next;
    PGD_ASSERTF(next >= 0, "block %d is not in the free queue", after);
    *link_of(q, id) = (block_queue_link){prev, next, -1};
    link_of(q, prev)->next = id;
    link_of(q, next)->prev = id;
    q->n_blocks++;
}

void block_queue_remove(block_queue *q, block_id id)
{
    check_id(q, id);
    block_queue_link *link = link_of(q, id);
    PGD_ASSERTF(link->next >= 0, "block %d is not in the free queue", id);
    link_of(q, link->prev)->next = link->next;
    link_of(q, link->next)->prev = link->prev;
    link->prev = -1;
    link->next = -1;
    q->n_blocks--;
}

block_id block_queue_look_ahead(block_queue *q, block_id id)
{
    block_id *slot = &q->asked[q->n_asked++ % BLOCK_QUEUE_WAIT];
    block_id arrived = *slot;
    *slot = link_of(q, id)->later;
    if (*slot >= 0)
        PGD_PREFETCH(link_of(q, *slot));
    return arrived;
}

block_id block_queue_pop(block_queue *q)
{
    block_id id = block_queue_next(q, -1);
    if (id >= 0)
        block_queue_remove(q, id);
    return id;
}

bool block_queue_pop_n(block_id *out, block_queue *q, int32_t n_blocks)
{
    PGD_ASSERTF(n_blocks >= 0, "expected a count >= 0, got %d", n_blocks);
    if (n_blocks > q->n_blocks)
        return false;
    for (int32_t i = 0; i < n_blocks; i++)
        out[i] = block_queue_pop(q);
    return true;
}

void block_queue_append(block_queue *q, block_id id)
{
    block_id *slot = &q->recent[q->n_appended++ % BLOCK_QUEUE_AHEAD];
    block_queue_insert(q, id, q->n_blocks == 0 ? -1 : link_of(q, q->max_blocks)->prev);
    if (*slot >= 0)
        link_of(q, *slot)->later = id;
    *slot = id;
}

void block_queue_append_n(block_queue *q, const block_id *ids, int32_t n_ids)
{
    for (int32_t i = 0; i < n_ids; i++)
        block_queue_append(q, ids[i]);
}

void block_queue_prepend_n(block_queue *q, const block_id *ids, int32_t n_ids)
{
    block_id after = -1;
    for (int32_t i = 0; i < n_ids; i++) {
        block_queue_insert(q, ids[i], after);
        after = ids[i];
    }
}
