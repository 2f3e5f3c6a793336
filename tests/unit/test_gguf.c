/* GGUF: what a good file yields, and that each kind of damage is refused with a message naming the
 * place. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/model/gguf.h"
#include "tests/unit/model_dir.h"

static gguf_file *open_ok(const builder *b)
{
    gguf_file *f = NULL;
    pgd_why why = {{0}};
    builder_write(path, b->data, b->n_bytes);
    pgd_err err = gguf_open(&f, path, &why);
    if (err != PGD_OK)
        fail_msg("gguf_open: %d %s", (int)err, why.text);
    return f;
}

/* The file is refused with err, and the message holds wanted. */
static void open_fails(const void *data, size_t n_bytes, pgd_err wanted_err, const char *wanted)
{
    gguf_file *f = NULL;
    pgd_why why = {{0}};
    builder_write(path, data, n_bytes);
    pgd_err err = gguf_open(&f, path, &why);
    check_refusal(err, wanted_err, &why, wanted);
    assert_null(f);
}

static void test_gguf_reads_metadata(void **state)
{
    (void)state;
    builder b;
    builder_llama(&b);
    gguf_file *f = open_ok(&b);
    int64_t i = 0;
    double d = 0;
    bool flag = false;
    gguf_string s = {0};
    assert_int_equal(gguf_version(f), 3);
    assert_int_equal(gguf_n_values(f), b.n_values);
    assert_true(gguf_get_string(f, "general.name", &s));
    assert_int_equal(s.n_bytes, 10);
    assert_memory_equal(s.data, "test model", 10);
    assert_true(gguf_get_i64(f, "llama.embedding_length", &i));
    assert_int_equal(i, 256);
    assert_true(gguf_get_f64(f, "llama.rope.freq_base", &d));
    assert_true(d == 50000.0);
    assert_true(gguf_get_f64(f, "llama.embedding_length", &d)); /* an integer serves as a number */
    assert_true(d == 256.0);
    assert_true(gguf_get_bool(f, "tokenizer.ggml.add_bos_token", &flag) && flag);

    assert_false(gguf_get_i64(f, "llama.rope.freq_base", &i)); /* no silent truncation */
    assert_false(gguf_get_i64(f, "no.such.key", &i));
    assert_false(gguf_get_string(f, "llama.block_count", &s));
    assert_false(gguf_get_bool(f, "llama.block_count", &flag));
    assert_false(gguf_get_f64(f, "general.name", &d));
    assert_null(gguf_get_value(f, "general.nam"));
    assert_null(gguf_get_value(f, ""));
    gguf_close(f);
    builder_free(&b);
}

static void test_gguf_walks_arrays(void **state)
{
    (void)state;
    builder b;
    builder_llama(&b);
    gguf_file *f = open_ok(&b);
    const gguf_value *tokens = gguf_get_value(f, "tokenizer.ggml.tokens");
    const gguf_value *types = gguf_get_value(f, "tokenizer.ggml.token_type");
    assert_non_null(tokens);
    assert_int_equal(tokens->type, GGUF_ARRAY);
    assert_int_equal(tokens->elem_type, GGUF_STRING);
    assert_int_equal(tokens->n_elems, 48);
    gguf_array_iter iter;
    gguf_string s = {0};
    int n = 0;
    gguf_array_begin(&iter, tokens);
    while (gguf_array_next_string(&iter, &s))
        n++;
    assert_int_equal(n, 48);
    assert_memory_equal(s.data, "<|im_end|>", 10);
    int64_t type = 0;
    double d = 0;
    assert_true(gguf_array_i64(types, 47, &type));
    assert_int_equal(type, 3);
    assert_true(gguf_array_f64(types, 0, &d) && d == 1.0);
    assert_false(gguf_array_i64(types, 48, &type));
    assert_false(gguf_array_i64(types, UINT64_MAX, &type));
    assert_false(gguf_array_i64(tokens, 0, &type));
    gguf_array_begin(&iter, types); /* no strings in it */
    assert_false(gguf_array_next_string(&iter, &s));
    gguf_close(f);
    builder_free(&b);
}

