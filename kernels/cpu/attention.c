/* Driver of the fast attention: checks, cutting the work into items, sharing them out.
 *
 * Items are taken from a shared counter. A tile whose keys take much longer than a fair share (a
 * long context in a small batch) is cut at split borders into pieces; the partial results of its
 * splits are then kept in slots, and the thread that finishes the last piece folds them in the
 * order of splits, as one thread does that has them all. So how the work is cut never shows in the
 * bits. Slots are what the workspace has left; when they run out, tiles stay whole.
 *
 *   workspace: tiles | counters | scratch of each thread | slots
 */
#include "kernels/cpu/attention_internal.h"
#include "kernels/cpu/cpu_split.h"

enum {
    ITEMS_PER_THREAD = 6, /* wanted at least, by cutting tiles */
    SLOT_SEQS = 2         /* decoding sequences of full length whose partial results fit */
};

static int32_t slot_floats(const kv_page_layout *kv)
{
    return PGD_ROUND_UP(kv->head_dim, 16) + 16;
}

static int32_t units_per_kv_head(int32_t n_heads, const kv_page_layout *kv)
{
    return PGD_CEIL_DIV(n_heads / kv->n_kv_heads, ATTENTION_MAX_PAIRS);
}

static int32_t heads_per_unit(int32_t n_heads, const kv_page_layout *kv)
{
    return PGD_CEIL_DIV(n_heads / kv->n_kv_heads, units_per_kv_head(n_heads, kv));
}

static int32_t rows_per_tile(int32_t n_heads, const kv_page_layout *kv)
{
    return ATTENTION_MAX_PAIRS / heads_per_unit(n_heads, kv);
}

static size_t scratch_floats(const kv_page_layout *kv)
{
    size_t dim = (size_t)PGD_ROUND_UP(kv->head_dim, 16);
    return (size_t)ATTENTION_MAX_PAIRS * ATTENTION_SPLIT + ATTENTION_MAX_PAIRS * dim +
           ATTENTION_CHUNK * dim + 2 * ATTENTION_MAX_PAIRS * (dim + 16);
}

static size_t tiles_bytes(int64_t n_tiles)
{
    return PGD_ROUND_UP((size_t)n_tiles * sizeof(attention_tile), 64);
}

static size_t counters_bytes(int64_t n_tiles, int32_t n_units)
{
    return PGD_ROUND_UP((size_t)n_tiles * (size_t)n_units * sizeof(int32_t), 64);
}

size_t attention_simd_workspace_bytes(const attention_limits *l)
{
    int32_t n_units = l->kv.n_kv_heads * units_per_kv_head(l->n_heads, &l->kv);
    int64_t n_tiles = l->max_rows / rows_per_tile(l->n_heads, &l->kv) + l->max_seqs;
    size_t n_slots = (size_t)SLOT_SEQS * (size_t)l->n_heads *
                     (size_t)PGD_CEIL_DIV(l->max_context, ATTENTION_SPLIT);
    return tiles_bytes(n_tiles) + counters_bytes(n_tiles, n_units) +
           (size_t)l->n_threads * scratch_floats(&l->kv) * sizeof(float) +
           n_slots * (size_t)slot_floats(&l->kv) * sizeof(float);
}

/* --- plan --- */

static int64_t count_tiles(const attention_args *a, int32_t n_rows_max)
{
    int64_t n = 0;
    for (int32_t s = 0; s < a->n_seqs; s++)
        n += PGD_CEIL_DIV(a->query_start[s + 1] - a->query_start[s], n_rows_max);
    return n;
}

/* Returns the tile's share of the work: rows times splits. */
static int64_t init_tile(attention_tile *t, const attention_args *a, int32_t seq, int32_t row,
                         int32_t n_rows)
{
    int32_t first = attention__first_key(a, attention__last_key(a, seq, row)) / ATTENTION_SPLIT;
    int32_t last = attention__last_key(a, seq, row + n_rows - 1) / ATTENTION_SPLIT;
    *t = (attention_tile){.seq = seq,
                          .first_row = row,
                          .n_rows = n_rows,
                          .first_split = first,
                          .n_splits = last - first + 1,
                          .n_pieces = 1};
    return (int64_t)n_rows * t->n_splits;
}

static int64_t make_tiles(attention_job *job)
{
    const attention_args *a = job->args;
    int32_t n_rows_max = rows_per_tile(a->n_heads, &a->kv);
    int64_t work = 0;
    for (int32_t s = 0; s < a->n_seqs; s++) {
        for (int32_t row = a->query_start[s]; row < a->query_start[s + 1]; row += n_rows_max) {
            int32_t n_rows = PGD_MIN(n_rows_max, a->query_start[s + 1] - row);
            work += init_tile(&job->tiles[job->n_tiles++], a, s, row, n_rows);
        }
    }
    return work;
}

