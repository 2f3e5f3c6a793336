/* One place that knows both vocabularies: options and layouts on one side, scheduler_opts on the
 * other. */
#include "engine/core/core_scheduler.h"

pgd_err core_scheduler_create(scheduler **out, const scheduler_opts *base, const config *cfg,
                              const core_sizes *sizes, const core_kv *kv, pgd_why *why)
{
    kv_group_spec groups[PGD_MAX_KV_GROUPS];
    scheduler_opts o = *base;
    for (int32_t g = 0; g < kv->groups.layout.n_groups; g++)
        groups[g] = kv_groups_spec(&kv->groups, g);
    o.max_num_seqs = sizes->max_num_seqs;
    o.max_num_batched_tokens = sizes->max_num_batched_tokens;
    o.max_encoder_tokens = sizes->max_encoder_tokens;
    o.long_prefill_token_threshold = (int32_t)cfg->long_prefill_token_threshold;
    o.max_model_len = sizes->max_model_len;
    o.max_queued_requests = sizes->max_held;
    o.policy =
        cfg->scheduling_policy == CONFIG_POLICY_PRIORITY ? SCHEDULER_PRIORITY : SCHEDULER_FCFS;
    o.enable_chunked_prefill = true;
    o.enable_prefix_caching = cfg->enable_prefix_caching;
    o.async = true;
    o.num_speculative_tokens = sizes->n_draft_tokens;
    o.num_lookahead_tokens = sizes->n_draft_tokens;
    o.max_steps_in_flight = CORE_STEPS_IN_FLIGHT;
    o.watermark = cfg->kv_watermark;
    o.admit_partly = !cfg->scheduler_reserve_full_isl;
    o.n_blocks = kv->n_blocks;
    o.block_size = sizes->block_size;
    o.n_groups = kv->groups.layout.n_groups;
    o.groups = groups;
    pgd_err err = scheduler_create(out, &o);
    if (err != PGD_OK)
        return pgd_fail(why, err, "cannot make the scheduler for %d blocks and %d requests: %s",
                        kv->n_blocks, sizes->max_num_seqs, pgd_err_text(err));
    return PGD_OK;
}
