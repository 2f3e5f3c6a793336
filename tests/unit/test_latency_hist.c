/* Quantiles against a sorted array, the ends of the range, the drawing. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/hash.h"
#include "engine/bench/latency_hist.h"

#define N_VALUES 20011

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void test_latency_hist_empty(void **state)
{
    (void)state;
    latency_hist h;
    strbuf b;
    strbuf_init(&b);
    assert_int_equal(latency_hist_init(&h), PGD_OK);
    assert_true(latency_hist_quantile(&h, 0.5) == 0 && latency_hist_mean(&h) == 0);
    latency_hist_draw(&h, &b, 10, 40);
    assert_int_equal(b.n_bytes, 0);
    strbuf_deinit(&b);
    latency_hist_deinit(&h);
}

static void test_latency_hist_small_values_are_exact(void **state)
{
    (void)state;
    latency_hist h;
    assert_int_equal(latency_hist_init(&h), PGD_OK);
    for (uint64_t v = 1; v <= 100; v++)
        latency_hist_add(&h, v);
    assert_true(latency_hist_quantile(&h, 0.5) == 50);
    assert_true(latency_hist_quantile(&h, 0.501) == 51);
    assert_true(latency_hist_quantile(&h, 0.99) == 99);
    assert_true(latency_hist_quantile(&h, 1) == 100);
    assert_true(latency_hist_quantile(&h, 1e-9) == 1);
    assert_true(latency_hist_mean(&h) == 50.5);
    assert_int_equal(h.min_us, 1);
    assert_int_equal(h.max_us, 100);
    latency_hist_deinit(&h);
}

/* Against the sorted values, over seven decades: at most a thousandth off. */
static void test_latency_hist_matches_sorting(void **state)
{
    (void)state;
    static const double qs[] = {0.001, 0.1, 0.5, 0.9, 0.95, 0.99, 0.9999, 1};
    static uint64_t values[N_VALUES];
    latency_hist h;
    double sum = 0;
    assert_int_equal(latency_hist_init(&h), PGD_OK);
    for (size_t i = 0; i < N_VALUES; i++) {
        double u = (double)(hash_u64(i) >> 11) * 0x1p-53;
        values[i] = (uint64_t)pow(10, u * 7);
        latency_hist_add(&h, values[i]);
        sum += (double)values[i];
    }
    qsort(values, N_VALUES, sizeof(values[0]), compare);
    for (size_t k = 0; k < PGD_ARRAY_LEN(qs); k++) {
        double want = (double)values[(size_t)ceil(qs[k] * N_VALUES) - 1];
        double got = latency_hist_quantile(&h, qs[k]);
        if (fabs(got - want) > want / 1000)
            fail_msg("q=%g: got %g, want %g", qs[k], got, want);
    }
    assert_true(fabs(latency_hist_mean(&h) - sum / N_VALUES) < 1e-6 * sum / N_VALUES);
    latency_hist_deinit(&h);
}

static void test_latency_hist_bucket_edges(void **state)
{
    (void)state;
    /* Alone in its histogram a value is its own minimum and maximum: clamping would hide a wrong
     * bucket, so each edge has a smaller and a larger companion. */
    for (int bit = 10; bit < 40; bit++) {
        for (int d = -1; d <= 1; d++) {
            uint64_t v = (UINT64_C(1) << bit) + (uint64_t)d;
            latency_hist h;
            assert_int_equal(latency_hist_init(&h), PGD_OK);
            latency_hist_add(&h, 0);
            latency_hist_add(&h, v);
            latency_hist_add(&h, UINT64_MAX);
            double got = latency_hist_quantile(&h, 0.5);
            if (fabs(got - (double)v) > (double)v / 1000)
                fail_msg("value %llu: got %g", (unsigned long long)v, got);
            latency_hist_deinit(&h);
        }
    }
}

static void test_latency_hist_huge_values_are_capped(void **state)
{
    (void)state;
    latency_hist h;
    assert_int_equal(latency_hist_init(&h), PGD_OK);
    latency_hist_add(&h, UINT64_MAX);
    assert_int_equal(h.max_us, (UINT64_C(1) << 40) - 1);
    assert_true(latency_hist_quantile(&h, 0.5) == (double)h.max_us);
    latency_hist_deinit(&h);
}

static uint64_t drawn_total(const char *text, int *n_rows)
{
    uint64_t total = 0;
    *n_rows = 0;
    for (const char *line = text; *line != '\0'; line = strchr(line, '\n') + 1) {
        double from;
        double to;
        unsigned long long n;
        assert_int_equal(sscanf(line, " %lf - %lf ms %llu", &from, &to, &n), 3);
        assert_true(from <= to);
        total += n;
        (*n_rows)++;
    }
    return total;
}

static void test_latency_hist_draws_every_value(void **state)
{
    (void)state;
    latency_hist h;
    strbuf b;
    int n_rows;
    strbuf_init(&b);
    assert_int_equal(latency_hist_init(&h), PGD_OK);
    for (uint64_t i = 0; i < 5000; i++)
        latency_hist_add(&h, hash_u64(i) % (i < 100 ? 10 : 3000000));
    latency_hist_draw(&h, &b, 12, 40);
    assert_int_equal(drawn_total(b.data, &n_rows), 5000);
    assert_int_equal(n_rows, 12);
    latency_hist_deinit(&h);

    assert_int_equal(latency_hist_init(&h), PGD_OK);
    for (int i = 0; i < 7; i++)
        latency_hist_add(&h, 0);
    strbuf_reset(&b);
    latency_hist_draw(&h, &b, 12, 40);
    assert_int_equal(drawn_total(b.data, &n_rows), 7);
    assert_int_equal(n_rows, 1);
    strbuf_deinit(&b);
    latency_hist_deinit(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_latency_hist_empty),
        cmocka_unit_test(test_latency_hist_small_values_are_exact),
        cmocka_unit_test(test_latency_hist_matches_sorting),
        cmocka_unit_test(test_latency_hist_bucket_edges),
        cmocka_unit_test(test_latency_hist_huge_values_are_capped),
        cmocka_unit_test(test_latency_hist_draws_every_value),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
