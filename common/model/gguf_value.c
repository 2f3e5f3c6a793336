/* Reading single values and arrays of a GGUF's metadata.
 *
 * Every length was checked when the file was opened, so nothing here can leave the map; what is
 * left to refuse is a value of the wrong type or one that does not fit.
 */
#include <string.h>

#include "common/bytes.h"
#include "common/model/gguf.h"

/* Integer at p, any width; false for other types and for unsigned values beyond int64_t. */
static bool load_i64(int64_t *out, gguf_value_type type, const uint8_t *p)
{
    uint64_t wide = 0;
    switch (type) {
    case GGUF_U8:
        *out = p[0];
        return true;
    case GGUF_I8:
        *out = (int8_t)p[0];
        return true;
    case GGUF_U16:
        *out = p[0] | p[1] << 8;
        return true;
    case GGUF_I16:
        *out = (int16_t)(p[0] | p[1] << 8);
        return true;
    case GGUF_U32:
        *out = bytes_load_u32(p);
        return true;
    case GGUF_I32:
        *out = (int32_t)bytes_load_u32(p);
        return true;
    case GGUF_U64:
        wide = bytes_load_u64(p);
        if (wide > INT64_MAX)
            return false;
        *out = (int64_t)wide;
        return true;
    case GGUF_I64:
        *out = (int64_t)bytes_load_u64(p);
        return true;
    default:
        return false;
    }
}

static bool load_f64(double *out, gguf_value_type type, const uint8_t *p)
{
    float f;
    int64_t i;
    if (type == GGUF_F32) {
        memcpy(&f, p, sizeof(f));
        *out = (double)f;
        return true;
    }
    if (type == GGUF_F64) {
        memcpy(out, p, sizeof(*out));
        return true;
    }
    if (!load_i64(&i, type, p))
        return false;
    *out = (double)i;
    return true;
}

bool gguf_get_i64(const gguf_file *file, const char *key, int64_t *out)
{
    const gguf_value *v = gguf_get_value(file, key);
    return v != NULL && load_i64(out, v->type, v->data);
}

bool gguf_get_f64(const gguf_file *file, const char *key, double *out)
{
    const gguf_value *v = gguf_get_value(file, key);
    return v != NULL && load_f64(out, v->type, v->data);
}

bool gguf_get_bool(const gguf_file *file, const char *key, bool *out)
{
    const gguf_value *v = gguf_get_value(file, key);
    if (v == NULL || v->type != GGUF_BOOL)
        return false;
    *out = v->data[0] != 0;
    return true;
}

static void load_string(gguf_string *out, const uint8_t *p)
{
    out->n_bytes = (size_t)bytes_load_u64(p);
    out->data = (const char *)p + 8;
}

bool gguf_get_string(const gguf_file *file, const char *key, gguf_string *out)
{
    const gguf_value *v = gguf_get_value(file, key);
    if (v == NULL || v->type != GGUF_STRING)
        return false;
    load_string(out, v->data);
    return true;
}

/* 0 for what is no number. */
static size_t number_bytes(gguf_value_type type)
{
    switch (type) {
    case GGUF_U8:
    case GGUF_I8:
        return 1;
    case GGUF_U16:
    case GGUF_I16:
        return 2;
    case GGUF_U32:
    case GGUF_I32:
    case GGUF_F32:
        return 4;
    case GGUF_U64:
    case GGUF_I64:
    case GGUF_F64:
        return 8;
    default:
        return 0;
    }
}

bool gguf_array_i64(const gguf_value *array, uint64_t idx, int64_t *out)
{
    if (array->type != GGUF_ARRAY || idx >= array->n_elems)
        return false;
    size_t n_bytes = number_bytes(array->elem_type);
    return load_i64(out, array->elem_type, array->data + (size_t)idx * n_bytes);
}

bool gguf_array_bool(const gguf_value *array, uint64_t idx, bool *out)
{
    if (array->type != GGUF_ARRAY || array->elem_type != GGUF_BOOL || idx >= array->n_elems)
        return false;
    *out = array->data[(size_t)idx] != 0;
    return true;
}

bool gguf_array_f64(const gguf_value *array, uint64_t idx, double *out)
{
    if (array->type != GGUF_ARRAY || idx >= array->n_elems)
        return false;
    size_t n_bytes = number_bytes(array->elem_type);
    return load_f64(out, array->elem_type, array->data + (size_t)idx * n_bytes);
}

void gguf_array_begin(gguf_array_iter *iter, const gguf_value *array)
{
    bool is_strings = array->type == GGUF_ARRAY && array->elem_type == GGUF_STRING;
    iter->at = array->data;
    iter->n_left = is_strings ? array->n_elems : 0;
}

bool gguf_array_next_string(gguf_array_iter *iter, gguf_string *out)
{
    if (iter->n_left == 0)
        return false;
    load_string(out, iter->at);
    iter->at += 8 + out->n_bytes;
    iter->n_left--;
    return true;
}
