/* Block tables are a cache of what the engine said: ids come in through replace and append and are
 * checked there, so that everything behind may index with them. Entries behind a row's last block
 * keep old, valid ids and are never read; nor are those that fall out of a window while a request
 * runs, whose blocks the engine has given to somebody else.
 *
 *   0 0 0 | 17 4 9 12 | (old ids)     n_null 3, n_blocks 7 */
#include "worker/block_table.h"

#include <inttypes.h>
#include <string.h>

#include "common/mem.h"
#include "proto/kv_layout.h"

struct block_table {
    block_table_opts opts;
    block_id *ids;     /* [n_rows, max_blocks_per_row] */
    int32_t *n_blocks; /* [n_rows] */
    int32_t *n_null;   /* [n_rows], leading null blocks */
    size_t ids_bytes;
};

pgd_err block_table_create(block_table **out, const block_table_opts *opts)
{
    *out = NULL;
    if (opts->n_rows < 1 || opts->max_blocks_per_row < 1 || opts->block_size < 1 ||
        opts->n_blocks < 1 || (int64_t)opts->n_blocks * opts->block_size > INT32_MAX ||
        (int64_t)opts->max_blocks_per_row * opts->block_size > INT32_MAX)
        return PGD_EINVAL;
    block_table *t = mem_calloc(1, sizeof(*t));
    if (!t)
        return PGD_ENOMEM;
    t->opts = *opts;
    if (!mem_mul(&t->ids_bytes, (size_t)opts->n_rows * sizeof(block_id),
                 (size_t)opts->max_blocks_per_row))
        goto fail;
    t->ids = mem_alloc_aligned(t->ids_bytes, 64);
    t->n_blocks = mem_calloc((size_t)opts->n_rows, sizeof(int32_t));
    t->n_null = mem_calloc((size_t)opts->n_rows, sizeof(int32_t));
    if (!t->ids || !t->n_blocks || !t->n_null)
        goto fail;
    *out = t;
    return PGD_OK;
fail:
    block_table_destroy(t);
    return PGD_ENOMEM;
}

void block_table_destroy(block_table *t)
{
    if (!t)
        return;
    mem_free_aligned(t->ids, t->ids_bytes);
    mem_free(t->n_blocks);
    mem_free(t->n_null);
    mem_free(t);
}

pgd_err block_table_append(block_table *t, int32_t row, const block_id *ids, int32_t n_ids,
                           pgd_why *why)
{
    PGD_ASSERT(row >= 0 && row < t->opts.n_rows);
    int32_t n = t->n_blocks[row];
    int32_t n_null = t->n_null[row];
    bool has_window = t->opts.kind == ATTENTION_SLIDING || t->opts.kind == ATTENTION_CHUNKED;
    if (n_ids < 0 || n_ids > t->opts.max_blocks_per_row - n)
        return pgd_fail(why, PGD_EPROTO,
                        "expected at most %" PRId32 " blocks in a table, got %" PRId64
                        ", at row %" PRId32,
                        t->opts.max_blocks_per_row, (int64_t)n + n_ids, row);
    for (int32_t i = 0; i < n_ids; i++) {
        bool is_null = has_window && ids[i] == 0 && n_null == n + i;
        if (!is_null && (ids[i] < 1 || ids[i] >= t->opts.n_blocks))
            return pgd_fail(why, PGD_EPROTO,
                            "expected a block id in [1, %" PRId32 "), got %" PRId32
                            ", at row %" PRId32 " entry %" PRId32,
                            t->opts.n_blocks, ids[i], row, n + i);
        n_null += is_null;
    }
    if (n_ids > 0)
        memcpy(t->ids + (int64_t)row * t->opts.max_blocks_per_row + n, ids,
               (size_t)n_ids * sizeof(block_id));
    t->n_blocks[row] = n + n_ids;
    t->n_null[row] = n_null;
    return PGD_OK;
}

pgd_err block_table_replace(block_table *t, int32_t row, const block_id *ids, int32_t n_ids,
                            pgd_why *why)
{
    PGD_ASSERT(row >= 0 && row < t->opts.n_rows);
    int32_t n_before = t->n_blocks[row];
    int32_t n_null_before = t->n_null[row];
    block_table_reset_row(t, row);
    pgd_err err = block_table_append(t, row, ids, n_ids, why);
    if (err != PGD_OK) {
        t->n_blocks[row] = n_before;
        t->n_null[row] = n_null_before;
    }
    return err;
}

void block_table_reset_row(block_table *t, int32_t row)
{
    PGD_ASSERT(row >= 0 && row < t->opts.n_rows);
    t->n_blocks[row] = 0;
    t->n_null[row] = 0;
}

int32_t block_table_n_blocks(const block_table *t, int32_t row)
{
    PGD_ASSERT(row >= 0 && row < t->opts.n_rows);
    return t->n_blocks[row];
}

int32_t block_table_n_positions(const block_table *t, int32_t row)
{
    return block_table_n_blocks(t, row) * t->opts.block_size;
}

pgd_err block_table_check(const block_table *t, int32_t row, int32_t first_pos, int32_t end_pos,
                          pgd_why *why)
{
    int32_t needed = kv_layout_first_position(t->opts.kind, t->opts.window, first_pos);
    int32_t held = t->n_null[row] * t->opts.block_size;
    if (end_pos <= block_table_n_positions(t, row) && needed >= held)
        return PGD_OK;
    return pgd_fail(why, PGD_EPROTO,
                    "expected blocks for positions %" PRId32 " to %" PRId32
                    ", got blocks for %" PRId32 " to %" PRId32 ", at row %" PRId32,
                    needed, end_pos - 1, held, block_table_n_positions(t, row) - 1, row);
}

const block_id *block_table_get_ids(const block_table *t, int64_t *stride)
{
    *stride = t->opts.max_blocks_per_row;
    return t->ids;
}

void block_table_fill_slots(slot_id *out, const block_table *t, int32_t row, int32_t first_pos,
                            int32_t n_slots)
{
    PGD_ASSERT(first_pos >= t->n_null[row] * t->opts.block_size && n_slots >= 0 &&
               n_slots <= block_table_n_positions(t, row) - first_pos);
    const block_id *ids = t->ids + (int64_t)row * t->opts.max_blocks_per_row;
    int32_t block_size = t->opts.block_size;
    for (int32_t i = 0; i < n_slots; i++) {
        int32_t pos = first_pos + i;
        out[i] = ids[pos / block_size] * block_size + pos % block_size;
    }
}
