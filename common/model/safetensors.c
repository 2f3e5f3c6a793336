/* Reads the header of a .safetensors file and checks it against the file's size.
 *
 *   u64 header length | JSON header, maybe padded with spaces | data
 *   {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
 *
 * Shape times element size, the offsets and the file must agree for every tensor before any of them
 * is handed out. Tensors are kept sorted by name (look-up by bisection, duplicates are neighbours);
 * a second pass in order of place finds overlaps and holes.
 */
#include "common/model/safetensors.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/bytes.h"
#include "common/file.h"
#include "common/json.h"
#include "common/mem.h"

enum {
    LENGTH_BYTES = 8,
    MAX_HEADER_BYTES = 8 << 20,
    MAX_HEADER_DEPTH = 8,
    MAX_TENSORS = 65536,
    MAX_NAME_BYTES = 255,
};

typedef struct element_type {
    const char *name;
    dtype type;
    int32_t n_bytes;
} element_type;

static const element_type element_types[] = {
    {"F32", DTYPE_F32, 4},      {"F16", DTYPE_F16, 2},      {"BF16", DTYPE_BF16, 2},
    {"I8", DTYPE_I8, 1},        {"I16", DTYPE_I16, 2},      {"I32", DTYPE_I32, 4},
    {"I64", DTYPE_NONE, 8},     {"U8", DTYPE_NONE, 1},      {"U16", DTYPE_NONE, 2},
    {"U32", DTYPE_NONE, 4},     {"U64", DTYPE_NONE, 8},     {"F64", DTYPE_NONE, 8},
    {"BOOL", DTYPE_NONE, 1},    {"F8_E4M3", DTYPE_NONE, 1}, {"F8_E5M2", DTYPE_NONE, 1},
    {"F8_E8M0", DTYPE_NONE, 1},
};

struct safetensors_file {
    file_map map;
    cJSON *header;               /* owns the names */
    safetensors_tensor *tensors; /* [n_tensors], by name */
    int32_t n_tensors;
};

static const element_type *find_element_type(const char *name)
{
    for (size_t i = 0; i < PGD_ARRAY_LEN(element_types); i++) {
        if (strcmp(element_types[i].name, name) == 0)
            return &element_types[i];
    }
    return NULL;
}

/* A number that is a whole one of 0 to 2^53, the range that JSON numbers carry exactly. */
static bool get_whole(int64_t *out, const cJSON *item)
{
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0.0) || item->valuedouble > 0x1p53 ||
        item->valuedouble != floor(item->valuedouble))
        return false;
    *out = (int64_t)item->valuedouble;
    return true;
}

static bool is_printable_name(const char *name)
{
    size_t n_bytes = strlen(name);
    if (n_bytes == 0 || n_bytes > MAX_NAME_BYTES)
        return false;
    for (size_t i = 0; i < n_bytes; i++) {
        unsigned char c = (unsigned char)name[i];
        /* 0xc0 begins the parser's stand-in for an embedded NUL. */
        if (c < 0x20 || c == 0x7f || c == 0xc0)
            return false;
    }
    return true;
}

static pgd_err read_shape(safetensors_tensor *t, int64_t *n_elems, const cJSON *entry, pgd_why *why)
{
    const cJSON *shape = json_get(entry, "shape");
    if (!cJSON_IsArray(shape))
        return pgd_fail(why, PGD_EFORMAT, "expected an array \"shape\", got none, at tensor \"%s\"",
                        t->name);
    for (int i = 0; i < SAFETENSORS_MAX_DIMS; i++)
        t->dims[i] = 1;
    *n_elems = 1;
    const cJSON *item;
    cJSON_ArrayForEach(item, shape)
    {
        int64_t dim = 0;
        if (t->n_dims == SAFETENSORS_MAX_DIMS)
            return pgd_fail(why, PGD_EFORMAT,
                            "expected at most %d dimensions, got more, at tensor \"%s\"",
                            SAFETENSORS_MAX_DIMS, t->name);
        if (!get_whole(&dim, item) || __builtin_mul_overflow(*n_elems, dim, n_elems))
            return pgd_fail(
                why, PGD_EFORMAT,
                "expected whole dimensions with a product below 2^63, got another value as "
                "dimension %" PRId32 ", at tensor \"%s\"",
                t->n_dims, t->name);
        t->dims[t->n_dims++] = dim;
    }
    return PGD_OK;
}

