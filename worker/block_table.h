/* The block ids of every row for one KV-cache group (rules WK3, WK5).
 *
 *   slot = table[row][pos / block_size] * block_size + pos % block_size
 *
 * One array [n_rows, max_blocks_per_row]; the attention op reads it in place.
 * Owns:    the array
 * Limits:  ids are checked against [first_block, n_blocks): block 0 is the pool's null block,
 *          which only groups that skip positions may name
 * Thread:  the worker's main thread
 */
#ifndef WORKER_BLOCK_TABLE_H
#define WORKER_BLOCK_TABLE_H

#include "common/err.h"

typedef struct block_table block_table;

typedef struct block_table_opts {
    int32_t n_rows;
    int32_t max_blocks_per_row;
    int32_t block_size;
    int32_t n_blocks; /* of the pool, null block included */
    int32_t
        first_block; /* smallest id allowed: 1, or 0 where the null block may stand in a table */
} block_table_opts;

PGD_MUST_USE pgd_err block_table_create(block_table **out, const block_table_opts *opts);
void block_table_destroy(block_table *t);

/* Both refuse, without a change, ids out of range and more than max_blocks_per_row blocks:
 * PGD_EPROTO with a why. */
PGD_MUST_USE pgd_err block_table_replace(block_table *t, int32_t row, const block_id *ids,
                                         int32_t n_ids, pgd_why *why);
PGD_MUST_USE pgd_err block_table_append(block_table *t, int32_t row, const block_id *ids,
                                        int32_t n_ids, pgd_why *why);
void block_table_reset_row(block_table *t, int32_t row);

int32_t block_table_n_blocks(const block_table *t, int32_t row);
/* Positions that the row's blocks can hold. */
int32_t block_table_n_positions(const block_table *t, int32_t row);
/* The whole array and the elements between rows; borrow until destroy. */
const block_id *block_table_get_ids(const block_table *t, int64_t *stride);
/* Slots of positions [first_pos, first_pos + n_slots); they must be covered. */
void block_table_fill_slots(slot_id *out, const block_table *t, int32_t row, int32_t first_pos,
                            int32_t n_slots);

#endif
