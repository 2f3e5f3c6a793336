/* The encoder-decoder model against Hugging Face transformers: logits at chosen positions and 64
 * greedy tokens for each encoder input, at every instruction-set level of this machine; decoder
 * prompts are cut at the recorded positions. Several inputs in one step, and pages of 16-bit values,
 * give the bits that each gives alone. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/file.h"
#include "common/mem.h"
#include "common/thread.h"
#include "tests/unit/one_group.h"
#include "worker/model/encdec.h"

#define MODEL       "tests/data/models/bart-tiny"
#define GOLDEN_FILE "tests/golden/encdec/bart-tiny.bin"
#define MAX_ERROR   1e-4 /* of the range of the logits */

enum { BLOCK_SIZE = 16, N_THREADS = 2, MAX_SEQS = 6, MAX_ENCODER_ROWS = 800, MAX_ROWS = 400 };

/* --- golden file ------------------------------------------------------------------------------ */

typedef struct golden_case {
    uint32_t n_encoder, n_prompt, n_positions, n_greedy;
    float range;
    const uint32_t *encoder, *prompt, *position, *greedy;
    const float *margin, *logits;
} golden_case;

typedef struct golden {
    char *data;
    uint32_t n_cases, vocab_size;
    golden_case cases[16];
} golden;

static const uint8_t *take(const uint8_t **at, const uint8_t *end, size_t n_bytes)
{
    const uint8_t *data = *at;
    assert_true(n_bytes <= (size_t)(end - data));
    *at += n_bytes;
    return data;
}

static uint32_t take_u32(const uint8_t **at, const uint8_t *end)
{
    uint32_t value;
    memcpy(&value, take(at, end, 4), 4);
    return value;
}

static void golden_open(golden *g)
{
    size_t n_bytes;
    pgd_why why = {{0}};
    if (file_read(&g->data, &n_bytes, GOLDEN_FILE, (size_t)1 << 20, &why) != PGD_OK)
        fail_msg("%s", why.text);
    const uint8_t *at = (const uint8_t *)g->data, *end = at + n_bytes;
    assert_memory_equal(take(&at, end, 8), "PGENCDE1", 8);
    g->n_cases = take_u32(&at, end);
    g->vocab_size = take_u32(&at, end);
    assert_in_range(g->n_cases, 1, PGD_ARRAY_LEN(g->cases));
    for (uint32_t i = 0; i < g->n_cases; i++) {
        golden_case *c = &g->cases[i];
        c->n_encoder = take_u32(&at, end);
        c->n_prompt = take_u32(&at, end);
        c->n_positions = take_u32(&at, end);
        c->n_greedy = take_u32(&at, end);
        memcpy(&c->range, take(&at, end, 4), 4);
        c->encoder = (const void *)take(&at, end, (size_t)4 * c->n_encoder);
        c->prompt = (const void *)take(&at, end, (size_t)4 * c->n_prompt);
        c->position = (const void *)take(&at, end, (size_t)4 * c->n_positions);
        c->greedy = (const void *)take(&at, end, (size_t)4 * c->n_greedy);
        c->margin = (const void *)take(&at, end, (size_t)4 * c->n_greedy);
        c->logits = (const void *)take(&at, end, (size_t)4 * c->n_positions * g->vocab_size);
    }
    assert_ptr_equal(at, end);
}

/* --- a model at work -------------------------------------------------------------------------- */

typedef struct rig {
    model_file *file;
    const model_config *cfg;
    cpu_pool *pool;
    const kernel_ops *ops;
    kernel_ctx ctx;
    weights *w;
    encdec *model;
    request_rows *rows;
    input_batch *batch;
    kv_cache *kv;
    kv_tables tables;
    int32_t rows_of[MAX_SEQS];
    uint64_t progress;
} rig;