static void test_gguf_reads_tensors(void **state)
{
    (void)state;
    builder b;
    builder_llama(&b);
    gguf_file *f = open_ok(&b);
    assert_int_equal(gguf_n_tensors(f), 13);
    const gguf_tensor *t = gguf_get_tensor(f, "blk.0.attn_k.weight");
    assert_non_null(t);
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->dims[0], 128); /* rows first */
    assert_int_equal(t->dims[1], 256);
    assert_int_equal(t->dims[2], 1);
    assert_int_equal(t->type_id, DTYPE_Q4_1);
    assert_int_equal(t->n_bytes, 128 * 256 / 32 * 20);
    assert_null(gguf_get_tensor(f, "blk.0.attn_k"));
    /* Data lie where the builder put them: the pattern begins at the data start. */
    const gguf_tensor *first = gguf_get_tensor_at(f, 0);
    size_t data_start = (b.header_bytes + 31) / 32 * 32;
    assert_memory_equal(first->data, b.data + data_start, first->n_bytes);
    const gguf_tensor *last = gguf_get_tensor(f, "output.weight");
    assert_memory_equal(last->data, b.data + b.n_bytes - last->n_bytes, last->n_bytes);
    gguf_close(f);
    builder_free(&b);
}

static void test_gguf_lists_unknown_tensor_type(void **state)
{
    (void)state;
    builder b;
    builder_begin(&b);
    builder_tensor(&b, "x", (dtype)99, 4, 32);
    b.next_offset = 0;
    builder_tensor(&b, "y", DTYPE_F32, 0, 8);
    builder_end(&b);
    gguf_file *f = open_ok(&b);
    assert_int_equal(gguf_get_tensor(f, "x")->type_id, 99);
    assert_int_equal(gguf_get_tensor(f, "x")->n_bytes, 0);
    assert_int_equal(gguf_get_tensor(f, "y")->n_bytes, 32);
    gguf_close(f);
    builder_free(&b);
}

static void test_gguf_accepts_empty_directory(void **state)
{
    (void)state;
    builder b;
    builder_begin(&b);
    builder_end(&b);
    gguf_file *f = open_ok(&b);
    assert_int_equal(gguf_n_tensors(f), 0);
    assert_int_equal(gguf_n_values(f), 0);
    assert_null(gguf_get_tensor(f, "x"));
    gguf_close(f);
    b.data[4] = 2; /* version 2 has the same layout */
    f = open_ok(&b);
    assert_int_equal(gguf_version(f), 2);
    gguf_close(f);
    builder_free(&b);
}

static void test_gguf_refuses_other_files(void **state)
{
    (void)state;
    gguf_file *f = NULL;
    pgd_why why = {{0}};
    builder b;
    builder_begin(&b);
    builder_end(&b);
    open_fails("", 0, PGD_EFORMAT, "empty");
    open_fails("GG", 2, PGD_EFORMAT, "magic");
    open_fails("#!/bin/sh\nexit 0\n", 17, PGD_EFORMAT, "expected a GGUF file");
    b.data[4] = 1;
    open_fails(b.data, b.n_bytes, PGD_EUNSUPPORTED, "version 2 or 3, got 1");
    memcpy(b.data + 4, "\0\0\0\3", 4);
    open_fails(b.data, b.n_bytes, PGD_EUNSUPPORTED, "big-endian");
    assert_int_equal(gguf_open(&f, "/no/such/file.gguf", &why), PGD_ENOENT);
    assert_non_null(strstr(why.text, "/no/such/file.gguf"));
    assert_int_equal(gguf_open(&f, dir, &why), PGD_EIO); /* a directory */
    assert_int_equal(gguf_open(&f, "/dev/null", NULL), PGD_EIO);
    gguf_close(NULL);
    builder_free(&b);
}

