/* The head of a request, in pieces of every size. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "engine/http/http_head.h"

#define MAX_BYTES 1000

typedef http_head_fault (*add_fn)(http_head *h, const char *data, size_t n_bytes);

/* text in parts of n_part bytes; the last fault. */
static int feed(http_head *h, add_fn add, const char *text, size_t n_part)
{
    int status = 0;
    for (size_t at = 0; at < strlen(text) && status == 0; at += n_part)
        status = add(h, text + at, PGD_MIN(n_part, strlen(text) - at)).status;
    return status;
}

static void feed_line(http_head *h, const char *name, const char *value, size_t n_part)
{
    assert_int_equal(feed(h, http_head_add_name, name, n_part), 0);
    if (value != NULL)
        assert_int_equal(feed(h, http_head_add_value, value, n_part), 0);
}

static void test_http_head_pieces(void **state)
{
    (void)state;
    http_head h;
    http_head_init(&h, MAX_BYTES);
    for (size_t n_part = 1; n_part < 40; n_part++) {
        http_head_reset(&h);
        assert_int_equal(feed(&h, http_head_add_target, "/v1/completions?key=a?b", n_part), 0);
        feed_line(&h, "Host", "example", n_part);
        feed_line(&h, "X-Api-Key", "first", n_part);
        feed_line(&h, "x-api-key", "second", n_part);
        assert_true(http_head_end(&h));
        assert_string_equal(h.path, "/v1/completions");
        assert_string_equal(h.query, "key=a?b");
        assert_string_equal(http_head_get(&h, "HOST"), "example");
        assert_string_equal(http_head_get(&h, "x-API-key"), "first");
        assert_null(http_head_get(&h, "x-api"));
        assert_null(http_head_get(&h, ""));
    }
    http_head_reset(&h); /* nothing of the one before */
    assert_true(http_head_end(&h));
    assert_string_equal(h.path, "");
    assert_null(http_head_get(&h, "host"));
    http_head_deinit(&h);
}

static void test_http_head_empty_values(void **state)
{
    (void)state;
    http_head h;
    http_head_init(&h, MAX_BYTES);
    assert_int_equal(http_head_add_value(&h, "x", 1).status, 0); /* no name: no line */
    assert_int_equal(feed(&h, http_head_add_target, "/", 1), 0);
    feed_line(&h, "A", NULL, 9);
    assert_int_equal(http_head_add_value(&h, "", 0).status, 0);
    feed_line(&h, "B", "b", 9);
    feed_line(&h, "C", NULL, 9); /* the last, without a value */
    assert_true(http_head_end(&h));
    assert_string_equal(http_head_get(&h, "a"), "");
    assert_string_equal(http_head_get(&h, "b"), "b");
    assert_string_equal(http_head_get(&h, "c"), "");
    assert_string_equal(h.query, "");
    http_head_deinit(&h);
}

static void test_http_head_blanks_behind_values(void **state)
{
    (void)state;
    http_head h;
    http_head_init(&h, MAX_BYTES);
    for (size_t n_part = 1; n_part < 9; n_part++) {
        http_head_reset(&h);
        assert_int_equal(feed(&h, http_head_add_target, "/", 1), 0);
        feed_line(&h, "A", "Bearer key \t ", n_part);
        feed_line(&h, "B", "  ", n_part);
        feed_line(&h, "D ", "last\t", n_part);
        assert_true(http_head_end(&h));
        assert_string_equal(http_head_get(&h, "a"), "Bearer key");
        assert_string_equal(http_head_get(&h, "b"), "");
        assert_string_equal(http_head_get(&h, "d "), "last"); /* a name is kept as it is */
    }
    http_head_deinit(&h);
}

static void test_http_head_targets(void **state)
{
    (void)state;
    static const char *const rows[][3] = {
        {"/a", "/a", ""},
        {"/a?", "/a", ""},
        {"http://h/a?q", "/a", "q"},
        {"HTTP://h:80/", "/", ""},
        {"http://h", "/", ""},
        {"http://h?q", "/", ""},
        {"http://", "/", ""},
        {"*", "*", ""},
        {"?q", "", "q"},
        {"/http://h/a", "/http://h/a", ""},
        {"h:80", "h:80", ""},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        http_head h;
        http_head_init(&h, MAX_BYTES);
        assert_int_equal(feed(&h, http_head_add_target, rows[i][0], 3), 0);
        assert_true(http_head_end(&h));
        assert_string_equal(h.path, rows[i][1]);
        assert_string_equal(h.query, rows[i][2]);
        http_head_deinit(&h);
    }
}