static void cut_tiles(attention_job *job, int64_t work, int64_t n_slots, int32_t n_threads)
{
    int64_t fair = work * job->n_units / ((int64_t)n_threads * ITEMS_PER_THREAD);
    int64_t used = 0;
    for (int32_t i = 0; i < job->n_tiles; i++) {
        attention_tile *t = &job->tiles[i];
        int64_t own = (int64_t)t->n_rows * t->n_splits;
        int64_t n_pieces = PGD_MIN(PGD_CEIL_DIV(own, PGD_MAX(fair, 1)), (int64_t)t->n_splits);
        int64_t wanted = own * job->n_units * job->heads_per_unit;
        t->first_item = job->n_items;
        if (n_threads > 1 && n_pieces > 1 && used + wanted <= n_slots) {
            t->n_pieces = (int32_t)n_pieces;
            t->first_slot = used;
            t->counters = job->counters + (int64_t)i * job->n_units;
            for (int32_t u = 0; u < job->n_units; u++)
                t->counters[u] = 0;
            used += wanted;
        }
        job->n_items += t->n_pieces * job->n_units;
    }
}

/* --- run --- */

static attention_scratch find_scratch(const attention_job *job, int32_t thread_idx)
{
    attention_scratch s;
    size_t dim = (size_t)job->slot_floats - 16;
    s.scores = job->scratch + (size_t)thread_idx * job->scratch_floats;
    s.q = s.scores + (size_t)ATTENTION_MAX_PAIRS * ATTENTION_SPLIT;
    s.chunk = s.q + ATTENTION_MAX_PAIRS * dim;
    s.part = s.chunk + ATTENTION_CHUNK * dim;
    s.total = s.part + ATTENTION_MAX_PAIRS * (dim + 16);
    return s;
}

static void run_item(const attention_job *job, const attention_tile *t, int32_t item,
                     const attention_scratch *scratch)
{
    int32_t piece = item / job->n_units;
    int32_t first = (int32_t)((int64_t)t->n_splits * piece / t->n_pieces);
    int32_t last = (int32_t)((int64_t)t->n_splits * (piece + 1) / t->n_pieces);
    job->isa->run(job, t, item % job->n_units, first, last, scratch);
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const attention_job *job = arg;
    attention_scratch scratch = find_scratch(job, thread_idx);
    const attention_tile *t = job->tiles;
    int64_t first = 0, last = job->n_items;
    while (n_threads == 1 || cpu_pool_next(job->pool, job->n_items, 1, &first, &last)) {
        for (int64_t i = first; i < last; i++) {
            while (i >= t->first_item + t->n_pieces * job->n_units)
                t++; /* a thread's items only ever go up */
            run_item(job, t, (int32_t)(i - t->first_item), &scratch);
        }
        if (n_threads == 1)
            break;
    }
}

static bool is_valid(const attention_args *a)
{
    int64_t width = (int64_t)a->n_heads * a->kv.head_dim;
    return kv_page_layout_is_valid(&a->kv) && a->n_seqs >= 0 && a->n_heads >= 1 &&
           a->n_heads % a->kv.n_kv_heads == 0 && a->q_stride >= width && a->out_stride >= width &&
           a->window >= 0 && a->chunk >= 0 && (!a->n_keys || a->window + a->chunk == 0) &&
           a->soft_cap >= 0;
}

pgd_err attention__run(const attention_args *args, kernel_ctx *ctx, const attention_isa *isa)
{
    if (!is_valid(args))
        return PGD_EINVAL;
    int32_t n_threads = ctx->pool ? cpu_pool_n_threads(ctx->pool) : 1;
    int32_t n_units = args->kv.n_kv_heads * units_per_kv_head(args->n_heads, &args->kv);
    int64_t n_tiles = count_tiles(args, rows_per_tile(args->n_heads, &args->kv));
    if (n_tiles == 0)
        return PGD_OK;
    uint8_t *space = ctx->workspace;
    attention_job job = {.args = args,
                         .pool = ctx->pool,
                         .isa = isa,
                         .slot_floats = slot_floats(&args->kv),
                         .units_per_kv_head = units_per_kv_head(args->n_heads, &args->kv),
                         .heads_per_unit = heads_per_unit(args->n_heads, &args->kv),
                         .n_units = n_units,
                         .scratch_floats = scratch_floats(&args->kv),
                         .tiles = (attention_tile *)(void *)space};
    size_t n_bytes = tiles_bytes(n_tiles);
    job.counters = (int32_t *)(void *)(space + n_bytes);
    n_bytes += counters_bytes(n_tiles, n_units);
    job.scratch = (float *)(void *)(space + n_bytes);
    n_bytes += (size_t)n_threads * job.scratch_floats * sizeof(float);
    if (ctx->workspace_bytes < n_bytes)
        return PGD_EINVAL;
    job.slots = (float *)(void *)(space + n_bytes);
    size_t slot_bytes = (size_t)job.slot_floats * sizeof(float);
    int64_t work = make_tiles(&job);
    cut_tiles(&job, work, (int64_t)((ctx->workspace_bytes - n_bytes) / slot_bytes), n_threads);
    cpu_split_run(ctx, run, &job, work * n_units * 2048);
    return PGD_OK;
}
