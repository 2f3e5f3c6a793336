/* What KV bytes depend on, in one hash: tiers that outlive the engine hold bytes of one fingerprint
 * only, so that none are read that this engine's worker would not have computed to the bit.
 *
 * Thread:  any
 */
#ifndef ENGINE_OFFLOAD_OFFLOAD_FINGERPRINT_H
#define ENGINE_OFFLOAD_OFFLOAD_FINGERPRINT_H

#include "common/hash.h"
#include "common/model/dtype.h"
#include "proto/kv_layout.h"

/* Everything is borrowed for the call. */
typedef struct offload_fingerprint_facts {
    const uint8_t *model_fingerprint; /* [32] of the tensors, as the worker says */
    const char *model_path;           /* file or directory; NULL or absent: not looked at */
    const char *numerics;             /* of the worker: device, kernels, order of sums */
    const kv_layout *layout;
    const uint8_t *hash_seed; /* [32] of the block hashes */
    dtype kv_dtype;
    int32_t block_size; /* tokens per block hash */
    int32_t vocab_size;
    int32_t n_ranks;
} offload_fingerprint_facts;

/* Errors: PGD_ENOMEM, PGD_EIO (the model's directory cannot be listed) */
PGD_MUST_USE pgd_err offload_fingerprint_make(uint8_t out[HASH_SHA256_BYTES],
                                              const offload_fingerprint_facts *facts);

#endif
