/* Reads the directory of a GGUF file: header, metadata, tensor list. Weights are never touched.
 *
 *   magic "GGUF" | u32 version | u64 n_tensors | u64 n_values
 *   n_values times:   string key | u32 type | value
 *   n_tensors times:  string name | u32 n_dims | u64 dims[n_dims] | u32 type | u64 offset
 *   padding to general.alignment | tensor data
 *
 * A string is a u64 length and its bytes; dims come fastest first; a tensor's data begin at the
 * data start plus its offset.
 *
 * The file is the enemy. One cursor walks the header; every read asks it for bytes and fails with
 * the place when they are not there. A count is compared with the bytes left (each element needs a
 * known minimum) before memory is asked for, so a small file cannot make us allocate much. Names
 * are kept in arrays sorted by name: look-up by bisection, duplicates are neighbours, and no
 * crafted set of names makes a hash table slow. Tensors may neither leave the file nor overlap.
 * All these steps share the cursor and the sorted names, hence one file though it is a long one.
 */
#include "common/model/gguf.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/bytes.h"
#include "common/file.h"
#include "common/mem.h"

enum {
    MAX_TENSORS = 65536,
    MAX_VALUES = 65536,
    MAX_KEY_BYTES = 65535,
    MAX_NAME_BYTES = 255,
    MAX_ARRAY_DEPTH = 4,
    DEFAULT_ALIGNMENT = 32,
    MIN_ALIGNMENT = 8,
    MAX_ALIGNMENT = 65536,
    /* The least a metadata value takes: key length, one byte of key, type, one byte of value. */
    MIN_VALUE_BYTES = 8 + 1 + 4 + 1,
    /* Name length, one byte of name, n_dims, one dim, type, offset. */
    MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8,
    MIN_STRING_BYTES = 8,
    MIN_ARRAY_BYTES = 4 + 8,
};

typedef struct named_value {
    gguf_string key;
    gguf_value value;
} named_value;

struct gguf_file {
    file_map map;
    size_t header_bytes;
    uint32_t version;
    int32_t n_values;
    int32_t n_tensors;
    named_value *values;  /* [n_values], file order */
    gguf_tensor *tensors; /* [n_tensors], file order */
    int32_t *values_by_name;
    int32_t *tensors_by_name;
};

/* Where the walk through the header stands. */
typedef struct cursor {
    const uint8_t *start;
    size_t at;
    size_t n_bytes;
    pgd_why *why;
} cursor;

static size_t bytes_left(const cursor *c)
{
    return c->n_bytes - c->at;
}

static pgd_err fail_short(const cursor *c, uint64_t n_wanted, const char *what)
{
    return pgd_fail(c->why, PGD_EFORMAT,
                    "expected %" PRIu64
                    " bytes of %s, got %zu up to the end of the file, at byte %zu; "
                    "the file is damaged or was cut short, fetch it again",
                    n_wanted, what, bytes_left(c), c->at);
}

static pgd_err take(const uint8_t **out, cursor *c, uint64_t n_bytes, const char *what)
{
    *out = c->start + c->at;
    if (n_bytes > bytes_left(c))
        return fail_short(c, n_bytes, what);
    c->at += (size_t)n_bytes;
    return PGD_OK;
}

static pgd_err take_u32(uint32_t *out, cursor *c, const char *what)
{
    const uint8_t *p;
    PGD_TRY(take(&p, c, sizeof(*out), what));
    *out = bytes_load_u32(p);
    return PGD_OK;
}

static pgd_err take_u64(uint64_t *out, cursor *c, const char *what)
{
    const uint8_t *p;
    PGD_TRY(take(&p, c, sizeof(*out), what));
    *out = bytes_load_u64(p);
    return PGD_OK;
}

static pgd_err take_string(gguf_string *out, cursor *c, const char *what)
{
    uint64_t n_bytes = 0;
    const uint8_t *p;
    PGD_TRY(take_u64(&n_bytes, c, what));
    PGD_TRY(take(&p, c, n_bytes, what));
    out->data = (const char *)p;
    out->n_bytes = (size_t)n_bytes;
    return PGD_OK;
}

