/* model_config from a GGUF file's metadata.
 *
 * Thread:  any
 * Errors:  PGD_EUNSUPPORTED (architecture or option that the decoder lacks, told by name),
 *          PGD_EFORMAT (a key missing or of the wrong type), PGD_ERANGE
 * Source:  the GGUF specification's standard keys
 */
#ifndef COMMON_MODEL_MODEL_CONFIG_GGUF_H
#define COMMON_MODEL_MODEL_CONFIG_GGUF_H

#include "common/err.h"
#include "common/model/gguf.h"
#include "common/model/model_config.h"

/* The result has passed model_config_check; main_dtype is left at DTYPE_NONE. */
PGD_MUST_USE pgd_err model_config_gguf_read(model_config *out, const gguf_file *file, pgd_why *why);

#endif
