/* Element types: dequantisation bit for bit against the golden blocks, exhaustive half conversions,
 * sizes. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/model/dtype.h"

static uint32_t bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return bits;
}

static float from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

typedef struct golden_header {
    char magic[8];
    uint32_t type;
    uint32_t block_elems;
    uint32_t block_bytes;
    uint32_t n_blocks;
} golden_header;

/* Reads tests/golden/dequant/<name>.bin; *blocks and *expected are malloc'd. */
static golden_header read_golden(const char *name, uint8_t **blocks, uint32_t **expected)
{
    char path[128];
    golden_header h;
    (void)snprintf(path, sizeof(path), "tests/golden/dequant/%s.bin", name);
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        fail_msg("cannot open %s (run from the top of the tree)", path);
    assert_int_equal(fread(&h, sizeof(h), 1, f), 1);
    assert_memory_equal(h.magic, "PGDEQNT1", 8);
    size_t n_block_bytes = (size_t)h.n_blocks * h.block_bytes;
    size_t n_values = (size_t)h.n_blocks * h.block_elems;
    *blocks = malloc(n_block_bytes);
    *expected = malloc(n_values * sizeof(uint32_t));
    assert_int_equal(fread(*blocks, 1, n_block_bytes, f), n_block_bytes);
    assert_int_equal(fseek(f, (long)((4 - n_block_bytes % 4) % 4), SEEK_CUR), 0);
    assert_int_equal(fread(*expected, sizeof(uint32_t), n_values, f), n_values);
    assert_int_equal(fgetc(f), EOF);
    (void)fclose(f);
    assert_true(h.n_blocks > 0);
    return h;
}

static void check_golden(const char *name)
{
    uint8_t *blocks;
    uint32_t *expected;
    golden_header h = read_golden(name, &blocks, &expected);
    const dtype_info *info = dtype_get_info((int32_t)h.type);
    assert_non_null(info);
    assert_string_equal(info->name, name);
    assert_int_equal(info->block_elems, h.block_elems);
    assert_int_equal(info->block_bytes, h.block_bytes);
    assert_true(info->is_weight);

    int64_t n_values = (int64_t)h.n_blocks * h.block_elems;
    float *got = malloc((size_t)n_values * sizeof(float));
    /* Once in place and once from an odd address. */
    uint8_t *shifted = malloc((size_t)h.n_blocks * h.block_bytes + 1);
    memcpy(shifted + 1, blocks, (size_t)h.n_blocks * h.block_bytes);
    const uint8_t *inputs[] = {blocks, shifted + 1};
    for (int k = 0; k < 2; k++) {
        memset(got, 0xff, (size_t)n_values * sizeof(float));
        dtype_dequantize_row(got, inputs[k], n_values, (dtype)h.type);
        for (int64_t i = 0; i < n_values; i++) {
            if (bits_of(got[i]) != expected[i])
                fail_msg("%s value %lld: got %08x (%a), want %08x (%a)", name, (long long)i,
                         bits_of(got[i]), (double)got[i], expected[i],
                         (double)from_bits(expected[i]));
        }
    }
    free(got);
    free(shifted);
    free(blocks);
    free(expected);
}

static void test_dtype_dequantize_is_bit_equal_to_golden(void **state)
{
    static const char *const names[] = {"F16",  "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
                                        "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"};
    (void)state;
    for (size_t i = 0; i < PGD_ARRAY_LEN(names); i++)
        check_golden(names[i]);
}

static void test_dtype_dequantize_f32_copies(void **state)
{
    (void)state;
    float in[3] = {1.5f, -0.0f, 3e38f};
    float out[3];
    dtype_dequantize_row(out, in, 3, DTYPE_F32);
    assert_memory_equal(in, out, sizeof(in));
    dtype_dequantize_row(out, in, 0, DTYPE_Q4_0); /* no values: nothing is read */
}

/* Value of a half by its definition, in double. */
static double half_value(uint16_t h)
{
    int exponent = (h >> 10) & 0x1f;
    double mantissa = h & 0x3ff;
    double v = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024.0 + mantissa, exponent - 25);
    return (h & 0x8000) != 0 ? -v : v;
}

static void test_dtype_f16_round_trip_exhaustive(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = dtype_f16_to_f32((uint16_t)h);
        uint16_t back = dtype_f32_to_f16(f);
        bool is_nan = (h & 0x7c00) == 0x7c00 && (h & 0x3ff) != 0;
        if (is_nan) {
            assert_true(isnan(f));
            assert_int_equal(back, h | 0x200); /* made quiet, payload and sign kept */
        } else {
            assert_int_equal(back, h);
            if ((h & 0x7c00) != 0x7c00)
                assert_true((double)f == half_value((uint16_t)h));
            else
                assert_true(isinf(f) && (f < 0) == ((h & 0x8000) != 0));
        }
    }
}