/* A key or a tensor name: 1 to max_bytes bytes, none of them a control character (they are
 * printed). */
static pgd_err take_name(gguf_string *out, cursor *c, size_t max_bytes, const char *what)
{
    size_t at = c->at;
    PGD_TRY(take_string(out, c, what));
    if (out->n_bytes == 0 || out->n_bytes > max_bytes)
        return pgd_fail(c->why, PGD_EFORMAT,
                        "expected a %s of 1 to %zu bytes, got %zu, at byte %zu", what, max_bytes,
                        out->n_bytes, at);
    for (size_t i = 0; i < out->n_bytes; i++) {
        unsigned char ch = (unsigned char)out->data[i];
        if (ch < 0x20 || ch == 0x7f)
            return pgd_fail(c->why, PGD_EFORMAT,
                            "expected a %s of printable characters, got byte 0x%02x, at byte %zu",
                            what, (unsigned)ch, at + 8 + i);
    }
    return PGD_OK;
}

/* Bytes of one element of a fixed-size type, 0 for strings and arrays, -1 for no type at all. */
static int scalar_bytes(uint32_t type)
{
    switch (type) {
    case GGUF_U8:
    case GGUF_I8:
    case GGUF_BOOL:
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
    case GGUF_STRING:
    case GGUF_ARRAY:
        return 0;
    default:
        return -1;
    }
}

static pgd_err fail_value_type(const cursor *c, uint32_t type, const gguf_string *key)
{
    return pgd_fail(c->why, PGD_EFORMAT,
                    "expected a value type of 0 to 12, got %" PRIu32
                    ", at byte %zu (value \"%.*s\")",
                    type, c->at - sizeof(type), (int)PGD_MIN(key->n_bytes, 100u), key->data);
}

/* Walks one array, its element type and count included. */
static pgd_err take_array(gguf_value *out, cursor *c, int depth, const gguf_string *key)
{
    uint32_t elem_type = 0;
    if (depth > MAX_ARRAY_DEPTH)
        return pgd_fail(
            c->why, PGD_EFORMAT,
            "expected arrays nested at most %d deep, got more, at byte %zu (value \"%.*s\")",
            MAX_ARRAY_DEPTH, c->at, (int)PGD_MIN(key->n_bytes, 100u), key->data);
    PGD_TRY(take_u32(&elem_type, c, "array element type"));
    int elem_bytes = scalar_bytes(elem_type);
    if (elem_bytes < 0)
        return fail_value_type(c, elem_type, key);
    PGD_TRY(take_u64(&out->n_elems, c, "array length"));
    out->type = GGUF_ARRAY;
    out->elem_type = (gguf_value_type)elem_type;
    out->data = c->start + c->at;

    size_t min_bytes = elem_bytes > 0             ? (size_t)elem_bytes
                       : elem_type == GGUF_STRING ? (size_t)MIN_STRING_BYTES
                                                  : (size_t)MIN_ARRAY_BYTES;
    if (out->n_elems > bytes_left(c) / min_bytes)
        return pgd_fail(c->why, PGD_EFORMAT,
                        "expected an array that fits the %zu bytes left, got %" PRIu64
                        " elements of at least %zu bytes, at byte %zu (value \"%.*s\")",
                        bytes_left(c), out->n_elems, min_bytes, c->at,
                        (int)PGD_MIN(key->n_bytes, 100u), key->data);
    if (elem_bytes > 0) {
        c->at += (size_t)out->n_elems * (size_t)elem_bytes;
        return PGD_OK;
    }
    for (uint64_t i = 0; i < out->n_elems; i++) {
        if (elem_type == GGUF_STRING) {
            gguf_string ignored;
            PGD_TRY(take_string(&ignored, c, "array string"));
        } else {
            gguf_value ignored;
            PGD_TRY(take_array(&ignored, c, depth + 1, key));
        }
    }
    return PGD_OK;
}