/* B063: counts and lengths far beyond the file. */
static void test_gguf_refuses_absurd_counts(void **state)
{
    (void)state;
    static const uint64_t absurd[] = {
        1, 65537, UINT64_C(1) << 31, UINT64_C(1) << 32, UINT64_C(1) << 60, UINT64_MAX};
    builder b;
    for (size_t i = 0; i < PGD_ARRAY_LEN(absurd); i++) {
        builder_begin(&b);
        builder_end(&b);
        memcpy(b.data + 8, &absurd[i], 8);
        open_fails(b.data, b.n_bytes, PGD_EFORMAT, "tensors that fit");
        memset(b.data + 8, 0, 8);
        memcpy(b.data + 16, &absurd[i], 8);
        open_fails(b.data, b.n_bytes, PGD_EFORMAT, "metadata values that fit");
        builder_free(&b);
    }
    builder_begin(&b);
    builder_kv_array(&b, "k", GGUF_STRING, UINT64_C(1) << 60);
    builder_end(&b);
    open_fails(b.data, b.n_bytes, PGD_EFORMAT, "an array that fits");
    builder_free(&b);
    builder_begin(&b);
    builder_key(&b, "k", GGUF_STRING);
    builder_u64(&b, UINT64_C(1) << 30);
    builder_end(&b);
    open_fails(b.data, b.n_bytes, PGD_EFORMAT, "expected 1073741824 bytes of string value");
    builder_free(&b);
}

static void test_gguf_refuses_bad_alignment(void **state)
{
    (void)state;
    static const uint32_t bad[] = {0, 1, 3, 4, 33, 1u << 17, 1u << 30, UINT32_MAX};
    for (size_t i = 0; i < PGD_ARRAY_LEN(bad); i++) {
        builder b;
        builder_begin(&b);
        builder_kv_u32(&b, "general.alignment", bad[i]);
        builder_end(&b);
        open_fails(b.data, b.n_bytes, PGD_EFORMAT, "general.alignment");
        builder_free(&b);
    }
    builder b;
    builder_begin(&b);
    builder_kv_string(&b, "general.alignment", "32");
    builder_end(&b);
    open_fails(b.data, b.n_bytes, PGD_EFORMAT, "general.alignment");
    builder_free(&b);
}

/* One tensor "t" with the given dimensions, type and offset, over 4 KB of data. */
static void one_tensor(builder *b, uint32_t n_dims, const uint64_t *dims, uint32_t type,
                       uint64_t offset)
{
    builder_begin(b);
    b->n_tensors = 1;
    builder_string(b, "t");
    builder_u32(b, n_dims);
    for (uint32_t i = 0; i < n_dims && i < 8; i++)
        builder_u64(b, dims[i]);
    builder_u32(b, type);
    builder_u64(b, offset);
    b->next_offset = 4096;
    builder_end(b);
}

/* B061: dimensions whose product wraps, or is zero. */
static void test_gguf_refuses_overflowing_dimensions(void **state)
{
    (void)state;
    static const struct {
        uint32_t n_dims;
        uint64_t dims[4];
        uint32_t type;
        const char *wanted;
    } cases[] = {
        {1, {0}, DTYPE_F32, "tensor \"t\""},
        {2, {32, 0}, DTYPE_F32, "tensor \"t\""},
        {2, {(UINT64_C(1) << 42) + 1, UINT64_C(1) << 22}, DTYPE_F32, "product below 2^63"},
        {2, {UINT64_C(1) << 32, UINT64_C(1) << 32}, DTYPE_F32, "product below 2^63"},
        {2, {UINT64_C(1) << 32, (UINT64_C(1) << 31) - 1}, DTYPE_F32, "less than 2^64 bytes"},
        {1, {UINT64_C(1) << 63}, DTYPE_I8, "product below 2^63"},
        {1, {UINT64_MAX}, DTYPE_I8, "product below 2^63"},
        {1, {(UINT64_C(1) << 63) - 1}, DTYPE_I8, "data section of 4096"},
        {1, {UINT64_C(1) << 62}, DTYPE_F32, "less than 2^64 bytes"},
        {1, {31}, DTYPE_Q4_0, "multiple of 32"},
        {2, {32, 256}, DTYPE_Q6_K, "multiple of 256"},
        {0, {0}, DTYPE_F32, "1 to 4 dimensions"},
        {5, {1, 1, 1, 1}, DTYPE_F32, "1 to 4 dimensions"},
        {UINT32_MAX, {1}, DTYPE_F32, "1 to 4 dimensions"},
        {1, {32}, UINT32_MAX, "a tensor type"},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        builder b;
        one_tensor(&b, cases[i].n_dims, cases[i].dims, cases[i].type, 0);
        open_fails(b.data, b.n_bytes, PGD_EFORMAT, cases[i].wanted);
        builder_free(&b);
    }
}

