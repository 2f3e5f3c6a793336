/* safetensors files and sharded directories: what a good one yields, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/model/safetensors.h"
#include "common/model/weight_shards.h"

#define MODEL_DIR_FILE "model.safetensors"
#include "tests/unit/model_dir.h"

#define ONE_F32(name, begin, end) \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[" #begin "," #end "]}"

static safetensors_file *open_ok(const char *header, size_t n_data)
{
    safetensors_file *f = NULL;
    pgd_why why = {{0}};
    builder_write_safetensors(dir, "model.safetensors", header, n_data);
    pgd_err err = safetensors_open(&f, path, &why);
    if (err != PGD_OK)
        fail_msg("safetensors_open: %d %s", (int)err, why.text);
    return f;
}

static void check_refused(pgd_err wanted_err, const char *wanted)
{
    safetensors_file *f = NULL;
    pgd_why why = {{0}};
    pgd_err err = safetensors_open(&f, path, &why);
    check_refusal(err, wanted_err, &why, wanted);
    assert_null(f);
}

static void open_fails(const char *header, size_t n_data, pgd_err wanted_err, const char *wanted)
{
    builder_write_safetensors(dir, "model.safetensors", header, n_data);
    check_refused(wanted_err, wanted);
}

static void test_safetensors_reads_tensors(void **state)
{
    (void)state;
    safetensors_file *f = open_ok(
        "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]}," ONE_F32(
            "a", 0, 24) ",\"scalar\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[32,40]},"
                        "\"none\":{\"dtype\":\"F16\",\"shape\":[0,7],\"data_offsets\":[40,40]}}   ",
        40);
    assert_int_equal(safetensors_n_tensors(f), 4);
    const safetensors_tensor *a = safetensors_get_tensor(f, "a");
    assert_non_null(a);
    assert_ptr_equal(a, safetensors_get_tensor_at(f, 0));
    assert_int_equal(a->type, DTYPE_F32);
    assert_int_equal(a->n_dims, 2);
    assert_int_equal(a->dims[0], 2);
    assert_int_equal(a->dims[1], 3);
    assert_int_equal(a->n_bytes, 24);
    assert_int_equal(a->data[0], 1);
    const safetensors_tensor *b = safetensors_get_tensor(f, "b");
    assert_int_equal(b->type, DTYPE_BF16);
    assert_ptr_equal(b->data, a->data + 24);
    const safetensors_tensor *scalar = safetensors_get_tensor(f, "scalar");
    assert_int_equal(scalar->n_dims, 0);
    assert_int_equal(scalar->type, DTYPE_NONE);
    assert_string_equal(scalar->type_name, "F64");
    assert_int_equal(safetensors_get_tensor(f, "none")->n_bytes, 0);
    assert_null(safetensors_get_tensor(f, "c"));
    safetensors_close(f);

    f = open_ok("{}", 0);
    assert_int_equal(safetensors_n_tensors(f), 0);
    assert_null(safetensors_get_tensor(f, "a"));
    safetensors_close(f);
    safetensors_close(NULL);
}

/* B067: shape, offsets and file must agree. */
static void test_safetensors_refuses_disagreement(void **state)
{
    (void)state;
    open_fails("{" ONE_F32("a", 0, 65536) "}", 65536, PGD_EFORMAT,
               "expected 24 bytes for its shape");
    open_fails("{" ONE_F32("a", 0, 24) "}", 23, PGD_EFORMAT, "data section of 23 bytes");
    open_fails("{" ONE_F32("a", 0, 24) "}", 25, PGD_EFORMAT, "got 25 bytes in the file");
    open_fails("{" ONE_F32("a", 8, 32) "}", 32, PGD_EFORMAT, "no holes");
    open_fails("{" ONE_F32("a", 0, 24) "," ONE_F32("b", 20, 44) "}", 44, PGD_EFORMAT,
               "no overlaps");
    open_fails("{" ONE_F32("a", 0, 24) "," ONE_F32("b", 0, 24) "}", 24, PGD_EFORMAT, "no overlaps");
    open_fails("{" ONE_F32("a", 24, 0) "}", 24, PGD_EFORMAT, "ascending");
    open_fails("{" ONE_F32("a", -24, 0) "}", 24, PGD_EFORMAT, "data_offsets");
    open_fails("{" ONE_F32("a", 0.5, 24.5) "}", 24, PGD_EFORMAT, "data_offsets");
    open_fails("{" ONE_F32("a", 9007199254740992, 18446744073709551615) "}", 24, PGD_EFORMAT,
               "data_offsets");
    open_fails("{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0]}}", 24, PGD_EFORMAT,
               "two ascending");
    open_fails("{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24,24]}}", 24,
               PGD_EFORMAT, "two ascending");
    open_fails("{\"a\":{\"dtype\":\"F32\",\"shape\":[6]}}", 24, PGD_EFORMAT, "data_offsets");
}

