/* Glue between messages and the model. Nothing here outlives a step but rows and block tables,
 * which are a cache of what the engine said.
 *
 * A request whose sample failed stays in its row until the engine releases it: with two steps in
 * flight the engine has already scheduled its next token, which does not exist. Such a request is
 * answered with its error again and not computed. */
#include "worker/model_runner.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <gnu/libc-version.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/memory_info.h"
#include "common/thread.h"
#include "worker/model/model_ops.h"
#include "worker/model/network.h"
#include "worker/prompt_scorer.h"
#include "worker/sampler.h"

typedef struct model_runner {
    step_runner base;
    cpu_isa isa;
    const kernel_ops *ops;
    cpu_pool *pool;
    kernel_ctx ctx;
    model_file *file;
    const model_config *cfg;
    weights *w;
    network *network;
    request_rows *rows;
    input_batch *batch;
    sampler *sampler;
    prompt_scorer *scorer;
    kv_cache *kv;
    kv_tables tables;
    kv_transfer *transfer; /* NULL = no offload tier */
    load_msg load;
    uint64_t n_steps;
} model_runner;

/* --- hello and load --------------------------------------------------------------------------- */

static void describe(step_runner *base, hello_msg *hello)
{
    const model_runner *r = (const model_runner *)base;
    memory_info memory;
    memory_info_read(&memory);
    (void)snprintf(hello->device_name, sizeof(hello->device_name), "%.128s, %s, %d CPUs",
                   cpu_features_cpu_name(), cpu_features_name(r->isa), thread_n_cpus());
    hello->memory_total_bytes = memory.total_bytes;
    hello->memory_free_bytes = memory.free_bytes;
}

static kv_page_layout page_layout(const model_runner *r)
{
    return (kv_page_layout){.type = (dtype)r->load.kv_dtype,
                            .n_kv_heads = r->cfg->n_kv_heads,
                            .head_dim = r->cfg->head_dim,
                            .block_size = r->load.block_size};
}

static pgd_err check_load(const load_msg *msg, pgd_why *why)
{
    if (msg->kv_dtype != DTYPE_F32 && msg->kv_dtype != DTYPE_F16 && msg->kv_dtype != DTYPE_BF16)
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "expected a KV cache type F32, F16 or BF16, got %s; set --kv-cache-dtype",
                        dtype_name(msg->kv_dtype));
    if (msg->block_size < 16 || msg->block_size > KV_PAGE_MAX_BLOCK_SIZE ||
        msg->block_size % 16 != 0)
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "expected a block size that is a multiple of 16, at most %d, got %" PRId32
                        "; set --block-size",
                        KV_PAGE_MAX_BLOCK_SIZE, msg->block_size);
    if (msg->max_model_len < 1 || msg->max_num_seqs < 1 || msg->max_num_batched_tokens < 1 ||
        msg->max_logprobs < 0 || msg->max_logprobs > PGD_MAX_LOGPROBS || msg->n_threads < 0)
        return pgd_fail(why, PGD_EPROTO,
                        "expected positive limits, got max_model_len %" PRId32
                        ", max_num_seqs %" PRId32 ", max_num_batched_tokens %" PRId32
                        ", max_logprobs %" PRId32 ", threads %" PRId32,
                        msg->max_model_len, msg->max_num_seqs, msg->max_num_batched_tokens,
                        msg->max_logprobs, msg->n_threads);
    return PGD_OK;
}

