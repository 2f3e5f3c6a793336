/* The runner against the protocol: what it refuses, what an error of one request costs the others,
 * steps in flight. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <unistd.h>

#include <cmocka.h>

#include "common/file.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/model/model_file.h"
#include "tests/unit/one_group.h"
#include "worker/model_runner.h"

#define MODEL "tests/data/models/mistral-tiny/mistral-tiny.f32.gguf"

enum { BLOCK_SIZE = 16, N_BLOCKS = 12, MAX_SEQS = 3, MAX_BATCHED = 32, MAX_LEN = 48 };

static load_msg load_message(const char *path)
{
    load_msg m = {.kv_dtype = DTYPE_F16,
                  .block_size = BLOCK_SIZE,
                  .max_model_len = MAX_LEN,
                  .max_num_seqs = MAX_SEQS,
                  .max_num_batched_tokens = MAX_BATCHED,
                  .max_logprobs = 5,
                  .n_threads = 2};
    (void)snprintf(m.model_path, sizeof(m.model_path), "%s", path);
    return m;
}

static step_runner *make(const char *path)
{
    step_runner *r;
    pgd_why why = {{0}};
    load_msg load = load_message(path);
    load_done_msg done;
    kv_ready_msg ready;
    if (model_runner_create(&r, "cpu", &why) != PGD_OK ||
        r->vtbl->load(r, &load, &done, NULL, NULL, &why) != PGD_OK)
        fail_msg("%s", why.text);
    kv_config_msg kv = one_group_config(&done, BLOCK_SIZE, N_BLOCKS);
    if (r->vtbl->init_kv(r, &kv, &ready, &why) != PGD_OK)
        fail_msg("%s", why.text);
    return r;
}

static new_request_msg new_request(uint64_t id, const token_id *tokens, int32_t n,
                                   const block_id *blocks, int32_t n_blocks)
{
    return (new_request_msg){.request_id = id,
                             .request_epoch = 1,
                             .n_prompt_tokens = n,
                             .n_tokens = n,
                             .tokens = tokens,
                             .n_scheduled_tokens = n,
                             .params = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1},
                             .blocks = {{n_blocks}, {blocks}}};
}

static scheduler_output message(const new_request_msg *new_requests, int32_t n_new,
                                const cached_request_msg *cached, int32_t n_cached)
{
    scheduler_output out = {.step_id = 1,
                            .n_groups = 1,
                            .new_requests = new_requests,
                            .n_new = n_new,
                            .cached_requests = cached,
                            .n_cached = n_cached};
    for (int32_t i = 0; i < n_new; i++)
        out.total_scheduled_tokens += new_requests[i].n_scheduled_tokens;
    for (int32_t i = 0; i < n_cached; i++)
        out.total_scheduled_tokens += cached[i].n_scheduled_tokens;
    return out;
}

static step_result step(step_runner *r, const scheduler_output *m)
{
    step_result result;
    pgd_why why = {{0}};
    if (r->vtbl->step(r, m, &result, &why) != PGD_OK)
        fail_msg("%s", why.text);
    return result;
}

static const token_id prompt[20] = {5,  6,  7,  8,  9,  10, 11, 12, 13, 14,
                                    15, 16, 17, 18, 19, 20, 21, 22, 23, 24};

/* --- load ------------------------------------------------------------------------------------- */

static void refuse_load(load_msg load, pgd_err want, const char *text)
{
    step_runner *r;
    load_done_msg done;
    pgd_why why = {{0}};
    assert_int_equal(model_runner_create(&r, "cpu", &why), PGD_OK);
    assert_int_equal(r->vtbl->load(r, &load, &done, NULL, NULL, &why), want);
    if (!strstr(why.text, text))
        fail_msg("expected \"%s\" in \"%s\"", text, why.text);
    r->vtbl->destroy(r);
}

