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

typedef struct run_job {
    const matmul_args *args;
    const matmul_isa *isa;
    cpu_pool *pool;
    matmul_x_unit *x_q; /* NULL when no weight is quantized */
    float *x_f;         /* NULL when no weight is f32, f16 or bf16 */
    float *scratch;
    matmul_span spans[MATMUL_MAX_WEIGHTS];
    int64_t n_panels[MATMUL_MAX_WEIGHTS];
    int64_t chunk_tiles[MATMUL_MAX_WEIGHTS]; /* row tiles per item */
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

pgd_err matmul__check(const matmul_args *args, const kernel_ctx *ctx, int32_t layout,
                      size_t workspace_bytes)
{
    if (args->n_weights < 1 || args->n_weights > MATMUL_MAX_WEIGHTS || args->n_rows < 0 ||
        args->n_in < 0 || ctx->workspace_bytes < workspace_bytes)
        return PGD_EINVAL;
    for (int32_t j = 0; j < args->n_weights; j++) {
        const packed_weight *w = args->weights[j];
        if (w->n_in != args->n_in || w->n_out < 0 || (w->layout != layout && w->n_out > 0))
            return PGD_EINVAL;
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

size_t matmul__workspace_bytes(int32_t max_rows, int32_t max_n_in, int32_t n_threads)
{
    return x_q_bytes(max_rows, max_n_in) + x_f_bytes(max_rows, max_n_in) +
           (size_t)n_threads * MATMUL_SCRATCH_FLOATS * sizeof(float);
}

/* --- phase 1: activations --- */

static void prepare_quantized(const run_job *job, int64_t row)
{
    int32_t n_units = job->args->n_in / MATMUL_UNIT;
    job->isa->quantize(job->x_q + row * n_units, job->args->x + row * job->args->x_stride, n_units);
}

/* The rows of one tile, interleaved. */
static void prepare_float(const run_job *job, const matmul_span *span, int32_t tile)
{
    int64_t n_in = job->args->n_in;
    int32_t first = matmul__tile_row(span, tile);
    int32_t n_rows = matmul__tile_row(span, tile + 1) - first;
    float *dst = job->x_f + first * n_in;
    for (int32_t r = 0; r < n_rows; r++) {
        const float *src = job->args->x + (first + r) * job->args->x_stride;
        for (int64_t k = 0; k < n_in; k++)
            dst[k * n_rows + r] = src[k];
    }
}

static const matmul_span *find_float_span(const run_job *job)
{
    for (int32_t j = 0; j < job->args->n_weights; j++) {
        if (matmul__is_float(job->spans[j].type))
            return &job->spans[j];
    }
    return NULL;
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
    const matmul_span *span = find_float_span(job);
    if (span != NULL && job->x_f != NULL) {
        int64_t last = (int64_t)(thread_idx + 1) * span->n_tiles / n_threads;
        for (int64_t t = (int64_t)thread_idx * span->n_tiles / n_threads; t < last; t++)
            prepare_float(job, span, (int32_t)t);
    }
}

/* --- phase 2: tiles --- */

static void run_items(const run_job *job, int32_t j, int64_t item, int64_t n, float *scratch)
{
    const matmul_span *span = &job->spans[j];
    while (n > 0) {
        int64_t chunk = item / job->n_panels[j];
        int64_t panel = item % job->n_panels[j];
        int64_t n_here = PGD_MIN(n, job->n_panels[j] - panel); /* in the same row chunk */
        int64_t tile = chunk * job->chunk_tiles[j];
        int64_t tile_last = PGD_MIN(tile + job->chunk_tiles[j], (int64_t)span->n_tiles);
        if (matmul__is_float(span->type))
            job->isa->float_panels(span, (int32_t)panel, (int32_t)(panel + n_here), (int32_t)tile,
                                   (int32_t)tile_last, scratch);
        else
            job->isa->quant_panels(span, (int32_t)panel, (int32_t)(panel + n_here), (int32_t)tile,
                                   (int32_t)tile_last);
        item += n_here;
        n -= n_here;
    }
}

static int64_t span_items(const run_job *job, int32_t j)
{
    return job->n_panels[j] * PGD_CEIL_DIV((int64_t)job->spans[j].n_tiles, job->chunk_tiles[j]);
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
        int64_t base = 0; /* first item of weight j */
        for (int32_t j = 0; j < job->args->n_weights; j++) {
            int64_t end = base + span_items(job, j);
            int64_t from = PGD_MAX(first, base);
            int64_t to = PGD_MIN(last, end);
            if (from < to)
                run_items(job, j, from - base, to - from, scratch);
            base = end;
        }
    }
}

static void init_span(run_job *job, int32_t j, int32_t n_threads)
{
    const matmul_args *args = job->args;
    const packed_weight *w = args->weights[j];
    bool is_float = matmul__is_float(w->type);
    int32_t tile_rows = is_float ? job->isa->float_rows : job->isa->quant_rows;
    matmul_span *span = &job->spans[j];
    *span = (matmul_span){
        .type = w->type,
        .n_in = args->n_in,
        .n_out = w->n_out,
        .n_rows = args->n_rows,
        .n_tiles = PGD_CEIL_DIV(args->n_rows, tile_rows),
        .w = w->data,
        .panel_bytes = matmul__panel_bytes(w->type, args->n_in),
        .x_q = job->x_q,
        .x_f = job->x_f,
        .out = args->out[j],
        .out_stride = args->out_stride[j],
        .bias = args->bias[j],
        .accumulate = args->accumulate,
        .prefetch = job->isa->prefetch,
    };
    job->n_panels[j] = PGD_CEIL_DIV((int64_t)w->n_out, MATMUL_PANEL);
    int64_t row_bytes = is_float ? 4 * (int64_t)args->n_in : 3 * (int64_t)args->n_in / 2;
    int64_t max_tiles = CHUNK_X_BYTES / PGD_MAX(row_bytes * tile_rows, 1);
    if (is_float)
        max_tiles = PGD_MIN(max_tiles, MATMUL_CHUNK_ROWS / tile_rows);
    max_tiles = PGD_MAX(max_tiles, 4);
    /* Narrow matrices on many threads: more, smaller row chunks. */
    int64_t wanted =
        PGD_CEIL_DIV((int64_t)ITEMS_PER_THREAD * n_threads, PGD_MAX(job->n_panels[j], 1));
    int64_t fair = PGD_MAX(PGD_CEIL_DIV((int64_t)span->n_tiles, wanted), 4);
    job->chunk_tiles[j] = PGD_MIN(max_tiles, fair);
    job->n_items += span_items(job, j);
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
    for (int32_t j = 0; j < args->n_weights; j++)
        init_span(&job, j, n_threads);
    if ((int64_t)args->n_rows * args->n_in <= SERIAL_VALUES)
        prepare_thread(&job, 0, 1);
    else
        cpu_pool_run(ctx->pool, prepare_thread, &job);
    cpu_pool_run(ctx->pool, tiles_thread, &job);
    return PGD_OK;
}