static void test_safetensors_refuses_absurd_shapes(void **state)
{
    (void)state;
    static const char *const shapes[] = {"[4294967296,4294967296]",
                                         "[4398046511105,4194304]",
                                         "[-1]",
                                         "[1e300]",
                                         "[1.5]",
                                         "[\"6\"]",
                                         "[null]",
                                         "[1,1,1,1,1,1,1,1,6]"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(shapes); i++) {
        char header[256];
        (void)snprintf(header, sizeof(header),
                       "{\"a\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[0,24]}}",
                       shapes[i]);
        open_fails(header, 24, PGD_EFORMAT, "dimension");
    }
    open_fails("{\"a\":{\"dtype\":\"F32\",\"shape\":6,\"data_offsets\":[0,24]}}", 24, PGD_EFORMAT,
               "shape");
    open_fails(
        "{\"a\":{\"dtype\":\"F64\",\"shape\":[9007199254740992,512],\"data_offsets\":[0,24]}}", 24,
        PGD_EFORMAT, "2^64");
}

static void test_safetensors_refuses_bad_header(void **state)
{
    (void)state;
    static const uint64_t lengths[] = {
        3, 200, UINT64_C(1) << 31, UINT64_C(1) << 63, UINT64_MAX - 8, UINT64_MAX};
    char file[8 + 2];
    memcpy(file + 8, "{}", 2);
    for (size_t i = 0; i < PGD_ARRAY_LEN(lengths); i++) {
        memcpy(file, &lengths[i], 8);
        builder_write(path, file, sizeof(file));
        check_refused(PGD_EFORMAT, "a header of at most 2 bytes");
    }
    builder_write(path, file, 7);
    check_refused(PGD_EFORMAT, "at least 8 bytes, got 7");
    builder_write(path, "", 0);
    check_refused(PGD_EFORMAT, "at least 8 bytes, got 0");
    open_fails("", 0, PGD_EFORMAT, "header");
    open_fails("[]", 0, PGD_EFORMAT, "a JSON object");
    open_fails("{\"a\":1}", 0, PGD_EFORMAT, "at tensor \"a\"");
    open_fails("{\"a\":{}}", 0, PGD_EFORMAT, "\"dtype\"");
    open_fails("{\"a\":{\"dtype\":7}}", 0, PGD_EFORMAT, "\"dtype\"");
    open_fails("{\"a\":{\"dtype\":\"F4\",\"shape\":[],\"data_offsets\":[0,0]}}", 0,
               PGD_EUNSUPPORTED, "\"F4\"");
    open_fails("{" ONE_F32("", 0, 24) "}", 24, PGD_EFORMAT, "printable");
    open_fails("{" ONE_F32("a\\u0000b", 0, 24) "}", 24, PGD_EFORMAT, "printable");
    open_fails("{" ONE_F32("a\\u001b[2J", 0, 24) "}", 24, PGD_EFORMAT, "printable");
    open_fails("{" ONE_F32("a", 0, 24) "," ONE_F32("a", 24, 48) "}", 48, PGD_EFORMAT,
               "\"a\" twice");
    open_fails("{\"a\":{\"b\":{\"c\":{\"d\":{\"e\":{\"f\":{\"g\":{\"h\":{\"i\":1}}}}}}}}}", 0,
               PGD_EFORMAT, "nested");
}

/* A header that ends in digits at the very end of a page: nothing behind the map may be read. */
static void test_safetensors_header_at_end_of_page(void **state)
{
    (void)state;
    char header[4096 - 8 + 1];
    memset(header, ' ', sizeof(header) - 1);
    header[0] = '{';
    memcpy(header + sizeof(header) - 1 - 9, "\"a\":12345", 9);
    header[sizeof(header) - 1] = '\0';
    open_fails(header, 0, PGD_EFORMAT, "header");
}

