/* Every code point forth and back; every two-byte and many longer malformed sequences by the rules
 * of table 3-7. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/strbuf.h"
#include "common/utf8.h"

static void test_utf8_round_trip(void **state)
{
    (void)state;
    for (uint32_t c = 0; c <= 0x10FFFF; c++) {
        if (c >= 0xD800 && c <= 0xDFFF)
            continue;
        char buf[4];
        uint32_t got;
        size_t len;
        size_t n = utf8_encode(buf, c);
        assert_int_equal(utf8_decode(&got, &len, buf, n), UTF8_OK);
        assert_true(got == c && len == n);
        for (size_t cut = 1; cut < n; cut++) {
            assert_int_equal(utf8_decode(&got, &len, buf, cut), UTF8_INCOMPLETE);
            assert_int_equal(len, cut);
        }
    }
}

/* Bytes and the lengths of the parts that they fall into: the examples of the Unicode standard's
 * section 3.9 and more. */
static void test_utf8_maximal_parts(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t parts[8];
    } rows[] = {
        {"\x61\xF1\x80\x80\xE1\x80\xC2\x62", {1, 3, 2, 1, 1}},
        {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82", {1, 1, 1, 1, 1, 1, 1, 1}},
        {"\xED\xA0\x80\xED\xBF\xBF", {1, 1, 1, 1, 1, 1}},
        {"\xF4\x91\x92\x93\xFF\x41", {1, 1, 1, 1, 1, 1}},
        {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF", {2, 1, 3, 2}},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        const char *s = rows[i].text;
        size_t left = strlen(s);
        for (size_t p = 0; left > 0; p++) {
            size_t len;
            utf8_decode(NULL, &len, s, left);
            assert_int_equal(len, rows[i].parts[p]);
            s += len;
            left -= len;
        }
    }
}

static void test_utf8_json_escapes(void **state)
{
    (void)state;
    strbuf b;
    strbuf_init(&b);
    const char text[] = "a\"\\\n\t\x01\x7F\0\xC3\xA9\xE1\x80z";
    strbuf_append_json(&b, text, sizeof(text) - 1);
    assert_string_equal(b.data, "\"a\\\"\\\\\\n\\t\\u0001\\u007f\\u0000\xC3\xA9\xEF\xBF\xBDz\"");
    assert_true(utf8_is_valid(b.data, b.n_bytes, NULL));
    strbuf_deinit(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8_round_trip),
        cmocka_unit_test(test_utf8_maximal_parts),
        cmocka_unit_test(test_utf8_json_escapes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
