/* The arrays of a step: mixed prefill and decode, which rows get logits, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "worker/input_batch.h"

typedef struct rig {
    request_rows *rows;
    kv_tables tables;
    input_batch *batch;
} rig;

/* Groups: full, sliding window of 20, chunks of 24 in blocks of 32, cross. */
static void rig_init(rig *g, int32_t n_groups)
{
    request_rows_opts rows = {.max_rows = 3, .max_tokens = 64, .vocab_size = 1000};
    kv_layout layout = {.n_groups = n_groups,
                        .groups = {{ATTENTION_FULL, 0, 16},
                                   {ATTENTION_SLIDING, 20, 16},
                                   {ATTENTION_CHUNKED, 24, 32},
                                   {ATTENTION_CROSS, 0, 16}}};
    kv_tables_opts tables = {
        .n_rows = 3, .max_tokens = 64, .max_encoder_tokens = 30, .n_blocks = 100};
    assert_int_equal(request_rows_create(&g->rows, &rows), PGD_OK);
    assert_int_equal(kv_tables_init(&g->tables, &layout, &tables), PGD_OK);
    assert_int_equal(input_batch_create(&g->batch, 40, 2), PGD_OK);
    input_batch_reset(g->batch);
}

static void rig_deinit(rig *g)
{
    input_batch_destroy(g->batch);
    kv_tables_deinit(&g->tables);
    request_rows_destroy(g->rows);
}

/* A request of n tokens id * 100, id * 100 + 1, ... with blocks from id * 10 on. */
static int32_t add_request(rig *g, int32_t id, int32_t n, int32_t n_computed, int32_t n_blocks)
{
    token_id tokens[64];
    block_id blocks[4];
    pgd_why why;
    int32_t row;
    for (int32_t i = 0; i < n; i++)
        tokens[i] = id * 100 + i;
    for (int32_t i = 0; i < n_blocks; i++)
        blocks[i] = id * 10 + i;
    new_request_msg m = {.request_id = (uint64_t)id,
                         .n_prompt_tokens = n,
                         .n_tokens = n,
                         .tokens = tokens,
                         .n_computed_tokens = n_computed,
                         .params = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1}};
    assert_int_equal(request_rows_add(g->rows, &row, &m, &why), PGD_OK);
    const block_ids_msg ids = {.n_blocks = {n_blocks}, .ids = {blocks}};
    assert_int_equal(kv_tables_replace(&g->tables, row, &ids, &why), PGD_OK);
    return row;
}

static pgd_err add(rig *g, int32_t row, int32_t n_computed, int32_t n_scheduled, pgd_why *why)
{
    return input_batch_add(g->batch, request_rows_get(g->rows, row), row, n_computed, n_scheduled,
                           &g->tables, why);
}

static void test_input_batch_mixed(void **state)
{
    (void)state;
    rig g;
    pgd_why why;
    rig_init(&g, 1);
    int32_t a = add_request(&g, 1, 40, 14, 3); /* a chunk inside the prompt */
    int32_t b = add_request(&g, 2, 17, 16, 2); /* a decode */
    assert_int_equal(add(&g, a, 14, 5, &why), PGD_OK);
    assert_int_equal(add(&g, b, 16, 1, &why), PGD_OK);
    const input_batch *s = g.batch;
    const int32_t ids[] = {114, 115, 116, 117, 118, 216}, positions[] = {14, 15, 16, 17, 18, 16};
    const int32_t slots[] = {174, 175, 176, 177, 178, 336}, query_start[] = {0, 5, 6},
                  context[] = {19, 17};
    assert_int_equal(s->n_rows, 6);
    assert_int_equal(s->n_seqs, 2);
    assert_memory_equal(s->ids, ids, sizeof(ids));
    assert_memory_equal(s->positions, positions, sizeof(positions));
    assert_memory_equal(s->slots[0], slots, sizeof(slots));
    assert_memory_equal(s->query_start, query_start, sizeof(query_start));
    assert_memory_equal(s->n_context, context, sizeof(context));
    assert_int_equal(s->seq_row[0], a);
    assert_int_equal(s->seq_row[1], b);
    assert_int_equal(s->n_logit_rows, 1);
    assert_int_equal(s->logit_rows[0], 5);
    assert_int_equal(s->logit_seqs[0], b);

    /* The decode's next input is what was sampled; the prompt's last chunk gets logits too. */
    request_rows_get(g.rows, a)->n_computed_tokens = 19;
    request_rows_get(g.rows, b)->n_computed_tokens = 17;
    assert_true(request_rows_append_token(g.rows, b, 777));
    input_batch_reset(g.batch);
    assert_int_equal(add(&g, b, 17, 1, &why), PGD_OK);
    assert_int_equal(add(&g, a, 19, 21, &why), PGD_OK);
    assert_int_equal(s->ids[0], 777);
    assert_int_equal(s->n_logit_rows, 2);
    assert_int_equal(s->logit_rows[1], 21);
    rig_deinit(&g);
}