static void write_shards(const char *index, bool write_second)
{
    builder_remove_dir(dir);
    if (mkdir(dir, 0700) != 0)
        abort();
    builder_write_safetensors(dir, "s1.safetensors",
                              "{" ONE_F32("b", 0, 24) "," ONE_F32("d", 24, 48) "}", 48);
    if (write_second)
        builder_write_safetensors(dir, "s2.safetensors", "{" ONE_F32("a", 0, 24) "}", 24);
    builder_write_text(dir, "model.safetensors.index.json", index);
}

static void test_weight_shards_reads_index(void **state)
{
    (void)state;
    weight_shards *s = NULL;
    pgd_why why = {{0}};
    write_shards(
        "{\"metadata\":{\"total_size\":72},\"weight_map\":{\"a\":\"s2.safetensors\",\"b\":\"s1."
        "safetensors\",\"d\":\"s1.safetensors\"}}",
        true);
    assert_int_equal(weight_shards_open(&s, dir, &why), PGD_OK);
    assert_int_equal(weight_shards_n_files(s), 2);
    assert_int_equal(weight_shards_n_tensors(s), 3);
    assert_string_equal(weight_shards_get_tensor_at(s, 0)->name, "a");
    assert_string_equal(weight_shards_get_tensor_at(s, 1)->name, "b");
    assert_string_equal(weight_shards_get_tensor_at(s, 2)->name, "d");
    weight_shards_close(s);
    weight_shards_close(NULL);
}

static void shards_fail(pgd_err wanted_err, const char *wanted)
{
    weight_shards *s = NULL;
    pgd_why why = {{0}};
    pgd_err err = weight_shards_open(&s, dir, &why);
    if (err == PGD_OK)
        fail_msg("opened, expected a refusal with \"%s\"", wanted);
    assert_null(s);
    assert_int_equal(err, wanted_err);
    if (strstr(why.text, wanted) == NULL)
        fail_msg("message \"%s\" lacks \"%s\"", why.text, wanted);
}

/* B066, B068. */
static void test_weight_shards_refuses_bad_index(void **state)
{
    (void)state;
    static const char *const names[] = {"../s1.safetensors",
                                        "/etc/s1.safetensors",
                                        "x/../s1.safetensors",
                                        ".hidden.safetensors",
                                        ".safetensors",
                                        "passwd",
                                        "",
                                        "s1.safetensors\\u0000",
                                        "s\\\\1.safetensors",
                                        "s1.safetensors/"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(names); i++) {
        char index[256];
        (void)snprintf(index, sizeof(index), "{\"weight_map\":{\"tensor.x\":\"%s\"}}", names[i]);
        write_shards(index, true);
        shards_fail(PGD_EFORMAT, "tensor.x");
    }
    write_shards("{\"weight_map\":{\"a\":7}}", true);
    shards_fail(PGD_EFORMAT, "\"a\"");
    write_shards("{\"weight_map\":{\"q\":\"s1.safetensors\"}}", true);
    shards_fail(PGD_EFORMAT, "expected tensor \"q\" in shard s1.safetensors");
    write_shards("{\"weight_map\":{\"b\":\"s1.safetensors\",\"a\":\"s2.safetensors\"}}", false);
    shards_fail(PGD_ENOENT, "shard of tensor \"a\"");
    write_shards("{\"weight_map\":{}}", true);
    shards_fail(PGD_EFORMAT, "weight_map");
    write_shards("{}", true);
    shards_fail(PGD_EFORMAT, "weight_map");
    write_shards("[", true);
    shards_fail(PGD_EFORMAT, "index.json");
    write_shards("{\"weight_map\":{\"a\":\"s2.safetensors\",\"b\":\"s1.safetensors\"}}", true);
    builder_write_safetensors(dir, "s2.safetensors",
                              "{" ONE_F32("a", 0, 24) "," ONE_F32("b", 24, 48) "}", 48);
    shards_fail(PGD_EFORMAT, "got \"b\" in two");
    builder_remove_dir(dir);
    if (mkdir(dir, 0700) != 0)
        abort();
    shards_fail(PGD_ENOENT, "model.safetensors");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_safetensors_reads_tensors),
        cmocka_unit_test(test_safetensors_refuses_disagreement),
        cmocka_unit_test(test_safetensors_refuses_absurd_shapes),
        cmocka_unit_test(test_safetensors_refuses_bad_header),
        cmocka_unit_test(test_safetensors_header_at_end_of_page),
        cmocka_unit_test(test_weight_shards_reads_index),
        cmocka_unit_test(test_weight_shards_refuses_bad_index),
    };
    return cmocka_run_group_tests(tests, make_model_dir, remove_model_dir);
}
