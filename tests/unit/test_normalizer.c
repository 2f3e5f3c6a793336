/* NFC against utf8proc's own, which is right but quadratic in runs of marks; the other steps by
 * example. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <utf8proc.h>

#include <cmocka.h>

#include "common/mem.h"
#include "common/utf8.h"
#include "engine/text/normalizer.h"

static void expect(const normalizer *z, const char *text, size_t n_bytes, const char *want,
                   size_t n_want)
{
    strbuf out;
    strbuf spare;
    strbuf_init(&out);
    strbuf_init(&spare);
    assert_int_equal(normalizer_apply(z, text, n_bytes, &out, &spare), PGD_OK);
    assert_int_equal(out.n_bytes, n_want);
    assert_memory_equal(out.data == NULL ? "" : out.data, want, n_want);
    strbuf_deinit(&out);
    strbuf_deinit(&spare);
}

#define EXPECT(z, text, want) expect(z, text, sizeof(text) - 1, want, sizeof(want) - 1)

static normalizer nfc(void)
{
    normalizer z = {0};
    assert_int_equal(normalizer_add(&z, NORMALIZER_NFC, NULL, 0, NULL, 0), PGD_OK);
    return z;
}

static void test_normalizer_nfc_examples(void **state)
{
    (void)state;
    normalizer z = nfc();
    EXPECT(&z, "", "");
    EXPECT(&z, "plain", "plain");
    EXPECT(&z, "e\xCC\x81", "\xC3\xA9");
    EXPECT(&z, "\xE2\x84\xAB", "\xC3\x85");                             /* angstrom sign */
    EXPECT(&z, "q\xCC\x87\xCC\xA3", "q\xCC\xA3\xCC\x87");               /* order of marks */
    EXPECT(&z, "\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", "\xEA\xB0\x81"); /* Hangul */
    EXPECT(&z, "\xE0\xA5\x98", "\xE0\xA4\x95\xE0\xA4\xBC"); /* excluded from composition */
    EXPECT(&z, "\xEF\xAC\x81", "\xEF\xAC\x81");             /* a ligature stays */
    EXPECT(&z, "a\0e\xCC\x81", "a\0\xC3\xA9");
    normalizer_deinit(&z);
}

static void test_normalizer_nfc_keeps_invalid_bytes(void **state)
{
    (void)state;
    normalizer z = nfc();
    EXPECT(&z,
           "\xFF"
           "e\xCC\x81\x80\xE4\xB8",
           "\xFF\xC3\xA9\x80\xE4\xB8");
    EXPECT(&z, "e\xFF\xCC\x81", "e\xFF\xCC\x81");
    normalizer_deinit(&z);
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static uint32_t random_char(uint64_t *seed)
{
    uint32_t cp;
    switch (next_random(seed) % 5) {
    case 0:
        return (uint32_t)(0x300 + next_random(seed) % 0x70); /* marks */
    case 1:
        return (uint32_t)(0x1100 + next_random(seed) % 0x100); /* Hangul jamo */
    case 2:
        return (uint32_t)('A' + next_random(seed) % 58);
    case 3:
        cp = (uint32_t)(next_random(seed) % 0x3000);
        return cp == 0 ? 'x' : cp;
    default:
        cp = (uint32_t)(1 + next_random(seed) % 0x10FFFF);
        return cp >= 0xD800 && cp < 0xE000 ? 0xAC01 : cp;
    }
}

static void test_normalizer_nfc_equals_utf8proc(void **state)
{
    (void)state;
    normalizer z = nfc();
    uint64_t seed = 31337;
    for (int32_t round = 0; round < 4000; round++) {
        char text[1024];
        size_t n = 0;
        /* Some rounds have runs of marks beyond the short sort. */
        size_t n_chars = next_random(&seed) % (round % 10 == 0 ? 200 : 12);
        bool only_marks = round % 20 == 0;
        for (size_t i = 0; i < n_chars; i++) {
            uint32_t cp =
                only_marks ? (uint32_t)(0x300 + next_random(&seed) % 0x70) : random_char(&seed);
            n += utf8_encode(text + n, cp);
        }
        text[n] = '\0';
        utf8proc_uint8_t *want = utf8proc_NFC((const utf8proc_uint8_t *)text);
        assert_non_null(want);
        expect(&z, text, n, (const char *)want, strlen((const char *)want));
        free(want);
    }
    normalizer_deinit(&z);
}

static void test_normalizer_nfc_long_run_of_marks(void **state)
{
    (void)state;
    normalizer z = nfc();
    strbuf text;
    strbuf out;
    strbuf spare;
    strbuf_init(&text);
    strbuf_init(&out);
    strbuf_init(&spare);
    for (int32_t i = 0; i < 250000; i++)
        strbuf_append_str(&text, "\xCC\x81\xCC\xA3"); /* above, below: every second one must move */
    clock_t began = clock();
    assert_int_equal(normalizer_apply(&z, text.data, text.n_bytes, &out, &spare), PGD_OK);
    assert_true(clock() - began < 5 * CLOCKS_PER_SEC); /* CPU time */
    assert_int_equal(out.n_bytes, text.n_bytes);
    assert_memory_equal(out.data, "\xCC\xA3\xCC\xA3", 4);
    assert_memory_equal(out.data + out.n_bytes - 4, "\xCC\x81\xCC\x81", 4);
    strbuf_deinit(&text);
    strbuf_deinit(&out);
    strbuf_deinit(&spare);
    normalizer_deinit(&z);
}

static void test_normalizer_steps_in_order(void **state)
{
    (void)state;
    normalizer z = {0};
    EXPECT(&z, " a b", " a b");
    assert_int_equal(normalizer_add(&z, NORMALIZER_PREPEND, NULL, 0, "_", 1), PGD_OK);
    EXPECT(&z, " a", "_ a");
    EXPECT(&z, "", "");
    assert_int_equal(normalizer_add(&z, NORMALIZER_REPLACE, " ", 1, "__", 2), PGD_OK);
    EXPECT(&z, "  a ", "_____a__");
    assert_int_equal(normalizer_add(&z, NORMALIZER_REPLACE, "_____", 5, "", 0), PGD_OK);
    EXPECT(&z, "  a ", "a__");
    normalizer_deinit(&z);
    assert_int_equal(z.n_steps, 0);
}

static void test_normalizer_limit_of_steps(void **state)
{
    (void)state;
    normalizer z = {0};
    for (int32_t i = 0; i < NORMALIZER_MAX_STEPS; i++)
        assert_int_equal(normalizer_add(&z, NORMALIZER_NFC, NULL, 0, NULL, 0), PGD_OK);
    assert_int_equal(normalizer_add(&z, NORMALIZER_NFC, NULL, 0, NULL, 0), PGD_ERANGE);
    normalizer_deinit(&z);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_normalizer_nfc_examples),
        cmocka_unit_test(test_normalizer_nfc_keeps_invalid_bytes),
        cmocka_unit_test(test_normalizer_nfc_equals_utf8proc),
        cmocka_unit_test(test_normalizer_nfc_long_run_of_marks),
        cmocka_unit_test(test_normalizer_steps_in_order),
        cmocka_unit_test(test_normalizer_limit_of_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