static void test_gguf_refuses_offsets_outside(void **state)
{
    (void)state;
    uint64_t dims[1] = {32};
    static const uint64_t aligned[] = {4096, 8192, UINT64_C(1) << 63, UINT64_MAX - 31};
    builder b;
    one_tensor(&b, 1, dims, DTYPE_F32, 4096 - 128);
    gguf_close(open_ok(&b)); /* the last 128 bytes */
    builder_free(&b);
    for (size_t i = 0; i < PGD_ARRAY_LEN(aligned); i++) {
        one_tensor(&b, 1, dims, DTYPE_F32, aligned[i]);
        open_fails(b.data, b.n_bytes, PGD_EFORMAT, "at tensor \"t\"");
        builder_free(&b);
    }
    one_tensor(&b, 1, dims, DTYPE_F32, 8);
    open_fails(b.data, b.n_bytes, PGD_EFORMAT, "multiple of 32");
    builder_free(&b);
}

static void test_gguf_refuses_overlapping_tensors(void **state)
{
    (void)state;
    builder b;
    builder_begin(&b);
    builder_tensor(&b, "a", DTYPE_F32, 0, 64);
    b.next_offset -= 32;
    builder_tensor(&b, "b", DTYPE_F32, 0, 64);
    builder_end(&b);
    open_fails(b.data, b.n_bytes, PGD_EFORMAT, "\"a\" reaching 32 bytes into \"b\"");
    builder_free(&b);
}

/* B066. */
static void test_gguf_refuses_duplicate_names(void **state)
{
    (void)state;
    builder b;
    builder_begin(&b);
    builder_tensor(&b, "same", DTYPE_F32, 0, 8);
    builder_tensor(&b, "other", DTYPE_F32, 0, 8);
    builder_tensor(&b, "same", DTYPE_F32, 0, 8);
    builder_end(&b);
    open_fails(b.data, b.n_bytes, PGD_EFORMAT, "unique tensor names, got \"same\" twice");
    builder_free(&b);
    builder_begin(&b);
    builder_kv_u32(&b, "k", 1);
    builder_kv_u32(&b, "k", 2);
    builder_end(&b);
    open_fails(b.data, b.n_bytes, PGD_EFORMAT, "unique metadata keys, got \"k\" twice");
    builder_free(&b);
}

static void test_gguf_refuses_bad_names_and_types(void **state)
{
    (void)state;
    builder b;
    builder_begin(&b);
    builder_kv_u32(&b, "a\033[2J", 1);
    builder_end(&b);
    open_fails(b.data, b.n_bytes, PGD_EFORMAT, "printable");
    builder_free(&b);
    builder_begin(&b);
    builder_tensor(&b, "", DTYPE_F32, 0, 8);
    builder_end(&b);
    open_fails(b.data, b.n_bytes, PGD_EFORMAT, "tensor name of 1 to 255");
    builder_free(&b);
    builder_begin(&b);
    builder_key(&b, "k", (gguf_value_type)13);
    builder_u32(&b, 0);
    builder_end(&b);
    open_fails(b.data, b.n_bytes, PGD_EFORMAT, "value type of 0 to 12, got 13");
    builder_free(&b);
}

