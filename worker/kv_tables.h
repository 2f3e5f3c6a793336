/* One block table for each KV-cache group; what one message says goes to all of them.
 *
 * Owns:    the tables
 * Thread:  the worker's main thread
 */
#ifndef WORKER_KV_TABLES_H
#define WORKER_KV_TABLES_H

#include "proto/kv_layout.h"
#include "proto/scheduler_output.h"
#include "worker/block_table.h"

typedef struct kv_tables {
    int32_t n_groups;
    block_table *groups[PGD_MAX_KV_GROUPS];
    attention_kind kinds[PGD_MAX_KV_GROUPS];
} kv_tables;

typedef struct kv_tables_opts {
    int32_t n_rows;
    int32_t max_tokens;         /* of a request, prompt and output */
    int32_t max_encoder_tokens; /* 0 = no cross attention */
    int32_t n_blocks;           /* of the pool, null block included */
} kv_tables_opts;

/* After an error, and zeroed, kv_tables_deinit has nothing or the rest to do. */
PGD_MUST_USE pgd_err kv_tables_init(kv_tables *t, const kv_layout *layout,
                                    const kv_tables_opts *opts);
void kv_tables_deinit(kv_tables *t);

/* As block_table_replace and block_table_append; after an error groups may differ. */
PGD_MUST_USE pgd_err kv_tables_replace(kv_tables *t, int32_t row, const block_ids_msg *blocks,
                                       pgd_why *why);
PGD_MUST_USE pgd_err kv_tables_append(kv_tables *t, int32_t row, const block_ids_msg *blocks,
                                      pgd_why *why);
void kv_tables_reset_row(kv_tables *t, int32_t row);
/* As block_table_check, in every group but those of cross attention: their tables cover the
 * encoder's tokens. */
PGD_MUST_USE pgd_err kv_tables_check(const kv_tables *t, int32_t row, int32_t first_pos,
                                     int32_t end_pos, pgd_why *why);

#endif
