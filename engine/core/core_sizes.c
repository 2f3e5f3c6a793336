/* Defaults by device. The KV pool of a CPU worker is the smaller of a quarter of the free memory and
 * what max_num_seqs requests of full length could use. */
#include "engine/core/core_sizes.h"

#include <stdio.h>
#include <string.h>

#include "common/log.h"

#define SIM_MAX_MODEL_LEN 32768

static dtype pick_kv_dtype(const char *name, const model_config *model)
{
    if (strcmp(name, "auto") != 0 && name[0] != 0)
        return dtype_parse(name);
    if (model == NULL || model->main_dtype == DTYPE_F32)
        return DTYPE_F32;
    return model->main_dtype == DTYPE_BF16 ? DTYPE_BF16 : DTYPE_F16;
}

pgd_err core_sizes_init(core_sizes *out, const config *cfg, const model_config *model, pgd_why *why)
{
    *out = (core_sizes){0};
    snprintf(out->device, sizeof out->device, "%s",
             strcmp(cfg->device, "auto") == 0 ? "cpu" : cfg->device);
    bool is_cpu = strcmp(out->device, "cpu") == 0;
    if (!is_cpu && strcmp(out->device, "sim") != 0)
        return pgd_fail(why, PGD_EINVAL, "device: expected auto, cpu or sim, got %s", cfg->device);
    if (is_cpu && model == NULL)
        return pgd_fail(why, PGD_EINVAL, "device %s: expected a model, got none", out->device);
    out->kv_dtype = pick_kv_dtype(cfg->dtype_kv, model);
    if (out->kv_dtype != DTYPE_F32 && out->kv_dtype != DTYPE_F16 && out->kv_dtype != DTYPE_BF16)
        return pgd_fail(why, PGD_EINVAL, "kv_cache_dtype: expected auto, f32, f16 or bf16, got %s",
                        cfg->dtype_kv);
    out->max_num_seqs = cfg->max_num_seqs > 0 ? (int32_t)cfg->max_num_seqs : is_cpu ? 64 : 256;
    out->max_num_batched_tokens = cfg->max_num_batched_tokens > 0
                                      ? (int32_t)cfg->max_num_batched_tokens
                                  : is_cpu ? 256
                                           : 2048;
    /* A step takes the longest input, and else as much as it takes of other tokens. */
    if (model != NULL && model->is_encoder_decoder)
        out->max_encoder_tokens = PGD_MAX(model->encdec.max_source, out->max_num_batched_tokens);
    out->block_size = (int32_t)cfg->block_size;
    out->max_logprobs = (int32_t)PGD_MIN(cfg->max_logprobs, PGD_MAX_LOGPROBS);
    int32_t model_len = model != NULL ? model->max_context : SIM_MAX_MODEL_LEN;
    out->is_len_given = cfg->max_model_len > 0;
    out->max_model_len = out->is_len_given ? (int32_t)cfg->max_model_len : model_len;
    if (out->max_model_len < 2)
        return pgd_fail(why, PGD_EINVAL, "max_model_len: expected at least 2, got %d",
                        out->max_model_len);
    if (out->max_model_len > model_len && model != NULL && model->is_encoder_decoder)
        return pgd_fail(why, PGD_EINVAL,
                        "max_model_len: expected at most %d, as many positions as the model has "
                        "learned, got %d",
                        model_len, out->max_model_len);
    if (out->max_model_len > model_len)
        log_warn("core", "max_model_len=%d is more than the %d positions the model was made for",
                 out->max_model_len, model_len);
    out->max_held = (int32_t)PGD_MIN(cfg->max_queued_requests, 1 << 20);
    out->n_draft_tokens = is_cpu ? 0 : (int32_t)cfg->sim_draft_tokens;
    int64_t n_per_step = out->max_num_batched_tokens;
    if (cfg->long_prefill_token_threshold > 0)
        n_per_step = PGD_MIN(n_per_step, cfg->long_prefill_token_threshold);
    out->max_unfinished_tokens = (int32_t)PGD_MIN(
        n_per_step * CORE_STEPS_IN_FLIGHT + out->n_draft_tokens, (int64_t)out->max_model_len);
    return PGD_OK;
}

static kv_groups_load load_of(const core_sizes *sizes)
{
    return (kv_groups_load){sizes->max_unfinished_tokens, sizes->max_model_len};
}