static void test_gguf_refuses_deep_arrays(void **state)
{
    (void)state;
    for (int depth = 4; depth <= 5; depth++) {
        builder b;
        builder_begin(&b);
        builder_key(&b, "k", GGUF_ARRAY);
        for (int i = 1; i < depth; i++) {
            builder_u32(&b, GGUF_ARRAY);
            builder_u64(&b, 1);
        }
        builder_u32(&b, GGUF_U8);
        builder_u64(&b, 1);
        builder_put(&b, "x", 1);
        builder_end(&b);
        if (depth == 4)
            gguf_close(open_ok(&b));
        else
            open_fails(b.data, b.n_bytes, PGD_EFORMAT, "nested at most 4 deep");
        builder_free(&b);
    }
}

/* B064: a file cut anywhere is refused at open; the message tells to fetch it again or names the
 * count. */
static void test_gguf_refuses_every_truncation(void **state)
{
    (void)state;
    builder b;
    builder_llama(&b);
    builder_write(path, b.data, b.n_bytes);
    for (size_t n = b.n_bytes - 1; n > 0; n = n > b.header_bytes + 997 ? n - 997 : n - 1) {
        gguf_file *f = NULL;
        pgd_why why = {{0}};
        assert_int_equal(truncate(path, (off_t)n), 0);
        assert_int_equal(gguf_open(&f, path, &why), PGD_EFORMAT);
        assert_null(f);
        assert_true(why.text[0] != '\0');
    }
    open_fails(b.data, b.n_bytes - 1, PGD_EFORMAT, "at tensor \"output.weight\"");
    builder_free(&b);
}

/* 256 GB of weights without a byte on disk: opening reads the directory, not the weights. */
static void test_gguf_opens_without_reading_weights(void **state)
{
    (void)state;
    builder b;
    uint64_t dims[2] = {UINT64_C(1) << 20, UINT64_C(1) << 16};
    one_tensor(&b, 2, dims, DTYPE_F32, 0);
    b.n_bytes -= 4096;
    size_t n_bytes = b.n_bytes + ((size_t)1 << 38);
    builder_write(path, b.data, b.n_bytes);
    builder_free(&b);
    if (truncate(path, (off_t)n_bytes) != 0)
        skip(); /* a file system without such files */
    gguf_file *f = NULL;
    pgd_why why = {{0}};
    if (gguf_open(&f, path, &why) != PGD_OK)
        fail_msg("%s", why.text);
    const gguf_tensor *t = gguf_get_tensor(f, "t");
    assert_int_equal(t->n_bytes, (size_t)1 << 38);
    assert_int_equal(t->data[t->n_bytes - 1], 0);
    gguf_close(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gguf_reads_metadata),
        cmocka_unit_test(test_gguf_walks_arrays),
        cmocka_unit_test(test_gguf_reads_tensors),
        cmocka_unit_test(test_gguf_lists_unknown_tensor_type),
        cmocka_unit_test(test_gguf_accepts_empty_directory),
        cmocka_unit_test(test_gguf_refuses_other_files),
        cmocka_unit_test(test_gguf_refuses_absurd_counts),
        cmocka_unit_test(test_gguf_refuses_bad_alignment),
        cmocka_unit_test(test_gguf_refuses_overflowing_dimensions),
        cmocka_unit_test(test_gguf_refuses_offsets_outside),
        cmocka_unit_test(test_gguf_refuses_overlapping_tensors),
        cmocka_unit_test(test_gguf_refuses_duplicate_names),
        cmocka_unit_test(test_gguf_refuses_bad_names_and_types),
        cmocka_unit_test(test_gguf_refuses_deep_arrays),
        cmocka_unit_test(test_gguf_refuses_every_truncation),
        cmocka_unit_test(test_gguf_opens_without_reading_weights),
    };
    return cmocka_run_group_tests(tests, make_model_dir, remove_model_dir);
}
