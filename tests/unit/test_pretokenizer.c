/* Pieces of each rule, as the expression engine of Hugging Face tokenizers cuts them, and time on
 * long runs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "common/mem.h"
#include "engine/text/pretokenizer.h"
#include "engine/text/unicode_class.h"

typedef struct cut_case {
    pretokenizer_rule rule;
    const char *pieces; /* '^' between pieces */
} cut_case;

static const pretokenizer_rule all_rules[] = {PRETOKENIZER_NONE,   PRETOKENIZER_GPT2,
                                              PRETOKENIZER_LLAMA3, PRETOKENIZER_QWEN2,
                                              PRETOKENIZER_SMOLLM, PRETOKENIZER_O200K};

static void cut(char *out, pretokenizer_rule rule, const char *text, size_t n_bytes)
{
    for (size_t start = 0; start < n_bytes;) {
        size_t end = pretokenizer_next(rule, text, n_bytes, start);
        assert_true(end > start && end <= n_bytes);
        if (start > 0)
            *out++ = '^';
        memcpy(out, text + start, end - start);
        out += end - start;
        start = end;
    }
    *out = '\0';
}

static void test_pretokenizer_cuts_as_reference(void **state)
{
    (void)state;
    /* clang-format off */
    static const cut_case cases[] = {
        {PRETOKENIZER_GPT2, "Hello^ world"},
        {PRETOKENIZER_GPT2, " ^ Hello^  ^ world^  "},
        {PRETOKENIZER_GPT2, "it^'s^ IT^'^S^ we^'^Re^'^LL^ '^tis"},
        {PRETOKENIZER_GPT2, "'^\xC5\xBF^ '^x^ ''^s^ '"},
        {PRETOKENIZER_GPT2, "abc^123^ 4567^ 89"},
        {PRETOKENIZER_GPT2, "1234567"},
        {PRETOKENIZER_GPT2, "x^1^ 2^ ^ 3^\t^4"},
        {PRETOKENIZER_GPT2, " \n\n ^ a^\n"},
        {PRETOKENIZER_GPT2, "a^\r\n\r^\n^b^  \n^ c"},
        {PRETOKENIZER_GPT2, "foo^!!!^\n^\n^bar^ ..."},
        {PRETOKENIZER_GPT2, "\xC2\xA0^\xC2\xA0^x^\xE3\x80\x80^y"},
        {PRETOKENIZER_GPT2, "\xD9\xA1\xD9\xA2\xD9\xA3\xD9\xA4^ \xC2\xBD\xE2\x85\xA7"},
        {PRETOKENIZER_GPT2, "\xE4\xB8\xAD\xE6\x96\x87^ \xE6\x97\xA5\xE6\x9C\xAC"},
        {PRETOKENIZER_GPT2, "e^\xCC\x81\xCC\x81^ \xCC\x81"},
        {PRETOKENIZER_GPT2, "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA9^ \xF0\x9F\x99\x82"},
        {PRETOKENIZER_GPT2, "\t^\t^if^ (^x^ ==^ 1^)^ {^\n"},
        {PRETOKENIZER_GPT2, "<|^im^_^end^|>^ a^_^b^-^c"},
        {PRETOKENIZER_GPT2, "   "},
        {PRETOKENIZER_GPT2, "\n"},
        {PRETOKENIZER_GPT2, " "},
        {PRETOKENIZER_GPT2, "\x0B\x0C^\xC2\x85^x"},
        {PRETOKENIZER_GPT2, "\xE2\x80\x8B\xE1\xA0\x8E^ z"},
        {PRETOKENIZER_GPT2, "'^l^ '^lL^ '^r^'^e"},
        {PRETOKENIZER_LLAMA3, "Hello^ world"},
        {PRETOKENIZER_LLAMA3, " ^ Hello^  ^ world^  "},
        {PRETOKENIZER_LLAMA3, "it^'s^ IT^'S^ we^'Re^'LL^ '^tis"},
        {PRETOKENIZER_LLAMA3, "'\xC5\xBF^ '^x^ ''^s^ '"},
        {PRETOKENIZER_LLAMA3, "abc^123^ ^456^7^ ^89"},
        {PRETOKENIZER_LLAMA3, "123^456^7"},
        {PRETOKENIZER_LLAMA3, "x^1^ ^2^ ^ ^3^\t^4"},
        {PRETOKENIZER_LLAMA3, " \n\n^ ^ a^\n"},
        {PRETOKENIZER_LLAMA3, "a^\r\n\r\n^b^  \n^ c"},
        {PRETOKENIZER_LLAMA3, "foo^!!!\n\n^bar^ ..."},
        {PRETOKENIZER_LLAMA3, "\xC2\xA0^\xC2\xA0x^\xE3\x80\x80y"},
        {PRETOKENIZER_LLAMA3, "\xD9\xA1\xD9\xA2\xD9\xA3^\xD9\xA4^ ^\xC2\xBD\xE2\x85\xA7"},
        {PRETOKENIZER_LLAMA3, "\xE4\xB8\xAD\xE6\x96\x87^ \xE6\x97\xA5\xE6\x9C\xAC"},
        {PRETOKENIZER_LLAMA3, "e^\xCC\x81\xCC\x81^ \xCC\x81"},
        {PRETOKENIZER_LLAMA3, "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA9^ \xF0\x9F\x99\x82"},
        {PRETOKENIZER_LLAMA3, "\t^\tif^ (^x^ ==^ ^1^)^ {\n"},
        {PRETOKENIZER_LLAMA3, "<|^im^_end^|>^ a^_b^-c"},
        {PRETOKENIZER_LLAMA3, "   "},
        {PRETOKENIZER_LLAMA3, "\n"},
        {PRETOKENIZER_LLAMA3, " "},
        {PRETOKENIZER_LLAMA3, "\x0B\x0C^\xC2\x85x"},
        {PRETOKENIZER_LLAMA3, "\xE2\x80\x8B\xE1\xA0\x8E^ z"},
        {PRETOKENIZER_LLAMA3, "'l^ '^lL^ '^r^'e"},
        {PRETOKENIZER_QWEN2, "Hello^ world"},
        {PRETOKENIZER_QWEN2, " ^ Hello^  ^ world^  "},
        {PRETOKENIZER_QWEN2, "it^'s^ IT^'S^ we^'Re^'LL^ '^tis"},
        {PRETOKENIZER_QWEN2, "'\xC5\xBF^ '^x^ ''^s^ '"},
        {PRETOKENIZER_QWEN2, "abc^1^2^3^ ^4^5^6^7^ ^8^9"},
        {PRETOKENIZER_QWEN2, "1^2^3^4^5^6^7"},
        {PRETOKENIZER_QWEN2, "x^1^ ^2^ ^ ^3^\t^4"},
        {PRETOKENIZER_QWEN2, " \n\n^ ^ a^\n"},
        {PRETOKENIZER_QWEN2, "a^\r\n\r\n^b^  \n^ c"},
        {PRETOKENIZER_QWEN2, "foo^!!!\n\n^bar^ ..."},
        {PRETOKENIZER_QWEN2, "\xC2\xA0^\xC2\xA0x^\xE3\x80\x80y"},
        {PRETOKENIZER_QWEN2, "\xD9\xA1^\xD9\xA2^\xD9\xA3^\xD9\xA4^ ^\xC2\xBD^\xE2\x85\xA7"},
        {PRETOKENIZER_QWEN2, "\xE4\xB8\xAD\xE6\x96\x87^ \xE6\x97\xA5\xE6\x9C\xAC"},
        {PRETOKENIZER_QWEN2, "e^\xCC\x81\xCC\x81^ \xCC\x81"},
        {PRETOKENIZER_QWEN2, "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA9^ \xF0\x9F\x99\x82"},
        {PRETOKENIZER_QWEN2, "\t^\tif^ (^x^ ==^ ^1^)^ {\n"},
        {PRETOKENIZER_QWEN2, "<|^im^_end^|>^ a^_b^-c"},
        {PRETOKENIZER_QWEN2, "   "},
        {PRETOKENIZER_QWEN2, "\n"},
        {PRETOKENIZER_QWEN2, " "},
        {PRETOKENIZER_QWEN2, "\x0B\x0C^\xC2\x85x"},
        {PRETOKENIZER_QWEN2, "\xE2\x80\x8B\xE1\xA0\x8E^ z"},
        {PRETOKENIZER_QWEN2, "'l^ '^lL^ '^r^'e"},
        {PRETOKENIZER_SMOLLM, "Hello^ world"},
        {PRETOKENIZER_SMOLLM, " ^ Hello^  ^ world^  "},
        {PRETOKENIZER_SMOLLM, "it^'s^ IT^'^S^ we^'^Re^'^LL^ '^tis"},
        {PRETOKENIZER_SMOLLM, "'^\xC5\xBF^ '^x^ ''^s^ '"},
        {PRETOKENIZER_SMOLLM, "abc^1^2^3^ ^4^5^6^7^ ^8^9"},
        {PRETOKENIZER_SMOLLM, "1^2^3^4^5^6^7"},
        {PRETOKENIZER_SMOLLM, "x^1^ ^2^  ^3^\t^4"},
        {PRETOKENIZER_SMOLLM, " \n\n ^ a^\n"},
        {PRETOKENIZER_SMOLLM, "a^\r\n\r^\n^b^  \n^ c"},
        {PRETOKENIZER_SMOLLM, "foo^!!!^\n^\n^bar^ ..."},
        {PRETOKENIZER_SMOLLM, "\xC2\xA0^\xC2\xA0^x^\xE3\x80\x80^y"},
        {PRETOKENIZER_SMOLLM, "\xD9\xA1^\xD9\xA2^\xD9\xA3^\xD9\xA4^ ^\xC2\xBD^\xE2\x85\xA7"},
        {PRETOKENIZER_SMOLLM, "\xE4\xB8\xAD\xE6\x96\x87^ \xE6\x97\xA5\xE6\x9C\xAC"},
        {PRETOKENIZER_SMOLLM, "e^\xCC\x81\xCC\x81^ \xCC\x81"},
        {PRETOKENIZER_SMOLLM, "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA9^ \xF0\x9F\x99\x82"},
        {PRETOKENIZER_SMOLLM, "\t^\t^if^ (^x^ ==^ ^1^)^ {^\n"},
        {PRETOKENIZER_SMOLLM, "<|^im^_^end^|>^ a^_^b^-^c"},
        {PRETOKENIZER_SMOLLM, "   "},
        {PRETOKENIZER_SMOLLM, "\n"},
        {PRETOKENIZER_SMOLLM, " "},
        {PRETOKENIZER_SMOLLM, "\x0B\x0C^\xC2\x85^x"},
        {PRETOKENIZER_SMOLLM, "\xE2\x80\x8B\xE1\xA0\x8E^ z"},
        {PRETOKENIZER_SMOLLM, "'^l^ '^lL^ '^r^'^e"},
        {PRETOKENIZER_O200K, "Hello^ world"},
        {PRETOKENIZER_O200K, " ^ Hello^  ^ world^  "},
        {PRETOKENIZER_O200K, "it's^ IT'S^ we'Re^'LL^ '^tis"},
        {PRETOKENIZER_O200K, "'\xC5\xBF^ '^x^ ''^s^ '"},
        {PRETOKENIZER_O200K, "abc^123^ ^456^7^ ^89"},
        {PRETOKENIZER_O200K, "123^456^7"},
        {PRETOKENIZER_O200K, "x^1^ ^2^ ^ ^3^\t^4"},
        {PRETOKENIZER_O200K, " \n\n^ ^ a^\n"},
        {PRETOKENIZER_O200K, "a^\r\n\r\n^b^  \n^ c"},
        {PRETOKENIZER_O200K, "foo^!!!\n\n^bar^ ..."},
        {PRETOKENIZER_O200K, "\xC2\xA0^\xC2\xA0x^\xE3\x80\x80y"},
        {PRETOKENIZER_O200K, "\xD9\xA1\xD9\xA2\xD9\xA3^\xD9\xA4^ ^\xC2\xBD\xE2\x85\xA7"},
        {PRETOKENIZER_O200K, "\xE4\xB8\xAD\xE6\x96\x87^ \xE6\x97\xA5\xE6\x9C\xAC"},
        {PRETOKENIZER_O200K, "e\xCC\x81\xCC\x81^ \xCC\x81"},
        {PRETOKENIZER_O200K, "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA9^ \xF0\x9F\x99\x82"},
        {PRETOKENIZER_O200K, "\t^\tif^ (^x^ ==^ ^1^)^ {\n"},
        {PRETOKENIZER_O200K, "<|^im^_end^|>^ a^_b^-c"},
        {PRETOKENIZER_O200K, "   "},
        {PRETOKENIZER_O200K, "\n"},
        {PRETOKENIZER_O200K, " "},
        {PRETOKENIZER_O200K, "\x0B\x0C^\xC2\x85x"},
        {PRETOKENIZER_O200K, "\xE2\x80\x8B\xE1\xA0\x8E^ z"},
        {PRETOKENIZER_O200K, "'l^ '^l^L^ '^r^'e"},
        {PRETOKENIZER_O200K, "foo^Bar^BAZqux^ XMLHttp"},
        {PRETOKENIZER_O200K, "don't^ DON'T^ I'LL^x^ we'VE^'^ x's^S"},
        {PRETOKENIZER_O200K, "ABC'S^ a^BC'd^ '^S"},
        {PRETOKENIZER_O200K, "a^/b^/\n/^c^ !/\n/^ //"},
        {PRETOKENIZER_O200K, "\xCC\x81" "Ab^ \xCC\x81^AB^ A\xCC\x81^B^ A\xCC\x81" "b^ !\xCC\x81^x"},
        {PRETOKENIZER_O200K, "\xC7\x85" "a^\xC7\x85^ \xC7\x85\xC7\x85" "b"},
        {PRETOKENIZER_O200K, "\xCA\xB0^A^ \xE4\xB8\xAD" "A\xE4\xB8\xAD^ ABC\xE4\xB8\xAD" "DEf^ A\xE4\xB8\xAD^B's^C"},
        {PRETOKENIZER_O200K, "\xC2\xAA" "B\xC2\xBA'll"},
        {PRETOKENIZER_O200K, "\n^ABC^ \r^abc^\tABC^\tabc"},
        {PRETOKENIZER_O200K, "\xC3\x89T\xC3\x89^ \xC3\xA9t\xC3\xA9^ \xC3\x89t^\xC3\x89's"},
    };
    /* clang-format on */
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        char text[256];
        char got[512];
        size_t n = 0;
        for (const char *p = cases[i].pieces; *p != '\0'; p++)
            if (*p != '^')
                text[n++] = *p;
        cut(got, cases[i].rule, text, n);
        if (strcmp(got, cases[i].pieces) != 0) {
            fail_msg("case %zu, rule %d: got \"%s\", want \"%s\"", i, (int)cases[i].rule, got,
                     cases[i].pieces);
        }
    }
}

