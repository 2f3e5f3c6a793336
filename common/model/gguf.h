/* GGUF v2 and v3 files: metadata and tensor directory, memory-mapped.
 *
 * Owns:    the map; everything returned is a borrow until gguf_close
 * Limits:  little-endian files; 65,536 tensors and as many values; tensor names of 255 bytes;
 *          metadata arrays nest 4 deep at most; every count is checked against the bytes left
 *          before anything is allocated
 * Thread:  open from one thread; reading from any
 * Source:  the GGUF specification
 */
#ifndef COMMON_MODEL_GGUF_H
#define COMMON_MODEL_GGUF_H

#include "common/err.h"
#include "common/model/dtype.h"

typedef enum gguf_value_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64
} gguf_value_type;

typedef struct gguf_string {
    const char *data; /* not NUL-terminated */
    size_t n_bytes;
} gguf_string;

/* A metadata value. Strings inside arrays are walked with gguf_array_iter. */
typedef struct gguf_value {
    gguf_value_type type;
    gguf_value_type elem_type; /* arrays */
    uint64_t n_elems;          /* arrays; 1 otherwise */
    const uint8_t *data; /* little-endian, unaligned; of a string its u64 length, of an array the
                            first element */
} gguf_value;

typedef struct gguf_tensor {
    gguf_string name;
    int32_t type_id; /* as in the file; see dtype_get_info */
    int32_t n_dims;
    int64_t dims[4]; /* row-major, slowest first (the file stores fastest first) */
    const uint8_t *data;
    size_t n_bytes; /* 0 when type_id is unknown to this build */
} gguf_tensor;

typedef struct gguf_file gguf_file;

PGD_MUST_USE pgd_err gguf_open(gguf_file **out, const char *path, pgd_why *why);
void gguf_close(gguf_file *file);

uint32_t gguf_version(const gguf_file *file);
/* All before the padding and the tensors' data. */
const uint8_t *gguf_get_header(const gguf_file *file, size_t *n_bytes);
int32_t gguf_n_tensors(const gguf_file *file);
const gguf_tensor *gguf_get_tensor_at(const gguf_file *file, int32_t idx);
const gguf_tensor *gguf_get_tensor(const gguf_file *file, const char *name);
int32_t gguf_n_values(const gguf_file *file);
const gguf_value *gguf_get_value_at(const gguf_file *file, int32_t idx, gguf_string *key);
const gguf_value *gguf_get_value(const gguf_file *file, const char *key);

/* Typed getters: any integer type is taken where it fits. false when absent or of another type. */
bool gguf_get_i64(const gguf_file *file, const char *key, int64_t *out);
bool gguf_get_f64(const gguf_file *file, const char *key, double *out);
bool gguf_get_bool(const gguf_file *file, const char *key, bool *out);
bool gguf_get_string(const gguf_file *file, const char *key, gguf_string *out);
/* Element idx of a numeric array. */
bool gguf_array_i64(const gguf_value *array, uint64_t idx, int64_t *out);
bool gguf_array_f64(const gguf_value *array, uint64_t idx, double *out);
/* Element idx of an array of flags. */
bool gguf_array_bool(const gguf_value *array, uint64_t idx, bool *out);

/* Walks a string array in order: iter = {array->data, array->n_elems}; false at the end. All
 * lengths were checked at open. */
typedef struct gguf_array_iter {
    const uint8_t *at;
    uint64_t n_left;
} gguf_array_iter;
void gguf_array_begin(gguf_array_iter *iter, const gguf_value *array);
bool gguf_array_next_string(gguf_array_iter *iter, gguf_string *out);

#endif