static pgd_err check_model(const model_config *cfg, const load_msg *msg, pgd_why *why)
{
    if (cfg->encdec.head_dim > KV_PAGE_MAX_HEAD_DIM)
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "expected an encoder head size of at most %d, got %" PRId32,
                        KV_PAGE_MAX_HEAD_DIM, cfg->encdec.head_dim);
    if (cfg->is_encoder_decoder && msg->max_model_len > cfg->max_context)
        return pgd_fail(why, PGD_EPROTO,
                        "expected a length of at most the %" PRId32
                        " positions that the model has learned, got %" PRId32,
                        cfg->max_context, msg->max_model_len);
    if (msg->max_encoder_tokens < cfg->encdec.max_source ||
        (!cfg->is_encoder_decoder && msg->max_encoder_tokens > 0))
        return pgd_fail(why, PGD_EPROTO,
                        "expected %s%" PRId32 " encoder tokens in a step, got %" PRId32,
                        cfg->is_encoder_decoder ? "at least " : "", cfg->encdec.max_source,
                        msg->max_encoder_tokens);
    if (cfg->head_dim > KV_PAGE_MAX_HEAD_DIM)
        return pgd_fail(why, PGD_EUNSUPPORTED, "expected a head size of at most %d, got %" PRId32,
                        KV_PAGE_MAX_HEAD_DIM, cfg->head_dim);
    return PGD_OK;
}

static pgd_err create_workspace(model_runner *r, pgd_why *why)
{
    const model_config *cfg = r->cfg;
    int32_t n_threads = cpu_pool_n_threads(r->pool);
    int32_t max_rows = PGD_MAX(r->load.max_num_batched_tokens, r->load.max_num_seqs);
    attention_limits limits = {.max_rows = max_rows,
                               .max_seqs = r->load.max_num_seqs,
                               .max_context = r->load.max_model_len,
                               .n_heads = cfg->n_heads,
                               .kv = page_layout(r),
                               .n_threads = n_threads};
    size_t n_bytes = model_ops_workspace_bytes(cfg, max_rows, n_threads, r->ops);
    n_bytes = PGD_MAX(n_bytes, r->ops->attention_workspace_bytes(&limits));
    n_bytes = PGD_MAX(n_bytes, network_workspace_bytes(r->network, &limits));
    n_bytes = PGD_MAX(n_bytes, r->ops->sample_workspace_bytes(cfg->vocab_size, n_threads));
    r->ctx = (kernel_ctx){.pool = r->pool, .workspace_bytes = PGD_MAX(n_bytes, 64)};
    r->ctx.workspace = mem_alloc_aligned(r->ctx.workspace_bytes, 64);
    if (!r->ctx.workspace)
        return pgd_fail(why, PGD_ENOMEM, "expected %zu bytes of workspace, got none", n_bytes);
    return PGD_OK;
}

static pgd_err create_state(model_runner *r, pgd_why *why)
{
    const load_msg *msg = &r->load;
    network_opts opts = {.decoder = {.cfg = r->cfg,
                                     .w = r->w,
                                     .ops = r->ops,
                                     .max_rows = msg->max_num_batched_tokens,
                                     .max_seqs = msg->max_num_seqs,
                                     .max_positions = msg->max_model_len},
                         .max_encoder_rows = msg->max_encoder_tokens};
    request_rows_opts rows = {.max_rows = msg->max_num_seqs,
                              .max_tokens = msg->max_model_len,
                              .max_encoder_tokens = r->cfg->encdec.max_source,
                              .vocab_size = r->cfg->vocab_size,
                              .max_logprobs = msg->max_logprobs};
    PGD_TRY(network_create(&r->network, &opts, why));
    PGD_TRY(request_rows_create(&r->rows, &rows));
    PGD_TRY(input_batch_create(&r->batch, msg->max_num_batched_tokens, msg->max_num_seqs));
    if (msg->max_encoder_tokens > 0)
        PGD_TRY(input_batch_create_encoder(r->batch, msg->max_encoder_tokens));
    PGD_TRY(sampler_create(&r->sampler, msg->max_num_seqs, msg->max_logprobs, r->cfg->vocab_size));
    PGD_TRY(prompt_scorer_create(&r->scorer, msg->max_num_seqs, msg->max_num_batched_tokens,
                                 msg->max_logprobs, r->cfg->vocab_size));
    PGD_TRY(create_workspace(r, why));
    log_debug("worker", "memory weights=%zu activations=%zu workspace=%zu", r->w->n_bytes,
              network_bytes(r->network), r->ctx.workspace_bytes);
    return PGD_OK;
}

