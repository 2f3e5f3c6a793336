/* The loops over groups, and nothing else. An error that leaves groups apart ends the worker, so
 * that no undo is needed. */
#include "worker/kv_tables.h"

static pgd_err create_table(block_table **out, const kv_group_layout *g, const kv_tables_opts *opts)
{
    int32_t n_tokens = g->kind == ATTENTION_CROSS ? opts->max_encoder_tokens : opts->max_tokens;
    block_table_opts table = {.n_rows = opts->n_rows,
                              .max_blocks_per_row = PGD_CEIL_DIV(n_tokens, g->block_size),
                              .block_size = g->block_size,
                              .n_blocks = opts->n_blocks,
                              .kind = (attention_kind)g->kind,
                              .window = g->window};
    return block_table_create(out, &table);
}

pgd_err kv_tables_init(kv_tables *t, const kv_layout *layout, const kv_tables_opts *opts)
{
    *t = (kv_tables){0};
    for (int32_t g = 0; g < layout->n_groups; g++) {
        PGD_TRY(create_table(&t->groups[g], &layout->groups[g], opts));
        t->kinds[g] = (attention_kind)layout->groups[g].kind;
        t->n_groups++;
    }
    return PGD_OK;
}

void kv_tables_deinit(kv_tables *t)
{
    for (int32_t g = 0; g < t->n_groups; g++)
        block_table_destroy(t->groups[g]);
    t->n_groups = 0;
}

pgd_err kv_tables_replace(kv_tables *t, int32_t row, const block_ids_msg *blocks, pgd_why *why)
{
    for (int32_t g = 0; g < t->n_groups; g++)
        PGD_TRY(block_table_replace(t->groups[g], row, blocks->ids[g], blocks->n_blocks[g], why));
    return PGD_OK;
}

pgd_err kv_tables_append(kv_tables *t, int32_t row, const block_ids_msg *blocks, pgd_why *why)
{
    for (int32_t g = 0; g < t->n_groups; g++)
        PGD_TRY(block_table_append(t->groups[g], row, blocks->ids[g], blocks->n_blocks[g], why));
    return PGD_OK;
}

void kv_tables_reset_row(kv_tables *t, int32_t row)
{
    for (int32_t g = 0; g < t->n_groups; g++)
        block_table_reset_row(t->groups[g], row);
}

pgd_err kv_tables_check(const kv_tables *t, int32_t row, int32_t first_pos, int32_t end_pos,
                        pgd_why *why)
{
    for (int32_t g = 0; g < t->n_groups; g++)
        if (t->kinds[g] != ATTENTION_CROSS)
            PGD_TRY(block_table_check(t->groups[g], row, first_pos, end_pos, why));
    return PGD_OK;
}