#define CHECK(ok, why)                           \
    do {                                         \
        if (!(ok))                               \
            fail_msg("%s: %s", #ok, (why).text); \
    } while (0)

static void rig_create_kv(rig *g, const kv_page_layout *page)
{
    static kv_groups groups;
    pgd_why why = {{0}};
    kv_layer_spec layers[16];
    int32_t n = g->cfg->n_layers, token_bytes = (int32_t)kv_page_bytes(page) / BLOCK_SIZE;
    for (int32_t i = 0; i < 2 * n; i++)
        layers[i] = (kv_layer_spec){i < n ? ATTENTION_FULL : ATTENTION_CROSS, 0, token_bytes};
    kv_groups_opts opts = {.block_size = BLOCK_SIZE,
                           .max_encoder_tokens = g->cfg->encdec.max_source,
                           .is_hybrid = true};
    CHECK(kv_groups_init(&groups, layers, 2 * n, &opts, &why) == PGD_OK, why);
    assert_int_equal(groups.layout.n_groups, 2);
    int32_t n_blocks = 2 * MAX_SEQS * PGD_CEIL_DIV(g->cfg->max_context, BLOCK_SIZE) + 1;
    CHECK(kv_cache_create(&g->kv, page, &groups.layout, n_blocks, &why) == PGD_OK, why);
    kv_tables_opts tables = {.n_rows = MAX_SEQS,
                             .max_tokens = g->cfg->max_context,
                             .max_encoder_tokens = g->cfg->encdec.max_source,
                             .n_blocks = n_blocks};
    CHECK(kv_tables_init(&g->tables, &groups.layout, &tables) == PGD_OK, why);
}

static void rig_open(rig *g, cpu_isa isa, dtype kv_type)
{
    pgd_why why = {{0}};
    memset(g, 0, sizeof(*g));
    CHECK(model_file_open(&g->file, MODEL, &why) == PGD_OK, why);
    g->cfg = model_file_get_config(g->file);
    CHECK(cpu_pool_create(&g->pool, N_THREADS, false) == PGD_OK, why);
    CHECK(ops_cpu_get(&g->ops, isa) == PGD_OK, why);
    CHECK(weights_load(&g->w, g->file, g->ops->matmul, g->pool, NULL, NULL, &why) == PGD_OK, why);
    encdec_opts opts = {.cfg = g->cfg,
                        .w = g->w,
                        .ops = g->ops,
                        .max_rows = MAX_ROWS,
                        .max_seqs = MAX_SEQS,
                        .max_encoder_rows = MAX_ENCODER_ROWS};
    CHECK(encdec_create(&g->model, &opts, &why) == PGD_OK, why);
    request_rows_opts rows = {.max_rows = MAX_SEQS,
                              .max_tokens = g->cfg->max_context,
                              .max_encoder_tokens = g->cfg->encdec.max_source,
                              .vocab_size = g->cfg->vocab_size};
    CHECK(request_rows_create(&g->rows, &rows) == PGD_OK, why);
    CHECK(input_batch_create(&g->batch, MAX_ROWS, MAX_SEQS) == PGD_OK, why);
    CHECK(input_batch_create_encoder(g->batch, MAX_ENCODER_ROWS) == PGD_OK, why);
    kv_page_layout page = {.type = kv_type,
                           .n_kv_heads = g->cfg->n_kv_heads,
                           .head_dim = g->cfg->head_dim,
                           .block_size = BLOCK_SIZE};
    rig_create_kv(g, &page);
    attention_limits limits = {.max_rows = MAX_ROWS,
                               .max_seqs = MAX_SEQS,
                               .max_context = g->cfg->max_context,
                               .n_heads = g->cfg->n_heads,
                               .kv = page,
                               .n_threads = N_THREADS};
    size_t n_bytes = PGD_MAX(g->ops->attention_workspace_bytes(&limits),
                             encdec_workspace_bytes(g->model, &limits));
    g->ctx = (kernel_ctx){.pool = g->pool, .workspace_bytes = PGD_MAX(n_bytes, 64)};
    g->ctx.workspace = mem_alloc_aligned(g->ctx.workspace_bytes, 64);
    assert_non_null(g->ctx.workspace);
}

static void rig_close(rig *g)
{
    mem_free_aligned(g->ctx.workspace, g->ctx.workspace_bytes);
    kv_tables_deinit(&g->tables);
    kv_cache_destroy(g->kv);
    input_batch_destroy(g->batch);
    request_rows_destroy(g->rows);
    encdec_destroy(g->model);
    weights_destroy(g->w);
    cpu_pool_destroy(g->pool);
    model_file_close(g->file);
}

/* Puts sequence seq into the (reset) batch as a new request with n tokens of the case's decoder
 * prompt, all its blocks at hand. */
static void rig_start(rig *g, int32_t seq, const golden_case *c, int32_t n)
{
    pgd_why why = {{0}};
    new_request_msg msg = {.request_id = (uint64_t)seq + 1,
                           .n_prompt_tokens = n,
                           .n_tokens = n,
                           .tokens = (const token_id *)c->prompt,
                           .n_scheduled_tokens = n,
                           .n_encoder_tokens = (int32_t)c->n_encoder,
                           .encoder_tokens = (const token_id *)c->encoder,
                           .params = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1}};
    (void)request_rows_release(g->rows, msg.request_id);
    CHECK(request_rows_add(g->rows, &g->rows_of[seq], &msg, &why) == PGD_OK, why);
    int32_t n_each = PGD_CEIL_DIV(g->cfg->max_context, BLOCK_SIZE);
    block_id ids[2][64];
    for (int32_t i = 0; i < n_each; i++) { /* spread over the pool, backwards and forwards */
        ids[0][i] = 1 + (i * MAX_SEQS + seq) * 2;
        ids[1][n_each - 1 - i] = 2 + (i * MAX_SEQS + seq) * 2;
    }
    msg.blocks = (block_ids_msg){.n_blocks = {n_each, PGD_CEIL_DIV(msg.n_encoder_tokens, 16)},
                                 .ids = {ids[0], ids[1]}};
    CHECK(kv_tables_replace(&g->tables, g->rows_of[seq], &msg.blocks, &why) == PGD_OK, why);
    request_row *r = request_rows_get(g->rows, g->rows_of[seq]);
    CHECK(input_batch_add_encoder(g->batch, r, g->rows_of[seq], msg.encoder_tokens, &g->tables,
                                  &why) == PGD_OK,
          why);
    CHECK(input_batch_add(g->batch, r, g->rows_of[seq], 0, n, &g->tables, &why) == PGD_OK, why);
    r->n_computed_tokens = n;
}