static void fill_kv_layers(const model_runner *r, load_done_msg *done)
{
    const model_config *cfg = r->cfg;
    kv_page_layout page = page_layout(r);
    int32_t token_bytes = (int32_t)(kv_page_bytes(&page) / (size_t)page.block_size);
    done->n_kv_layers = cfg->n_layers;
    static_assert(MODEL_MAX_LAYERS <= PGD_MAX_KV_LAYERS, "a KV layer for each");
    for (int32_t i = 0; i < cfg->n_layers; i++)
        done->kv_layers[i] =
            (kv_layer_spec){cfg->layer_attention[i], model_config_window(cfg, i), token_bytes};
    if (!cfg->is_encoder_decoder)
        return;
    for (int32_t i = 0; i < cfg->n_layers; i++)
        done->kv_layers[done->n_kv_layers++] = (kv_layer_spec){ATTENTION_CROSS, 0, token_bytes};
}

#ifdef __clang__
#    define COMPILER "clang " __clang_version__
#else
#    define COMPILER "gcc " __VERSION__
#endif

static void fill_numerics(const model_runner *r, load_done_msg *done)
{
    (void)snprintf(done->numerics, sizeof(done->numerics), "%s numerics=%d %.48s glibc %.16s",
                   r->ops->name, KERNELS_NUMERICS_VERSION, COMPILER, gnu_get_libc_version());
}

static pgd_err load(step_runner *base, const load_msg *msg, load_done_msg *done,
                    step_runner_progress_fn progress, void *arg, pgd_why *why)
{
    model_runner *r = (model_runner *)base;
    uint64_t start_us = clock_now_us();
    if (r->file)
        return pgd_fail(why, PGD_EPROTO, "expected one load message, got another one");
    PGD_TRY(check_load(msg, why));
    r->load = *msg;
    PGD_TRY(model_file_open(&r->file, msg->model_path, why));
    r->cfg = model_file_get_config(r->file);
    PGD_TRY(check_model(r->cfg, msg, why));
    PGD_TRY(cpu_pool_create(&r->pool, msg->n_threads, msg->pin_threads != 0));
    PGD_TRY(weights_load(&r->w, r->file, r->ops->matmul, r->pool, progress, arg, why));
    PGD_TRY(create_state(r, why));

    memory_info memory;
    memory_info_read(&memory);
    memset(done, 0, sizeof(*done));
    done->weight_bytes = r->w->n_bytes;
    done->memory_free_bytes = memory.free_bytes;
    fill_kv_layers(r, done);
    done->max_encoder_tokens = r->cfg->encdec.max_source;
    done->vocab_size = r->cfg->vocab_size;
    PGD_TRY(model_file_fingerprint(r->file, done->model_fingerprint));
    fill_numerics(r, done);
    done->load_us = clock_now_us() - start_us;
    log_info("worker", "loaded ops=\"%s\" threads=%" PRId32 " weight_bytes=%zu ms=%" PRIu64,
             r->ops->name, cpu_pool_n_threads(r->pool), r->w->n_bytes, done->load_us / 1000);
    return PGD_OK;
}

static pgd_err create_transfer(model_runner *r, const kv_config_msg *msg, pgd_why *why)
{
    kv_transfer_slot slots[PGD_MAX_KV_LAYERS];
    for (int32_t s = 0; s < msg->layout.n_slots; s++)
        slots[s].pages = kv_cache_get_slot(r->kv, s, &slots[s].page_bytes);
    kv_transfer_opts opts = {.device = copy_device_get_cpu(),
                             .slots = slots,
                             .n_slots = msg->layout.n_slots,
                             .config = msg,
                             .rank = r->base.rank,
                             .progress = &r->base.progress,
                             .on_done = r->base.on_transfer,
                             .arg = r->base.on_transfer_arg};
    return kv_transfer_create(&r->transfer, &opts, why);
}

