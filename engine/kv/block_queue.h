/* Free queue of block ids: a doubly linked list over an array of links, every operation O(1) per
 * block.
 *
 * Order is eviction order, front first. The links live in one array indexed by block id, so that a
 * block in the middle is unlinked without a search and nothing is allocated after init.
 * Limits:  ids 0 .. max_blocks-1; an id is in the queue at most once
 * Thread:  one at a time
 * Source:  rule BP2 of the engine-core reference
 */
#ifndef ENGINE_KV_BLOCK_QUEUE_H
#define ENGINE_KV_BLOCK_QUEUE_H

#include "common/err.h"

typedef struct block_queue_link {
    int32_t prev; /* -1 = not in the queue */
    int32_t next; /* -1 = not in the queue */
} block_queue_link;

typedef struct block_queue {
    block_queue_link *links; /* [max_blocks + 1]; the last one is the sentinel */
    int32_t max_blocks;
    int32_t n_blocks; /* in the queue */
} block_queue;

/* Empty. max_blocks >= 1. Errors: PGD_EINVAL, PGD_ENOMEM */
PGD_MUST_USE pgd_err block_queue_init(block_queue *q, int32_t max_blocks);
void block_queue_deinit(block_queue *q);

/* Takes the front; -1 when empty. */
block_id block_queue_pop(block_queue *q);
/* Takes the n front blocks, front first. False and no change when there are fewer. */
PGD_MUST_USE bool block_queue_pop_n(block_id *out, block_queue *q, int32_t n_blocks);
void block_queue_append(block_queue *q, block_id id);
void block_queue_append_n(block_queue *q, const block_id *ids, int32_t n_ids);
/* The n blocks become the front in the given order. */
void block_queue_prepend_n(block_queue *q, const block_id *ids, int32_t n_ids);
/* Puts id behind `after`, which is in the queue; -1 = at the front. */
void block_queue_insert(block_queue *q, block_id id, block_id after);
void block_queue_remove(block_queue *q, block_id id);
bool block_queue_contains(const block_queue *q, block_id id);
/* The block behind id, -1 at the end; id = -1 gives the front. */
block_id block_queue_next(const block_queue *q, block_id id);

#endif