static pgd_err take_value(named_value *out, cursor *c)
{
    uint32_t type = 0;
    PGD_TRY(take_name(&out->key, c, MAX_KEY_BYTES, "metadata key"));
    PGD_TRY(take_u32(&type, c, "value type"));
    int n_bytes = scalar_bytes(type);
    if (n_bytes < 0)
        return fail_value_type(c, type, &out->key);
    out->value.type = (gguf_value_type)type;
    out->value.elem_type = (gguf_value_type)type;
    out->value.n_elems = 1;
    out->value.data = c->start + c->at;
    if (type == GGUF_ARRAY)
        return take_array(&out->value, c, 1, &out->key);
    if (type == GGUF_STRING) {
        gguf_string ignored;
        return take_string(&ignored, c, "string value");
    }
    const uint8_t *ignored;
    return take(&ignored, c, (uint64_t)n_bytes, "value");
}

/* Name, shape and type of one tensor; *offset is left for place_tensor, since the data start is not
 * known yet. */
static pgd_err take_tensor(gguf_tensor *out, uint64_t *offset, cursor *c)
{
    uint32_t n_dims = 0;
    uint32_t type = 0;
    PGD_TRY(take_name(&out->name, c, MAX_NAME_BYTES, "tensor name"));
    int name_len = (int)out->name.n_bytes;
    PGD_TRY(take_u32(&n_dims, c, "tensor dimension count"));
    if (n_dims < 1 || n_dims > 4)
        return pgd_fail(c->why, PGD_EFORMAT,
                        "expected 1 to 4 dimensions, got %" PRIu32
                        ", at byte %zu (tensor \"%.*s\")",
                        n_dims, c->at - sizeof(n_dims), name_len, out->name.data);
    out->n_dims = (int32_t)n_dims;
    for (int i = 0; i < 4; i++)
        out->dims[i] = 1;
    int64_t n_elems = 1;
    for (uint32_t i = 0; i < n_dims; i++) {
        uint64_t dim = 0;
        PGD_TRY(take_u64(&dim, c, "tensor dimension"));
        if (dim == 0 || dim > INT64_MAX || __builtin_mul_overflow(n_elems, (int64_t)dim, &n_elems))
            return pgd_fail(
                c->why, PGD_EFORMAT,
                "expected dimensions of at least 1 with a product below 2^63, got %" PRIu64
                " as dimension %" PRIu32 ", at byte %zu (tensor \"%.*s\")",
                dim, i, c->at - sizeof(dim), name_len, out->name.data);
        out->dims[n_dims - 1 - i] = (int64_t)dim;
    }
    PGD_TRY(take_u32(&type, c, "tensor type"));
    if (type > INT32_MAX)
        return pgd_fail(c->why, PGD_EFORMAT,
                        "expected a tensor type, got %" PRIu32 ", at byte %zu (tensor \"%.*s\")",
                        type, c->at - sizeof(type), name_len, out->name.data);
    out->type_id = (int32_t)type;
    const dtype_info *info = dtype_get_info(out->type_id);
    if (info != NULL) {
        int64_t row_elems = out->dims[out->n_dims - 1];
        if (row_elems % info->block_elems != 0)
            return pgd_fail(c->why, PGD_EFORMAT,
                            "expected rows of a multiple of %" PRId32 " values for %s, got %" PRId64
                            ", at byte %zu (tensor \"%.*s\")",
                            info->block_elems, info->name, row_elems, c->at, name_len,
                            out->name.data);
        if (__builtin_mul_overflow((size_t)(n_elems / info->block_elems), (size_t)info->block_bytes,
                                   &out->n_bytes))
            return pgd_fail(
                c->why, PGD_EFORMAT,
                "expected a tensor of less than 2^64 bytes, got more, at byte %zu (tensor "
                "\"%.*s\")",
                c->at, name_len, out->name.data);
    }
    return take_u64(offset, c, "tensor offset");
}

static int compare_strings(const gguf_string *a, const gguf_string *b)
{
    int order = memcmp(a->data, b->data, PGD_MIN(a->n_bytes, b->n_bytes));
    if (order != 0)
        return order;
    return a->n_bytes < b->n_bytes ? -1 : a->n_bytes > b->n_bytes;
}

static int order_values(const void *a, const void *b, void *arg)
{
    const named_value *values = arg;
    return compare_strings(&values[*(const int32_t *)a].key, &values[*(const int32_t *)b].key);
}