static pgd_err init_kv(step_runner *base, const kv_config_msg *msg, kv_ready_msg *ready,
                       pgd_why *why)
{
    model_runner *r = (model_runner *)base;
    if (!r->network || r->kv)
        return pgd_fail(why, PGD_EPROTO, "expected one KV configuration after loading, got %s",
                        r->kv ? "another one" : "it before");
    kv_page_layout page = page_layout(r);
    PGD_TRY(kv_cache_create(&r->kv, &page, &msg->layout, msg->n_blocks, why));
    kv_tables_opts opts = {.n_rows = r->load.max_num_seqs,
                           .max_tokens = r->load.max_model_len,
                           .max_encoder_tokens = r->cfg->encdec.max_source,
                           .n_blocks = msg->n_blocks};
    PGD_TRY(kv_tables_init(&r->tables, &msg->layout, &opts));
    PGD_TRY(create_transfer(r, msg, why));
    ready->kv_bytes = kv_cache_bytes(r->kv);
    return PGD_OK;
}

/* --- step ------------------------------------------------------------------------------------- */

static pgd_err check_step(const model_runner *r, const scheduler_output *in, pgd_why *why)
{
    if (!r->kv)
        return pgd_fail(why, PGD_EPROTO, "expected a KV configuration before the first step");
    if (in->n_groups != r->tables.n_groups)
        return pgd_fail(why, PGD_EPROTO, "expected %" PRId32 " KV groups, got %" PRId32,
                        r->tables.n_groups, in->n_groups);
    if (in->grammar_bitmask_bytes != 0)
        return pgd_fail(why, PGD_EUNSUPPORTED, "expected no grammar masks, got %zu bytes",
                        in->grammar_bitmask_bytes);
    for (int32_t i = 0; i < in->n_blocks_to_zero; i++) {
        if (in->blocks_to_zero[i] < 0 || in->blocks_to_zero[i] >= kv_cache_n_blocks(r->kv))
            return pgd_fail(why, PGD_EPROTO,
                            "expected a block id in [0, %" PRId32 "), got %" PRId32
                            ", at blocks_to_zero[%" PRId32 "]",
                            kv_cache_n_blocks(r->kv), in->blocks_to_zero[i], i);
    }
    return PGD_OK;
}

/* Finished ids may be unknown here (finished while preempted or waiting); a preempted one has a
 * row. */
static pgd_err release_rows(model_runner *r, const scheduler_output *in, pgd_why *why)
{
    for (int32_t i = 0; i < in->n_finished; i++) {
        int32_t row = request_rows_release(r->rows, in->finished_ids[i]);
        if (row >= 0)
            kv_tables_reset_row(&r->tables, row);
    }
    for (int32_t i = 0; i < in->n_preempted; i++) {
        int32_t row = request_rows_release(r->rows, in->preempted_ids[i]);
        if (row < 0)
            return pgd_fail(why, PGD_EPROTO,
                            "expected a known request, got %" PRIu64 ", at preempted_ids[%" PRId32
                            "]",
                            in->preempted_ids[i], i);
        kv_tables_reset_row(&r->tables, row);
    }
    return PGD_OK;
}

/* Puts n_scheduled tokens of a row into the batch. */
static pgd_err schedule(model_runner *r, int32_t row, int32_t n_computed, int32_t n_scheduled,
                        pgd_why *why)
{
    request_row *req = request_rows_get(r->rows, row);
    if (req->last_step == r->n_steps)
        return pgd_fail(why, PGD_EPROTO,
                        "expected a request once in a step, got request %" PRIu64 " twice",
                        req->request_id);
    req->last_step = r->n_steps;
    if (n_scheduled == 0)
        return PGD_OK;
    if (req->has_failed) {
        sampler_add_error(r->sampler, req, REQUEST_ERROR_NAN_LOGITS);
        return PGD_OK;
    }
    PGD_TRY(input_batch_add(r->batch, req, row, n_computed, n_scheduled, &r->tables, why));
    req->n_computed_tokens = n_computed + n_scheduled;
    return PGD_OK;
}