/* data, data_bytes: the section behind the header. */
static pgd_err read_place(safetensors_tensor *t, uint64_t wanted_bytes, const cJSON *entry,
                          const uint8_t *data, size_t data_bytes, pgd_why *why)
{
    const cJSON *offsets = json_get(entry, "data_offsets");
    int64_t begin = 0;
    int64_t end = 0;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !get_whole(&begin, offsets->child) || !get_whole(&end, offsets->child->next) || begin > end)
        return pgd_fail(
            why, PGD_EFORMAT,
            "expected \"data_offsets\" as two ascending whole numbers, got something else, at "
            "tensor \"%s\"",
            t->name);
    if ((uint64_t)end > data_bytes)
        return pgd_fail(
            why, PGD_EFORMAT,
            "expected data up to byte %" PRId64
            ", got a data section of %zu bytes, at tensor \"%s\"; the file is damaged or was cut "
            "short, fetch it again",
            end, data_bytes, t->name);
    if ((uint64_t)(end - begin) != wanted_bytes)
        return pgd_fail(why, PGD_EFORMAT,
                        "expected %" PRIu64
                        " bytes for its shape and type %s, got data_offsets spanning %" PRId64
                        ", at tensor \"%s\"",
                        wanted_bytes, t->type_name, end - begin, t->name);
    t->data = data + begin;
    t->n_bytes = (size_t)wanted_bytes;
    return PGD_OK;
}

static pgd_err read_tensor(safetensors_tensor *t, const cJSON *entry, const uint8_t *data,
                           size_t data_bytes, pgd_why *why)
{
    if (!is_printable_name(entry->string))
        return pgd_fail(
            why, PGD_EFORMAT,
            "expected tensor names of 1 to %d printable bytes, got another one, in the header",
            MAX_NAME_BYTES);
    t->name = entry->string;
    if (!cJSON_IsObject(entry))
        return pgd_fail(why, PGD_EFORMAT,
                        "expected an object, got another JSON value, at tensor \"%s\"", t->name);
    const char *type_name = json_string(json_get(entry, "dtype"));
    if (type_name == NULL)
        return pgd_fail(why, PGD_EFORMAT, "expected a string \"dtype\", got none, at tensor \"%s\"",
                        t->name);
    const element_type *type = find_element_type(type_name);
    if (type == NULL)
        return pgd_fail(
            why, PGD_EUNSUPPORTED,
            "expected an element type such as F32, F16 or BF16, got \"%.32s\", at tensor \"%s\"",
            is_printable_name(type_name) ? type_name : "?", t->name);
    t->type_name = type->name;
    t->type = type->type;
    int64_t n_elems = 0;
    uint64_t n_bytes = 0;
    PGD_TRY(read_shape(t, &n_elems, entry, why));
    if (__builtin_mul_overflow((uint64_t)n_elems, (uint64_t)type->n_bytes, &n_bytes))
        return pgd_fail(why, PGD_EFORMAT,
                        "expected a tensor of less than 2^64 bytes, got more, at tensor \"%s\"",
                        t->name);
    return read_place(t, n_bytes, entry, data, data_bytes, why);
}

static int order_names(const void *a, const void *b)
{
    return strcmp(((const safetensors_tensor *)a)->name, ((const safetensors_tensor *)b)->name);
}

static int order_places(const void *a, const void *b)
{
    const safetensors_tensor *x = *(const safetensors_tensor *const *)a;
    const safetensors_tensor *y = *(const safetensors_tensor *const *)b;
    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return x->n_bytes < y->n_bytes ? -1 : x->n_bytes > y->n_bytes;
}