static void test_pretokenizer_none_is_one_piece(void **state)
{
    (void)state;
    assert_int_equal(pretokenizer_next(PRETOKENIZER_NONE, "a b 1", 5, 0), 5);
}

static void test_pretokenizer_takes_invalid_bytes_as_other(void **state)
{
    (void)state;
    char got[64];
    cut(got, PRETOKENIZER_GPT2, "a\xFF\x80 \xC3", 5);
    assert_string_equal(got, "a^\xFF\x80^ \xC3");
    cut(got, PRETOKENIZER_LLAMA3,
        "\xFF"
        "a\xC3",
        3);
    assert_string_equal(got, "\xFF"
                             "a^\xC3");
}

static void test_pretokenizer_takes_nul_as_other(void **state)
{
    (void)state;
    assert_int_equal(pretokenizer_next(PRETOKENIZER_GPT2, "a\0b", 3, 0), 1);
    assert_int_equal(pretokenizer_next(PRETOKENIZER_GPT2, "a\0b", 3, 1), 2);
}

/* The definition of `\s+(?!\S)|\s+` on every mix of five spaces, a letter and a digit, per rule:
 * pieces cover the text. */
static void test_pretokenizer_covers_every_short_text(void **state)
{
    (void)state;
    static const char letters[] = {' ', '\n', 'A', 'a', '1', '\'', 's', '/'};
    for (size_t r = 0; r < PGD_ARRAY_LEN(all_rules); r++) {
        for (uint32_t code = 0; code < 8u * 8 * 8 * 8 * 8; code++) {
            char text[5];
            uint32_t left = code;
            for (int32_t i = 0; i < 5; i++) {
                text[i] = letters[left % 8];
                left /= 8;
            }
            size_t n_pieces = 0;
            for (size_t start = 0; start < 5; n_pieces++) {
                size_t end = pretokenizer_next(all_rules[r], text, 5, start);
                assert_true(end > start && end <= 5);
                start = end;
            }
            assert_in_range(n_pieces, 1, 5);
        }
    }
}