static void test_model_runner_refuses_load(void **state)
{
    (void)state;
    step_runner *r;
    pgd_why why = {{0}};
    assert_int_equal(model_runner_create(&r, "cuda:0", &why), PGD_EUNSUPPORTED);
    load_msg m = load_message("tests/data/models/none.gguf");
    refuse_load(m, PGD_ENOENT, "none.gguf");
    m = load_message(MODEL);
    m.kv_dtype = DTYPE_Q8_0;
    refuse_load(m, PGD_EUNSUPPORTED, "--kv-cache-dtype");
    m = load_message(MODEL);
    m.block_size = 24;
    refuse_load(m, PGD_EUNSUPPORTED, "--block-size");
    m = load_message(MODEL);
    m.max_num_seqs = 0;
    refuse_load(m, PGD_EPROTO, "max_num_seqs 0");
    m = load_message(MODEL);
    m.max_logprobs = PGD_MAX_LOGPROBS + 1;
    refuse_load(m, PGD_EPROTO, "max_logprobs");
}

static void count_progress(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    uint64_t *last = arg;
    assert_true(done_bytes >= *last && done_bytes <= total_bytes);
    *last = done_bytes;
}

static void test_model_runner_reports_load(void **state)
{
    (void)state;
    step_runner *r;
    pgd_why why = {{0}};
    load_msg m = load_message(MODEL);
    load_done_msg done;
    kv_config_msg kv = {.n_blocks = N_BLOCKS};
    kv_ready_msg ready;
    hello_msg hello = {0};
    step_result result;
    scheduler_output empty = message(NULL, 0, NULL, 0);
    uint64_t done_bytes = 0;
    assert_int_equal(model_runner_create(&r, "cpu", &why), PGD_OK);
    r->vtbl->describe(r, &hello);
    assert_true(hello.memory_free_bytes > 0 && hello.device_name[0] != '\0');
    assert_int_equal(r->vtbl->init_kv(r, &kv, &ready, &why), PGD_EPROTO); /* not loaded yet */
    assert_int_equal(r->vtbl->load(r, &m, &done, count_progress, &done_bytes, &why), PGD_OK);
    model_file *file;
    assert_int_equal(model_file_open(&file, MODEL, &why), PGD_OK);
    const model_config *cfg = model_file_get_config(file);
    assert_int_equal(done_bytes, model_file_weight_bytes(file));
    assert_int_equal(done.vocab_size, cfg->vocab_size);
    assert_int_equal(done.n_kv_layers, cfg->n_layers);
    for (int32_t i = 0; i < cfg->n_layers; i++) {
        assert_int_equal(done.kv_layers[i].kind, ATTENTION_FULL);
        assert_int_equal(done.kv_layers[i].window, 0);
        assert_int_equal(done.kv_layers[i].token_bytes, 2 * 2 * cfg->n_kv_heads * cfg->head_dim);
    }
    assert_int_equal(done.max_encoder_tokens, 0);
    model_file_close(file);
    assert_int_equal(r->vtbl->load(r, &m, &done, NULL, NULL, &why), PGD_EPROTO); /* a second time */
    assert_int_equal(r->vtbl->step(r, &empty, &result, &why), PGD_EPROTO); /* no KV cache yet */
    kv = one_group_config(&done, 24, N_BLOCKS); /* no kernel takes such blocks */
    assert_int_equal(r->vtbl->init_kv(r, &kv, &ready, &why), PGD_EINVAL);
    kv = one_group_config(&done, BLOCK_SIZE, N_BLOCKS);
    assert_int_equal(r->vtbl->init_kv(r, &kv, &ready, &why), PGD_OK);
    assert_int_equal(ready.kv_bytes, N_BLOCKS * kv_layout_block_bytes(&kv.layout));
    assert_int_equal(r->vtbl->init_kv(r, &kv, &ready, &why), PGD_EPROTO);
    assert_int_equal(step(r, &empty).n_results, 0);
    r->vtbl->destroy(r);
}

/* --- protocol --------------------------------------------------------------------------------- */

/* A fresh runner that holds request 1 (20 tokens computed, 1 sampled) must refuse this message. */
static void refuse_step(const scheduler_output *m, const char *text)
{
    step_runner *r = make(MODEL);
    const block_id blocks[] = {1, 2};
    new_request_msg first = new_request(1, prompt, 20, blocks, 2);
    scheduler_output start = message(&first, 1, NULL, 0);
    assert_int_equal(step(r, &start).n_results, 1);
    step_result result;
    pgd_why why = {{0}};
    pgd_err err = r->vtbl->step(r, m, &result, &why);
    if (err != PGD_EPROTO && err != PGD_EUNSUPPORTED)
        fail_msg("expected a refusal (%s), got %d", text, err);
    if (!strstr(why.text, text))
        fail_msg("expected \"%s\" in \"%s\"", text, why.text);
    r->vtbl->destroy(r);
}

