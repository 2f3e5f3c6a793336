/* The weights of a Hugging Face directory: model.safetensors, or the shards that
 * model.safetensors.index.json names.
 *
 * Owns:    the maps of all shards; everything returned is a borrow until weight_shards_close
 * Limits:  1,024 shards; a shard's name is a plain file name ending in .safetensors, so that no
 *          file outside the directory is opened
 * Thread:  open from one thread; reading from any
 * Errors:  as safetensors.h; PGD_ENOENT when the directory has no weights, PGD_EFORMAT when index
 *          and shards disagree or two shards hold the same name
 */
#ifndef COMMON_MODEL_WEIGHT_SHARDS_H
#define COMMON_MODEL_WEIGHT_SHARDS_H

#include "common/err.h"
#include "common/model/safetensors.h"

typedef struct weight_shards weight_shards;

PGD_MUST_USE pgd_err weight_shards_open(weight_shards **out, const char *dir, pgd_why *why);
void weight_shards_close(weight_shards *shards);

int32_t weight_shards_n_files(const weight_shards *shards);
int32_t weight_shards_n_tensors(const weight_shards *shards);
/* In order of name over all shards. */
const safetensors_tensor *weight_shards_get_tensor_at(const weight_shards *shards, int32_t idx);

#endif