/* input: the step's encoder input of this request; NULL when it has no more. */
static pgd_err add_new(model_runner *r, const new_request_msg *msg, const encoder_input_msg *input,
                       pgd_why *why)
{
    int32_t row;
    bool has_encoder = msg->n_encoder_tokens > 0;
    PGD_TRY(request_rows_add(r->rows, &row, msg, why));
    PGD_TRY(kv_tables_replace(&r->tables, row, &msg->blocks, why));
    if (has_encoder && (input == NULL || input->request_id != msg->request_id ||
                        input->n_tokens != msg->n_encoder_tokens))
        return pgd_fail(why, PGD_EPROTO,
                        "expected an encoder input of %" PRId32 " tokens, got none, at request "
                        "%" PRIu64,
                        msg->n_encoder_tokens, msg->request_id);
    if (has_encoder)
        PGD_TRY(input_batch_add_encoder(r->batch, request_rows_get(r->rows, row), row,
                                        msg->encoder_tokens, &r->tables, why));
    return schedule(r, row, msg->n_computed_tokens, msg->n_scheduled_tokens, why);
}

/* append: NULL = no new blocks. */
static pgd_err update_cached(model_runner *r, const cached_request_msg *msg,
                             const block_ids_msg *append, pgd_why *why)
{
    int32_t row = request_rows_find(r->rows, msg->request_id);
    if (row < 0)
        return pgd_fail(why, PGD_EPROTO,
                        "expected a known request, got %" PRIu64 " among the continuing ones",
                        msg->request_id);
    if (msg->n_draft_tokens != 0 || msg->n_scheduled_tokens < 0)
        return pgd_fail(why, PGD_EPROTO,
                        "expected no draft tokens and 0 scheduled tokens or more, got %" PRId32
                        " and %" PRId32 ", at request %" PRIu64,
                        msg->n_draft_tokens, msg->n_scheduled_tokens, msg->request_id);
    if (append != NULL)
        PGD_TRY(kv_tables_append(&r->tables, row, append, why));
    return schedule(r, row, msg->n_computed_tokens, msg->n_scheduled_tokens, why);
}

static pgd_err apply(model_runner *r, const scheduler_output *in, pgd_why *why)
{
    int64_t n_scheduled = 0;
    PGD_TRY(check_step(r, in, why));
    PGD_TRY(kv_transfer_begin_step(r->transfer, in, why));
    PGD_TRY(release_rows(r, in, why));
    int32_t n_encoded = 0;
    int32_t n_appended = 0;
    for (int32_t i = 0; i < in->n_new; i++) {
        const encoder_input_msg *input =
            n_encoded < in->n_encoder_inputs ? &in->encoder_inputs[n_encoded] : NULL;
        PGD_TRY(add_new(r, &in->new_requests[i], input, why));
        n_encoded += in->new_requests[i].n_encoder_tokens > 0;
        n_scheduled += in->new_requests[i].n_scheduled_tokens;
    }
    for (int32_t i = 0; i < in->n_cached; i++) {
        const cached_request_msg *msg = &in->cached_requests[i];
        const block_ids_msg *append =
            scheduler_output_next_append(in, &n_appended, msg->request_id);
        PGD_TRY(update_cached(r, msg, append, why));
        n_scheduled += in->cached_requests[i].n_scheduled_tokens;
    }
    if (n_encoded != in->n_encoder_inputs)
        return pgd_fail(why, PGD_EPROTO, "expected %" PRId32 " encoder inputs, got %" PRId32,
                        n_encoded, in->n_encoder_inputs);
    if (n_scheduled != in->total_scheduled_tokens)
        return pgd_fail(why, PGD_EPROTO,
                        "expected %" PRId32 " scheduled tokens in all, got %" PRId64,
                        in->total_scheduled_tokens, n_scheduled);
    return kv_cache_zero(r->kv, in->blocks_to_zero, in->n_blocks_to_zero, r->ops, &r->ctx);
}

