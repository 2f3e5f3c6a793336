/* The numbers a replica runs with: configuration, defaults by device, and what the worker's memory
 * allows.
 *
 * Thread:  any
 */
#ifndef ENGINE_CORE_CORE_SIZES_H
#define ENGINE_CORE_CORE_SIZES_H

#include "common/model/model_config.h"
#include "config/config.h"
#include "engine/kv/kv_groups.h"
#include "proto/control.h"

/* Steps sent and not yet answered, at most. */
#define CORE_STEPS_IN_FLIGHT 2

typedef struct core_sizes {
    char device[64]; /* "cpu", "sim": auto is resolved */
    dtype kv_dtype;
    int32_t max_num_seqs;
    int32_t max_num_batched_tokens;
    int32_t max_encoder_tokens; /* of a step; 0 for a model without an encoder */
    int32_t block_size;
    int32_t max_logprobs;
    int32_t max_model_len;
    bool is_len_given;
    int32_t max_held;              /* requests waiting and running at most */
    int32_t n_draft_tokens;        /* of a request and step */
    int32_t max_unfinished_tokens; /* of a request: scheduled and not yet known to be done */
} core_sizes;

/* model is NULL for the simulated worker. Errors: PGD_EINVAL */
PGD_MUST_USE pgd_err core_sizes_init(core_sizes *out, const config *cfg, const model_config *model,
                                     pgd_why *why);

/* The KV pool, once a worker has told its layers and its memory. */
typedef struct core_kv {
    kv_groups groups;
    int32_t n_blocks;     /* null block included; 0 = not known yet */
    int32_t max_len;      /* of a request that the pool can hold alone, at most max_model_len */
    double n_full_length; /* requests of max_model_len that it holds at the same time */
} core_kv;

/* Groups the layers and sizes the pool, from the configuration or from the memory that the worker
 * reports; lowers sizes->max_model_len to what it holds unless it was given (GR6). Logs what it
 * decides. Errors: PGD_ENOMEM, PGD_ERANGE (too little), those of kv_groups_init */
PGD_MUST_USE pgd_err core_sizes_fit_kv(core_kv *out, core_sizes *sizes, const config *cfg,
                                       const load_done_msg *done, pgd_why *why);

#endif
