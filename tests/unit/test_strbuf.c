/* Formatted appends around the edges of the buffer, numbers, JSON escapes, sticky failure. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "common/strbuf.h"

static void test_strbuf_appendf_at_every_fill(void **state)
{
    (void)state;
    for (int n_before = 0; n_before < 140; n_before++) {
        for (int n_text = 0; n_text < 140; n_text += 3) {
            char text[160];
            strbuf b;
            strbuf_init(&b);
            for (int i = 0; i < n_before; i++)
                strbuf_append_char(&b, '.');
            memset(text, 'x', (size_t)n_text);
            text[n_text] = '\0';
            strbuf_appendf(&b, "%s|%d", text, n_text);
            char expected[320];
            int n =
                snprintf(expected, sizeof(expected), "%.*s%s|%d", n_before,
                         "......................................................................"
                         "......................................................................",
                         text, n_text);
            assert_false(b.failed);
            assert_int_equal(b.n_bytes, n);
            assert_string_equal(b.data, expected);
            strbuf_deinit(&b);
        }
    }
}

static void test_strbuf_append_int_as_printf(void **state)
{
    (void)state;
    static const int64_t values[] = {0,  1,   -1,  9,         10,        -10,       99,       100,
                                     12, 512, -99, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN};
    for (size_t i = 0; i < PGD_ARRAY_LEN(values); i++) {
        char expected[32];
        strbuf b;
        strbuf_init(&b);
        strbuf_append_int(&b, values[i]);
        snprintf(expected, sizeof(expected), "%lld", (long long)values[i]);
        assert_string_equal(b.data, expected);
        strbuf_deinit(&b);
    }
}

static void test_strbuf_json_escapes(void **state)
{
    (void)state;
    strbuf b;
    strbuf_init(&b);
    static const char text[] = "a\"b\\c\n\r\t\x01\x7F\xC3\xA9\xFFz";
    strbuf_append_json(&b, text, sizeof(text) - 1);
    assert_string_equal(b.data, "\"a\\\"b\\\\c\\n\\r\\t\\u0001\\u007f\xC3\xA9\xEF\xBF\xBDz\"");
    strbuf_deinit(&b);
}

static void test_strbuf_truncate(void **state)
{
    (void)state;
    strbuf b;
    strbuf_init(&b);
    strbuf_truncate(&b, 0); /* before anything was appended */
    strbuf_append_str(&b, "abcdef");
    strbuf_truncate(&b, 6);
    assert_string_equal(b.data, "abcdef");
    strbuf_truncate(&b, 2);
    assert_string_equal(b.data, "ab");
    strbuf_append_str(&b, "x");
    assert_string_equal(b.data, "abx");
    strbuf_deinit(&b);
}

static void test_strbuf_failure_stays(void **state)
{
    (void)state;
    strbuf b;
    strbuf_init(&b);
    strbuf_append_str(&b, "kept");
    strbuf_append(&b, NULL, SIZE_MAX); /* more than there can be */
    assert_true(b.failed);
    strbuf_append_str(&b, "more");
    strbuf_appendf(&b, "%d", 1);
    strbuf_append_int(&b, 1);
    assert_true(b.failed);
    assert_int_equal(b.n_bytes, 4);
    strbuf_reset(&b);
    assert_false(b.failed);
    strbuf_deinit(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_strbuf_appendf_at_every_fill),
        cmocka_unit_test(test_strbuf_append_int_as_printf),
        cmocka_unit_test(test_strbuf_json_escapes),
        cmocka_unit_test(test_strbuf_truncate),
        cmocka_unit_test(test_strbuf_failure_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
