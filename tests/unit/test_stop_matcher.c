/* Stop strings over every way to cut the text, against a search in the whole text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/utf8.h"
#include "engine/text/stop_matcher.h"

static stop_matcher *make(const char *const *strings, int32_t n, bool include_stop)
{
    size_t n_bytes[16];
    stop_matcher *m;
    assert_in_range(n, 0, 16);
    for (int32_t i = 0; i < n; i++)
        n_bytes[i] = strlen(strings[i]);
    assert_int_equal(stop_matcher_create(&m, strings, n_bytes, n, include_stop), PGD_OK);
    return m;
}

/* Feeds text in pieces of `step` bytes; out: everything that came, after flush if there was no
 * match. */
static int32_t feed(stop_matcher *m, const char *text, size_t n_bytes, size_t step, strbuf *out)
{
    int32_t found = -1;
    strbuf_reset(out);
    for (size_t i = 0; i < n_bytes && found < 0; i += step)
        found = stop_matcher_push(m, text + i, PGD_MIN(step, n_bytes - i), out);
    if (found < 0)
        stop_matcher_flush(m, out);
    assert_false(out->failed);
    return found;
}

static void expect(const char *const *strings, int32_t n, bool include_stop, const char *text,
                   int32_t want, const char *want_text)
{
    size_t n_bytes = strlen(text);
    strbuf out;
    strbuf_init(&out);
    for (size_t step = 1; step <= n_bytes; step++) {
        stop_matcher *m = make(strings, n, include_stop);
        assert_int_equal(feed(m, text, n_bytes, step, &out), want);
        assert_int_equal(out.n_bytes, strlen(want_text));
        assert_memory_equal(out.data == NULL ? "" : out.data, want_text, out.n_bytes);
        stop_matcher_destroy(m);
    }
    strbuf_deinit(&out);
}

static void test_stop_matcher_cuts_before_the_string(void **state)
{
    (void)state;
    const char *one[] = {"hijklmn"};
    expect(one, 1, false, "abcdefghijklmnop", 0, "abcdefg");
    expect(one, 1, true, "abcdefghijklmnop", 0, "abcdefghijklmn");
    expect(one, 1, false, "abchijklm", -1, "abchijklm");
    expect(one, 1, false, "hijklmn", 0, "");
}

static void test_stop_matcher_overlapping_prefixes(void **state)
{
    (void)state;
    const char *one[] = {"aab"};
    expect(one, 1, false, "aaaab", 0, "aa");
    const char *two[] = {"abcabd", "cabx"};
    expect(two, 2, false, "zabcabx", 1, "zab");
    expect(two, 2, false, "abcabcabd", 0, "abc");
}

static void test_stop_matcher_earliest_end_wins(void **state)
{
    (void)state;
    const char *nested[] = {"abcd", "bc"};
    expect(nested, 2, false, "xabcd", 1, "xa");
    const char *same_end[] = {"bc", "abc"};
    expect(same_end, 2, false, "xabc", 1, "x"); /* both end at c: the longer one */
    const char *twice[] = {"ab", "ab"};
    expect(twice, 2, false, "ab", 0, "");
}

static void test_stop_matcher_holds_only_what_may_match(void **state)
{
    (void)state;
    const char *strings[] = {"END", "Estop"};
    stop_matcher *m = make(strings, 2, false);
    strbuf out;
    strbuf_init(&out);
    assert_int_equal(stop_matcher_push(m, "text E", 6, &out), -1);
    assert_string_equal(out.data, "text ");
    assert_int_equal(stop_matcher_push(m, "N", 1, &out), -1);
    assert_string_equal(out.data, "text ");
    assert_int_equal(stop_matcher_push(m, "E", 1, &out),
                     -1); /* "ENE": only the last E may begin one */
    assert_string_equal(out.data, "text EN");
    assert_int_equal(stop_matcher_push(m, "", 0, &out), -1);
    stop_matcher_flush(m, &out);
    assert_string_equal(out.data, "text ENE");
    strbuf_deinit(&out);
    stop_matcher_destroy(m);
}

