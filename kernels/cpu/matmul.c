/* Driver of the fast matrix products: checks, activations, division of the work.
 *
 * A call has two phases. First the rows of x become what the tiles read: units of quantized values
 * for quantized weights, tiles of [n_in][R] floats for the others (a weight type of each sort in
 * one call gets both). Small inputs are prepared by the caller alone, which is quicker than a run
 * of the pool. Then the threads take work items from a shared counter: an item is a panel times a
 * chunk of row tiles. Row chunks are the outer index, so that the activations of a chunk stay in a
 * core's cache while the panels pass by. What a thread takes at once shrinks towards the end, so
 * that all finish together.
 *
 * A span is one weight and the rows that it multiplies: one for each weight of a plain call, one for
 * each weight and group of a grouped one. The items of all spans form one list, so that many small
 * experts keep all threads busy like one large matrix.
 *
 * Nothing here touches a sum: each output element is computed whole by one tile.
 */
#include <string.h>

#include "common/mem.h"
#include "kernels/cpu/matmul_internal.h"

enum {
    SERIAL_VALUES = 4096,   /* prepared by the caller alone */
    CHUNK_X_BYTES = 262144, /* activations of a row chunk: half of a small L2 */
    ITEMS_PER_THREAD = 8    /* wanted at least, by smaller row chunks */
};

typedef struct run_span {
    matmul_span m;
    int32_t first_row;   /* of the call's */
    bool is_first_float; /* of its group: its row tiles are those of x_f */
    int64_t n_panels;
    int64_t chunk_tiles; /* row tiles per item */
    int64_t first_item;
} run_span;

typedef struct run_job {
    const matmul_args *args;
    const matmul_isa *isa;
    cpu_pool *pool;
    matmul_x_unit *x_q; /* NULL when no weight is quantized */
    float *x_f;         /* NULL when no weight is f32, f16 or bf16 */
    float *scratch;
    run_span *spans;
    int32_t n_spans;
    int64_t n_float_tiles; /* row tiles of x_f */
    int64_t n_items;
} run_job;

const matmul_impl *matmul_get_impl(cpu_isa isa)
{
    if (!cpu_features_has(isa))
        return NULL;
#if defined(__x86_64__)
    const int prefetch = cpu_features_is_amd() ? 0 : 1;
#endif
    switch (isa) {
    case CPU_ISA_REF:
        return &matmul__ref;
#if defined(__x86_64__)
    case CPU_ISA_AVX2:
        return &matmul__avx2[prefetch];
    case CPU_ISA_AVX512:
        return &matmul__avx512[prefetch];
    case CPU_ISA_AVX512VNNI:
        return &matmul__avx512vnni[prefetch];
#endif
    default:
        return NULL;
    }
}

/* Ascending from 0 to n_rows. */
static bool groups_are_sound(const matmul_args *args)
{
    if (args->n_groups < 1 || args->group_start[0] != 0 ||
        args->group_start[args->n_groups] != args->n_rows)
        return false;
    for (int32_t g = 0; g < args->n_groups; g++) {
        if (args->group_start[g] > args->group_start[g + 1])
            return false;
    }
    return true;
}

pgd_err matmul__check(const matmul_args *args, const kernel_ctx *ctx, int32_t layout,
                      size_t workspace_bytes)
{
    if (args->n_weights < 1 || args->n_weights > MATMUL_MAX_WEIGHTS || args->n_rows < 0 ||
        args->n_in < 0 || ctx->workspace_bytes < workspace_bytes)
        return PGD_EINVAL;
    if (args->group_start != NULL && !groups_are_sound(args))
        return PGD_EINVAL;
    for (int32_t j = 0; j < args->n_weights; j++) {
        const packed_weight *w = args->weights[j];
        for (int32_t g = 0; g < matmul__n_groups(args); g++) {
            if (w[g].n_in != args->n_in || w[g].n_out < 0 || w[g].n_out != w[0].n_out ||
                w[g].type != w[0].type || (w[g].layout != layout && w[g].n_out > 0))
                return PGD_EINVAL;
        }
    }
    return PGD_OK;
}

static size_t x_q_bytes(int32_t n_rows, int32_t n_in)
{
    size_t n_units = (size_t)n_rows * ((size_t)n_in / MATMUL_UNIT);
    return PGD_ROUND_UP(n_units * sizeof(matmul_x_unit), 64);
}

static size_t x_f_bytes(int32_t n_rows, int32_t n_in)
{
    return PGD_ROUND_UP((size_t)n_rows * (size_t)n_in * sizeof(float), 64);
}

/* At most one group for each row has any. */
static size_t spans_bytes(int32_t n_rows)
{
    return PGD_ROUND_UP(sizeof(run_span) * MATMUL_MAX_WEIGHTS * (size_t)n_rows, 64);
}

