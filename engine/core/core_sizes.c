/* Defaults of architecture.md section 8. The KV pool of a CPU worker is the smaller of a quarter of
 * the free memory and what max_num_seqs requests of full length could use. */
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
    out->block_size = (int32_t)cfg->block_size;
    out->max_logprobs = (int32_t)PGD_MIN(cfg->max_logprobs, PGD_MAX_LOGPROBS);
    int32_t model_len = model != NULL ? model->max_context : SIM_MAX_MODEL_LEN;
    out->is_len_given = cfg->max_model_len > 0;
    out->max_model_len = out->is_len_given ? (int32_t)cfg->max_model_len : model_len;
    if (out->max_model_len < 2)
        return pgd_fail(why, PGD_EINVAL, "max_model_len: expected at least 2, got %d",
                        out->max_model_len);
    if (out->max_model_len > model_len)
        log_warn("core", "max_model_len=%d is more than the %d positions the model was made for",
                 out->max_model_len, model_len);
    out->max_held = (int32_t)PGD_MIN(cfg->max_queued_requests, 1 << 20);
    return PGD_OK;
}

static int32_t max_layers(const load_done_msg *done)
{
    int32_t n = 1;
    for (int32_t g = 0; g < done->n_kv_groups; g++)
        n = PGD_MAX(n, done->n_layers_per_group[g]);
    return n;
}

pgd_err core_sizes_fit_kv(int32_t *n_blocks, core_sizes *sizes, const config *cfg,
                          const load_done_msg *done, pgd_why *why)
{
    uint64_t block_bytes;
    if (done->kv_page_bytes == 0 ||
        __builtin_mul_overflow(done->kv_page_bytes, (uint64_t)max_layers(done), &block_bytes))
        return pgd_fail(why, PGD_EPROTO, "load_done: expected a KV page size, got %llu bytes",
                        (unsigned long long)done->kv_page_bytes);
    uint64_t n_full = (uint64_t)PGD_CEIL_DIV(sizes->max_model_len, sizes->block_size) *
                      (uint64_t)sizes->max_num_seqs;
    uint64_t n;
    if (cfg->num_kv_blocks > 0)
        n = (uint64_t)cfg->num_kv_blocks;
    else if (cfg->kv_cache_memory > 0)
        n = (uint64_t)cfg->kv_cache_memory / block_bytes;
    else
        n = PGD_MIN(done->memory_free_bytes / 4 / block_bytes, n_full + 1);
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
    n = PGD_MIN(n, (uint64_t)INT32_MAX / (uint64_t)sizes->block_size);
    *n_blocks = (int32_t)n;
    int64_t n_pool_tokens = (int64_t)(*n_blocks - 1) * sizes->block_size;
    if (sizes->max_model_len > n_pool_tokens && sizes->is_len_given) {
        log_warn("core",
                 "max_model_len=%d is more than the %lld tokens the KV cache holds: longer "
                 "requests are refused",
                 sizes->max_model_len, (long long)n_pool_tokens);
    } else if (sizes->max_model_len > n_pool_tokens) {
        log_info("core", "max_model_len=%lld, lowered from %d to what the KV cache holds",
                 (long long)n_pool_tokens, sizes->max_model_len);
        sizes->max_model_len = (int32_t)n_pool_tokens;
    }
    if (sizes->max_model_len < 2)
        return pgd_fail(why, PGD_ENOMEM, "KV cache: expected room for 2 tokens, got %lld",
                        (long long)n_pool_tokens);
    log_info("core", "kv blocks=%d block_size=%d bytes=%llu full_length_requests=%.1f of %d tokens",
             *n_blocks - 1, sizes->block_size, (unsigned long long)(n * block_bytes),
             (double)n_pool_tokens / sizes->max_model_len, sizes->max_model_len);
    return PGD_OK;
}
