/* model_config from a Hugging Face directory's config.json and generation_config.json.
 *
 * Thread:  any
 * Errors:  PGD_EUNSUPPORTED (architecture or option that the decoder lacks, told by name),
 *          PGD_EFORMAT, PGD_EINVAL, PGD_ERANGE (a member of the wrong type or size), PGD_ENOENT (no
 *          config.json)
 * Source:  the configuration classes of Hugging Face transformers, whose defaults count for absent
 *          members
 */
#ifndef COMMON_MODEL_MODEL_CONFIG_HF_H
#define COMMON_MODEL_MODEL_CONFIG_HF_H

#include "common/err.h"
#include "common/model/model_config.h"

/* The result has passed model_config_check; main_dtype is left at DTYPE_NONE. */
PGD_MUST_USE pgd_err model_config_hf_read(model_config *out, const char *dir, pgd_why *why);

#endif