/* Adds what sequence seq has not computed yet. */
static void rig_continue(rig *g, int32_t seq)
{
    pgd_why why = {{0}};
    request_row *r = request_rows_get(g->rows, g->rows_of[seq]);
    CHECK(input_batch_add(g->batch, r, g->rows_of[seq], r->n_computed_tokens,
                          r->n_tokens - r->n_computed_tokens, &g->tables, &why) == PGD_OK,
          why);
    r->n_computed_tokens = r->n_tokens;
}

static const float *rig_compute(rig *g)
{
    float *logits = NULL;
    assert_int_equal(
        encdec_forward(g->model, &logits, g->batch, &g->tables, g->kv, &g->ctx, &g->progress),
        PGD_OK);
    input_batch_reset(g->batch);
    return logits;
}

static int32_t arg_max(const float *x, int32_t n)
{
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    return best;
}

/* --- against transformers --------------------------------------------------------------------- */

static double compare_case(rig *g, const golden_case *c, const char *label)
{
    int32_t vocab_size = g->cfg->vocab_size;
    double worst = 0;
    const float *logits = NULL;
    for (uint32_t i = 0; i < c->n_positions; i++) {
        if (i == 0) {
            rig_start(g, 0, c, (int32_t)c->position[0] + 1);
        } else {
            for (uint32_t p = c->position[i - 1] + 1; p <= c->position[i]; p++)
                assert_true(
                    request_rows_append_token(g->rows, g->rows_of[0], (token_id)c->prompt[p]));
            rig_continue(g, 0);
        }
        logits = rig_compute(g);
        const float *want = c->logits + (size_t)i * (size_t)vocab_size;
        for (int32_t k = 0; k < vocab_size; k++) {
            double error = fabs((double)logits[k] - want[k]) / c->range;
            if (!(error <= MAX_ERROR))
                fail_msg("%s: logit %d at position %u differs by %g of the range", label, k,
                         c->position[i], error);
            worst = PGD_MAX(worst, error);
        }
    }
    for (uint32_t i = 0; i < c->n_greedy; i++) {
        int32_t token = arg_max(logits, vocab_size);
        if (token != (int32_t)c->greedy[i])
            fail_msg("%s: greedy token %u is %d, expected %u (margin %g)", label, i, token,
                     c->greedy[i], c->margin[i]);
        assert_true(request_rows_append_token(g->rows, g->rows_of[0], token));
        rig_continue(g, 0);
        logits = rig_compute(g);
    }
    return worst;
}