static void test_pretokenizer_long_runs_are_linear(void **state)
{
    (void)state;
    static const char *const units[] = {"a",
                                        ".",
                                        " ",
                                        "\n",
                                        "1",
                                        " \n",
                                        "\t ",
                                        "\xE4\xB8\xAD",
                                        "'s",
                                        "\xCC\x81",
                                        "\xFF",
                                        "A",
                                        "\xCC\x81"
                                        "AAA",
                                        "/\n"};
    size_t n = 1 << 20;
    char *text = mem_alloc(n + 8);
    assert_non_null(text);
    for (size_t u = 0; u < PGD_ARRAY_LEN(units); u++) {
        size_t unit = strlen(units[u]);
        size_t n_text = n / unit * unit;
        for (size_t i = 0; i < n_text; i += unit)
            memcpy(text + i, units[u], unit);
        for (size_t r = 0; r < PGD_ARRAY_LEN(all_rules); r++) {
            clock_t began = clock();
            for (size_t start = 0; start < n_text;)
                start = pretokenizer_next(all_rules[r], text, n_text, start);
            assert_true(clock() - began < 5 * CLOCKS_PER_SEC); /* CPU time */
        }
    }
    mem_free(text);
}

static void test_pretokenizer_names(void **state)
{
    (void)state;
    pretokenizer_rule rule = PRETOKENIZER_NONE;
    assert_true(pretokenizer_from_name(&rule, "llama-bpe", 9));
    assert_int_equal(rule, PRETOKENIZER_LLAMA3);
    assert_true(pretokenizer_from_name(&rule, "smollm", 6));
    assert_int_equal(rule, PRETOKENIZER_SMOLLM);
    assert_true(pretokenizer_from_name(&rule, "qwen2", 5));
    assert_int_equal(rule, PRETOKENIZER_QWEN2);
    assert_true(pretokenizer_from_name(&rule, "gpt-2", 5));
    assert_int_equal(rule, PRETOKENIZER_GPT2);
    assert_true(pretokenizer_from_name(&rule, "llama4", 6));
    assert_int_equal(rule, PRETOKENIZER_O200K);
    assert_true(pretokenizer_from_name(&rule, "gpt-4o", 6));
    assert_int_equal(rule, PRETOKENIZER_O200K);
    assert_false(pretokenizer_from_name(&rule, "tekken", 6));
    assert_false(pretokenizer_from_name(&rule, "qwen", 4));
    assert_false(pretokenizer_from_name(&rule, "", 0));
    assert_false(pretokenizer_from_regex(&rule, "\\p{L}+", 6));
}

