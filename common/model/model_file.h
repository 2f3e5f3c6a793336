/* One view of a model on disk: a GGUF file or a Hugging Face directory.
 *
 * Tensors are named as in GGUF ("token_embd.weight", "blk.0.attn_q.weight",
 * "blk.0.ffn_gate.weight", "output_norm.weight", "output.weight", "blk.0.attn_q.bias",
 * "blk.0.attn_q_norm.weight", ...), whatever the source. Weights stay in the mapped file. Nothing
 * here trusts the file: every offset, length and product is checked, and a fault is told as
 * "expected X, got Y, at Z".
 *
 * Owns:    the maps; tensors, strings and config are borrows until model_file_close
 * Thread:  open from one thread; reading from any
 * Errors:  PGD_ENOENT, PGD_EIO, PGD_EFORMAT (damaged), PGD_EUNSUPPORTED (well-formed but not for
 *          this build)
 */
#ifndef COMMON_MODEL_MODEL_FILE_H
#define COMMON_MODEL_MODEL_FILE_H

#include "common/err.h"
#include "common/model/dtype.h"
#include "common/model/gguf.h"
#include "common/model/model_config.h"

typedef struct model_tensor {
    const char *name;
    dtype type; /* may be a GGUF type id outside the enum, or DTYPE_NONE: see dtype_get_info */
    const char *type_name; /* as the source calls it */
    int32_t n_dims;        /* beyond 4 (never in a runnable model) only the slowest 4 are in dims */
    int64_t dims[4];       /* row-major, slowest first: a matrix is [n_out, n_in]; unused = 1 */
    const void *data;      /* maybe unaligned for safetensors */
    size_t n_bytes;
} model_tensor;

typedef struct model_file model_file;

/* path: a .gguf file, or a directory with config.json. Opens headers only: no weight page is
 * touched. */
PGD_MUST_USE pgd_err model_file_open(model_file **out, const char *path, pgd_why *why);
/* As model_file_open, for listing what a file holds: a config that this build cannot interpret is
 * no failure. Then model_file_get_config returns NULL, and *config_err and *config_why (may be
 * NULL) say what was wrong with it. */
PGD_MUST_USE pgd_err model_file_open_listing(model_file **out, const char *path,
                                             pgd_err *config_err, pgd_why *config_why,
                                             pgd_why *why);
void model_file_close(model_file *file);

/* Never NULL after model_file_open. */
const model_config *model_file_get_config(const model_file *file);
/* NULL when absent. */
const model_tensor *model_file_get_tensor(const model_file *file, const char *name);
/* Without those of an image encoder (model_config.is_text_part). */
int32_t model_file_n_tensors(const model_file *file);
const model_tensor *model_file_get_tensor_at(const model_file *file, int32_t idx);

/* The GGUF behind it, or NULL for a directory; and the directory, or NULL for a GGUF. */
const gguf_file *model_file_get_gguf(const model_file *file);
const char *model_file_get_dir(const model_file *file);
/* Bytes of all weights. */
size_t model_file_weight_bytes(const model_file *file);
/* Every tensor that the decoder needs for this config is there with the right shape and a type this
 * build can compute with (norms and biases F32, F16 or BF16), and there is none that it would
 * ignore though the model was made with it. The first fault is told. */
PGD_MUST_USE pgd_err model_file_check_runnable(const model_file *file, pgd_why *why);

/* SHA-256 over names, shapes, types and sizes of all tensors and the first and last 4 KB of each
 * tensor's data: cheap identity of a model between processes. */
PGD_MUST_USE pgd_err model_file_fingerprint(const model_file *file, uint8_t out[32]);

#endif
