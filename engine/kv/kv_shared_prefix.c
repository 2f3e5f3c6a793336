/* When the reference leaves, the others must be told what they agree in with the next one, N. Two
 * rows that agreed differently with the old reference agree with each other in the lesser of the
 * two; only rows that agreed with it as far as N did are compared further, and those that share a
 * prompt differ at the first entry behind it. */
#include "engine/kv/kv_shared_prefix.h"

#include "common/mem.h"
#include "engine/kv/kv_group_manager.h"

pgd_err kv_shared_prefix_init(kv_shared_prefix *s, int32_t n_rows, int32_t max_blocks_per_row)
{
    *s = (kv_shared_prefix){.reference = -1};
    s->n_agreed = mem_calloc((size_t)n_rows, sizeof *s->n_agreed);
    s->joined = mem_calloc((size_t)n_rows, sizeof *s->joined);
    s->counts = mem_calloc((size_t)max_blocks_per_row + 1, sizeof *s->counts);
    return s->n_agreed != NULL && s->joined != NULL && s->counts != NULL ? PGD_OK : PGD_ENOMEM;
}

void kv_shared_prefix_deinit(kv_shared_prefix *s)
{
    mem_free(s->n_agreed);
    mem_free(s->joined);
    mem_free(s->counts);
    *s = (kv_shared_prefix){.reference = -1};
}

/* Leading entries, from `known` on, in which the tables of two rows are equal. */
static int32_t compare(const kv_group_manager *g, int32_t a, int32_t b, int32_t known)
{
    const block_id *table_a = kv_group_manager_get_table(g, a);
    const block_id *table_b = kv_group_manager_get_table(g, b);
    int32_t n =
        PGD_MIN(kv_group_manager_get_row(g, a)->n_blocks, kv_group_manager_get_row(g, b)->n_blocks);
    int32_t i = known;
    while (i < n && table_a[i] == table_b[i])
        i++;
    return i;
}

static void add_other(kv_shared_prefix *s, int32_t row, int32_t n_agreed)
{
    s->n_agreed[row] = n_agreed;
    s->counts[n_agreed]++;
    s->n_common = s->n_others == 0 ? n_agreed : PGD_MIN(s->n_common, n_agreed);
    s->n_others++;
}

static void remove_other(kv_shared_prefix *s, int32_t row)
{
    s->counts[s->n_agreed[row]]--;
    s->n_others--;
    while (s->n_others > 0 && s->counts[s->n_common] == 0)
        s->n_common++;
}

void kv_shared_prefix_join(kv_shared_prefix *s, const kv_group_manager *g, int32_t row)
{
    s->joined[row] = ++s->n_joins;
    if (s->reference < 0)
        s->reference = row;
    else
        add_other(s, row, compare(g, row, s->reference, 0));
}

static int32_t find_newest(const kv_shared_prefix *s, int32_t n_rows)
{
    int32_t newest = -1;
    for (int32_t r = 0; r < n_rows; r++) {
        if (s->joined[r] > 0 && (newest < 0 || s->joined[r] > s->joined[newest]))
            newest = r;
    }
    return newest;
}

static void change_reference(kv_shared_prefix *s, const kv_group_manager *g)
{
    int32_t next = find_newest(s, g->n_rows);
    s->reference = next;
    if (next < 0)
        return;
    int32_t n_next = s->n_agreed[next];
    int32_t n_left = s->n_others;
    for (int32_t r = 0; r < g->n_rows; r++) {
        if (s->joined[r] > 0)
            s->counts[s->n_agreed[r]]--;
    }
    s->n_others = 0;
    for (int32_t r = 0; r < g->n_rows; r++) {
        if (s->joined[r] == 0 || r == next)
            continue;
        int32_t n = s->n_agreed[r];
        add_other(s, r, n == n_next ? compare(g, r, next, n) : PGD_MIN(n, n_next));
    }
    PGD_ASSERTF(s->n_others == n_left - 1, "%d rows of %d were left", s->n_others, n_left);
}

void kv_shared_prefix_leave(kv_shared_prefix *s, const kv_group_manager *g, int32_t row)
{
    PGD_ASSERTF(s->joined[row] > 0, "row %d is no holder", row);
    s->joined[row] = 0;
    if (row == s->reference)
        change_reference(s, g);
    else
        remove_other(s, row);
}

int32_t kv_shared_prefix_get(const kv_shared_prefix *s, const kv_group_manager *g)
{
    if (s->reference < 0)
        return 0;
    return s->n_others > 0 ? s->n_common : kv_group_manager_get_row(g, s->reference)->n_blocks;
}