static void test_http_head_limits(void **state)
{
    (void)state;
    http_head h;
    char big[MAX_BYTES + 2];
    memset(big, 'a', sizeof(big));
    http_head_init(&h, MAX_BYTES);
    assert_int_equal(http_head_add_target(&h, big, MAX_BYTES).status, 0);
    assert_int_equal(http_head_add_target(&h, "a", 1).status, 431);
    http_head_reset(&h);
    assert_int_equal(http_head_add_target(&h, big, 500).status, 0);
    assert_int_equal(http_head_add_name(&h, big, 400).status, 0);
    http_head_fault fault = http_head_add_value(&h, big, 100);
    assert_int_equal(fault.status, 431);
    assert_non_null(strstr(fault.text, "max_header_bytes"));
    http_head_reset(&h);
    for (int i = 0; i < HTTP_HEAD_MAX_LINES; i++)
        feed_line(&h, "n", "v", 1);
    fault = http_head_add_name(&h, "n", 1);
    assert_int_equal(fault.status, 431);
    assert_string_equal(fault.text, "too many header lines");
    http_head_deinit(&h);
}

static void test_http_head_methods(void **state)
{
    (void)state;
    assert_true(http_head_is_method("BREW /", 6));
    assert_false(http_head_is_method("BREW", 4));
    assert_false(http_head_is_method("brew /", 6));
    assert_false(http_head_is_method(" /", 2));
    assert_false(http_head_is_method("\x16\x03\x01", 3)); /* TLS */
    assert_true(http_head_is_method("ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEF /", 34));
    assert_false(http_head_is_method("ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFG /", 35));
}

static void test_http_head_ids(void **state)
{
    (void)state;
    static const char *const usable[] = {"a", "~!@#$%^&*()", "0123-abc"};
    static const char *const unusable[] = {"",     "a b", "a\"b", "a\\b", "caf\xC3\xA9",
                                           "\x7F", "a\tb"};
    char id[HTTP_HEAD_ID_BYTES], other[HTTP_HEAD_ID_BYTES], big[HTTP_HEAD_ID_BYTES + 1];
    uint64_t next = UINT64_MAX; /* wraps */
    http_head h;
    http_head_init(&h, MAX_BYTES);
    for (size_t i = 0; i < PGD_ARRAY_LEN(usable) + PGD_ARRAY_LEN(unusable); i++) {
        bool is_usable = i < PGD_ARRAY_LEN(usable);
        const char *given = is_usable ? usable[i] : unusable[i - PGD_ARRAY_LEN(usable)];
        http_head_reset(&h);
        feed_line(&h, "X-Request-Id", given, 5);
        http_head_choose_id(other, &h, &next); /* not all there yet */
        assert_int_equal(strlen(other), 16);
        assert_true(http_head_end(&h));
        http_head_choose_id(id, &h, &next);
        if (is_usable)
            assert_string_equal(id, given);
        else
            assert_true(strspn(id, "0123456789abcdef") == 16 && strcmp(id, other) != 0);
    }
    for (size_t n = HTTP_HEAD_ID_BYTES - 1; n <= HTTP_HEAD_ID_BYTES; n++) {
        http_head_reset(&h);
        memset(big, 'x', n);
        big[n] = '\0';
        feed_line(&h, "x-request-id", big, 999);
        assert_true(http_head_end(&h));
        http_head_choose_id(id, &h, &next);
        assert_int_equal(strlen(id), n == HTTP_HEAD_ID_BYTES - 1 ? n : 16);
    }
    http_head_deinit(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_http_head_pieces),
        cmocka_unit_test(test_http_head_empty_values),
        cmocka_unit_test(test_http_head_targets),
        cmocka_unit_test(test_http_head_limits),
        cmocka_unit_test(test_http_head_methods),
        cmocka_unit_test(test_http_head_ids),
        cmocka_unit_test(test_http_head_blanks_behind_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