size_t matmul__workspace_bytes(int32_t max_rows, int32_t max_n_in, int32_t n_threads)
{
    return spans_bytes(max_rows) + x_q_bytes(max_rows, max_n_in) + x_f_bytes(max_rows, max_n_in) +
           (size_t)n_threads * MATMUL_SCRATCH_FLOATS * sizeof(float);
}

/* --- phase 1: activations --- */

static void prepare_quantized(const run_job *job, int64_t row)
{
    int32_t n_units = job->args->n_in / MATMUL_UNIT;
    job->isa->quantize(job->x_q + row * n_units, job->args->x + row * job->args->x_stride, n_units);
}

/* The rows of one tile, interleaved. */
static void prepare_float(const run_job *job, const run_span *s, int32_t tile)
{
    int64_t n_in = job->args->n_in;
    int32_t first = s->first_row + matmul__tile_row(&s->m, tile);
    int32_t n_rows = s->first_row + matmul__tile_row(&s->m, tile + 1) - first;
    float *dst = job->x_f + first * n_in;
    for (int32_t r = 0; r < n_rows; r++) {
        const float *src = job->args->x + (first + r) * job->args->x_stride;
        for (int64_t k = 0; k < n_in; k++)
            dst[k * n_rows + r] = src[k];
    }
}

static void prepare_thread(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const run_job *job = arg;
    int64_t n_rows = job->args->n_rows;
    if (job->x_q != NULL) {
        int64_t last = (thread_idx + 1) * n_rows / n_threads;
        for (int64_t row = thread_idx * n_rows / n_threads; row < last; row++)
            prepare_quantized(job, row);
    }
    int64_t first = thread_idx * job->n_float_tiles / n_threads;
    int64_t last = (thread_idx + 1) * job->n_float_tiles / n_threads;
    for (int32_t i = 0; i < job->n_spans && last > 0; i++) {
        const run_span *s = &job->spans[i];
        if (!s->is_first_float)
            continue;
        for (int64_t t = PGD_MAX(first, 0); t < PGD_MIN(last, (int64_t)s->m.n_tiles); t++)
            prepare_float(job, s, (int32_t)t);
        first -= s->m.n_tiles;
        last -= s->m.n_tiles;
    }
}

/* --- phase 2: tiles --- */

static void run_items(const run_job *job, const run_span *s, int64_t item, int64_t n,
                      float *scratch)
{
    while (n > 0) {
        int64_t chunk = item / s->n_panels;
        int64_t panel = item % s->n_panels;
        int64_t n_here = PGD_MIN(n, s->n_panels - panel); /* in the same row chunk */
        int64_t tile = chunk * s->chunk_tiles;
        int64_t tile_last = PGD_MIN(tile + s->chunk_tiles, (int64_t)s->m.n_tiles);
        if (matmul__is_float(s->m.type))
            job->isa->float_panels(&s->m, (int32_t)panel, (int32_t)(panel + n_here), (int32_t)tile,
                                   (int32_t)tile_last, scratch);
        else
            job->isa->quant_panels(&s->m, (int32_t)panel, (int32_t)(panel + n_here), (int32_t)tile,
                                   (int32_t)tile_last);
        item += n_here;
        n -= n_here;
    }
}

static int64_t span_items(const run_span *s)
{
    return s->n_panels * PGD_CEIL_DIV((int64_t)s->m.n_tiles, s->chunk_tiles);
}

