/* Buckets, quantiles, the Prometheus text form. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/histogram.h"

static void test_histogram_text(void **state)
{
    (void)state;
    static const double bounds[] = {1, 2.5};
    histogram h;
    strbuf b;
    strbuf_init(&b);
    histogram_init(&h, bounds, 2);
    histogram_add(&h, 1);
    histogram_add(&h, 1.5);
    histogram_add(&h, 9);
    histogram_append(&h, &b, "x", "m=\"a\"", 0, HUGE_VAL);
    assert_string_equal(
        b.data, "x_bucket{m=\"a\",le=\"1\"} 1\nx_bucket{m=\"a\",le=\"2.5\"} 2\n"
                "x_bucket{m=\"a\",le=\"+Inf\"} 3\nx_sum{m=\"a\"} 11.5\nx_count{m=\"a\"} 3\n");
    strbuf_deinit(&b);
}

static void test_histogram_shows_a_range_of_bounds(void **state)
{
    (void)state;
    static const double bounds[] = {1, 2, 3, 4};
    histogram h;
    strbuf b;
    strbuf_init(&b);
    histogram_init(&h, bounds, 4);
    for (int i = 1; i <= 5; i++)
        histogram_add(&h, i);
    histogram_append(&h, &b, "x", "", 2, 3);
    assert_string_equal(b.data, "x_bucket{le=\"2\"} 2\nx_bucket{le=\"3\"} 3\n"
                                "x_bucket{le=\"+Inf\"} 5\nx_sum{} 15\nx_count{} 5\n");
    strbuf_deinit(&b);
}

static void test_histogram_quantile(void **state)
{
    (void)state;
    static const double bounds[] = {10, 20, 40};
    histogram h;
    histogram_init(&h, bounds, 3);
    assert_true(histogram_quantile(&h, 0.5) == 0);
    for (int i = 0; i < 100; i++)
        histogram_add(&h, i < 50 ? 5 : 15);
    assert_true(fabs(histogram_quantile(&h, 0.5) - 10) < 1e-9);
    assert_true(fabs(histogram_quantile(&h, 0.75) - 15) < 1e-9);
    histogram_add(&h, 1e9);
    assert_true(histogram_quantile(&h, 1) == 40);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_histogram_text),
                                       cmocka_unit_test(test_histogram_shows_a_range_of_bounds),
                                       cmocka_unit_test(test_histogram_quantile)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
