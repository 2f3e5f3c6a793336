/* The block ids of every row for one KV-cache group (rules WK3, WK5).
 *
 *   slot = table[row][pos / block_size] * block_size + pos % block_size
 *
 * One array [n_rows, max_blocks_per_row]; the attention op reads it in place. Where attention has a
 * window, a table may begin with null blocks, for tokens that nothing will attend to any more.
 * Owns:    the array
 * Limits:  ids are checked against [1, n_blocks); the null block, 0, only where it may stand
 * Thread:  the worker's main thread
 */
#ifndef WORKER_BLOCK_TABLE_H
#define WORKER_BLOCK_TABLE_H

#include "common/err.h"
#include "common/model/attention_kind.h"

typedef struct block_table block_table;

typedef struct block_table_opts {
    int32_t n_rows;
    int32_t max_blocks_per_row;
    int32_t block_size;
    int32_t n_blocks; /* of the pool, null block included */
    attention_kind kind;
    int32_t window; /* of SLIDING and CHUNKED */
} block_table_opts;

PGD_MUST_USE pgd_err block_table_create(block_table **out, const block_table_opts *opts);
void block_table_destroy(block_table *t);

/* Both refuse, without a change, ids out of range, null blocks other than leading ones of a window,
 * and more than max_blocks_per_row blocks: PGD_EPROTO with a why. */
PGD_MUST_USE pgd_err block_table_replace(block_table *t, int32_t row, const block_id *ids,
                                         int32_t n_ids, pgd_why *why);
PGD_MUST_USE pgd_err block_table_append(block_table *t, int32_t row, const block_id *ids,
                                        int32_t n_ids, pgd_why *why);
void block_table_reset_row(block_table *t, int32_t row);

int32_t block_table_n_blocks(const block_table *t, int32_t row);
/* Positions that the row's blocks can hold. */
int32_t block_table_n_positions(const block_table *t, int32_t row);
/* Whether there are blocks for what computing positions [first_pos, end_pos) writes and reads: from
 * the first position that the first of them attends to. PGD_EPROTO with a why */
PGD_MUST_USE pgd_err block_table_check(const block_table *t, int32_t row, int32_t first_pos,
                                       int32_t end_pos, pgd_why *why);
/* The whole array and the elements between rows; borrow until destroy. */
const block_id *block_table_get_ids(const block_table *t, int64_t *stride);
/* Slots of positions [first_pos, first_pos + n_slots); block_table_check has passed them. */
void block_table_fill_slots(slot_id *out, const block_table *t, int32_t row, int32_t first_pos,
                            int32_t n_slots);

#endif