static pgd_err run_step(model_runner *r, const scheduler_output *in, step_result *out, pgd_why *why)
{
    uint64_t start_us = clock_now_us();
    r->n_steps++;
    cpu_pool_begin(r->pool);
    input_batch_reset(r->batch);
    sampler_reset(r->sampler);
    prompt_scorer_reset(r->scorer);
    PGD_TRY(apply(r, in, why));
    uint64_t forward_us = clock_now_us();
    float *logits;
    PGD_TRY(network_forward(r->network, &logits, r->batch, &r->tables, r->kv, &r->ctx,
                            &r->base.progress));
    PGD_TRY(prompt_scorer_run(r->scorer, r->sampler, r->network, r->batch, r->rows, r->ops, &r->ctx,
                              &r->base.progress));
    PGD_TRY(sampler_run(r->sampler, logits, r->batch, r->rows, r->ops, &r->ctx));
    uint64_t end_us = clock_now_us();
    *out = (step_result){.step_id = in->step_id,
                         .forward_us = (uint32_t)(end_us - forward_us),
                         .total_us = (uint32_t)(end_us - start_us)};
    sampler_fill_result(r->sampler, out);
    prompt_scorer_fill_result(r->scorer, out);
    return PGD_OK;
}

static pgd_err step(step_runner *base, const scheduler_output *in, step_result *out, pgd_why *why)
{
    mem_forbid();
    pgd_err err = run_step((model_runner *)base, in, out, why);
    mem_permit();
    return err;
}

/* --- life ------------------------------------------------------------------------------------- */

static void stop(step_runner *base)
{
    kv_transfer_stop(((model_runner *)base)->transfer);
}

static void destroy(step_runner *base)
{
    model_runner *r = (model_runner *)base;
    kv_transfer_destroy(r->transfer);
    kv_tables_deinit(&r->tables);
    kv_cache_destroy(r->kv);
    prompt_scorer_destroy(r->scorer);
    sampler_destroy(r->sampler);
    input_batch_destroy(r->batch);
    request_rows_destroy(r->rows);
    network_destroy(r->network);
    mem_free_aligned(r->ctx.workspace, r->ctx.workspace_bytes);
    weights_destroy(r->w);
    cpu_pool_destroy(r->pool);
    model_file_close(r->file);
    mem_free(r);
}

static const step_runner_vtbl vtbl = {.describe = describe,
                                      .load = load,
                                      .init_kv = init_kv,
                                      .step = step,
                                      .stop = stop,
                                      .destroy = destroy};

pgd_err model_runner_create(step_runner **out, const char *device, pgd_why *why)
{
    *out = NULL;
    if (strcmp(device, "cpu") != 0)
        return pgd_fail(why, PGD_EUNSUPPORTED, "expected device cpu, got \"%s\"", device);
    cpu_isa isa;
    const kernel_ops *ops;
    PGD_TRY(cpu_features_choose(&isa, why));
    pgd_err err = ops_cpu_get(&ops, isa);
    if (err != PGD_OK)
        return pgd_fail(why, err, "expected kernels for %s, got none in this build",
                        cpu_features_name(isa));
    model_runner *r = mem_calloc(1, sizeof(*r));
    if (!r)
        return PGD_ENOMEM;
    r->base.vtbl = &vtbl;
    r->isa = isa;
    r->ops = ops;
    thread_set_flush_denormals();
    *out = &r->base;
    return PGD_OK;
}