#define CAPITAL (UNICODE_LETTER | UNICODE_WORD | UNICODE_CAPITAL)
#define SMALL   (UNICODE_LETTER | UNICODE_WORD | UNICODE_SMALL)

static void test_unicode_class_samples(void **state)
{
    (void)state;
    const struct {
        int32_t cp;
        unsigned classes;
    } cases[] = {
        {'a', SMALL},
        {'Z', CAPITAL},
        {'0', UNICODE_NUMBER | UNICODE_WORD},
        {'_', UNICODE_WORD},
        {' ', UNICODE_SPACE},
        {'\v', UNICODE_SPACE},
        {0x1F, 0},
        {'~', 0},
        {0x7F, 0},
        {0x85, UNICODE_SPACE},
        {0xA0, UNICODE_SPACE},
        {0xAA, CAPITAL | SMALL},
        {0xBD, UNICODE_NUMBER},
        {0xDF, SMALL},
        {0x1C5, CAPITAL}, /* a title letter */
        {0x2B0, CAPITAL | SMALL},
        {0x301, UNICODE_WORD | UNICODE_CAPITAL | UNICODE_SMALL},
        {0x180E, 0},
        {0x200B, 0},
        {0x200D, UNICODE_WORD},
        {0x2028, UNICODE_SPACE},
        {0x2167, UNICODE_NUMBER | UNICODE_WORD},
        {0x3000, UNICODE_SPACE},
        {0x4E2D, CAPITAL | SMALL},
        {0x1F642, 0},
        {0x20000, CAPITAL | SMALL},
        {0x10FFFF, 0},
        {-1, 0},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        if (unicode_class(cases[i].cp) != cases[i].classes) {
            fail_msg("U+%04X: got %u, want %u", (unsigned)cases[i].cp, unicode_class(cases[i].cp),
                     cases[i].classes);
        }
    }
    for (int32_t i = 0; i < unicode_n_ranges; i++) {
        assert_true(unicode_ranges[i].first <= unicode_ranges[i].last &&
                    unicode_ranges[i].classes > 0);
        assert_true(i == 0 || unicode_ranges[i - 1].last < unicode_ranges[i].first);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pretokenizer_cuts_as_reference),
        cmocka_unit_test(test_pretokenizer_none_is_one_piece),
        cmocka_unit_test(test_pretokenizer_takes_invalid_bytes_as_other),
        cmocka_unit_test(test_pretokenizer_takes_nul_as_other),
        cmocka_unit_test(test_pretokenizer_covers_every_short_text),
        cmocka_unit_test(test_pretokenizer_long_runs_are_linear),
        cmocka_unit_test(test_pretokenizer_names),
        cmocka_unit_test(test_unicode_class_samples),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