static void test_model_runner_refuses_messages(void **state)
{
    (void)state;
    const block_id ok[] = {3, 4}, outside[] = {3, N_BLOCKS}, null_block[] = {0, 3};
    const uint64_t unknown = 99;
    const cached_request_msg decode = {
        .request_id = 1, .n_computed_tokens = 20, .n_scheduled_tokens = 1};
    const new_request_msg good = new_request(2, prompt, 20, ok, 2);
    scheduler_output m;

    new_request_msg n = new_request(1, prompt, 20, ok, 2);
    m = message(&n, 1, NULL, 0);
    refuse_step(&m, "request 1 again");
    n = new_request(2, prompt, 20, outside, 2);
    m = message(&n, 1, NULL, 0);
    refuse_step(&m, "block id in [1, 12)");
    n = new_request(2, prompt, 20, null_block, 2);
    m = message(&n, 1, NULL, 0);
    refuse_step(&m, "block id in [1, 12)");
    n = new_request(2, prompt, 20, ok, 1);
    m = message(&n, 1, NULL, 0);
    refuse_step(&m, "positions 0 to 19, got blocks for 0 to 15");
    n = good;
    n.n_scheduled_tokens = 21;
    m = message(&n, 1, NULL, 0);
    refuse_step(&m, "computed + scheduled <= 20");
    n = good;
    n.tokens = (const token_id[]){1, 2, 1 << 20};
    n.n_tokens = n.n_prompt_tokens = n.n_scheduled_tokens = 3;
    m = message(&n, 1, NULL, 0);
    refuse_step(&m, "token id in");
    const new_request_msg many[3] = {good, new_request(3, prompt, 1, ok, 1),
                                     new_request(4, prompt, 1, ok, 1)};
    m = message(many, 3, NULL, 0);
    refuse_step(&m, "at most 3 requests");
    const new_request_msg wide[2] = {good, new_request(3, prompt, 13, ok, 1)};
    m = message(wide, 2, NULL, 0);
    refuse_step(&m, "32 tokens in a step");

    cached_request_msg c = decode;
    c.request_id = unknown;
    m = message(NULL, 0, &c, 1);
    refuse_step(&m, "known request, got 99");
    c = decode;
    c.n_computed_tokens = 21;
    m = message(NULL, 0, &c, 1);
    refuse_step(&m, "computed");
    c = decode;
    c.n_scheduled_tokens = 2;
    m = message(NULL, 0, &c, 1);
    refuse_step(&m, "at most 21");
    c = decode;
    c.n_scheduled_tokens = -1;
    m = message(NULL, 0, &c, 1);
    refuse_step(&m, "0 scheduled tokens or more");
    c = decode;
    c.n_draft_tokens = 1;
    m = message(NULL, 0, &c, 1);
    refuse_step(&m, "no draft tokens");
    c = decode;
    const block_append_msg append = {.request_id = c.request_id,
                                     .blocks = {{2}, {ok}}}; /* 4 of 3 */
    m = message(NULL, 0, &c, 1);
    m.n_appends = 1;
    m.appends = &append;
    refuse_step(&m, "at most 3 blocks");
    const cached_request_msg twice[2] = {decode, decode};
    m = message(NULL, 0, twice, 2);
    refuse_step(&m, "twice");

    m = message(&good, 1, NULL, 0);
    m.total_scheduled_tokens++;
    refuse_step(&m, "scheduled tokens in all");
    m.total_scheduled_tokens -= 2;
    refuse_step(&m, "scheduled tokens in all");
    m = message(NULL, 0, NULL, 0);
    m.n_preempted = 1;
    m.preempted_ids = &unknown;
    refuse_step(&m, "known request, got 99");
    m = message(NULL, 0, NULL, 0);
    m.n_blocks_to_zero = 2;
    m.blocks_to_zero = outside;
    refuse_step(&m, "blocks_to_zero[1]");
    m = message(NULL, 0, NULL, 0);
    m.n_groups = 2;
    refuse_step(&m, "1 KV group");
    m = message(NULL, 0, NULL, 0);
    m.n_transfers = 1;
    refuse_step(&m, "no transfers");
}