static pgd_err choose_n_blocks(core_kv *kv, const core_sizes *sizes, const config *cfg,
                               const load_done_msg *done, pgd_why *why)
{
    uint64_t block_bytes = kv_layout_block_bytes(&kv->groups.layout);
    kv_groups_load load = load_of(sizes);
    uint64_t n_each = (uint64_t)kv_groups_n_blocks_for(&kv->groups, sizes->max_model_len, &load);
    uint64_t n = PGD_MIN(done->memory_free_bytes / 4 / block_bytes,
                         n_each * (uint64_t)sizes->max_num_seqs + 1);
    if (cfg->num_kv_blocks > 0)
        n = (uint64_t)cfg->num_kv_blocks;
    else if (cfg->kv_cache_memory > 0)
        n = (uint64_t)cfg->kv_cache_memory / block_bytes;
    if (n < 2)
        return cfg->kv_cache_memory > 0
                   ? pgd_fail(why, PGD_ERANGE,
                              "kv_cache_memory: expected at least %llu bytes (2 blocks), got %lld",
                              (unsigned long long)(2 * block_bytes),
                              (long long)cfg->kv_cache_memory)
                   : pgd_fail(why, PGD_ENOMEM,
                              "KV cache: expected room for at least 2 blocks of %llu bytes, got "
                              "%llu; free memory is %llu MB: set kv_cache_memory, or a smaller "
                              "block_size",
                              (unsigned long long)block_bytes, (unsigned long long)n,
                              (unsigned long long)(done->memory_free_bytes >> 20));
    for (int32_t g = 0; g < kv->groups.layout.n_groups; g++)
        n = PGD_MIN(n, (uint64_t)INT32_MAX / (uint64_t)kv->groups.layout.groups[g].block_size);
    kv->n_blocks = (int32_t)n;
    return PGD_OK;
}

/* GR6: the model's length is lowered to the pool, a given one kept with a warning. */
static pgd_err fit_len(core_kv *kv, core_sizes *sizes, pgd_why *why)
{
    kv_groups_load load = load_of(sizes);
    kv->max_len = kv_groups_max_len(&kv->groups, kv->n_blocks, &load);
    if (kv->max_len < 2)
        return pgd_fail(why, PGD_ENOMEM,
                        "KV cache: expected room for 2 tokens, got %d blocks for %d groups of "
                        "layers: raise kv_cache_memory or num_kv_blocks",
                        kv->n_blocks - 1, kv->groups.layout.n_groups);
    if (kv->max_len < sizes->max_model_len && sizes->is_len_given) {
        log_warn("core",
                 "max_model_len=%d is more than the %d tokens the KV cache holds: longer "
                 "requests are refused",
                 sizes->max_model_len, kv->max_len);
    } else if (kv->max_len < sizes->max_model_len) {
        log_info("core", "max_model_len=%d, lowered from %d to what the KV cache holds",
                 kv->max_len, sizes->max_model_len);
        sizes->max_model_len = load.max_model_len = kv->max_len;
    }
    kv->n_full_length = kv_groups_concurrency(&kv->groups, kv->n_blocks, &load);
    return PGD_OK;
}

static void log_kv(const core_kv *kv, const core_sizes *sizes)
{
    const kv_layout *layout = &kv->groups.layout;
    kv_groups_load load = load_of(sizes);
    for (int32_t i = 0; i < layout->n_groups; i++) {
        const kv_group_layout *g = &layout->groups[i];
        log_info("core",
                 "kv group=%d kind=\"%s\" window=%d block_size=%d layers=%d blocks_per_request=%d",
                 i, attention_kind_name((attention_kind)g->kind), g->window, g->block_size,
                 kv->groups.n_layers_of[i],
                 kv_groups_n_blocks_of(&kv->groups, i, sizes->max_model_len, &load));
    }
    if (kv->groups.n_padding > 0)
        log_info("core",
                 "kv padding=%.1f%% of the KV memory: layers do not divide into equal groups",
                 100.0 * kv->groups.n_padding / (layout->n_groups * layout->n_slots));
    log_info(
        "core",
        "kv blocks=%d block_size=%d bytes=%llu longest_request=%d full_length_requests=%.1f of "
        "%d tokens",
        kv->n_blocks - 1, sizes->block_size,
        (unsigned long long)((uint64_t)kv->n_blocks * kv_layout_block_bytes(layout)), kv->max_len,
        kv->n_full_length, sizes->max_model_len);
}

pgd_err core_sizes_fit_kv(core_kv *out, core_sizes *sizes, const config *cfg,
                          const load_done_msg *done, pgd_why *why)
{
    kv_groups_opts opts = {.block_size = sizes->block_size,
                           .max_encoder_tokens = done->max_encoder_tokens,
                           .is_hybrid = !cfg->disable_hybrid_kv_cache_manager};
    PGD_TRY(kv_groups_init(&out->groups, done->kv_layers, done->n_kv_layers, &opts, why));
    PGD_TRY(choose_n_blocks(out, sizes, cfg, done, why));
    PGD_TRY(fit_len(out, sizes, why));
    log_kv(out, sizes);
    return PGD_OK;
}