/* Every byte of the data section belongs to exactly one tensor. */
static pgd_err check_cover(const safetensors_file *f, const uint8_t *data, size_t data_bytes,
                           pgd_why *why)
{
    const safetensors_tensor **by_place = mem_calloc((size_t)f->n_tensors, sizeof(*by_place));
    if (by_place == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for the index of a safetensors file");
    for (int32_t i = 0; i < f->n_tensors; i++)
        by_place[i] = &f->tensors[i];
    if (f->n_tensors > 1)
        qsort(by_place, (size_t)f->n_tensors, sizeof(*by_place), order_places);
    pgd_err err = PGD_OK;
    size_t covered = 0;
    for (int32_t i = 0; i < f->n_tensors && err == PGD_OK; i++) {
        size_t begin = (size_t)(by_place[i]->data - data);
        if (begin != covered)
            err = pgd_fail(
                why, PGD_EFORMAT,
                "expected data from byte %zu on (no holes, no overlaps), got data from byte "
                "%zu, at tensor \"%s\"",
                covered, begin, by_place[i]->name);
        covered = begin + by_place[i]->n_bytes;
    }
    if (err == PGD_OK && covered != data_bytes)
        err = pgd_fail(
            why, PGD_EFORMAT,
            "expected a data section of %zu bytes as the tensors say, got %zu bytes in the file",
            covered, data_bytes);
    mem_free(by_place);
    return err;
}

static pgd_err read_tensors(safetensors_file *f, const uint8_t *data, size_t data_bytes,
                            pgd_why *why)
{
    int n_entries = cJSON_GetArraySize(f->header);
    if (n_entries > MAX_TENSORS)
        return pgd_fail(why, PGD_EFORMAT, "expected at most %d tensors, got %d, in the header",
                        MAX_TENSORS, n_entries);
    f->tensors = mem_calloc((size_t)n_entries, sizeof(*f->tensors));
    if (f->tensors == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for the directory of a safetensors file");
    const cJSON *entry;
    cJSON_ArrayForEach(entry, f->header)
    {
        if (strcmp(entry->string, "__metadata__") == 0)
            continue;
        PGD_TRY(read_tensor(&f->tensors[f->n_tensors], entry, data, data_bytes, why));
        f->n_tensors++;
    }
    if (f->n_tensors > 1)
        qsort(f->tensors, (size_t)f->n_tensors, sizeof(*f->tensors), order_names);
    for (int32_t i = 1; i < f->n_tensors; i++) {
        if (strcmp(f->tensors[i - 1].name, f->tensors[i].name) == 0)
            return pgd_fail(why, PGD_EFORMAT, "expected unique tensor names, got \"%s\" twice",
                            f->tensors[i].name);
    }
    return check_cover(f, data, data_bytes, why);
}

static pgd_err read_header(safetensors_file *f, pgd_why *why)
{
    if (f->map.n_bytes < LENGTH_BYTES)
        return pgd_fail(
            why, PGD_EFORMAT,
            "expected a safetensors file of at least %d bytes, got %zu; it was cut short, fetch "
            "it again",
            LENGTH_BYTES, f->map.n_bytes);
    uint64_t header_bytes = bytes_load_u64(f->map.data);
    size_t left = f->map.n_bytes - LENGTH_BYTES;
    if (header_bytes > left || header_bytes > MAX_HEADER_BYTES)
        return pgd_fail(why, PGD_EFORMAT,
                        "expected a header of at most %zu bytes, got a length of %" PRIu64
                        ", at byte 0; this is no safetensors file, or it was cut short",
                        PGD_MIN(left, (size_t)MAX_HEADER_BYTES), header_bytes);
    /* A copy with a terminator: number parsing must not run on into the data section or off the
     * map. */
    char *text = mem_strndup((const char *)f->map.data + LENGTH_BYTES, (size_t)header_bytes);
    if (text == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for the header of a safetensors file");
    pgd_err err = json_parse(&f->header, text, (size_t)header_bytes, MAX_HEADER_DEPTH, why);
    mem_free(text);
    if (err != PGD_OK)
        return pgd_fail_prefix(why, PGD_EFORMAT, "header");
    if (!cJSON_IsObject(f->header))
        return pgd_fail(why, PGD_EFORMAT,
                        "expected a JSON object, got another value, in the header");
    return read_tensors(f, f->map.data + LENGTH_BYTES + header_bytes, left - (size_t)header_bytes,
                        why);
}

pgd_err safetensors_open(safetensors_file **out, const char *path, pgd_why *why)
{
    *out = NULL;
    safetensors_file *f = mem_calloc(1, sizeof(*f));
    if (f == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for a safetensors file");
    pgd_err err = file_map_open(&f->map, path, why);
    if (err == PGD_OK) {
        err = read_header(f, why);
        if (err != PGD_OK)
            (void)pgd_fail_prefix(why, err, "%s", path);
    }
    if (err != PGD_OK) {
        safetensors_close(f);
        return err;
    }
    *out = f;
    return PGD_OK;
}

void safetensors_close(safetensors_file *file)
{
    if (file == NULL)
        return;
    mem_free(file->tensors);
    cJSON_Delete(file->header);
    file_map_close(&file->map);
    mem_free(file);
}

int32_t safetensors_n_tensors(const safetensors_file *file)
{
    return file->n_tensors;
}

const safetensors_tensor *safetensors_get_tensor_at(const safetensors_file *file, int32_t idx)
{
    return &file->tensors[idx];
}

const safetensors_tensor *safetensors_get_tensor(const safetensors_file *file, const char *name)
{
    safetensors_tensor wanted = {.name = name};
    if (file->n_tensors == 0)
        return NULL;
    return bsearch(&wanted, file->tensors, (size_t)file->n_tensors, sizeof(wanted), order_names);
}