/* An id that is finished before the worker ever had it, or again, is no fault; a released row is
 * free for the same step's new request. */
static void test_model_runner_releases(void **state)
{
    (void)state;
    step_runner *r = make(MODEL);
    const block_id blocks[] = {1, 2};
    const uint64_t finished[] = {1, 77, 1};
    const uint64_t preempted[] = {2, 3};
    new_request_msg n[3] = {new_request(1, prompt, 5, blocks, 1),
                            new_request(2, prompt, 6, blocks + 1, 1),
                            new_request(3, prompt, 7, (const block_id[]){3}, 1)};
    scheduler_output m = message(n, 3, NULL, 0);
    step_result result = step(r, &m);
    assert_int_equal(result.n_results, 3);
    token_id second = result.results[1].tokens[0];
    m.n_finished = 3;
    m.finished_ids = finished;
    m.n_preempted = 2;
    m.preempted_ids = preempted;
    result = step(r, &m); /* the same three again */
    assert_int_equal(result.n_results, 3);
    assert_int_equal(result.results[1].tokens[0], second);
    r->vtbl->destroy(r);
}

/* --- errors of one request -------------------------------------------------------------------- */

/* A copy of the model in which the embedding of one token is NaN; the head is untied, so that only
 * requests with that token are hurt. */
static void write_poisoned_model(char *path, token_id token)
{
    pgd_why why = {{0}};
    model_file *file;
    char *data;
    size_t n_bytes;
    assert_int_equal(model_file_open(&file, MODEL, &why), PGD_OK);
    assert_false(model_file_get_config(file)->tied_head);
    const model_tensor *t = model_file_get_tensor(file, "token_embd.weight");
    assert_int_equal(file_read(&data, &n_bytes, MODEL, 1 << 24, &why), PGD_OK);
    uint8_t *row = memmem(data, n_bytes, t->data, 256);
    assert_non_null(row);
    row += (size_t)token * dtype_row_bytes(t->type, t->dims[1]);
    memset(row, 0xff, dtype_row_bytes(t->type, t->dims[1]));
    strcpy(path, "/tmp/test_model_runner.XXXXXX.gguf");
    int fd = mkstemps(path, 5);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, n_bytes), n_bytes);
    assert_int_equal(close(fd), 0);
    mem_free(data);
    model_file_close(file);
}

static void test_model_runner_nan_stays_with_its_request(void **state)
{
    (void)state;
    char path[64];
    write_poisoned_model(path, 300);
    step_runner *r = make(path);
    const token_id poisoned[] = {5, 300, 7};
    const block_id a[] = {1, 2}, b[] = {3};
    new_request_msg n[2] = {new_request(1, prompt, 18, a, 2), new_request(2, poisoned, 3, b, 1)};
    scheduler_output m = message(n, 1, NULL, 0);
    token_id alone = step(r, &m).results[0].tokens[0];
    const uint64_t one = 1, two = 2;
    m = message(n, 2, NULL, 0);
    m.n_finished = 1;
    m.finished_ids = &one;
    step_result result = step(r, &m);
    assert_int_equal(result.n_results, 2);
    assert_int_equal(result.results[0].error, REQUEST_ERROR_NONE);
    assert_int_equal(result.results[0].tokens[0], alone);
    assert_int_equal(result.results[1].error, REQUEST_ERROR_NAN_LOGITS);
    assert_int_equal(result.results[1].n_tokens, 0);

    /* The engine had already scheduled the next token of both. */
    cached_request_msg c[2] = {{.request_id = 1, .n_computed_tokens = 18, .n_scheduled_tokens = 1},
                               {.request_id = 2, .n_computed_tokens = 3, .n_scheduled_tokens = 1}};
    m = message(NULL, 0, c, 2);
    result = step(r, &m);
    assert_int_equal(result.n_results, 2);
    for (int32_t i = 0; i < 2; i++)
        assert_int_equal(result.results[i].error, result.results[i].request_id == 1
                                                      ? REQUEST_ERROR_NONE
                                                      : REQUEST_ERROR_NAN_LOGITS);

    /* Its block goes to another request without being zeroed: stale NaN in the unused slots hurt
     * nobody. */
    new_request_msg reuse = new_request(3, prompt, 1, b, 1);
    m = message(&reuse, 1, NULL, 0);
    m.n_finished = 1;
    m.finished_ids = &two;
    result = step(r, &m);
    assert_int_equal(result.results[0].request_id, 3);
    assert_int_equal(result.results[0].error, REQUEST_ERROR_NONE);
    r->vtbl->destroy(r);
    assert_int_equal(unlink(path), 0);
}