static int order_tensors(const void *a, const void *b, void *arg)
{
    const gguf_tensor *tensors = arg;
    return compare_strings(&tensors[*(const int32_t *)a].name, &tensors[*(const int32_t *)b].name);
}

static int order_places(const void *a, const void *b, void *arg)
{
    const gguf_tensor *tensors = arg;
    const gguf_tensor *x = &tensors[*(const int32_t *)a];
    const gguf_tensor *y = &tensors[*(const int32_t *)b];
    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return x->n_bytes < y->n_bytes ? -1 : x->n_bytes > y->n_bytes;
}

static int32_t *create_order(int32_t n, void *items,
                             int (*order)(const void *, const void *, void *))
{
    int32_t *idx = mem_calloc((size_t)n, sizeof(*idx));
    if (idx == NULL)
        return NULL;
    for (int32_t i = 0; i < n; i++)
        idx[i] = i;
    if (n > 1)
        qsort_r(idx, (size_t)n, sizeof(*idx), order, items);
    return idx;
}

static pgd_err fail_duplicate(pgd_why *why, const char *what, const gguf_string *name)
{
    return pgd_fail(why, PGD_EFORMAT, "expected unique %ss, got \"%.*s\" twice", what,
                    (int)PGD_MIN(name->n_bytes, 255u), name->data);
}

