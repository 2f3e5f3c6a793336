/* A decoder with everything it works on and no worker around it: one request at a time, logits of
 * every token or of the last one.
 *
 * Owns:    all it holds, from decoder_rig_open to decoder_rig_close; logits are a borrow until the
 *          next forward
 * Limits:  one request of max_context tokens, at most max_rows of them in a forward
 * Thread:  one
 */
#ifndef TESTS_UNIT_DECODER_RIG_H
#define TESTS_UNIT_DECODER_RIG_H

#include <string.h>

#include "common/mem.h"
#include "tests/unit/one_group.h"
#include "worker/model/decoder.h"
#include "worker/model/model_ops.h"

enum { DECODER_RIG_BLOCK_SIZE = 16, DECODER_RIG_N_THREADS = 2 };

typedef struct decoder_rig_opts {
    cpu_isa isa;
    const matmul_impl *matmul; /* instead of the level's own; NULL = that */
    int32_t max_rows;
    int32_t max_context;    /* a multiple of the block size */
    int32_t max_logit_rows; /* 0 = max_rows */
    dtype kv_type;
} decoder_rig_opts;

typedef struct decoder_rig {
    decoder_rig_opts opts;
    model_file *file;
    const model_config *cfg;
    cpu_pool *pool;
    kernel_ops ops;
    kernel_ctx ctx;
    weights *w;
    decoder *decoder;
    request_rows *rows;
    input_batch *batch;
    kv_cache *kv;
    kv_tables tables;
    int32_t row; /* the request's */
    uint64_t progress;
} decoder_rig;

/* Fails the test, with the why, when the condition does not hold. */
#define DECODER_RIG_CHECK(ok, why)               \
    do {                                         \
        if (!(ok))                               \
            fail_msg("%s: %s", #ok, (why).text); \
    } while (0)

static inline void decoder_rig_create_state(decoder_rig *g)
{
    const decoder_rig_opts *o = &g->opts;
    const model_config *cfg = g->cfg;
    pgd_why why = {{0}};
    decoder_opts opts = {.cfg = cfg,
                         .w = g->w,
                         .ops = &g->ops,
                         .max_rows = o->max_rows,
                         .max_seqs = o->max_logit_rows,
                         .max_positions = o->max_context};
    DECODER_RIG_CHECK(decoder_create(&g->decoder, &opts, &why) == PGD_OK, why);
    request_rows_opts row_opts = {
        .max_rows = 1, .max_tokens = o->max_context, .vocab_size = cfg->vocab_size};
    DECODER_RIG_CHECK(request_rows_create(&g->rows, &row_opts) == PGD_OK, why);
    DECODER_RIG_CHECK(input_batch_create(&g->batch, o->max_rows, o->max_logit_rows) == PGD_OK, why);
    kv_page_layout page = {.type = o->kv_type,
                           .n_kv_heads = cfg->n_kv_heads,
                           .head_dim = cfg->head_dim,
                           .block_size = DECODER_RIG_BLOCK_SIZE};
    int32_t n_blocks = o->max_context / DECODER_RIG_BLOCK_SIZE + 1;
    int32_t token_bytes = (int32_t)kv_page_bytes(&page) / DECODER_RIG_BLOCK_SIZE;
    load_done_msg done = {.n_kv_layers = cfg->n_layers};
    for (int32_t i = 0; i < cfg->n_layers; i++)
        done.kv_layers[i].token_bytes = token_bytes;
    kv_layout layout = one_group(&done, DECODER_RIG_BLOCK_SIZE);
    DECODER_RIG_CHECK(kv_cache_create(&g->kv, &page, &layout, n_blocks, &why) == PGD_OK, why);
    kv_tables_opts tables = {.n_rows = 1, .max_tokens = o->max_context, .n_blocks = n_blocks};
    DECODER_RIG_CHECK(kv_tables_init(&g->tables, &layout, &tables) == PGD_OK, why);
    attention_limits limits = {.max_rows = o->max_rows,
                               .max_seqs = 1,
                               .max_context = o->max_context,
                               .n_heads = cfg->n_heads,
                               .kv = page,
                               .n_threads = DECODER_RIG_N_THREADS};
    size_t n_bytes =
        PGD_MAX(model_ops_workspace_bytes(cfg, o->max_rows, DECODER_RIG_N_THREADS, &g->ops),
                g->ops.attention_workspace_bytes(&limits));
    g->ctx = (kernel_ctx){.pool = g->pool, .workspace_bytes = PGD_MAX(n_bytes, 64)};
    g->ctx.workspace = mem_alloc_aligned(g->ctx.workspace_bytes, 64);
    DECODER_RIG_CHECK(g->ctx.workspace != NULL, why);
}

static inline void decoder_rig_open(decoder_rig *g, const char *path, const decoder_rig_opts *opts)
{
    const kernel_ops *ops;
    pgd_why why = {{0}};
    memset(g, 0, sizeof(*g));
    g->opts = *opts;
    if (opts->max_logit_rows == 0)
        g->opts.max_logit_rows = opts->max_rows;
    assert_int_equal(opts->max_context % DECODER_RIG_BLOCK_SIZE, 0);
    DECODER_RIG_CHECK(model_file_open(&g->file, path, &why) == PGD_OK, why);
    g->cfg = model_file_get_config(g->file);
    DECODER_RIG_CHECK(cpu_pool_create(&g->pool, DECODER_RIG_N_THREADS, false) == PGD_OK, why);
    DECODER_RIG_CHECK(ops_cpu_get(&ops, opts->isa) == PGD_OK, why);
    g->ops = *ops;
    if (opts->matmul != NULL)
        g->ops.matmul = opts->matmul;
    DECODER_RIG_CHECK(
        weights_load(&g->w, g->file, g->ops.matmul, g->pool, NULL, NULL, &why) == PGD_OK, why);
    decoder_rig_create_state(g);
}

static inline void decoder_rig_close(decoder_rig *g)
{
    mem_free_aligned(g->ctx.workspace, g->ctx.workspace_bytes);
    kv_tables_deinit(&g->tables);
    kv_cache_destroy(g->kv);
    input_batch_destroy(g->batch);
    request_rows_destroy(g->rows);
    decoder_destroy(g->decoder);
    weights_destroy(g->w);
    cpu_pool_destroy(g->pool);
    model_file_close(g->file);
}

/* Forgets the last request and begins one with these tokens. */
static inline void decoder_rig_start(decoder_rig *g, const token_id *tokens, int32_t n)
{
    pgd_why why = {{0}};
    new_request_msg msg = {.request_id = 1,
                           .n_prompt_tokens = n,
                           .n_tokens = n,
                           .tokens = tokens,
                           .n_scheduled_tokens = n,
                           .params = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1}};
    (void)request_rows_release(g->rows, 1);
    DECODER_RIG_CHECK(request_rows_add(g->rows, &g->row, &msg, &why) == PGD_OK, why);
    int32_t n_ids = g->opts.max_context / DECODER_RIG_BLOCK_SIZE;
    block_id *ids = mem_calloc((size_t)n_ids, sizeof(*ids));
    DECODER_RIG_CHECK(ids != NULL, why);
    for (int32_t i = 0; i < n_ids; i++)
        ids[i] = n_ids - i; /* spread backwards over the pool */
    const block_ids_msg blocks = {.n_blocks = {n_ids}, .ids = {ids}};
    DECODER_RIG_CHECK(kv_tables_replace(&g->tables, g->row, &blocks, &why) == PGD_OK, why);
    mem_free(ids);
}