/* The same inside a prompt that is scored: the one request fails, in the step that meets it, once,
 * and the other's scores are untouched. */
static void test_model_runner_nan_in_a_scored_prompt(void **state)
{
    (void)state;
    char path[64];
    write_poisoned_model(path, 300);
    step_runner *r = make(path);
    const token_id poisoned[] = {5, 6, 300, 7, 8};
    const block_id a[] = {1, 2}, b[] = {3};
    new_request_msg n[2] = {new_request(1, prompt, 18, a, 2), new_request(2, poisoned, 5, b, 1)};
    n[0].params.n_prompt_logprobs_per_token = n[1].params.n_prompt_logprobs_per_token = 2;
    scheduler_output m = message(n, 1, NULL, 0);
    token_logprob alone[34];
    step_result result = step(r, &m);
    assert_int_equal(result.n_prompt_results, 1);
    assert_int_equal(result.prompt_results[0].n_tokens, 17);
    memcpy(alone, result.prompt_logprobs, sizeof(alone));
    const uint64_t one = 1;
    n[1].n_scheduled_tokens = 2; /* before the poison */
    new_request_msg swapped[2] = {n[1], n[0]};
    m = message(swapped, 2, NULL, 0);
    m.n_finished = 1;
    m.finished_ids = &one;
    result = step(r, &m);
    assert_int_equal(result.n_results, 1);
    assert_int_equal(result.n_prompt_results, 2);
    assert_int_equal(result.prompt_results[0].request_id, 2);
    assert_int_equal(result.prompt_results[0].n_tokens, 2);
    assert_memory_equal(result.prompt_logprobs + result.prompt_results[1].first_logprob, alone,
                        sizeof(alone));
    cached_request_msg c = {.request_id = 2, .n_computed_tokens = 2, .n_scheduled_tokens = 3};
    m = message(NULL, 0, &c, 1);
    result = step(r, &m);
    assert_int_equal(result.n_results, 1);
    assert_int_equal(result.results[0].error, REQUEST_ERROR_NAN_LOGITS);
    assert_int_equal(result.n_prompt_results, 0);
    r->vtbl->destroy(r);
    assert_int_equal(unlink(path), 0);
}

static void test_model_runner_counts_progress(void **state)
{
    (void)state;
    step_runner *r = make(MODEL);
    const block_id blocks[] = {1, 2};
    new_request_msg n = new_request(1, prompt, 20, blocks, 2);
    scheduler_output m = message(&n, 1, NULL, 0);
    uint64_t before = __atomic_load_n(&r->progress, __ATOMIC_RELAXED);
    m.step_id = 41;
    assert_int_equal(step(r, &m).step_id, 41);
    assert_int_equal(__atomic_load_n(&r->progress, __ATOMIC_RELAXED) - before, 2); /* layers */
    r->vtbl->destroy(r);
}

int main(void)
{
    log_set_level(LOG_WARN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_runner_refuses_load),
        cmocka_unit_test(test_model_runner_reports_load),
        cmocka_unit_test(test_model_runner_refuses_messages),
        cmocka_unit_test(test_model_runner_releases),
        cmocka_unit_test(test_model_runner_nan_stays_with_its_request),
        cmocka_unit_test(test_model_runner_nan_in_a_scored_prompt),
        cmocka_unit_test(test_model_runner_counts_progress),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