static void test_encdec_golden(void **state)
{
    (void)state;
    golden gold;
    golden_open(&gold);
    for (int isa = CPU_ISA_REF; isa <= CPU_ISA_NEON; isa++) {
        const kernel_ops *ops;
        char label[64];
        if (ops_cpu_get(&ops, (cpu_isa)isa) != PGD_OK)
            continue;
        rig g;
        double worst = 0;
        rig_open(&g, (cpu_isa)isa, DTYPE_F32);
        assert_int_equal(g.cfg->vocab_size, gold.vocab_size);
        for (uint32_t i = 0; i < gold.n_cases; i++) {
            (void)snprintf(label, sizeof(label), "%u encoder tokens at %s", gold.cases[i].n_encoder,
                           cpu_features_name((cpu_isa)isa));
            double error = compare_case(&g, &gold.cases[i], label);
            worst = PGD_MAX(worst, error);
        }
        print_message("%s: %u cases, largest error %.2g of the range\n",
                      cpu_features_name((cpu_isa)isa), gold.n_cases, worst);
        rig_close(&g);
    }
    mem_free(gold.data);
}

/* --- I1 --------------------------------------------------------------------------------------- */

/* Logits of 12 steps of each case, alone and in a batch that grows by a request a step. */
static void compare_batches(cpu_isa isa, dtype kv_type, const golden *gold)
{
    enum { N_STEPS = 12, N = 5 };
    rig g;
    rig_open(&g, isa, kv_type);
    int32_t vocab_size = g.cfg->vocab_size;
    size_t n_floats = (size_t)N * N_STEPS * (size_t)vocab_size;
    float *want = mem_calloc(n_floats, sizeof(float));
    assert_non_null(want);
    for (int32_t s = 0; s < N; s++) {
        const golden_case *c = &gold->cases[s];
        for (int32_t k = 0; k < N_STEPS; k++) {
            if (k == 0)
                rig_start(&g, s, c, (int32_t)c->n_prompt);
            else
                rig_continue(&g, s);
            const float *logits = rig_compute(&g);
            memcpy(want + (s * N_STEPS + k) * vocab_size, logits,
                   (size_t)vocab_size * sizeof(float));
            assert_true(
                request_rows_append_token(g.rows, g.rows_of[s], arg_max(logits, vocab_size)));
        }
    }
    /* Two begin in step 0, then one each step: encoder passes beside decoding requests. */
    for (int32_t step = 0; step < N_STEPS + N - 2; step++) {
        int32_t seqs[N], steps[N], n = 0;
        for (int32_t s = N - 1; s >= 0; s--) {
            int32_t k = step - PGD_MAX(s - 1, 0);
            if (k < 0 || k >= N_STEPS)
                continue;
            if (k == 0)
                rig_start(&g, s, &gold->cases[s], (int32_t)gold->cases[s].n_prompt);
            else
                rig_continue(&g, s);
            seqs[n] = s;
            steps[n++] = k;
        }
        const float *logits = rig_compute(&g);
        for (int32_t i = 0; i < n; i++) {
            const float *got = logits + (int64_t)i * vocab_size;
            if (memcmp(got, want + (seqs[i] * N_STEPS + steps[i]) * vocab_size,
                       (size_t)vocab_size * sizeof(float)) != 0)
                fail_msg("%s: step %d of case %d differs in a batch of %d", g.ops->name, steps[i],
                         seqs[i], n);
            assert_true(
                request_rows_append_token(g.rows, g.rows_of[seqs[i]], arg_max(got, vocab_size)));
        }
    }
    mem_free(want);
    rig_close(&g);
}

static void test_encdec_any_batch(void **state)
{
    (void)state;
    golden gold;
    golden_open(&gold);
    for (int isa = CPU_ISA_REF; isa <= CPU_ISA_NEON; isa++) {
        const kernel_ops *ops;
        if (ops_cpu_get(&ops, (cpu_isa)isa) != PGD_OK)
            continue;
        compare_batches((cpu_isa)isa, isa % 2 ? DTYPE_F16 : DTYPE_F32, &gold);
    }
    mem_free(gold.data);
}

static void test_encdec_refuses_small_buffers(void **state)
{
    (void)state;
    rig g;
    pgd_why why = {{0}};
    encdec *other;
    rig_open(&g, CPU_ISA_REF, DTYPE_F32);
    encdec_opts opts = {.cfg = g.cfg,
                        .w = g.w,
                        .ops = g.ops,
                        .max_rows = 4,
                        .max_seqs = 1,
                        .max_encoder_rows = g.cfg->encdec.max_source - 1};
    assert_int_equal(encdec_create(&other, &opts, &why), PGD_EINVAL);
    assert_null(other);
    rig_close(&g);
}

int main(void)
{
    thread_set_flush_denormals();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_encdec_golden),
        cmocka_unit_test(test_encdec_any_batch),
        cmocka_unit_test(test_encdec_refuses_small_buffers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
