/* The rule that decides between loading and computing, and the counter of rule OF11. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/offload/offload_cost.h"
#include "engine/offload/offload_counter.h"

static void test_offload_cost_by_the_formula(void **state)
{
    (void)state;
    const struct {
        double us[3]; /* per load, read and token */
        offload_work work;
        bool is_worth;
    } cases[] = {
        {{0, 0, 0}, {16, 1, 1}, true},   /* nothing is known: try */
        {{1e9, 0, 0}, {16, 1, 0}, true}, /* nor how long computing takes */
        {{1e9, 0, 1}, {16, 1, 0}, false},
        {{0, 1e9, 1}, {16, 1, 1}, true},
        {{160, 0, 10}, {16, 1, 0}, true}, /* equal */
        {{160.1, 0, 10}, {16, 1, 0}, false},
        {{160, 0, 10}, {16, 2, 0}, false}, /* one of somebody else goes first */
        {{10, 0, 10}, {16, 1, 1}, true},   /* the rate of the disk is not known */
        {{10, 150, 10}, {16, 1, 1}, true},
        {{10, 151, 10}, {16, 1, 1}, false},
        {{10, 151, 10}, {16, 1, 0}, true}, /* it takes none */
        {{1, 1, 1e-9}, {2000000000, 1000000000, 0}, false},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        const double *us = cases[i].us;
        offload_rates rates = {us[0], us[1], us[2], .refusals = {{0}}};
        assert_int_equal(offload_is_worth(&rates, &cases[i].work), cases[i].is_worth);
    }
}

static void test_offload_cost_rates(void **state)
{
    (void)state;
    double rate = 0;
    offload_rate_note(&rate, 0, 5);
    offload_rate_note(&rate, 5, 0);
    assert_true(rate == 0);
    offload_rate_note(&rate, 80, 2);
    assert_true(rate == 40);
    offload_rate_note(&rate, 80, 1);
    assert_true(rate == 45);
    offload_rate_note(&rate, 25, 1); /* better ones count for more */
    assert_true(rate == 35);
    for (int i = 0; i < 100; i++)
        offload_rate_note(&rate, 8, 1);
    assert_true(rate >= 8 && rate < 8.01);
}

/* However wrong a measurement was, it is made again. */
static void test_offload_cost_tries_again(void **state)
{
    (void)state;
    offload_rates rates = {.us_per_load = 1e6, .us_per_read = 1e6, .us_per_token = 10};
    const offload_work host = {16, 1, 0}, disk = {16, 1, 1};
    static const int32_t want[] = {4, 8, 16, 32, 64, 128, 256, 256};
    for (size_t i = 0; i < PGD_ARRAY_LEN(want); i++) {
        for (int32_t n = 0; n < want[i]; n++)
            assert_false(offload_should_load(&rates, &disk));
        assert_true(offload_should_load(&rates, &disk));
    }
    /* The two kinds apart. */
    for (int32_t n = 0; n < 4; n++)
        assert_false(offload_should_load(&rates, &host));
    assert_true(offload_should_load(&rates, &host));
    /* Once it is worth it, it is as at first. */
    rates.us_per_load = 1;
    assert_true(offload_should_load(&rates, &host));
    assert_false(offload_should_load(&rates, &disk));
    rates.us_per_load = 1e6;
    for (int32_t n = 0; n < 4; n++)
        assert_false(offload_should_load(&rates, &host));
    assert_true(offload_should_load(&rates, &host));
}

static offload_key key_of(int32_t number, int32_t group_id)
{
    offload_key key = {.group_id = group_id};
    uint64_t word = (uint64_t)number * 0x9E3779B97F4A7C15ULL;
    memcpy(key.hash.bytes, &word, sizeof word);
    return key;
}

static void test_offload_counter_of11(void **state)
{
    (void)state;
    offload_counter *c;
    assert_int_equal(offload_counter_create(&c, 0), PGD_EINVAL);
    assert_int_equal(offload_counter_create(&c, 64), PGD_OK);
    offload_key a = key_of(1, 0), b = key_of(1, 1);
    assert_int_equal(offload_counter_get(c, &a), 0);
    for (uint32_t i = 1; i <= 3; i++) {
        offload_counter_add(c, &a);
        assert_int_equal(offload_counter_get(c, &a), i);
    }
    assert_int_equal(offload_counter_get(c, &b), 0); /* of another group */
    /* Bounded: many others push it out, as long as it is not used. */
    for (int32_t i = 2; i < 5000; i++) {
        offload_key other = key_of(i, 0);
        offload_counter_add(c, &other);
        assert_int_equal(offload_counter_get(c, &other), 1);
        if (i < 2500)
            offload_counter_add(c, &a);
        if (i == 2499)
            assert_int_equal(offload_counter_get(c, &a), 3 + 2498);
    }
    assert_int_equal(offload_counter_get(c, &a), 0);
    offload_counter_destroy(c);
    offload_counter_destroy(NULL);
}

/* The smallest one: a set, whose four keys are all known. */
static void test_offload_counter_keeps_the_last_used(void **state)
{
    (void)state;
    offload_counter *c;
    assert_int_equal(offload_counter_create(&c, 1), PGD_OK);
    for (int32_t i = 1; i <= 4; i++) {
        offload_key key = key_of(i, 0);
        offload_counter_add(c, &key);
    }
    offload_key first = key_of(1, 0), second = key_of(2, 0), fifth = key_of(5, 0);
    offload_counter_add(c, &first);
    offload_counter_add(c, &fifth);
    assert_int_equal(offload_counter_get(c, &first), 2);
    assert_int_equal(offload_counter_get(c, &second), 0);
    assert_int_equal(offload_counter_get(c, &fifth), 1);
    offload_counter_destroy(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_offload_cost_by_the_formula),
        cmocka_unit_test(test_offload_cost_rates),
        cmocka_unit_test(test_offload_cost_tries_again),
        cmocka_unit_test(test_offload_counter_of11),
        cmocka_unit_test(test_offload_counter_keeps_the_last_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