/* Rows that predict a token of their prompt, for requests that want its logprobs. */
static void test_input_batch_prompt_rows(void **state)
{
    (void)state;
    rig g;
    pgd_why why;
    rig_init(&g, 1);
    int32_t a = add_request(&g, 1, 20, 0, 2), b = add_request(&g, 2, 12, 0, 1);
    const input_batch *s = g.batch;
    request_rows_get(g.rows, b)->params.n_prompt_logprobs_per_token = 2;
    assert_int_equal(add(&g, a, 0, 20, &why), PGD_OK); /* wants none */
    assert_int_equal(add(&g, b, 0, 7, &why), PGD_OK);
    assert_int_equal(s->n_prompt_rows, 7);
    for (int32_t i = 0; i < 7; i++) {
        assert_int_equal(s->prompt_rows[i], 20 + i);
        assert_int_equal(s->prompt_seqs[i], b);
    }
    assert_int_equal(s->n_logit_rows, 1);
    /* The last position of the prompt samples; it predicts no token of the prompt. */
    request_rows_get(g.rows, b)->n_computed_tokens = 7;
    input_batch_reset(g.batch);
    assert_int_equal(s->n_prompt_rows, 0);
    assert_int_equal(add(&g, b, 7, 5, &why), PGD_OK);
    assert_int_equal(s->n_prompt_rows, 4);
    assert_int_equal(s->prompt_rows[3], 3);
    assert_int_equal(s->n_logit_rows, 1);
    assert_int_equal(s->logit_rows[0], 4);
    /* Nor does what was generated. */
    request_rows_get(g.rows, b)->n_computed_tokens = 12;
    assert_true(request_rows_append_token(g.rows, b, 777));
    input_batch_reset(g.batch);
    assert_int_equal(add(&g, b, 12, 1, &why), PGD_OK);
    assert_int_equal(s->n_prompt_rows, 0);
    rig_deinit(&g);
}

static void test_input_batch_refuses(void **state)
{
    (void)state;
    rig g;
    pgd_why why;
    rig_init(&g, 1);
    int32_t a = add_request(&g, 1, 40, 20, 2), b = add_request(&g, 2, 5, 0, 1),
            c = add_request(&g, 3, 5, 0, 1);
    assert_int_equal(add(&g, a, 20, 13, &why), PGD_EPROTO); /* 33 positions, 32 have blocks */
    assert_non_null(
        strstr(why.text, "expected blocks for positions 0 to 32, got blocks for 0 to 31, at row"));
    assert_int_equal(add(&g, a, 21, 1, &why), PGD_EPROTO); /* KV of token 20 is missing */
    assert_int_equal(add(&g, a, 20, 0, &why), PGD_EPROTO);
    assert_int_equal(add(&g, a, -1, 1, &why), PGD_EPROTO);
    assert_int_equal(add(&g, a, 20, 21, &why), PGD_EPROTO);
    assert_int_equal(add(&g, a, 20, INT32_MAX, &why), PGD_EPROTO);
    assert_int_equal(add(&g, b, 0, 6, &why), PGD_EPROTO); /* it has 5 */
    assert_int_equal(g.batch->n_rows, 0);
    assert_int_equal(g.batch->n_seqs, 0);
    assert_int_equal(add(&g, a, 0, 32, &why), PGD_OK); /* computing again is allowed */
    assert_int_equal(add(&g, b, 0, 5, &why), PGD_OK);
    assert_int_equal(add(&g, c, 0, 3, &why), PGD_EPROTO); /* a third request */
    input_batch_reset(g.batch);
    assert_int_equal(add(&g, a, 0, 32, &why), PGD_OK);
    request_rows_get(g.rows, a)->n_computed_tokens = 32;
    assert_int_equal(add(&g, a, 20, 9, &why), PGD_EPROTO); /* 41 tokens */
    rig_deinit(&g);
}

static pgd_err replace(rig *g, int32_t row, const int32_t n_blocks[4], block_id ids[4][4],
                       pgd_why *why)
{
    block_ids_msg m = {0};
    for (int i = 0; i < 4; i++) {
        m.n_blocks[i] = n_blocks[i];
        m.ids[i] = ids[i];
    }
    return kv_tables_replace(&g->tables, row, &m, why);
}

/* Each group has slots of its own; null blocks may stand where no token of the step looks. */
static void test_input_batch_groups(void **state)
{
    (void)state;
    rig g;
    pgd_why why = {0};
    rig_init(&g, 4);
    int32_t row = add_request(&g, 1, 50, 46, 0);
    const int32_t n_blocks[4] = {4, 4, 2, 2};
    block_id ids[4][4] = {{1, 2, 3, 4}, {0, 12, 13, 14}, {21, 22}, {31, 32}};
    assert_int_equal(replace(&g, row, n_blocks, ids, &why), PGD_OK);
    assert_int_equal(add(&g, row, 46, 4, &why), PGD_OK);
    const slot_id slots[3][4] = {{3 * 16 + 14, 3 * 16 + 15, 4 * 16, 4 * 16 + 1},
                                 {13 * 16 + 14, 13 * 16 + 15, 14 * 16, 14 * 16 + 1},
                                 {22 * 32 + 14, 22 * 32 + 15, 22 * 32 + 16, 22 * 32 + 17}};
    for (int i = 0; i < 3; i++)
        assert_memory_equal(g.batch->slots[i], slots[i], sizeof(slots[i]));

    /* Position 46 looks back to 27 through the window, and to the chunk's start at 24. */
    input_batch_reset(g.batch);
    ids[1][1] = 0; /* positions 16 to 31 */
    assert_int_equal(replace(&g, row, n_blocks, ids, &why), PGD_OK);
    assert_int_equal(add(&g, row, 46, 4, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "positions 27 to 49, got blocks for 32 to 63"));
    ids[1][1] = 12;
    ids[2][0] = 0; /* positions 0 to 31 */
    assert_int_equal(replace(&g, row, n_blocks, ids, &why), PGD_OK);
    assert_int_equal(add(&g, row, 46, 4, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "positions 24 to 49, got blocks for 32 to 63"));
    request_rows_get(g.rows, row)->n_computed_tokens = 50; /* a later step may: 48 begins a chunk */
    assert_int_equal(add(&g, row, 48, 2, &why), PGD_OK);
    rig_deinit(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_input_batch_mixed),
        cmocka_unit_test(test_input_batch_prompt_rows),
        cmocka_unit_test(test_input_batch_refuses),
        cmocka_unit_test(test_input_batch_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
