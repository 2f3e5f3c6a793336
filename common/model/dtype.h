/* Element types of model tensors and KV caches: sizes, names, exact conversion to f32.
 *
 * Block formats are those of GGUF: a row is a sequence of blocks of block_elems values. Values are
 * the GGUF type ids, so a file's number is the enum's.
 * Source:  the GGUF specification (ggml type table)
 * Thread:  any
 */
#ifndef COMMON_MODEL_DTYPE_H
#define COMMON_MODEL_DTYPE_H

#include "common/err.h"

PGD_BEGIN_C

typedef enum dtype {
    DTYPE_F32 = 0,
    DTYPE_F16 = 1,
    DTYPE_Q4_0 = 2,
    DTYPE_Q4_1 = 3,
    DTYPE_Q5_0 = 6,
    DTYPE_Q5_1 = 7,
    DTYPE_Q8_0 = 8,
    DTYPE_Q4_K = 12,
    DTYPE_Q5_K = 13,
    DTYPE_Q6_K = 14,
    DTYPE_I8 = 24,
    DTYPE_I16 = 25,
    DTYPE_I32 = 26,
    DTYPE_BF16 = 30,
    DTYPE_MXFP4 = 39,
    DTYPE_NONE = -1
} dtype;

typedef struct dtype_info {
    dtype type;
    const char *name; /* "F32", "Q4_K" */
    int32_t block_elems;
    int32_t block_bytes;
    bool is_weight; /* the worker can compute with it */
} dtype_info;

/* NULL when this build does not know the type. */
const dtype_info *dtype_get_info(int32_t gguf_type_id);
/* By name, case-insensitive ("f16", "Q4_K"); DTYPE_NONE if unknown. */
dtype dtype_parse(const char *name);
/* Name of any GGUF type id, known or not ("type 99"), for messages. Static storage. */
const char *dtype_name(int32_t gguf_type_id);
/* Bytes of a row of n_elems values; 0 if n_elems is no whole number of blocks or the type is
 * unknown. */
size_t dtype_row_bytes(dtype type, int64_t n_elems);

float dtype_f16_to_f32(uint16_t h);
uint16_t dtype_f32_to_f16(float f); /* round to nearest even */
float dtype_bf16_to_f32(uint16_t h);
uint16_t dtype_f32_to_bf16(float f); /* round to nearest even, NaN kept */

/* out[n_elems] f32, bit-equal to the `gguf` package's dequantize. n_elems a multiple of
 * block_elems; in may be unaligned. Only for types with is_weight. */
void dtype_dequantize_row(float *out, const void *in, int64_t n_elems, dtype type);

PGD_END_C
#endif