/* The span that item is of: the last one that begins there or before. */
static int32_t find_span(const run_job *job, int64_t item)
{
    int32_t lo = 0;
    int32_t hi = job->n_spans;
    while (hi - lo > 1) {
        int32_t mid = lo + (hi - lo) / 2;
        if (job->spans[mid].first_item <= item)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

static void tiles_thread(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const run_job *job = arg;
    float *scratch = job->scratch + (size_t)thread_idx * MATMUL_SCRATCH_FLOATS;
    int64_t first = 0;
    int64_t last = 0;
    for (;;) {
        int64_t chunk = PGD_MAX((job->n_items - last) / (2 * n_threads), 1);
        if (!cpu_pool_next(job->pool, job->n_items, chunk, &first, &last))
            return;
        for (const run_span *s = &job->spans[find_span(job, first)]; first < last; s++) {
            int64_t end = PGD_MIN(s->first_item + span_items(s), last);
            run_items(job, s, first - s->first_item, end - first, scratch);
            first = end;
        }
    }
}

/* Row chunks of s; n_panels: of all spans of the same weight. */
static void choose_chunk(run_span *s, const matmul_isa *isa, int64_t n_panels, int32_t n_threads)
{
    bool is_float = matmul__is_float(s->m.type);
    int32_t tile_rows = is_float ? isa->float_rows : isa->quant_rows;
    int64_t row_bytes = is_float ? 4 * (int64_t)s->m.n_in : 3 * (int64_t)s->m.n_in / 2;
    int64_t max_tiles = CHUNK_X_BYTES / PGD_MAX(row_bytes * tile_rows, 1);
    if (is_float)
        max_tiles = PGD_MIN(max_tiles, MATMUL_CHUNK_ROWS / tile_rows);
    max_tiles = PGD_MAX(max_tiles, 4);
    /* Narrow matrices on many threads: more, smaller row chunks. */
    int64_t wanted = PGD_CEIL_DIV((int64_t)ITEMS_PER_THREAD * n_threads, PGD_MAX(n_panels, 1));
    int64_t fair = PGD_MAX(PGD_CEIL_DIV((int64_t)s->m.n_tiles, wanted), 4);
    s->chunk_tiles = PGD_MIN(max_tiles, fair);
}

/* Weight j for rows [first, last), which are group g's. */
static void add_span(run_job *job, int32_t j, int32_t g, int32_t first, int32_t last)
{
    const matmul_args *args = job->args;
    const packed_weight *w = &args->weights[j][g];
    bool is_float = matmul__is_float(w->type);
    run_span *s = &job->spans[job->n_spans++];
    *s = (run_span){
        .m = {.type = w->type,
              .n_in = args->n_in,
              .n_out = w->n_out,
              .n_rows = last - first,
              .n_tiles = PGD_CEIL_DIV(last - first,
                                      is_float ? job->isa->float_rows : job->isa->quant_rows),
              .w = w->data,
              .panel_bytes = matmul__panel_bytes(w->type, args->n_in),
              .out = args->out[j] + first * args->out_stride[j],
              .out_stride = args->out_stride[j],
              .bias = args->bias[j] != NULL ? args->bias[j] + g * args->bias_stride : NULL,
              .accumulate = args->accumulate,
              .prefetch = job->isa->prefetch},
        .first_row = first,
        .is_first_float = is_float,
        .n_panels = PGD_CEIL_DIV((int64_t)w->n_out, MATMUL_PANEL),
        .first_item = job->n_items,
    };
    if (is_float)
        s->m.x_f = job->x_f + (size_t)first * (size_t)args->n_in;
    else
        s->m.x_q = job->x_q + (size_t)first * ((size_t)args->n_in / MATMUL_UNIT);
    for (int32_t i = 0; i < j; i++)
        s->is_first_float = s->is_first_float && !matmul__is_float(args->weights[i][g].type);
    if (s->is_first_float)
        job->n_float_tiles += s->m.n_tiles;
}

static void add_spans(run_job *job, int32_t n_threads)
{
    const matmul_args *args = job->args;
    int32_t n_groups = matmul__n_groups(args);
    int32_t n_filled = 0;
    for (int32_t g = 0; g < n_groups; g++)
        n_filled += matmul__group_start(args, g) < matmul__group_start(args, g + 1);
    for (int32_t g = 0; g < n_groups; g++) {
        int32_t first = matmul__group_start(args, g);
        int32_t last = matmul__group_start(args, g + 1);
        for (int32_t j = 0; j < args->n_weights && first < last; j++) {
            add_span(job, j, g, first, last);
            run_span *s = &job->spans[job->n_spans - 1];
            choose_chunk(s, job->isa, s->n_panels * n_filled, n_threads);
            job->n_items += span_items(s);
        }
    }
}

pgd_err matmul__run(const matmul_args *args, kernel_ctx *ctx, const matmul_isa *isa)
{
    int32_t n_threads = cpu_pool_n_threads(ctx->pool);
    PGD_TRY(matmul__check(args, ctx, MATMUL_LAYOUT_PANELS,
                          matmul__workspace_bytes(args->n_rows, args->n_in, n_threads)));
    if (args->n_rows == 0)
        return PGD_OK;
    run_job job = {.args = args, .isa = isa, .pool = ctx->pool};
    char *space = ctx->workspace;
    job.spans = (run_span *)(void *)space;
    space += spans_bytes(args->n_rows);
    bool has_float = false;
    for (int32_t j = 0; j < args->n_weights; j++) {
        if (matmul__is_float(args->weights[j]->type))
            has_float = true;
        else
            job.x_q = (matmul_x_unit *)(void *)space;
    }
    space += x_q_bytes(args->n_rows, args->n_in);
    if (has_float)
        job.x_f = (float *)(void *)space;
    space += x_f_bytes(args->n_rows, args->n_in);
    job.scratch = (float *)(void *)space;
    add_spans(&job, n_threads);
    if ((int64_t)args->n_rows * args->n_in <= SERIAL_VALUES)
        prepare_thread(&job, 0, 1);
    else
        cpu_pool_run(ctx->pool, prepare_thread, &job);
    cpu_pool_run(ctx->pool, tiles_thread, &job);
    return PGD_OK;
}
