/* The Prometheus text format: what is read, what is refused, that nothing is read beyond the page. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/status/metrics_text.h"

static const char PAGE[] =
    "# HELP a_total Things.\n# TYPE a_total counter\na_total{engine=\"0\",kind=\"x\"} 3\n"
    "a_total{engine=\"1\", kind = \"y\" ,} 4.5e1 1395066363000\n\n"
    "  b 1\r\nns:c{} +Inf\nd NaN\ne{l=\"a\\\"b\\\\c\\nd}\"} -2\nb_more 9\n"
    "h_bucket{le=\"+Inf\"} 2 # {trace=\"1\"} 0.5\nlast 7";

/* From a heap copy, so that a read behind the end shows. */
static pgd_err parse_copy(metrics_text *m, char **copy, const char *text, size_t n, pgd_why *why)
{
    *copy = malloc(n > 0 ? n : 1);
    assert_non_null(*copy);
    memcpy(*copy, text, n);
    return metrics_text_parse(m, *copy, n, why);
}

static void test_metrics_text_reads(void **state)
{
    (void)state;
    metrics_text m;
    char *copy;
    char label[32];
    double v = -1;
    assert_int_equal(parse_copy(&m, &copy, PAGE, sizeof(PAGE) - 1, NULL), PGD_OK);
    assert_int_equal(m.n_samples, 9);
    assert_true(metrics_text_sum(&m, "a_total", &v) && v == 48);
    assert_true(metrics_text_sum(&m, "b", &v) && v == 1);
    assert_true(metrics_text_sum(&m, "ns:c", &v) && isinf(v));
    assert_true(metrics_text_sum(&m, "d", &v) && isnan(v));
    assert_true(metrics_text_sum(&m, "last", &v) && v == 7);
    assert_false(metrics_text_sum(&m, "a", &v));
    assert_false(metrics_text_sum(&m, "a_total2", &v));
    assert_true(v == 7);
    const metrics_sample *s = metrics_text_next(&m, NULL, "a_total");
    s = metrics_text_next(&m, s, "a_total");
    assert_true(s->value == 45);
    assert_true(metrics_text_label(s, "kind", label, sizeof(label)));
    assert_string_equal(label, "y");
    assert_false(metrics_text_label(s, "kin", label, sizeof(label)));
    assert_string_equal(label, "");
    assert_null(metrics_text_next(&m, s, "a_total"));
    s = metrics_text_next(&m, NULL, "e");
    assert_true(metrics_text_label(s, "l", label, sizeof(label)));
    assert_string_equal(label, "a\"b\\c\nd}");
    assert_true(metrics_text_label(s, "l", label, 4)); /* cut */
    assert_string_equal(label, "a\"b");
    assert_false(metrics_text_label(metrics_text_next(&m, NULL, "b"), "l", label, sizeof(label)));
    metrics_text_deinit(&m);
    free(copy);
}

static void test_metrics_text_empty(void **state)
{
    (void)state;
    static const char *const pages[] = {"", "\n", "# only comments", "\r\n \n\t\n"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(pages); i++) {
        metrics_text m;
        char *copy;
        double v;
        assert_int_equal(parse_copy(&m, &copy, pages[i], strlen(pages[i]), NULL), PGD_OK);
        assert_false(metrics_text_sum(&m, "a", &v));
        metrics_text_deinit(&m);
        free(copy);
    }
}

static void test_metrics_text_malformed(void **state)
{
    (void)state;
    static const char *const lines[] = {
        "a",
        "a ",
        "a x",
        "a 1x",
        "1a 1",
        "{} 1",
        "a{ 1",
        "a{b} 1",
        "a{b=} 1",
        "a{b=1} 1",
        "a{b=\"} 1",
        "a{b=\"c\" 1",
        "a{b=\"c\"d=\"e\"} 1",
        "a{b=\"c\"}",
        "a{b=\"\\",
        "a{,} 1",
        "a{1=\"c\"} 1",
        "<html>",
        "{\"error\": 1}",
        "a 11111111111111111111111111111111111111111111111111111111111111111111111111",
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(lines); i++) {
        metrics_text m;
        pgd_why why = {0};
        char page[200];
        char *copy;
        size_t n = (size_t)snprintf(page, sizeof(page), "good 1\n%s", lines[i]);
        if (parse_copy(&m, &copy, page, n, &why) != PGD_EFORMAT)
            fail_msg("taken: %s", lines[i]);
        assert_non_null(strstr(why.text, "line 2"));
        assert_null(m.samples);
        free(copy);
    }
}

static void test_metrics_text_every_prefix(void **state)
{
    (void)state;
    for (size_t n = 0; n < sizeof(PAGE); n++) {
        metrics_text m;
        char *copy;
        if (parse_copy(&m, &copy, PAGE, n, NULL) == PGD_OK)
            metrics_text_deinit(&m);
        free(copy);
    }
}

static void test_metrics_text_is_bounded(void **state)
{
    (void)state;
    size_t n = 4 * (METRICS_TEXT_MAX_SAMPLES + 1);
    char *page = malloc(n);
    metrics_text m;
    assert_non_null(page);
    for (size_t i = 0; i < n; i += 4)
        memcpy(page + i, "a 1\n", 4);
    assert_int_equal(metrics_text_parse(&m, page, n, NULL), PGD_ERANGE);
    assert_int_equal(metrics_text_parse(&m, page, n - 4, NULL), PGD_OK);
    assert_int_equal(m.n_samples, METRICS_TEXT_MAX_SAMPLES);
    metrics_text_deinit(&m);
    free(page);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_metrics_text_reads),
        cmocka_unit_test(test_metrics_text_empty),
        cmocka_unit_test(test_metrics_text_malformed),
        cmocka_unit_test(test_metrics_text_every_prefix),
        cmocka_unit_test(test_metrics_text_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