static void test_dtype_f32_to_f16_rounds_to_nearest_even(void **state)
{
    (void)state;
    /* Between each pair of neighbours: below the middle, the middle itself, above it. */
    for (uint32_t h = 0; h < 0x7bff; h++) {
        double lo = half_value((uint16_t)h);
        double hi = half_value((uint16_t)(h + 1));
        float middle = (float)((lo + hi) / 2);
        assert_int_equal(dtype_f32_to_f16(middle), (h & 1) != 0 ? h + 1 : h);
        assert_int_equal(dtype_f32_to_f16(nextafterf(middle, 0.0f)), h);
        assert_int_equal(dtype_f32_to_f16(nextafterf(middle, INFINITY)), h + 1);
        assert_int_equal(dtype_f32_to_f16(-middle), 0x8000 | ((h & 1) != 0 ? h + 1 : h));
    }
    assert_int_equal(dtype_f32_to_f16(65519.996f), 0x7bff);
    assert_int_equal(dtype_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(dtype_f32_to_f16(-1e30f), 0xfc00);
    assert_int_equal(dtype_f32_to_f16(1e-30f), 0);
    assert_int_equal(dtype_f32_to_f16(INFINITY), 0x7c00);
}

static void test_dtype_bf16_round_trip_exhaustive(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = dtype_bf16_to_f32((uint16_t)h);
        assert_int_equal(bits_of(f), h << 16);
        bool is_nan = (h & 0x7f80) == 0x7f80 && (h & 0x7f) != 0;
        assert_int_equal(dtype_f32_to_bf16(f), is_nan ? h | 0x40 : h);
        if ((h & 0x7f80) == 0x7f80)
            continue;
        /* The middle goes to the even neighbour, its neighbours in f32 go their own ways. */
        assert_int_equal(dtype_f32_to_bf16(from_bits((h << 16) + 0x8000)),
                         (h & 1) != 0 ? h + 1 : h);
        assert_int_equal(dtype_f32_to_bf16(from_bits((h << 16) + 0x7fff)), h);
        assert_int_equal(dtype_f32_to_bf16(from_bits((h << 16) + 0x8001)), h + 1);
    }
    /* A NaN whose payload is all in the dropped half stays a NaN. */
    assert_true(isnan(dtype_bf16_to_f32(dtype_f32_to_bf16(from_bits(0x7f800001)))));
}

static void test_dtype_row_bytes(void **state)
{
    (void)state;
    assert_int_equal(dtype_row_bytes(DTYPE_F32, 3), 12);
    assert_int_equal(dtype_row_bytes(DTYPE_Q4_0, 64), 36);
    assert_int_equal(dtype_row_bytes(DTYPE_Q6_K, 512), 420);
    assert_int_equal(dtype_row_bytes(DTYPE_Q4_0, 0), 0);
    assert_int_equal(dtype_row_bytes(DTYPE_Q4_0, 33), 0);
    assert_int_equal(dtype_row_bytes(DTYPE_Q4_K, 32), 0);
    assert_int_equal(dtype_row_bytes(DTYPE_F32, -1), 0);
    assert_int_equal(dtype_row_bytes((dtype)99, 32), 0);
    assert_int_equal(dtype_row_bytes(DTYPE_F32, INT64_MAX), 0); /* 2^65 bytes */
}

static void test_dtype_names(void **state)
{
    (void)state;
    assert_int_equal(dtype_parse("f16"), DTYPE_F16);
    assert_int_equal(dtype_parse("q4_K"), DTYPE_Q4_K);
    assert_int_equal(dtype_parse("bf16"), DTYPE_BF16);
    assert_int_equal(dtype_parse("float"), DTYPE_NONE);
    assert_int_equal(dtype_parse(""), DTYPE_NONE);
    assert_string_equal(dtype_name(DTYPE_Q5_1), "Q5_1");
    assert_string_equal(dtype_name(39), "MXFP4");
    assert_string_equal(dtype_name(4), "type 4");
    assert_string_equal(dtype_name(99), "type 99");
    assert_non_null(dtype_name(-1));
    assert_non_null(dtype_name(INT32_MAX));
    assert_null(dtype_get_info(99));
    assert_null(dtype_get_info(DTYPE_NONE));
    assert_false(dtype_get_info(DTYPE_I32)->is_weight);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtype_dequantize_is_bit_equal_to_golden),
        cmocka_unit_test(test_dtype_dequantize_f32_copies),
        cmocka_unit_test(test_dtype_f16_round_trip_exhaustive),
        cmocka_unit_test(test_dtype_f32_to_f16_rounds_to_nearest_even),
        cmocka_unit_test(test_dtype_bf16_round_trip_exhaustive),
        cmocka_unit_test(test_dtype_row_bytes),
        cmocka_unit_test(test_dtype_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
