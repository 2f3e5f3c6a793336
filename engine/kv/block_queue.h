/* Free queue of block ids: a doubly linked list over an array of links, every operation O(1) per
 * block.
 *
 * Order is eviction order, front first. The links live in the records of the blocks, so that a block
 * in the middle is unlinked without a search, and who takes a block has its record at hand.
 * Owns:    nothing
 * Limits:  ids 0 .. max_blocks-1; an id is in the queue at most once
 * Thread:  one at a time
 * Source:  rule BP2 of the engine-core reference
 */
#ifndef ENGINE_KV_BLOCK_QUEUE_H
#define ENGINE_KV_BLOCK_QUEUE_H

#include "common/err.h"

typedef struct block_queue_link {
    int32_t prev;  /* -1 = not in the queue */
    int32_t next;  /* -1 = not in the queue */
    int32_t later; /* a block that was appended some time after it; -1 = not known. A hint */
} block_queue_link;

/* How many blocks ahead of the front block_queue_look_ahead asks for, and how many of them it lets
 * pass until it returns one. */
#define BLOCK_QUEUE_AHEAD 32
#define BLOCK_QUEUE_WAIT  16

typedef struct block_queue {
    char *links; /* max_blocks + 1 of them; the last one is the sentinel */
    size_t stride;
    int32_t max_blocks;
    int32_t n_blocks; /* in the queue */
    uint32_t n_appended;
    uint32_t n_asked;
    block_id recent[BLOCK_QUEUE_AHEAD]; /* a ring of what was appended last; -1 = none */
    block_id asked[BLOCK_QUEUE_WAIT];   /* a ring of what was asked for last; -1 = none */
} block_queue;

/* Empty. max_blocks >= 1. links: room for max_blocks + 1 of them, stride bytes apart, inside of
 * records of the caller; kept. Errors: PGD_EINVAL */
PGD_MUST_USE pgd_err block_queue_init(block_queue *q, void *links, size_t stride,
                                      int32_t max_blocks);

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
/* Asks for the memory of a block that will be taken some time after id, which was just taken. Returns
 * a block that was asked for earlier, so that reading it does not wait; -1 = none. Neither need be in
 * the queue. */
block_id block_queue_look_ahead(block_queue *q, block_id id);
/* The block behind id, -1 at the end; id = -1 gives the front. */
block_id block_queue_next(const block_queue *q, block_id id);

#endif