static pgd_err index_names(gguf_file *f, pgd_why *why)
{
    f->values_by_name = create_order(f->n_values, f->values, order_values);
    f->tensors_by_name = create_order(f->n_tensors, f->tensors, order_tensors);
    if (f->values_by_name == NULL || f->tensors_by_name == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for the index of a GGUF file");
    for (int32_t i = 1; i < f->n_values; i++) {
        const gguf_string *key = &f->values[f->values_by_name[i]].key;
        if (compare_strings(&f->values[f->values_by_name[i - 1]].key, key) == 0)
            return fail_duplicate(why, "metadata key", key);
    }
    for (int32_t i = 1; i < f->n_tensors; i++) {
        const gguf_string *name = &f->tensors[f->tensors_by_name[i]].name;
        if (compare_strings(&f->tensors[f->tensors_by_name[i - 1]].name, name) == 0)
            return fail_duplicate(why, "tensor name", name);
    }
    return PGD_OK;
}

static pgd_err read_alignment(size_t *out, const gguf_file *f, pgd_why *why)
{
    int64_t alignment = DEFAULT_ALIGNMENT;
    if (gguf_get_value(f, "general.alignment") != NULL &&
        (!gguf_get_i64(f, "general.alignment", &alignment) || alignment < MIN_ALIGNMENT ||
         alignment > MAX_ALIGNMENT || (alignment & (alignment - 1)) != 0))
        return pgd_fail(why, PGD_EFORMAT,
                        "expected a power of two from %d to %d, got %" PRId64
                        ", at metadata key general.alignment",
                        MIN_ALIGNMENT, MAX_ALIGNMENT, alignment);
    *out = (size_t)alignment;
    return PGD_OK;
}

/* offsets: [n_tensors], from the data start. A tensor of unknown type counts as empty. */
static pgd_err place_tensors(gguf_file *f, const uint64_t *offsets, size_t header_bytes,
                             pgd_why *why)
{
    size_t alignment = DEFAULT_ALIGNMENT;
    PGD_TRY(read_alignment(&alignment, f, why));
    size_t padding = (alignment - header_bytes % alignment) % alignment;
    if (f->n_tensors == 0)
        return PGD_OK;
    if (padding > f->map.n_bytes - header_bytes)
        return pgd_fail(
            why, PGD_EFORMAT,
            "expected tensor data at byte %zu, got a file of %zu bytes; it was cut short, fetch "
            "it again",
            header_bytes + padding, f->map.n_bytes);
    size_t data_start = header_bytes + padding;
    size_t data_bytes = f->map.n_bytes - data_start;
    for (int32_t i = 0; i < f->n_tensors; i++) {
        gguf_tensor *t = &f->tensors[i];
        int name_len = (int)t->name.n_bytes;
        if (offsets[i] % alignment != 0)
            return pgd_fail(why, PGD_EFORMAT,
                            "expected an offset that is a multiple of %zu, got %" PRIu64
                            ", at tensor \"%.*s\"",
                            alignment, offsets[i], name_len, t->name.data);
        if (offsets[i] > data_bytes || t->n_bytes > data_bytes - offsets[i])
            return pgd_fail(
                why, PGD_EFORMAT,
                "expected %zu bytes of data at offset %" PRIu64
                ", got a data section of %zu bytes, at tensor \"%.*s\"; the file is damaged or "
                "was cut short, fetch it again",
                t->n_bytes, offsets[i], data_bytes, name_len, t->name.data);
        t->data = f->map.data + data_start + (size_t)offsets[i];
    }
    return PGD_OK;
}

static pgd_err check_overlaps(gguf_file *f, pgd_why *why)
{
    int32_t *by_place = create_order(f->n_tensors, f->tensors, order_places);
    if (by_place == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for the index of a GGUF file");
    pgd_err err = PGD_OK;
    for (int32_t i = 1; i < f->n_tensors && err == PGD_OK; i++) {
        const gguf_tensor *a = &f->tensors[by_place[i - 1]];
        const gguf_tensor *b = &f->tensors[by_place[i]];
        if (a->data + a->n_bytes > b->data)
            err = pgd_fail(
                why, PGD_EFORMAT,
                "expected tensors that do not overlap, got \"%.*s\" reaching %td bytes into "
                "\"%.*s\"",
                (int)a->name.n_bytes, a->name.data, a->data + a->n_bytes - b->data,
                (int)b->name.n_bytes, b->name.data);
    }
    mem_free(by_place);
    return err;
}

/* Magic, version and the two counts. */
static pgd_err take_header(gguf_file *f, cursor *c)
{
    const uint8_t *magic;
    uint64_t n_tensors = 0;
    uint64_t n_values = 0;
    PGD_TRY(take(&magic, c, 4, "GGUF magic"));
    if (memcmp(magic, "GGUF", 4) != 0)
        return pgd_fail(
            c->why, PGD_EFORMAT,
            "expected a GGUF file (bytes 47 47 55 46), got %02x %02x %02x %02x, at byte 0",
            magic[0], magic[1], magic[2], magic[3]);
    PGD_TRY(take_u32(&f->version, c, "GGUF version"));
    if (f->version != 2 && f->version != 3) {
        if ((f->version & 0xffffu) == 0)
            return pgd_fail(
                c->why, PGD_EUNSUPPORTED,
                "expected a little-endian GGUF file, got a big-endian one, at byte 4; convert "
                "it to little-endian");
        return pgd_fail(c->why, PGD_EUNSUPPORTED,
                        "expected GGUF version 2 or 3, got %" PRIu32
                        ", at byte 4; convert the model again",
                        f->version);
    }
    PGD_TRY(take_u64(&n_tensors, c, "tensor count"));
    PGD_TRY(take_u64(&n_values, c, "metadata count"));
    if (n_tensors > MAX_TENSORS || n_tensors > bytes_left(c) / MIN_TENSOR_BYTES)
        return pgd_fail(c->why, PGD_EFORMAT,
                        "expected at most %d tensors that fit the %zu bytes left, got %" PRIu64
                        ", at byte 8",
                        MAX_TENSORS, bytes_left(c), n_tensors);
    if (n_values > MAX_VALUES || n_values > bytes_left(c) / MIN_VALUE_BYTES)
        return pgd_fail(
            c->why, PGD_EFORMAT,
            "expected at most %d metadata values that fit the %zu bytes left, got %" PRIu64
            ", at byte 16",
            MAX_VALUES, bytes_left(c), n_values);
    f->n_tensors = (int32_t)n_tensors;
    f->n_values = (int32_t)n_values;
    return PGD_OK;
}

static pgd_err read_directory(gguf_file *f, pgd_why *why)
{
    if (f->map.n_bytes == 0)
        return pgd_fail(why, PGD_EFORMAT, "expected a GGUF file, got an empty file");
    cursor c = {.start = f->map.data, .n_bytes = f->map.n_bytes, .why = why};
    PGD_TRY(take_header(f, &c));
    f->values = mem_calloc((size_t)f->n_values, sizeof(*f->values));
    f->tensors = mem_calloc((size_t)f->n_tensors, sizeof(*f->tensors));
    uint64_t *offsets = mem_calloc((size_t)f->n_tensors, sizeof(*offsets));
    pgd_err err = PGD_OK;
    if (f->values == NULL || f->tensors == NULL || offsets == NULL)
        err = pgd_fail(why, PGD_ENOMEM, "out of memory for the directory of a GGUF file");
    for (int32_t i = 0; i < f->n_values && err == PGD_OK; i++)
        err = take_value(&f->values[i], &c);
    for (int32_t i = 0; i < f->n_tensors && err == PGD_OK; i++)
        err = take_tensor(&f->tensors[i], &offsets[i], &c);
    f->header_bytes = c.at;
    if (err == PGD_OK)
        err = index_names(f, why);
    if (err == PGD_OK)
        err = place_tensors(f, offsets, c.at, why);
    if (err == PGD_OK)
        err = check_overlaps(f, why);
    mem_free(offsets);
    return err;
}

pgd_err gguf_open(gguf_file **out, const char *path, pgd_why *why)
{
    *out = NULL;
    gguf_file *f = mem_calloc(1, sizeof(*f));
    if (f == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for a GGUF file");
    pgd_err err = file_map_open(&f->map, path, why);
    if (err == PGD_OK) {
        err = read_directory(f, why);
        if (err != PGD_OK)
            (void)pgd_fail_prefix(why, err, "%s", path);
    }
    if (err != PGD_OK) {
        gguf_close(f);
        return err;
    }
    *out = f;
    return PGD_OK;
}

void gguf_close(gguf_file *file)
{
    if (file == NULL)
        return;
    mem_free(file->values);
    mem_free(file->tensors);
    mem_free(file->values_by_name);
    mem_free(file->tensors_by_name);
    file_map_close(&file->map);
    mem_free(file);
}

/* The idx-th name in order. */
typedef const gguf_string *(*name_at_fn)(const gguf_file *file, int32_t idx);

static const gguf_string *tensor_at(const gguf_file *file, int32_t idx)
{
    return &file->tensors[file->tensors_by_name[idx]].name;
}

static const gguf_string *value_at(const gguf_file *file, int32_t idx)
{
    return &file->values[file->values_by_name[idx]].key;
}

/* Place of name in the order of n names, or -1. */
static int32_t bisect(const gguf_file *file, const char *name, int32_t n, name_at_fn name_at)
{
    gguf_string wanted = {name, strlen(name)};
    int32_t lo = 0;
    int32_t hi = n;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        int order = compare_strings(&wanted, name_at(file, mid));
        if (order == 0)
            return mid;
        if (order < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return -1;
}

uint32_t gguf_version(const gguf_file *file)
{
    return file->version;
}

const uint8_t *gguf_get_header(const gguf_file *file, size_t *n_bytes)
{
    *n_bytes = file->header_bytes;
    return file->map.data;
}

int32_t gguf_n_tensors(const gguf_file *file)
{
    return file->n_tensors;
}

const gguf_tensor *gguf_get_tensor_at(const gguf_file *file, int32_t idx)
{
    return &file->tensors[idx];
}

const gguf_tensor *gguf_get_tensor(const gguf_file *file, const char *name)
{
    int32_t idx = bisect(file, name, file->n_tensors, tensor_at);
    return idx < 0 ? NULL : &file->tensors[file->tensors_by_name[idx]];
}

int32_t gguf_n_values(const gguf_file *file)
{
    return file->n_values;
}

const gguf_value *gguf_get_value_at(const gguf_file *file, int32_t idx, gguf_string *key)
{
    *key = file->values[idx].key;
    return &file->values[idx].value;
}

const gguf_value *gguf_get_value(const gguf_file *file, const char *key)
{
    int32_t idx = bisect(file, key, file->n_values, value_at);
    return idx < 0 ? NULL : &file->values[file->values_by_name[idx]].value;
}
