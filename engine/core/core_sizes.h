/* The numbers a replica runs with: configuration, defaults by device, and what the worker's memory
 * allows.
 *
 * Thread:  any
 */
#ifndef ENGINE_CORE_CORE_SIZES_H
#define ENGINE_CORE_CORE_SIZES_H

#include "common/model/model_config.h"
#include "config/config.h"
#include "proto/control.h"

typedef struct core_sizes {
    char device[64]; /* "cpu", "sim": auto is resolved */
    dtype kv_dtype;
    int32_t max_num_seqs;
    int32_t max_num_batched_tokens;
    int32_t block_size;
    int32_t max_logprobs;
    int32_t max_model_len;
    bool is_len_given;
    int32_t max_held; /* requests waiting and running at most */
} core_sizes;

/* model is NULL for the simulated worker. Errors: PGD_EINVAL */
PGD_MUST_USE pgd_err core_sizes_init(core_sizes *out, const config *cfg, const model_config *model,
                                     pgd_why *why);

/* Blocks of the KV pool, null block included, from the configuration or from the memory that the
 * worker reports; lowers sizes->max_model_len to what they hold unless it was given. Logs what it
 * decides. Errors: PGD_ENOMEM (too little) */
PGD_MUST_USE pgd_err core_sizes_fit_kv(int32_t *n_blocks, core_sizes *sizes, const config *cfg,
                                       const load_done_msg *done, pgd_why *why);

#endif
