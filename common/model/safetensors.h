/* One .safetensors file: the tensor directory, memory-mapped.
 *
 * The data section must be covered exactly: no tensor leaves it, none overlap, nothing is left
 * over, as the format demands. So a file that was cut short or grew is always noticed.
 *
 * Owns:    the map; everything returned is a borrow until safetensors_close
 * Limits:  header of 8 MB; 65,536 tensors of at most 8 dimensions; names of 255 bytes
 * Thread:  open from one thread; reading from any
 * Errors:  PGD_ENOENT, PGD_EIO, PGD_EFORMAT, PGD_EUNSUPPORTED (an element type without a known
 *          size), PGD_ENOMEM
 * Source:  the safetensors format description (u64 header length, JSON header, data)
 */
#ifndef COMMON_MODEL_SAFETENSORS_H
#define COMMON_MODEL_SAFETENSORS_H

#include "common/err.h"
#include "common/model/dtype.h"

#define SAFETENSORS_MAX_DIMS 8

typedef struct safetensors_tensor {
    const char *name;
    const char *type_name;              /* as in the file: "BF16", "F8_E4M3"; static storage */
    dtype type;                         /* DTYPE_NONE when it is no type of dtype.h */
    int32_t n_dims;                     /* 0 for a scalar */
    int64_t dims[SAFETENSORS_MAX_DIMS]; /* slowest first; unused = 1 */
    const uint8_t *data;                /* maybe unaligned */
    size_t n_bytes;
} safetensors_tensor;

typedef struct safetensors_file safetensors_file;

PGD_MUST_USE pgd_err safetensors_open(safetensors_file **out, const char *path, pgd_why *why);
void safetensors_close(safetensors_file *file);

int32_t safetensors_n_tensors(const safetensors_file *file);
/* In order of name. */
const safetensors_tensor *safetensors_get_tensor_at(const safetensors_file *file, int32_t idx);
/* NULL when absent. */
const safetensors_tensor *safetensors_get_tensor(const safetensors_file *file, const char *name);

#endif