/* Puts the next n tokens into the batch. */
static inline void decoder_rig_fill_batch(decoder_rig *g, int32_t n)
{
    request_row *r = request_rows_get(g->rows, g->row);
    pgd_why why = {{0}};
    input_batch_reset(g->batch);
    int32_t first = r->last_step == 0 ? 0 : r->n_computed_tokens;
    r->n_computed_tokens = first;
    DECODER_RIG_CHECK(input_batch_add(g->batch, r, g->row, first, n, &g->tables, &why) == PGD_OK,
                      why);
    r->n_computed_tokens = first + n;
    r->last_step = 1;
}

/* Computes the batch; returns the logits of its logit rows. */
static inline const float *decoder_rig_compute(decoder_rig *g)
{
    float *logits = NULL;
    assert_int_equal(
        decoder_forward(g->decoder, &logits, g->batch, &g->tables, g->kv, &g->ctx, &g->progress),
        PGD_OK);
    return logits;
}

/* Computes the next n tokens; returns the logits [n, vocab_size] after each of them. */
static inline const float *decoder_rig_forward(decoder_rig *g, int32_t n)
{
    input_batch *b = g->batch;
    decoder_rig_fill_batch(g, n);
    for (int32_t i = 0; i < n; i++) {
        b->logit_rows[i] = i;
        b->logit_seqs[i] = g->row;
    }
    b->n_logit_rows = n;
    return decoder_rig_compute(g);
}

/* Computes all that is known and not computed; returns the logits after the last token. */
static inline const float *decoder_rig_catch_up(decoder_rig *g)
{
    const request_row *r = request_rows_get(g->rows, g->row);
    decoder_rig_fill_batch(g, r->n_tokens - (r->last_step == 0 ? 0 : r->n_computed_tokens));
    assert_int_equal(g->batch->n_logit_rows, 1);
    return decoder_rig_compute(g);
}

#endif