static void test_stop_matcher_lets_go_whole_characters(void **state)
{
    (void)state;
    const char *strings[] = {"\xE4\xB8\xAD\xE6\x96\x87", "\xF0\x9F\x99\x82!"};
    const char *text = "a\xE4\xB8\xAD\xE4\xB8\xAD\xF0\x9F\x99\x82\xE4\xB8\xAD\xE6\x96\x87";
    static const size_t cuts[] = {1, 4, 7, 11, 14, 17}; /* characters of text */
    stop_matcher *m = make(strings, 2, false);
    strbuf out;
    strbuf_init(&out);
    int32_t found = -1;
    size_t from = 0;
    for (size_t i = 0; i < PGD_ARRAY_LEN(cuts); i++) {
        found = stop_matcher_push(m, text + from, cuts[i] - from, &out);
        from = cuts[i];
        assert_true(out.n_bytes == 0 || utf8_is_valid(out.data, out.n_bytes, NULL));
    }
    assert_int_equal(found, 0);
    assert_int_equal(out.n_bytes, 11);
    strbuf_deinit(&out);
    stop_matcher_destroy(m);
}

static void test_stop_matcher_without_strings_passes_all(void **state)
{
    (void)state;
    stop_matcher *m = make(NULL, 0, false);
    strbuf out;
    strbuf_init(&out);
    assert_int_equal(stop_matcher_push(m, "a\0b", 3, &out), -1);
    assert_int_equal(out.n_bytes, 3);
    assert_memory_equal(out.data, "a\0b", 3);
    strbuf_deinit(&out);
    stop_matcher_destroy(m);
}

static void test_stop_matcher_refuses_empty_string(void **state)
{
    (void)state;
    stop_matcher *m;
    const char *strings[] = {"a", ""};
    size_t n_bytes[] = {1, 0};
    assert_int_equal(stop_matcher_create(&m, strings, n_bytes, 2, false), PGD_EINVAL);
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Earliest end over all strings, the longest at that end; -1 if none. */
static int32_t find_by_definition(char (*strings)[8], int32_t n, const char *text, size_t *start,
                                  size_t *end)
{
    size_t n_bytes = strlen(text);
    for (size_t e = 1; e <= n_bytes; e++) {
        int32_t best = -1;
        for (int32_t i = 0; i < n; i++) {
            size_t len = strlen(strings[i]);
            if (len <= e && memcmp(text + e - len, strings[i], len) == 0 &&
                (best < 0 || len > strlen(strings[best])))
                best = i;
        }
        if (best >= 0) {
            *start = e - strlen(strings[best]);
            *end = e;
            return best;
        }
    }
    return -1;
}

static void test_stop_matcher_equals_search_on_random_text(void **state)
{
    (void)state;
    uint64_t seed = 123456789;
    strbuf out;
    strbuf_init(&out);
    for (int32_t round = 0; round < 4000; round++) {
        char strings[4][8];
        const char *pointers[4];
        char text[64];
        int32_t n = 1 + (int32_t)(next_random(&seed) % 4);
        for (int32_t i = 0; i < n; i++) {
            size_t len = 1 + next_random(&seed) % 6;
            for (size_t k = 0; k < len; k++)
                strings[i][k] = (char)('a' + next_random(&seed) % 2);
            strings[i][len] = '\0';
            pointers[i] = strings[i];
        }
        size_t n_text = next_random(&seed) % 40;
        for (size_t k = 0; k < n_text; k++)
            text[k] = (char)('a' + next_random(&seed) % 3);
        text[n_text] = '\0';
        size_t start = n_text;
        size_t end = n_text;
        int32_t want = find_by_definition(strings, n, text, &start, &end);
        bool include_stop = next_random(&seed) % 2;
        stop_matcher *m = make(pointers, n, include_stop);
        int32_t got = feed(m, text, n_text, 1 + next_random(&seed) % 7, &out);
        assert_int_equal(got, want);
        assert_int_equal(out.n_bytes, include_stop ? end : start);
        assert_memory_equal(out.data == NULL ? "" : out.data, text, out.n_bytes);
        stop_matcher_destroy(m);
    }
    strbuf_deinit(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stop_matcher_cuts_before_the_string),
        cmocka_unit_test(test_stop_matcher_overlapping_prefixes),
        cmocka_unit_test(test_stop_matcher_earliest_end_wins),
        cmocka_unit_test(test_stop_matcher_holds_only_what_may_match),
        cmocka_unit_test(test_stop_matcher_lets_go_whole_characters),
        cmocka_unit_test(test_stop_matcher_without_strings_passes_all),
        cmocka_unit_test(test_stop_matcher_refuses_empty_string),
        cmocka_unit_test(test_stop_matcher_equals_search_on_random_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
